//! How long the peer takes to answer, and so how long to wait for an answer.
//!
//! One packet at a time is measured, and only if it was sent once: the answer to a packet that was
//! sent twice may be that to the first. Until there is an answer to a packet that was sent once, a
//! timeout that was too short stays as long as it has become (Karn's algorithm). A switch answers
//! in microseconds, and a guest under emulation in a tenth of a second.

use super::psn::Psn;
use std::time::{Duration, Instant};

/// The times between requests and their answers.
#[derive(Default)]
pub(super) struct RoundTrip {
    /// The packet that is measured, and when it was sent.
    measured: Option<(Psn, Instant)>,
    /// The longest time so far, of which one eighth is forgotten with each shorter one.
    longest: Duration,
    /// Timeouts since the last measurement.
    timeouts: u32,
}

impl RoundTrip {
    /// Notes that a packet was sent for the first time, which the peer answers.
    pub(super) fn on_sent(&mut self, psn: Psn, now: Instant) {
        self.measured.get_or_insert((psn, now));
    }

    /// Notes that packets are sent again.
    pub(super) fn on_sent_again(&mut self) {
        self.measured = None;
    }

    /// Notes that no answer has come in time.
    pub(super) fn on_timeout(&mut self) {
        self.timeouts = self.timeouts.saturating_add(1);
    }

    /// Notes that everything before `next` is acknowledged.
    #[inline]
    pub(super) fn on_acknowledged(&mut self, next: Psn, now: Instant) {
        let Some((_, sent_at)) = self.measured.filter(|(psn, _)| psn.is_before(next)) else { return };
        let an_eighth = self.longest.checked_div(8).unwrap_or_default();
        let rest = self.longest.saturating_sub(an_eighth);
        self.longest = now.saturating_duration_since(sent_at).max(rest);
        (self.measured, self.timeouts) = (None, 0);
    }

    /// How long to wait for an answer.
    pub(super) fn timeout(&self) -> Duration {
        let first = self.longest.saturating_mul(2).clamp(SHORTEST, LONGEST_FIRST);
        first.saturating_mul(1 << self.timeouts.min(DOUBLINGS)).min(LONGEST)
    }
}

/// The shortest timeout, which is the first: code 13 of the standard, 33.6 ms.
const SHORTEST: Duration = Duration::from_nanos(blockmux_wire::roce::eth::timeout_ns(13));
/// The longest timeout that follows from measurements.
const LONGEST_FIRST: Duration = Duration::from_millis(500);
/// How often a timeout is doubled.
const DOUBLINGS: u32 = 6;
/// The longest timeout, so that a peer that is gone is noticed soon: 2.1 s.
const LONGEST: Duration = SHORTEST.saturating_mul(1 << DOUBLINGS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_follows_the_slowest_answers_and_comes_back() {
        let (mut round_trip, begin) = (RoundTrip::default(), Instant::now());
        let mut answer = |psn: u32, ms: u64| {
            round_trip.on_sent(Psn::new(psn), begin);
            round_trip.on_acknowledged(Psn::new(psn + 1), begin + Duration::from_millis(ms));
            round_trip.timeout()
        };
        assert_eq!(answer(1, 1), SHORTEST);
        assert_eq!(answer(2, 100), Duration::from_millis(200));
        assert_eq!(answer(3, 5), Duration::from_millis(175));
        assert_eq!(answer(4, 60_000), LONGEST_FIRST);
        let last = (5..100).map(|psn| answer(psn, 1)).last();
        assert_eq!(last, Some(SHORTEST));
    }

    #[test]
    fn an_answer_to_a_packet_that_was_sent_twice_measures_nothing() {
        let (mut round_trip, begin) = (RoundTrip::default(), Instant::now());
        round_trip.on_sent(Psn::new(1), begin);
        for doubled in 1..=2 {
            round_trip.on_timeout();
            round_trip.on_sent_again();
            assert_eq!(round_trip.timeout(), SHORTEST * (1 << doubled));
        }
        // The answer was on its way, and the longer timeout stays.
        round_trip.on_acknowledged(Psn::new(2), begin + Duration::from_millis(110));
        assert_eq!(round_trip.timeout(), SHORTEST * 4);
        round_trip.on_sent(Psn::new(2), begin);
        round_trip.on_acknowledged(Psn::new(2), begin + Duration::from_millis(50));
        assert_eq!(round_trip.timeout(), SHORTEST * 4, "not that packet");
        round_trip.on_acknowledged(Psn::new(3), begin + Duration::from_millis(110));
        assert_eq!(round_trip.timeout(), Duration::from_millis(220));
        (0..10).for_each(|_| round_trip.on_timeout());
        assert_eq!(round_trip.timeout(), LONGEST);
    }
}
