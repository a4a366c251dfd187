//! The task of one virtqueue: takes the guest's requests, moves their I/O, and answers.
//!
//! The task of a busy queue looks at the ring itself, and the guest need not notify it. When the
//! task is parked, it asks for notifications, and waits for the event descriptor of the guest's
//! kicks.

use super::held_connection::HeldConnection;
use super::unnotified::UnnotifiedPoll;
use crate::core::reactor::{EngineCore, Inbox, Progress, Task, WakeOnEvent};
use crate::core::ring::Registration;
use crate::serve::channels::Channels;
use crate::sys::become_io_flusher;
use crate::sys::shared_event::{EventSender, SharedEvent};
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::virtio::{
    BlkQueue, DeviceState, GuestMemory, InflightRecord, Notify, RingAreas, RingError,
};
use blockmux_proto::volume_state::Origin;
use blockmux_volume::{Core, Waker};
use std::cell::RefCell;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tracing::{debug, warn};

/// A virtqueue that a core serves, as the thread of the socket knows it.
pub(super) struct RunningQueue {
    core: Inbox,
    id: u64,
    /// Gets the index at which the queue continues once it has stopped.
    stopped: mpsc::Receiver<u16>,
}

/// What a queue serves.
pub(super) struct VringVolume {
    pub(super) exports: Exports,
    pub(super) volume: VolumeId,
    pub(super) origin: Origin,
}

/// The event descriptors of a queue.
#[derive(Default)]
pub(super) struct QueueEvents {
    /// The guest notifies; `None`: nobody does.
    pub(super) kick: Option<SharedEvent>,
    /// Notifies the guest's driver.
    pub(super) call: Option<EventSender>,
    /// Notifies the front end of an error.
    pub(super) error: Option<SharedEvent>,
}

impl QueueEvents {
    #[inline]
    fn signal_call(&mut self) {
        if let Some(call) = &mut self.call {
            call.signal();
        }
    }

    #[cold]
    fn signal_error(&self) {
        match self.error.as_ref().map(SharedEvent::sender) {
            Some(Ok(mut error)) => error.signal(),
            Some(Err(error)) => debug!("the front end cannot be notified of an error: {error}"),
            None => {}
        }
    }
}

/// What a queue has of its front end.
pub(super) struct FrontEnd {
    pub(super) events: QueueEvents,
    /// Held from the start of the queue until its I/O has ended.
    pub(super) connection: Arc<UnixStream>,
}

/// A queue that cannot be served.
pub(super) struct NotStarted {
    pub(super) error: io::Error,
    /// The front end may correct the description, but does not send the descriptors again.
    pub(super) events: Box<QueueEvents>,
}

/// Where a queue is, for a core.
pub(super) struct QueuePlace {
    pub(super) memory: GuestMemory,
    pub(super) areas: RingAreas,
    pub(super) record: Option<InflightRecord>,
}

impl RunningQueue {
    /// Starts to serve a queue of `size` on a core; it continues at `next_avail`. `place` runs
    /// there.
    ///
    /// # Errors
    /// If the queue is not in the guest's memory, or the volume was removed.
    pub(super) fn start(
        core: &Inbox,
        serves: VringVolume,
        device: DeviceState,
        (size, next_avail): (u16, u16),
        front_end: FrontEnd,
        place: impl FnOnce() -> Result<QueuePlace, RingError> + Send + 'static,
    ) -> Result<RunningQueue, NotStarted> {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let (sender, stopped) = mpsc::channel();
        let FrontEnd { mut events, connection } = front_end;
        let started = core.ask(move |core| {
            if let Err(error) = become_io_flusher() {
                debug!("memory of a core may wait for the disk: {error}");
            }
            let VringVolume { exports, volume, origin } = serves;
            let queue = place().map_err(io::Error::other).and_then(|place| {
                let QueuePlace { memory, areas, record } = place;
                let ring = (areas, size, next_avail);
                let queue = BlkQueue::new((&exports, volume), device, memory, ring, record);
                queue.ok_or(io::ErrorKind::NotFound.into())
            });
            let queue = match queue {
                Ok(queue) => queue,
                Err(error) => return Err(NotStarted { error, events: Box::new(events) }),
            };
            core.spawn(|waker| {
                if queue.unanswered() > 0 {
                    warn!("{}: {} requests are executed again", origin.listener, queue.unanswered());
                }
                // A notification may have been lost with the last process.
                events.signal_call();
                let armed = WakeOnEvent::new(waker);
                let state = Rc::new(RefCell::new(QueueState {
                    queue,
                    channels: Channels::new(exports, core.clone(), waker.clone(), origin.clone()),
                    events,
                    connection: Some(HeldConnection::new(connection)),
                    end: QueueEnd::Open,
                    stopped: sender,
                    registration: core.register(armed.clone()),
                    armed,
                    core: core.clone(),
                    waker: waker.clone(),
                    name: origin.listener,
                    poll: UnnotifiedPoll::new(core.policy()),
                }));
                core.local(QueueTable::default).add(id, &state);
                state
            });
            Ok(())
        });
        let core_has_ended = || {
            let error = io::Error::other("the core has ended");
            Err(NotStarted { error, events: Box::default() })
        };
        started.unwrap_or_else(core_has_ended)?;
        Ok(RunningQueue { core: core.clone(), id, stopped })
    }

    /// Changes the queue on its core, between two turns of its task; `None` if it has ended.
    pub(super) fn change<T: Send + 'static>(
        &self,
        change: impl FnOnce(&mut QueueState) -> T + Send + 'static,
    ) -> Option<T> {
        let id = self.id;
        self.core.ask(move |core| {
            core.local(QueueTable::default).find(id).map(|state| change(&mut state.borrow_mut()))
        })?
    }

    /// Answers what the queue has, takes nothing more, and returns the index at which it continues;
    /// `None` if it was abandoned instead, because `is_forced` was set.
    pub(super) fn stop(&self, is_forced: &AtomicBool) -> Option<u16> {
        self.change(|state| state.end_as(QueueEnd::Stopping));
        self.wait(is_forced)
    }

    /// Answers nothing more, and waits until nothing is in flight, or `is_forced` is set.
    pub(super) fn lose(&self, is_forced: &AtomicBool) {
        self.change(|state| state.end_as(QueueEnd::Lost));
        self.wait(is_forced);
    }

    fn wait(&self, is_forced: &AtomicBool) -> Option<u16> {
        loop {
            match self.stopped.recv_timeout(FORCE_POLL) {
                Ok(next_avail) => return Some(next_avail),
                Err(mpsc::RecvTimeoutError::Disconnected) => return None,
                Err(mpsc::RecvTimeoutError::Timeout) if is_forced.load(Ordering::Relaxed) => {
                    self.change(|state| state.end_as(QueueEnd::Lost));
                    return None;
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

/// The queues of a core.
#[derive(Default)]
struct QueueTable(RefCell<Vec<(u64, Weak<RefCell<QueueState>>)>>);

impl QueueTable {
    fn add(&self, id: u64, state: &Rc<RefCell<QueueState>>) {
        let mut queues = self.0.borrow_mut();
        queues.retain(|(_, state)| state.strong_count() > 0);
        queues.push((id, Rc::downgrade(state)));
    }

    fn find(&self, id: u64) -> Option<Rc<RefCell<QueueState>>> {
        self.0.borrow().iter().find(|(found, _)| *found == id)?.1.upgrade()
    }
}

/// A queue and what serves it.
pub(super) struct QueueState {
    queue: BlkQueue,
    channels: Channels,
    events: QueueEvents,
    /// Absent once the queue has ended.
    connection: Option<HeldConnection>,
    end: QueueEnd,
    stopped: mpsc::Sender<u16>,
    registration: Registration,
    armed: Rc<WakeOnEvent>,
    core: Rc<EngineCore>,
    waker: Waker,
    /// The disk, for messages.
    name: Arc<str>,
    /// When to look at the ring if the guest does not notify.
    poll: UnnotifiedPoll,
}

/// Whether a queue ends, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum QueueEnd {
    Open,
    /// Requests in flight are answered.
    Stopping,
    /// Requests in flight are not answered.
    Lost,
}

impl QueueState {
    /// Takes requests, or none for now.
    pub(super) fn enable(&mut self, is_enabled: bool) {
        if self.end == QueueEnd::Open {
            self.queue.enable(is_enabled);
            self.waker.wake();
        }
    }

    /// The guest's memory has changed.
    pub(super) fn set_memory(&mut self, memory: GuestMemory, areas: RingAreas) {
        self.queue.set_memory(memory, areas);
    }

    /// Waits for another event descriptor of the guest's notifications.
    pub(super) fn set_kick(&mut self, kick: Option<SharedEvent>) {
        self.armed.disarm(&self.registration);
        self.events.kick = kick;
        self.waker.wake();
    }

    /// Notifies the guest's driver by another event descriptor, at once: a notification may have
    /// been lost with the last process, or with the last descriptor.
    pub(super) fn set_call(&mut self, call: Option<EventSender>) {
        self.events.call = call;
        self.events.signal_call();
    }

    /// Notifies the front end of errors by another event descriptor.
    pub(super) fn set_error(&mut self, error: Option<SharedEvent>) {
        self.events.error = error;
    }

    fn end_as(&mut self, end: QueueEnd) {
        self.end = self.end.max(end);
        match self.end {
            QueueEnd::Lost => self.queue.lose(),
            _ => self.queue.enable(false),
        }
        self.waker.wake();
    }

    #[cold]
    fn on_error(&mut self, error: RingError) -> Progress {
        warn!("{}: the guest has broken a virtqueue, which stops: {error}; reset the guest", self.name);
        self.events.signal_error();
        Progress::Drained
    }

    /// Whether nothing is left to do for a queue that is to end.
    #[cold]
    fn ends(&mut self) -> bool {
        if self.end == QueueEnd::Lost {
            self.channels.orphan(true);
        }
        let has_ended = self.channels.is_idle() && self.queue.is_idle();
        if has_ended {
            self.armed.disarm(&self.registration);
            if let Some(connection) = self.connection.take() {
                connection.release();
            }
            // The receiver is gone if the queue was abandoned.
            let _ = self.stopped.send(self.queue.next_avail());
        }
        has_ended
    }
}

impl Task for QueueState {
    #[inline]
    fn run(&mut self) -> Progress {
        self.queue.suppress_kicks();
        let taken = match self.queue.take_requests() {
            Ok(true) => Progress::Drained,
            Ok(false) => Progress::Idle,
            Err(error) => self.on_error(error),
        };
        let moved = self.channels.move_io(&mut self.queue, self.core.now());
        if self.queue.publish() == Notify::Driver {
            self.events.signal_call();
        }
        if self.end != QueueEnd::Open && self.ends() {
            return Progress::Done;
        }
        let progress = taken.max(moved);
        if progress > Progress::Idle {
            self.poll.on_progress();
        }
        progress
    }

    fn is_polled(&self) -> bool {
        true
    }

    /// Waits for the guest's next request. A queue that takes none waits for nothing: what enables
    /// it wakes it.
    fn park(&mut self) {
        if !self.queue.takes_requests() {
            return;
        }
        match &self.events.kick {
            Some(kick) => {
                // Cleared before the ring is looked at, so that a later request notifies again.
                kick.clear();
                let is_late = self.queue.ask_for_kicks();
                self.armed.arm(&self.registration, kick.as_raw_fd(), libc::POLLIN, 0);
                if is_late {
                    self.waker.wake();
                }
            }
            None => {
                if let Some(next) = self.poll.park(self.core.now()) {
                    self.core.wake_at(next, &self.waker);
                }
            }
        }
    }
}

/// Identifies queues in the table of a core.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);
/// How soon it is noticed that a queue is to be abandoned.
const FORCE_POLL: Duration = Duration::from_millis(50);
