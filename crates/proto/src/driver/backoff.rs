//! Exponential backoff for resources that others release: memory, the end of another session.

use std::time::{Duration, Instant};

/// The time of the next retry; the delay doubles until there is progress. Progress is recorded with
/// every request, and the time is asked for only while something waits: so it is not stored.
pub(crate) struct Backoff {
    /// Time of the last retry or progress.
    since: Instant,
    /// Delay of the next retry.
    delay: Duration,
    /// Delay of the retry after that.
    pause: Duration,
}

impl Backoff {
    /// A backoff whose first retry is due `now`.
    pub(crate) fn new(now: Instant) -> Backoff {
        Backoff { since: now, delay: Duration::ZERO, pause: SHORTEST }
    }

    /// The time of the next retry.
    pub(crate) fn at(&self) -> Instant {
        self.since.checked_add(self.delay).unwrap_or(self.since)
    }

    /// Whether the delay has reached its maximum.
    pub(crate) fn is_longest(&self) -> bool {
        self.pause == MAX_PAUSE
    }

    /// Records a retry; if it was due, the delay doubles.
    pub(crate) fn on_try(&mut self, now: Instant) {
        if now >= self.at() {
            (self.since, self.delay) = (now, self.pause);
            self.pause = self.pause.saturating_mul(2).min(MAX_PAUSE);
        }
    }

    /// Records progress: resets the delay to its minimum.
    #[inline]
    pub(crate) fn reset(&mut self, now: Instant) {
        *self = Backoff { since: now, delay: SHORTEST, pause: SHORTEST };
    }
}

const SHORTEST: Duration = Duration::from_millis(1);
/// The maximum delay; thousands of connections may wait, and their retries must not load a CPU.
const MAX_PAUSE: Duration = Duration::from_millis(128);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_until_something_moves() {
        let start = Instant::now();
        let (mut backoff, mut now, mut pauses) = (Backoff::new(start), start, Vec::new());
        for _ in 0..10 {
            backoff.on_try(now);
            backoff.on_try(now);
            pauses.push((backoff.at() - now).as_millis());
            now = backoff.at();
        }
        assert!(backoff.is_longest());
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 128, 128]);
        backoff.reset(now);
        assert_eq!(backoff.at() - now, SHORTEST);
    }
}
