//! NBD under the simulator: hundreds of seeds of each kind of trouble.
//!
//! A failure prints its seed; `BLOCKMUX_SIM_SEED=17 cargo test -p blockmux-engine --test sim_nbd`
//! runs that one alone, in every kind of trouble.

mod nbd_dialer;
mod seeds;
mod storms;

use blockmux_engine::secure::{ClientCredentials, ClientTls, Psk, Secure, ServerCredentials};
use blockmux_engine::sim::{Outcome, Protocol, Scenario, SystemTls};
use blockmux_engine::socket::Address;
use blockmux_proto::exports::Exports;
use blockmux_proto::nbd::client::NbdFeatures;
use blockmux_proto::nbd::server::{NbdTargetSession, NbdTls, TlsMode};
use blockmux_tls::Hash;
use blockmux_volume::Pool;
use nbd_dialer::NbdDialer;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;
use storms::{
    breaks, cut_everywhere, fair_day, long_absences, long_requests, medium_errors, more_broke_than,
    more_troubles_than, slow_day, stops, the_same_again,
};

/// NBD in the form that the features lead to.
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

/// NBD by TLS, which both sides begin in the middle of the handshake.
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

/// Runs the scenario of every seed by TLS, whose records the kernel makes or the library.
fn run_seeds_by_tls(seeds: u64, kernel: SystemTls, scenario: impl Fn(u64) -> Scenario) -> Vec<Outcome> {
    seeds::run_each(seeds, |seed| {
        let features = NbdFeatures { extended_headers: seed.is_multiple_of(2), structured_replies: true };
        Scenario { system_tls: kernel, ..scenario(seed) }.run(NbdByTls(features))
    })
}

/// Runs the scenario of every seed, or of the one that the environment names, each in the next of
/// the three forms.
fn run_seeds(seeds: u64, scenario: impl Fn(u64) -> Scenario) -> Vec<Outcome> {
    seeds::run_each(seeds, |seed| {
        let form = seed % 3;
        let features = NbdFeatures { extended_headers: form == 2, structured_replies: form >= 1 };
        scenario(seed).run(Nbd(features))
    })
}

#[test]
fn on_a_fair_day_everything_completes_and_nothing_is_lost() {
    let outcomes = run_seeds(100, fair_day);
    assert!(outcomes.iter().all(|outcome| outcome.breaks == 0 && outcome.connections <= 4));
}

#[test]
fn a_slow_volume_on_a_slow_network_only_takes_longer() {
    run_seeds(100, slow_day);
}

#[test]
fn a_network_that_cuts_every_message_changes_nothing() {
    run_seeds(60, cut_everywhere);
}

#[test]
fn long_requests_are_placed_and_pass_through_small_windows() {
    run_seeds(20, long_requests);
}

#[test]
fn what_a_broken_connection_leaves_is_replayed_exactly_once() {
    let outcomes = run_seeds(150, breaks);
    more_broke_than(300, &outcomes);
}

#[test]
fn medium_errors_reach_the_one_request_and_no_other() {
    run_seeds(60, medium_errors);
}

#[test]
fn a_target_that_is_stopped_and_started_again_is_not_noticed() {
    let outcomes = run_seeds(100, |seed| stops(seed, false));
    more_troubles_than(100, &outcomes);
}

#[test]
fn a_target_that_loses_its_power_keeps_what_was_flushed_or_forced() {
    let outcomes = run_seeds(150, |seed| stops(seed, true));
    more_troubles_than(100, &outcomes);
}

#[test]
fn a_target_that_stays_away_too_long_fails_requests_and_later_ones_find_it_again() {
    run_seeds(60, long_absences);
}

#[test]
fn everything_at_once() {
    run_seeds(100, |seed| Scenario { allows_stale_writes: true, ..storms::everything_at_once(seed) });
}

#[test]
fn by_tls_everything_completes_and_nothing_is_lost() {
    for (kernel, keys) in [(SystemTls::None, 0), (SystemTls::Once, 4)] {
        let outcomes = run_seeds_by_tls(5, kernel, fair_day);
        // Two at each end of each connection, if the kernel takes them.
        assert!(outcomes.iter().all(|outcome| outcome.tls_keys == keys * outcome.connections));
        run_seeds_by_tls(2, kernel, slow_day);
        run_seeds_by_tls(1, kernel, cut_everywhere);
        run_seeds_by_tls(2, kernel, long_requests);
        let outcomes = run_seeds_by_tls(8, kernel, breaks);
        more_broke_than(4, &outcomes);
        // Between two crashes there is time for a handshake of NBD, one of TLS, and some I/O.
        let outcomes = run_seeds_by_tls(6, kernel, |seed| {
            let mut scenario = stops(seed, true);
            scenario.trouble.iter_mut().for_each(|trouble| trouble.every = Duration::from_millis(200));
            scenario
        });
        more_troubles_than(0, &outcomes);
    }
}

#[test]
fn the_same_seed_does_the_same_again() {
    the_same_again(|short| run_seeds(5, |seed| Scenario { allows_stale_writes: true, ..short(seed) }));
}
