//! Cores on a virtual clock: an executor whose scheduling follows from the seed.

use super::lan::SimLan;
use super::net::{SimNet, SimStream, SimWatch};
use crate::core::reactor::{Progress, Task};
use crate::net::host::Host;
use crate::net::socket::Address;
use blockmux_volume::{Core, Pool, ReadyList, Waker};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

/// A simulated process with one core.
pub struct SimCore {
    this: Weak<SimCore>,
    net: SimNet,
    pool: Pool,
    ready: Rc<ReadyList>,
    tasks: RefCell<Vec<SimTaskSlot>>,
    stopping: Cell<bool>,
    /// The process is suspended: it gets no CPU time.
    waits: Cell<bool>,
    /// The Ethernet segment of its ports.
    lan: RefCell<Option<SimLan>>,
}

/// A task's entry. Entries are not reused, because tasks are few and short-lived.
struct SimTaskSlot {
    waker: Waker,
    /// Absent while the task runs, and after it has ended.
    task: Option<Box<dyn Task>>,
}

/// All cores of a simulation and their common clock.
pub struct World {
    net: SimNet,
    cores: Vec<Rc<SimCore>>,
}

/// Why a simulation will never end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Hang {
    /// No task is ready and no timer is armed.
    #[error("deadlock: no task is ready and no timer is armed")]
    Deadlock,
    /// Tasks wake each other without end while the clock stands still.
    #[error("livelock: tasks run without end at one instant")]
    Livelock,
    /// The time limit was exceeded.
    #[error("not done within {0:?} of virtual time")]
    TimeLimit(Duration),
}

impl SimCore {
    /// Whether no task is left.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.tasks.borrow().iter().all(|slot| slot.task.is_none())
    }

    /// Asks every task to finish.
    pub fn stop(&self) {
        self.stopping.set(true);
        self.tasks.borrow().iter().for_each(|slot| slot.waker.wake());
    }

    /// Ends the process at once: its tasks are dropped and its connections closed.
    pub fn kill(&self) {
        let tasks: Vec<SimTaskSlot> = self.tasks.borrow_mut().drain(..).collect();
        drop(tasks);
    }

    /// Suspends the process, or resumes it: while suspended, none of its tasks runs.
    pub fn set_waiting(&self, waits: bool) {
        self.waits.set(waits);
    }

    /// Attaches the core to a segment, for ports that it opens from now on.
    pub fn join(&self, lan: &SimLan) {
        *self.lan.borrow_mut() = Some(lan.clone());
    }

    pub(super) fn lan(&self) -> Option<SimLan> {
        self.lan.borrow().clone()
    }

    /// The core's network.
    #[must_use]
    pub fn net(&self) -> &SimNet {
        &self.net
    }

    /// Runs the next ready task; `false` if none is ready.
    fn run_one(&self) -> bool {
        if self.waits.get() {
            return false;
        }
        let Some(id) = self.ready.pop() else { return false };
        let slot_task = self.tasks.borrow_mut().get_mut(id as usize).and_then(|slot| slot.task.take());
        let Some(mut task) = slot_task else { return true };
        match task.run() {
            Progress::Done => return true,
            Progress::More => self.tasks.borrow()[id as usize].waker.wake(),
            // As on a core that never spins: a task without a wake-up sleeps on.
            Progress::Drained | Progress::Idle => task.park(),
        }
        self.tasks.borrow_mut()[id as usize].task = Some(task);
        true
    }
}

impl Core for SimCore {
    fn now(&self) -> Instant {
        self.net.now()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn wake_at(&self, when: Instant, waker: &Waker) {
        self.net.wake_at(when, waker);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Host for SimCore {
    type Stream = SimStream;
    type Watch = SimWatch;

    fn from_core(core: &Rc<dyn Core>) -> Option<Rc<SimCore>> {
        core.as_any().downcast_ref::<SimCore>()?.this.upgrade()
    }

    fn spawn<T: Task + 'static>(&self, make: impl FnOnce(&Waker) -> T) {
        let id = self.tasks.borrow().len();
        let waker = self.ready.waker(id as u64);
        self.tasks.borrow_mut().push(SimTaskSlot { waker: waker.clone(), task: None });
        let task = make(&waker);
        self.tasks.borrow_mut()[id].task = Some(Box::new(task));
        waker.wake();
    }

    fn try_spawn<T: Task + 'static, E>(&self, make: impl FnOnce(&Waker) -> Result<T, E>) {
        let id = self.tasks.borrow().len();
        let waker = self.ready.waker(id as u64);
        self.tasks.borrow_mut().push(SimTaskSlot { waker: waker.clone(), task: None });
        if let Ok(task) = make(&waker) {
            self.tasks.borrow_mut()[id].task = Some(Box::new(task));
            waker.wake();
        }
    }

    fn connect(&self, address: &Address) -> io::Result<SimStream> {
        self.net.connect(address)
    }

    fn watch(&self, waker: &Waker) -> SimWatch {
        SimWatch(waker.clone())
    }

    fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    fn spins(&self) -> bool {
        false
    }
}

impl World {
    /// A world without cores.
    #[must_use]
    pub fn new(net: SimNet) -> World {
        World { net, cores: Vec::new() }
    }

    /// The network.
    #[must_use]
    pub fn net(&self) -> &SimNet {
        &self.net
    }

    /// Adds a core with at most `pool_bytes` of buffers.
    pub fn add_core(&mut self, pool_bytes: usize) -> Rc<SimCore> {
        let core = Rc::new_cyclic(|this| SimCore {
            this: this.clone(),
            net: self.net.clone(),
            pool: Pool::new(pool_bytes),
            ready: ReadyList::new(),
            tasks: RefCell::default(),
            stopping: Cell::new(false),
            waits: Cell::new(false),
            lan: RefCell::default(),
        });
        self.cores.push(core.clone());
        core
    }

    /// Removes a core without tasks.
    pub fn remove_core(&mut self, core: &Rc<SimCore>) {
        self.cores.retain(|other| !Rc::ptr_eq(other, core));
    }

    /// Runs until `done`, at most for `limit` of virtual time.
    ///
    /// # Errors
    /// If that can no longer happen, or does not happen within `limit`.
    pub fn run_until(&self, limit: Duration, mut done: impl FnMut() -> bool) -> Result<(), Hang> {
        let end = self.net.now() + limit;
        let mut turns = 0;
        while !done() {
            if self.run_one() {
                turns += 1;
                if turns > TURNS_AT_ONE_INSTANT {
                    return Err(Hang::Livelock);
                }
                continue;
            }
            turns = 0;
            let next = self.net.next_time().ok_or(Hang::Deadlock)?;
            if next > end {
                return Err(Hang::TimeLimit(limit));
            }
            self.net.advance_to(next);
        }
        Ok(())
    }

    /// Lets `time` pass.
    ///
    /// # Errors
    /// If tasks wake each other without end.
    pub fn run_for(&self, time: Duration) -> Result<(), Hang> {
        let end = self.net.now() + time;
        let ready = ReadyList::new();
        self.net.wake_at(end, &ready.waker(0));
        self.run_until(time, || !ready.is_empty())
    }

    /// Runs one task of a random core.
    fn run_one(&self) -> bool {
        let first = self.net.below(self.cores.len().max(1) as u64) as usize;
        let (before, from) = self.cores.split_at(first.min(self.cores.len()));
        from.iter().chain(before).any(|core| core.run_one())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Breaks the reference cycle between cores and tasks.
        self.cores.iter().for_each(|core| core.kill());
    }
}

/// Maximum number of turns without time passing: far more than any burst needs.
const TURNS_AT_ONE_INSTANT: u32 = 100_000;
