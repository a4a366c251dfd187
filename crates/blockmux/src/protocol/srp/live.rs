//! The running SRP target ports, and changes of their logical units at run time.

use super::config::WantedSrpTarget;
use super::{SRP, Srp, own_id, own_target};
use crate::protocol::address::ListenerAddress;
use crate::protocol::frontend::{FilesRead, Frontend, LiveFrontend, Service, TargetPlace, VolumeNames};
use crate::protocol::lun_map;
use crate::protocol::policy::{LiveAccess, Policy, PublicAccess};
use crate::protocol::units::{self, LogicalUnits};
use blockmux_engine::protocol::srp::target;
use blockmux_engine::serve::listener::Serve;
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::scsi::UnitChange;
use blockmux_proto::srp::node::{SrpAccess, SrpNode, SrpPortId, SrpTarget};
use serde_json::Value;
use std::collections::BTreeMap;
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
    places: Vec<ListenerAddress>,
    /// No target is configured: each volume has its own target port.
    has_default_targets: bool,
    /// The target ports before the last change of the config.
    before: Vec<Arc<SrpTarget>>,
}

impl LiveSrpTargets {
    /// Creates a frontend without target ports; [`LiveFrontend::reconfigure`] adds those of a
    /// config.
    pub(super) fn new(service: &Service<'_>) -> LiveSrpTargets {
        LiveSrpTargets {
            node: Arc::default(),
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

    fn target(&self, id: &str) -> Result<Arc<SrpTarget>, String> {
        let found = self.node.targets().into_iter().find(|target| target.id.to_string() == id);
        found.ok_or_else(|| format!("no target has the port_id `{id}`"))
    }
}

/// The access that everybody has who is not kept out by the target's networks.
fn live_access(target: &SrpTarget, public: PublicAccess) -> LiveAccess {
    let networks = target.networks.clone();
    let public = public.only_if(networks.is_everyone());
    LiveAccess { target: target.id.to_string(), public, networks }
}

impl LiveFrontend for LiveSrpTargets {
    fn serve(&self, _place: &ListenerAddress) -> Serve {
        target::serve(&self.node, &self.exports)
    }

    fn reconfigure(&self, desired: &dyn Frontend, service: &Service<'_>) {
        let Some(own) = desired.as_any().downcast_ref::<Srp>() else { return };
        let mut state = self.state();
        *state = SrpState {
            places: service.places.to_vec(),
            has_default_targets: own.targets.is_empty(),
            before: self.node.targets(),
        };
        let wanted = self.wanted(own, service.places);
        let ids: Vec<_> = wanted.iter().map(|target| target.id).collect();
        let stray = state.before.iter().filter(|target| !ids.contains(&target.id));
        stray.for_each(|target| self.node.withdraw(target.id));
        for target in wanted {
            let same = state.before.iter().find(|before| before.id == target.id);
            let made = target.make(same.map(|same| &**same), &self.node);
            self.node.replace(made);
        }
    }

    /// A session may continue if its initiator would get the same view of the target again.
    fn may_continue(&self, session: &SessionInfo) -> bool {
        let state = self.state();
        let Some(initiator) = SrpPortId::parse(&session.login.initiator) else { return true };
        let is_meant = |target: &&Arc<SrpTarget>| target.id.to_string() == session.login.target;
        let Some(before) = state.before.iter().find(is_meant) else { return true };
        let now = self.node.targets();
        let now = now.iter().find(is_meant).filter(|now| now.networks.admits(session.peer_ip()));
        let now = now.and_then(|now| now.units_for(initiator));
        before.units_for(initiator).zip(now).is_some_and(|(before, now)| Arc::ptr_eq(before, now))
    }

    fn add(&self, volume: VolumeId) {
        let state = self.state();
        let Some(unit) = self.units.of(volume).filter(|_| state.has_default_targets) else { return };
        let Some(named) = VolumeNames::of(&self.exports, volume) else { return };
        if state.places.iter().any(|place| self.policy.serves(&SRP, place, &named.export)) {
            self.node.add(own_target(&named, unit, &self.policy).make(None, &self.node));
        }
    }

    fn remove(&self, volume: VolumeId) {
        let own = VolumeNames::of(&self.exports, volume).filter(|_| self.state().has_default_targets);
        self.node.remove(volume);
        if let Some(named) = own {
            self.node.withdraw(own_id(&named.target));
        }
        self.units.remove(volume);
    }

    fn access_of(&self, target: &str) -> Option<LiveAccess> {
        let found = self.target(target).ok()?;
        // An attached volume is not in the LUN map of an ACL entry.
        let is_open = |access: &SrpAccess| access.initiator.is_none() && !access.target.has_own_luns();
        Some(live_access(&found, PublicAccess::all_if(found.access.iter().any(is_open))))
    }

    fn targets_of(&self, volume: VolumeId) -> Vec<LiveAccess> {
        let of_access = |access: &SrpAccess| {
            lun_map::public_access_by(&access.target, volume, access.initiator.is_none())
        };
        let of_target = |target: Arc<SrpTarget>| {
            let public = target.access.iter().filter_map(of_access).max()?;
            Some(live_access(&target, public))
        };
        self.node.targets().into_iter().filter_map(of_target).collect()
    }

    fn attach(&self, target: &str, volume: VolumeId, place: &TargetPlace) -> Result<u32, String> {
        let found = self.target(target)?;
        let unit = self.units.of(volume).ok_or("the volume has been removed")?;
        let views = || found.access.iter().map(|access| &access.target);
        let number = units::attach(views, target, &unit, place)?;
        self.node.notify(UnitChange::Added(volume, &unit.1));
        Ok(number)
    }

    fn detach(&self, target: &str, number: u32) -> Result<(), String> {
        let found = self.target(target)?;
        units::detach(found.access.iter().map(|access| &access.target), target, number)
    }

    fn change(&self, target: &str, _what: &Value, _files: FilesRead) -> Result<Option<String>, String> {
        Err(format!("{target}: SRP targets do not support this command"))
    }
}
