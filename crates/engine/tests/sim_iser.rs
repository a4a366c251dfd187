//! iSER over iWARP under the simulator: seeds of each kind of trouble, with CRCs and without.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_iser` runs that one alone,
//! in every kind of trouble.

mod iscsi_names;
mod iscsi_sides;
mod seeds;
#[allow(dead_code, reason = "not every trouble is one of iSER's")]
mod storms;

use blockmux_engine::initiator::{Dialer, Opening, Paths};
use blockmux_engine::sim::{Outcome, Protocol, Scenario};
use blockmux_engine::socket::Address;
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::client::{BurstSize, Config, IserInitiatorSession, Mode, wishes};
use blockmux_proto::iscsi::login::operational::{Key, Parameters};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::Node;
use blockmux_proto::iscsi::server::{IserTargetSession, LocalSessions, TargetSession};
use blockmux_proto::rdma::{RdmaConnections, RdmaSession};
use blockmux_proto::scsi::Lun;
use blockmux_proto::session::{Home, NoControl};
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{self, Iwarp};
use blockmux_volume::Pool;
use iscsi_names::target_name;
use iscsi_sides::node;
use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;
use storms::{breaks, cut_everywhere, fair_day, long_requests, more_broke_than, more_troubles_than, stops};

/// iSER as the initiator wishes it, with one node and one core for all of the target's lives.
struct Iser {
    wishes: Parameters,
    config: iwarp::Config,
    node: OnceCell<Arc<Node>>,
    local: Rc<LocalSessions>,
}

impl Protocol for Iser {
    type Target = Driven<Iwarp, IserTargetSession>;
    type Dialer = IserDialer;

    fn target(&self, exports: Exports, pool: Pool, now: Instant) -> Self::Target {
        let node = self.node.get_or_init(|| node(&exports));
        let session = TargetSession::among(&self.local, node.clone(), 1, pool.clone(), [3; 32], now);
        let config = iwarp::Config::default();
        let session = IserTargetSession::new(session);
        let queue_pair = Iwarp::passive(&session.endpoint(), config, pool, [4; 32], now);
        Driven::new(session, queue_pair, now)
    }

    fn dialer(&self, address: &Address) -> IserDialer {
        IserDialer { paths: Paths::to(address), wishes: self.wishes, config: self.config.clone() }
    }
}

struct IserDialer {
    paths: Paths,
    wishes: Parameters,
    config: iwarp::Config,
}

impl Dialer for IserDialer {
    type Session = Driven<Iwarp, IserInitiatorSession>;
    type Control = NoControl;

    fn paths(&self) -> &Paths {
        &self.paths
    }

    fn session(&self, opening: &Opening<'_, NoControl>) -> Self::Session {
        let (link, pool, now) = (opening.link, opening.pool, opening.now);
        let [a, b, c, d] = link.to_be_bytes();
        let config = Config {
            initiator: Name::new("iqn.2026-11.i:me").unwrap(),
            target: target_name("disk0"),
            lun: Lun::new(0),
            mode: Mode::Use,
            chap: None,
            wishes: self.wishes,
            isid: [0x80, 0, a, b, c, d],
            // Few, so that short queues go by all connections.
            burst: BurstSize { commands: 2, ..BurstSize::default() },
        };
        let session = IserInitiatorSession::new(config, pool.clone(), [7; 32], now);
        let (config, pool) = (self.config.clone(), pool.clone());
        let queue_pair = Iwarp::active(&session.endpoint(), config, pool, [8; 32], now);
        Driven::new(session, queue_pair, now)
    }

    fn check(&self, session: &Self::Session) -> Result<(), String> {
        let info = session.session().session().volume_info();
        info.map(|_| ()).ok_or_else(|| "the unit was not described".to_owned())
    }

    fn refusal(&self, session: &Self::Session) -> Option<String> {
        let refused = session.session().session().refused();
        refused.filter(|refused| !refused.may_pass()).map(ToString::to_string)
    }
}

/// Whatever is sent at once; every write read by the target; and frames of each kind.
fn protocol(seed: u64) -> Iser {
    let wishes = match seed % 2 {
        0 => wishes(),
        _ => wishes().with(Key::InitialR2T, 1).with(Key::ImmediateData, 0),
    };
    let config = iwarp::Config {
        has_crc: seed % 3 == 1,
        wants_markers: seed % 5 == 2,
        is_enhanced: seed % 7 != 3,
        mss: [1448, 65_483, 536][seed as usize % 3],
        ..iwarp::Config::default()
    };
    Iser { wishes, config, node: OnceCell::new(), local: LocalSessions::new(Home::new(())) }
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
