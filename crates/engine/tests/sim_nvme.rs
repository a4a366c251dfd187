//! NVMe/TCP under the simulator: many seeds of each kind of trouble.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_nvme`
//! runs that one alone, in every kind of trouble.

#[allow(dead_code, reason = "these tests know of one path")]
mod nvme_sides;
mod seeds;
#[allow(dead_code, reason = "not every trouble is one of NVMe's")]
mod storms;

use blockmux_engine::initiator::nvme::{NvmeDialer, NvmeEndpoint, NvmeOverTcp};
use blockmux_engine::secure::Secure;
use blockmux_engine::sim::{Outcome, Protocol, Scenario, SystemTls};
use blockmux_engine::socket::Address;
use blockmux_proto::exports::Exports;
use blockmux_proto::fabrics::controller::node::{NvmeNode, SecureChannel};
use blockmux_proto::fabrics::keyring::Keyring;
use blockmux_proto::nvme::auth::psk::ConfiguredPsk;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme_tcp::client::{Digests, Names};
use blockmux_proto::nvme_tcp::server::NvmeTcpTargetSession;
use blockmux_tls::{Hash, Psk, ServerCredentials};
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
    node: OnceCell<Arc<NvmeNode>>,
    /// The key that every connection is secured with.
    tls_key: Option<ConfiguredPsk>,
}

/// What the host asks for.
#[derive(Clone, Copy)]
struct Wishes {
    digests: Digests,
    entries: u16,
    queues: u16,
}

impl Protocol for Nvme {
    type Target = NvmeTcpTargetSession;
    type Dialer = NvmeDialer;

    fn target(&self, exports: Exports, pool: Pool, now: Instant) -> NvmeTcpTargetSession {
        let node = self.node.get_or_init(|| {
            let (node, _) = node(&exports);
            let Some(key) = &self.tls_key else { return node };
            let (keyring, [host, subsystem]) = (Keyring::default(), names());
            keyring.insert(&key.retained(&host), &host, &subsystem, now);
            let node = Arc::into_inner(node).expect("nobody has it yet");
            Arc::new(node.with_tls(Arc::new(keyring), SecureChannel::Required))
        });
        NvmeTcpTargetSession::new(node.clone(), pool, now).at_port(1)
    }

    fn secure(&self) -> Option<Secure> {
        let [host, subsystem] = names();
        let keys = self.tls_key.as_ref()?.retained(&host).tls_psks(&host, &subsystem);
        Some(Secure::server(ServerCredentials::Psks(Arc::new(move |identity: &[u8]| {
            let key = keys.iter().find(|key| key.identity.as_bytes() == identity)?;
            Some(Psk {
                identity: identity.to_vec(),
                secret: key.secret().to_vec().into(),
                hash: Hash::Sha256,
            })
        }))))
    }

    fn dialer(&self, address: &Address) -> NvmeDialer {
        let Wishes { digests, entries, queues } = self.wishes;
        let tls_key = self.tls_key.clone();
        let over = NvmeOverTcp { digests };
        dialer(NvmeEndpoint { over, entries, queues, tls_key, ..endpoint(std::slice::from_ref(address)) })
    }
}

/// Nothing beyond the least; digests, several queues of a controller, and queues of very few
/// entries.
fn wishes_of(seed: u64) -> Wishes {
    let digests = Digests { header: seed.is_multiple_of(2), data: seed.is_multiple_of(3) };
    Wishes { digests, entries: if seed % 5 == 1 { 3 } else { 64 }, queues: 1 + seed as u16 / 2 % 3 }
}

/// Runs the scenario of every seed, or of the one that the environment names.
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<Outcome> {
    seeds::run_each(seeds, |seed| {
        let protocol = Nvme { wishes: wishes_of(seed), node: OnceCell::new(), tls_key: None };
        scenario(seed).run(protocol)
    })
}

/// Runs every seed by TLS, whose records are made by the kernel that the scenario has.
fn run_seeds_by_tls(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<Outcome> {
    let key = ConfiguredPsk::parse("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:");
    let key = key.expect("it is one");
    seeds::run_each(seeds, |seed| {
        let node = OnceCell::new();
        let protocol = Nvme { wishes: wishes_of(seed), node, tls_key: Some(key.clone()) };
        let scenario = Scenario { system_tls: SystemTls::Once, ..scenario(seed) };
        scenario.run(protocol)
    })
}

/// Whom the key is for, and what.
fn names() -> [Nqn; 2] {
    let Names { host, subsystem, .. } = nvme_sides::names();
    [host, subsystem]
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
fn by_the_kernels_tls_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds_by_tls(20, fair_day);
    // Two at each end of each connection.
    assert!(outcomes.iter().all(|outcome| outcome.tls_keys == 4 * outcome.connections));
    run_seeds_by_tls(10, slow_day);
    run_seeds_by_tls(10, long_requests);
    let outcomes = run_seeds_by_tls(20, breaks);
    more_broke_than(20, &outcomes);
    let outcomes = run_seeds_by_tls(20, |seed| stops(seed, true));
    more_troubles_than(0, &outcomes);
}

#[test]
fn the_same_seed_does_the_same_again() {
    the_same_again(|short| run_seeds(5, short));
}
