//! Background work of logical units, with a nexus of its own: sanitize operations that lost their
//! command or were answered early, and the token clocks.

use super::{FunctionDone, ScsiTransport, TaskEvent, TaskQueue, TaskRouter, TaskSet, TransportParts};
use crate::exports::VolumeId;
use crate::scsi::{DeviceServer, ItNexus, LogicalUnit, Lun, Response, ScsiTarget, Sense, TargetPort};
use crate::volume_state::NotAdmitted;
use blockmux_volume::{Completion, Io, SgList};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A task set for background work; its tasks come from no initiator and their responses are
/// dropped.
pub struct BackgroundWork {
    tasks: TaskSet<()>,
    queue: TaskQueue,
    /// Slot of the current task.
    current: Option<usize>,
    /// Units whose token clocks run.
    clocks: Vec<Weak<LogicalUnit>>,
    next_second: Option<Instant>,
    /// Time of the latest call.
    now: Instant,
}

impl BackgroundWork {
    /// Background work for the units of this target.
    #[must_use]
    pub fn new(target: Arc<ScsiTarget>, now: Instant) -> BackgroundWork {
        let port = TargetPort { relative_id: 0, group: 0, name: "".into() };
        let server = DeviceServer::new(target, ItNexus::iscsi("", [0; 6], port));
        let (tasks, queue) = (TaskSet::new(Some(server)), TaskQueue::default());
        BackgroundWork { tasks, queue, current: None, clocks: Vec::new(), next_second: None, now }
    }

    /// Continues or starts work; `false` if there is none.
    pub fn on_turn(&mut self, now: Instant) -> bool {
        self.now = now;
        self.resume_waiting();
        self.resume_paused();
        self.count_seconds(now);
        while self.current.is_none() {
            let begun = self.tasks.server.as_mut().and_then(DeviceServer::poll_background);
            let Some((task, step)) = begun else { return !self.clocks.is_empty() };
            let slot = self.tasks.insert(OWNER, 0, Lun::new(0), || ());
            if let Some(entry) = self.tasks.get_mut(slot) {
                entry.task = Some(task);
            }
            self.current = Some(slot);
            self.drive(slot, step);
        }
        true
    }

    fn count_seconds(&mut self, now: Instant) {
        let claimed = self.tasks.server.iter().flat_map(DeviceServer::claim_token_clocks);
        self.clocks.extend(claimed.map(|unit| Arc::downgrade(&unit)));
        if self.next_second.is_some_and(|end| end > now) {
            return;
        }
        if self.next_second.take().is_some() {
            self.clocks.retain(|unit| unit.upgrade().is_some_and(|unit| unit.tokens.tick()));
        }
        self.next_second = now.checked_add(SECOND).filter(|_| !self.clocks.is_empty());
    }

    /// The next I/O to submit, if its range is not locked.
    pub fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        while let Some((volume, io)) = self.queue.poll_io() {
            match self.begin_io(volume, &io, false) {
                Ok(()) => return Some((volume, io)),
                Err(NotAdmitted::Denied(_)) => {}
                Err(NotAdmitted::Locked(_) | NotAdmitted::Draining) => {
                    self.queue.io.push_front((volume, io));
                    return None;
                }
            }
        }
        None
    }

    /// Processes the completion of an I/O.
    pub fn on_io(&mut self, done: Completion, now: Instant) {
        self.now = now;
        self.on_volume_io(done);
    }

    /// Time of the next turn, without an earlier event.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let retry =
            if self.queue.is_waiting() || self.queue.has_io() { self.now.checked_add(RETRY) } else { None };
        retry.into_iter().chain(self.queue.pause_ends()).chain(self.next_second).min()
    }
}

impl ScsiTransport for BackgroundWork {
    type Progress = ();

    fn parts(&mut self) -> TransportParts<'_, ()> {
        TransportParts { tasks: &mut self.tasks, queue: &mut self.queue, owner: OWNER, now: self.now }
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

/// The only driver.
const OWNER: u32 = 1;
/// Time after which a waiting task is resumed.
const RETRY: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
