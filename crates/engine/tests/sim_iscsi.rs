//! iSCSI under the simulator: hundreds of seeds of each kind of trouble.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_iscsi`
//! runs that one alone, in every kind of trouble.
//!
//! A session that logs in again ends the one before, with everything that it still has to do: what
//! was acknowledged is never undone by an earlier copy of a replayed write, unlike with NBD.

mod iscsi_dialer;
mod iscsi_names;
mod iscsi_sides;
mod seeds;
mod storms;

use blockmux_engine::sim::{Failure, NetworkConditions, Outcome, Protocol, Scenario};
use blockmux_engine::socket::Address;
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::client::default_proposal;
use blockmux_proto::iscsi::login::operational::{CRC32C, OperationalKey, OperationalParameters};
use blockmux_proto::iscsi::node::IscsiNode;
use blockmux_proto::iscsi::server::{IscsiTargetSession, LocalSessions};
use blockmux_proto::session::Home;
use blockmux_volume::Pool;
use iscsi_dialer::IscsiDialer;
use iscsi_sides::node;
use seeds::ms;
use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use storms::{
    FRAGMENTING, STORM, breaks, cut_everywhere, fair_day, long_absences, long_requests, medium_errors,
    more_broke_than, more_troubles_than, slow_day, stops, the_same_again,
};

/// iSCSI as the initiator wishes it, with one node and one core for all of the target's lives.
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

/// Whatever is sent at once; every write asked for; digests and short segments.
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

/// Runs the scenario of every seed, or of the one that the environment names, each with the next of
/// the three wishes.
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<Outcome> {
    run_seeds_with(seeds, proposal_of, scenario).into_iter().map(|(outcome, _)| outcome).collect()
}

/// Runs every seed with these wishes; also returns what was agreed on.
fn run_seeds_with(
    seeds: u64,
    proposal_of: impl Fn(u64) -> OperationalParameters,
    scenario: impl Fn(u64) -> Scenario,
) -> Vec<(Outcome, OperationalParameters)> {
    seeds::run_each(seeds, |seed| {
        let agreed = Arc::new(OnceLock::new());
        let local = LocalSessions::new(Home::new(()));
        let (proposal, node) = (proposal_of(seed), OnceCell::new());
        let protocol = Iscsi { proposal, node, local, agreed: agreed.clone() };
        let outcome = scenario(seed).run(protocol)?;
        Ok::<_, Box<Failure>>((outcome, *agreed.get().expect("there was a session")))
    })
}

/// Wishes for several connections of each session, with digests, at an error recovery level.
fn proposal_with_connections(seed: u64, level: u32) -> OperationalParameters {
    proposal_of(seed)
        .with(OperationalKey::HeaderDigest, CRC32C)
        .with(OperationalKey::DataDigest, CRC32C)
        .with(OperationalKey::MaxConnections, 1 + seed as u32 / 3 % 4)
        .with(OperationalKey::ErrorRecoveryLevel, level)
        .with(OperationalKey::DefaultTime2Retain, 20)
}

#[test]
fn on_a_fair_day_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds(100, fair_day);
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= 4));
}

#[test]
fn a_slow_volume_on_a_slow_network_only_takes_longer() {
    run_seeds(100, slow_day);
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
    more_broke_than(300, &outcomes);
}

#[test]
fn medium_errors_reach_the_one_request_and_no_other() {
    run_seeds(60, medium_errors);
}

#[test]
fn a_target_that_is_stopped_and_started_again_is_not_noticed() {
    let outcomes = run_seeds(100, |seed| stops(seed, false));
    more_troubles_than(100, &outcomes);
}

#[test]
fn a_target_that_loses_its_power_keeps_what_was_flushed_or_forced() {
    let outcomes = run_seeds(150, |seed| stops(seed, true));
    more_troubles_than(100, &outcomes);
}

#[test]
fn a_target_that_stays_away_too_long_fails_requests_and_later_ones_find_it_again() {
    run_seeds(60, long_absences);
}

#[test]
fn everything_at_once() {
    run_seeds(100, storms::everything_at_once);
}

#[test]
fn several_connections_of_a_session_are_one() {
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
fn what_a_session_loses_with_one_of_its_connections_is_replayed_exactly_once() {
    for level in 0..=2 {
        run_seeds_with(
            60,
            |seed| proposal_with_connections(seed, level),
            |seed| Scenario {
                conditions: NetworkConditions { breaks_within: Some(200_000), ..FRAGMENTING },
                requests: 150,
                most_blocks: 3,
                ..Scenario::new(seed)
            },
        );
    }
}

#[test]
fn what_comes_damaged_is_sent_again_and_from_level_1_on_no_session_ends() {
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
fn everything_at_once_over_several_connections() {
    for level in 0..=2 {
        run_seeds_with(
            40,
            |seed| proposal_with_connections(seed, level),
            |seed| Scenario {
                conditions: NetworkConditions { damaged_per_thousand: 2, ..STORM },
                connections: 1 + seed as u32 % 2,
                ..storms::everything_at_once(seed)
            },
        );
    }
}

#[test]
fn the_same_seed_does_the_same_again() {
    the_same_again(|short| run_seeds(5, short));
}
