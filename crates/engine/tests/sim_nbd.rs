//! NBD under the simulator: hundreds of seeds with each kind of fault.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_nbd`
//! runs only that seed, with every kind of fault.

mod nbd_dialer;
mod scenarios;
mod seeds;

use blockmux_engine::carrier::tls::{ClientCredentials, ClientTls, Psk, Secure, ServerCredentials};
use blockmux_engine::net::socket::Address;
use blockmux_engine::sim::{Protocol, Scenario, ScenarioOutcome, SystemTls};
use blockmux_proto::exports::Exports;
use blockmux_proto::nbd::client::NbdFeatures;
use blockmux_proto::nbd::server::{NbdTargetSession, NbdTls, TlsMode};
use blockmux_tls::Hash;
use blockmux_volume::Pool;
use nbd_dialer::NbdDialer;
use scenarios::{
    breaks, check_breaks, check_determinism, check_outages, long_outages, long_requests, medium_errors,
    slow_network, split_messages, stops, without_faults,
};
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

/// NBD with these features.
struct Nbd(NbdFeatures);

impl Protocol for Nbd {
    type Target = NbdTargetSession;
    type Dialer = NbdDialer;

    fn target(&self, exports: Exports, pool: Pool, now: Instant) -> NbdTargetSession {
        NbdTargetSession::new(exports, pool, now)
    }

    fn dialer(&self, address: &Address) -> NbdDialer {
        NbdDialer::new(address, self.0, None)
    }
}

/// NBD with TLS, which both sides start during the NBD handshake.
struct NbdByTls(NbdFeatures);

impl Protocol for NbdByTls {
    type Target = NbdTargetSession;
    type Dialer = NbdDialer;

    fn target(&self, exports: Exports, pool: Pool, now: Instant) -> NbdTargetSession {
        let tls = NbdTls { mode: TlsMode::Required, subjects: None };
        NbdTargetSession::new(exports, pool, now).with_tls(tls)
    }

    fn secure(&self) -> Option<Secure> {
        let lookup = |identity: &[u8]| (identity == b"alice").then(alice);
        Some(Secure::server(ServerCredentials::Psks(Arc::new(lookup))).on_demand())
    }

    fn dialer(&self, address: &Address) -> NbdDialer {
        let credentials = ClientCredentials::Psks([alice()].into());
        let tls = Some(ClientTls { credentials, ktls: true, is_on_demand: true });
        NbdDialer { tls, ..NbdDialer::new(address, self.0, None) }
    }
}

fn alice() -> Psk {
    Psk { identity: b"alice".to_vec(), secret: vec![7; 32].into(), hash: Hash::Sha256 }
}

/// Runs the scenario with every seed over TLS; the kernel or the library processes the records.
fn run_seeds_by_tls(
    seeds: u64,
    kernel: SystemTls,
    scenario: impl Fn(u64) -> Scenario,
) -> Vec<ScenarioOutcome> {
    seeds::run_each(seeds, |seed| {
        let features = NbdFeatures { extended_headers: seed.is_multiple_of(2), structured_replies: true };
        Scenario { system_tls: kernel, ..scenario(seed) }.run(NbdByTls(features))
    })
}

/// Runs the scenario with every seed, or only the one that the environment variable gives, each
/// with the next of the three forms of messages.
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    seeds::run_each(seeds, |seed| {
        let form = seed % 3;
        let features = NbdFeatures { extended_headers: form == 2, structured_replies: form >= 1 };
        scenario(seed).run(Nbd(features))
    })
}

#[test]
fn without_faults_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds(100, without_faults);
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= 4));
}

#[test]
fn a_slow_volume_on_a_slow_network_is_only_slower() {
    run_seeds(100, slow_network);
}

#[test]
fn a_network_that_splits_every_message_changes_nothing() {
    run_seeds(60, split_messages);
}

#[test]
fn long_requests_are_placed_and_pass_through_small_windows() {
    run_seeds(20, long_requests);
}

#[test]
fn requests_of_a_broken_connection_are_replayed_exactly_once() {
    let outcomes = run_seeds(150, breaks);
    check_breaks(300, &outcomes);
}

#[test]
fn a_medium_error_fails_only_its_own_request() {
    run_seeds(60, medium_errors);
}

#[test]
fn a_target_restart_is_transparent_to_the_client() {
    let outcomes = run_seeds(100, |seed| stops(seed, false));
    check_outages(100, &outcomes);
}

#[test]
fn a_target_that_crashes_keeps_flushed_and_fua_writes() {
    let outcomes = run_seeds(150, |seed| stops(seed, true));
    check_outages(100, &outcomes);
}

#[test]
fn a_long_outage_fails_requests_and_later_requests_reconnect() {
    run_seeds(60, long_outages);
}

#[test]
fn all_faults_together_lose_nothing() {
    run_seeds(100, |seed| Scenario { allows_stale_writes: true, ..scenarios::all_faults(seed) });
}

#[test]
fn with_tls_everything_completes_and_nothing_is_lost() {
    for (kernel, keys) in [(SystemTls::None, 0), (SystemTls::Once, 4)] {
        let outcomes = run_seeds_by_tls(5, kernel, without_faults);
        // Two keys at each end of each connection, if the kernel accepts them.
        assert!(outcomes.iter().all(|outcome| outcome.tls_keys == keys * outcome.connections));
        run_seeds_by_tls(2, kernel, slow_network);
        run_seeds_by_tls(1, kernel, split_messages);
        run_seeds_by_tls(2, kernel, long_requests);
        let outcomes = run_seeds_by_tls(8, kernel, breaks);
        check_breaks(4, &outcomes);
        // Between two crashes there is time for an NBD handshake, a TLS handshake, and some I/O.
        let outcomes = run_seeds_by_tls(6, kernel, |seed| {
            let mut scenario = stops(seed, true);
            scenario.outage.iter_mut().for_each(|outage| outage.every = Duration::from_millis(200));
            scenario
        });
        check_outages(0, &outcomes);
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    check_determinism(|short| run_seeds(5, |seed| Scenario { allows_stale_writes: true, ..short(seed) }));
}
