//! Ending a connection from any thread.

use crate::core::reactor::{EngineCore, Inbox};
use blockmux_proto::driver::session::ConnectionControl;
use blockmux_volume::Waker;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The tasks of a core that wait for their connections, by the numbers of their signals.
#[derive(Default)]
pub(super) struct EndSignals {
    last_number: Cell<u64>,
    waiting: RefCell<BTreeMap<u64, Waker>>,
}

/// Ends one connection from any thread.
#[derive(Clone)]
pub(super) struct EndSignal {
    number: u64,
    is_set: Arc<AtomicBool>,
    inbox: Inbox,
}

/// The signal as its core sees it.
pub(super) struct LocalSignal {
    pub(super) signal: EndSignal,
    signals: Rc<EndSignals>,
}

impl EndSignals {
    /// A signal for a new connection of the core with this inbox.
    pub(super) fn open(self: &Rc<Self>, inbox: &Inbox) -> LocalSignal {
        let number = self.last_number.get() + 1;
        self.last_number.set(number);
        let signal = EndSignal { number, is_set: Arc::default(), inbox: inbox.clone() };
        LocalSignal { signal, signals: self.clone() }
    }
}

impl ConnectionControl for EndSignal {
    fn has_ended(&self) -> bool {
        self.is_set.load(Ordering::Relaxed)
    }

    /// Ends the connection, and wakes its task.
    fn hang_up(&self) {
        self.is_set.store(true, Ordering::Relaxed);
        let number = self.number;
        self.inbox.send(move |core: &Rc<EngineCore>| {
            let waiting = core.local(EndSignals::default).waiting.borrow_mut().remove(&number);
            waiting.into_iter().for_each(|waker| waker.wake());
        });
    }
}

impl LocalSignal {
    /// Has the signal wake a task.
    pub(super) fn wake_when_set(&self, waker: &Waker) {
        self.signals.waiting.borrow_mut().insert(self.signal.number, waker.clone());
    }
}

impl Drop for LocalSignal {
    fn drop(&mut self) {
        self.signal.is_set.store(true, Ordering::Relaxed);
        self.signals.waiting.borrow_mut().remove(&self.signal.number);
    }
}
