//! Scenarios that every stream protocol runs, from a network without faults to all faults together,
//! and their tests.

use crate::seeds::{self, ms};
use blockmux_engine::sim::{NetworkConditions, Outage, Scenario, ScenarioOutcome};

/// Runs a scenario over one protocol with every seed below a number, or only the one that the
/// environment variable gives.
pub(crate) type RunSeeds = fn(u64, &dyn Fn(u64) -> Scenario) -> Vec<ScenarioOutcome>;

/// Declares tests of one protocol. Each runs the test of this module with its name, with the
/// number of seeds that it gives.
macro_rules! scenario_tests {
    ($run:ident: $(fn $name:ident($($argument:expr),*);)*) => {$(
        #[test]
        fn $name() {
            crate::scenarios::$name($run, $($argument),*);
        }
    )*};
}
pub(crate) use scenario_tests;

/// At most `connections` are made.
pub(crate) fn without_faults_everything_completes_and_nothing_is_lost(
    run: RunSeeds,
    seeds: u64,
    connections: u64,
) {
    let outcomes = run(seeds, &without_faults);
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= connections));
}

pub(crate) fn a_slow_volume_on_a_slow_network_is_only_slower(run: RunSeeds, seeds: u64) {
    run(seeds, &slow_network);
}

pub(crate) fn a_network_that_splits_every_message_changes_nothing(run: RunSeeds, seeds: u64) {
    run(seeds, &split_messages);
}

pub(crate) fn long_requests_are_placed_and_pass_through_small_windows(run: RunSeeds, seeds: u64) {
    run(seeds, &long_requests);
}

/// More than `least` connections break.
pub(crate) fn requests_of_a_broken_connection_are_replayed_exactly_once(
    run: RunSeeds,
    seeds: u64,
    least: u64,
) {
    check_breaks(least, &run(seeds, &breaks));
}

pub(crate) fn a_medium_error_fails_only_its_own_request(run: RunSeeds, seeds: u64) {
    run(seeds, &medium_errors);
}

/// The target stops more than `least` times.
pub(crate) fn a_target_restart_is_transparent_to_the_client(run: RunSeeds, seeds: u64, least: u32) {
    check_outages(least, &run(seeds, &|seed| stops(seed, false)));
}

/// The target crashes more than `least` times.
pub(crate) fn a_target_that_crashes_keeps_flushed_and_fua_writes(run: RunSeeds, seeds: u64, least: u32) {
    check_outages(least, &run(seeds, &|seed| stops(seed, true)));
}

pub(crate) fn a_long_outage_fails_requests_and_later_requests_reconnect(run: RunSeeds, seeds: u64) {
    run(seeds, &long_outages);
}

pub(crate) fn all_faults_together_lose_nothing(run: RunSeeds, seeds: u64) {
    run(seeds, &all_faults);
}

pub(crate) fn the_same_seed_gives_the_same_run(run: RunSeeds) {
    check_determinism(|scenario| run(5, scenario));
}

/// Splits every message.
pub(crate) const FRAGMENTING: NetworkConditions =
    NetworkConditions { max_per_call: 300, ..NetworkConditions::FAIR };

/// Slow, with split messages and stalls, until the connection breaks.
pub(crate) const STRESS: NetworkConditions = NetworkConditions {
    delay: ms(3),
    bytes_per_s: Some(50_000_000),
    window: 30_000,
    max_per_call: 2000,
    breaks_within: Some(300_000),
    stalls_per_thousand: 5,
    ..NetworkConditions::FAIR
};

/// No faults, with one to four connections.
pub(crate) fn without_faults(seed: u64) -> Scenario {
    Scenario { connections: 1 + seed as u32 % 4, ..Scenario::new(seed) }
}

/// A slow volume on a slow network.
pub(crate) fn slow_network(seed: u64) -> Scenario {
    let slow = NetworkConditions {
        delay: ms(5),
        bytes_per_s: Some(10_000_000),
        window: 16 << 10,
        stalls_per_thousand: 10,
        ..NetworkConditions::FAIR
    };
    Scenario {
        conditions: slow,
        volume_delay: ms(20),
        connections: 1 + seed as u32 % 2,
        ..Scenario::new(seed)
    }
}

/// Splits every message, sometimes at each byte.
pub(crate) fn split_messages(seed: u64) -> Scenario {
    Scenario {
        conditions: NetworkConditions {
            max_per_call: 1 + (seed as usize % 7) * 100,
            ..NetworkConditions::FAIR
        },
        requests: 60,
        max_blocks: 4,
        ..Scenario::new(seed)
    }
}

/// Requests that are much longer than the window.
pub(crate) fn long_requests(seed: u64) -> Scenario {
    Scenario {
        conditions: NetworkConditions { window: 20 << 10, max_per_call: 30_000, ..NetworkConditions::FAIR },
        blocks: 1024,
        max_blocks: 512,
        requests: 40,
        depth: 4,
        ..Scenario::new(seed)
    }
}

/// Connections that break repeatedly.
pub(crate) fn breaks(seed: u64) -> Scenario {
    Scenario {
        conditions: NetworkConditions { breaks_within: Some(60_000), ..FRAGMENTING },
        connections: 1 + seed as u32 % 3,
        requests: 150,
        max_blocks: 3,
        ..Scenario::new(seed)
    }
}

/// A target that is restarted repeatedly, in order or by a crash.
pub(crate) fn stops(seed: u64, is_crash: bool) -> Scenario {
    Scenario {
        outage: Some(Outage { every: ms(20), lasts: ms(100), is_crash }),
        volume_delay: ms(2),
        connections: 1 + seed as u32 % 3,
        ..Scenario::new(seed)
    }
}

/// A target that is down for longer than the reconnect timeout.
fn long_outages(seed: u64) -> Scenario {
    Scenario {
        outage: Some(Outage { every: ms(50), lasts: ms(400), is_crash: true }),
        reconnect_timeout: ms(100),
        volume_delay: ms(2),
        // A request that failed may have been executed, or may still be.
        allows_stale_writes: true,
        ..Scenario::new(seed)
    }
}

/// One request in twenty fails with a medium error.
fn medium_errors(seed: u64) -> Scenario {
    Scenario { medium_errors_per_million: 50_000, ..Scenario::new(seed) }
}

/// Short runs with a few connections that break.
fn short(seed: u64) -> Scenario {
    Scenario {
        conditions: NetworkConditions { breaks_within: Some(40_000), ..FRAGMENTING },
        volume_delay: ms(1),
        requests: 80,
        ..Scenario::new(seed)
    }
}

/// Checks that a run with the same seed has the same outcome, and another seed another one.
pub(crate) fn check_determinism(run: impl Fn(&dyn Fn(u64) -> Scenario) -> Vec<ScenarioOutcome>) {
    let (first, again) = (run(&short), run(&short));
    assert_eq!(first, again);
    assert!(seeds::is_one() || first.windows(2).any(|pair| pair[0].took != pair[1].took));
}

/// Checks that more than `least` connections broke in all runs.
pub(crate) fn check_breaks(least: u64, outcomes: &[ScenarioOutcome]) {
    let breaks: u64 = outcomes.iter().map(|outcome| outcome.breaks).sum();
    assert!(seeds::is_one() || breaks > least, "only {breaks} connections broke");
}

/// Checks that the target had more than `least` outages in all runs.
pub(crate) fn check_outages(least: u32, outcomes: &[ScenarioOutcome]) {
    let outages: u32 = outcomes.iter().map(|outcome| outcome.outages).sum();
    assert!(seeds::is_one() || outages > least, "only {outages} stops and crashes");
}

/// All faults, with medium errors and a small pool.
pub(crate) fn all_faults(seed: u64) -> Scenario {
    Scenario {
        conditions: STRESS,
        volume_delay: ms(5),
        medium_errors_per_million: 10_000,
        connections: 1 + seed as u32 % 4,
        outage: Some(Outage { every: ms(500), lasts: ms(300), is_crash: !seed.is_multiple_of(3) }),
        pool_bytes: 4 << 20,
        ..Scenario::new(seed)
    }
}
