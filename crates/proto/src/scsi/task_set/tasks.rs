//! The tasks of a nexus, from arrival to response.

use super::functions::PendingResets;
use crate::driver::target::Charge;
use crate::exports::VolumeId;
use crate::scsi::{DeviceServer, Lun, Response, Task, TaskFailure};
use crate::volume_state::{Drain, NotAdmitted};
use blockmux_volume::{Cost, Io, Slab, Tag};
use std::collections::VecDeque;
use std::time::Instant;

/// A command in progress.
pub(crate) struct TaskEntry<P> {
    /// The driver that the task belongs to.
    pub(crate) owner: u32,
    /// The initiator's task tag.
    pub(crate) tag: u32,
    pub(crate) lun: Lun,
    /// State of the device server; `None` if the command was refused.
    pub(crate) task: Option<Task>,
    pub(crate) state: TaskState,
    /// Volume of the I/O in flight.
    pub(super) volume: VolumeId,
    /// The driver that submitted the I/O in flight, if any.
    pub(super) in_flight_at: Option<u32>,
    /// The response, while outstanding data must be received first.
    pub(super) response: Option<Response>,
    /// State of the transport.
    pub(crate) progress: P,
}

impl<P> TaskEntry<P> {
    /// A task that has just arrived at a driver.
    #[inline]
    fn new(owner: u32, tag: u32, lun: Lun, progress: P) -> TaskEntry<P> {
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

/// State of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaskState {
    /// Waits for data from the initiator.
    Data,
    /// Waits for the volume.
    Io,
    /// Waits for another task or a timer.
    Wait,
    /// The task has ended, but data is outstanding.
    Ended,
    /// The task was aborted and waits for the volume; by the function in this place, if one waits.
    Aborted(Option<usize>),
}

/// I/O and waiting tasks of one driver.
#[derive(Default)]
pub(crate) struct TaskQueue {
    /// I/O that the driver has not submitted yet.
    pub(super) io: VecDeque<(VolumeId, Io)>,
    /// I/O of aborted tasks that the driver has not cancelled yet.
    pub(super) cancels: VecDeque<(VolumeId, Tag)>,
    /// Slots of tasks that wait for other tasks.
    pub(super) waiting: Vec<usize>,
    /// Tasks in a pause.
    pub(super) paused: Vec<PausedTask>,
    /// Functions of this driver, by place, that wait for I/O of other nexuses.
    pub(super) drains: Vec<(usize, Drain)>,
    /// Number of I/O requests in flight.
    pub(super) in_flight: usize,
}

/// A task in a pause.
pub(super) struct PausedTask {
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

    /// Whether tasks wait: they are resumed after each completion, and by a retry timer.
    #[inline]
    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty() || !self.drains.is_empty()
    }

    /// End of the first pause.
    pub(crate) fn pause_ends(&self) -> Option<Instant> {
        self.paused.iter().map(|paused| paused.until).min()
    }

    /// Makes a task wait for other tasks.
    pub(crate) fn wait(&mut self, slot: usize) {
        self.waiting.push(slot);
    }

    /// Removes tasks from the waiting lists.
    pub(crate) fn forget(&mut self, is_gone: impl Fn(usize) -> bool) {
        self.waiting.retain(|slot| !is_gone(*slot));
        self.paused.retain(|paused| !is_gone(paused.slot));
    }
}

/// The tasks of a nexus and its device server. Slots serve as I/O tags and are reused, so the table
/// is bounded by the initiator's maximum queue depth.
pub(crate) struct TaskSet<P> {
    /// `None` if no task can be started.
    pub(crate) server: Option<DeviceServer>,
    pub(super) functions: PendingResets,
    entries: Slab<TaskEntry<P>>,
    /// Task tag of each slot, or the reserved tag; contiguous for fast search.
    tags: Vec<u32>,
    /// Number of uses of each slot; detects late answers of the initiator.
    generations: Vec<u8>,
}

impl<P> TaskSet<P> {
    /// An empty task set.
    pub(crate) fn new(server: Option<DeviceServer>) -> TaskSet<P> {
        TaskSet {
            server,
            functions: PendingResets::default(),
            entries: Slab::default(),
            tags: Vec::new(),
            generations: Vec::new(),
        }
    }

    /// Whether another function can wait.
    pub(crate) fn has_room_for_function(&self) -> bool {
        self.functions.free().is_some()
    }

    /// Adds a task that has just arrived at the driver `owner`; returns its slot. `progress` makes
    /// the state of the transport.
    #[inline]
    pub(crate) fn insert(&mut self, owner: u32, tag: u32, lun: Lun, progress: impl FnOnce() -> P) -> usize {
        let slot = self.entries.insert_with(|| TaskEntry::new(owner, tag, lun, progress()));
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

    /// Frees a slot. The entry is not returned, because it is too large to be moved.
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

    /// The task with this tag that was not aborted.
    #[inline]
    pub(crate) fn find(&self, tag: u32) -> Option<usize> {
        // Every command searches the table, mostly in vain. Without an early exit, the comparison
        // is vectorized.
        let is_taken = self.tags.iter().fold(false, |is_taken, &taken| is_taken | (taken == tag));
        if !is_taken || tag == NO_TAG {
            return None;
        }
        self.tags.iter().position(|&taken| taken == tag)
    }

    /// Releases the tag of an aborted task, which the initiator may reuse.
    pub(crate) fn release_tag(&mut self, slot: usize) {
        if let Some(tag) = self.tags.get_mut(slot) {
            *tag = NO_TAG;
        }
    }

    /// Slots of all tasks of a driver, including aborted ones.
    pub(crate) fn slots_of(&self, owner: u32) -> Vec<usize> {
        self.slots_where(|entry| entry.owner == owner)
    }

    /// Whether aborted tasks of a driver wait for data rather than for the volume.
    pub(crate) fn has_aborted_without_io(&self, owner: u32) -> bool {
        let mut own = self.entries.iter().filter(|(_, entry)| entry.owner == owner);
        own.any(|(_, entry)| matches!(entry.state, TaskState::Aborted(_)) && entry.in_flight_at.is_none())
    }

    /// Whether a task that satisfies `predicate` was aborted and waits for its I/O or its data.
    pub(crate) fn is_aborting(&self, predicate: impl Fn(&TaskEntry<P>) -> bool) -> bool {
        let mut entries = self.entries.iter().map(|(_, entry)| entry);
        entries.any(|entry| matches!(entry.state, TaskState::Aborted(_)) && predicate(entry))
    }

    /// Tasks of a driver that wait for data.
    pub(crate) fn fetching(&self, owner: u32) -> impl Iterator<Item = &TaskEntry<P>> {
        let entries = self.entries.iter().map(|(_, entry)| entry);
        entries.filter(move |entry| entry.owner == owner && entry.state == TaskState::Data)
    }

    /// Slots of all tasks whose I/O a driver has in flight.
    pub(crate) fn slots_in_flight_at(&self, key: u32) -> Vec<usize> {
        self.slots_where(|entry| entry.in_flight_at == Some(key))
    }

    /// Slots of the tasks that were not aborted and satisfy `predicate`.
    pub(crate) fn select(&self, predicate: impl Fn(&TaskEntry<P>) -> bool) -> Vec<usize> {
        self.slots_where(|entry| !matches!(entry.state, TaskState::Aborted(_)) && predicate(entry))
    }

    fn slots_where(&self, predicate: impl Fn(&TaskEntry<P>) -> bool) -> Vec<usize> {
        self.entries.iter().filter(|(_, entry)| predicate(entry)).map(|(slot, _)| slot).collect()
    }

    /// Number of uses of a slot, modulo 256.
    #[inline]
    pub(crate) fn generation(&self, slot: usize) -> u8 {
        self.generations.get(slot).copied().unwrap_or_default()
    }

    /// Whether a task with this tag exists on this unit; both identify it (SAM-5, I_T_L_Q nexus).
    pub(crate) fn has_task(&self, tag: u32, lun: Lun) -> bool {
        let entry = self.find(tag).and_then(|slot| self.entries.get(slot));
        entry.is_some_and(|entry| entry.lun.names_same_unit(lun))
    }

    /// Fails a task because of its data; its response waits for the rest of the data.
    pub(crate) fn fail(&mut self, slot: usize, response: Response) {
        if let Some(entry) = self.get_mut(slot)
            && entry.state == TaskState::Data
        {
            entry.task = None;
            entry.state = TaskState::Ended;
            entry.response = Some(response);
        }
    }

    /// What limits charge for an I/O.
    pub(crate) fn charge(&mut self, io: &Io) -> Charge {
        let task = self.get_mut(slot_of(io.tag)).and_then(|entry| entry.task.as_mut());
        Charge { cost: task.map_or_else(|| Cost::of(io), |task| DeviceServer::cost(task, io)), station: None }
    }

    /// Admits an I/O; a failure of `None` says that its task was aborted.
    #[inline]
    pub(super) fn admit(
        &mut self,
        volume: VolumeId,
        io: &Io,
        is_late: bool,
    ) -> Result<(), NotAdmitted<Option<TaskFailure>>> {
        let entry = self.entries.get_mut(slot_of(io.tag)).filter(|entry| entry.state == TaskState::Io);
        match (&mut self.server, entry.and_then(|entry| entry.task.as_mut())) {
            (Some(server), Some(task)) => {
                server.admit(task, volume, io, is_late).map_err(|why| why.map(Some))
            }
            _ => Err(NotAdmitted::Denied(None)),
        }
    }

    /// The device server, and the task in this slot for its next step; `None` if there is no such
    /// task. The step is not returned through here, because it is too large to be moved.
    #[inline]
    pub(super) fn server_and_task(&mut self, slot: usize) -> Option<(&mut DeviceServer, &mut Task)> {
        let task = self.entries.get_mut(slot)?.task.as_mut()?;
        Some((self.server.as_mut()?, task))
    }
}

/// The slot of the task that has this I/O.
#[inline]
pub(super) fn slot_of(tag: Tag) -> usize {
    usize::try_from(tag.0).unwrap_or(usize::MAX)
}

/// Tag of free slots.
const NO_TAG: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    fn insert(tasks: &mut TaskSet<()>, tag: u32) -> usize {
        tasks.insert(1, tag, Lun::new(0), || ())
    }

    #[test]
    fn a_task_is_found_by_its_tag_until_it_is_removed_or_loses_its_name() {
        let mut tasks = TaskSet::new(None);
        let slots: Vec<usize> = (0..100).map(|tag| insert(&mut tasks, tag)).collect();
        assert!((0..100).all(|tag| tasks.find(tag) == Some(slots[tag as usize])));
        let count = |tasks: &TaskSet<()>| tasks.entries.len();
        assert_eq!((tasks.find(100), tasks.find(NO_TAG), count(&tasks)), (None, None, 100));
        tasks.remove(slots[7]);
        tasks.release_tag(slots[8]);
        assert_eq!((tasks.find(7), tasks.find(8), tasks.find(9)), (None, None, Some(slots[9])));
        assert_eq!((tasks.find(NO_TAG), count(&tasks)), (None, 99));
    }

    #[test]
    fn a_reused_slot_has_another_generation() {
        let mut tasks = TaskSet::new(None);
        let slot = insert(&mut tasks, 1);
        let generation = tasks.generation(slot);
        tasks.remove(slot);
        // A second removal has no effect.
        tasks.remove(slot);
        assert!(tasks.entries.is_empty() && tasks.get_mut(slot).is_none());
        assert_eq!(insert(&mut tasks, 2), slot);
        assert_ne!(tasks.generation(slot), generation);
    }
}
