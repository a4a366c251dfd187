//! The running iSCSI targets.

use super::node::{Portals, wanted};
use super::{Iscsi, default_target, name};
use crate::protocol::address::ListenerAddress;
use crate::protocol::configured::HasVolumes;
use crate::protocol::fabric::{AcceptRdma, FabricPort};
use crate::protocol::frontend::{Frontend, LiveFrontend, Service, TargetsByVolume, VolumeNames};
use crate::protocol::lun_map;
use crate::protocol::policy::LiveAccess;
use crate::protocol::units::LogicalUnits;
use blockmux_engine::protocol::iscsi::target::{self, IscsiListener};
use blockmux_engine::serve::listener::Serve;
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{IscsiNode, TargetNode};
use blockmux_proto::scsi::NamedTargets;
use std::any::Any;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The running frontend of iSCSI.
pub(super) struct LiveTargets {
    pub(super) exports: Exports,
    pub(super) node: Arc<IscsiNode>,
    pub(super) units: Arc<LogicalUnits>,
    state: Mutex<IscsiState>,
}

/// The parts of the state that depend on the config.
struct IscsiState {
    portals: Portals,
    /// No target is configured: each volume has its own target.
    has_default_targets: bool,
    /// The targets before the last change of the config.
    before: NamedTargets<TargetNode>,
}

impl LiveTargets {
    /// Creates a frontend without targets; [`LiveFrontend::reconfigure`] adds those of a config.
    pub(super) fn new(service: &Service<'_>, node: IscsiNode) -> LiveTargets {
        let portals = Portals::new(service, &[], None);
        LiveTargets {
            exports: service.exports.clone(),
            node: Arc::new(node),
            units: service.units.clone(),
            state: Mutex::new(IscsiState {
                portals,
                has_default_targets: true,
                before: NamedTargets::<TargetNode>::default(),
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, IscsiState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a listener: each of the frontend has one.
    fn number_of(&self, place: &ListenerAddress) -> u16 {
        let state = self.state();
        place.tcp().and_then(|tcp| state.portals.number_of(tcp)).unwrap_or(u16::MAX)
    }
}

impl LiveFrontend for LiveTargets {
    fn serve(&self, place: &ListenerAddress) -> Serve {
        target::serve(&self.node, &self.exports, self.number_of(place))
    }

    fn serve_rdma(&self, place: &ListenerAddress, port: FabricPort) -> Option<AcceptRdma> {
        Some(port.serving(IscsiListener::new(&self.node, &self.exports, self.number_of(place))))
    }

    fn reconfigure(&self, desired: &dyn Frontend, service: &Service<'_>) {
        let Some(own) = (desired as &dyn Any).downcast_ref::<Iscsi>() else { return };
        let mut state = self.state();
        let IscsiState { portals, has_default_targets, before } = &mut *state;
        *portals = Portals::new(service, &own.targets, Some(portals));
        *has_default_targets = own.targets.is_empty();
        *before = self.node.targets.by_name();
        let removable = own.targets.iter().filter(|target| target.removable);
        self.units.set_removable(removable.flat_map(|target| target.volumes().map(str::to_owned)));
        self.node.set_discovery_chap(own.discovery.clone());
        let wanted = wanted(own, &self.exports, &self.units, portals);
        let names: BTreeSet<Name> = wanted.iter().map(|target| target.name.clone()).collect();
        let stray = before.values().filter(|target| !names.contains(&target.name));
        stray.for_each(|target| self.node.targets.remove(&target.name));
        for target in wanted {
            let same = before.get(&target.name).map(|target| &**target);
            let made = target.make(same, &self.node, portals);
            self.node.targets.replace(made);
        }
    }

    /// A session may continue if a new login of its initiator would get the same view of the target
    /// through the same port, and its authentication is sufficient for the new config.
    fn may_continue(&self, session: &SessionInfo) -> bool {
        let state = self.state();
        let Ok(initiator) = Name::new(&session.login.initiator) else { return true };
        let Ok(name) = Name::new(&session.login.target) else { return true };
        let Some(before) = state.before.get(&name) else { return true };
        let now = self.node.targets.find(&name).filter(|now| now.redirect.is_none());
        let Some(now) = now else { return false };
        let listener = session.listener.parse().ok().and_then(|tcp| state.portals.number_of(tcp));
        let leads = listener.is_none_or(|listener| {
            now.group_at(listener).is_some_and(|tag| before.group_at(listener) == Some(tag))
        });
        let is_allowed = now.networks.admits(session.peer_ip());
        match before.access_of(&initiator).zip(now.access_of(&initiator)) {
            Some((before, now)) => {
                let asks_more = before.chap.is_none() && now.chap.is_some();
                leads && !asks_more && is_allowed && Arc::ptr_eq(&before.target, &now.target)
            }
            None => false,
        }
    }

    fn remove(&self, volumes: &BTreeSet<VolumeId>) {
        let has_own = self.state().has_default_targets;
        let own = volumes.iter().filter_map(|volume| VolumeNames::of(&self.exports, *volume));
        for named in own.filter(|_| has_own) {
            self.node.targets.remove(&name(&default_target(&named.target)));
        }
        self.node.targets.remove_volumes(volumes);
        self.units.remove(volumes);
    }

    fn access_of(&self, target: &str) -> Option<LiveAccess> {
        Some(lun_map::access_of(&*self.node.targets.find(&Name::new(target).ok()?)?))
    }

    fn targets_by_volume(&self) -> TargetsByVolume {
        lun_map::targets_by_volume(&self.node.targets)
    }
}
