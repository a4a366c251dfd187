//! iSER on iWARP, with CRCs and without: see [`crate::scenarios`].

use crate::scenarios::scenario_tests;
use crate::seeds;
use crate::sides::iser::{IserDialer, sessions};
use blockmux_engine::net::socket::Address;
use blockmux_engine::sim::{Protocol, Scenario, ScenarioOutcome, TargetSessions};
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::client::default_proposal;
use blockmux_proto::iscsi::login::operational::{OperationalKey, OperationalParameters};
use blockmux_proto::iscsi::server::IserTargetSession;
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{Iwarp, IwarpConfig};
use std::rc::Rc;

/// iSER with these parameters proposed.
struct Iser {
    proposal: OperationalParameters,
    config: IwarpConfig,
}

impl Protocol for Iser {
    type Target = Driven<Iwarp, IserTargetSession>;
    type Dialer = IserDialer;

    fn sessions(&self, exports: &Exports) -> TargetSessions<Self::Target> {
        Rc::new(sessions(exports))
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
    let config = IwarpConfig {
        has_crc: seed % 3 == 1,
        is_enhanced: seed % 7 != 3,
        mss: [1448, 65_483, 536][seed as usize % 3],
        ..IwarpConfig::default()
    };
    Iser { proposal, config }
}

/// Runs the scenario with every seed, or only the one that the environment variable gives.
fn run_seeds(seeds: u64, scenario: &dyn Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    seeds::run_each(seeds, |seed| scenario(seed).run(protocol(seed)))
}

scenario_tests! { run_seeds:
    fn without_faults_everything_completes_and_nothing_is_lost(60, 4);
    fn a_network_that_splits_every_message_changes_nothing(40);
    fn long_requests_are_placed_and_pass_through_small_windows(20);
    fn requests_of_a_broken_connection_are_replayed_exactly_once(100, 200);
    fn a_target_restart_is_transparent_to_the_client(20, 10);
    fn a_target_that_crashes_keeps_flushed_and_fua_writes(40, 30);
    fn all_faults_together_lose_nothing(60);
    fn the_same_seed_gives_the_same_run();
}
