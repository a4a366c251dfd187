//! NBD under the simulator: hundreds of seeds of each kind of trouble.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_nbd` runs that one alone,
//! in every kind of trouble.

mod nbd_dialer;

use blockmux_engine::sim::{Outcome, Protocol, Scenario, Trouble, Weather};
use blockmux_engine::socket::Address;
use blockmux_proto::exports::Exports;
use blockmux_proto::nbd::initiator::Features;
use blockmux_proto::nbd::target::TargetSession;
use blockmux_volume::Pool;
use nbd_dialer::NbdDialer;
use std::time::{Duration, Instant};

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
    let one = std::env::var("BLOCKMUX_SIM_SEED").ok();
    let one = one.map(|seed| seed.parse().expect("BLOCKMUX_SIM_SEED is a number"));
    let seeds = one.map_or(0..seeds, |seed| seed..seed + 1);
    let outcomes = seeds.map(|seed| {
        let form = seed % 3;
        let features = Features { extended_headers: form == 2, structured_replies: form >= 1 };
        match scenario(seed).run(Nbd(features)) {
            Ok(outcome) => outcome,
            Err(failure) => panic!("{failure}"),
        }
    });
    outcomes.collect()
}

fn is_one_seed() -> bool {
    std::env::var_os("BLOCKMUX_SIM_SEED").is_some()
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const FRAGMENTING: Weather = Weather { most_per_call: 300, ..Weather::FAIR };

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
    run_seeds(60, |seed| Scenario {
        weather: Weather { most_per_call: 1 + (seed as usize % 7) * 100, ..Weather::FAIR },
        requests: 60,
        most_blocks: 4,
        ..Scenario::new(seed)
    });
}

#[test]
fn long_requests_are_placed_and_pass_through_small_windows() {
    run_seeds(20, |seed| Scenario {
        weather: Weather { window: 20 << 10, most_per_call: 30_000, ..Weather::FAIR },
        blocks: 1024,
        most_blocks: 512,
        requests: 40,
        depth: 4,
        ..Scenario::new(seed)
    });
}

#[test]
fn what_a_broken_connection_leaves_is_replayed_exactly_once() {
    let outcomes = run_seeds(150, |seed| Scenario {
        weather: Weather { breaks_within: Some(60_000), ..FRAGMENTING },
        connections: 1 + seed as u32 % 3,
        requests: 150,
        most_blocks: 3,
        ..Scenario::new(seed)
    });
    let breaks: u64 = outcomes.iter().map(|outcome| outcome.breaks).sum();
    assert!(is_one_seed() || breaks > 300, "only {breaks} connections broke");
}

#[test]
fn medium_errors_reach_the_one_request_and_no_other() {
    run_seeds(60, |seed| Scenario { medium_errors_per_million: 50_000, ..Scenario::new(seed) });
}

#[test]
fn a_target_that_is_stopped_and_started_again_is_not_noticed() {
    let outcomes = run_seeds(100, |seed| Scenario {
        trouble: Some(Trouble { every: ms(20), lasts: ms(100), is_crash: false }),
        volume_delay: ms(2),
        connections: 1 + seed as u32 % 3,
        ..Scenario::new(seed)
    });
    let troubles: u32 = outcomes.iter().map(|outcome| outcome.troubles).sum();
    assert!(is_one_seed() || troubles > 100, "only {troubles} stops");
}

#[test]
fn a_target_that_loses_its_power_keeps_what_was_flushed_or_forced() {
    let outcomes = run_seeds(150, |seed| Scenario {
        trouble: Some(Trouble { every: ms(20), lasts: ms(100), is_crash: true }),
        volume_delay: ms(2),
        connections: 1 + seed as u32 % 3,
        ..Scenario::new(seed)
    });
    let troubles: u32 = outcomes.iter().map(|outcome| outcome.troubles).sum();
    assert!(is_one_seed() || troubles > 100, "only {troubles} crashes");
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
    let storm = Weather {
        delay: ms(3),
        bytes_per_s: Some(50_000_000),
        window: 30_000,
        most_per_call: 2000,
        breaks_within: Some(300_000),
        stalls_per_thousand: 5,
        ..Weather::FAIR
    };
    run_seeds(100, |seed| Scenario {
        weather: storm,
        volume_delay: ms(5),
        medium_errors_per_million: 10_000,
        connections: 1 + seed as u32 % 4,
        trouble: Some(Trouble { every: ms(500), lasts: ms(300), is_crash: !seed.is_multiple_of(3) }),
        pool_bytes: 4 << 20,
        allows_stale_writes: true,
        ..Scenario::new(seed)
    });
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
    assert!(is_one_seed() || first.windows(2).any(|pair| pair[0].took != pair[1].took));
}
