//! Sessions that another process continues.

use super::*;
use crate::driver::audit_event::AuditEvent;
use crate::nbd::server::NbdResumeError;
use crate::volume_state::TestCluster;

/// A session that continues one with this state, over the same or other exports.
fn resumed(state: &[u8], exports: &Exports) -> Result<Session, NbdResumeError> {
    let pool = Pool::new(usize::MAX);
    let session = NbdTargetSession::resumed(exports, pool, Instant::now(), state)?;
    Ok(Pump::new(session, exports))
}

#[test]
fn a_session_is_handed_over_once_all_accepted_requests_are_answered() {
    for (mut session, answer) in [
        (transmit(&[]), simple(0)),
        // Structured replies are only for reads, extended headers for every command.
        (structured(), simple(0)),
        (extended(), ext_chunk(ReplyType::NBD_REPLY_TYPE_NONE, 0, b"")),
    ] {
        let is_extended = answer.starts_with(b"\x6e");
        let cache = |offset: u32| match is_extended {
            true => ext_request(Cmd::NBD_CMD_CACHE, 0, offset.into(), 512),
            false => request(Cmd::NBD_CMD_CACHE, 0, offset.into(), 512),
        };
        session.holds_io = true;
        assert_eq!(session.exchange(&cache(0)), b"");
        assert_eq!(session.session.hand_over(), None, "one is in flight");
        session.client_sends(&cache(512)).unwrap();
        assert_eq!(session.untaken(), cache(512).len(), "the next one waits for the other process");
        session.finish_one();
        assert_eq!(session.session.hand_over(), None, "its reply is not sent");
        assert_eq!(&session.sent()[..4], &answer[..4]);
        let state = session.session.hand_over().unwrap();
        let mut next = resumed(&state, &exports()).unwrap();
        let login = next.session.poll_event();
        assert!(matches!(login, Some(AuditEvent::Login(login)) if login.target == "disk0"));
        assert_eq!(next.sent(), b"", "a session that goes on has no greeting");
        assert_eq!(&next.exchange(&cache(512))[..4], &answer[..4]);
    }
}

#[test]
fn a_payload_that_is_on_its_way_is_received_first() {
    let mut session = transmit(&[]);
    let write = write(0, &[1; 512]);
    session.client_sends(&write[..100]).unwrap();
    assert_eq!(session.session.hand_over(), None);
    assert_eq!(session.exchange(&write[100..]), simple(0));
    assert!(session.session.hand_over().is_some());
}

#[test]
fn a_session_is_handed_over_only_after_its_handshake() {
    let mut session = haggle();
    assert_eq!(session.session.hand_over(), None);
    session.exchange(&option(Opt::NBD_OPT_GO, &info_data("frozen", &[])));
    let state = session.session.hand_over().unwrap();
    assert!(resumed(&state, &exports()).is_ok());
}

#[test]
fn a_session_is_resumed_only_with_the_same_export_properties() {
    let state = transmit(&[]).session.hand_over().unwrap();
    let with = |name: &str, size, read_only| {
        let volume = Arc::new(MemVolume::new(size));
        let export = Export { name: name.into(), description: String::new(), read_only, volume };
        resumed(&state, &Exports::new(vec![export])).map(|_| ())
    };
    assert_eq!(with("disk0", SIZE, false), Ok(()));
    assert_eq!(with("disk1", SIZE, false), Err(NbdResumeError::NoExport));
    assert_eq!(with("disk0", SIZE * 2, false), Err(NbdResumeError::Changed));
    assert_eq!(with("disk0", SIZE, true), Err(NbdResumeError::Changed));
    for len in 0..state.len() - 5 {
        assert_eq!(resumed(&state[..len], &exports()).err(), Some(NbdResumeError::Unknown), "{len} bytes");
    }
    for (at, byte) in [(0, 3), (1, 3), (29, 0xff)] {
        let mut state = state.clone();
        state[at] = byte;
        assert_eq!(resumed(&state, &exports()).err(), Some(NbdResumeError::Unknown), "byte {at}");
    }
}

#[test]
fn what_another_process_has_served_meanwhile_is_refused_and_its_sessions_are_not_resumed() {
    let cluster = TestCluster::default();
    let process = || {
        let state = cluster.process();
        let (name, description, volume) = ("disk0".into(), String::new(), state.volume().clone());
        let export = Export { name, description, read_only: false, volume };
        (Exports::with_states(vec![(export, state.clone())]), state)
    };
    let (exports, first) = process();
    let connect = || {
        let session = NbdTargetSession::new(exports.clone(), Pool::new(usize::MAX), Instant::now());
        let mut session = Pump::new(session, &exports);
        session.exchange(&FLAGS);
        session
    };
    let go = |session: &mut Session| session.exchange(&option(Opt::NBD_OPT_GO, &info_data("", &[])));
    let mut early = connect();
    let why = b"another server serves the export now";
    assert_eq!(go(&mut early), rep(Opt::NBD_OPT_GO, Rep::NBD_REP_ERR_SHUTDOWN, why));
    assert!(connect().client_sends(&option(Opt::NBD_OPT_EXPORT_NAME, b"disk0")).is_err());
    cluster.promote(&first);
    assert!(go(&mut early).ends_with(&rep(Opt::NBD_OPT_GO, Rep::NBD_REP_ACK, b"")));
    assert_eq!(early.exchange(&request(Cmd::NBD_CMD_CACHE, 0, 0, 512)), simple(0));
    let state = early.session.hand_over().unwrap();
    // The next process serves it, or does not know who has served it since.
    let (next_exports, next) = process();
    cluster.promote(&next);
    assert!(resumed(&state, &next_exports).is_ok());
    let (next_exports, next) = process();
    next.fence_handed_over();
    assert_eq!(resumed(&state, &next_exports).err(), Some(NbdResumeError::Fenced));
    cluster.promote(&next);
    assert_eq!(resumed(&state, &next_exports).err(), Some(NbdResumeError::Fenced));
    // It was fenced before.
    assert!(first.lose());
    cluster.promote(&first);
    let state = early.session.hand_over().unwrap();
    let (next_exports, next) = process();
    cluster.promote(&next);
    assert_eq!(resumed(&state, &next_exports).err(), Some(NbdResumeError::Fenced));
}
