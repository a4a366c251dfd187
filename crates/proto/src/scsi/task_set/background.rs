//! Work of logical units that no session carries on: a sanitize operation whose command was
//! aborted, whose session is gone, or that was answered before it was done; and the seconds after
//! which tokens expire. It is a nexus of its own.

use super::{FunctionDone, Parts, ScsiTransport, TaskEntry, TaskEvent, TaskQueue, TaskRouter, TaskSet};
use crate::exports::VolumeId;
use crate::scsi::{DeviceServer, LogicalUnit, Lun, Nexus, Response, ScsiTarget, Sense, TargetPort};
use blockmux_volume::{Completion, Io, SgList};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A task set whose tasks no initiator has sent, and whose responses go nowhere.
pub struct BackgroundWork {
    tasks: TaskSet<()>,
    queue: TaskQueue,
    /// The task that is carried on.
    current: Option<usize>,
    /// Units for whose tokens seconds are counted.
    clocks: Vec<Weak<LogicalUnit>>,
    next_second: Option<Instant>,
    /// When the latest call came.
    now: Instant,
}

impl BackgroundWork {
    /// What there is to do for the units of this target.
    #[must_use]
    pub fn new(target: Arc<ScsiTarget>, now: Instant) -> BackgroundWork {
        let port = TargetPort { relative_id: 0, group: 0, name: "".into() };
        let server = DeviceServer::new(target, Nexus::iscsi("", [0; 6], port));
        let (tasks, queue) = (TaskSet::new(Some(server)), TaskQueue::default());
        BackgroundWork { tasks, queue, current: None, clocks: Vec::new(), next_second: None, now }
    }

    /// Takes up what has waited, or the next work; `false`: there is none.
    pub fn on_turn(&mut self, now: Instant) -> bool {
        self.now = now;
        self.resume_waiting();
        self.resume_paused();
        self.count_seconds(now);
        while self.current.is_none() {
            let begun = self.tasks.server.as_mut().and_then(DeviceServer::poll_background);
            let Some((task, step)) = begun else { return !self.clocks.is_empty() };
            let entry = TaskEntry { task: Some(task), ..TaskEntry::new(OWNER, 0, Lun::new(0), ()) };
            let slot = self.tasks.insert(entry);
            self.current = Some(slot);
            self.drive(slot, step);
        }
        true
    }

    fn count_seconds(&mut self, now: Instant) {
        let server = self.tasks.server.iter_mut();
        self.clocks.extend(server.flat_map(DeviceServer::claim_token_clocks).map(Arc::downgrade));
        if self.next_second.is_some_and(|end| end > now) {
            return;
        }
        if self.next_second.take().is_some() {
            self.clocks.retain(|unit| unit.upgrade().is_some_and(|unit| unit.count_second()));
        }
        self.next_second = now.checked_add(SECOND).filter(|_| !self.clocks.is_empty());
    }

    /// The next I/O to submit.
    pub fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        self.queue.poll_io()
    }

    /// An I/O is done.
    pub fn on_io(&mut self, done: Completion, now: Instant) {
        self.now = now;
        self.on_volume_io(done);
    }

    /// When to take the next turn, without anything done before.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let retry = if self.queue.is_waiting() { self.now.checked_add(RETRY) } else { None };
        retry.into_iter().chain(self.queue.pause_ends()).chain(self.next_second).min()
    }
}

impl ScsiTransport for BackgroundWork {
    type Progress = ();

    fn parts(&mut self) -> Parts<'_, ()> {
        Parts { tasks: &mut self.tasks, queue: &mut self.queue, owner: OWNER, now: self.now }
    }

    fn fetch(&mut self, _slot: usize, _len: usize) -> Option<Result<SgList, Sense>> {
        Some(Err(Sense::new(SenseKey::HARDWARE_ERROR, Asc::INTERNAL_TARGET_FAILURE)))
    }

    fn is_receiving((): &()) -> bool {
        false
    }

    fn is_fetching(&mut self, _slot: usize) -> bool {
        false
    }

    fn complete(&mut self, slot: usize, _response: &mut Response) {
        self.drop_task(slot);
    }

    fn release(&mut self, _slot: usize) {
        self.current = None;
    }

    fn on_function_done(&mut self, _done: FunctionDone) {}

    fn post(&mut self, _owner: u32, _event: TaskEvent) -> bool {
        false
    }
}

/// There is one driver.
const OWNER: u32 = 1;
/// How long a task waits for others before it is asked again.
const RETRY: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
