//! The deadlines of a controller's queue.

use super::keep_alive::KeepAlive;
use crate::driver::backoff::Backoff;
use std::time::{Duration, Instant};

/// The deadlines of one queue.
pub(super) struct QueueTimers {
    /// Deadline of Connect and authentication.
    pub(super) connect_by: Instant,
    /// Time of the latest call.
    pub(super) now: Instant,
    /// Deadline of the next authentication message.
    pub(super) message_by: Instant,
    /// Next time to retry commands that wait for the pool, for locked ranges or for a previous
    /// association; completions retry them too.
    pub(super) retry: Backoff,
    /// Next time to poll for events.
    pub(super) poll_at: Instant,
    pub(super) keep_alive: Option<KeepAlive>,
}

impl QueueTimers {
    /// Restarts the deadline of the next authentication message.
    pub(super) fn expect_message(&mut self) {
        self.message_by = self.now.checked_add(AUTH_MESSAGE_TIMEOUT).unwrap_or(self.now);
    }
}

/// Time limit for each authentication message: computing with the largest group takes a few
/// seconds.
const AUTH_MESSAGE_TIMEOUT: Duration = Duration::from_secs(15);
