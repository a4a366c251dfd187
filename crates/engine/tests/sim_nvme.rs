//! NVMe/TCP under the simulator: many seeds of each kind of trouble.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_nvme` runs that one alone,
//! in every kind of trouble.

#[allow(dead_code, reason = "these tests know of one path")]
mod nvme_sides;
mod seeds;
#[allow(dead_code, reason = "not every trouble is one of NVMe's")]
mod storms;

use blockmux_engine::initiator::nvme::{Endpoint, NvmeDialer};
use blockmux_engine::sim::{Outcome, Protocol, Scenario};
use blockmux_engine::socket::Address;
use blockmux_proto::exports::Exports;
use blockmux_proto::nvmeof::node::Node;
use blockmux_proto::nvmeof::tcp::initiator::Digests;
use blockmux_proto::nvmeof::tcp::target::TargetSession;
use blockmux_volume::Pool;
use nvme_sides::{dialer, endpoint, node};
use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Instant;
use storms::{
    breaks, cut_everywhere, fair_day, long_requests, more_broke_than, more_troubles_than, slow_day, stops,
    the_same_again,
};

/// NVMe/TCP with one node for all of the target's lives.
struct Nvme {
    wishes: Wishes,
    node: OnceCell<Arc<Node>>,
}

/// What the host asks for.
#[derive(Clone, Copy)]
struct Wishes {
    digests: Digests,
    entries: u16,
    queues: u16,
}

impl Protocol for Nvme {
    type Target = TargetSession;
    type Dialer = NvmeDialer;

    fn target(&self, exports: Exports, pool: Pool, now: Instant) -> TargetSession {
        let node = self.node.get_or_init(|| node(&exports).0);
        TargetSession::new(node.clone(), pool, now).at_port(1)
    }

    fn dialer(&self, address: &Address) -> NvmeDialer {
        let Wishes { digests, entries, queues } = self.wishes;
        dialer(Endpoint { digests, entries, queues, ..endpoint(std::slice::from_ref(address)) })
    }
}

/// Nothing beyond the least; digests, several queues of a controller, and queues of very few entries.
fn wishes_of(seed: u64) -> Wishes {
    let digests = Digests { header: seed.is_multiple_of(2), data: seed.is_multiple_of(3) };
    Wishes { digests, entries: if seed % 5 == 1 { 3 } else { 64 }, queues: 1 + seed as u16 / 2 % 3 }
}

/// Runs the scenario of every seed, or of the one that the environment names.
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<Outcome> {
    seeds::run_each(seeds, |seed| {
        let protocol = Nvme { wishes: wishes_of(seed), node: OnceCell::new() };
        scenario(seed).run(protocol)
    })
}

#[test]
fn on_a_fair_day_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds(60, fair_day);
    // An admin queue and up to three I/O queues each.
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= 16));
}

#[test]
fn a_slow_volume_on_a_slow_network_only_takes_longer() {
    run_seeds(60, slow_day);
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
    let outcomes = run_seeds(60, breaks);
    more_broke_than(60, &outcomes);
}

#[test]
fn a_target_that_is_stopped_and_started_again_is_not_noticed() {
    let outcomes = run_seeds(40, |seed| stops(seed, false));
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
