//! Asymmetric Namespace Access: how well each port leads to each group of namespaces (Base 2.0
//! §8.1).
//!
//! A subsystem without groups has no asymmetry and says nothing of it. With groups, each namespace
//! is in one; how a group is reached through a port may change while it is served, and hosts are
//! told.

use super::subsystem::{Namespace, NamespaceView};
use blockmux_wire::nvme::log::{ANA_RGO, AnaGroupDescriptor, AnaHeader, AnaState};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use zerocopy::{FromZeros, IntoBytes};

/// Namespaces that are reached equally well.
#[derive(Debug, Default)]
pub struct AnaGroup {
    /// ANAGRPID, from 1, unique in its subsystem.
    pub id: u32,
    /// Its namespaces, by their identifiers.
    pub namespaces: Vec<u32>,
    /// The state at each port, by the port's identifier; at others it is optimized.
    pub states: BTreeMap<u16, AnaState>,
}

/// The groups of a subsystem.
#[derive(Default)]
pub(crate) struct AnaGroups {
    groups: Vec<AnaGroupStates>,
    changes: AtomicU64,
}

struct AnaGroupStates {
    id: u32,
    /// Of ports that are not as they were at first, or that were named.
    states: Vec<(u16, AtomicU8)>,
    changes: AtomicU64,
}

impl AnaGroups {
    /// These groups, and one more of all namespaces that are in none of them, if there are any.
    /// Says in each namespace where it is. A namespace in two groups is in the first.
    pub(crate) fn new<'a>(
        groups: Vec<AnaGroup>,
        ports: &[u16],
        namespaces: impl Iterator<Item = &'a mut Namespace>,
    ) -> AnaGroups {
        if groups.is_empty() {
            return AnaGroups::default();
        }
        let rest = groups.iter().map(|group| group.id).max().unwrap_or(0).saturating_add(1);
        let mut has_rest = false;
        for namespace in namespaces {
            let own = groups.iter().find(|group| group.namespaces.contains(&namespace.nsid));
            has_rest |= own.is_none();
            namespace.ana_group = own.map_or(rest, |group| group.id);
        }
        let made = groups.iter().map(|group| AnaGroupStates::new(group.id, ports, &group.states));
        let rest = has_rest.then(|| AnaGroupStates::new(rest, ports, &BTreeMap::new()));
        let mut made: Vec<AnaGroupStates> = made.chain(rest).collect();
        made.sort_by_key(|group| group.id);
        AnaGroups { groups: made, changes: AtomicU64::new(0) }
    }

    /// Whether there is a group of that identifier.
    pub(crate) fn has(&self, group: u32) -> bool {
        self.groups.iter().any(|found| found.id == group)
    }

    /// A namespace joins or leaves a group, if there is such a group.
    pub(crate) fn on_member(&self, group: u32) {
        if let Some(group) = self.groups.iter().find(|found| found.id == group) {
            self.count(group);
        }
    }

    pub(crate) fn is_there(&self) -> bool {
        !self.groups.is_empty()
    }

    /// How many groups there are, and the greatest identifier.
    pub(crate) fn count_and_last(&self) -> (u32, u32) {
        (self.groups.len() as u32, self.groups.last().map_or(0, |group| group.id))
    }

    /// How a group is reached through a port.
    pub(crate) fn state(&self, group: u32, port: u16) -> AnaState {
        let found = self.groups.iter().find(|found| found.id == group);
        found.map_or(AnaState::OPTIMIZED, |group| group.state(port))
    }

    /// Sets how a group is reached through a port; answers whether that is news.
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

    /// The log page as seen through a port by who has that view.
    pub(crate) fn log(&self, view: &NamespaceView, port: u16, cdw10: u32) -> Vec<u8> {
        let header = AnaHeader {
            chgcnt: self.changes.load(Ordering::Acquire).into(),
            // At most one for each of MAX_NAMESPACES, and those that are empty.
            nagd: (self.groups.len() as u16).into(),
            ..AnaHeader::new_zeroed()
        };
        let mut page = header.as_bytes().to_vec();
        for group in &self.groups {
            let wants = cdw10 & ANA_RGO == 0;
            let own = view.iter().filter(|namespace| wants && namespace.ana_group == group.id);
            let namespaces: Vec<u32> = own.map(|namespace| namespace.nsid).collect();
            let descriptor = AnaGroupDescriptor {
                agid: group.id.into(),
                nnsid: (namespaces.len() as u32).into(),
                chgcnt: group.changes.load(Ordering::Acquire).into(),
                state: group.state(port).0,
                ..AnaGroupDescriptor::new_zeroed()
            };
            page.extend(descriptor.as_bytes());
            page.extend(namespaces.into_iter().flat_map(u32::to_le_bytes));
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

/// The most ANA groups of one subsystem.
pub const MAX_ANA_GROUPS: usize = 128;
