//! Exponential backoff for resources that others release: memory, the end of another session.

use std::time::{Duration, Instant};

/// The time of the next retry; the delay doubles until there is progress. Progress is recorded with
/// every request, and the time is asked for only while something waits: so it is not stored.
pub(crate) struct Backoff {
    /// Time of the last retry or progress.
    since: Instant,
    /// Delay of the next retry, in milliseconds.
    delay_ms: u16,
    /// Delay of the retry after that, in milliseconds.
    pause_ms: u16,
}

impl Backoff {
    /// A backoff whose first retry is due `now`.
    pub(crate) fn new(now: Instant) -> Backoff {
        Backoff { since: now, delay_ms: 0, pause_ms: SHORTEST_MS }
    }

    /// The time of the next retry.
    pub(crate) fn at(&self) -> Instant {
        let delay = Duration::from_millis(self.delay_ms.into());
        self.since.checked_add(delay).unwrap_or(self.since)
    }

    /// Whether the delay has reached its maximum.
    pub(crate) fn is_longest(&self) -> bool {
        self.pause_ms == MAX_PAUSE_MS
    }

    /// Records a retry; if it was due, the delay doubles.
    pub(crate) fn on_try(&mut self, now: Instant) {
        if now >= self.at() {
            (self.since, self.delay_ms) = (now, self.pause_ms);
            self.pause_ms = self.pause_ms.saturating_mul(2).min(MAX_PAUSE_MS);
        }
    }

    /// Records progress: resets the delay to its minimum.
    #[inline]
    pub(crate) fn reset(&mut self, now: Instant) {
        *self = Backoff { since: now, delay_ms: SHORTEST_MS, pause_ms: SHORTEST_MS };
    }
}

const SHORTEST_MS: u16 = 1;
/// The maximum delay; thousands of connections may wait, and their retries must not load a CPU.
const MAX_PAUSE_MS: u16 = 128;

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
        assert_eq!((backoff.at() - now).as_millis(), SHORTEST_MS.into());
    }
}
