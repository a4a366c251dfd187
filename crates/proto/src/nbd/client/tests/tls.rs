//! Tests of a client that requires TLS. Its driver makes the TLS connection.

use super::script::*;
use crate::driver::session::{Demand, Initiator, SecuredBy, StreamSession};
use crate::nbd::client::{
    NbdFeatures, NbdHandshakeRefusal, NbdInitiatorConfig, NbdInitiatorSession, NbdSessionMode,
};
use crate::testing::Driver;
use blockmux_volume::Pool;
use blockmux_wire::nbd::handshake::{Opt, Rep};
use std::time::Instant;

const STARTTLS: Opt = Opt::NBD_OPT_STARTTLS;

fn client(mode: NbdSessionMode, split: usize) -> NbdTestClient {
    let config = NbdInitiatorConfig { export: "x".into(), mode, features: NbdFeatures::default() };
    Driver::of(NbdInitiatorSession::new(config, Pool::new(1 << 20), Instant::now()).with_tls(), split)
}

fn starts_tls(client: &NbdTestClient) -> bool {
    matches!(client.session.demand(), Demand::StartTls)
}

#[test]
fn no_option_is_sent_before_tls() {
    at_every_split(|split| {
        for (mode, first) in [
            (NbdSessionMode::Go, Opt::NBD_OPT_EXTENDED_HEADERS),
            (NbdSessionMode::Info, Opt::NBD_OPT_EXTENDED_HEADERS),
            (NbdSessionMode::List, Opt::NBD_OPT_LIST),
        ] {
            let mut client = client(mode, split);
            client.feed(&greeting(3)).unwrap();
            assert_eq!(client.sent(), [&[0, 0, 0, 3][..], &option(STARTTLS, b"")].concat());
            client.feed(&reply(STARTTLS, Rep::NBD_REP_ACK, b"")).unwrap();
            assert!(starts_tls(&client) && client.sent().is_empty());
            client.session.on_secured(SecuredBy::Certificate("CN=server"), Instant::now()).unwrap();
            assert_eq!(client.sent(), option(first, b""));
            assert!(matches!(client.session.demand(), Demand::Bytes(20)));
        }
    });
}

#[test]
fn an_export_is_opened_over_tls() {
    let mut client = client(NbdSessionMode::Go, 7);
    client.feed(&greeting(3)).unwrap();
    client.feed(&reply(STARTTLS, Rep::NBD_REP_ACK, b"")).unwrap();
    client.session.on_secured(SecuredBy::Psk(b"alice"), Instant::now()).unwrap();
    for opt in [Opt::NBD_OPT_EXTENDED_HEADERS, Opt::NBD_OPT_SET_META_CONTEXT] {
        client.feed(&reply(opt, Rep::NBD_REP_ACK, b"")).unwrap();
    }
    client.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_INFO, &info_export(1 << 20, 1))).unwrap();
    client.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_ACK, b"")).unwrap();
    assert!(client.session.is_ready());
}

#[test]
fn a_server_without_tls_gets_no_further_option() {
    for rep in [Rep::NBD_REP_ERR_UNSUP, Rep::NBD_REP_ERR_POLICY] {
        let mut client = client(NbdSessionMode::Go, usize::MAX);
        client.feed(&greeting(3)).unwrap();
        client.sent();
        client.feed(&reply(STARTTLS, rep, b"no")).unwrap();
        assert_eq!(client.session.refusal(), Some(&NbdHandshakeRefusal::NoTls { message: "no".into() }));
        assert!(client.is_closing());
        assert_eq!(client.sent(), option(Opt::NBD_OPT_ABORT, b""));
    }
    // Without fixed newstyle, the client may send no option but `NBD_OPT_EXPORT_NAME`.
    let mut client = client(NbdSessionMode::Go, usize::MAX);
    client.feed(&greeting(0)).unwrap();
    assert!(matches!(client.session.refusal(), Some(NbdHandshakeRefusal::NoTls { .. })));
    assert_eq!(client.sent(), [0, 0, 0, 0]);
}

/// The fault of CVE-2021-3716, in a client.
#[test]
fn plaintext_after_the_reply_to_starttls_ends_the_session() {
    let mut client = client(NbdSessionMode::Go, usize::MAX);
    client.feed(&greeting(3)).unwrap();
    let injected = reply(Opt::NBD_OPT_EXTENDED_HEADERS, Rep::NBD_REP_ACK, b"");
    let error = client.feed(&[reply(STARTTLS, Rep::NBD_REP_ACK, b""), injected].concat()).unwrap_err();
    assert!(error.what.contains("in the clear"), "{error}");
}

#[test]
fn a_client_that_is_stopped_before_tls_only_aborts_after_it() {
    let mut client = client(NbdSessionMode::Go, usize::MAX);
    client.feed(&greeting(3)).unwrap();
    client.feed(&reply(STARTTLS, Rep::NBD_REP_ACK, b"")).unwrap();
    client.sent();
    client.session.on_stop();
    client.session.on_secured(SecuredBy::Nothing, Instant::now()).unwrap();
    assert_eq!(client.sent(), option(Opt::NBD_OPT_ABORT, b""));
    assert!(client.is_closing());
}

#[test]
fn a_server_that_disconnects_instead_of_a_tls_handshake_is_reported() {
    let mut client = client(NbdSessionMode::Go, usize::MAX);
    client.feed(&greeting(3)).unwrap();
    client.feed(&reply(STARTTLS, Rep::NBD_REP_ACK, b"")).unwrap();
    assert!(client.session.on_end(Instant::now()).is_err());
}
