//! Over which protocols, and by which targets, volumes are exported.

use crate::protocol::frontend::LiveProtocol;
use crate::protocol::policy::{Policy, PolicyListener};
use crate::protocol::{Frontends, served_protocols};
use blockmux_proto::exports::VolumeId;
use std::sync::Arc;

/// The listeners and targets of a daemon, as they are when this is made.
pub(super) struct ExportedBy {
    policy: Policy,
    listeners: Vec<PolicyListener>,
    frontends: Arc<Frontends>,
    served: Arc<Vec<LiveProtocol>>,
}

impl ExportedBy {
    pub(super) fn new(
        policy: &Policy,
        frontends: Arc<Frontends>,
        served: Arc<Vec<LiveProtocol>>,
    ) -> ExportedBy {
        ExportedBy { policy: policy.clone(), listeners: policy.listeners(), frontends, served }
    }

    /// The names of the protocols over which clients reach the volume, and of its targets there.
    pub(super) fn of(&self, volume: VolumeId, name: &str) -> (Vec<String>, Vec<String>) {
        let (mut protocols, mut targets) = (Vec::new(), Vec::new());
        for (protocol, live) in self.served.iter() {
            let own_targets = live.targets_of(volume);
            let frontend = self.frontends.of(protocol);
            let needs_target = frontend.is_some_and(|frontend| !frontend.target_tables().is_empty());
            if needs_target && own_targets.is_empty() {
                continue;
            }
            let listeners = || self.listeners.iter().filter(|own| own.protocol.served_as() == protocol.name);
            let spoken = served_protocols(protocol)
                .filter(|spoken| listeners().any(|own| self.policy.leads_to(spoken, &own.place, name)));
            let before = protocols.len();
            protocols.extend(spoken.map(|spoken| spoken.name.to_owned()));
            if protocols.len() > before {
                targets.extend(own_targets.into_iter().map(|access| access.target));
            }
        }
        (protocols, targets)
    }
}
