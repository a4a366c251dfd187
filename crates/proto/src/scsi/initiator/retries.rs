//! Timers of a session's queue: retries of commands that ended with BUSY, and ALUA state queries.

use super::ScsiQueue;
use crate::driver::session::PathRank;
use std::time::{Duration, Instant};

/// Deadlines of a session's queue.
pub(crate) struct ScsiQueueTimers {
    /// Next query of the ALUA state, if the path is not optimized.
    access_at: Instant,
    /// Next retry of commands that ended with BUSY, if there are any.
    retry_at: Option<Instant>,
    retry_delay: Duration,
}

impl ScsiQueueTimers {
    pub(crate) fn new(now: Instant) -> ScsiQueueTimers {
        ScsiQueueTimers { access_at: now, retry_at: None, retry_delay: FIRST_RETRY_DELAY }
    }

    /// The next deadline, if there is one.
    pub(crate) fn poll<T: Default>(&self, queue: &ScsiQueue<T>) -> Option<Instant> {
        let retry = self.retry_at.filter(|_| queue.has_delayed());
        let access = (queue.path_rank() != PathRank::Best).then_some(self.access_at);
        retry.into_iter().chain(access).min()
    }

    /// Schedules a retry if commands have ended with BUSY. Retry delays grow while the unit stays
    /// busy.
    #[inline]
    pub(crate) fn on_command<T: Default>(&mut self, queue: &ScsiQueue<T>, now: Instant) {
        if queue.has_delayed() && self.retry_at.is_none() {
            self.retry_at = now.checked_add(self.retry_delay);
        }
    }

    /// Queues the retries and the state query that are due. The caller then sends the commands.
    pub(crate) fn on_timeout<T: Default>(&mut self, queue: &mut ScsiQueue<T>, now: Instant) {
        if !queue.has_delayed() {
            (self.retry_at, self.retry_delay) = (None, FIRST_RETRY_DELAY);
        } else if self.retry_at.is_some_and(|at| now >= at) {
            self.retry_at = None;
            queue.resume(self.retry_delay);
            self.retry_delay = self.retry_delay.saturating_mul(2).min(MAX_RETRY_DELAY);
        }
        if now >= self.access_at {
            // A path without access is idle, so no command would report that its state has changed.
            self.access_at = now.checked_add(ACCESS_INTERVAL).unwrap_or(now);
            if queue.path_rank() != PathRank::Best {
                queue.query_access();
            }
        }
    }
}

/// Interval of ALUA state queries while the path is not optimized.
const ACCESS_INTERVAL: Duration = Duration::from_secs(1);
/// First and longest delay before a retry of commands that ended with BUSY.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(2);
const MAX_RETRY_DELAY: Duration = Duration::from_millis(500);
