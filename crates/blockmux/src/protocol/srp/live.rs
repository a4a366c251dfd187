//! SRP target ports that are served, and logical units that come and go.

use super::{SRP, own_target};
use crate::protocol::frontend::{Live, TargetPlace, VolumeNames};
use crate::protocol::policy::{ListenerAddress, LiveAccess, Policy};
use crate::protocol::units::Units;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::scsi::{MAX_LUN, UnitChange};
use blockmux_proto::srp::node::{SrpAccess, SrpNode, SrpTarget};
use serde_json::Value;
use std::sync::Arc;

/// Everything that initiators can log in to.
pub(super) struct LiveSrpTargets {
    pub(super) node: Arc<SrpNode>,
    pub(super) exports: Exports,
    pub(super) units: Arc<Units>,
    pub(super) places: Vec<ListenerAddress>,
    pub(super) policy: Policy,
    /// Each volume is a target port of its own.
    pub(super) has_own: bool,
}

impl LiveSrpTargets {
    fn target(&self, id: &str) -> Result<Arc<SrpTarget>, String> {
        let found = self.node.targets().into_iter().find(|target| target.id.to_string() == id);
        found.ok_or_else(|| format!("there is no target `{id}`"))
    }
}

fn access(
    target: &SrpTarget,
    mut entries: impl Iterator<Item = impl std::ops::Deref<Target = SrpAccess>>,
) -> LiveAccess {
    let is_open = entries.any(|access| access.initiator.is_none());
    LiveAccess { target: target.id.to_string(), is_open }
}

impl Live for LiveSrpTargets {
    fn add(&self, volume: VolumeId) {
        let Some(unit) = self.units.of(volume).filter(|_| self.has_own) else { return };
        let Some(named) = VolumeNames::of(&self.exports, volume) else { return };
        if self.places.iter().any(|place| self.policy.serves(&SRP, place, &named.export)) {
            self.node.add(own_target(&named, unit.clone()));
            self.node.tell(UnitChange::Added(volume, &unit.1));
        }
    }

    fn remove(&self, volume: VolumeId) {
        self.node.remove(volume);
        self.units.forget(volume);
    }

    fn access_of(&self, target: &str) -> Option<LiveAccess> {
        let found = self.target(target).ok()?;
        Some(access(&found, found.access.iter()))
    }

    fn targets_of(&self, volume: VolumeId) -> Vec<LiveAccess> {
        let has = |access: &&SrpAccess| access.target.units().any(|(_, own, _)| own == volume);
        let targets = self.node.targets().into_iter();
        let with_it = targets.filter(|target| target.access.iter().any(|access| has(&access)));
        with_it.map(|target| access(&target, target.access.iter().filter(has))).collect()
    }

    fn attach(&self, target: &str, volume: VolumeId, place: &TargetPlace) -> Result<u32, String> {
        let found = self.target(target)?;
        let (_, unit) = self.units.of(volume).ok_or("there is no such volume any more")?;
        let views = || found.access.iter().map(|access| &access.target);
        let is_free = |number: &u16| !views().any(|view| view.has(*number) || view.is_named(*number));
        let number = match place.number {
            Some(number) => u16::try_from(number).ok().filter(|number| *number <= MAX_LUN),
            None => (0..=MAX_LUN).find(is_free),
        };
        let number = number.ok_or_else(|| format!("{target}: take a LUN from 0 to {MAX_LUN}"))?;
        if views().any(|view| view.has(number)) {
            return Err(format!("{target}: there is a LUN {number} already; take another number"));
        }
        if !views().any(|view| view.shows(number)) {
            return Err(format!(
                "{target}: nobody would see LUN {number}, for each `acl` names its `luns`; add {number} in the config file"
            ));
        }
        for view in views() {
            view.add(number, volume, unit.clone());
        }
        self.node.tell(UnitChange::Added(volume, &unit));
        Ok(number.into())
    }

    fn detach(&self, target: &str, number: u32) -> Result<(), String> {
        let found = self.target(target)?;
        let views = found.access.iter().map(|access| &access.target);
        let gone: usize = views.map(|view| view.remove(|own, _| u32::from(own) == number).len()).sum();
        if gone == 0 { Err(format!("{target}: there is no LUN {number}")) } else { Ok(()) }
    }

    fn change(&self, target: &str, _what: &Value) -> Result<Option<String>, String> {
        Err(format!("{target}: nothing else of an SRP target can be changed while it is served"))
    }
}
