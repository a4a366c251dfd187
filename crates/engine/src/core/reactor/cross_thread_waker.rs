//! Waking one task of a core from another thread.

use super::core::EngineCore;
use super::inbox::Inbox;
use blockmux_volume::Waker;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Wakers of a core's tasks that other threads may wake, by id.
#[derive(Default)]
struct CrossThreadWakers {
    last: Cell<u64>,
    wakers: RefCell<BTreeMap<u64, Waker>>,
}

/// Wakes one task from any thread. Dropping it unregisters the task's waker from the core.
struct CrossThreadWaker {
    inbox: Inbox,
    id: u64,
    /// A wake-up was sent that the core has not handled.
    is_pending: Arc<AtomicBool>,
}

/// Returns a function that wakes the task of `waker` and may be called from any thread.
#[must_use]
pub(crate) fn cross_thread_waker(core: &Rc<EngineCore>, waker: &Waker) -> Arc<dyn Fn() + Send + Sync> {
    let wakers = core.local(CrossThreadWakers::default);
    let id = wakers.last.get() + 1;
    wakers.last.set(id);
    wakers.wakers.borrow_mut().insert(id, waker.clone());
    let cross_thread = CrossThreadWaker { inbox: core.inbox().clone(), id, is_pending: Arc::default() };
    Arc::new(move || cross_thread.wake())
}

impl CrossThreadWaker {
    fn wake(&self) {
        if self.is_pending.swap(true, Ordering::AcqRel) {
            return;
        }
        let (id, is_pending) = (self.id, self.is_pending.clone());
        self.inbox.send(move |core| {
            // Cleared before the task runs, so that a later event sends another wake-up.
            is_pending.store(false, Ordering::Release);
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
    use crate::core::reactor::{PollPolicy, Progress, Reactor, Task};
    use std::thread;

    /// Counts how often it runs.
    struct RunCounter(Rc<Cell<u32>>);

    impl Task for RunCounter {
        fn run(&mut self) -> Progress {
            self.0.set(self.0.get() + 1);
            Progress::Idle
        }
    }

    #[test]
    fn another_thread_wakes_a_task_with_each_call() {
        let (mut reactor, _inbox) = Reactor::new(PollPolicy::Never, 1 << 20).unwrap();
        let (core, turns, wake) = (reactor.core().clone(), Rc::new(Cell::new(0)), Cell::new(None));
        core.spawn(|waker| {
            wake.set(Some(cross_thread_waker(&core, waker)));
            RunCounter(turns.clone())
        });
        let wake = wake.into_inner().unwrap();
        for turn in 1..4 {
            reactor.run_until(|| turns.get() == turn).unwrap();
            let wake = wake.clone();
            thread::spawn(move || wake()).join().unwrap();
        }
        reactor.run_until(|| turns.get() == 4).unwrap();
        let waiting = core.local(CrossThreadWakers::default);
        drop(wake);
        reactor.run_until(|| waiting.wakers.borrow().is_empty()).unwrap();
    }
}
