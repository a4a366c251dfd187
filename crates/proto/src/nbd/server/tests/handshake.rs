//! The handshake, option by option.

use super::*;
use crate::driver::audit_event::AuditEvent;
use crate::exports::{ExportAccess, ExportSelection};
use std::time::Instant;

#[test]
fn go_returns_size_flags_block_sizes_and_requested_information() {
    let all = [Info::NBD_INFO_NAME, Info::NBD_INFO_DESCRIPTION, Info::NBD_INFO_BLOCK_SIZE, Info(99)];
    for opt in [Opt::NBD_OPT_INFO, Opt::NBD_OPT_GO] {
        let mut session = haggle();
        let info = |data: &[u8]| rep(opt, Rep::NBD_REP_INFO, data);
        assert_eq!(
            session.exchange(&option(opt, &info_data("", &all))),
            join(&[
                &info(b"\0\0\0\0\0\0\x04\0\0\0\x0d\x6d"),
                &info(b"\0\x01disk0"),
                &info(b"\0\x02a RAM disk"),
                &info(b"\0\x03\0\0\x02\0\0\0\x10\0\x02\0\0\0"),
                &rep(opt, Rep::NBD_REP_ACK, b""),
            ])
        );
        // Only GO enters transmission.
        let expected = if opt == Opt::NBD_OPT_GO { 28 } else { 16 };
        assert!(matches!(session.session.demand(), Demand::Bytes(n) if n == expected));
    }
}

#[test]
fn an_unknown_export_can_be_tried_again_under_another_name() {
    let mut session = haggle();
    let unknown = session.exchange(&option(Opt::NBD_OPT_GO, &info_data("disk1", &[])));
    assert_eq!(unknown, rep(Opt::NBD_OPT_GO, Rep::NBD_REP_ERR_UNKNOWN, b"no such export"));
    let answer = session.exchange(&option(Opt::NBD_OPT_GO, &info_data("frozen", &[])));
    assert_eq!(answer[20..32], *b"\0\0\0\0\0\0\x04\0\0\0\x05\x0f");
}

#[test]
fn an_export_name_enters_transmission_with_or_without_zeroes() {
    for (flags, zeroes) in [(3, 0), (2, 0), (1, 124), (0, 124)] {
        let mut session = connect();
        session.exchange(&[0, 0, 0, flags]);
        let answer = session.exchange(&option(Opt::NBD_OPT_EXPORT_NAME, b"disk0"));
        assert_eq!(answer, join(&[b"\0\0\0\0\x04\0\0\0\x0d\x6d", &vec![0; zeroes]]), "flags {flags}");
        let flush = session.exchange(&request(Cmd::NBD_CMD_FLUSH, 0, 0, 0));
        assert_eq!(flush, simple(0));
    }
}

#[test]
fn an_unavailable_export_name_ends_the_session() {
    for name in [&b"disk1"[..], b"\xff", b"a\0", &[b'a'; 5000]] {
        let error = haggle().client_sends(&option(Opt::NBD_OPT_EXPORT_NAME, name)).unwrap_err();
        assert!(error.what.contains("export"), "{error}");
    }
    let mut session = haggle();
    session.exchange(&option(Opt::NBD_OPT_EXTENDED_HEADERS, b""));
    assert!(session.client_sends(&option(Opt::NBD_OPT_EXPORT_NAME, b"disk0")).is_err());
}

#[test]
fn bytes_that_are_not_a_handshake_end_the_session() {
    assert!(connect().client_sends(b"\0\0\0\x04").is_err(), "unknown client flag");
    assert!(connect().client_sends(b"GET ").is_err(), "not an NBD client");
    assert!(haggle().client_sends(b"IHAVEOPX\0\0\0\x03\0\0\0\0").is_err(), "wrong magic number");
}

#[test]
fn options_are_answered_without_the_fixed_newstyle_flag_too() {
    let mut session = connect();
    assert_eq!(session.exchange(b"\0\0\0\0"), b"");
    let (list, go) = (Opt::NBD_OPT_LIST, Opt::NBD_OPT_GO);
    assert!(session.exchange(&option(list, b"")).ends_with(&rep(list, Rep::NBD_REP_ACK, b"")));
    let answer = session.exchange(&option(go, &info_data("disk0", &[])));
    assert!(answer.ends_with(&rep(go, Rep::NBD_REP_ACK, b"")));
    assert_eq!(session.exchange(&request(Cmd::NBD_CMD_FLUSH, 0, 0, 0)), simple(0));
}

#[test]
fn abort_is_acknowledged_and_its_data_ignored() {
    for data in [&b""[..], b"goodbye"] {
        let mut session = haggle();
        let answer = session.exchange(&option(Opt::NBD_OPT_ABORT, data));
        assert_eq!(answer, rep(Opt::NBD_OPT_ABORT, Rep::NBD_REP_ACK, b""));
        assert!(is_closed(&session));
        assert!(session.session.on_end(Instant::now()).is_ok());
    }
}

#[test]
fn list_names_every_export() {
    let answer = haggle().exchange(&option(Opt::NBD_OPT_LIST, b""));
    let server = |data: &[u8]| rep(Opt::NBD_OPT_LIST, Rep::NBD_REP_SERVER, data);
    assert_eq!(
        answer,
        join(&[
            &server(b"\0\0\0\x05disk0a RAM disk"),
            &server(b"\0\0\0\x06frozen"),
            &rep(Opt::NBD_OPT_LIST, Rep::NBD_REP_ACK, b""),
        ])
    );
}

#[test]
fn an_export_whose_networks_do_not_have_the_client_is_refused_and_not_listed() {
    let exports = exports();
    let offered = exports.offering(|name: &str| match name {
        "disk0" => ExportAccess::Refused,
        _ => ExportAccess::Offered,
    });
    let connect = || {
        let session = NbdTargetSession::new(offered.clone(), Pool::new(usize::MAX), Instant::now());
        let mut session = Pump::new(session, &exports);
        assert_eq!(session.sent(), GREETING);
        session.exchange(&FLAGS);
        session
    };
    let mut session = connect();
    let listed = session.exchange(&option(Opt::NBD_OPT_LIST, b""));
    let server = rep(Opt::NBD_OPT_LIST, Rep::NBD_REP_SERVER, b"\0\0\0\x06frozen");
    assert_eq!(listed, join(&[&server, &rep(Opt::NBD_OPT_LIST, Rep::NBD_REP_ACK, b"")]));
    let why = b"the export's `allow` list does not have the client's address";
    for (opt, name) in [(Opt::NBD_OPT_GO, "disk0"), (Opt::NBD_OPT_INFO, "disk0"), (Opt::NBD_OPT_GO, "")] {
        let answer = session.exchange(&option(opt, &info_data(name, &[])));
        assert_eq!(answer, rep(opt, Rep::NBD_REP_ERR_POLICY, why), "{opt:?} {name}");
        let event = session.session.poll_event();
        assert!(
            matches!(event, Some(AuditEvent::Refused { ref reason, .. }) if reason.contains("`allow` list"))
        );
    }
    let error = connect().client_sends(&option(Opt::NBD_OPT_EXPORT_NAME, b"disk0")).unwrap_err();
    assert_eq!(error.what, "chose an export whose `allow` list does not have its address");
    let granted = session.exchange(&option(Opt::NBD_OPT_GO, &info_data("frozen", &[])));
    assert_eq!(granted[20..32], *b"\0\0\0\0\0\0\x04\0\0\0\x05\x0f");
}

#[test]
fn only_the_log_says_why_an_export_is_hidden() {
    let exports = exports();
    struct ForOthers;
    impl ExportSelection for ForOthers {
        fn access(&self, name: &str) -> ExportAccess {
            if name == "disk0" { ExportAccess::Hidden } else { ExportAccess::Offered }
        }
        fn why_hidden(&self, name: &str) -> Option<String> {
            Some(format!("{name} is for others"))
        }
    }
    let offered = exports.offering(ForOthers);
    let mut session =
        Pump::new(NbdTargetSession::new(offered, Pool::new(usize::MAX), Instant::now()), &exports);
    assert_eq!(session.sent(), GREETING);
    session.exchange(&FLAGS);
    for (name, logged) in
        [("disk0", "no such export here: disk0 is for others"), ("nothing", "no such export")]
    {
        let answer = session.exchange(&option(Opt::NBD_OPT_GO, &info_data(name, &[])));
        assert_eq!(answer, rep(Opt::NBD_OPT_GO, Rep::NBD_REP_ERR_UNKNOWN, b"no such export"));
        let event = session.session.poll_event();
        assert!(
            matches!(event, Some(AuditEvent::Refused { ref reason, .. }) if reason == logged),
            "{event:?}"
        );
    }
}

#[test]
fn a_failed_option_does_not_affect_the_next_one() {
    let invalid = Rep::NBD_REP_ERR_INVALID;
    let big = vec![b'x'; 70_000];
    let table = [
        (Opt::NBD_OPT_STARTTLS, &b""[..], Rep::NBD_REP_ERR_UNSUP),
        (Opt::NBD_OPT_STARTTLS, b"x", invalid),
        (Opt::NBD_OPT_PEEK_EXPORT, b"disk0", Rep::NBD_REP_ERR_UNSUP),
        (Opt(0x4242), &big, Rep::NBD_REP_ERR_UNSUP),
        (Opt::NBD_OPT_LIST, b"x", invalid),
        (Opt::NBD_OPT_STRUCTURED_REPLY, b"x", invalid),
        (Opt::NBD_OPT_EXTENDED_HEADERS, &big, invalid),
        (Opt::NBD_OPT_GO, b"\0\0\0\x09disk0", invalid),
        (Opt::NBD_OPT_INFO, &big, Rep::NBD_REP_ERR_TOO_BIG),
        (Opt::NBD_OPT_SET_META_CONTEXT, b"\0\0\0\0\0\0\0\0", invalid),
    ];
    for (opt, data, error) in table {
        for step in [1, 7, usize::MAX] {
            let mut session = haggle().split_at(step);
            let answer = session.exchange(&join(&[&option(opt, data), &option(Opt::NBD_OPT_ABORT, b"")]));
            let ack = rep(Opt::NBD_OPT_ABORT, Rep::NBD_REP_ACK, b"");
            let failed = answer.strip_suffix(&ack[..]).expect("the next option is answered");
            assert_eq!(failed[12..16], error.0.to_be_bytes(), "{opt}");
            assert_eq!(failed[20..].len(), failed[19] as usize, "{opt}");
        }
    }
}

#[test]
fn structured_replies_cannot_follow_extended_headers() {
    let mut session = haggle();
    session.exchange(&option(Opt::NBD_OPT_STRUCTURED_REPLY, b""));
    let opt = Opt::NBD_OPT_EXTENDED_HEADERS;
    assert_eq!(session.exchange(&option(opt, b"")), rep(opt, Rep::NBD_REP_ACK, b""));
    let opt = Opt::NBD_OPT_STRUCTURED_REPLY;
    let answer = session.exchange(&option(opt, b""));
    assert_eq!(answer[12..16], Rep::NBD_REP_ERR_EXT_HEADER_REQD.0.to_be_bytes());
}

#[test]
fn metadata_contexts_are_listed_by_name_and_by_wildcard() {
    let opt = Opt::NBD_OPT_LIST_META_CONTEXT;
    let mut session = haggle();
    session.exchange(&option(Opt::NBD_OPT_STRUCTURED_REPLY, b""));
    let ack = rep(opt, Rep::NBD_REP_ACK, b"");
    let listed = join(&[&rep(opt, Rep::NBD_REP_META_CONTEXT, b"\0\0\0\0base:allocation"), &ack]);
    let table: [(&[&str], &[u8]); 6] = [
        (&[], &listed),
        (&["base:"], &listed),
        (&["base:allocation", "base:", "base:allocation"], &listed),
        (&["base:other"], &ack),
        (&["qemu:", "x-mine:allocation"], &ack),
        (&["x-mine:", "base:allocation"], &listed),
    ];
    for (queries, expected) in table {
        assert_eq!(session.exchange(&option(opt, &context_data("", queries))), expected, "{queries:?}");
    }
    let unknown = session.exchange(&option(opt, &context_data("disk1", &[])));
    assert_eq!(unknown, rep(opt, Rep::NBD_REP_ERR_UNKNOWN, b"no such export"));
}

#[test]
fn a_selected_context_applies_to_its_export_until_the_next_selection() {
    let select = |name, queries: &[&str]| option(Opt::NBD_OPT_SET_META_CONTEXT, &context_data(name, queries));
    let chosen = select("disk0", &["base:allocation"]);
    let malformed = option(Opt::NBD_OPT_SET_META_CONTEXT, b"\0");
    let table = [
        (vec![chosen.clone()], "disk0", true),
        (vec![chosen.clone()], "", true),
        (vec![chosen.clone()], "frozen", false),
        (vec![chosen.clone(), select("disk0", &[])], "disk0", false),
        (vec![chosen.clone(), select("disk0", &["base:"])], "disk0", false),
        (vec![chosen.clone(), select("nowhere", &["base:allocation"])], "disk0", false),
        (vec![chosen.clone(), malformed], "disk0", false),
        (vec![select("frozen", &["base:allocation"]), chosen], "disk0", true),
        (vec![], "disk0", false),
    ];
    for (selections, name, selected) in table {
        let mut session = haggle();
        session.exchange(&option(Opt::NBD_OPT_STRUCTURED_REPLY, b""));
        selections.iter().for_each(|selection| drop(session.exchange(selection)));
        session.exchange(&option(Opt::NBD_OPT_GO, &info_data(name, &[])));
        let answer = session.exchange(&request(Cmd::NBD_CMD_BLOCK_STATUS, 0, 0, 512));
        let expected =
            if selected { ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS } else { ReplyType::NBD_REPLY_TYPE_ERROR };
        assert_eq!(answer[6..8], expected.0.to_be_bytes(), "{name} after {} selections", selections.len());
    }
}

#[test]
fn a_selection_answers_with_the_contexts_id() {
    let mut session = haggle();
    session.exchange(&option(Opt::NBD_OPT_EXTENDED_HEADERS, b""));
    let opt = Opt::NBD_OPT_SET_META_CONTEXT;
    let answer = session.exchange(&option(opt, &context_data("", &["base:allocation"])));
    let context = rep(opt, Rep::NBD_REP_META_CONTEXT, b"\0\0\0\x01base:allocation");
    assert_eq!(answer, join(&[&context, &rep(opt, Rep::NBD_REP_ACK, b"")]));
}

#[test]
fn a_thousand_options_are_enough_and_four_for_each_export() {
    let mut session = haggle();
    for _ in 0..1000 + 2 * 4 {
        session.exchange(&option(Opt::NBD_OPT_LIST, b""));
    }
    assert!(session.client_sends(&option(Opt::NBD_OPT_LIST, b"")).is_err());
}

#[test]
fn a_handshake_has_30_seconds() {
    let start = Instant::now();
    let mut session = connect_with(&Pool::new(0), start).session;
    let deadline = session.poll_timeout().expect("there is a deadline");
    assert_eq!(deadline, start + Duration::from_secs(30));
    assert!(session.on_timeout(deadline - Duration::from_nanos(1)).is_ok());
    assert!(session.on_timeout(deadline).is_err());
    assert_eq!(transmit(&[]).session.poll_timeout(), None);
}

#[test]
fn nothing_is_received_from_a_client_that_does_not_read_its_lists() {
    let mut session = haggle();
    let list = option(Opt::NBD_OPT_LIST, b"");
    session.client_sends(&list.repeat(900)).unwrap();
    assert!(is_deaf(&session));
    let (unread, left) = (session.session.outbox().len(), session.untaken());
    assert!(unread < (64 << 10) + 200 && left > 0, "{unread} bytes are unread, {left} bytes are left");
    session.sent();
    session.run().unwrap();
    assert!(session.untaken() < left);
}

#[test]
fn a_stop_during_the_handshake_answers_the_option_that_has_begun() {
    let mut session = haggle();
    session.session.on_stop(Instant::now());
    assert!(is_closed(&session));

    let go = option(Opt::NBD_OPT_GO, &info_data("", &[]));
    let mut session = haggle();
    session.exchange(&go[..17]);
    session.session.on_stop(Instant::now());
    let answer = session.exchange(&go[17..]);
    assert_eq!(answer, rep(Opt::NBD_OPT_GO, Rep::NBD_REP_ERR_SHUTDOWN, b"the server is stopping"));
    assert!(is_closed(&session));

    let name = option(Opt::NBD_OPT_EXPORT_NAME, b"disk0");
    let mut session = haggle();
    session.exchange(&name[..18]);
    session.session.on_stop(Instant::now());
    assert!(session.client_sends(&name[18..]).is_err());
}
