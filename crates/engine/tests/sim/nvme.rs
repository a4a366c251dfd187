//! NVMe/TCP: see [`crate::scenarios`].

use crate::scenarios::{self, check_breaks, check_outages, scenario_tests, stops};
use crate::seeds;
use crate::sides::nvme::{self, dialer, endpoint, node};
use blockmux_engine::carrier::tls::Secure;
use blockmux_engine::net::socket::Address;
use blockmux_engine::protocol::nvme::initiator::{NvmeDialer, NvmeEndpoint, NvmeOverTcp};
use blockmux_engine::remote::CurrentSecrets;
use blockmux_engine::sim::{Protocol, Scenario, ScenarioOutcome, SystemTls, TargetSessions};
use blockmux_proto::exports::Exports;
use blockmux_proto::fabrics::controller::node::SecureChannel;
use blockmux_proto::fabrics::keyring::Keyring;
use blockmux_proto::nvme::auth::psk::ConfiguredPsk;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme_tcp::client::{Digests, Names};
use blockmux_proto::nvme_tcp::server::NvmeTcpTargetSession;
use blockmux_tls::{Hash, Psk, ServerCredentials};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// NVMe/TCP with these parameters.
struct Nvme {
    parameters: HostParameters,
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

    fn sessions(&self, exports: &Exports) -> TargetSessions<NvmeTcpTargetSession> {
        let Some(key) = &self.tls_key else { return Rc::new(nvme::sessions(exports)) };
        let (keyring, [host, subsystem]) = (Keyring::default(), names());
        keyring.insert(&key.retained(&host), &host, &subsystem, Instant::now());
        let node = Arc::into_inner(node(exports).0).expect("the node is not shared yet");
        let node = Arc::new(node.with_tls(Arc::new(keyring), SecureChannel::Required));
        Rc::new(move |pool, now| NvmeTcpTargetSession::new(node.clone(), pool, now).at_port(1))
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
fn run_seeds(seeds: u64, scenario: &dyn Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    seeds::run_each(seeds, |seed| scenario(seed).run(Nvme { parameters: parameters_of(seed), tls_key: None }))
}

/// Runs every seed over TLS; the scenario's kernel processes the records.
fn run_seeds_by_tls(seeds: u64, scenario: &dyn Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    let key = ConfiguredPsk::parse("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:");
    let key = key.expect("the key is valid");
    seeds::run_each(seeds, |seed| {
        let protocol = Nvme { parameters: parameters_of(seed), tls_key: Some(key.clone()) };
        let scenario = Scenario { system_tls: SystemTls::Once, ..scenario(seed) };
        scenario.run(protocol)
    })
}

/// Host and subsystem of the key.
fn names() -> [Nqn; 2] {
    let Names { host, subsystem, .. } = nvme::names();
    [host, subsystem]
}

// A controller has an admin queue and up to three I/O queues.
scenario_tests! { run_seeds:
    fn without_faults_everything_completes_and_nothing_is_lost(60, 4 * 4);
    fn a_slow_volume_on_a_slow_network_is_only_slower(60);
    fn a_network_that_splits_every_message_changes_nothing(40);
    fn long_requests_are_placed_and_pass_through_small_windows(20);
    fn requests_of_a_broken_connection_are_replayed_exactly_once(60, 60);
    fn a_target_restart_is_transparent_to_the_client(40, 0);
    fn a_target_that_crashes_keeps_flushed_and_fua_writes(40, 0);
    fn all_faults_together_lose_nothing(40);
    fn the_same_seed_gives_the_same_run();
}

#[test]
fn with_ktls_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds_by_tls(20, &scenarios::without_faults);
    // Two keys at each end of each connection.
    assert!(outcomes.iter().all(|outcome| outcome.tls_keys == 4 * outcome.connections));
    run_seeds_by_tls(10, &scenarios::slow_network);
    run_seeds_by_tls(10, &scenarios::long_requests);
    let outcomes = run_seeds_by_tls(20, &scenarios::breaks);
    check_breaks(20, &outcomes);
    let outcomes = run_seeds_by_tls(20, &|seed| stops(seed, true));
    check_outages(0, &outcomes);
}
