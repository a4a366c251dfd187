//! The list of a core's tasks that are ready to run.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

/// A core's list of ready consumers, each at most once, first in, first out.
#[derive(Default)]
pub struct ReadyList {
    queue: RefCell<VecDeque<(u64, Rc<Cell<bool>>)>>,
}

impl ReadyList {
    /// A new, empty list.
    #[must_use]
    pub fn new() -> Rc<ReadyList> {
        Rc::default()
    }

    /// A waker that puts `id` on the list.
    #[must_use]
    pub fn waker(self: &Rc<ReadyList>, id: u64) -> Waker {
        Waker { list: self.clone(), id, queued: Rc::default() }
    }

    /// Removes the first consumer, which can become ready again.
    #[inline]
    #[must_use]
    pub fn pop(&self) -> Option<u64> {
        let (id, queued) = self.queue.borrow_mut().pop_front()?;
        queued.set(false);
        Some(id)
    }

    /// Whether no consumer is ready.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queue.borrow().is_empty()
    }

    /// Number of ready consumers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.queue.borrow().len()
    }
}

/// Makes one consumer on a core ready to run; clones wake the same one.
#[derive(Clone)]
pub struct Waker {
    list: Rc<ReadyList>,
    id: u64,
    queued: Rc<Cell<bool>>,
}

impl Waker {
    /// Puts the consumer on the core's list, unless it is there already.
    #[inline]
    pub fn wake(&self) {
        if !self.queued.replace(true) {
            self.list.queue.borrow_mut().push_back((self.id, self.queued.clone()));
        }
    }

    /// A waker without a consumer, for callers that poll.
    #[must_use]
    pub fn idle() -> Waker {
        // `queued` stays true, so that the list never grows.
        Waker { list: ReadyList::new(), id: 0, queued: Rc::new(Cell::new(true)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_consumer_is_on_the_list_once() {
        let list = ReadyList::new();
        let (first, second) = (list.waker(1), list.waker(2));
        first.wake();
        second.wake();
        first.clone().wake();
        assert_eq!((list.pop(), list.pop(), list.pop()), (Some(1), Some(2), None));
        first.wake();
        assert_eq!(list.pop(), Some(1));
    }
}
