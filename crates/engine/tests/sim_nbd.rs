//! NBD under the simulator: hundreds of seeds of each kind of trouble.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_nbd` runs that one alone,
//! in every kind of trouble.

mod nbd_dialer;
mod seeds;
mod storms;

use blockmux_engine::sim::{Outcome, Protocol, Scenario, Trouble, Weather};
use blockmux_engine::socket::Address;
use blockmux_proto::exports::Exports;
use blockmux_proto::nbd::initiator::Features;
use blockmux_proto::nbd::target::TargetSession;
use blockmux_volume::Pool;
use nbd_dialer::NbdDialer;
use seeds::ms;
use std::time::Instant;
use storms::{FRAGMENTING, breaks, cut_everywhere, long_requests, stops};

/// NBD in the form that the features lead to.
struct Nbd(Features);

impl Protocol for Nbd {
    type Target = TargetSession;
    type Dialer = NbdDialer;

    fn target(&self, exports: Exports, pool: Pool, now: Instant) -> TargetSession {
        TargetSession::new(exports, pool, now)
    }

    fn dialer(&self, address: &Address) -> NbdDialer {
        NbdDialer { address: address.clone(), features: self.0 }
    }
}

/// Runs the scenario of every seed, or of the one that the environment names, each in the next of the three forms.
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<Outcome> {
    seeds::run_each(seeds, |seed| {
        let form = seed % 3;
        let features = Features { extended_headers: form == 2, structured_replies: form >= 1 };
        scenario(seed).run(Nbd(features))
    })
}

#[test]
fn on_a_fair_day_everything_completes_and_nothing_is_lost() {
    let outcomes =
        run_seeds(100, |seed| Scenario { connections: 1 + seed as u32 % 4, ..Scenario::new(seed) });
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= 4));
}

#[test]
fn a_slow_volume_on_a_slow_network_only_takes_longer() {
    let slow = Weather {
        delay: ms(5),
        bytes_per_s: Some(10_000_000),
        window: 16 << 10,
        stalls_per_thousand: 10,
        ..Weather::FAIR
    };
    run_seeds(100, |seed| Scenario {
        weather: slow,
        volume_delay: ms(20),
        connections: 1 + seed as u32 % 2,
        ..Scenario::new(seed)
    });
}

#[test]
fn a_network_that_cuts_every_message_changes_nothing() {
    run_seeds(60, cut_everywhere);
}

#[test]
fn long_requests_are_placed_and_pass_through_small_windows() {
    run_seeds(20, long_requests);
}

#[test]
fn what_a_broken_connection_leaves_is_replayed_exactly_once() {
    let outcomes = run_seeds(150, breaks);
    let breaks: u64 = outcomes.iter().map(|outcome| outcome.breaks).sum();
    assert!(seeds::is_one() || breaks > 300, "only {breaks} connections broke");
}

#[test]
fn medium_errors_reach_the_one_request_and_no_other() {
    run_seeds(60, |seed| Scenario { medium_errors_per_million: 50_000, ..Scenario::new(seed) });
}

#[test]
fn a_target_that_is_stopped_and_started_again_is_not_noticed() {
    let outcomes = run_seeds(100, |seed| stops(seed, false));
    let troubles: u32 = outcomes.iter().map(|outcome| outcome.troubles).sum();
    assert!(seeds::is_one() || troubles > 100, "only {troubles} stops");
}

#[test]
fn a_target_that_loses_its_power_keeps_what_was_flushed_or_forced() {
    let outcomes = run_seeds(150, |seed| stops(seed, true));
    let troubles: u32 = outcomes.iter().map(|outcome| outcome.troubles).sum();
    assert!(seeds::is_one() || troubles > 100, "only {troubles} crashes");
}

#[test]
fn a_target_that_stays_away_too_long_fails_requests_and_later_ones_find_it_again() {
    run_seeds(60, |seed| Scenario {
        trouble: Some(Trouble { every: ms(50), lasts: ms(400), is_crash: true }),
        patience: ms(100),
        volume_delay: ms(2),
        // What fails may have been done, and may still be.
        allows_stale_writes: true,
        ..Scenario::new(seed)
    });
}

#[test]
fn everything_at_once() {
    run_seeds(100, |seed| Scenario { allows_stale_writes: true, ..storms::everything_at_once(seed) });
}

#[test]
fn the_same_seed_does_the_same_again() {
    let scenario = |seed| Scenario {
        weather: Weather { breaks_within: Some(40_000), ..FRAGMENTING },
        volume_delay: ms(1),
        requests: 80,
        allows_stale_writes: true,
        ..Scenario::new(seed)
    };
    let (first, again) = (run_seeds(5, scenario), run_seeds(5, scenario));
    assert_eq!(first, again);
    assert!(seeds::is_one() || first.windows(2).any(|pair| pair[0].took != pair[1].took));
}
