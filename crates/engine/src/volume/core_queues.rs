//! Queues of cores to a volume, each shared by the core's channels.

use blockmux_volume::{Completion, Waker};
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

/// The queues of a core to volumes of one kind, by the number of the volume.
pub(super) struct CoreQueues<Q>(RefCell<Vec<(u64, Weak<RefCell<Q>>)>>);

impl<Q> Default for CoreQueues<Q> {
    fn default() -> CoreQueues<Q> {
        CoreQueues(RefCell::default())
    }
}

impl<Q> CoreQueues<Q> {
    /// The queue to a volume, unless its last user is gone.
    pub(super) fn find(&self, volume: u64) -> Option<Rc<RefCell<Q>>> {
        self.0
            .borrow()
            .iter()
            .find(|(found, queue)| *found == volume && queue.strong_count() > 0)?
            .1
            .upgrade()
    }

    /// Adds the queue to a volume that has none.
    pub(super) fn add(&self, volume: u64, queue: &Rc<RefCell<Q>>) {
        let mut all = self.0.borrow_mut();
        all.retain(|(_, queue)| queue.strong_count() > 0);
        all.push((volume, Rc::downgrade(queue)));
    }
}

/// The completions of a channel.
pub(super) struct ChannelCompletions {
    pub(super) done: RefCell<Vec<Completion>>,
    pub(super) waker: Waker,
    /// Nobody polls any longer.
    pub(super) is_closed: Cell<bool>,
}

impl ChannelCompletions {
    pub(super) fn new(depth: u32, waker: Waker) -> Rc<ChannelCompletions> {
        let done = RefCell::new(Vec::with_capacity(depth as usize));
        Rc::new(ChannelCompletions { done, waker, is_closed: Cell::new(false) })
    }

    /// Takes a completion, and wakes the channel's user unless this is `own`, whose call this is.
    #[inline]
    pub(super) fn push(self: &Rc<Self>, completion: Completion, own: Option<&Rc<ChannelCompletions>>) {
        if self.is_closed.get() {
            return;
        }
        self.done.borrow_mut().push(completion);
        if own.is_none_or(|own| !Rc::ptr_eq(own, self)) {
            self.waker.wake();
        }
    }
}
