//! Over which protocols, and by which targets, volumes are exported.

use crate::protocol::frontend::{LiveProtocol, TargetsByVolume};
use crate::protocol::policy::{Policy, PolicyListener};
use crate::protocol::{Frontends, Protocol, served_protocols};
use blockmux_proto::exports::VolumeId;

/// The listeners and targets of a daemon, as they are when this is made.
pub(super) struct ExportedBy<'a> {
    policy: &'a Policy,
    served: Vec<ServedTargets>,
}

/// A protocol that is served.
struct ServedTargets {
    protocol: &'static Protocol,
    /// Whether only volumes of its targets are exported.
    needs_target: bool,
    targets: TargetsByVolume,
    /// Those of the protocol, and of those that are served with it.
    listeners: Vec<PolicyListener>,
}

impl ExportedBy<'_> {
    pub(super) fn new<'a>(
        policy: &'a Policy,
        frontends: &Frontends,
        live_protocols: &[LiveProtocol],
    ) -> ExportedBy<'a> {
        let listeners = policy.listeners();
        let served = live_protocols.iter().map(|(protocol, live)| {
            let frontend = frontends.of(protocol);
            let own = listeners.iter().filter(|own| own.is_of(protocol.name));
            ServedTargets {
                protocol,
                needs_target: frontend.is_some_and(|frontend| !frontend.target_tables().is_empty()),
                targets: live.targets_by_volume(),
                listeners: own.cloned().collect(),
            }
        });
        ExportedBy { policy, served: served.collect() }
    }

    /// The names of the protocols over which clients reach the volume, and of its targets there.
    pub(super) fn of(&self, volume: VolumeId, name: &str) -> (Vec<String>, Vec<String>) {
        let (mut protocols, mut targets) = (Vec::new(), Vec::new());
        for served in &self.served {
            let own_targets = served.targets.get(&volume);
            if served.needs_target && own_targets.is_none() {
                continue;
            }
            let spoken = served_protocols(served.protocol).filter(|spoken| {
                served.listeners.iter().any(|own| self.policy.leads_to(spoken, &own.place, name))
            });
            let before = protocols.len();
            protocols.extend(spoken.map(|spoken| spoken.name.to_owned()));
            if protocols.len() > before {
                targets.extend(own_targets.into_iter().flatten().map(|access| access.target.clone()));
            }
        }
        (protocols, targets)
    }
}
