//! One core's virtqueue, which its channels share.

use super::back_end::BackEndError;
use super::state::DiskState;
use crate::core::reactor::{EngineCore, Progress, Task, WakeOnEvent};
use crate::core::ring::Registration;
use crate::remote::OverdueTimer;
use crate::sys::shared_event::{EventSender, SharedEvent};
use crate::volume::core_queues::ChannelCompletions;
use blockmux_proto::virtio::{BlkDriver, RemoteDiskError};
use blockmux_volume::{Completion, Core, Io, IoError, Slab, Tag, Waker};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A queue and the requests of its channels.
pub(super) struct CoreQueue {
    /// Requests that have not completed, by the tag that the driver has.
    requests: Slab<ChannelRequest>,
    /// Requests that the driver has not taken.
    pending: VecDeque<Io>,
    /// Absent while there is no back end.
    running: Option<RunningDriver>,
    /// The back end has not come back in time: requests fail.
    has_failed: bool,
    /// The volume is closed.
    pub(super) has_ended: bool,
    disk: Arc<DiskState>,
    /// Identifies it among the users of the disk's virtqueues.
    pub(super) number: u64,
    overdue: OverdueTimer,
    core: Rc<EngineCore>,
    waker: Waker,
    registration: Registration,
    armed: Rc<WakeOnEvent>,
}

/// A driver and its event descriptors.
pub(super) struct RunningDriver {
    driver: BlkDriver,
    kick: EventSender,
    call: SharedEvent,
    has_answered: bool,
}

impl RunningDriver {
    pub(super) fn new(driver: BlkDriver, kick: EventSender, call: SharedEvent) -> RunningDriver {
        RunningDriver { driver, kick, call, has_answered: false }
    }
}

struct ChannelRequest {
    tag: Tag,
    of: Rc<ChannelCompletions>,
}

impl CoreQueue {
    /// Starts the task of a queue on this core, which is the user `number` of the disk's
    /// virtqueues.
    pub(super) fn spawn(core: &Rc<EngineCore>, disk: Arc<DiskState>, number: u64) -> Rc<RefCell<CoreQueue>> {
        let mut made = None;
        core.spawn(|waker| {
            let armed = WakeOnEvent::new(waker);
            let queue = Rc::new(RefCell::new(CoreQueue {
                requests: Slab::with_capacity(INITIAL_REQUESTS),
                pending: VecDeque::new(),
                running: None,
                has_failed: false,
                has_ended: false,
                overdue: OverdueTimer::new(disk.request_timeout),
                disk,
                number,
                core: core.clone(),
                waker: waker.clone(),
                registration: core.register(armed.clone()),
                armed,
            }));
            made = Some(queue.clone());
            CoreQueueTask(queue)
        });
        made.expect("spawn calls its argument")
    }

    /// Takes a request of a channel.
    #[inline]
    pub(super) fn submit(&mut self, mut io: Io, of: &Rc<ChannelCompletions>) {
        if self.has_failed || self.has_ended {
            let completion = Completion { tag: io.tag, result: Err(IoError::PathLost) };
            return of.done.borrow_mut().push(completion);
        }
        let request = ChannelRequest { tag: io.tag, of: of.clone() };
        io.tag = Tag(self.requests.insert(request) as u64);
        self.pending.push_back(io);
    }

    /// Takes what the back end has answered, and does as [`CoreQueue::send`].
    #[inline]
    pub(super) fn turn(&mut self, own: Option<&Rc<ChannelCompletions>>) -> bool {
        let Some(RunningDriver { driver, has_answered, .. }) = &mut self.running else { return false };
        match driver.reap() {
            Ok(true) if !*has_answered => self.on_first_answer(),
            Ok(_) => {}
            Err(error) => return self.give_up(error, own),
        }
        self.send(own)
    }

    #[cold]
    fn on_first_answer(&mut self) {
        if let Some(running) = &mut self.running {
            running.has_answered = true;
        }
        self.disk.has_answered.store(true, Ordering::Relaxed);
    }

    /// The back end makes no sense: what it has answered before counts, and the other requests wait
    /// for another connection. Returns whether anything has completed.
    #[cold]
    fn give_up(&mut self, error: RemoteDiskError, own: Option<&Rc<ChannelCompletions>>) -> bool {
        let has_completed = self.distribute(own);
        self.remove();
        self.disk.complain(error.into());
        has_completed
    }

    /// Sends what can be sent, and distributes what has completed; wakes the users of all channels
    /// but `own`. Returns whether anything has completed. Answers of the back end are left: a
    /// channel that is kicked is not polled again unless it is woken.
    #[inline]
    pub(super) fn send(&mut self, own: Option<&Rc<ChannelCompletions>>) -> bool {
        let Some(RunningDriver { driver, kick, .. }) = &mut self.running else { return false };
        while driver.room() > 0
            && let Some(io) = self.pending.pop_front()
        {
            driver.submit(io);
        }
        if driver.send() {
            kick.signal();
        }
        if driver.owes_answer()
            && let Some(tick) = self.overdue.watch(|| self.core.now())
        {
            self.core.wake_at(tick, &self.waker);
        }
        self.distribute(own)
    }

    /// Gives completions to their channels; returns whether there was any.
    #[inline]
    fn distribute(&mut self, own: Option<&Rc<ChannelCompletions>>) -> bool {
        let Some(RunningDriver { driver, .. }) = &mut self.running else { return false };
        let mut has_completed = false;
        while let Some(completion) = driver.poll_done() {
            has_completed = true;
            complete(&mut self.requests, completion, own);
        }
        has_completed
    }

    /// A back end serves the queue from now on.
    pub(super) fn install(&mut self, running: RunningDriver) {
        self.remove();
        self.has_failed = false;
        self.running = Some(running);
        self.waker.wake();
    }

    /// The back end is gone: requests wait for the next one.
    pub(super) fn remove(&mut self) {
        if let Some(mut running) = self.running.take() {
            self.armed.disarm(&self.registration);
            self.overdue.on_loss();
            for io in running.driver.take_unfinished().into_iter().rev() {
                self.pending.push_front(io);
            }
        }
    }

    /// Whether any request has not completed.
    pub(super) fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// A channel is closed; it may have been the last one.
    pub(super) fn on_channel_closed(&self) {
        if self.core.is_stopping() {
            self.waker.wake();
        }
    }

    /// The back end does not come back: all requests fail.
    pub(super) fn fail(&mut self) {
        self.remove();
        self.has_failed = true;
        for io in std::mem::take(&mut self.pending) {
            complete(&mut self.requests, Completion { tag: io.tag, result: Err(IoError::PathLost) }, None);
        }
        // Its core may wait for that to end.
        self.waker.wake();
    }

    /// The volume is closed.
    pub(super) fn end(&mut self) {
        self.fail();
        self.has_ended = true;
    }

    /// The device has another size, in bytes.
    pub(super) fn resize(&mut self, size: u64) {
        if let Some(running) = &mut self.running {
            running.driver.resize(size);
        }
    }

    /// Looks whether an answer is overdue, if it is time to.
    #[inline]
    fn check_overdue(&mut self) {
        let Some(RunningDriver { driver, .. }) = &mut self.running else { return };
        if self.overdue.is_due(|| self.core.now()) && self.overdue.on_tick(driver.tick(), false).is_some() {
            let timeout = self.disk.request_timeout.unwrap_or_default();
            self.disk.complain(BackEndError::Overdue(timeout));
        }
    }

    /// Waits for the back end's next notification.
    fn park(&mut self) {
        let Some(running) = &mut self.running else { return };
        // Cleared before the ring is looked at, so that a later answer notifies again.
        running.call.clear();
        let is_late = running.driver.ask_for_calls();
        self.armed.arm(&self.registration, running.call.as_raw_fd(), libc::POLLIN, 0);
        if is_late {
            self.waker.wake();
        }
    }
}

impl Drop for CoreQueue {
    fn drop(&mut self) {
        self.disk.give_back(self.number);
    }
}

/// Gives a completion to its channel, and wakes its user unless that is `own`.
#[inline]
fn complete(
    requests: &mut Slab<ChannelRequest>,
    completion: Completion,
    own: Option<&Rc<ChannelCompletions>>,
) {
    let Some(request) = requests.remove(completion.tag.0 as usize) else { return };
    request.of.push(Completion { tag: request.tag, ..completion }, own);
}

/// Looks for answers while no channel does. It ends with the volume, or when its core is to end and
/// no channel is left.
struct CoreQueueTask(Rc<RefCell<CoreQueue>>);

impl Task for CoreQueueTask {
    #[inline]
    fn run(&mut self) -> Progress {
        let mut queue = self.0.borrow_mut();
        if queue.has_ended {
            return Progress::Done;
        }
        if let Some(running) = &mut queue.running {
            // From now on until it is parked, this task looks for answers.
            running.driver.suppress_calls();
        }
        queue.check_overdue();
        let progress = if queue.turn(None) { Progress::Drained } else { Progress::Idle };
        let is_unused = Rc::strong_count(&self.0) == 1 && !queue.has_requests();
        if is_unused && queue.core.is_stopping() { Progress::Done } else { progress }
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn park(&mut self) {
        self.0.borrow_mut().park();
    }
}

/// Number of requests for which memory is allocated at first.
const INITIAL_REQUESTS: u32 = 128;
