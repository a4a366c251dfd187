//! A token bucket for what strangers make this side do.

use std::time::{Duration, Instant};

/// A bucket of `burst` tokens, which is full at first and gets one each `interval`.
///
/// It is stored as the time at which it will be full again.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenBucket {
    interval: Duration,
    burst: u32,
    full_at: Option<Instant>,
}

impl TokenBucket {
    /// A full bucket.
    pub(super) fn new(burst: u32, per_second: u32) -> TokenBucket {
        let second = Duration::from_secs(1);
        let interval = second.checked_div(per_second).unwrap_or(second);
        TokenBucket { interval, burst, full_at: None }
    }

    /// Takes a token, if `reserve` others are left then; returns whether it has.
    pub(super) fn take(&mut self, reserve: u32, now: Instant) -> bool {
        let full_at = self.full_at.filter(|full_at| *full_at > now).unwrap_or(now);
        let after = full_at.checked_add(self.interval);
        let most = self.interval.saturating_mul(self.burst.saturating_sub(reserve));
        let taken = after.filter(|after| after.saturating_duration_since(now) <= most);
        self.full_at = taken.or(self.full_at);
        taken.is_some()
    }

    /// Puts a token back.
    pub(super) fn put_back(&mut self) {
        self.full_at = self.full_at.and_then(|full_at| full_at.checked_sub(self.interval));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_has_its_burst_and_is_filled_at_its_rate() {
        let (mut bucket, mut now) = (TokenBucket::new(8, 4), Instant::now());
        let mut taken = |reserve, now| (0..100).filter(|_| bucket.take(reserve, now)).count();
        assert_eq!(taken(2, now), 6, "two are left");
        assert_eq!(taken(0, now), 2);
        now += Duration::from_secs(1);
        assert_eq!((taken(2, now), taken(0, now)), (2, 2));
        now += Duration::from_secs(1000);
        assert_eq!((taken(8, now), taken(0, now)), (0, 8));
    }

    #[test]
    fn a_token_that_was_put_back_can_be_taken_again() {
        let (mut bucket, now) = (TokenBucket::new(1, 1), Instant::now());
        bucket.put_back();
        assert!(bucket.take(0, now) && !bucket.take(0, now));
        bucket.put_back();
        assert!(bucket.take(0, now) && !bucket.take(0, now));
    }
}
