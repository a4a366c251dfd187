//! A core for tests, with a clock that only moves on request.

use crate::pool::Pool;
use crate::ready::{ReadyList, Waker};
use crate::volume::Core;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A core with a virtual clock.
pub struct TestCore {
    started: Instant,
    now: Cell<Instant>,
    pool: Pool,
    ready: Rc<ReadyList>,
    /// Ordered by time, then by the order of the calls.
    timers: RefCell<BTreeMap<(Instant, u64), Waker>>,
    asked: Cell<u64>,
}

impl TestCore {
    /// A core at its initial time.
    #[must_use]
    pub fn new() -> Rc<TestCore> {
        TestCore::with_pool(&Pool::new(POOL_BYTES))
    }

    /// A core with a pool that others use, too.
    #[must_use]
    pub fn with_pool(pool: &Pool) -> Rc<TestCore> {
        let started = Instant::now();
        Rc::new(TestCore {
            started,
            now: Cell::new(started),
            pool: pool.clone(),
            ready: ReadyList::new(),
            timers: RefCell::default(),
            asked: Cell::new(0),
        })
    }

    /// The core as volumes see it.
    #[must_use]
    pub fn as_core(self: &Rc<TestCore>) -> Rc<dyn Core> {
        self.clone()
    }

    /// The initial time.
    #[must_use]
    pub fn started(&self) -> Instant {
        self.started
    }

    /// The ready list of the test's wakers.
    #[must_use]
    pub fn ready(&self) -> &Rc<ReadyList> {
        &self.ready
    }

    /// Advances the clock to `when`, unless it is later already, and wakes all wakers whose time
    /// has passed.
    pub fn advance_to(&self, when: Instant) {
        self.now.set(self.now.get().max(when));
        let due =
            |(&(when, nth), _): (&(Instant, u64), &Waker)| (when <= self.now.get()).then_some((when, nth));
        loop {
            let first = self.timers.borrow().first_key_value().and_then(due);
            let Some(key) = first else { return };
            let waker = self.timers.borrow_mut().remove(&key);
            waker.iter().for_each(Waker::wake);
        }
    }

    /// Advances the clock.
    pub fn advance(&self, by: Duration) {
        self.advance_to(self.now.get() + by);
    }

    /// Advances the clock to the next armed time; `false` if there is none.
    pub fn jump(&self) -> bool {
        let next = self.timers.borrow().first_key_value().map(|(&(when, _), _)| when);
        next.inspect(|&when| self.advance_to(when)).is_some()
    }
}

impl Core for TestCore {
    fn now(&self) -> Instant {
        self.now.get()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn wake_at(&self, when: Instant, waker: &Waker) {
        self.asked.set(self.asked.get() + 1);
        self.timers.borrow_mut().insert((when, self.asked.get()), waker.clone());
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

const POOL_BYTES: usize = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_wake_in_order_and_once() {
        let core = TestCore::new();
        let at = |ms| core.started() + Duration::from_millis(ms);
        for (id, ms) in [(1, 7), (2, 3), (3, 3)] {
            core.wake_at(at(ms), &core.ready().waker(id));
        }
        core.advance(Duration::from_millis(2));
        assert!(core.ready().is_empty());
        assert!(core.jump());
        assert_eq!((core.now(), core.ready().pop(), core.ready().pop()), (at(3), Some(2), Some(3)));
        assert!(core.jump());
        assert_eq!((core.now(), core.ready().pop(), core.ready().pop()), (at(7), Some(1), None));
        assert!(!core.jump());
    }

    #[test]
    fn a_time_that_has_passed_wakes_at_the_next_jump() {
        let core = TestCore::new();
        core.advance(Duration::from_secs(1));
        core.wake_at(core.started(), &core.ready().waker(1));
        assert!(core.jump());
        assert_eq!((core.now(), core.ready().pop()), (core.started() + Duration::from_secs(1), Some(1)));
    }
}
