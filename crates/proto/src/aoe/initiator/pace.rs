//! How long to wait for an answer, and how many commands to have outstanding.
//!
//! The first is the usual estimator over round trips (RFC 6298) with bounds for a local network: only commands that
//! were sent once are measured, and until one is, losses double the time. The second is a congestion window: it starts
//! small and grows with every answer, faster below the size at which frames were lost last, is halved by a loss, once
//! for all that was sent before, and is never above the target's buffer count.
//!
//! The shortest time is for frames that others have overtaken. As long as nothing that was sent later is answered either,
//! nothing is taken for lost so soon (`send.rs`): a machine that is busy leaves a target without a processor for longer,
//! and to send all again then would make it busier and the window small for nothing.

use std::time::{Duration, Instant};

/// Round-trip times and the window of one target.
#[derive(Debug)]
pub(super) struct Pace {
    smoothed: Option<Duration>,
    variation: Duration,
    /// Doublings since the last measured round trip.
    doublings: u32,
    window: u32,
    /// Below this the window grows by one with every answer.
    threshold: u32,
    /// Answers since it grew last.
    answers: u32,
    most: u32,
    reduced_at: Option<Instant>,
}

impl Pace {
    pub(super) fn new() -> Pace {
        Pace {
            smoothed: None,
            variation: Duration::ZERO,
            doublings: 0,
            window: FIRST_WINDOW,
            threshold: u32::MAX,
            answers: 0,
            most: FIRST_WINDOW,
            reduced_at: None,
        }
    }

    /// The target has so many buffers; at least one is taken for granted.
    pub(super) fn set_most(&mut self, most: u32) {
        self.most = most.max(1);
        self.window = self.window.min(self.most);
    }

    /// Commands that may be outstanding.
    #[inline]
    pub(super) fn window(&self) -> u32 {
        self.window
    }

    /// How long to wait for an answer to something sent for the first time now.
    #[inline]
    pub(super) fn timeout(&self) -> Duration {
        let first = match self.smoothed {
            Some(smoothed) => smoothed.saturating_add(self.variation.saturating_mul(4)),
            None => FIRST_TIMEOUT,
        };
        let factor = 1u32.checked_shl(self.doublings).unwrap_or(u32::MAX);
        first.max(SHORTEST_TIMEOUT).saturating_mul(factor).min(LONGEST_TIMEOUT)
    }

    /// An answer has come: to a command sent once so long ago, or to one that was repeated. `outstanding` counts it.
    #[inline]
    pub(super) fn on_answer(&mut self, round_trip: Option<Duration>, outstanding: u32) {
        if let Some(time) = round_trip {
            self.doublings = 0;
            match self.smoothed {
                None => (self.smoothed, self.variation) = (Some(time), part(time, 2)),
                Some(smoothed) => {
                    let off = smoothed.abs_diff(time);
                    self.variation = part(self.variation.saturating_mul(3), 4).saturating_add(part(off, 4));
                    self.smoothed = Some(part(smoothed.saturating_mul(7), 8).saturating_add(part(time, 8)));
                }
            }
        }
        // A window that is not used says nothing about what the network takes.
        if outstanding < self.window || self.window >= self.most {
            return;
        }
        self.answers = self.answers.saturating_add(1);
        if self.window < self.threshold || self.answers >= self.window {
            (self.window, self.answers) = (self.window.saturating_add(1), 0);
        }
    }

    /// No answer came in time to what was sent at that time.
    pub(super) fn on_loss(&mut self, sent_at: Instant, now: Instant) {
        if self.reduced_at.is_some_and(|reduced_at| sent_at <= reduced_at) {
            return;
        }
        self.reduced_at = Some(now);
        self.threshold = (self.window / 2).max(SMALLEST_WINDOW);
        self.window = self.threshold.min(self.most);
        self.answers = 0;
        self.doublings = self.doublings.saturating_add(1).min(MOST_DOUBLINGS);
    }
}

fn part(time: Duration, divisor: u32) -> Duration {
    time.checked_div(divisor).unwrap_or_default()
}

const FIRST_WINDOW: u32 = 4;
const SMALLEST_WINDOW: u32 = 2;
const FIRST_TIMEOUT: Duration = Duration::from_millis(200);
/// A disk takes as long for one command while it answers others.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);
const LONGEST_TIMEOUT: Duration = Duration::from_secs(1);
const MOST_DOUBLINGS: u32 = 7;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_follows_the_round_trips_within_bounds() {
        let mut pace = Pace::new();
        assert_eq!(pace.timeout(), FIRST_TIMEOUT);
        (0..100).for_each(|_| pace.on_answer(Some(Duration::from_millis(40)), 1));
        assert!((40..45).contains(&pace.timeout().as_millis()), "{:?}", pace.timeout());
        (0..100).for_each(|_| pace.on_answer(Some(Duration::from_micros(50)), 1));
        assert_eq!(pace.timeout(), SHORTEST_TIMEOUT);
        let start = Instant::now();
        for loss in 1..20u64 {
            let at = start + Duration::from_secs(loss);
            pace.on_loss(at, at);
        }
        assert_eq!(pace.timeout(), LONGEST_TIMEOUT);
        pace.on_answer(None, 1);
        assert_eq!(pace.timeout(), LONGEST_TIMEOUT, "nobody knows which of them was answered");
        pace.on_answer(Some(Duration::from_micros(50)), 1);
        assert_eq!(pace.timeout(), SHORTEST_TIMEOUT);
    }

    #[test]
    fn the_window_grows_to_the_buffers_and_is_halved_once_for_each_loss() {
        let (mut pace, start) = (Pace::new(), Instant::now());
        pace.set_most(64);
        (0..1000).for_each(|_| pace.on_answer(None, pace.window()));
        assert_eq!(pace.window(), 64);
        let sent = start + Duration::from_millis(1);
        let now = start + Duration::from_millis(20);
        (0..10).for_each(|_| pace.on_loss(sent, now));
        assert_eq!(pace.window(), 32);
        (0..32).for_each(|_| pace.on_answer(None, 32));
        assert_eq!(pace.window(), 33, "slowly from where frames were lost");
        pace.on_answer(None, 5);
        (0..100).for_each(|_| pace.on_answer(None, 5));
        assert_eq!(pace.window(), 33, "what is not used does not grow");
        for loss in 1..20u64 {
            let at = now + Duration::from_secs(loss);
            pace.on_loss(at, at);
        }
        assert_eq!(pace.window(), SMALLEST_WINDOW);
        pace.set_most(1);
        assert_eq!(pace.window(), 1);
    }
}
