//! The tasks of a nexus: what is kept of each command until it is answered.

use super::functions::Functions;
use crate::exports::VolumeId;
use crate::scsi::{DeviceServer, Lun, Response, Task};
use crate::volume_state::Drain;
use blockmux_volume::{Io, Slab, Tag};
use std::collections::VecDeque;
use std::time::Instant;

/// One command under way.
pub(crate) struct TaskEntry<P> {
    /// The driver that it belongs to.
    pub(crate) owner: u32,
    /// The initiator's tag.
    pub(crate) tag: u32,
    pub(crate) lun: Lun,
    /// Its device server's part; `None` if it was refused before.
    pub(crate) task: Option<Task>,
    pub(crate) state: TaskState,
    /// The volume of its I/O in flight.
    pub(super) volume: VolumeId,
    /// The driver that has its I/O in flight, if any has.
    pub(super) in_flight_at: Option<u32>,
    /// How it ended, while data is still to come that must be received first.
    pub(super) response: Option<Response>,
    /// The transport's part.
    pub(crate) progress: P,
}

impl<P> TaskEntry<P> {
    /// A command of a driver's that has just come.
    #[inline]
    pub(crate) fn new(owner: u32, tag: u32, lun: Lun, progress: P) -> TaskEntry<P> {
        TaskEntry {
            owner,
            tag,
            lun,
            task: None,
            state: TaskState::Data,
            volume: VolumeId(u32::MAX),
            in_flight_at: None,
            response: None,
            progress,
        }
    }
}

/// What a task waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaskState {
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

/// What one driver of a task set has to submit, to cancel and to ask again.
#[derive(Default)]
pub(crate) struct TaskQueue {
    /// In flight, but not yet taken by the driver.
    pub(super) io: VecDeque<(VolumeId, Io)>,
    /// In flight for nobody, and the driver does not know that yet.
    pub(super) cancels: VecDeque<(VolumeId, Tag)>,
    /// Tasks that wait for other tasks.
    pub(super) waiting: Vec<usize>,
    /// Tasks that leave the volume to others for a while.
    pub(super) paused: Vec<Paused>,
    /// Functions of this driver, by their places, that wait until I/O of other nexuses is over.
    pub(super) drains: Vec<(usize, Drain)>,
    /// I/O that has not completed.
    pub(super) in_flight: usize,
}

/// A task that pauses.
pub(super) struct Paused {
    pub(super) slot: usize,
    pub(super) until: Instant,
}

impl TaskQueue {
    /// The next I/O to submit.
    #[inline]
    pub(crate) fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        self.io.pop_front()
    }

    /// The next I/O to cancel.
    #[inline]
    pub(crate) fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        self.cancels.pop_front()
    }

    /// Whether there is I/O to submit.
    pub(crate) fn has_io(&self) -> bool {
        !self.io.is_empty()
    }

    /// Whether no I/O is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Whether something is to be asked again after each completion, and now and then without one.
    #[inline]
    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty() || !self.drains.is_empty()
    }

    /// When the first pause ends.
    pub(crate) fn pause_ends(&self) -> Option<Instant> {
        self.paused.iter().map(|paused| paused.until).min()
    }

    /// The task in that slot waits for other tasks.
    pub(crate) fn wait(&mut self, slot: usize) {
        self.waiting.push(slot);
    }

    /// The tasks in those slots are not asked again.
    pub(crate) fn forget(&mut self, is_gone: impl Fn(usize) -> bool) {
        self.waiting.retain(|slot| !is_gone(*slot));
        self.paused.retain(|paused| !is_gone(paused.slot));
    }
}

/// The tasks of a nexus, and its device server. A tag of I/O is a slot of the table; slots are used
/// again, so that the table grows only to the deepest queue that this initiator ever had.
pub(crate) struct TaskSet<P> {
    /// `None`: there is none, and no task is started.
    pub(crate) server: Option<DeviceServer>,
    pub(super) functions: Functions,
    entries: Slab<TaskEntry<P>>,
    /// The initiator's tag of each slot, or the reserved one, in one piece of memory to be
    /// searched.
    tags: Vec<u32>,
    /// How often each slot was used: tells a late answer of the initiator's from a right one.
    generations: Vec<u8>,
}

impl<P> TaskSet<P> {
    /// Without tasks.
    pub(crate) fn new(server: Option<DeviceServer>) -> TaskSet<P> {
        TaskSet {
            server,
            functions: Functions::default(),
            entries: Slab::default(),
            tags: Vec::new(),
            generations: Vec::new(),
        }
    }

    /// Whether one more function can wait.
    pub(crate) fn has_room_for_function(&self) -> bool {
        self.functions.free().is_some()
    }

    /// Begins a task; its slot.
    #[inline]
    pub(crate) fn insert(&mut self, entry: TaskEntry<P>) -> usize {
        let tag = entry.tag;
        let slot = self.entries.insert(entry);
        match self.tags.get_mut(slot) {
            Some(free) => *free = tag,
            None => {
                self.tags.push(tag);
                self.generations.push(0);
            }
        }
        slot
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, slot: usize) -> Option<&mut TaskEntry<P>> {
        self.entries.get_mut(slot)
    }

    /// Frees a slot. An entry is too large to be handed out for nothing: take what is wanted of it
    /// before.
    #[inline]
    pub(crate) fn remove(&mut self, slot: usize) {
        if self.entries.get(slot).is_none() {
            return;
        }
        self.entries.discard(slot);
        if let (Some(tag), Some(generation)) = (self.tags.get_mut(slot), self.generations.get_mut(slot)) {
            *tag = NO_TAG;
            *generation = generation.wrapping_add(1);
        }
    }

    /// The task that the initiator calls so and that was not aborted.
    #[inline]
    pub(crate) fn find(&self, tag: u32) -> Option<usize> {
        // Every command asks, of up to a whole window of tags and mostly in vain. Without an early
        // end they are compared several at a time.
        let is_taken = self.tags.iter().fold(false, |is_taken, &taken| is_taken | (taken == tag));
        if !is_taken || tag == NO_TAG {
            return None;
        }
        self.tags.iter().position(|&taken| taken == tag)
    }

    /// An aborted task has no name any more: the initiator may use it again.
    pub(crate) fn forget_name(&mut self, slot: usize) {
        if let Some(tag) = self.tags.get_mut(slot) {
            *tag = NO_TAG;
        }
    }

    /// Slots of all tasks of a driver, the aborted ones included.
    pub(crate) fn slots_of(&self, owner: u32) -> Vec<usize> {
        self.slots_where(|entry| entry.owner == owner)
    }

    /// Whether tasks of a driver's are aborted, and wait for their data rather than for the volume.
    pub(crate) fn has_aborted_without_io(&self, owner: u32) -> bool {
        let mut own = self.entries.iter().filter(|(_, entry)| entry.owner == owner);
        own.any(|(_, entry)| matches!(entry.state, TaskState::Aborted(_)) && entry.in_flight_at.is_none())
    }

    /// The tasks of a driver that wait for data.
    pub(crate) fn fetching(&self, owner: u32) -> impl Iterator<Item = &TaskEntry<P>> {
        let entries = self.entries.iter().map(|(_, entry)| entry);
        entries.filter(move |entry| entry.owner == owner && entry.state == TaskState::Data)
    }

    /// Slots of all tasks whose I/O is in flight at a driver.
    pub(crate) fn slots_in_flight_at(&self, key: u32) -> Vec<usize> {
        self.slots_where(|entry| entry.in_flight_at == Some(key))
    }

    /// Slots of the tasks that have not been aborted and are so.
    pub(crate) fn select(&self, is_so: impl Fn(&TaskEntry<P>) -> bool) -> Vec<usize> {
        self.slots_where(|entry| !matches!(entry.state, TaskState::Aborted(_)) && is_so(entry))
    }

    fn slots_where(&self, is_so: impl Fn(&TaskEntry<P>) -> bool) -> Vec<usize> {
        self.entries.iter().filter(|(_, entry)| is_so(entry)).map(|(slot, _)| slot).collect()
    }

    /// How often a slot was used, modulo 256.
    #[inline]
    pub(crate) fn generation(&self, slot: usize) -> u8 {
        self.generations.get(slot).copied().unwrap_or_default()
    }

    /// The device server, and its part of the task in this slot.
    #[inline]
    pub(super) fn server_and_task(&mut self, slot: usize) -> Option<(&mut DeviceServer, &mut Task)> {
        let task = self.entries.get_mut(slot)?.task.as_mut()?;
        Some((self.server.as_mut()?, task))
    }
}

/// The tag that no task has.
const NO_TAG: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    fn insert(tasks: &mut TaskSet<()>, tag: u32) -> usize {
        tasks.insert(TaskEntry::new(1, tag, Lun::new(0), ()))
    }

    #[test]
    fn a_task_is_found_by_its_tag_until_it_is_removed_or_loses_its_name() {
        let mut tasks = TaskSet::new(None);
        let slots: Vec<usize> = (0..100).map(|tag| insert(&mut tasks, tag)).collect();
        assert!((0..100).all(|tag| tasks.find(tag) == Some(slots[tag as usize])));
        let count = |tasks: &TaskSet<()>| tasks.entries.len();
        assert_eq!((tasks.find(100), tasks.find(NO_TAG), count(&tasks)), (None, None, 100));
        tasks.remove(slots[7]);
        tasks.forget_name(slots[8]);
        assert_eq!((tasks.find(7), tasks.find(8), tasks.find(9)), (None, None, Some(slots[9])));
        assert_eq!((tasks.find(NO_TAG), count(&tasks)), (None, 99));
    }

    #[test]
    fn a_slot_is_used_again_with_another_generation() {
        let mut tasks = TaskSet::new(None);
        let slot = insert(&mut tasks, 1);
        let generation = tasks.generation(slot);
        tasks.remove(slot);
        // Again in vain.
        tasks.remove(slot);
        assert!(tasks.entries.is_empty() && tasks.get_mut(slot).is_none());
        assert_eq!(insert(&mut tasks, 2), slot);
        assert_ne!(tasks.generation(slot), generation);
    }
}
