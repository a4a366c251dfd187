//! NVMe/TCP under the simulator: many seeds with each kind of fault.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_nvme`
//! runs only that seed, with every kind of fault.

#[allow(dead_code, reason = "these tests have one path")]
mod nvme_sides;
#[allow(dead_code, reason = "NVMe runs only some of the scenarios")]
mod scenarios;
mod seeds;

use blockmux_engine::carrier::tls::Secure;
use blockmux_engine::net::socket::Address;
use blockmux_engine::protocol::nvme::initiator::{NvmeDialer, NvmeEndpoint, NvmeOverTcp};
use blockmux_engine::remote::CurrentSecrets;
use blockmux_engine::sim::{Protocol, Scenario, ScenarioOutcome, SystemTls};
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
use scenarios::{
    breaks, check_breaks, check_determinism, check_outages, long_requests, slow_network, split_messages,
    stops, without_faults,
};
use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Instant;

/// NVMe/TCP; all instances of the target share one node.
struct Nvme {
    parameters: HostParameters,
    node: OnceCell<Arc<NvmeNode>>,
    /// The TLS PSK of every connection.
    tls_key: Option<ConfiguredPsk>,
}

/// Parameters that the host requests.
#[derive(Clone, Copy)]
struct HostParameters {
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
            let node = Arc::into_inner(node).expect("the node is not shared yet");
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
        let HostParameters { digests, entries, queues } = self.parameters;
        let tls_key = self.tls_key.clone().map(CurrentSecrets::fixed);
        let over = NvmeOverTcp { digests };
        dialer(NvmeEndpoint { over, entries, queues, tls_key, ..endpoint(std::slice::from_ref(address)) })
    }
}

/// Varies the digests, the number of queues of a controller, and the number of entries of a queue.
fn parameters_of(seed: u64) -> HostParameters {
    let digests = Digests { header: seed.is_multiple_of(2), data: seed.is_multiple_of(3) };
    HostParameters { digests, entries: if seed % 5 == 1 { 3 } else { 64 }, queues: 1 + seed as u16 / 2 % 3 }
}

/// Runs the scenario with every seed, or only the one that the environment variable gives.
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    seeds::run_each(seeds, |seed| {
        let protocol = Nvme { parameters: parameters_of(seed), node: OnceCell::new(), tls_key: None };
        scenario(seed).run(protocol)
    })
}

/// Runs every seed over TLS; the scenario's kernel processes the records.
fn run_seeds_by_tls(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    let key = ConfiguredPsk::parse("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:");
    let key = key.expect("the key is valid");
    seeds::run_each(seeds, |seed| {
        let node = OnceCell::new();
        let protocol = Nvme { parameters: parameters_of(seed), node, tls_key: Some(key.clone()) };
        let scenario = Scenario { system_tls: SystemTls::Once, ..scenario(seed) };
        scenario.run(protocol)
    })
}

/// Host and subsystem of the key.
fn names() -> [Nqn; 2] {
    let Names { host, subsystem, .. } = nvme_sides::names();
    [host, subsystem]
}

#[test]
fn without_faults_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds(60, without_faults);
    // Up to four controllers, each with an admin queue and up to three I/O queues.
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= 16));
}

#[test]
fn a_slow_volume_on_a_slow_network_is_only_slower() {
    run_seeds(60, slow_network);
}

#[test]
fn a_network_that_splits_every_message_changes_nothing() {
    run_seeds(40, split_messages);
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
    let outcomes = run_seeds(40, |seed| stops(seed, false));
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
fn with_ktls_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds_by_tls(20, without_faults);
    // Two keys at each end of each connection.
    assert!(outcomes.iter().all(|outcome| outcome.tls_keys == 4 * outcome.connections));
    run_seeds_by_tls(10, slow_network);
    run_seeds_by_tls(10, long_requests);
    let outcomes = run_seeds_by_tls(20, breaks);
    check_breaks(20, &outcomes);
    let outcomes = run_seeds_by_tls(20, |seed| stops(seed, true));
    check_outages(0, &outcomes);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    check_determinism(|short| run_seeds(5, short));
}
