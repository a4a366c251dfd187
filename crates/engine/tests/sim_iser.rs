//! iSER on iWARP under the simulator: seeds of each kind of fault, with CRCs and without.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_iser`
//! runs only that seed, with every kind of fault.

#[allow(dead_code, reason = "the iSER dialer extends it")]
mod iscsi_dialer;
mod iscsi_names;
mod iscsi_sides;
mod iser_sides;
#[allow(dead_code, reason = "iSER runs only some of the scenarios")]
mod scenarios;
mod seeds;

use blockmux_engine::net::socket::Address;
use blockmux_engine::sim::{Protocol, Scenario, ScenarioOutcome};
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::client::default_proposal;
use blockmux_proto::iscsi::login::operational::{OperationalKey, OperationalParameters};
use blockmux_proto::iscsi::node::IscsiNode;
use blockmux_proto::iscsi::server::{IserTargetSession, LocalSessions};
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{self, Iwarp};
use blockmux_volume::Pool;
use iscsi_sides::node;
use iser_sides::{IserDialer, local_sessions};
use scenarios::{breaks, check_breaks, check_outages, long_requests, split_messages, stops, without_faults};
use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// iSER with these parameters proposed; all instances of the target share one node and one core.
struct Iser {
    proposal: OperationalParameters,
    config: iwarp::IwarpConfig,
    node: OnceCell<Arc<IscsiNode>>,
    local: Rc<LocalSessions>,
}

impl Protocol for Iser {
    type Target = Driven<Iwarp, IserTargetSession>;
    type Dialer = IserDialer;

    fn target(&self, exports: Exports, pool: Pool, now: Instant) -> Self::Target {
        let node = self.node.get_or_init(|| node(&exports));
        iser_sides::target(&self.local, node, pool, now)
    }

    fn dialer(&self, address: &Address) -> IserDialer {
        IserDialer::new(address, "disk0", self.proposal, self.config.clone())
    }
}

/// Alternates the defaults with unsolicited data, and all write data read by the target; with
/// frames of each kind.
fn protocol(seed: u64) -> Iser {
    let proposal = match seed % 2 {
        0 => default_proposal(),
        _ => default_proposal().with(OperationalKey::InitialR2T, 1).with(OperationalKey::ImmediateData, 0),
    };
    let config = iwarp::IwarpConfig {
        has_crc: seed % 3 == 1,
        wants_markers: seed % 5 == 2,
        is_enhanced: seed % 7 != 3,
        mss: [1448, 65_483, 536][seed as usize % 3],
        ..iwarp::IwarpConfig::default()
    };
    Iser { proposal, config, node: OnceCell::new(), local: local_sessions() }
}

/// Runs the scenario with every seed, or only the one that the environment variable gives.
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    seeds::run_each(seeds, |seed| scenario(seed).run(protocol(seed)))
}

#[test]
fn without_faults_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds(60, without_faults);
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= 4));
}

#[test]
fn a_network_that_splits_every_message_changes_nothing() {
    run_seeds(40, split_messages);
}

#[test]
fn long_requests_are_placed_and_pass_through_small_windows() {
    run_seeds(20, long_requests);
}

#[test]
fn requests_of_a_broken_connection_are_replayed_exactly_once() {
    let outcomes = run_seeds(100, breaks);
    check_breaks(200, &outcomes);
}

#[test]
fn a_target_that_crashes_keeps_flushed_and_fua_writes() {
    let outcomes = run_seeds(60, |seed| stops(seed, !seed.is_multiple_of(3)));
    check_outages(40, &outcomes);
}

#[test]
fn all_faults_together_lose_nothing() {
    run_seeds(60, scenarios::all_faults);
}
