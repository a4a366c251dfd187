//! Tasks of a core.

use std::cell::RefCell;
use std::rc::Rc;

/// Result of one run of a task. The progress of several parts of a task is the greatest of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Progress {
    /// It had nothing to do.
    Idle,
    /// It made progress and has nothing more to do.
    Drained,
    /// It made progress and has more to do: run it again soon.
    More,
    /// It has ended: drop it.
    Done,
}

/// A unit of work that a core runs. It never blocks; an event that it waits for wakes it.
pub trait Task {
    /// Makes progress, bounded so that other tasks get their turn.
    fn run(&mut self) -> Progress;

    /// Whether [`Task::run`] polls a socket, so that the core may run it repeatedly. The core parks
    /// the task before it stops doing so.
    fn is_polled(&self) -> bool {
        false
    }

    /// Arms wake-ups for the task's sockets: the task will only run again if it is woken.
    fn park(&mut self) {}
}

/// A task that its channel shares with the core.
impl<T: Task> Task for Rc<RefCell<T>> {
    #[inline]
    fn run(&mut self) -> Progress {
        self.borrow_mut().run()
    }

    fn is_polled(&self) -> bool {
        self.borrow().is_polled()
    }

    fn park(&mut self) {
        self.borrow_mut().park();
    }
}
