//! SRP on iWARP under the simulator: seeds of each kind of fault, with CRCs and without.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_srp`
//! runs only that seed, with every kind of fault.

#[allow(dead_code, reason = "SRP runs only some of the scenarios")]
mod scenarios;
mod seeds;
mod srp_sides;

use blockmux_engine::net::socket::Address;
use blockmux_engine::protocol::srp::initiator::{OverIwarp, SrpDialer, SrpEndpoint};
use blockmux_engine::remote::{Dialer, Opening, Paths};
use blockmux_engine::sim::{Protocol, Scenario, ScenarioOutcome};
use blockmux_proto::driver::session::NoControl;
use blockmux_proto::exports::Exports;
use blockmux_proto::rdma::RdmaSession;
use blockmux_proto::srp::client::UnitInfo;
use blockmux_proto::srp::node::SrpNode;
use blockmux_proto::srp::server::SrpTargetSession;
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{self, Iwarp};
use blockmux_volume::Pool;
use scenarios::{
    breaks, check_breaks, check_determinism, check_outages, long_requests, slow_network, split_messages,
    stops, without_faults,
};
use srp_sides::{endpoint, node};
use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Instant;

/// SRP; all instances of the target share one node.
struct Srp {
    over: OverIwarp,
    /// The iWARP parameters that the target requests.
    config: iwarp::IwarpConfig,
    channels: u32,
    immediate_data: bool,
    node: OnceCell<Arc<SrpNode>>,
}

impl Protocol for Srp {
    type Target = Driven<Iwarp, SrpTargetSession>;
    type Dialer = AnyUnit;

    fn target(&self, exports: Exports, pool: Pool, now: Instant) -> Self::Target {
        let node = self.node.get_or_init(|| node(&exports));
        // The simulated network reports a lost connection to both sides.
        let session = SrpTargetSession::new(node.clone(), pool.clone(), Arc::new(|| {}), now);
        let queue_pair = Iwarp::passive(&session.endpoint(), self.config.clone(), pool, [4; 32], now);
        Driven::new(session, queue_pair, now)
    }

    fn dialer(&self, address: &Address) -> AnyUnit {
        let Srp { over, channels, immediate_data, .. } = *self;
        let endpoint = SrpEndpoint { channels, immediate_data, ..endpoint(address, 0, over) };
        AnyUnit(SrpDialer::of(endpoint, UnitInfo::default()).unwrap())
    }
}

/// A dialer that has not seen the unit before.
struct AnyUnit(SrpDialer);

impl Dialer for AnyUnit {
    type Session = <SrpDialer as Dialer>::Session;
    type Control = NoControl;

    fn paths(&self) -> &Paths {
        self.0.paths()
    }

    fn session(&self, opening: &Opening<'_, NoControl>) -> Self::Session {
        self.0.session(opening)
    }

    fn check(&self, session: &Self::Session) -> Result<(), String> {
        session.session().unit().map(|_| ()).ok_or_else(|| "the target has not described the unit".to_owned())
    }

    fn refusal(&self, session: &Self::Session) -> Option<String> {
        self.0.refusal(session)
    }
}

/// Varies the number of channels, immediate data, and the kind of frames.
fn protocol(seed: u64) -> Srp {
    Srp {
        over: OverIwarp { has_crc: seed % 3 == 1, is_plain: seed % 7 == 3 },
        config: iwarp::IwarpConfig {
            wants_markers: seed % 5 == 2,
            mss: [1448, 65_483, 536][seed as usize % 3],
            ..iwarp::IwarpConfig::default()
        },
        channels: 1 + seed as u32 / 2 % 3,
        immediate_data: seed % 4 != 3,
        node: OnceCell::new(),
    }
}

/// Runs the scenario with every seed, or only the one that the environment variable gives.
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    seeds::run_each(seeds, |seed| scenario(seed).run(protocol(seed)))
}

#[test]
fn without_faults_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds(30, without_faults);
    // At most three channels for each session.
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= 12));
}

#[test]
fn a_slow_volume_on_a_slow_network_is_only_slower() {
    run_seeds(30, slow_network);
}

#[test]
fn a_network_that_splits_every_message_changes_nothing() {
    run_seeds(20, split_messages);
}

#[test]
fn long_requests_are_placed_and_pass_through_small_windows() {
    run_seeds(20, long_requests);
}

#[test]
fn requests_of_a_broken_connection_are_replayed_exactly_once() {
    let outcomes = run_seeds(60, breaks);
    check_breaks(60, &outcomes);
}

#[test]
fn a_target_restart_is_transparent_to_the_client() {
    let outcomes = run_seeds(20, |seed| stops(seed, false));
    check_outages(0, &outcomes);
}

#[test]
fn a_target_that_crashes_keeps_flushed_and_fua_writes() {
    let outcomes = run_seeds(40, |seed| stops(seed, true));
    check_outages(0, &outcomes);
}

#[test]
fn all_faults_together_lose_nothing() {
    run_seeds(40, scenarios::all_faults);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    check_determinism(|short| run_seeds(5, short));
}
