//! Polls of descriptors that wake a task.

use crate::core::ring::{Completer, Registration};
use blockmux_volume::Waker;
use std::cell::Cell;
use std::rc::Rc;

/// Wakes a task when one of its polls has fired.
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

    /// Cancels every armed poll: the descriptor is about to be closed.
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
