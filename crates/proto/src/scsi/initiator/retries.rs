//! When a session sends again what met a busy unit, and asks again how well its path leads to one.

use super::ScsiQueue;
use crate::session::PathRank;
use std::time::{Duration, Instant};

/// Deadlines of a session's queue.
pub(crate) struct QueueTimers {
    /// When to ask again how well the path leads to the unit, if it is not the best.
    access_at: Instant,
    /// When to send again what met a busy unit, if anything has.
    retry_at: Option<Instant>,
    pause: Duration,
}

impl QueueTimers {
    pub(crate) fn new(now: Instant) -> QueueTimers {
        QueueTimers { access_at: now, retry_at: None, pause: FIRST_PAUSE }
    }

    /// The next deadline, if there is one.
    pub(crate) fn poll<T: Default>(&self, queue: &ScsiQueue<T>) -> Option<Instant> {
        let retry = self.retry_at.filter(|_| queue.has_later());
        let access = (queue.path_rank() != PathRank::Best).then_some(self.access_at);
        retry.into_iter().chain(access).min()
    }

    /// A command may have met a busy unit. It is sent again after a pause, which grows as long as
    /// the unit stays busy.
    #[inline]
    pub(crate) fn on_command<T: Default>(&mut self, queue: &ScsiQueue<T>, now: Instant) {
        if queue.has_later() && self.retry_at.is_none() {
            self.retry_at = now.checked_add(self.pause);
        }
    }

    /// Some time has passed: has the queue send what is due.
    pub(crate) fn on_timeout<T: Default>(&mut self, queue: &mut ScsiQueue<T>, now: Instant) {
        if !queue.has_later() {
            (self.retry_at, self.pause) = (None, FIRST_PAUSE);
        } else if self.retry_at.is_some_and(|at| now >= at) {
            self.retry_at = None;
            self.pause = self.pause.saturating_mul(2).min(LONGEST_PAUSE);
            queue.resume();
        }
        if now >= self.access_at {
            // The state of a path may change without a word: nothing is sent on it that could meet
            // a unit attention.
            self.access_at = now.checked_add(ACCESS_INTERVAL).unwrap_or(now);
            if queue.path_rank() != PathRank::Best {
                queue.ask_for_access();
            }
        }
    }
}

/// Between two questions for the state of a path that is not the best.
const ACCESS_INTERVAL: Duration = Duration::from_secs(1);
/// Between two attempts at a busy unit.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
