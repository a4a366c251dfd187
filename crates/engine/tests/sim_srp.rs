//! SRP over iWARP under the simulator: seeds of each kind of fault, with CRCs and without.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_srp`
//! runs that seed alone, in every kind of fault.

mod seeds;
mod srp_sides;
#[allow(dead_code, reason = "not every storm is one of SRP's")]
mod storms;

use blockmux_engine::initiator::srp::{OverIwarp, SrpDialer, SrpEndpoint};
use blockmux_engine::initiator::{Dialer, Opening, Paths};
use blockmux_engine::sim::{Outcome, Protocol, Scenario};
use blockmux_engine::socket::Address;
use blockmux_proto::exports::Exports;
use blockmux_proto::rdma::RdmaSession;
use blockmux_proto::session::NoControl;
use blockmux_proto::srp::client::UnitInfo;
use blockmux_proto::srp::node::SrpNode;
use blockmux_proto::srp::server::TargetSession;
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{self, Iwarp};
use blockmux_volume::Pool;
use srp_sides::{endpoint, node};
use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Instant;
use storms::{
    breaks, cut_everywhere, fair_day, long_requests, more_broke_than, more_troubles_than, slow_day, stops,
    the_same_again,
};

/// SRP with one node for all of the target's lives.
struct Srp {
    over: OverIwarp,
    /// What the target's end of the stream asks for.
    config: iwarp::IwarpConfig,
    channels: u32,
    immediate_data: bool,
    node: OnceCell<Arc<SrpNode>>,
}

impl Protocol for Srp {
    type Target = Driven<Iwarp, TargetSession>;
    type Dialer = AnyUnit;

    fn target(&self, exports: Exports, pool: Pool, now: Instant) -> Self::Target {
        let node = self.node.get_or_init(|| node(&exports));
        // The network tells both sides that a connection is lost.
        let session = TargetSession::new(node.clone(), pool.clone(), Arc::new(|| {}), now);
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
        session.session().unit().map(|_| ()).ok_or_else(|| "the unit was not described".to_owned())
    }

    fn refusal(&self, session: &Self::Session) -> Option<String> {
        self.0.refusal(session)
    }
}

/// One channel and several, data with the command and not, and frames of each kind.
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

/// Runs the scenario of every seed, or of the one that the environment names.
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<Outcome> {
    seeds::run_each(seeds, |seed| scenario(seed).run(protocol(seed)))
}

#[test]
fn on_a_fair_day_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds(30, fair_day);
    // Up to three channels of each session.
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= 12));
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
