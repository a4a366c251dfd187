//! One core: a thread that runs its tasks to completion and shares nothing.
//!
//! A [`Task`] is run when it was woken. After activity, tasks that look at a socket stay *hot*: the reactor runs them
//! over and over, and they try the socket directly, so that a round trip needs no sleep and no wake-up. A task that
//! found nothing for the spin time is *parked*: it asks the ring to be told. When nothing is hot the core sleeps in
//! the ring, and an idle core uses no processor time at all. [`PollPolicy`] sets the spin time.

use crate::ring::{Completer, Registration, Ring};
use crate::sys;
use crate::timers::Timers;
use blockmux_volume::{Core, Pool, ReadyList, Waker};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// When a core that has nothing to do goes to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollPolicy {
    /// After this long without activity.
    Adaptive(Duration),
    /// Never: it takes a whole processor and answers fastest.
    Always,
    /// At once.
    Never,
}

impl PollPolicy {
    /// The adaptive policy with a spin time that outlasts a round trip with a sleeping peer.
    pub const ADAPTIVE: PollPolicy = PollPolicy::Adaptive(Duration::from_micros(50));

    /// The policy's name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            PollPolicy::Adaptive(_) => "adaptive",
            PollPolicy::Always => "always",
            PollPolicy::Never => "never",
        }
    }
}

/// What a task has achieved in one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It did something and has more to do: run it again soon.
    More,
    /// It did something, and all there was.
    Drained,
    /// It found nothing to do.
    Idle,
    /// It has ended: drop it.
    Done,
}

/// Something that a core runs. It never blocks; whatever it waits for wakes it.
pub trait Task {
    /// Does what there is to do now, within bounds, so that others get their turn.
    fn run(&mut self) -> Progress;

    /// Whether [`Task::run`] looks at a socket, so that running it over and over finds new work. It is parked before
    /// the core stops doing so.
    fn is_polled(&self) -> bool {
        false
    }

    /// Nobody will run this task unless it is woken: it asks the ring to tell of its sockets.
    fn park(&mut self) {}
}

/// What runs on a core sees of it. Also the core of every volume opened here.
pub struct EngineCore {
    this: Weak<EngineCore>,
    ring: Rc<Ring>,
    pool: Pool,
    ready: Rc<ReadyList>,
    timers: Timers,
    tasks: RefCell<Vec<TaskSlot>>,
    free_slots: RefCell<Vec<u32>>,
    live_tasks: Cell<usize>,
    stopping: Cell<bool>,
    ended: Cell<bool>,
    policy: PollPolicy,
}

struct TaskSlot {
    generation: u32,
    waker: Option<Waker>,
    /// Out of its slot while it runs.
    task: Option<Box<dyn Task>>,
    is_hot: bool,
}

/// A core and its loop.
pub struct Reactor {
    core: Rc<EngineCore>,
    hot: Vec<Hot>,
}

struct Hot {
    id: u64,
    last_active: Instant,
}

/// What another thread asks a core to do.
pub type Message = Box<dyn FnOnce(&Rc<EngineCore>) + Send>;

/// Sends messages to a core from any thread; a clone sends to the same core.
#[derive(Clone)]
pub struct Inbox {
    sender: mpsc::Sender<Message>,
    event: Arc<OwnedFd>,
}

impl Inbox {
    /// Has the core run `message` soon; it is dropped unrun if the core has ended.
    pub fn send(&self, message: impl FnOnce(&Rc<EngineCore>) + Send + 'static) {
        if self.sender.send(Box::new(message)).is_ok() {
            sys::event_signal(&self.event);
        }
    }
}

impl EngineCore {
    /// Starts a task; `make` gets what wakes it. It runs for the first time soon.
    pub fn spawn<T: Task + 'static>(&self, make: impl FnOnce(&Waker) -> T) {
        let made: Result<(), Infallible> = self.try_spawn(|waker| Ok(make(waker)));
        match made {
            Ok(()) => {}
            Err(never) => match never {},
        }
    }

    /// Starts a task if it can be made.
    ///
    /// # Errors
    /// Whatever `make` says; nothing is left behind then.
    pub fn try_spawn<T: Task + 'static, E>(
        &self,
        make: impl FnOnce(&Waker) -> Result<T, E>,
    ) -> Result<(), E> {
        let index = self.free_slots.borrow_mut().pop().unwrap_or_else(|| {
            let mut tasks = self.tasks.borrow_mut();
            tasks.push(TaskSlot { generation: 0, waker: None, task: None, is_hot: false });
            (tasks.len() - 1) as u32
        });
        let generation = self.tasks.borrow()[index as usize].generation;
        let waker = self.ready.waker(u64::from(generation) << 32 | u64::from(index));
        let task: Box<dyn Task> = match make(&waker) {
            Ok(task) => Box::new(task),
            Err(error) => {
                // Its waker may be about still.
                self.tasks.borrow_mut()[index as usize].generation = generation.wrapping_add(1);
                self.free_slots.borrow_mut().push(index);
                return Err(error);
            }
        };
        let slot = &mut self.tasks.borrow_mut()[index as usize];
        (slot.task, slot.waker) = (Some(task), Some(waker.clone()));
        self.live_tasks.set(self.live_tasks.get() + 1);
        waker.wake();
        Ok(())
    }

    /// Registers a completer with this core's ring.
    pub fn register(&self, completer: Rc<dyn Completer>) -> Registration {
        self.ring.register(completer)
    }

    /// This core as the shared handle that volumes are opened with.
    ///
    /// # Panics
    /// Never: the core exists as long as anything runs on it.
    #[must_use]
    pub fn shared(&self) -> Rc<EngineCore> {
        self.this.upgrade().expect("a core outlives what runs on it")
    }

    /// Whether tasks are asked to finish: targets close their sessions.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    /// Asks every task to finish.
    pub fn stop(&self) {
        self.stopping.set(true);
        for slot in self.tasks.borrow().iter() {
            if let Some(waker) = &slot.waker {
                waker.wake();
            }
        }
    }

    /// Ends the loop whatever still runs.
    pub fn end(&self) {
        self.ended.set(true);
    }

    /// Tasks that have not ended, among them the core's own inbox.
    #[must_use]
    pub fn live_tasks(&self) -> usize {
        self.live_tasks.get()
    }

    /// The polling policy.
    #[must_use]
    pub fn policy(&self) -> PollPolicy {
        self.policy
    }

    /// This core behind a `volume::Core`, if it is one.
    #[must_use]
    pub fn from_core(core: &Rc<dyn Core>) -> Option<Rc<EngineCore>> {
        core.as_any().downcast_ref::<EngineCore>().map(EngineCore::shared)
    }
}

impl Core for EngineCore {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn wake_at(&self, when: Instant, waker: &Waker) {
        self.timers.add(when, waker);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Reactor {
    /// A core on the calling thread, with at most `pool_limit_bytes` of buffers, and its inbox.
    ///
    /// # Errors
    /// If the kernel refuses an io_uring.
    pub fn new(policy: PollPolicy, pool_limit_bytes: usize) -> io::Result<(Reactor, Inbox)> {
        let ring = Ring::new()?;
        let core = Rc::new_cyclic(|this| EngineCore {
            this: this.clone(),
            ring,
            pool: Pool::new(pool_limit_bytes),
            ready: ReadyList::new(),
            timers: Timers::default(),
            tasks: RefCell::default(),
            free_slots: RefCell::default(),
            live_tasks: Cell::new(0),
            stopping: Cell::new(false),
            ended: Cell::new(false),
            policy,
        });
        let (sender, receiver) = mpsc::channel();
        let event = Arc::new(sys::event_fd()?);
        let inbox = Inbox { sender, event: event.clone() };
        core.spawn(|waker| InboxTask::new(&core, waker, receiver, event));
        Ok((Reactor { core, hot: Vec::new() }, inbox))
    }

    /// What runs on this core.
    #[must_use]
    pub fn core(&self) -> &Rc<EngineCore> {
        &self.core
    }

    /// Runs until [`EngineCore::end`].
    ///
    /// # Errors
    /// If the ring breaks.
    pub fn run(&mut self) -> io::Result<()> {
        let mut last_active = Instant::now();
        while !self.core.ended.get() {
            let now = Instant::now();
            if self.turn(now) {
                last_active = now;
                self.core.ring.submit()?;
            } else if self.keeps_awake(now.duration_since(last_active)) {
                self.core.ring.submit()?;
            } else {
                self.sleep(now)?;
            }
        }
        Ok(())
    }

    /// Runs whatever is ready once, without sleeping unless nothing is: for tests that wait for something.
    ///
    /// # Errors
    /// If the ring breaks.
    pub fn run_until(&mut self, mut done: impl FnMut() -> bool) -> io::Result<()> {
        while !done() {
            let now = Instant::now();
            if self.turn(now) {
                self.core.ring.submit()?;
            } else {
                self.sleep(now)?;
            }
        }
        Ok(())
    }

    /// One round: completions, deadlines, ready tasks, hot tasks. Answers whether anything happened.
    #[inline]
    fn turn(&mut self, now: Instant) -> bool {
        let mut active = self.core.ring.reap() > 0;
        self.core.timers.fire(now);
        // Only those that are ready now: what they wake runs in the next round, after the ring had its turn.
        for _ in 0..self.core.ready.len() {
            let Some(id) = self.core.ready.pop() else { break };
            active = true;
            self.run_woken(id, now);
        }
        active | self.run_hot(now)
    }

    fn run_woken(&mut self, id: u64, now: Instant) {
        let Some((progress, is_polled, was_hot)) = self.core.run_task(id, true) else { return };
        if !is_polled {
            if progress == Progress::More {
                self.core.wake_task(id);
            }
            return;
        }
        match self.core.policy {
            PollPolicy::Never if progress == Progress::More => self.core.wake_task(id),
            PollPolicy::Never => self.core.park_task(id),
            _ if was_hot => {}
            _ => self.hot.push(Hot { id, last_active: now }),
        }
    }

    #[inline]
    fn run_hot(&mut self, now: Instant) -> bool {
        let spin = match self.core.policy {
            PollPolicy::Adaptive(spin) => spin,
            PollPolicy::Always => HOT_WHEN_ALWAYS,
            PollPolicy::Never => return false,
        };
        let (core, mut active) = (&self.core, false);
        self.hot.retain_mut(|hot| match core.run_task(hot.id, true) {
            None => false,
            Some((Progress::More | Progress::Drained, ..)) => {
                (active, hot.last_active) = (true, now);
                true
            }
            Some(_) if now.duration_since(hot.last_active) < spin => true,
            Some(_) => {
                core.park_task(hot.id);
                false
            }
        });
        active
    }

    fn keeps_awake(&self, idle: Duration) -> bool {
        match self.core.policy {
            PollPolicy::Always => true,
            PollPolicy::Adaptive(spin) => idle < spin,
            PollPolicy::Never => !self.core.ready.is_empty(),
        }
    }

    fn sleep(&mut self, now: Instant) -> io::Result<()> {
        for hot in self.hot.drain(..) {
            self.core.park_task(hot.id);
        }
        if !self.core.ready.is_empty() {
            return Ok(());
        }
        let timeout = self.core.timers.next().map(|when| when.saturating_duration_since(now));
        self.core.ring.submit_and_wait(timeout)
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        // Tasks hold the core and the core holds tasks: this is where the circle is cut.
        let tasks: Vec<TaskSlot> = self.core.tasks.borrow_mut().drain(..).collect();
        drop(tasks);
    }
}

impl EngineCore {
    /// Runs a task if it still exists; answers its progress, whether it polls, and whether it was hot already.
    #[inline]
    fn run_task(&self, id: u64, becomes_hot: bool) -> Option<(Progress, bool, bool)> {
        let (index, generation) = (id as u32 as usize, (id >> 32) as u32);
        let (mut task, was_hot) = {
            let mut tasks = self.tasks.borrow_mut();
            let slot = tasks.get_mut(index).filter(|slot| slot.generation == generation)?;
            (slot.task.take()?, slot.is_hot)
        };
        let progress = task.run();
        let is_polled = task.is_polled();
        let mut tasks = self.tasks.borrow_mut();
        let slot = &mut tasks[index];
        if progress == Progress::Done {
            slot.generation = slot.generation.wrapping_add(1);
            (slot.waker, slot.is_hot) = (None, false);
            drop(tasks);
            self.free_slots.borrow_mut().push(index as u32);
            self.live_tasks.set(self.live_tasks.get() - 1);
            // Only now: dropping a task may spawn or wake others.
            drop(task);
            return None;
        }
        slot.task = Some(task);
        slot.is_hot = becomes_hot && is_polled && self.policy != PollPolicy::Never;
        Some((progress, is_polled, was_hot))
    }

    fn wake_task(&self, id: u64) {
        if let Some(slot) = self.tasks.borrow().get(id as u32 as usize)
            && slot.generation == (id >> 32) as u32
            && let Some(waker) = &slot.waker
        {
            waker.wake();
        }
    }

    fn park_task(&self, id: u64) {
        let task = {
            let mut tasks = self.tasks.borrow_mut();
            let slot = tasks.get_mut(id as u32 as usize).filter(|slot| slot.generation == (id >> 32) as u32);
            slot.and_then(|slot| {
                slot.is_hot = false;
                slot.task.take()
            })
        };
        if let Some(mut task) = task {
            task.park();
            self.tasks.borrow_mut()[id as u32 as usize].task = Some(task);
        }
    }
}

/// Runs what other threads send.
struct InboxTask {
    core: Weak<EngineCore>,
    receiver: mpsc::Receiver<Message>,
    event: Arc<OwnedFd>,
    registration: Registration,
    armed: Rc<WakeOnEvent>,
}

/// Wakes a task when a poll that it armed has fired.
pub(crate) struct WakeOnEvent {
    waker: Waker,
    /// Bit `token` is set while that poll is armed.
    armed: Cell<u32>,
}

impl WakeOnEvent {
    pub(crate) fn new(waker: &Waker) -> Rc<WakeOnEvent> {
        Rc::new(WakeOnEvent { waker: waker.clone(), armed: Cell::new(0) })
    }

    /// Arms the poll `token` (0 to 31) unless it is armed already.
    pub(crate) fn arm(&self, registration: &Registration, fd: i32, events: i16, token: u32) {
        if self.armed.get() & 1 << token == 0 {
            self.armed.set(self.armed.get() | 1 << token);
            registration.poll_once(fd, events as u32, token);
        }
    }

    /// Withdraws every armed poll: the descriptor is about to be closed.
    pub(crate) fn disarm(&self, registration: &Registration) {
        for token in (0..32).filter(|token| self.armed.get() & 1 << token != 0) {
            registration.cancel_poll(token);
        }
    }
}

impl Completer for WakeOnEvent {
    fn complete(&self, token: u32, _result: i32) {
        if token < 32 {
            self.armed.set(self.armed.get() & !(1 << token));
            self.waker.wake();
        }
    }
}

impl InboxTask {
    fn new(
        core: &EngineCore,
        waker: &Waker,
        receiver: mpsc::Receiver<Message>,
        event: Arc<OwnedFd>,
    ) -> InboxTask {
        let armed = WakeOnEvent::new(waker);
        let registration = core.register(armed.clone());
        InboxTask { core: core.this.clone(), receiver, event, registration, armed }
    }
}

impl Task for InboxTask {
    fn run(&mut self) -> Progress {
        // Armed before looking, so that no message falls in between.
        sys::event_clear(&self.event);
        self.armed.arm(&self.registration, self.event.as_raw_fd(), libc::POLLIN, 0);
        let mut progress = Progress::Idle;
        while let (Some(core), Ok(message)) = (self.core.upgrade(), self.receiver.try_recv()) {
            message(&core);
            progress = Progress::Drained;
        }
        progress
    }
}

/// With [`PollPolicy::Always`] the core spins on, but asks the ring about sockets that were silent for this long.
const HOT_WHEN_ALWAYS: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    struct Countdown(Rc<Cell<u32>>);
    impl Task for Countdown {
        fn run(&mut self) -> Progress {
            self.0.set(self.0.get() - 1);
            if self.0.get() == 0 { Progress::Done } else { Progress::More }
        }
    }

    #[test]
    fn a_task_runs_until_it_is_done() {
        let (mut reactor, _inbox) = Reactor::new(PollPolicy::Never, 1 << 20).unwrap();
        let left = Rc::new(Cell::new(5));
        reactor.core().spawn(|_| Countdown(left.clone()));
        let core = reactor.core().clone();
        reactor.run_until(|| left.get() == 0).unwrap();
        assert_eq!(core.live_tasks(), 1);
    }

    #[test]
    fn another_thread_reaches_a_sleeping_core_under_every_policy() {
        for policy in [PollPolicy::Never, PollPolicy::ADAPTIVE, PollPolicy::Always] {
            let (mut reactor, inbox) = Reactor::new(policy, 1 << 20).unwrap();
            let sender = std::thread::spawn(move || inbox.send(|core| core.end()));
            reactor.run().unwrap();
            sender.join().unwrap();
        }
    }

    #[test]
    fn a_deadline_wakes_a_sleeping_core() {
        struct Sleeper(Rc<Cell<u32>>, Weak<EngineCore>, Waker);
        impl Task for Sleeper {
            fn run(&mut self) -> Progress {
                self.0.set(self.0.get() + 1);
                if let Some(core) = self.1.upgrade() {
                    core.wake_at(core.now() + Duration::from_millis(1), &self.2);
                }
                Progress::Idle
            }
        }
        let (mut reactor, _inbox) = Reactor::new(PollPolicy::Never, 1 << 20).unwrap();
        let (runs, core) = (Rc::new(Cell::new(0)), reactor.core().this.clone());
        reactor.core().spawn(|waker| Sleeper(runs.clone(), core, waker.clone()));
        reactor.run_until(|| runs.get() == 3).unwrap();
    }
}
