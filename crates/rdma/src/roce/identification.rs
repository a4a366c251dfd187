//! What the identification of a flow's packets is expected to be.
//!
//! The ICRC of a packet over IPv4 yields the identification that it was computed with, whatever
//! that is ([`blockmux_wire::roce::icrc`]). A damaged packet yields any, so a flow's packets are
//! compared with each other: senders count by small steps, or have 0 in every packet. Packets of a
//! sender that draws identifications at random are told by several in a row that do not fit, and
//! are taken as they are from then on.

use blockmux_wire::roce::icrc::Fragmentation;
use std::time::Instant;

/// The identification of one flow's packets.
#[derive(Debug, Default)]
pub(super) struct FlowIdentification {
    /// The latest packet that fitted.
    latest: Option<SeenIdentification>,
    /// The last packet, if it did not fit.
    misfit: Option<SeenIdentification>,
    /// Number of packets in a row that did not fit.
    misfits: u32,
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
                // A sender that was busy elsewhere has gone on counting.
                let follows =
                    |misfit: SeenIdentification| misfit.step_to(seen) != IdentificationStep::Elsewhere;
                let is_found_again = self.misfit.replace(seen).is_some_and(follows);
                if !is_found_again && !is_random {
                    self.misfits = self.misfits.saturating_add(1);
                    return false;
                }
                self.latest = Some(seen);
            }
        }
        if !is_random {
            (self.misfit, self.misfits) = (None, 0);
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
/// So many packets in a row that do not fit show that the sender does not count.
const MAX_MISFITS: u32 = 4;

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;
    use std::time::Duration;

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
        assert!(flow.accepts(20_001) && flow.accepts(20_002) && !flow.accepts(6));
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
