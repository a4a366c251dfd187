//! iSER over iWARP under the simulator: seeds of each kind of trouble, with CRCs and without.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_iser`
//! runs that one alone, in every kind of trouble.

#[allow(dead_code, reason = "iSER's goes on from it")]
mod iscsi_dialer;
mod iscsi_names;
mod iscsi_sides;
mod iser_sides;
mod seeds;
#[allow(dead_code, reason = "not every trouble is one of iSER's")]
mod storms;

use blockmux_engine::sim::{Outcome, Protocol, Scenario};
use blockmux_engine::socket::Address;
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
use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;
use storms::{breaks, cut_everywhere, fair_day, long_requests, more_broke_than, more_troubles_than, stops};

/// iSER as the initiator wishes it, with one node and one core for all of the target's lives.
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

/// Whatever is sent at once; every write read by the target; and frames of each kind.
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

/// Runs the scenario of every seed, or of the one that the environment names.
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<Outcome> {
    seeds::run_each(seeds, |seed| scenario(seed).run(protocol(seed)))
}

#[test]
fn on_a_fair_day_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds(60, fair_day);
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= 4));
}

#[test]
fn a_network_that_cuts_every_message_changes_nothing() {
    run_seeds(40, cut_everywhere);
}

#[test]
fn long_requests_are_placed_and_pass_through_small_windows() {
    run_seeds(20, long_requests);
}

#[test]
fn what_a_broken_connection_leaves_is_replayed_exactly_once() {
    let outcomes = run_seeds(100, breaks);
    more_broke_than(200, &outcomes);
}

#[test]
fn a_target_that_loses_its_power_keeps_what_was_flushed_or_forced() {
    let outcomes = run_seeds(60, |seed| stops(seed, !seed.is_multiple_of(3)));
    more_troubles_than(40, &outcomes);
}

#[test]
fn everything_at_once() {
    run_seeds(60, storms::everything_at_once);
}
