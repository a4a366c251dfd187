//! The time without a back end that answers.

use std::cmp;
use std::time::{Duration, Instant};

/// An outage, which ends with an answer: a back end that takes connections and answers nothing is
/// as absent as one that does not listen.
pub(super) struct Outage {
    since: Instant,
    /// The pause before the next try.
    pause: Duration,
    /// The back end was tried since.
    pub(super) was_tried: bool,
    /// Requests fail.
    pub(super) has_failed: bool,
}

impl Outage {
    /// One that begins now.
    pub(super) fn begin() -> Outage {
        Outage { since: Instant::now(), pause: FIRST_PAUSE, was_tried: false, has_failed: false }
    }

    /// Whether it lasts longer than requests wait, and at least one try has failed.
    pub(super) fn exceeds(&self, timeout: Duration) -> bool {
        self.was_tried && self.since.elapsed() >= timeout
    }

    /// The pause before the next try, each one longer.
    pub(super) fn next_pause(&mut self) -> Duration {
        let next = cmp::min(self.pause * 2, MAX_PAUSE);
        std::mem::replace(&mut self.pause, next)
    }
}

/// The first pause before connecting again, which doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_become_rarer_and_requests_fail_after_one() {
        let mut outage = Outage::begin();
        assert!(!outage.exceeds(Duration::ZERO), "nothing was tried");
        let pauses: Vec<_> = std::iter::repeat_with(|| outage.next_pause().as_millis()).take(9).collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        outage.was_tried = true;
        assert!(outage.exceeds(Duration::ZERO) && !outage.exceeds(Duration::MAX));
    }
}
