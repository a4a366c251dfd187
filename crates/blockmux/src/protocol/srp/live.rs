//! The running SRP target ports.

use super::config::WantedSrpTarget;
use super::{SRP, Srp, own_id, own_target};
use crate::protocol::address::ListenerAddress;
use crate::protocol::fabric::{AcceptRdma, FabricPort};
use crate::protocol::frontend::{Frontend, LiveFrontend, Service, TargetsByVolume, VolumeNames};
use crate::protocol::lun_map;
use crate::protocol::policy::{LiveAccess, Policy};
use crate::protocol::units::LogicalUnits;
use blockmux_engine::fabric::{self, FabricOfTcpPorts};
use blockmux_engine::protocol::srp::target::SrpListener;
use blockmux_engine::serve::listener::Serve;
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::scsi::NamedTargets;
use blockmux_proto::srp::node::{SrpNode, SrpPortId, SrpTarget};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The running frontend of SRP.
pub(super) struct LiveSrpTargets {
    node: Arc<SrpNode>,
    exports: Exports,
    units: Arc<LogicalUnits>,
    policy: Policy,
    state: Mutex<SrpState>,
}

/// The parts of the state that depend on the config.
#[derive(Default)]
struct SrpState {
    /// No target is configured: each volume has its own target port.
    has_default_targets: bool,
    /// The target ports before the last change of the config.
    before: NamedTargets<SrpTarget>,
}

impl LiveSrpTargets {
    /// Creates a frontend without target ports; [`LiveFrontend::reconfigure`] adds those of a
    /// config.
    pub(super) fn new(service: &Service<'_>) -> LiveSrpTargets {
        LiveSrpTargets {
            node: Arc::new(SrpNode::new(Vec::new())),
            exports: service.exports.clone(),
            units: service.units.clone(),
            policy: service.policy.clone(),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, SrpState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The target ports that a config describes.
    fn wanted(&self, own: &Srp, places: &[ListenerAddress]) -> Vec<WantedSrpTarget> {
        let named = VolumeNames::all(&self.exports);
        if own.targets.is_empty() {
            let is_served = |named: &&VolumeNames| {
                places.iter().any(|place| self.policy.serves(&SRP, place, &named.export))
            };
            let all = named.iter().filter(is_served);
            return all
                .filter_map(|named| Some(own_target(named, self.units.of(named.volume)?, &self.policy)))
                .collect();
        }
        let ids: BTreeMap<&str, VolumeId> =
            named.iter().map(|named| (named.export.as_str(), named.volume)).collect();
        let unit = |volume: &str| self.units.of(*ids.get(volume)?);
        own.targets.iter().map(|target| target.wanted(unit, &self.policy)).collect()
    }
}

impl LiveFrontend for LiveSrpTargets {
    fn serve(&self, _place: &ListenerAddress) -> Serve {
        fabric::serve::<FabricOfTcpPorts>(SrpListener::new(&self.node, &self.exports))
    }

    fn serve_rdma(&self, _place: &ListenerAddress, port: FabricPort) -> Option<AcceptRdma> {
        Some(port.serving(SrpListener::new(&self.node, &self.exports)))
    }

    fn reconfigure(&self, desired: &dyn Frontend, service: &Service<'_>) {
        let Some(own) = (desired as &dyn Any).downcast_ref::<Srp>() else { return };
        let mut state = self.state();
        *state =
            SrpState { has_default_targets: own.targets.is_empty(), before: self.node.targets.by_name() };
        let wanted = self.wanted(own, service.places);
        let ids: BTreeSet<_> = wanted.iter().map(|target| target.id).collect();
        let stray = state.before.values().filter(|target| !ids.contains(&target.id));
        stray.for_each(|target| self.node.targets.remove(&target.id));
        for target in wanted {
            let same = state.before.get(&target.id);
            let made = target.make(same.map(|same| &**same), &self.node);
            self.node.targets.replace(made);
        }
    }

    /// A session may continue if its initiator would get the same view of the target again.
    fn may_continue(&self, session: &SessionInfo) -> bool {
        let state = self.state();
        let Some(initiator) = SrpPortId::parse(&session.login.initiator) else { return true };
        let Some(id) = SrpPortId::parse(&session.login.target) else { return true };
        let Some(before) = state.before.get(&id) else { return true };
        let now = self.node.targets.find(&id).filter(|now| now.networks.admits(session.peer_ip()));
        let now = now.as_ref().and_then(|now| now.units_for(initiator));
        before.units_for(initiator).zip(now).is_some_and(|(before, now)| Arc::ptr_eq(before, now))
    }

    fn remove(&self, volumes: &BTreeSet<VolumeId>) {
        let has_own = self.state().has_default_targets;
        self.node.targets.remove_volumes(volumes);
        let own = volumes.iter().filter_map(|volume| VolumeNames::of(&self.exports, *volume));
        for named in own.filter(|_| has_own) {
            self.node.targets.remove(&own_id(&named.target));
        }
        self.units.remove(volumes);
    }

    fn access_of(&self, target: &str) -> Option<LiveAccess> {
        let id = SrpPortId::parse(target).filter(|id| id.to_string() == target)?;
        Some(lun_map::access_of(&*self.node.targets.find(&id)?))
    }

    fn targets_by_volume(&self) -> TargetsByVolume {
        lun_map::targets_by_volume(&self.node.targets)
    }
}
