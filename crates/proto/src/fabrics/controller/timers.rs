//! When a queue of a controller has to do something by itself.

use super::keep_alive::KeepAlive;
use crate::backoff::Backoff;
use std::time::{Duration, Instant};

/// The deadlines of one queue.
pub(super) struct QueueTimers {
    /// A queue must be connected, and its host authenticated, by then.
    pub(super) connect_by: Instant,
    /// When the latest call came.
    pub(super) now: Instant,
    /// The next message of an authentication must have come by then.
    pub(super) message_by: Instant,
    /// When to ask the pool, locked ranges and older associations again, apart from each
    /// completion.
    pub(super) retry: Backoff,
    /// When to poll for events.
    pub(super) poll_at: Instant,
    pub(super) keep_alive: Option<KeepAlive>,
}

impl QueueTimers {
    /// What a host that proves who it is sends next has its time from now on.
    pub(super) fn expect_message(&mut self) {
        self.message_by = self.now.checked_add(AUTH_MESSAGE_TIMEOUT).unwrap_or(self.now);
    }
}

/// For each message of a host that proves who it is: to compute with the largest group takes
/// seconds at most.
const AUTH_MESSAGE_TIMEOUT: Duration = Duration::from_secs(15);
