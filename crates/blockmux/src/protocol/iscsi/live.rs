//! Targets that are served, and logical units that come and go.

use super::Alua;
use super::node::{Portals, default};
use super::{default_target, name};
use crate::protocol::frontend::{Live, TargetPlace, VolumeNames};
use crate::protocol::policy::LiveAccess;
use crate::protocol::units::Units;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::iscsi::node::{IscsiAccess, IscsiNode, TargetNode};
use blockmux_proto::scsi::{MAX_LUN, UnitChange};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

/// Everything that initiators find.
pub(super) struct LiveTargets {
    pub(super) exports: Exports,
    pub(super) node: Arc<IscsiNode>,
    pub(super) units: Arc<Units>,
    pub(super) portals: Portals,
    /// Each volume is a target of its own.
    pub(super) has_own: bool,
}

impl LiveTargets {
    fn target(&self, name: &str) -> Result<Arc<TargetNode>, String> {
        let found = self.node.targets().into_iter().find(|target| target.name.as_str() == name);
        found.ok_or_else(|| format!("there is no target `{name}`"))
    }

    /// The portal groups of a target that a listener is in, or all.
    fn groups(&self, target: &TargetNode, at: Option<SocketAddr>) -> Result<BTreeSet<u16>, String> {
        let own = target.portals.iter().map(|portal| portal.group_tag);
        let Some(at) = at else { return Ok(own.collect()) };
        match self.portals.group_of(at) {
            Some((group_tag, true)) if target.is_in_group(group_tag) => Ok([group_tag].into()),
            Some((_, false)) => Err(format!(
                "{at} is one portal group with other listeners; a config file with `access_states` gives each its own"
            )),
            _ => Err(format!("no such listener; there is {}", self.portals.in_words())),
        }
    }
}

/// Whether everybody may log in without proof.
fn admits_all(access: &IscsiAccess) -> bool {
    access.initiator.is_none() && access.chap.is_none()
}

impl Live for LiveTargets {
    fn add(&self, volume: VolumeId) {
        let Some(unit) = self.units.of(volume).filter(|_| self.has_own) else { return };
        if let Some(export) = self.exports.get(volume) {
            let exports = &self.exports;
            let Some(target) = default(&export, &unit, exports, &self.portals) else { return };
            self.node.add(target);
            self.node.notify_units(UnitChange::Added(volume, &unit.1));
        }
    }

    fn remove(&self, volume: VolumeId) {
        if let Some(named) = VolumeNames::of(&self.exports, volume).filter(|_| self.has_own) {
            self.node.remove(&name(&default_target(&named.target)));
        }
        for access in self.node.targets().iter().flat_map(|target| &target.access) {
            access.target.remove(|_, other| other == volume);
        }
        self.units.forget(volume);
        self.node.notify_units(UnitChange::Removed(volume));
    }

    fn access_of(&self, target: &str) -> Option<LiveAccess> {
        let found = self.target(target).ok()?;
        Some(LiveAccess { target: target.to_owned(), is_open: found.access.iter().any(admits_all) })
    }

    fn targets_of(&self, volume: VolumeId) -> Vec<LiveAccess> {
        let has = |access: &&IscsiAccess| access.target.units().any(|(_, own, _)| own == volume);
        let of_target = |target: Arc<TargetNode>| {
            let mut own = target.access.iter().filter(has).peekable();
            own.peek()?;
            Some(LiveAccess { target: target.name.as_str().to_owned(), is_open: own.any(admits_all) })
        };
        self.node.targets().into_iter().filter_map(of_target).collect()
    }

    fn attach(&self, target: &str, volume: VolumeId, place: &TargetPlace) -> Result<u32, String> {
        let found = self.target(target)?;
        let (_, unit) = self.units.of(volume).ok_or("there is no such volume any more")?;
        let views = || found.access.iter().map(|access| &access.target);
        let number = match place.number {
            Some(number) => u16::try_from(number).ok().filter(|number| *number <= MAX_LUN),
            // A number that an `acl` names would show the volume to initiators that were promised
            // another.
            None => {
                (0..=MAX_LUN).find(|number| !views().any(|view| view.has(*number) || view.is_named(*number)))
            }
        };
        let number = number.ok_or_else(|| format!("{target}: take a LUN from 0 to {MAX_LUN}"))?;
        if views().any(|view| view.has(number)) {
            return Err(format!("{target}: there is a LUN {number} already; take another number"));
        }
        if !views().any(|view| view.shows(number)) {
            return Err(format!(
                "{target}: nobody would see LUN {number}, for each `acl` names its `luns`; take one of those, or add \
                 {number} in the config file and start again"
            ));
        }
        views().for_each(|view| {
            view.add(number, volume, unit.clone());
        });
        self.node.notify_units(UnitChange::Added(volume, &unit));
        Ok(number.into())
    }

    fn detach(&self, target: &str, number: u32) -> Result<(), String> {
        let found = self.target(target)?;
        let views = found.access.iter().map(|access| &access.target);
        let gone = views.map(|view| view.remove(|own, _| u32::from(own) == number).len()).sum::<usize>();
        if gone == 0 { Err(format!("{target}: there is no LUN {number}")) } else { Ok(()) }
    }

    fn change(&self, target: &str, what: &Value) -> Result<Option<String>, String> {
        let Alua::Alua { state, at, .. } = Alua::deserialize(what).map_err(|error| error.to_string())?;
        let found = self.target(target)?;
        let group_tags = self.groups(&found, at).map_err(|error| format!("{target}: {error}"))?;
        for access in &found.access {
            for group_tag in &group_tags {
                access.target.set_access_state(found.port(access, *group_tag).group, state.word());
            }
        }
        Ok(None)
    }
}
