//! iSCSI under the simulator: hundreds of seeds with each kind of fault.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_iscsi`
//! runs only that seed, with every kind of fault.
//!
//! A new login ends the link's previous session with all its tasks. So, unlike with NBD, an earlier
//! copy of a replayed write never undoes an acknowledged one.

mod iscsi_dialer;
mod iscsi_names;
mod iscsi_sides;
mod scenarios;
mod seeds;

use blockmux_engine::net::socket::Address;
use blockmux_engine::sim::{NetworkConditions, Protocol, Scenario, ScenarioFailure, ScenarioOutcome};
use blockmux_proto::driver::session::CoreHandle;
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::client::default_proposal;
use blockmux_proto::iscsi::login::operational::{CRC32C, OperationalKey, OperationalParameters};
use blockmux_proto::iscsi::node::IscsiNode;
use blockmux_proto::iscsi::server::{IscsiTargetSession, LocalSessions};
use blockmux_volume::Pool;
use iscsi_dialer::IscsiDialer;
use iscsi_sides::node;
use scenarios::{
    FRAGMENTING, STRESS, breaks, check_breaks, check_determinism, check_outages, long_outages, long_requests,
    medium_errors, slow_network, split_messages, stops, without_faults,
};
use seeds::ms;
use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// iSCSI with these parameters proposed; all instances of the target share one node and one core.
struct Iscsi {
    proposal: OperationalParameters,
    node: OnceCell<Arc<IscsiNode>>,
    local: Rc<LocalSessions>,
    agreed: Arc<OnceLock<OperationalParameters>>,
}

impl Protocol for Iscsi {
    type Target = IscsiTargetSession;
    type Dialer = IscsiDialer;

    fn target(&self, exports: Exports, pool: Pool, now: Instant) -> IscsiTargetSession {
        let node = self.node.get_or_init(|| node(&exports));
        IscsiTargetSession::among(&self.local, node.clone(), 1, pool, [3; 32], now)
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
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
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
        let local = LocalSessions::new(CoreHandle::new(()));
        let (proposal, node) = (proposal_of(seed), OnceCell::new());
        let protocol = Iscsi { proposal, node, local, agreed: agreed.clone() };
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

#[test]
fn without_faults_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds(100, without_faults);
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= 4));
}

#[test]
fn a_slow_volume_on_a_slow_network_is_only_slower() {
    run_seeds(100, slow_network);
}

#[test]
fn a_network_that_splits_every_message_changes_nothing() {
    run_seeds(60, split_messages);
}

#[test]
fn long_requests_are_placed_and_pass_through_small_windows() {
    run_seeds(20, long_requests);
}

#[test]
fn requests_of_a_broken_connection_are_replayed_exactly_once() {
    let outcomes = run_seeds(150, breaks);
    check_breaks(300, &outcomes);
}

#[test]
fn a_medium_error_fails_only_its_own_request() {
    run_seeds(60, medium_errors);
}

#[test]
fn a_target_restart_is_transparent_to_the_client() {
    let outcomes = run_seeds(100, |seed| stops(seed, false));
    check_outages(100, &outcomes);
}

#[test]
fn a_target_that_crashes_keeps_flushed_and_fua_writes() {
    let outcomes = run_seeds(150, |seed| stops(seed, true));
    check_outages(100, &outcomes);
}

#[test]
fn a_long_outage_fails_requests_and_later_requests_reconnect() {
    run_seeds(60, long_outages);
}

#[test]
fn all_faults_together_lose_nothing() {
    run_seeds(100, scenarios::all_faults);
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

#[test]
fn the_same_seed_gives_the_same_run() {
    check_determinism(|short| run_seeds(5, short));
}
