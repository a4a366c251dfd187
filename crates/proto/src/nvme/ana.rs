//! Asymmetric Namespace Access: the state of each group of namespaces at each port (Base 2.0 §8.1).
//!
//! A subsystem without groups does not report ANA. With groups, each namespace is in one. The state
//! of a group at a port may change while it is served; hosts are notified then. While another
//! process serves a namespace, its group is inaccessible; so such namespaces need groups of their
//! own, and if none are configured, each namespace has one, with its own number.

use super::subsystem::{MAX_NAMESPACES, Namespace, NamespaceView};
use blockmux_wire::nvme::log::{ANA_RGO, AnaGroupDescriptor, AnaHeader, AnaState};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use zerocopy::{FromZeros, IntoBytes};

/// A group of namespaces with the same ANA state at each port.
#[derive(Debug, Default)]
pub struct AnaGroup {
    /// ANAGRPID, from 1, unique in its subsystem.
    pub id: u32,
    /// Identifiers of its namespaces.
    pub namespaces: Vec<u32>,
    /// ANA state by port identifier; optimized at ports that are not listed.
    pub states: BTreeMap<u16, AnaState>,
}

/// The ANA groups of a subsystem.
#[derive(Default)]
pub(crate) struct AnaGroups {
    groups: Vec<AnaGroupStates>,
    /// Each namespace has a group, whose identifier is its own; `groups` is empty.
    are_namespaces: bool,
    changes: AtomicU64,
}

struct AnaGroupStates {
    id: u32,
    /// ANA states of the ports that were configured or have changed.
    states: Vec<(u16, AtomicU8)>,
    changes: AtomicU64,
}

impl AnaGroups {
    /// Creates these groups, and one more, the last, for all namespaces that are in none of them,
    /// now or later. Sets the group of each namespace; a namespace in two groups belongs to the
    /// first.
    pub(crate) fn new<'a>(
        groups: Vec<AnaGroup>,
        ports: &[u16],
        namespaces: impl Iterator<Item = &'a mut Namespace>,
    ) -> AnaGroups {
        if groups.is_empty() {
            return AnaGroups::default();
        }
        let rest = groups.iter().map(|group| group.id).max().unwrap_or(0).saturating_add(1);
        for namespace in namespaces {
            let own = groups.iter().find(|group| group.namespaces.contains(&namespace.nsid));
            namespace.ana_group = own.map_or(rest, |group| group.id);
        }
        let rest = AnaGroupStates::new(rest, ports, &BTreeMap::new());
        let made = groups.iter().map(|group| AnaGroupStates::new(group.id, ports, &group.states));
        let mut made: Vec<AnaGroupStates> = made.chain([rest]).collect();
        made.sort_by_key(|group| group.id);
        AnaGroups { groups: made, ..AnaGroups::default() }
    }

    /// A group for each namespace, now or later.
    pub(crate) fn of_namespaces<'a>(namespaces: impl Iterator<Item = &'a mut Namespace>) -> AnaGroups {
        namespaces.for_each(|namespace| namespace.ana_group = namespace.nsid);
        AnaGroups { are_namespaces: true, ..AnaGroups::default() }
    }

    /// The group of a namespace that is attached later, if it is not named.
    pub(crate) fn of_new(&self, nsid: u32) -> u32 {
        if self.are_namespaces { nsid } else { self.count_and_last().1 }
    }

    /// Whether there is a group with this identifier.
    pub(crate) fn has(&self, group: u32) -> bool {
        self.are_namespaces || self.groups.iter().any(|found| found.id == group)
    }

    /// Counts a namespace that joins or leaves a group as a change of the group.
    pub(crate) fn on_member(&self, group: u32) {
        if let Some(group) = self.groups.iter().find(|found| found.id == group) {
            self.count(group);
        }
    }

    pub(crate) fn is_there(&self) -> bool {
        self.are_namespaces || !self.groups.is_empty()
    }

    /// Number of groups, and the greatest identifier.
    pub(crate) fn count_and_last(&self) -> (u32, u32) {
        if self.are_namespaces {
            return (MAX_NAMESPACES as u32, MAX_NAMESPACES as u32);
        }
        (self.groups.len() as u32, self.groups.last().map_or(0, |group| group.id))
    }

    /// ANA state of a group at a port.
    pub(crate) fn state(&self, group: u32, port: u16) -> AnaState {
        let found = self.groups.iter().find(|found| found.id == group);
        found.map_or(AnaState::OPTIMIZED, |group| group.state(port))
    }

    /// Sets the ANA state of a group at a port; returns whether it has changed.
    pub(crate) fn set(&self, group: u32, port: u16, state: AnaState) -> bool {
        let Some(group) = self.groups.iter().find(|found| found.id == group) else { return false };
        let Some((_, place)) = group.states.iter().find(|(own, _)| *own == port) else { return false };
        if place.swap(state.0, Ordering::AcqRel) == state.0 {
            return false;
        }
        self.count(group);
        true
    }

    fn count(&self, group: &AnaGroupStates) {
        let count = self.changes.fetch_add(1, Ordering::AcqRel).saturating_add(1);
        group.changes.store(count, Ordering::Release);
    }

    /// The ANA log page at a port, for a host with this view.
    pub(crate) fn log(&self, view: &NamespaceView, port: u16, cdw10: u32) -> Vec<u8> {
        // In one pass, because there may be as many groups as namespaces.
        let mut members: BTreeMap<u32, Vec<&Namespace>> = BTreeMap::new();
        view.iter().for_each(|namespace| members.entry(namespace.ana_group).or_default().push(namespace));
        let configured = self.groups.iter();
        let configured =
            configured.map(|group| (group.id, group.changes.load(Ordering::Acquire), group.state(port)));
        let own = members.keys().filter(|_| self.are_namespaces);
        let own = own.map(|group| (*group, 0, AnaState::OPTIMIZED));
        let groups: Vec<_> = configured.chain(own).collect();
        let count_changes = |namespace: &Namespace| namespace.volume_state.serving_changes();
        let changes = view.iter().fold(0, |sum: u64, one| sum.wrapping_add(count_changes(one)));
        let header = AnaHeader {
            chgcnt: self.changes.load(Ordering::Acquire).wrapping_add(changes).into(),
            // At most one for each of `MAX_NAMESPACES`, and the empty ones.
            nagd: (groups.len() as u16).into(),
            ..AnaHeader::new_zeroed()
        };
        let mut page = header.as_bytes().to_vec();
        for (id, own_changes, state) in groups {
            let members = members.get(&id).map_or(&[][..], Vec::as_slice);
            let listed = if cdw10 & ANA_RGO == 0 { members } else { &[] };
            let is_served = members.iter().all(|namespace| namespace.is_served());
            let changes = members.iter().map(|namespace| count_changes(namespace));
            let descriptor = AnaGroupDescriptor {
                agid: id.into(),
                nnsid: (listed.len() as u32).into(),
                chgcnt: changes.fold(own_changes, u64::wrapping_add).into(),
                state: if is_served { state.0 } else { AnaState::INACCESSIBLE.0 },
                ..AnaGroupDescriptor::new_zeroed()
            };
            page.extend(descriptor.as_bytes());
            page.extend(listed.iter().flat_map(|namespace| namespace.nsid.to_le_bytes()));
        }
        page
    }
}

impl AnaGroupStates {
    fn new(id: u32, ports: &[u16], states: &BTreeMap<u16, AnaState>) -> AnaGroupStates {
        let state = |port: u16| states.get(&port).copied().unwrap_or(AnaState::OPTIMIZED);
        let states = ports.iter().map(|&port| (port, AtomicU8::new(state(port).0))).collect();
        AnaGroupStates { id, states, changes: AtomicU64::new(0) }
    }

    fn state(&self, port: u16) -> AnaState {
        let found = self.states.iter().find(|(own, _)| *own == port);
        found.map_or(AnaState::OPTIMIZED, |(_, state)| AnaState(state.load(Ordering::Acquire)))
    }
}

/// Most ANA groups of one subsystem.
pub const MAX_ANA_GROUPS: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exports::VolumeId;
    use crate::names::volume_uuid::VolumeUuid;
    use crate::nvme::nqn::Nqn;
    use crate::nvme::subsystem::Subsystem;
    use crate::volume_state::VolumeState;
    use blockmux_volume::MemVolume;
    use std::sync::Arc;

    #[test]
    fn a_namespace_that_is_attached_later_in_no_group_is_in_the_same_as_at_a_start() {
        let namespace = |nsid: u32| {
            let volume_state = VolumeState::new(Arc::new(MemVolume::new(1 << 20)));
            let uuid = VolumeUuid::of_texts(&[&nsid.to_string()]);
            Namespace::new(nsid, VolumeId(nsid), volume_state, false, uuid)
        };
        let [nqn, host] = ["nqn.a", "nqn.h"].map(|name| Nqn::new(name).unwrap());
        for at_start in [1, 2] {
            let own = (1..=at_start).map(namespace).collect();
            let groups = vec![AnaGroup { id: 5, namespaces: vec![1], states: BTreeMap::new() }];
            let subsystem = Subsystem::new(nqn.clone(), "machine", own, Vec::new()).with_ana(groups, &[1]);
            (at_start + 1..=2).for_each(|nsid| subsystem.attach(namespace(nsid), None).unwrap());
            let view = subsystem.view(&host);
            assert_eq!(view.iter().map(|own| own.ana_group).collect::<Vec<_>>(), [5, 6]);
        }
    }
}
