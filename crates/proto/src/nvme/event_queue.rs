//! Events from other cores to a queue: changes to report to its host, and commands to abort.
//!
//! A queue belongs to one core, and other cores do not access its commands. They push a
//! [`QueueEvent`] and notify the queue's session, which pops the event at its next turn. Checking
//! an empty queue costs one load.

use crate::exports::VolumeId;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Wakes a queue's session, from any thread.
pub type Notifier = Arc<dyn Fn() + Send + Sync>;

/// The pending events of one queue.
pub(crate) struct EventQueue {
    has_events: AtomicBool,
    events: Mutex<VecDeque<QueueEvent>>,
    notifier: Option<Notifier>,
}

/// An event for a queue.
pub(crate) enum QueueEvent {
    /// To an admin queue: the Identify data of this namespace has changed.
    NamespaceChanged(u32),
    /// To an admin queue: this namespace became visible to its host, or is no longer visible.
    NamespaceShown(u32),
    /// To an admin queue: other hosts have changed its host's registration or the reservation.
    Reservation {
        /// Namespace identifier.
        nsid: u32,
        /// Reservation Notification Log Page Type.
        kind: u8,
    },
    /// To an admin queue: the ANA state of a group has changed at a port.
    AnaChanged {
        /// The port's identifier; `None`: at all ports.
        port: Option<u16>,
    },
    /// To an admin queue of a discovery controller: the discovery log has changed.
    DiscoveryChanged,
    /// To an I/O queue: abort this command.
    Abort(AbortOrder),
    /// To an I/O queue: its host was preempted, and its I/O on this volume has to end.
    Preempted(VolumeId),
}

/// An Abort for a command of another queue. Dropping it reports that the command was not aborted.
pub(crate) struct AbortOrder {
    pub(crate) cid: u16,
    reply: Arc<AtomicU8>,
}

/// The future result of an [`AbortOrder`].
pub(crate) struct AbortReply(Arc<AtomicU8>);

impl EventQueue {
    pub(crate) fn new(notifier: Option<Notifier>) -> Arc<EventQueue> {
        Arc::new(EventQueue { has_events: AtomicBool::new(false), events: Mutex::default(), notifier })
    }

    /// Whether a push notifies the session; otherwise the session polls.
    pub(crate) fn notifies(&self) -> bool {
        self.notifier.is_some()
    }

    /// Adds an event. An event that is pending already is not added again; one beyond
    /// [`MAX_EVENTS`] is dropped.
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

    /// Takes the next event.
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
    /// Creates an order and its future result.
    pub(crate) fn new(cid: u16) -> (AbortOrder, AbortReply) {
        let reply = Arc::new(AtomicU8::new(PENDING));
        (AbortOrder { cid, reply: reply.clone() }, AbortReply(reply))
    }

    /// Reports that the command was aborted.
    pub(crate) fn aborted(self) {
        let _ = self.reply.compare_exchange(PENDING, ABORTED, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Whether the result is no longer awaited, because the Abort has completed as "not aborted".
    pub(crate) fn is_given_up(&self) -> bool {
        self.reply.load(Ordering::Acquire) == NOT_ABORTED
    }
}

impl Drop for AbortOrder {
    fn drop(&mut self) {
        // Has no effect if the command was aborted.
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

    /// Stops waiting; returns whether the command was aborted.
    pub(crate) fn give_up(&self) -> bool {
        let answer = self.0.compare_exchange(PENDING, NOT_ABORTED, Ordering::AcqRel, Ordering::Acquire);
        answer == Err(ABORTED)
    }
}

/// Most pending events of one queue.
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
    fn a_dropped_order_has_a_result_too() {
        let (order, reply) = AbortOrder::new(7);
        assert_eq!(reply.was_aborted(), None);
        drop(order);
        assert_eq!(reply.was_aborted(), Some(false));
        let (order, reply) = AbortOrder::new(7);
        order.aborted();
        assert_eq!(reply.was_aborted(), Some(true));
    }
}
