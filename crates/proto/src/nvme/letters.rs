//! What other cores leave for a queue: news for the host, and orders about its commands.
//!
//! A queue is on one core, and nobody else touches its commands. Who wants something of it posts a [`Letter`] and rings;
//! the queue reads at its next turn. To see that nothing is there costs a load.

use crate::exports::VolumeId;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Has a queue's session take a turn soon, from any thread.
pub type Ring = Arc<dyn Fn() + Send + Sync>;

/// A queue's letters.
pub(crate) struct Letterbox {
    has_letters: AtomicBool,
    letters: Mutex<VecDeque<Letter>>,
    ring: Option<Ring>,
}

/// One letter.
pub(crate) enum Letter {
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

/// An Abort for a command of another queue. Dropped without a word it says that the command was not aborted.
pub(crate) struct AbortOrder {
    pub(crate) cid: u16,
    reply: Arc<AtomicU8>,
}

/// Where the answer to an [`AbortOrder`] will be.
pub(crate) struct AbortReply(Arc<AtomicU8>);

impl Letterbox {
    pub(crate) fn new(ring: Option<Ring>) -> Arc<Letterbox> {
        Arc::new(Letterbox { has_letters: AtomicBool::new(false), letters: Mutex::default(), ring })
    }

    /// Whether somebody rings when there are letters; if not, it is to be looked at now and then.
    pub(crate) fn is_rung(&self) -> bool {
        self.ring.is_some()
    }

    /// Leaves a letter. What is said already is not said again, and what does not fit is lost.
    pub(crate) fn post(&self, letter: Letter) {
        let mut letters = self.letters.lock().unwrap_or_else(PoisonError::into_inner);
        if letters.len() >= MAX_LETTERS || letters.iter().any(|other| other.says_the_same_as(&letter)) {
            return;
        }
        letters.push_back(letter);
        drop(letters);
        self.has_letters.store(true, Ordering::Release);
        self.ring.iter().for_each(|ring| ring());
    }

    /// The next letter.
    #[inline]
    pub(crate) fn read(&self) -> Option<Letter> {
        if !self.has_letters.load(Ordering::Acquire) {
            return None;
        }
        let mut letters = self.letters.lock().unwrap_or_else(PoisonError::into_inner);
        let letter = letters.pop_front();
        self.has_letters.store(!letters.is_empty(), Ordering::Release);
        letter
    }
}

impl Letter {
    fn says_the_same_as(&self, other: &Letter) -> bool {
        match (self, other) {
            (Letter::NamespaceChanged(one), Letter::NamespaceChanged(other))
            | (Letter::NamespaceShown(one), Letter::NamespaceShown(other)) => one == other,
            (Letter::Preempted(one), Letter::Preempted(other)) => one == other,
            (Letter::AnaChanged { port: one }, Letter::AnaChanged { port: other }) => one == other,
            (Letter::DiscoveryChanged, Letter::DiscoveryChanged) => true,
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
        self.reply.store(ABORTED, Ordering::Release);
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
}

/// Letters that wait for one queue.
const MAX_LETTERS: usize = 2048;
const PENDING: u8 = 0;
const ABORTED: u8 = 1;
const NOT_ABORTED: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn letters_come_in_order_are_rung_for_and_are_bounded() {
        let rings = Arc::new(AtomicUsize::new(0));
        let counter = rings.clone();
        let letterbox = Letterbox::new(Some(Arc::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        })));
        assert!(letterbox.read().is_none());
        for nsid in [1, 2, 1] {
            letterbox.post(Letter::NamespaceChanged(nsid));
        }
        assert_eq!(rings.load(Ordering::Relaxed), 2);
        for nsid in [1, 2] {
            assert!(matches!(letterbox.read(), Some(Letter::NamespaceChanged(is)) if is == nsid));
        }
        assert!(letterbox.read().is_none());
        (0..2 * MAX_LETTERS as u32).for_each(|nsid| letterbox.post(Letter::NamespaceChanged(nsid)));
        assert_eq!(std::iter::from_fn(|| letterbox.read()).count(), MAX_LETTERS);
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
