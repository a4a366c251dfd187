//! What other cores tell a queue: changes that its host hears of, and commands to abort.
//!
//! A queue is on one core, and nobody else touches its commands. Other cores push a [`QueueEvent`]
//! and notify the queue's session, which pops it at its next turn. An empty queue costs one load to
//! see.

use crate::exports::VolumeId;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Has a queue's session take a turn soon, from any thread.
pub type Notifier = Arc<dyn Fn() + Send + Sync>;

/// The events that wait for one queue.
pub(crate) struct EventQueue {
    has_events: AtomicBool,
    events: Mutex<VecDeque<QueueEvent>>,
    notifier: Option<Notifier>,
}

/// One event.
pub(crate) enum QueueEvent {
    /// To an admin queue: what Identify tells of this namespace has changed.
    NamespaceChanged(u32),
    /// To an admin queue: its host sees this namespace from now on, or does not any more.
    NamespaceShown(u32),
    /// To an admin queue: what others have done to its host's registration, or to the reservation.
    Reservation {
        /// Namespace.
        nsid: u32,
        /// As the reservation notification log has it.
        kind: u8,
    },
    /// To an admin queue: how namespaces are reached through a port has changed.
    AnaChanged {
        /// The port's identifier.
        port: u16,
    },
    /// To an admin queue of a discovery controller: the discovery log has changed.
    DiscoveryChanged,
    /// To an I/O queue: abort this command.
    Abort(AbortOrder),
    /// To an I/O queue: its host was preempted, and what it has under way on that volume is to end.
    Preempted(VolumeId),
}

/// An Abort for a command of another queue. Dropped without a word it says that the command was not
/// aborted.
pub(crate) struct AbortOrder {
    pub(crate) cid: u16,
    reply: Arc<AtomicU8>,
}

/// Where the answer to an [`AbortOrder`] will be.
pub(crate) struct AbortReply(Arc<AtomicU8>);

impl EventQueue {
    pub(crate) fn new(notifier: Option<Notifier>) -> Arc<EventQueue> {
        Arc::new(EventQueue { has_events: AtomicBool::new(false), events: Mutex::default(), notifier })
    }

    /// Whether a push notifies the session; if not, the session polls.
    pub(crate) fn notifies(&self) -> bool {
        self.notifier.is_some()
    }

    /// Adds an event. One that waits already is not added again, and one that does not fit is lost.
    pub(crate) fn push(&self, event: QueueEvent) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() >= MAX_EVENTS || events.iter().any(|other| other.repeats(&event)) {
            return;
        }
        events.push_back(event);
        drop(events);
        self.has_events.store(true, Ordering::Release);
        self.notifier.iter().for_each(|notifier| notifier());
    }

    /// The next event.
    #[inline]
    pub(crate) fn pop(&self) -> Option<QueueEvent> {
        if !self.has_events.load(Ordering::Acquire) {
            return None;
        }
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let event = events.pop_front();
        self.has_events.store(!events.is_empty(), Ordering::Release);
        event
    }
}

impl QueueEvent {
    fn repeats(&self, other: &QueueEvent) -> bool {
        match (self, other) {
            (QueueEvent::NamespaceChanged(one), QueueEvent::NamespaceChanged(other))
            | (QueueEvent::NamespaceShown(one), QueueEvent::NamespaceShown(other)) => one == other,
            (QueueEvent::Preempted(one), QueueEvent::Preempted(other)) => one == other,
            (QueueEvent::AnaChanged { port: one }, QueueEvent::AnaChanged { port: other }) => one == other,
            (QueueEvent::DiscoveryChanged, QueueEvent::DiscoveryChanged) => true,
            _ => false,
        }
    }
}

impl AbortOrder {
    /// An order, and where its answer will be.
    pub(crate) fn new(cid: u16) -> (AbortOrder, AbortReply) {
        let reply = Arc::new(AtomicU8::new(PENDING));
        (AbortOrder { cid, reply: reply.clone() }, AbortReply(reply))
    }

    /// The command was aborted.
    pub(crate) fn aborted(self) {
        let _ = self.reply.compare_exchange(PENDING, ABORTED, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Whether nobody waits for the answer any more: the host was told that the command was not
    /// aborted.
    pub(crate) fn is_given_up(&self) -> bool {
        self.reply.load(Ordering::Acquire) == NOT_ABORTED
    }
}

impl Drop for AbortOrder {
    fn drop(&mut self) {
        // Unless it was aborted.
        let _ = self.reply.compare_exchange(PENDING, NOT_ABORTED, Ordering::AcqRel, Ordering::Relaxed);
    }
}

impl AbortReply {
    /// Whether the command was aborted, once that is known.
    pub(crate) fn was_aborted(&self) -> Option<bool> {
        match self.0.load(Ordering::Acquire) {
            PENDING => None,
            answer => Some(answer == ABORTED),
        }
    }

    /// Waits no longer; whether the command was aborted.
    pub(crate) fn give_up(&self) -> bool {
        let answer = self.0.compare_exchange(PENDING, NOT_ABORTED, Ordering::AcqRel, Ordering::Acquire);
        answer == Err(ABORTED)
    }
}

/// Events that wait for one queue.
const MAX_EVENTS: usize = 2048;
const PENDING: u8 = 0;
const ABORTED: u8 = 1;
const NOT_ABORTED: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn events_come_in_order_notify_and_are_bounded() {
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = calls.clone();
        let queue = EventQueue::new(Some(Arc::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        })));
        assert!(queue.pop().is_none());
        for nsid in [1, 2, 1] {
            queue.push(QueueEvent::NamespaceChanged(nsid));
        }
        assert_eq!(calls.load(Ordering::Relaxed), 2);
        for nsid in [1, 2] {
            assert!(matches!(queue.pop(), Some(QueueEvent::NamespaceChanged(is)) if is == nsid));
        }
        assert!(queue.pop().is_none());
        (0..2 * MAX_EVENTS as u32).for_each(|nsid| queue.push(QueueEvent::NamespaceChanged(nsid)));
        assert_eq!(std::iter::from_fn(|| queue.pop()).count(), MAX_EVENTS);
    }

    #[test]
    fn an_order_that_nobody_carries_out_is_answered_too() {
        let (order, reply) = AbortOrder::new(7);
        assert_eq!(reply.was_aborted(), None);
        drop(order);
        assert_eq!(reply.was_aborted(), Some(false));
        let (order, reply) = AbortOrder::new(7);
        order.aborted();
        assert_eq!(reply.was_aborted(), Some(true));
    }
}
