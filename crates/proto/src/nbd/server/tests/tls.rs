//! The upgrade to TLS, which the driver makes.

use super::*;
use crate::driver::audit_event::{AuditEvent, Login};
use crate::driver::session::SecuredBy;
use crate::nbd::server::{NbdTls, TlsMode};

/// A client of a server with TLS that has set its flags.
fn haggle_with(tls: NbdTls) -> Session {
    let (pool, exports) = (Pool::new(usize::MAX), exports());
    let session = NbdTargetSession::new(exports.clone(), pool, Instant::now()).with_tls(tls);
    let mut session = Pump::new(session, &exports);
    assert_eq!(session.sent(), GREETING);
    session.exchange(&FLAGS);
    session
}

fn in_mode(mode: TlsMode) -> Session {
    haggle_with(NbdTls { mode, subjects: None })
}

fn starttls() -> Vec<u8> {
    option(Opt::NBD_OPT_STARTTLS, b"")
}

fn ack(opt: Opt) -> Vec<u8> {
    rep(opt, Rep::NBD_REP_ACK, b"")
}

/// Upgrades the connection.
fn secure(session: &mut Session, by: SecuredBy<'_>) {
    session.client_sends(&starttls()).unwrap();
    assert!(is_deaf(session), "the reply is sent in the clear first");
    assert_eq!(session.sent(), ack(Opt::NBD_OPT_STARTTLS));
    assert!(matches!(session.session.demand(), Demand::StartTls));
    session.session.on_secured(by, Instant::now()).unwrap();
    assert!(matches!(session.session.demand(), Demand::Bytes(16)));
}

/// The reply's type.
fn kind(reply: &[u8]) -> Rep {
    Rep(u32::from_be_bytes(reply[12..16].try_into().unwrap()))
}

#[test]
fn where_tls_is_required_a_client_can_only_start_it_or_abort() {
    for (opt, data) in [
        (Opt::NBD_OPT_LIST, vec![]),
        (Opt::NBD_OPT_INFO, info_data("", &[])),
        (Opt::NBD_OPT_GO, info_data("", &[])),
        (Opt::NBD_OPT_STRUCTURED_REPLY, vec![]),
        (Opt::NBD_OPT_EXTENDED_HEADERS, vec![]),
        (Opt::NBD_OPT_SET_META_CONTEXT, context_data("", &["base:allocation"])),
        (Opt(77), vec![1; 100_000]),
    ] {
        let mut session = in_mode(TlsMode::Required);
        assert_eq!(kind(&session.exchange(&option(opt, &data))), Rep::NBD_REP_ERR_TLS_REQD, "{opt}");
        assert_eq!(session.exchange(&option(Opt::NBD_OPT_ABORT, b"")), ack(Opt::NBD_OPT_ABORT));
    }
    let error =
        in_mode(TlsMode::Required).client_sends(&option(Opt::NBD_OPT_EXPORT_NAME, b"disk0")).unwrap_err();
    assert!(error.what.contains("without TLS"), "{error}");
}

#[test]
fn over_tls_a_session_works_as_without_and_its_login_event_names_the_client() {
    for (by, name) in [
        (SecuredBy::Psk(b"alice"), "alice"),
        (SecuredBy::Certificate("CN=backup"), "CN=backup"),
        (SecuredBy::Nothing, ""),
    ] {
        for mode in [TlsMode::Required, TlsMode::Optional] {
            let mut session = in_mode(mode);
            secure(&mut session, by);
            let again = session.exchange(&starttls());
            assert_eq!(kind(&again), Rep::NBD_REP_ERR_INVALID);
            let list = session.exchange(&option(Opt::NBD_OPT_LIST, b""));
            assert!(list.ends_with(&ack(Opt::NBD_OPT_LIST)) && kind(&list) == Rep::NBD_REP_SERVER);
            let go = session.exchange(&option(Opt::NBD_OPT_GO, &info_data("disk0", &[])));
            assert!(go.ends_with(&ack(Opt::NBD_OPT_GO)));
            let (initiator, target, is_authenticated) =
                (name.to_owned(), "disk0".to_owned(), !name.is_empty());
            let login = Login { protocol: "nbd", initiator, target, is_authenticated };
            assert_eq!(session.session.poll_event(), Some(AuditEvent::Login(login)));
            assert_eq!(session.exchange(&request(Cmd::NBD_CMD_FLUSH, 0, 0, 0)), simple(0));
        }
    }
}

#[test]
fn where_tls_is_optional_clients_need_not_use_it() {
    let mut session = in_mode(TlsMode::Optional);
    let go = session.exchange(&option(Opt::NBD_OPT_GO, &info_data("", &[])));
    assert!(go.ends_with(&ack(Opt::NBD_OPT_GO)));
}

#[test]
fn results_negotiated_before_tls_are_discarded() {
    let mut session = in_mode(TlsMode::Optional);
    let context = option(Opt::NBD_OPT_SET_META_CONTEXT, &context_data("", &["base:allocation"]));
    assert!(!session.exchange(&option(Opt::NBD_OPT_STRUCTURED_REPLY, b"")).is_empty());
    assert!(session.exchange(&context).ends_with(&ack(Opt::NBD_OPT_SET_META_CONTEXT)));
    secure(&mut session, SecuredBy::Nothing);
    assert_eq!(kind(&session.exchange(&context)), Rep::NBD_REP_ERR_INVALID, "no structured replies");
    session.exchange(&option(Opt::NBD_OPT_GO, &info_data("", &[])));
    // A structured reply would begin with another magic number.
    assert_eq!(session.exchange(&request(Cmd::NBD_CMD_FLUSH, 0, 0, 0)), simple(0));
}

#[test]
fn plaintext_after_starttls_ends_the_session() {
    for injected in [option(Opt::NBD_OPT_STRUCTURED_REPLY, b""), vec![0x16], vec![0]] {
        let mut session = in_mode(TlsMode::Required);
        let error = session.client_sends(&[starttls(), injected].concat()).unwrap_err();
        assert!(error.what.contains("in the clear"), "{error}");
    }
}

#[test]
fn a_client_with_a_disallowed_certificate_gets_the_reason_and_no_export() {
    let subjects = Some(Arc::new(["CN=backup".to_owned()].into()));
    let tls = NbdTls { mode: TlsMode::Required, subjects };
    let mut session = haggle_with(tls.clone());
    secure(&mut session, SecuredBy::Certificate("CN=backup"));
    assert!(session.exchange(&option(Opt::NBD_OPT_GO, &info_data("", &[]))).ends_with(&ack(Opt::NBD_OPT_GO)));
    for by in [SecuredBy::Certificate("CN=backup,O=x"), SecuredBy::Psk(b"CN=backup"), SecuredBy::Nothing] {
        let mut session = haggle_with(tls.clone());
        secure(&mut session, by);
        for (opt, data) in [(Opt::NBD_OPT_LIST, vec![]), (Opt::NBD_OPT_GO, info_data("", &[]))] {
            assert_eq!(kind(&session.exchange(&option(opt, &data))), Rep::NBD_REP_ERR_POLICY);
        }
        let Some(AuditEvent::Refused { login, reason }) = session.session.poll_event() else {
            panic!("it is logged")
        };
        assert!(reason.contains("subject") && login.initiator.len() < 30, "{login:?}");
        assert!(session.client_sends(&option(Opt::NBD_OPT_EXPORT_NAME, b"disk0")).is_err());
    }
}

#[test]
fn a_stop_while_tls_is_awaited_closes_the_connection() {
    let mut session = in_mode(TlsMode::Required);
    session.client_sends(&starttls()).unwrap();
    session.session.on_stop(Instant::now());
    assert!(is_closed(&session));
    let mut session = in_mode(TlsMode::Required);
    session.session.on_stop(Instant::now());
    assert!(is_closed(&session));
}

#[test]
fn a_client_that_disconnects_instead_of_a_tls_handshake_is_reported() {
    let mut session = in_mode(TlsMode::Required);
    session.exchange(&starttls());
    assert!(session.session.on_end(Instant::now()).is_err());
}
