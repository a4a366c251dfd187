//! What the identification of a flow's packets is expected to be.
//!
//! The ICRC of a packet over IPv4 yields the identification that it was computed with, whatever
//! that is ([`blockmux_wire::roce::icrc`]). A damaged packet yields any, so a flow's packets are
//! compared with each other: senders count by small steps, or have 0 in every packet. A sender may
//! have two counters, or somebody else may send in its name, so there are two places where a packet
//! may go on. A sender that draws identifications at random is told by several packets that do not
//! fit, with few others between them, and its packets are taken as they are from then on.

use blockmux_wire::roce::icrc::Fragmentation;
use std::time::{Duration, Instant};

/// The identification of one flow's packets.
#[derive(Debug, Default)]
pub(super) struct FlowIdentification {
    /// The latest packet that fitted.
    latest: Option<SeenIdentification>,
    /// The last packet elsewhere: one that did not fit, or what was the latest before this one.
    elsewhere: Option<SeenIdentification>,
    /// Number of packets that did not fit, without [`FORGETTING`] in a row that did.
    misfits: u32,
    /// Number of packets in a row that fitted.
    fits: u32,
}

#[derive(Clone, Copy, Debug)]
struct SeenIdentification {
    found: Fragmentation,
    at: Instant,
}

impl FlowIdentification {
    /// Whether a packet with this identification belongs to the flow; it is damaged otherwise.
    pub(super) fn accepts(&mut self, found: Fragmentation, now: Instant) -> bool {
        let seen = SeenIdentification { found, at: now };
        let step = self.latest.map(|latest| latest.step_to(seen));
        let is_random = self.misfits >= MAX_MISFITS;
        match step {
            Some(IdentificationStep::Behind) => {}
            None | Some(IdentificationStep::Ahead) => self.latest = Some(seen),
            Some(IdentificationStep::Elsewhere) => {
                let follows = |other: SeenIdentification| {
                    now.saturating_duration_since(other.at) <= RECENT
                        && other.step_to(seen) != IdentificationStep::Elsewhere
                };
                if !is_random && !self.elsewhere.is_some_and(follows) {
                    self.elsewhere = Some(seen);
                    (self.misfits, self.fits) = (self.misfits.saturating_add(1), 0);
                    return false;
                }
                self.elsewhere = self.latest.replace(seen);
            }
        }
        self.fits = self.fits.saturating_add(1);
        if !is_random && self.fits >= FORGETTING {
            self.misfits = 0;
        }
        true
    }
}

/// Where an identification is, as seen from an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IdentificationStep {
    Ahead,
    Behind,
    Elsewhere,
}

impl SeenIdentification {
    fn step_to(self, next: SeenIdentification) -> IdentificationStep {
        let ahead = next.found.identification.wrapping_sub(self.found.identification);
        let idle_ms = next.at.saturating_duration_since(self.at).as_millis();
        let limit = u128::from(AHEAD).saturating_add(idle_ms);
        if self.found.dont_fragment != next.found.dont_fragment {
            IdentificationStep::Elsewhere
        } else if u128::from(ahead) <= limit {
            IdentificationStep::Ahead
        } else if ahead >= BEHIND.wrapping_neg() {
            IdentificationStep::Behind
        } else {
            IdentificationStep::Elsewhere
        }
    }
}

/// How far an identification may be ahead of the latest. It may be one more for each millisecond
/// since: Linux skips a random number of identifications of a destination, up to the ticks of its
/// clock, of which there are at most a thousand in a second.
const AHEAD: u16 = 1024;
/// How far it may be behind, as packets overtake each other.
const BEHIND: u16 = 512;
/// So many packets that do not fit show that the sender does not count.
const MAX_MISFITS: u32 = 4;
/// So many packets in a row that fit show that those before them were damaged.
const FORGETTING: u32 = 64;
/// Age of a packet elsewhere from which on none goes on from there: the older it is, the more fit.
const RECENT: Duration = Duration::from_millis(200);

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;

    struct Flow(FlowIdentification, Instant);

    impl Flow {
        fn new() -> Flow {
            Flow(FlowIdentification::default(), Instant::now())
        }

        fn accepts(&mut self, identification: u16) -> bool {
            self.0.accepts(Fragmentation { identification, dont_fragment: true }, self.1)
        }
    }

    #[test]
    fn a_sender_that_counts_is_followed_across_the_wrap() {
        let mut flow = Flow::new();
        for step in 0..200_000_u32 {
            assert!(flow.accepts((step * 7) as u16));
        }
    }

    #[test]
    fn a_constant_identification_is_the_only_one_nearby() {
        let mut flow = Flow::new();
        (0..10).for_each(|_| assert!(flow.accepts(0)));
        for damaged in [1025, 30_000, 65_023] {
            assert!(!flow.accepts(damaged), "{damaged}");
            assert!(flow.accepts(0));
        }
        let fragmentation = Fragmentation { identification: 0, dont_fragment: false };
        assert!(!flow.0.accepts(fragmentation, flow.1));
    }

    #[test]
    fn packets_that_overtake_each_other_do_not_move_the_window_back() {
        let mut flow = Flow::new();
        assert!(flow.accepts(1000) && flow.accepts(2000));
        (0..10).for_each(|_| assert!(flow.accepts(1600)));
        assert!(!flow.accepts(1400), "the window was not moved back");
    }

    #[test]
    fn a_sender_that_has_jumped_is_found_again_by_its_second_packet() {
        let mut flow = Flow::new();
        assert!(flow.accepts(5) && !flow.accepts(20_000));
        assert!(flow.accepts(20_001) && flow.accepts(20_002));
        flow.1 += RECENT + Duration::from_millis(1);
        assert!(!flow.accepts(6));
    }

    #[test]
    fn two_counters_are_followed_also_if_one_is_an_intruders() {
        let mut flow = Flow::new();
        assert!(flow.accepts(0) && !flow.accepts(30_000));
        (1..1000).for_each(|step| assert!(flow.accepts(step) && flow.accepts(30_000 + step)));
        assert!(!flow.accepts(50_000) && !flow.accepts(1000), "a damaged packet, and one that it costs");
        assert!(flow.accepts(1001) && flow.accepts(31_000) && flow.accepts(1002));
    }

    #[test]
    fn two_slow_counters_are_taken_as_they_are() {
        let mut flow = Flow::new();
        let mut refused = 0;
        for step in 0..100 {
            flow.1 += RECENT + Duration::from_millis(1);
            assert!(flow.accepts(step));
            refused += u32::from(!flow.accepts(30_000 + step));
        }
        assert!(refused <= MAX_MISFITS, "{refused}");
    }

    #[test]
    fn rare_damage_does_not_add_up() {
        let mut flow = Flow::new();
        for round in 0..20 {
            (0..FORGETTING as u16).for_each(|step| assert!(flow.accepts(round * 64 + step)));
            flow.1 += RECENT + Duration::from_millis(1);
            assert!(!flow.accepts(30_000 + 2000 * (round % 2)), "{round}");
        }
    }

    #[test]
    fn an_idle_sender_may_skip_one_identification_for_each_millisecond() {
        let mut flow = Flow::new();
        assert!(flow.accepts(0));
        flow.1 += Duration::from_secs(2);
        assert!(!flow.accepts(3025) && flow.accepts(3024));
        flow.1 += Duration::from_secs(3600);
        assert!(flow.accepts(40_000));
    }

    #[test]
    fn a_sender_with_random_identifications_is_taken_as_it_is() {
        let mut flow = Flow::new();
        let random = |step: u16| step.wrapping_mul(25_173).wrapping_add(13_849);
        let refused = (0..1000).filter(|step| !flow.accepts(random(*step))).count();
        assert_eq!(refused, MAX_MISFITS as usize);
    }
}
