//! A core as seen by its tasks: ring, buffers, timers and the table of tasks.

use super::PollPolicy;
use super::inbox::Inbox;
use super::stats::CoreStats;
use super::task::{Progress, Task};
use crate::core::buffer_table::BufferEntries;
use crate::core::ring::{Completer, Registration, Ring};
use crate::core::timers::Timers;
use crate::sys::congestion::Congestion;
use blockmux_volume::{Core, Pool, ReadyList, Waker};
use std::any::Any;
use std::cell::{Cell, OnceCell, RefCell};
use std::convert::Infallible;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Instant;

/// The tasks' view of a core, and the core of every volume opened here.
pub struct EngineCore {
    pub(super) this: Weak<EngineCore>,
    pub(super) ring: Rc<Ring>,
    pool: Pool,
    pub(super) ready: Rc<ReadyList>,
    pub(super) timers: Timers,
    tasks: RefCell<Vec<TaskSlot>>,
    free_slots: RefCell<Vec<u32>>,
    live_tasks: Cell<usize>,
    inbox: OnceCell<Inbox>,
    stopping: Cell<bool>,
    pub(super) ended: Cell<bool>,
    pub(super) policy: PollPolicy,
    pub(super) stats: Arc<CoreStats>,
    congestion: OnceCell<Congestion>,
    /// Credentials for commands that need more than the thread has.
    credentials: OnceCell<u16>,
    /// Per-core state of other modules, one of each type.
    locals: RefCell<Vec<Rc<dyn Any>>>,
}

struct TaskSlot {
    generation: u32,
    waker: Option<Waker>,
    /// Absent while the task runs.
    task: Option<Box<dyn Task>>,
    is_hot: bool,
}

impl EngineCore {
    /// A core without tasks on the calling thread.
    pub(super) fn new(ring: Rc<Ring>, policy: PollPolicy, pool_limit_bytes: usize) -> Rc<EngineCore> {
        Rc::new_cyclic(|this| EngineCore {
            this: this.clone(),
            ring,
            pool: Pool::new(pool_limit_bytes),
            ready: ReadyList::new(),
            timers: Timers::default(),
            tasks: RefCell::default(),
            free_slots: RefCell::default(),
            live_tasks: Cell::new(0),
            inbox: OnceCell::new(),
            stopping: Cell::new(false),
            ended: Cell::new(false),
            policy,
            stats: Arc::default(),
            congestion: OnceCell::new(),
            credentials: OnceCell::new(),
            locals: RefCell::default(),
        })
    }

    /// Starts a task; `make` gets its waker. It runs for the first time soon.
    pub fn spawn<T: Task + 'static>(&self, make: impl FnOnce(&Waker) -> T) {
        let made: Result<(), Infallible> = self.try_spawn(|waker| Ok(make(waker)));
        match made {
            Ok(()) => {}
            Err(never) => match never {},
        }
    }

    /// Starts a task if `make` succeeds.
    ///
    /// # Errors
    /// The error of `make`; nothing is left behind then.
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
        let waker = self.ready.waker(task_id(index, generation));
        let task: Box<dyn Task> = match make(&waker) {
            Ok(task) => Box::new(task),
            Err(error) => {
                // The new generation makes a remaining waker of the task ineffective.
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

    /// Reserves entries of the table of buffers that are registered with this core's ring.
    pub(crate) fn reserve_buffers(&self, count: u16) -> Option<BufferEntries> {
        self.ring.reserve_buffers(count)
    }

    /// Keeps the credentials that this thread has now for commands to drivers that ask for more
    /// than the thread will have. Nothing else uses them.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn keep_credentials(&self) -> io::Result<()> {
        let credentials = self.ring.register_credentials()?;
        self.credentials.get_or_init(|| credentials);
        Ok(())
    }

    /// The kept credentials, as entries of the ring name them.
    pub(crate) fn kept_credentials(&self) -> Option<u16> {
        self.credentials.get().copied()
    }

    /// This core as a shared handle.
    ///
    /// # Panics
    /// Never: the core exists as long as anything runs on it.
    #[must_use]
    pub fn shared(&self) -> Rc<EngineCore> {
        self.this.upgrade().expect("a core outlives what runs on it")
    }

    /// The inbox by which other threads reach this core.
    ///
    /// # Panics
    /// Never: a core has its inbox before anything runs on it.
    #[must_use]
    pub fn inbox(&self) -> &Inbox {
        self.inbox.get().expect("a reactor opens its core's inbox first")
    }

    pub(super) fn set_inbox(&self, inbox: Inbox) {
        // Each core has one inbox, so this cannot fail.
        let _ = self.inbox.set(inbox);
    }

    /// The core's counters.
    #[must_use]
    pub fn stats(&self) -> &Arc<CoreStats> {
        &self.stats
    }

    /// Congestion control of connections opened here; `None`: the system's.
    pub fn congestion(&self) -> Option<&Congestion> {
        self.congestion.get()
    }

    /// Sets the congestion control of connections opened from now on. Only the first call has an
    /// effect.
    pub(crate) fn set_congestion(&self, congestion: Congestion) {
        let _ = self.congestion.set(congestion);
    }

    /// Whether tasks were asked to finish: targets then close their sessions.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    /// Asks every task to finish.
    pub fn stop(&self) {
        self.stopping.set(true);
        self.wake_all();
    }

    /// Wakes every task, so that it notices requests of other threads.
    pub fn wake_all(&self) {
        for slot in self.tasks.borrow().iter() {
            if let Some(waker) = &slot.waker {
                waker.wake();
            }
        }
    }

    /// Ends the loop, even if tasks are still running.
    pub fn end(&self) {
        self.ended.set(true);
    }

    /// Number of tasks that have not ended, including the core's inbox.
    #[must_use]
    pub fn live_tasks(&self) -> usize {
        self.live_tasks.get()
    }

    /// This core's instance of `T`; `make` creates it at the first call.
    pub fn local<T: 'static>(&self, make: impl FnOnce() -> T) -> Rc<T> {
        let found = self.locals.borrow().iter().find_map(|local| local.clone().downcast().ok());
        found.unwrap_or_else(|| {
            let made = Rc::new(make());
            self.locals.borrow_mut().push(made.clone());
            made
        })
    }

    /// The polling policy.
    #[must_use]
    pub fn policy(&self) -> PollPolicy {
        self.policy
    }

    /// Downcasts a `volume::Core`.
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

/// Task handling by the reactor.
impl EngineCore {
    /// Drops every task.
    pub(super) fn drop_tasks(&self) {
        let tasks: Vec<TaskSlot> = self.tasks.borrow_mut().drain(..).collect();
        drop(tasks);
    }

    /// Runs a task if it still exists; returns its progress, whether it polls, and whether it was
    /// hot before.
    #[inline]
    pub(super) fn run_task(&self, id: u64) -> Option<(Progress, bool, bool)> {
        let (index, generation) = place(id);
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
            // Outside the borrow: dropping a task may spawn or wake others.
            drop(task);
            return None;
        }
        slot.task = Some(task);
        slot.is_hot = is_polled && self.policy != PollPolicy::Never;
        Some((progress, is_polled, was_hot))
    }

    pub(super) fn wake_task(&self, id: u64) {
        let (index, generation) = place(id);
        if let Some(slot) = self.tasks.borrow().get(index)
            && slot.generation == generation
            && let Some(waker) = &slot.waker
        {
            waker.wake();
        }
    }

    pub(super) fn park_task(&self, id: u64) {
        let (index, generation) = place(id);
        let task = {
            let mut tasks = self.tasks.borrow_mut();
            let slot = tasks.get_mut(index).filter(|slot| slot.generation == generation);
            slot.and_then(|slot| {
                slot.is_hot = false;
                slot.task.take()
            })
        };
        if let Some(mut task) = task {
            task.park();
            self.tasks.borrow_mut()[index].task = Some(task);
        }
    }
}

/// A task's unique id: slot and generation.
fn task_id(index: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}

#[inline]
fn place(id: u64) -> (usize, u32) {
    (id as u32 as usize, (id >> 32) as u32)
}
