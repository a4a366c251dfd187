//! When an acknowledgement is sent.
//!
//! It is a datagram of its own. At depth 1 it would be every second one of both sides, and only
//! tells the peer that it need not keep the packets. So it waits for more packets, or a moment.
//! Peers of other implementations get it at once: Linux's NVMe host completes a command when its
//! packet is acknowledged.

use super::cm::RoceTerms;
use super::congestion::is_guid;
use std::time::{Duration, Instant};

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

    /// Whether an acknowledgement of so many packets waits for more.
    #[inline]
    pub(super) fn waits(&mut self, packets: u32, now: Instant) -> bool {
        if !self.is_allowed || packets >= MOST_PACKETS {
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

/// Packets that are acknowledged at once: an eighth of the usual window.
const MOST_PACKETS: u32 = 8;
/// A small part of the shortest timeout of the peer.
const LONGEST: Duration = Duration::from_micros(100);
