//! Retransmission timeouts and congestion window.
//!
//! The round-trip time is estimated as in RFC 6298, from commands that were sent once. It
//! determines these timeouts:
//!
//! - A command counts as lost when commands that were sent later have been answered, and
//!   [`CongestionControl::overtaken_after`], about a round trip, has passed. That is too soon on a
//!   disk that answers out of order: if an answer arrives right after the retransmission, the
//!   retransmission was needless and increases this timeout; a needed one reduces it.
//! - While no command of a path is answered, one command is retransmitted as a loss probe after
//!   [`CongestionControl::loss_probe_after`], with exponential backoff. Its answer shows whether
//!   the others are lost.
//! - Flushes and trims, which take much longer, have a timeout of their own, twice the longest
//!   recent time: [`CongestionControl::long_after`].
//! - After [`STALL`] without any answer, all commands count as lost. A shorter silence is more
//!   likely a target that gets no CPU time than a network that drops everything, and retransmitting
//!   everything would only add to its load.
//!
//! The congestion window starts small and grows with every answer while it is full: by one for each
//! answer below the slow-start threshold, slower above it. A loss halves it, once for all commands
//! that were sent before. It never exceeds the target's buffer count. Answers arrive in batches, so
//! whether the window is full is determined when commands are sent.

use std::time::{Duration, Instant};

/// Round-trip times and congestion window of one target.
#[derive(Debug)]
pub(super) struct CongestionControl {
    smoothed: Option<Duration>,
    variation: Duration,
    /// The minimum round-trip time so far.
    shortest: Option<Duration>,
    /// Delay of the answers that made retransmissions needless: the degree of reordering.
    reordering: Duration,
    /// The longest recent time of flushes and trims.
    longest: Option<Duration>,
    /// Number of backoffs since the last measured round trip.
    doublings: u32,
    window: u32,
    /// Whether the window was full when commands were last sent.
    is_full: bool,
    /// Slow-start threshold: below it, the window grows by one with every answer.
    threshold: u32,
    /// Number of answers since the window last grew.
    answers: u32,
    max_window: u32,
    reduced_at: Option<Instant>,
    /// The window before its last reduction.
    unreduced: u32,
}

impl CongestionControl {
    pub(super) fn new() -> CongestionControl {
        CongestionControl {
            smoothed: None,
            variation: Duration::ZERO,
            shortest: None,
            reordering: Duration::ZERO,
            longest: None,
            doublings: 0,
            window: FIRST_WINDOW,
            is_full: false,
            threshold: u32::MAX,
            answers: 0,
            max_window: FIRST_WINDOW,
            reduced_at: None,
            unreduced: FIRST_WINDOW,
        }
    }

    /// Sets the maximum of the window to the target's buffer count, at least one.
    pub(super) fn set_max(&mut self, max_window: u32) {
        self.max_window = max_window.max(1);
        self.window = self.window.min(self.max_window);
    }

    /// The maximum number of outstanding commands.
    #[inline]
    pub(super) fn window(&self) -> u32 {
        self.window
    }

    /// How long after its transmission a command counts as lost if later ones were answered.
    #[inline]
    pub(super) fn overtaken_after(&self) -> Duration {
        self.expected().max(MIN_TIMEOUT).max(self.reordering)
    }

    /// Timeout of the next loss probe, after `loss_probes` without an answer.
    #[inline]
    pub(super) fn loss_probe_after(&self, loss_probes: u32) -> Duration {
        let factor = 1u32.checked_shl(loss_probes).unwrap_or(u32::MAX);
        self.expected().max(MIN_TIMEOUT).saturating_mul(factor).min(MAX_TIMEOUT)
    }

    /// Timeout of a flush or trim that was sent `sends` times.
    pub(super) fn long_after(&self, sends: u32) -> Duration {
        let once = self.longest.map_or(STALL, |longest| longest.saturating_mul(2).max(SHORTEST_LONG));
        let factor = 1u32.checked_shl(sends.saturating_sub(1)).unwrap_or(u32::MAX);
        once.saturating_mul(factor).min(MAX_TIMEOUT)
    }

    /// Timeout of a command on a path without any answer.
    #[inline]
    pub(super) fn timeout(&self) -> Duration {
        let factor = 1u32.checked_shl(self.doublings).unwrap_or(u32::MAX);
        self.expected().max(STALL).saturating_mul(factor).min(MAX_TIMEOUT)
    }

    #[inline]
    fn expected(&self) -> Duration {
        match self.smoothed {
            Some(smoothed) => smoothed.saturating_add(self.variation.saturating_mul(4)),
            None => FIRST_TIMEOUT,
        }
    }

    /// Whether a command that was sent `since` ago can have been answered by now.
    #[inline]
    pub(super) fn is_answerable(&self, since: Duration) -> bool {
        since >= self.shortest.map_or(Duration::ZERO, |shortest| part(shortest, 2)).max(MIN_ROUND_TRIP)
    }

    /// Records the time of a flush or trim that was sent once.
    pub(super) fn on_long_answer(&mut self, time: Duration) {
        let before = self.longest.map_or(Duration::ZERO, |longest| longest.saturating_sub(part(longest, 8)));
        self.longest = Some(before.max(time));
    }

    /// Records a needless retransmission: the answer to the first transmission arrived `late` after
    /// it.
    pub(super) fn on_needless_retry(&mut self, late: Duration) {
        self.reordering = self.reordering.max(late.saturating_add(part(late, 4))).min(STALL);
        self.window = self.window.max(self.unreduced).min(self.max_window);
        self.threshold = self.threshold.max(self.window);
    }

    /// Records that a retransmission was needed: only it was answered.
    pub(super) fn on_needed_retry(&mut self) {
        self.reordering = self.reordering.saturating_sub(part(self.reordering, 8));
    }

    /// Records the round trip of the config query, the first estimate.
    pub(super) fn on_first_answer(&mut self, round_trip: Duration) {
        if self.smoothed.is_none() {
            (self.smoothed, self.variation) = (Some(round_trip), part(round_trip, 2));
        }
    }

    /// Records the number of outstanding commands after sending all that the window allows.
    #[inline]
    pub(super) fn on_sent(&mut self, outstanding: u32) {
        self.is_full = outstanding >= self.window;
    }

    /// Records an answer; `round_trip` is `None` if the command was retransmitted.
    #[inline]
    pub(super) fn on_answer(&mut self, round_trip: Option<Duration>) {
        if let Some(time) = round_trip {
            self.doublings = 0;
            self.shortest = Some(self.shortest.map_or(time, |shortest| shortest.min(time)));
            match self.smoothed {
                None => (self.smoothed, self.variation) = (Some(time), part(time, 2)),
                Some(smoothed) => {
                    let off = smoothed.abs_diff(time);
                    self.variation = part(self.variation.saturating_mul(3), 4).saturating_add(part(off, 4));
                    self.smoothed = Some(part(smoothed.saturating_mul(7), 8).saturating_add(part(time, 8)));
                }
            }
        }
        // A window that is not full says nothing about the capacity of the network.
        if !self.is_full || self.window >= self.max_window {
            return;
        }
        self.answers = self.answers.saturating_add(1);
        if self.window < self.threshold || self.answers >= self.window {
            (self.window, self.answers) = (self.window.saturating_add(1), 0);
        }
    }

    /// Records the loss of a command that was sent at `sent_at`.
    pub(super) fn on_loss(&mut self, sent_at: Instant, now: Instant) {
        if self.reduced_at.is_some_and(|reduced_at| sent_at <= reduced_at) {
            return;
        }
        self.reduced_at = Some(now);
        self.unreduced = self.window;
        self.threshold = (self.window / 2).max(MIN_WINDOW);
        self.window = self.threshold.min(self.max_window);
        self.answers = 0;
        self.doublings = self.doublings.saturating_add(1).min(MAX_DOUBLINGS);
    }
}

fn part(time: Duration, divisor: u32) -> Duration {
    time.checked_div(divisor).unwrap_or_default()
}

const FIRST_WINDOW: u32 = 4;
/// The minimum window, also after many losses.
const MIN_WINDOW: u32 = FIRST_WINDOW;
/// The minimum round-trip time that is assumed.
const MIN_ROUND_TRIP: Duration = Duration::from_micros(5);
const FIRST_TIMEOUT: Duration = Duration::from_millis(20);
/// The minimum timeout: several round trips of a local network, because a target may answer a batch
/// of commands in several parts.
const MIN_TIMEOUT: Duration = Duration::from_millis(1);
const SHORTEST_LONG: Duration = Duration::from_millis(2);
/// The time within which a running target sends some answer, however busy its machine is.
pub(super) const STALL: Duration = Duration::from_millis(50);
const MAX_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_DOUBLINGS: u32 = 7;

#[cfg(test)]
mod tests {
    use super::*;

    /// Records `count` answers to commands that fill the window.
    fn answers(congestion: &mut CongestionControl, count: u32, round_trip: Option<Duration>) {
        for _ in 0..count {
            congestion.on_sent(congestion.window());
            congestion.on_answer(round_trip);
        }
    }

    #[test]
    fn the_times_follow_the_round_trips_within_bounds() {
        let mut congestion = CongestionControl::new();
        assert_eq!([congestion.overtaken_after(), congestion.loss_probe_after(0)], [FIRST_TIMEOUT; 2]);
        assert_eq!([congestion.timeout(), congestion.long_after(1)], [STALL; 2]);
        (0..100).for_each(|_| congestion.on_answer(Some(Duration::from_millis(60))));
        for time in [congestion.timeout(), congestion.overtaken_after(), congestion.loss_probe_after(0)] {
            assert!((60..65).contains(&time.as_millis()), "{time:?}");
        }
        (0..100).for_each(|_| congestion.on_answer(Some(Duration::from_micros(50))));
        assert_eq!([congestion.overtaken_after(), congestion.loss_probe_after(0)], [MIN_TIMEOUT; 2]);
        assert_eq!(
            [3, 99].map(|loss_probes| congestion.loss_probe_after(loss_probes)),
            [8 * MIN_TIMEOUT, MAX_TIMEOUT]
        );
        assert_eq!(congestion.timeout(), STALL);
        let start = Instant::now();
        for loss in 1..20u64 {
            let at = start + Duration::from_secs(loss);
            congestion.on_loss(at, at);
        }
        assert_eq!([congestion.timeout(), congestion.overtaken_after()], [MAX_TIMEOUT, MIN_TIMEOUT]);
        congestion.on_answer(None);
        assert_eq!(congestion.timeout(), MAX_TIMEOUT, "the answer may belong to either copy");
        congestion.on_answer(Some(Duration::from_micros(50)));
        assert_eq!(congestion.timeout(), STALL);
    }

    #[test]
    fn the_timeout_of_long_commands_follows_recent_times() {
        let mut congestion = CongestionControl::new();
        congestion.on_long_answer(Duration::from_millis(30));
        assert_eq!([1, 2].map(|sends| congestion.long_after(sends).as_millis()), [60, 120]);
        assert_eq!(congestion.long_after(40), MAX_TIMEOUT);
        (0..50).for_each(|_| congestion.on_long_answer(Duration::from_micros(80)));
        assert_eq!(congestion.long_after(1), SHORTEST_LONG);
    }

    #[test]
    fn out_of_order_answers_increase_the_retransmission_delay() {
        let (mut congestion, start) = (CongestionControl::new(), Instant::now());
        congestion.set_max(32);
        answers(&mut congestion, 100, Some(Duration::from_micros(100)));
        assert!(
            !congestion.is_answerable(Duration::from_micros(49))
                && congestion.is_answerable(Duration::from_micros(50))
        );
        congestion.on_loss(start, start);
        assert_eq!((congestion.window(), congestion.overtaken_after()), (16, MIN_TIMEOUT));
        congestion.on_needless_retry(Duration::from_millis(8));
        assert_eq!((congestion.window(), congestion.overtaken_after()), (32, Duration::from_millis(10)));
        congestion.on_needless_retry(Duration::from_secs(1));
        assert_eq!(congestion.overtaken_after(), STALL, "at most");
        (0..50).for_each(|_| congestion.on_needed_retry());
        assert_eq!(congestion.overtaken_after(), MIN_TIMEOUT, "the wait stays at its minimum");
    }

    #[test]
    fn answers_that_come_in_one_batch_make_the_window_grow_as_much_as_single_ones() {
        let mut congestion = CongestionControl::new();
        congestion.set_max(111);
        let mut windows = Vec::new();
        for _ in 0..5 {
            let window = congestion.window();
            congestion.on_sent(window);
            (0..window).for_each(|_| congestion.on_answer(None));
            windows.push(congestion.window());
        }
        assert_eq!(windows, [8, 16, 32, 64, 111]);
    }

    #[test]
    fn the_window_grows_to_the_buffers_and_is_halved_once_for_each_loss() {
        let (mut congestion, start) = (CongestionControl::new(), Instant::now());
        congestion.set_max(64);
        answers(&mut congestion, 1000, None);
        assert_eq!(congestion.window(), 64);
        let sent = start + Duration::from_millis(1);
        let now = start + Duration::from_millis(20);
        (0..10).for_each(|_| congestion.on_loss(sent, now));
        assert_eq!(congestion.window(), 32);
        answers(&mut congestion, 32, None);
        assert_eq!(congestion.window(), 33, "slowly from where frames were lost");
        congestion.on_sent(5);
        (0..100).for_each(|_| congestion.on_answer(None));
        assert_eq!(congestion.window(), 33, "an unused window does not grow");
        for loss in 1..20u64 {
            let at = now + Duration::from_secs(loss);
            congestion.on_loss(at, at);
        }
        assert_eq!(congestion.window(), MIN_WINDOW);
        congestion.set_max(1);
        assert_eq!(congestion.window(), 1);
    }
}
