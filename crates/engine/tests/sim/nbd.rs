//! NBD: see [`crate::scenarios`].

use crate::scenarios::{self, check_breaks, check_outages, scenario_tests, stops};
use crate::seeds;
use crate::sides::nbd::{NbdDialer, sessions};
use blockmux_engine::carrier::tls::{ClientCredentials, ClientTls, Psk, Secure, ServerCredentials};
use blockmux_engine::net::socket::Address;
use blockmux_engine::sim::{Protocol, Scenario, ScenarioOutcome, SystemTls, TargetSessions};
use blockmux_proto::exports::Exports;
use blockmux_proto::nbd::client::NbdFeatures;
use blockmux_proto::nbd::server::{NbdTargetSession, NbdTls, TlsMode};
use blockmux_tls::Hash;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// NBD with these features.
struct Nbd(NbdFeatures);

impl Protocol for Nbd {
    type Target = NbdTargetSession;
    type Dialer = NbdDialer;

    fn sessions(&self, exports: &Exports) -> TargetSessions<NbdTargetSession> {
        Rc::new(sessions(exports))
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

    fn sessions(&self, exports: &Exports) -> TargetSessions<NbdTargetSession> {
        let sessions = sessions(exports);
        Rc::new(move |pool, now| {
            sessions(pool, now).with_tls(NbdTls { mode: TlsMode::Required, subjects: None })
        })
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
    scenario: &dyn Fn(u64) -> Scenario,
) -> Vec<ScenarioOutcome> {
    seeds::run_each(seeds, |seed| {
        let features = NbdFeatures { extended_headers: seed.is_multiple_of(2), structured_replies: true };
        Scenario { system_tls: kernel, ..scenario(seed) }.run(NbdByTls(features))
    })
}

/// Runs the scenario with every seed, or only the one that the environment variable gives, each
/// with the next of the three forms of messages.
fn run_seeds(seeds: u64, scenario: &dyn Fn(u64) -> Scenario) -> Vec<ScenarioOutcome> {
    seeds::run_each(seeds, |seed| {
        let form = seed % 3;
        let features = NbdFeatures { extended_headers: form == 2, structured_replies: form >= 1 };
        scenario(seed).run(Nbd(features))
    })
}

scenario_tests! { run_seeds:
    fn without_faults_everything_completes_and_nothing_is_lost(100, 4);
    fn a_slow_volume_on_a_slow_network_is_only_slower(100);
    fn a_network_that_splits_every_message_changes_nothing(60);
    fn long_requests_are_placed_and_pass_through_small_windows(20);
    fn requests_of_a_broken_connection_are_replayed_exactly_once(150, 300);
    fn a_medium_error_fails_only_its_own_request(60);
    fn a_target_restart_is_transparent_to_the_client(100, 100);
    fn a_target_that_crashes_keeps_flushed_and_fua_writes(150, 100);
    fn a_long_outage_fails_requests_and_later_requests_reconnect(60);
}

#[test]
fn all_faults_together_lose_nothing() {
    run_seeds(100, &|seed| Scenario { allows_stale_writes: true, ..scenarios::all_faults(seed) });
}

#[test]
fn with_tls_everything_completes_and_nothing_is_lost() {
    for (kernel, keys) in [(SystemTls::None, 0), (SystemTls::Once, 4)] {
        let outcomes = run_seeds_by_tls(5, kernel, &scenarios::without_faults);
        // Two keys at each end of each connection, if the kernel accepts them.
        assert!(outcomes.iter().all(|outcome| outcome.tls_keys == keys * outcome.connections));
        run_seeds_by_tls(2, kernel, &scenarios::slow_network);
        run_seeds_by_tls(1, kernel, &scenarios::split_messages);
        run_seeds_by_tls(2, kernel, &scenarios::long_requests);
        let outcomes = run_seeds_by_tls(8, kernel, &scenarios::breaks);
        check_breaks(4, &outcomes);
        // Between two crashes there is time for an NBD handshake, a TLS handshake, and some I/O.
        let outcomes = run_seeds_by_tls(6, kernel, &|seed| {
            let mut scenario = stops(seed, true);
            scenario.outage.iter_mut().for_each(|outage| outage.every = Duration::from_millis(200));
            scenario
        });
        check_outages(0, &outcomes);
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    scenarios::check_determinism(|short| {
        run_seeds(5, &|seed| Scenario { allows_stale_writes: true, ..short(seed) })
    });
}
