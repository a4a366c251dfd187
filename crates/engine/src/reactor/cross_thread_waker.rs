//! How other threads wake one task of a core.

use super::core::EngineCore;
use super::inbox::Inbox;
use blockmux_volume::Waker;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The bells of a core's tasks.
#[derive(Default)]
struct CrossThreadWakers {
    last: Cell<u64>,
    wakers: RefCell<BTreeMap<u64, Waker>>,
}

/// One task's; the core forgets it when it is dropped.
struct CrossThreadWaker {
    inbox: Inbox,
    id: u64,
    /// The core has not come to it yet.
    is_pending: Arc<AtomicBool>,
}

/// Has `waker` wake its task whenever what is returned is called, from any thread.
#[must_use]
pub(crate) fn cross_thread_waker(core: &Rc<EngineCore>, waker: &Waker) -> Arc<dyn Fn() + Send + Sync> {
    let bells = core.local(CrossThreadWakers::default);
    let id = bells.last.get() + 1;
    bells.last.set(id);
    bells.wakers.borrow_mut().insert(id, waker.clone());
    let bell = CrossThreadWaker { inbox: core.inbox().clone(), id, is_pending: Arc::default() };
    Arc::new(move || bell.wake())
}

impl CrossThreadWaker {
    fn wake(&self) {
        if self.is_pending.swap(true, Ordering::AcqRel) {
            return;
        }
        let (id, is_rung) = (self.id, self.is_pending.clone());
        self.inbox.send(move |core| {
            // Before the task looks, so that what comes from here on rings again.
            is_rung.store(false, Ordering::Release);
            if let Some(waker) = core.local(CrossThreadWakers::default).wakers.borrow().get(&id) {
                waker.wake();
            }
        });
    }
}

impl Drop for CrossThreadWaker {
    fn drop(&mut self) {
        let id = self.id;
        self.inbox.send(move |core| {
            core.local(CrossThreadWakers::default).wakers.borrow_mut().remove(&id);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reactor::{PollPolicy, Progress, Reactor, Task};
    use std::thread;

    /// Counts its turns.
    struct Sleeper(Rc<Cell<u32>>);

    impl Task for Sleeper {
        fn run(&mut self) -> Progress {
            self.0.set(self.0.get() + 1);
            Progress::Idle
        }
    }

    #[test]
    fn another_thread_wakes_a_task_each_time_it_rings() {
        let (mut reactor, _inbox) = Reactor::new(PollPolicy::Never, 1 << 20).unwrap();
        let (core, turns, ring) = (reactor.core().clone(), Rc::new(Cell::new(0)), Cell::new(None));
        core.spawn(|waker| {
            ring.set(Some(cross_thread_waker(&core, waker)));
            Sleeper(turns.clone())
        });
        let ring = ring.into_inner().unwrap();
        for turn in 1..4 {
            reactor.run_until(|| turns.get() == turn).unwrap();
            let ring = ring.clone();
            thread::spawn(move || ring()).join().unwrap();
        }
        reactor.run_until(|| turns.get() == 4).unwrap();
        let bells = core.local(CrossThreadWakers::default);
        drop(ring);
        reactor.run_until(|| bells.wakers.borrow().is_empty()).unwrap();
    }
}
