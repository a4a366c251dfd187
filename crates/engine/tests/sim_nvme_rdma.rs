//! NVMe/RDMA on iWARP under the simulator: seeds of each kind of fault, with CRCs and without.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test
//! sim_nvme_rdma` runs only that seed, with every kind of fault.

#[allow(dead_code, reason = "these tests have one path")]
mod nvme_sides;
#[allow(dead_code, reason = "NVMe runs only some of the scenarios")]
mod scenarios;
mod seeds;

use blockmux_engine::net::socket::Address;
use blockmux_engine::protocol::nvme::initiator::{NvmeDialer, NvmeEndpoint, OverIwarp};
use blockmux_engine::sim::{Protocol, Scenario, ScenarioOutcome};
use blockmux_proto::exports::Exports;
use blockmux_proto::fabrics::controller::node::NvmeNode;
use blockmux_proto::nvme_rdma::server::NvmeRdmaTargetSession;
use blockmux_proto::rdma::RdmaSession;
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{self, Iwarp};
use blockmux_volume::Pool;
use nvme_sides::{dialer, endpoint_over, node};
use scenarios::{
    breaks, check_breaks, check_determinism, check_outages, long_requests, slow_network, split_messages,
    stops, without_faults,
};
use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Instant;

/// NVMe/RDMA; all instances of the target share one node.
struct NvmeRdma {
    over: OverIwarp,
    /// The iWARP parameters that the target requests.
    config: iwarp::IwarpConfig,
    entries: u16,
    queues: u16,
    node: OnceCell<Arc<NvmeNode>>,
}

impl Protocol for NvmeRdma {
    type Target = Driven<Iwarp, NvmeRdmaTargetSession>;
    type Dialer = NvmeDialer<OverIwarp>;

    fn target(&self, exports: Exports, pool: Pool, now: Instant) -> Self::Target {
        let node = self.node.get_or_init(|| node(&exports).0);
        let session = NvmeRdmaTargetSession::new(node.clone(), pool.clone(), now).at_port(1);
        let queue_pair = Iwarp::passive(&session.endpoint(), self.config.clone(), pool, [4; 32], now);
        Driven::new(session, queue_pair, now)
    }

    fn dialer(&self, address: &Address) -> Self::Dialer {
        let NvmeRdma { over, entries, queues, .. } = *self;
        dialer(NvmeEndpoint { entries, queues, ..endpoint_over(over, std::slice::from_ref(address)) })
    }
}

/// Varies the number of queues of a controller, the number of entries of a queue, and the kind of
/// frames.
fn protocol(seed: u64) -> NvmeRdma {
    NvmeRdma {
        over: OverIwarp { has_crc: seed % 3 == 1, is_plain: seed % 7 == 3 },
        config: iwarp::IwarpConfig {
            wants_markers: seed % 5 == 2,
            mss: [1448, 65_483, 536][seed as usize % 3],
            ..iwarp::IwarpConfig::default()
        },
        entries: if seed % 5 == 1 { 3 } else { 64 },
        queues: 1 + seed as u16 / 2 % 3,
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
    // An admin queue and up to three I/O queues each.
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= 16));
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
