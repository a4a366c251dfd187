//! The tasks of a session: what is kept of each command until it is answered.

use super::transfer::Transfer;
use crate::exports::VolumeId;
use crate::scsi::{Lun, Response, Task};
use blockmux_wire::iscsi::RESERVED_TAG;
use std::time::{Duration, Instant};

/// One command under way.
pub(super) struct Entry {
    /// The connection that it is allegiant to (RFC 7143, command connection allegiance).
    pub(super) owner: u32,
    pub(super) itt: u32,
    pub(super) lun: Lun,
    /// The initiator's room for data-in, in bytes; `None`: it reads nothing.
    pub(super) data_in: Option<u32>,
    /// The initiator's data-out, in bytes; `None`: it writes nothing.
    pub(super) data_out: Option<u32>,
    /// It came with the I bit, and so outside the window.
    pub(super) is_immediate: bool,
    /// Its device server's part; `None` if it was refused before.
    pub(super) task: Option<Task>,
    pub(super) state: State,
    /// The volume of its I/O in flight.
    pub(super) volume: VolumeId,
    /// The connection whose driver has its I/O in flight, if any has.
    pub(super) in_flight_at: Option<u32>,
    pub(super) transfer: Transfer,
    /// Memory that its data-out was given, in bytes.
    pub(super) memory: usize,
    /// How it ended, while data is still to come that must be received first (RFC 7143 §11.4.2).
    pub(super) response: Option<Response>,
}

/// A task that pauses.
pub(super) struct Pausing {
    pub(super) slot: usize,
    pub(super) time: Duration,
    /// `None` until somebody says what time it is.
    pub(super) until: Option<Instant>,
}

/// What a task waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Data from the initiator.
    Data,
    /// The volume.
    Io,
    /// Another task, or time.
    Wait,
    /// Nothing: it has ended, but data is still to come.
    Ended,
    /// The volume, for a task that was aborted: by the function in that place, if one waits for it.
    Aborted(Option<usize>),
}

/// The table of tasks. A tag is a place in it; places are used again, so that the table grows only to the deepest
/// queue that this initiator ever had.
#[derive(Default)]
pub(super) struct TaskTable {
    slots: Vec<Option<Entry>>,
    /// Of each slot, side by side to be searched: the initiator's tag, or the reserved one.
    itts: Vec<u32>,
    /// Of each slot: how often it was used; tells a late transfer tag from a right one.
    generations: Vec<u8>,
    free: Vec<usize>,
    /// How many came with the I bit.
    immediate: usize,
}

impl TaskTable {
    /// How many came with the I bit.
    pub(super) fn immediate(&self) -> usize {
        self.immediate
    }

    /// A place for a task. The caller makes it there ([`TaskTable::fill`]): it is too large to be moved for nothing.
    #[inline]
    pub(super) fn reserve(&mut self) -> usize {
        match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.slots.push(None);
                self.itts.push(RESERVED_TAG);
                self.generations.push(0);
                self.slots.len().saturating_sub(1)
            }
        }
    }

    /// Begins a task in a place that was reserved for it.
    #[inline]
    pub(super) fn fill(&mut self, slot: usize, entry: Entry) -> Option<&mut Entry> {
        self.immediate = self.immediate.saturating_add(usize::from(entry.is_immediate));
        *self.itts.get_mut(slot)? = entry.itt;
        let place = self.slots.get_mut(slot)?;
        debug_assert!(place.is_none(), "a place has one task");
        Some(place.insert(entry))
    }

    #[inline]
    pub(super) fn get_mut(&mut self, slot: usize) -> Option<&mut Entry> {
        self.slots.get_mut(slot)?.as_mut()
    }

    /// Frees a slot. An entry is too large to be handed out for nothing: take what is wanted of it before.
    #[inline]
    pub(super) fn remove(&mut self, slot: usize) {
        let Some(place) = self.slots.get_mut(slot) else { return };
        let Some(entry) = place else { return };
        self.immediate = self.immediate.saturating_sub(usize::from(entry.is_immediate));
        *place = None;
        if let (Some(itt), Some(generation)) = (self.itts.get_mut(slot), self.generations.get_mut(slot)) {
            *itt = RESERVED_TAG;
            *generation = generation.wrapping_add(1);
        }
        self.free.push(slot);
    }

    /// The task that the initiator calls so and that was not aborted.
    #[inline]
    pub(super) fn find(&self, itt: u32) -> Option<usize> {
        // Every command asks, of up to a whole window of tags and mostly in vain. Without an early end they are
        // compared several at a time.
        let is_taken = self.itts.iter().fold(false, |is_taken, &taken| is_taken | (taken == itt));
        if !is_taken || itt == RESERVED_TAG {
            return None;
        }
        self.itts.iter().position(|&taken| taken == itt)
    }

    /// An aborted task has no name any more: the initiator may use it again.
    pub(super) fn forget_name(&mut self, slot: usize) {
        if let Some(itt) = self.itts.get_mut(slot) {
            *itt = RESERVED_TAG;
        }
    }

    /// Slots of all tasks of a connection, the aborted ones included.
    pub(super) fn slots_of(&self, owner: u32) -> Vec<usize> {
        let is_its = |entry: &Option<Entry>| entry.as_ref().is_some_and(|entry| entry.owner == owner);
        self.slots.iter().enumerate().filter(|(_, entry)| is_its(entry)).map(|(slot, _)| slot).collect()
    }

    /// Whether tasks of a connection's are aborted, and wait for their data rather than for the volume.
    pub(super) fn has_aborted_without_io(&self, owner: u32) -> bool {
        let mut own = self.slots.iter().flatten().filter(|entry| entry.owner == owner);
        own.any(|entry| matches!(entry.state, State::Aborted(_)) && entry.in_flight_at.is_none())
    }

    /// The oldest data-out of a connection's tasks that memory waits for.
    pub(super) fn owed(&self, owner: u32) -> Option<u64> {
        let entries = self.slots.iter().flatten();
        let owing = entries.filter(|entry| entry.owner == owner && entry.state == State::Data);
        owing.filter(|entry| entry.transfer.has_memory()).map(|entry| entry.transfer.given).min()
    }

    /// Slots of all tasks whose I/O is in flight at a connection's driver.
    pub(super) fn slots_in_flight_at(&self, key: u32) -> Vec<usize> {
        let is_its =
            |entry: &Option<Entry>| entry.as_ref().is_some_and(|entry| entry.in_flight_at == Some(key));
        self.slots.iter().enumerate().filter(|(_, entry)| is_its(entry)).map(|(slot, _)| slot).collect()
    }

    /// Slots of the tasks that have not been aborted and are so.
    pub(super) fn select(&self, is_so: impl Fn(&Entry) -> bool) -> Vec<usize> {
        let named = self.slots.iter().enumerate().filter_map(|(slot, entry)| Some((slot, entry.as_ref()?)));
        let live = named.filter(|(_, entry)| !matches!(entry.state, State::Aborted(_)) && is_so(entry));
        live.map(|(slot, _)| slot).collect()
    }

    /// The target transfer tag of a task's R2T: never reserved, because a slot has few bits.
    #[inline]
    pub(super) fn transfer_tag(&self, slot: usize, r2t_sn: u32) -> u32 {
        let generation = self.generations.get(slot).copied().unwrap_or_default();
        u32::from(generation) << 24 | (r2t_sn & 0xff) << 16 | (slot as u32 & 0x7fff)
    }

    /// The slot that a target transfer tag names.
    #[inline]
    pub(super) fn slot_of(ttt: u32) -> usize {
        (ttt & 0x7fff) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl TaskTable {
        fn insert(&mut self, entry: Entry) -> usize {
            let slot = self.reserve();
            assert!(self.fill(slot, entry).is_some());
            slot
        }
    }

    fn entry(itt: u32, is_immediate: bool) -> Entry {
        Entry {
            owner: 0,
            itt,
            lun: Lun::new(0),
            data_in: None,
            data_out: None,
            is_immediate,
            task: None,
            state: State::Io,
            volume: VolumeId(0),
            in_flight_at: None,
            transfer: Transfer::default(),
            memory: 0,
            response: None,
        }
    }

    #[test]
    fn a_task_is_found_by_its_tag_until_it_is_removed_or_loses_its_name() {
        let mut tasks = TaskTable::default();
        let slots: Vec<usize> = (0..100).map(|itt| tasks.insert(entry(itt, false))).collect();
        assert!((0..100).all(|itt| tasks.find(itt) == Some(slots[itt as usize])));
        assert_eq!(
            (tasks.find(100), tasks.find(RESERVED_TAG), tasks.slots.iter().flatten().count()),
            (None, None, 100)
        );
        tasks.remove(slots[7]);
        tasks.forget_name(slots[8]);
        assert_eq!((tasks.find(7), tasks.find(8), tasks.find(9)), (None, None, Some(slots[9])));
        assert_eq!((tasks.find(RESERVED_TAG), tasks.slots.iter().flatten().count()), (None, 99));
    }

    #[test]
    fn a_place_is_used_again_with_other_transfer_tags() {
        let mut tasks = TaskTable::default();
        let slot = tasks.insert(entry(1, true));
        let tag = tasks.transfer_tag(slot, 0);
        assert_eq!(tasks.immediate(), 1);
        tasks.remove(slot);
        // Again in vain.
        tasks.remove(slot);
        assert!(tasks.slots.iter().flatten().count() == 0 && tasks.get_mut(slot).is_none());
        assert_eq!((tasks.insert(entry(2, false)), tasks.immediate()), (slot, 0));
        assert_ne!(tasks.transfer_tag(slot, 0), tag);
        assert_eq!(TaskTable::slot_of(tasks.transfer_tag(slot, 0)), slot);
    }
}
