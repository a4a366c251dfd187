//! SRP on iWARP, with CRCs and without: see [`crate::scenarios`].

use crate::scenarios::scenario_tests;
use crate::seeds;
use crate::sides::iwarp;
use crate::sides::srp::{endpoint, node};
use blockmux_engine::fabric::StreamFabric;
use blockmux_engine::fabric::iwarp::IwarpFabric;
use blockmux_engine::net::socket::Address;
use blockmux_engine::protocol::srp::initiator::{SrpDialer, SrpEndpoint};
use blockmux_engine::remote::{Dialer, Opening, Paths};
use blockmux_engine::sim::{Protocol, Scenario, ScenarioOutcome, TargetSessions};
use blockmux_proto::driver::session::NoControl;
use blockmux_proto::exports::Exports;
use blockmux_proto::rdma::RdmaSession;
use blockmux_proto::srp::client::UnitInfo;
use blockmux_proto::srp::server::SrpTargetSession;
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{Iwarp, IwarpConfig};
use std::rc::Rc;
use std::sync::Arc;

/// SRP with these parameters.
struct Srp {
    over: IwarpFabric,
    /// The iWARP parameters that the target requests.
    config: IwarpConfig,
    channels: u32,
    immediate_data: bool,
}

impl Protocol for Srp {
    type Target = Driven<Iwarp, SrpTargetSession>;
    type Dialer = AnyUnit<IwarpFabric>;

    fn sessions(&self, exports: &Exports) -> TargetSessions<Self::Target> {
        let (node, config) = (node(exports), self.config.clone());
        Rc::new(move |pool, now| {
            // The simulated network reports a lost connection to both sides.
            let session = SrpTargetSession::new(node.clone(), pool.clone(), Arc::new(|| {}), now);
            let queue_pair = Iwarp::passive(&session.endpoint(), config.clone(), pool, [4; 32], now);
            Driven::new(session, queue_pair, now)
        })
    }

    fn dialer(&self, address: &Address) -> AnyUnit<IwarpFabric> {
        let Srp { channels, immediate_data, .. } = *self;
        let endpoint = SrpEndpoint { channels, immediate_data, ..endpoint(address, 0, self.over.clone()) };
        AnyUnit(SrpDialer::of(endpoint, UnitInfo::default()).unwrap())
    }
}

/// A dialer that has not seen the unit before.
pub(crate) struct AnyUnit<F>(pub(crate) SrpDialer<F>);

impl<F: StreamFabric> Dialer for AnyUnit<F> {
    type Session = <SrpDialer<F> as Dialer>::Session;
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
        over: iwarp(seed % 3 == 1, seed % 7 == 3),
        config: IwarpConfig { mss: [1448, 65_483, 536][seed as usize % 3], ..IwarpConfig::default() },
        channels: 1 + seed as u32 / 2 % 3,
        immediate_data: seed % 4 != 3,
    }
}

/// Runs the scenario with every seed, or only the one that the environment variable gives.
fn run_seeds(seeds: u64, scenario: &dyn Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    seeds::run_each(seeds, |seed| scenario(seed).run(protocol(seed)))
}

// A session has up to three channels.
scenario_tests! { run_seeds:
    fn without_faults_everything_completes_and_nothing_is_lost(30, 4 * 3);
    fn a_slow_volume_on_a_slow_network_is_only_slower(30);
    fn a_network_that_splits_every_message_changes_nothing(20);
    fn long_requests_are_placed_and_pass_through_small_windows(20);
    fn requests_of_a_broken_connection_are_replayed_exactly_once(60, 60);
    fn a_target_restart_is_transparent_to_the_client(20, 0);
    fn a_target_that_crashes_keeps_flushed_and_fua_writes(40, 0);
    fn all_faults_together_lose_nothing(40);
    fn the_same_seed_gives_the_same_run();
}
