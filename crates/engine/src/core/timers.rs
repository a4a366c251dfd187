//! Timers of one core.

use blockmux_volume::Waker;
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

/// Deadlines, earliest first; each wakes once. A stale deadline costs its owner one needless
/// wake-up.
#[derive(Default)]
pub(crate) struct Timers {
    heap: RefCell<BinaryHeap<Reverse<TimerEntry>>>,
    /// Orders deadlines of the same instant, first in, first out.
    serial: Cell<u64>,
}

struct TimerEntry {
    when: Instant,
    serial: u64,
    waker: Waker,
}

impl Timers {
    pub(crate) fn add(&self, when: Instant, waker: &Waker) {
        let serial = self.serial.replace(self.serial.get() + 1);
        self.heap.borrow_mut().push(Reverse(TimerEntry { when, serial, waker: waker.clone() }));
    }

    #[inline]
    pub(crate) fn next(&self) -> Option<Instant> {
        self.heap.borrow().peek().map(|Reverse(entry)| entry.when)
    }

    /// Wakes the owners of all deadlines that have passed.
    #[inline]
    pub(crate) fn fire(&self, now: Instant) {
        let mut heap = self.heap.borrow_mut();
        while heap.peek().is_some_and(|Reverse(entry)| entry.when <= now) {
            if let Some(Reverse(entry)) = heap.pop() {
                entry.waker.wake();
            }
        }
    }
}

impl PartialEq for TimerEntry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for TimerEntry {}
impl PartialOrd for TimerEntry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for TimerEntry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.when, self.serial).cmp(&(other.when, other.serial))
    }
}
