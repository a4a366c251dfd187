//! When to try again what only others can make possible: memory, locked ranges, the end of another
//! session.

use std::time::{Duration, Instant};

/// The next try, after pauses that double until something moves.
pub(crate) struct Backoff {
    at: Instant,
    pause: Duration,
}

impl Backoff {
    /// The first try is due `now`.
    pub(crate) fn new(now: Instant) -> Backoff {
        Backoff { at: now, pause: SHORTEST }
    }

    /// When the next try is due.
    #[inline]
    pub(crate) fn at(&self) -> Instant {
        self.at
    }

    /// Whether tries have been in vain for so long that pauses grow no more.
    pub(crate) fn is_longest(&self) -> bool {
        self.pause == LONGEST
    }

    /// Everything was tried `now`: if that was due, the next try is later than this one was.
    pub(crate) fn on_try(&mut self, now: Instant) {
        if now >= self.at {
            self.at = now.checked_add(self.pause).unwrap_or(now);
            self.pause = self.pause.saturating_mul(2).min(LONGEST);
        }
    }

    /// Something has moved: tries follow each other fast again.
    #[inline]
    pub(crate) fn reset(&mut self, now: Instant) {
        self.at = now.checked_add(SHORTEST).unwrap_or(now);
        self.pause = SHORTEST;
    }
}

const SHORTEST: Duration = Duration::from_millis(1);
/// Thousands of connections may wait, and together they must not take a processor.
const LONGEST: Duration = Duration::from_millis(128);

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
