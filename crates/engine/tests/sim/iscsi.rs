//! iSCSI: see [`crate::scenarios`].
//!
//! A new login ends the link's previous session with all its tasks. So, unlike with NBD, an earlier
//! copy of a replayed write never undoes an acknowledged one.

use crate::scenarios::{self, FRAGMENTING, STRESS, scenario_tests};
use crate::seeds::{self, ms};
use crate::sides::iscsi::{IscsiDialer, sessions};
use blockmux_engine::net::socket::Address;
use blockmux_engine::sim::{
    NetworkConditions, Protocol, Scenario, ScenarioFailure, ScenarioOutcome, TargetSessions,
};
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::client::default_proposal;
use blockmux_proto::iscsi::login::operational::{CRC32C, OperationalKey, OperationalParameters};
use blockmux_proto::iscsi::server::IscsiTargetSession;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

/// iSCSI with these parameters proposed.
struct Iscsi {
    proposal: OperationalParameters,
    agreed: Arc<OnceLock<OperationalParameters>>,
}

impl Protocol for Iscsi {
    type Target = IscsiTargetSession;
    type Dialer = IscsiDialer;

    fn sessions(&self, exports: &Exports) -> TargetSessions<IscsiTargetSession> {
        Rc::new(sessions(exports))
    }

    fn dialer(&self, address: &Address) -> IscsiDialer {
        IscsiDialer { agreed: self.agreed.clone(), ..IscsiDialer::new(address, "disk0", self.proposal) }
    }
}

/// Alternates the defaults with unsolicited data, solicited writes alone, and digests with short
/// segments.
fn proposal_of(seed: u64) -> OperationalParameters {
    match seed % 3 {
        0 => default_proposal(),
        1 => default_proposal()
            .with(OperationalKey::InitialR2T, 1)
            .with(OperationalKey::ImmediateData, 0)
            .with(OperationalKey::FirstBurstLength, 8192)
            .with(OperationalKey::MaxBurstLength, 8192),
        _ => default_proposal()
            .with(OperationalKey::HeaderDigest, CRC32C)
            .with(OperationalKey::DataDigest, CRC32C)
            .with(OperationalKey::MaxRecvDataSegmentLength, 4096),
    }
}

/// Runs the scenario with every seed, or only the one that the environment variable gives, each
/// with the next of the three proposals.
fn run_seeds(seeds: u64, scenario: &dyn Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    run_seeds_with(seeds, proposal_of, scenario).into_iter().map(|(outcome, _)| outcome).collect()
}

/// Runs every seed with this proposal; also returns the negotiated parameters.
fn run_seeds_with(
    seeds: u64,
    proposal_of: impl Fn(u64) -> OperationalParameters,
    scenario: impl Fn(u64) -> Scenario,
) -> Vec<(ScenarioOutcome, OperationalParameters)> {
    seeds::run_each(seeds, |seed| {
        let agreed = Arc::new(OnceLock::new());
        let protocol = Iscsi { proposal: proposal_of(seed), agreed: agreed.clone() };
        let outcome = scenario(seed).run(protocol)?;
        Ok::<_, Box<ScenarioFailure>>((outcome, *agreed.get().expect("there was a session")))
    })
}

/// Proposes several connections for each session, with digests, at an error recovery level.
fn proposal_with_connections(seed: u64, level: u32) -> OperationalParameters {
    proposal_of(seed)
        .with(OperationalKey::HeaderDigest, CRC32C)
        .with(OperationalKey::DataDigest, CRC32C)
        .with(OperationalKey::MaxConnections, 1 + seed as u32 / 3 % 4)
        .with(OperationalKey::ErrorRecoveryLevel, level)
        .with(OperationalKey::DefaultTime2Retain, 20)
}

scenario_tests! { run_seeds:
    fn without_faults_everything_completes_and_nothing_is_lost(100, 4);
    fn a_slow_volume_on_a_slow_network_is_only_slower(100);
    fn a_network_that_splits_every_message_changes_nothing(60);
    fn long_requests_are_placed_and_pass_through_small_windows(20);
    fn requests_of_a_broken_connection_are_replayed_exactly_once(150, 300);
    fn a_medium_error_fails_only_its_own_request(60);
    fn a_target_restart_is_transparent_to_the_client(100, 100);
    fn a_target_that_crashes_keeps_flushed_and_fua_writes(150, 100);
    fn a_long_outage_fails_requests_and_later_requests_reconnect(60);
    fn all_faults_together_lose_nothing(100);
    fn the_same_seed_gives_the_same_run();
}

#[test]
fn several_connections_of_a_session_act_as_one() {
    let late = NetworkConditions { delay: ms(3), stalls_per_thousand: 10, window: 30_000, ..FRAGMENTING };
    let outcomes = run_seeds_with(
        60,
        |seed| proposal_with_connections(seed, 0),
        |seed| Scenario { conditions: late, volume_delay: ms(2), ..Scenario::new(seed) },
    );
    for (outcome, agreed) in outcomes {
        let most = agreed.get(OperationalKey::MaxConnections);
        assert_eq!((outcome.connections, outcome.breaks), (most.into(), 0));
    }
}

#[test]
fn requests_of_one_lost_connection_of_a_session_are_replayed_exactly_once() {
    for level in 0..=2 {
        run_seeds_with(
            60,
            |seed| proposal_with_connections(seed, level),
            |seed| Scenario {
                conditions: NetworkConditions { breaks_within: Some(200_000), ..FRAGMENTING },
                requests: 150,
                max_blocks: 3,
                ..Scenario::new(seed)
            },
        );
    }
}

#[test]
fn damaged_data_is_sent_again_and_from_level_1_on_no_session_ends() {
    let mut damaged_sessions = 0;
    for level in 0..=1 {
        let outcomes = run_seeds_with(
            60,
            |seed| proposal_with_connections(seed, level),
            |seed| Scenario {
                conditions: NetworkConditions { damaged_per_thousand: 20, ..NetworkConditions::FAIR },
                volume_delay: ms(2),
                ..Scenario::new(seed)
            },
        );
        for (outcome, agreed) in outcomes {
            let is_more = outcome.connections > agreed.get(OperationalKey::MaxConnections).into();
            damaged_sessions += u32::from(is_more);
            assert!(!is_more || agreed.get(OperationalKey::ErrorRecoveryLevel) == 0, "{outcome:?}");
        }
    }
    assert!(seeds::is_one() || damaged_sessions > 10, "only {damaged_sessions} sessions were damaged");
}

#[test]
fn all_faults_together_lose_nothing_over_several_connections() {
    for level in 0..=2 {
        run_seeds_with(
            40,
            |seed| proposal_with_connections(seed, level),
            |seed| Scenario {
                conditions: NetworkConditions { damaged_per_thousand: 2, ..STRESS },
                connections: 1 + seed as u32 % 2,
                ..scenarios::all_faults(seed)
            },
        );
    }
}
