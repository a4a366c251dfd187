//! NVMe/RDMA over iWARP under the simulator: seeds of each kind of fault, with CRCs and without.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test
//! sim_nvme_rdma` runs that seed alone, in every kind of fault.

#[allow(dead_code, reason = "these tests have one path")]
mod nvme_sides;
mod seeds;
#[allow(dead_code, reason = "not every storm is one of NVMe's")]
mod storms;

use blockmux_engine::initiator::nvme::{NvmeDialer, NvmeEndpoint, OverIwarp};
use blockmux_engine::sim::{Outcome, Protocol, Scenario};
use blockmux_engine::socket::Address;
use blockmux_proto::exports::Exports;
use blockmux_proto::fabrics::controller::node::NvmeNode;
use blockmux_proto::nvme_rdma::server::NvmeRdmaTargetSession;
use blockmux_proto::rdma::RdmaSession;
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{self, Iwarp};
use blockmux_volume::Pool;
use nvme_sides::{dialer, endpoint_over, node};
use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Instant;
use storms::{
    breaks, cut_everywhere, fair_day, long_requests, more_broke_than, more_troubles_than, slow_day, stops,
    the_same_again,
};

/// NVMe/RDMA with one node for all of the target's lives.
struct NvmeRdma {
    over: OverIwarp,
    /// What the target's end of the stream asks for.
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

/// Several queues of a controller, queues of very few entries, and frames of each kind.
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

/// Runs the scenario of every seed, or of the one that the environment names.
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<Outcome> {
    seeds::run_each(seeds, |seed| scenario(seed).run(protocol(seed)))
}

#[test]
fn on_a_fair_day_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds(30, fair_day);
    // An admin queue and up to three I/O queues each.
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= 16));
}

#[test]
fn a_slow_volume_on_a_slow_network_only_takes_longer() {
    run_seeds(30, slow_day);
}

#[test]
fn a_network_that_cuts_every_message_changes_nothing() {
    run_seeds(20, cut_everywhere);
}

#[test]
fn long_requests_are_placed_and_pass_through_small_windows() {
    run_seeds(20, long_requests);
}

#[test]
fn what_a_broken_connection_leaves_is_replayed_exactly_once() {
    let outcomes = run_seeds(60, breaks);
    more_broke_than(60, &outcomes);
}

#[test]
fn a_target_that_is_stopped_and_started_again_is_not_noticed() {
    let outcomes = run_seeds(20, |seed| stops(seed, false));
    more_troubles_than(0, &outcomes);
}

#[test]
fn a_target_that_loses_its_power_keeps_what_was_flushed_or_forced() {
    let outcomes = run_seeds(40, |seed| stops(seed, true));
    more_troubles_than(0, &outcomes);
}

#[test]
fn everything_at_once() {
    run_seeds(40, storms::everything_at_once);
}

#[test]
fn the_same_seed_does_the_same_again() {
    the_same_again(|short| run_seeds(5, short));
}
