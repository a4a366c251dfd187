//! NVMe/RDMA on iWARP, with CRCs and without: see [`crate::scenarios`].

use crate::scenarios::scenario_tests;
use crate::seeds;
use crate::sides::iwarp;
use crate::sides::nvme::{dialer, endpoint_over, node};
use blockmux_engine::fabric::iwarp::IwarpFabric;
use blockmux_engine::net::socket::Address;
use blockmux_engine::protocol::nvme::initiator::{NvmeDialer, NvmeEndpoint};
use blockmux_engine::sim::{Protocol, Scenario, ScenarioOutcome, TargetSessions};
use blockmux_proto::exports::Exports;
use blockmux_proto::nvme_rdma::server::NvmeRdmaTargetSession;
use blockmux_proto::rdma::RdmaSession;
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{Iwarp, IwarpConfig};
use std::rc::Rc;

/// NVMe/RDMA with these parameters.
struct NvmeRdma {
    over: IwarpFabric,
    /// The iWARP parameters that the target requests.
    config: IwarpConfig,
    entries: u16,
    queues: u16,
}

impl Protocol for NvmeRdma {
    type Target = Driven<Iwarp, NvmeRdmaTargetSession>;
    type Dialer = NvmeDialer<IwarpFabric>;

    fn sessions(&self, exports: &Exports) -> TargetSessions<Self::Target> {
        let (node, config) = (node(exports).0, self.config.clone());
        Rc::new(move |pool, now| {
            let session = NvmeRdmaTargetSession::new(node.clone(), pool.clone(), now).at_port(1);
            let queue_pair = Iwarp::passive(&session.endpoint(), config.clone(), pool, [4; 32], now);
            Driven::new(session, queue_pair, now)
        })
    }

    fn dialer(&self, address: &Address) -> Self::Dialer {
        let NvmeRdma { entries, queues, .. } = *self;
        dialer(NvmeEndpoint {
            entries,
            queues,
            ..endpoint_over(self.over.clone(), std::slice::from_ref(address))
        })
    }
}

/// Varies the number of queues of a controller, the number of entries of a queue, and the kind of
/// frames.
fn protocol(seed: u64) -> NvmeRdma {
    NvmeRdma {
        over: iwarp(seed % 3 == 1, seed % 7 == 3),
        config: IwarpConfig { mss: [1448, 65_483, 536][seed as usize % 3], ..IwarpConfig::default() },
        entries: if seed % 5 == 1 { 3 } else { 64 },
        queues: 1 + seed as u16 / 2 % 3,
    }
}

/// Runs the scenario with every seed, or only the one that the environment variable gives.
fn run_seeds(seeds: u64, scenario: &dyn Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    seeds::run_each(seeds, |seed| scenario(seed).run(protocol(seed)))
}

// A controller has an admin queue and up to three I/O queues.
scenario_tests! { run_seeds:
    fn without_faults_everything_completes_and_nothing_is_lost(30, 4 * 4);
    fn a_slow_volume_on_a_slow_network_is_only_slower(30);
    fn a_network_that_splits_every_message_changes_nothing(20);
    fn long_requests_are_placed_and_pass_through_small_windows(20);
    fn requests_of_a_broken_connection_are_replayed_exactly_once(60, 60);
    fn a_target_restart_is_transparent_to_the_client(20, 0);
    fn a_target_that_crashes_keeps_flushed_and_fua_writes(40, 0);
    fn all_faults_together_lose_nothing(40);
    fn the_same_seed_gives_the_same_run();
}
