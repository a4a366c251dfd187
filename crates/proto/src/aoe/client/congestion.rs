//! How long to wait for an answer, and how many commands to have outstanding.
//!
//! The round trip is estimated as usual (RFC 6298), from commands that were sent once. From it come
//! these times:
//!
//! - A command that others have overtaken, sent later and answered already, is lost after
//!   [`Pace::overtaken_after`], about a round trip. Where disks answer out of order that is too
//!   soon for some: an answer that comes right after the repetition was on its way already, and so
//!   a needless repetition makes the time longer, a needed one shorter again.
//! - While nothing is answered at all, one command of a path is repeated after
//!   [`Pace::listen_after`], longer each time: its answer shows what became of the others.
//! - Flushes and trims, which take a disk much longer than what comes after them, have a time of
//!   their own, twice the longest lately: [`Pace::long_after`].
//! - What is answered by nobody for [`STALL`] is lost. Before that, rather than a network that
//!   loses all, it is a machine that leaves a target without a processor, and to send all again
//!   would make it busier for nothing.
//!
//! The window of outstanding commands starts small and grows with every answer while it is full,
//! faster below the size at which frames were lost last, is halved by a loss, once for all that was
//! sent before, and is never above the target's buffer count. Answers come in batches: whether it
//! is full is asked when commands go, not when answers come.

use std::time::{Duration, Instant};

/// Round-trip times and the window of one target.
#[derive(Debug)]
pub(super) struct Pace {
    smoothed: Option<Duration>,
    variation: Duration,
    /// The shortest round trip so far.
    shortest: Option<Duration>,
    /// How long answers were late that made repetitions needless.
    straggle: Duration,
    /// How long commands took that take a disk long, at most, lately.
    longest: Option<Duration>,
    /// Doublings since the last measured round trip.
    doublings: u32,
    window: u32,
    /// As many were outstanding when commands went last.
    is_full: bool,
    /// Below this the window grows by one with every answer.
    threshold: u32,
    /// Answers since it grew last.
    answers: u32,
    most: u32,
    reduced_at: Option<Instant>,
    /// The window before it was reduced last.
    unreduced: u32,
}

impl Pace {
    pub(super) fn new() -> Pace {
        Pace {
            smoothed: None,
            variation: Duration::ZERO,
            shortest: None,
            straggle: Duration::ZERO,
            longest: None,
            doublings: 0,
            window: FIRST_WINDOW,
            is_full: false,
            threshold: u32::MAX,
            answers: 0,
            most: FIRST_WINDOW,
            reduced_at: None,
            unreduced: FIRST_WINDOW,
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

    /// How long a command may be overtaken before it is lost.
    #[inline]
    pub(super) fn overtaken_after(&self) -> Duration {
        self.expected().max(SHORTEST_TIMEOUT).max(self.straggle)
    }

    /// How long nothing may be heard before one command is repeated, if so many were since
    /// something was.
    #[inline]
    pub(super) fn listen_after(&self, listens: u32) -> Duration {
        let factor = 1u32.checked_shl(listens).unwrap_or(u32::MAX);
        self.expected().max(SHORTEST_TIMEOUT).saturating_mul(factor).min(LONGEST_TIMEOUT)
    }

    /// How long to wait for what may take a disk long, when it was sent so often.
    pub(super) fn long_after(&self, sends: u32) -> Duration {
        let once = self.longest.map_or(STALL, |longest| longest.saturating_mul(2).max(SHORTEST_LONG));
        let factor = 1u32.checked_shl(sends.saturating_sub(1)).unwrap_or(u32::MAX);
        once.saturating_mul(factor).min(LONGEST_TIMEOUT)
    }

    /// How long to wait until what nobody has answered is sent again.
    #[inline]
    pub(super) fn timeout(&self) -> Duration {
        let factor = 1u32.checked_shl(self.doublings).unwrap_or(u32::MAX);
        self.expected().max(STALL).saturating_mul(factor).min(LONGEST_TIMEOUT)
    }

    #[inline]
    fn expected(&self) -> Duration {
        match self.smoothed {
            Some(smoothed) => smoothed.saturating_add(self.variation.saturating_mul(4)),
            None => FIRST_TIMEOUT,
        }
    }

    /// Whether what was sent so long ago can have been answered by now.
    #[inline]
    pub(super) fn is_answerable(&self, since: Duration) -> bool {
        since >= self.shortest.map_or(Duration::ZERO, |shortest| part(shortest, 2)).max(LEAST)
    }

    /// A command that takes long was sent once and took so long.
    pub(super) fn on_long_answer(&mut self, time: Duration) {
        let before = self.longest.map_or(Duration::ZERO, |longest| longest.saturating_sub(part(longest, 8)));
        self.longest = Some(before.max(time));
    }

    /// A command was repeated because it was overtaken, and then its first answer came, so long
    /// after it was sent.
    pub(super) fn on_needless(&mut self, late: Duration) {
        self.straggle = self.straggle.max(late.saturating_add(part(late, 4))).min(STALL);
        self.window = self.window.max(self.unreduced).min(self.most);
        self.threshold = self.threshold.max(self.window);
    }

    /// A command was repeated because it was overtaken, and only that was answered.
    pub(super) fn on_needed(&mut self) {
        self.straggle = self.straggle.saturating_sub(part(self.straggle, 8));
    }

    /// A question was answered that says how long a round trip takes, as long as nothing else does.
    pub(super) fn on_first_answer(&mut self, round_trip: Duration) {
        if self.smoothed.is_none() {
            (self.smoothed, self.variation) = (Some(round_trip), part(round_trip, 2));
        }
    }

    /// All commands have gone that were to go: so many are outstanding now.
    #[inline]
    pub(super) fn on_sent(&mut self, outstanding: u32) {
        self.is_full = outstanding >= self.window;
    }

    /// An answer has come: to a command sent once so long ago, or to one that was repeated.
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
        // A window that is not used says nothing about what the network takes.
        if !self.is_full || self.window >= self.most {
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
        self.unreduced = self.window;
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
/// What is sent before anything is known goes on when much is lost.
const SMALLEST_WINDOW: u32 = FIRST_WINDOW;
/// Nobody answers sooner than that.
const LEAST: Duration = Duration::from_micros(5);
const FIRST_TIMEOUT: Duration = Duration::from_millis(20);
/// Several round trips of a local network: what a target has read in one go it need not answer in
/// one.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(1);
const SHORTEST_LONG: Duration = Duration::from_millis(2);
/// A target that is up answers something within that time, however busy its machine is.
pub(super) const STALL: Duration = Duration::from_millis(50);
const LONGEST_TIMEOUT: Duration = Duration::from_secs(1);
const MOST_DOUBLINGS: u32 = 7;

#[cfg(test)]
mod tests {
    use super::*;

    /// So many answers, one after the other, to commands that fill the window.
    fn answers(pace: &mut Pace, count: u32, round_trip: Option<Duration>) {
        for _ in 0..count {
            pace.on_sent(pace.window());
            pace.on_answer(round_trip);
        }
    }

    #[test]
    fn the_times_follow_the_round_trips_within_bounds() {
        let mut pace = Pace::new();
        assert_eq!([pace.overtaken_after(), pace.listen_after(0)], [FIRST_TIMEOUT; 2]);
        assert_eq!([pace.timeout(), pace.long_after(1)], [STALL; 2]);
        (0..100).for_each(|_| pace.on_answer(Some(Duration::from_millis(60))));
        for time in [pace.timeout(), pace.overtaken_after(), pace.listen_after(0)] {
            assert!((60..65).contains(&time.as_millis()), "{time:?}");
        }
        (0..100).for_each(|_| pace.on_answer(Some(Duration::from_micros(50))));
        assert_eq!([pace.overtaken_after(), pace.listen_after(0)], [SHORTEST_TIMEOUT; 2]);
        assert_eq!(
            [3, 99].map(|listens| pace.listen_after(listens)),
            [8 * SHORTEST_TIMEOUT, LONGEST_TIMEOUT]
        );
        assert_eq!(pace.timeout(), STALL);
        let start = Instant::now();
        for loss in 1..20u64 {
            let at = start + Duration::from_secs(loss);
            pace.on_loss(at, at);
        }
        assert_eq!([pace.timeout(), pace.overtaken_after()], [LONGEST_TIMEOUT, SHORTEST_TIMEOUT]);
        pace.on_answer(None);
        assert_eq!(pace.timeout(), LONGEST_TIMEOUT, "nobody knows which of them was answered");
        pace.on_answer(Some(Duration::from_micros(50)));
        assert_eq!(pace.timeout(), STALL);
    }

    #[test]
    fn what_takes_long_is_waited_for_as_long_as_it_took_lately() {
        let mut pace = Pace::new();
        pace.on_long_answer(Duration::from_millis(30));
        assert_eq!([1, 2].map(|sends| pace.long_after(sends).as_millis()), [60, 120]);
        assert_eq!(pace.long_after(40), LONGEST_TIMEOUT);
        (0..50).for_each(|_| pace.on_long_answer(Duration::from_micros(80)));
        assert_eq!(pace.long_after(1), SHORTEST_LONG);
    }

    #[test]
    fn what_is_answered_out_of_order_is_waited_for_longer() {
        let (mut pace, start) = (Pace::new(), Instant::now());
        pace.set_most(32);
        answers(&mut pace, 100, Some(Duration::from_micros(100)));
        assert!(
            !pace.is_answerable(Duration::from_micros(49)) && pace.is_answerable(Duration::from_micros(50))
        );
        pace.on_loss(start, start);
        assert_eq!((pace.window(), pace.overtaken_after()), (16, SHORTEST_TIMEOUT));
        pace.on_needless(Duration::from_millis(8));
        assert_eq!((pace.window(), pace.overtaken_after()), (32, Duration::from_millis(10)));
        pace.on_needless(Duration::from_secs(1));
        assert_eq!(pace.overtaken_after(), STALL, "at most");
        (0..50).for_each(|_| pace.on_needed());
        assert_eq!(pace.overtaken_after(), SHORTEST_TIMEOUT, "what is lost is not waited for");
    }

    #[test]
    fn answers_that_come_in_one_batch_make_the_window_grow_as_much_as_single_ones() {
        let mut pace = Pace::new();
        pace.set_most(111);
        let mut windows = Vec::new();
        for _ in 0..5 {
            let window = pace.window();
            pace.on_sent(window);
            (0..window).for_each(|_| pace.on_answer(None));
            windows.push(pace.window());
        }
        assert_eq!(windows, [8, 16, 32, 64, 111]);
    }

    #[test]
    fn the_window_grows_to_the_buffers_and_is_halved_once_for_each_loss() {
        let (mut pace, start) = (Pace::new(), Instant::now());
        pace.set_most(64);
        answers(&mut pace, 1000, None);
        assert_eq!(pace.window(), 64);
        let sent = start + Duration::from_millis(1);
        let now = start + Duration::from_millis(20);
        (0..10).for_each(|_| pace.on_loss(sent, now));
        assert_eq!(pace.window(), 32);
        answers(&mut pace, 32, None);
        assert_eq!(pace.window(), 33, "slowly from where frames were lost");
        pace.on_sent(5);
        (0..100).for_each(|_| pace.on_answer(None));
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
