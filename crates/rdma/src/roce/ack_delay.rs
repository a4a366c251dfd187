//! When an acknowledgement is sent.
//!
//! It is a datagram of its own. At depth 1 it would be every second one of both sides, and only
//! tells the peer that it need not keep the packets. So it waits for more packets, or a moment.
//! Peers of other implementations get it at once: Linux's NVMe host completes a command when its
//! packet is acknowledged.

use super::cm::RoceTerms;
use super::guid::is_guid;
use std::time::{Duration, Instant};

/// What has arrived since the last answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Unanswered {
    packets: u32,
    bytes: usize,
}

impl Unanswered {
    /// More than waits for anything.
    pub(super) const MUCH: Unanswered = Unanswered { packets: u32::MAX, bytes: usize::MAX };

    /// Adds packets with so many bytes of payload.
    #[inline]
    pub(super) fn add(&mut self, packets: u32, bytes: usize) {
        self.packets = self.packets.saturating_add(packets);
        self.bytes = self.bytes.saturating_add(bytes);
    }

    fn is_much(self) -> bool {
        self.packets >= MOST_PACKETS || self.bytes >= MOST_BYTES
    }
}

/// The delay of acknowledgements of one connection.
#[derive(Default)]
pub(super) struct AckDelay {
    /// Whether the peer is of this implementation.
    is_allowed: bool,
    /// When the acknowledgement that waits is sent.
    due: Option<Instant>,
}

impl AckDelay {
    /// Sets what both sides have agreed on.
    pub(super) fn connect(&mut self, terms: &RoceTerms) {
        self.is_allowed = is_guid(terms.peer_guid);
    }

    /// Whether an acknowledgement waits for more.
    #[inline]
    pub(super) fn waits(&mut self, unanswered: Unanswered, now: Instant) -> bool {
        if !self.is_allowed || unanswered.is_much() {
            return false;
        }
        match self.due {
            Some(due) => now < due,
            None => {
                self.due = now.checked_add(LONGEST);
                true
            }
        }
    }

    /// An answer of any kind was sent.
    #[inline]
    pub(super) fn on_answered(&mut self) {
        self.due = None;
    }

    /// When to send the acknowledgement that waits.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.due
    }
}

/// Packets, and bytes of payload, that are acknowledged at once: at most a quarter of what the peer
/// sends without an acknowledgement.
const MOST_PACKETS: u32 = 32;
const MOST_BYTES: usize = 32 << 10;
/// A small part of the shortest timeout of the peer.
const LONGEST: Duration = Duration::from_micros(100);
