//! Successful and failing logins.

use super::*;
use crate::driver::audit_event::AuditEvent;
use crate::driver::session::Timed;
use crate::driver::target::{SessionStage, TargetLifecycle};
use crate::iscsi::login::chap::ChapChallenge;
use crate::iscsi::node::Redirect;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::time::Instant;

fn names() -> String {
    format!("InitiatorName={INITIATOR}\0TargetName={TARGET}\0")
}

#[test]
fn one_request_is_enough_and_keys_are_answered_with_the_group_tag() {
    let mut initiator = ScriptedInitiator::connect();
    let text = format!("{}SessionType=Normal\0InitialR2T=No\0MaxBurstLength=16776192\0", names());
    let response = initiator.login(0x87, text.as_bytes());
    let pdu: IscsiLoginResponse = response.as_a();
    assert_eq!((pdu.flags, pdu.status.get(), pdu.tsih.get()), (0x87, 0, 1));
    assert_eq!((pdu.stat_sn.get(), pdu.exp_cmd_sn.get()), (100, 1));
    assert_eq!(
        response.data,
        b"TargetPortalGroupTag=1\0InitialR2T=No\0MaxBurstLength=1048576\0MaxRecvDataSegmentLength=262144\0"
    );
}

#[test]
fn a_login_goes_through_security_without_authentication() {
    let mut initiator = ScriptedInitiator::connect();
    let first = initiator.login(0x81, format!("{}AuthMethod=CHAP,None\0", names()).as_bytes());
    assert_eq!((first.bhs.flags, first.value("AuthMethod")), (0x81, "None".into()));
    let last = initiator.login(0x87, b"DataDigest=CRC32C,None\0");
    assert_eq!((last.bhs.flags, last.value("DataDigest")), (0x87, "CRC32C".into()));
    assert!(last.as_a::<IscsiLoginResponse>().tsih.get() != 0);
}

#[test]
fn text_may_span_several_requests() {
    let mut initiator = ScriptedInitiator::connect();
    let whole = names();
    let (one, two) = whole.as_bytes().split_at(20);
    let first = initiator.login(0x44, one);
    assert_eq!((first.bhs.flags, first.data.len()), (0x04, 0));
    let last = initiator.login(0x87, two);
    assert_eq!(last.bhs.flags, 0x87);
}

#[test]
fn without_the_transit_bit_the_stage_does_not_change() {
    let mut initiator = ScriptedInitiator::connect();
    let response = initiator.login(0x04, names().as_bytes());
    assert_eq!(response.bhs.flags, 0x04);
    assert_eq!(initiator.login(0x87, b"").bhs.flags, 0x87);
}

/// Performs a CHAP login with `algorithm`; returns the text of the last response.
fn chap_login(
    algorithm: ChapAlgorithm,
    secret: &str,
    mutual: Option<(u8, &[u8])>,
) -> Result<TargetPdu, Box<ScriptedInitiator>> {
    let mut initiator = ScriptedInitiator::connect_to(node(Some(mutual_chap())), Pool::new(usize::MAX));
    let last = authenticate(&mut initiator, &names(), (algorithm, secret), mutual);
    last.ok_or(Box::new(initiator))
}

/// Completes the security stage of a login with these names by CHAP; returns the last response.
fn authenticate(
    initiator: &mut ScriptedInitiator,
    names: &str,
    (algorithm, secret): (ChapAlgorithm, &str),
    mutual: Option<(u8, &[u8])>,
) -> Option<TargetPdu> {
    let first = initiator.login(0x00, format!("{names}AuthMethod=CHAP\0").as_bytes());
    assert_eq!((first.bhs.flags, first.value("AuthMethod")), (0, "CHAP".into()));
    let second = initiator.login(0x00, format!("CHAP_A=4,{}\0", algorithm.number()).as_bytes());
    assert_eq!(second.value("CHAP_A"), algorithm.number().to_string());
    let challenge = ChapChallenge {
        identifier: second.value("CHAP_I").parse().unwrap(),
        bytes: text::parse_binary(&second.value("CHAP_C"), 1024).unwrap(),
    };
    let response =
        algorithm.response(challenge.identifier, credentials("user", secret).secret(), &challenge.bytes);
    let mut out = text::TextBuilder::default();
    out.push("CHAP_N", "user");
    out.push_binary("CHAP_R", &response);
    if let Some((identifier, bytes)) = mutual {
        let bytes = if bytes.is_empty() { &challenge.bytes[..] } else { bytes };
        out.push_number("CHAP_I", identifier.into());
        out.push_binary("CHAP_C", bytes);
    }
    let bytes = initiator.frame(login_request(0x81).as_bytes(), out.as_bytes());
    initiator.pump.client_sends(&bytes).ok()?;
    initiator.receive().pop()
}

#[test]
fn a_discovery_session_can_be_replaced_unless_its_initiator_is_authenticated() {
    let discovery = format!("InitiatorName={INITIATOR}\0SessionType=Discovery\0");
    for (chap, stage) in [(None, SessionStage::Discovery), (Some(mutual_chap()), SessionStage::Established)] {
        let (node, exports) = node(None);
        node.set_discovery_chap(chap.clone());
        let mut initiator = ScriptedInitiator::connect_to((node, exports), Pool::new(usize::MAX));
        let names = match chap {
            Some(_) => {
                let right = (ChapAlgorithm::Sha256, "initiator-secret");
                assert_eq!(authenticate(&mut initiator, &discovery, right, None).unwrap().bhs.flags, 0x81);
                ""
            }
            None => &discovery,
        };
        assert_eq!(initiator.pump.session.stage(), SessionStage::Handshake);
        assert_eq!(initiator.login(0x87, names.as_bytes()).bhs.flags, 0x87);
        assert_eq!(initiator.pump.session.stage(), stage);
        let Some(AuditEvent::Login(login)) = initiator.pump.session.poll_event() else { panic!("no login") };
        assert_eq!(login.is_authenticated, stage == SessionStage::Established);
    }
    let mut initiator = ScriptedInitiator::connect();
    assert_eq!(initiator.login(0x87, names().as_bytes()).bhs.flags, 0x87);
    assert_eq!(initiator.pump.session.stage(), SessionStage::Established);
}

#[test]
fn chap_admits_the_right_secret_with_every_algorithm() {
    for algorithm in ChapAlgorithm::ALL {
        let one_way = chap_login(algorithm, "initiator-secret", None).ok().unwrap();
        assert_eq!((one_way.bhs.flags, one_way.data.len()), (0x81, 0));
        let mutual = chap_login(algorithm, "initiator-secret", Some((9, b"who are you?"))).ok().unwrap();
        assert_eq!((mutual.bhs.flags, mutual.value("CHAP_N")), (0x81, "target".into()));
        let expected = algorithm.response(9, credentials("t", "target-secret").secret(), b"who are you?");
        assert_eq!(text::parse_binary(&mutual.value("CHAP_R"), 1024), Some(expected));
    }
}

#[test]
fn a_wrong_secret_is_refused_after_a_delay() {
    let Err(mut initiator) = chap_login(ChapAlgorithm::Sha256, "guess", None) else { panic!("let in") };
    assert!(matches!(initiator.pump.session.demand(), Demand::Nothing));
    let deadline = initiator.pump.session.poll_timeout().unwrap();
    assert_eq!(initiator.pump.session.on_timeout(deadline - Duration::from_millis(1)), Ok(()));
    let error = initiator.pump.session.on_timeout(deadline).unwrap_err();
    assert!(!error.to_string().contains("guess") && error.what.contains("CHAP"), "{error}");
    let [refusal] = initiator.receive().try_into().unwrap();
    let status = refusal.as_a::<IscsiLoginResponse>().status.get();
    assert_eq!(LoginStatus(status), LoginStatus::AUTHENTICATION_FAILURE);
}

#[test]
fn a_reflected_challenge_is_refused() {
    let Err(mut initiator) = chap_login(ChapAlgorithm::Md5, "initiator-secret", Some((1, b""))) else {
        panic!("answered")
    };
    let [refusal] = initiator.receive().try_into().unwrap();
    let status = refusal.as_a::<IscsiLoginResponse>().status.get();
    assert_eq!(LoginStatus(status), LoginStatus::AUTHENTICATION_FAILURE);
}

#[test]
fn the_security_stage_cannot_be_skipped() {
    let skips: [(u8, &str); 4] = [
        (0x87, ""),
        (0x81, ""),
        (0x81, "AuthMethod=None\0"),
        (0x81, "AuthMethod=CHAP\0CHAP_N=user\0CHAP_R=0x00\0"),
    ];
    for (flags, keys) in skips {
        let mut initiator = ScriptedInitiator::connect_to(node(Some(mutual_chap())), Pool::new(usize::MAX));
        let text = format!("{}{keys}", names());
        let (status, _) = initiator.login_error(&login_request(flags), text.as_bytes());
        assert_eq!(status, LoginStatus::AUTHENTICATION_FAILURE, "{keys}");
    }
}

#[test]
fn an_invalid_login_is_refused_with_a_reason() {
    let text = |initiator: &str, target: &str| format!("InitiatorName={initiator}\0TargetName={target}\0");
    let cases = [
        (String::from("TargetName=x\0"), LoginStatus::MISSING_PARAMETER),
        (format!("InitiatorName={INITIATOR}\0"), LoginStatus::MISSING_PARAMETER),
        (text("", TARGET), LoginStatus::INITIATOR_ERROR),
        (text(&"x".repeat(224), TARGET), LoginStatus::INITIATOR_ERROR),
        (text(INITIATOR, "iqn.2026-11.com.example:none"), LoginStatus::NOT_FOUND),
        (text(INITIATOR, HIDDEN), LoginStatus::AUTHORIZATION_FAILURE),
        (names() + "SessionType=Odd\0", LoginStatus::SESSION_TYPE_NOT_SUPPORTED),
        (names() + &text("iqn.2026-11.com.example:other", TARGET), LoginStatus::INITIATOR_ERROR),
        (names() + "SessionType=Discovery\0SessionType=Normal\0", LoginStatus::INITIATOR_ERROR),
        (names() + "ImmediateData=Yes\0ImmediateData=No\0", LoginStatus::INITIATOR_ERROR),
        (names() + "MaxRecvDataSegmentLength=1\0", LoginStatus::INITIATOR_ERROR),
        (names() + "no equals\0", LoginStatus::INITIATOR_ERROR),
        (names() + "unended=1", LoginStatus::INITIATOR_ERROR),
        (names() + &"Xa=1\0".repeat(1200), LoginStatus::INITIATOR_ERROR),
    ];
    for (text, expected) in cases {
        let (status, error) = ScriptedInitiator::connect().login_error(&login_request(0x87), text.as_bytes());
        assert_eq!(status, expected, "{text:?} {error}");
    }
}

#[test]
fn an_invalid_login_header_is_refused_with_a_reason() {
    let change = |change: fn(&mut IscsiLoginRequest)| {
        let mut request = login_request(0x87);
        change(&mut request);
        ScriptedInitiator::connect().login_error(&request, names().as_bytes()).0
    };
    assert_eq!(change(|r| r.version_min = 1), LoginStatus::UNSUPPORTED_VERSION);
    assert_eq!(change(|r| r.tsih = 5.into()), LoginStatus::SESSION_DOES_NOT_EXIST);
    assert_eq!(change(|r| r.flags = 0x8f), LoginStatus::INITIATOR_ERROR);
    assert_eq!(change(|r| r.flags = 0x84), LoginStatus::INITIATOR_ERROR);
    assert_eq!(change(|r| r.flags = 0xc7), LoginStatus::INITIATOR_ERROR);
    let mut initiator = ScriptedInitiator::connect();
    initiator.login(0x04, names().as_bytes());
    let other = b"InitiatorName=iqn.2026-11.com.example:other\0";
    let again = initiator.login_error(&login_request(0x04), other);
    assert_eq!(again.0, LoginStatus::INITIATOR_ERROR, "the same key with another value");
    let mut initiator = ScriptedInitiator::connect();
    initiator.login(0x04, names().as_bytes());
    let mut other = login_request(0x87);
    other.cid = 8.into();
    assert_eq!(initiator.login_error(&other, b"").0, LoginStatus::INITIATOR_ERROR);
}

#[test]
fn names_may_be_repeated_in_the_next_stage() {
    let mut initiator = ScriptedInitiator::connect();
    initiator.login(0x81, (names() + "AuthMethod=CHAP,None\0").as_bytes());
    initiator.login(0x87, (names() + "HeaderDigest=None\0").as_bytes());
}

#[test]
fn a_redirection_contains_the_new_address() {
    for (permanent, expected) in
        [(false, LoginStatus::TARGET_MOVED_TEMPORARILY), (true, LoginStatus::TARGET_MOVED_PERMANENTLY)]
    {
        let (old, exports) = node(None);
        let mut target = (*old.targets.all()[0]).clone();
        target.redirect = Some(Redirect { address: "[2001:db8::2]:3260".into(), permanent });
        let mut initiator = ScriptedInitiator::connect_to(
            (Arc::new(IscsiNode::new(vec![target])), exports),
            Pool::new(usize::MAX),
        );
        let bytes = initiator.frame(login_request(0x87).as_bytes(), names().as_bytes());
        assert!(initiator.pump.client_sends(&bytes).is_err());
        let [refusal] = initiator.receive().try_into().unwrap();
        assert_eq!(LoginStatus(refusal.as_a::<IscsiLoginResponse>().status.get()), expected);
        assert_eq!(refusal.value("TargetAddress"), "[2001:db8::2]:3260");
    }
}

#[test]
fn a_login_has_bounds_in_requests_text_and_time() {
    let mut many = ScriptedInitiator::connect();
    many.login(0x04, names().as_bytes());
    for _ in 1..64 {
        many.login(0x04, b"");
    }
    assert_eq!(many.login_error(&login_request(0x04), b"").0, LoginStatus::INITIATOR_ERROR);

    let mut long = ScriptedInitiator::connect();
    for _ in 0..8 {
        long.login(0x44, &[b'a'; 8192]);
    }
    assert_eq!(long.login_error(&login_request(0x44), b"a").0, LoginStatus::INITIATOR_ERROR);

    let mut longer = ScriptedInitiator::connect();
    assert!(longer.send(&login_request(0x44), &[b'a'; 8196]).is_err());

    let mut slow = ScriptedInitiator::connect();
    let deadline = slow.pump.session.poll_timeout().unwrap();
    assert!(slow.pump.session.on_timeout(deadline).is_err());
}

#[test]
fn a_command_before_the_login_ends_the_connection() {
    let mut initiator = ScriptedInitiator::connect();
    let command = initiator.request(0, &[0; 6], None, None);
    assert!(initiator.send(&command, b"").is_err());
}

#[test]
fn reinstatement_completes_after_the_end_of_the_old_session() {
    let (node, exports) = node(None);
    let connect = || {
        let mut initiator =
            ScriptedInitiator::connect_to((node.clone(), exports.clone()), Pool::new(usize::MAX));
        initiator.pump.holds_io = true;
        initiator
    };
    let cuts = Arc::new(AtomicUsize::new(0));
    let mut first = connect();
    let (permit, counted) = (node.begin_login().unwrap(), cuts.clone());
    let hang_up = Arc::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    first.pump.session =
        IscsiTargetSession::new(node.clone(), 1, Pool::new(usize::MAX), [3; 32], Instant::now())
            .admitted(permit, None, hang_up);
    first.enter("");
    first.command(0, &[0; 6], None, None);
    assert_eq!(first.command(0, &write10(0, 1), None, Some(&[7; 512])).len(), 0, "its write is in flight");
    let mut other = connect();
    let mut other_isid = login_request(0x87);
    other_isid.isid = [0x80, 9, 9, 9, 9, 9];
    assert_eq!(other.exchange(&other_isid, names().as_bytes()).len(), 1, "another port is another session");
    assert_eq!(cuts.load(Ordering::Relaxed), 0);

    let mut again = connect();
    assert_eq!(again.exchange(&login_request(0x87), names().as_bytes()).len(), 0);
    assert_eq!(cuts.load(Ordering::Relaxed), 1);
    first.pump.session.on_end(Instant::now()).unwrap();
    assert!(first.is_closed());
    let until = again.pump.session.poll_timeout().unwrap();
    again.pump.session.on_timeout(until).unwrap();
    assert_eq!(again.receive().len(), 0, "the old session's write is in flight");
    drop(first);
    let until = again.pump.session.poll_timeout().unwrap();
    again.pump.session.on_timeout(until).unwrap();
    let [response] = again.receive().try_into().unwrap();
    assert_eq!(response.as_a::<IscsiLoginResponse>().status.get(), 0);
    assert_eq!(sense(&again.command(0, &[0; 6], None, None)[0]), (6, 0x2900));
}

#[test]
fn a_new_session_waits_for_the_end_of_an_abandoned_one() {
    let (node, exports) = node(None);
    let connect = || ScriptedInitiator::connect_to((node.clone(), exports.clone()), Pool::new(usize::MAX));
    let mut first = connect();
    first.pump.holds_io = true;
    first.enter("DefaultTime2Retain=0\0");
    first.command(0, &[0; 6], None, None);
    assert_eq!(first.command(0, &write10(0, 1), None, Some(&[7; 512])).len(), 0, "its write is in flight");
    // The initiator has left, but the session remains.
    first.pump.session.on_end(Instant::now()).unwrap();
    for waits_in_vain in [true, false] {
        let mut other = connect();
        let mut other_isid = login_request(0x87);
        other_isid.isid = [0x80, 9, 9, 9, 9, u8::from(waits_in_vain)];
        assert_eq!(other.exchange(&other_isid, names().as_bytes()).len(), 0);
        let mut polls = 0;
        let responses = loop {
            let until = other.pump.session.poll_timeout().unwrap();
            other.pump.session.on_timeout(until).unwrap();
            let responses = other.receive();
            if !responses.is_empty() {
                break responses;
            }
            polls += 1;
            if polls == 3 && !waits_in_vain {
                first = connect();
            }
        };
        assert_eq!(responses[0].as_a::<IscsiLoginResponse>().status.get(), 0);
        assert_eq!(polls > 100, waits_in_vain, "{polls}");
        // The old session ends before the next request.
        drop(other);
    }
    drop(first);
}

#[test]
fn reinstatement_fails_after_30_seconds() {
    let (node, exports) = node(None);
    let connect = || ScriptedInitiator::connect_to((node.clone(), exports.clone()), Pool::new(usize::MAX));
    let (mut first, mut again) = (connect(), connect());
    first.enter("");
    assert_eq!(again.exchange(&login_request(0x87), names().as_bytes()).len(), 0);
    let session = &mut again.pump.session;
    let error = session.on_timeout(Instant::now() + Duration::from_secs(31)).unwrap_err();
    assert_eq!(error.what, "logged in again, and its old session did not end within 30 seconds");
    let [response] = again.receive().try_into().unwrap();
    assert_eq!(
        LoginStatus(response.as_a::<IscsiLoginResponse>().status.get()),
        LoginStatus::OUT_OF_RESOURCES
    );
}

/// In LIO, such data and a close raced with the end of the login (CVE-2022-50350).
#[test]
fn data_right_behind_the_login_request_is_handled_once_and_a_close_at_any_byte_ends_the_session() {
    let (node, exports) = node(None);
    let connect = || ScriptedInitiator::connect_to((node.clone(), exports.clone()), Pool::new(usize::MAX));
    let mut sample = connect();
    let login = sample.frame(login_request(0x87).as_bytes(), names().as_bytes());
    let ready = sample.request(0, &[0; 6], None, None);
    let write = sample.request(0, &write10(0, 1), None, Some(512));
    let commands = [sample.frame(ready.as_bytes(), b""), sample.frame(write.as_bytes(), &[7; 512])].concat();
    let bytes = [&login[..], &commands].concat();
    for cut in 0..=bytes.len() {
        let mut initiator = connect();
        initiator.pump.holds_io = true;
        initiator.pump.client_sends(&bytes[..cut]).unwrap();
        let is_whole = cut == bytes.len();
        let answers = usize::from(cut >= login.len()) + usize::from(cut >= login.len() + BHS_LEN);
        assert_eq!(initiator.receive().len(), answers, "cut at {cut}");
        let _ = initiator.pump.session.on_end(Instant::now());
        assert_eq!(initiator.pump.submitted.len(), usize::from(is_whole), "cut at {cut}");
        if is_whole {
            initiator.pump.finish_one();
        }
        assert!(initiator.is_closed() && initiator.receive().is_empty(), "cut at {cut}");
        drop(initiator);
        connect().enter("");
    }
}

/// LIO wrote its answers beyond the end of their buffer (CVE-2026-63887), and read a text without
/// NUL beyond its end (CVE-2026-90011).
#[test]
fn unknown_keys_are_answered_as_far_as_the_answer_fits_and_more_are_refused() {
    let keys = |count: u32| (0..count).map(|nth| format!("X{nth:03x}=1\0")).collect::<String>();
    for (count, fits) in [(1, true), (380, true), (2048, false), (4000, false)] {
        let mut initiator = ScriptedInitiator::connect();
        let text = names() + &keys(count);
        let (first, rest) = text.as_bytes().split_at(names().len());
        initiator.login(0x44, first);
        let mut parts = rest.chunks(8000).peekable();
        while let Some(part) = parts.next() {
            if parts.peek().is_some() {
                initiator.login(0x44, part);
            } else if fits {
                let response = initiator.login(0x87, part);
                let is_unknown = |pair: &&(String, String)| pair.1 == "NotUnderstood";
                assert_eq!(response.text().iter().filter(is_unknown).count(), count as usize);
                assert!(response.data.len() <= 8192);
            } else {
                let (status, _) = initiator.login_error(&login_request(0x87), part);
                assert_eq!(status, LoginStatus::INITIATOR_ERROR, "{count} keys");
            }
        }
    }
    let mut unended = names().into_bytes();
    unended.extend([b'a'; 100]);
    let (status, _) = ScriptedInitiator::connect().login_error(&login_request(0x87), &unended);
    assert_eq!(status, LoginStatus::INITIATOR_ERROR);
}

/// LIO decoded the response before it checked its length (CVE-2026-63886).
#[test]
fn a_chap_response_of_a_wrong_length_or_form_is_a_wrong_response() {
    let hex = |len: usize| format!("0x{}", "5a".repeat(len));
    let base64 = |len: usize| format!("0b{}", "A".repeat(len));
    let whole = [0, 1, 15, 17, 31, 33, 1024, 1025, 3000].map(hex);
    let other = [base64(0), base64(1), base64(24), base64(5000), "0x5".into(), "5a".into(), String::new()];
    for response in whole.into_iter().chain(other) {
        let mut initiator = ScriptedInitiator::connect_to(node(Some(mutual_chap())), Pool::new(usize::MAX));
        initiator.login(0x00, format!("{}AuthMethod=CHAP\0", names()).as_bytes());
        initiator.login(0x00, b"CHAP_A=5\0");
        let text = format!("CHAP_N=user\0CHAP_R={response}\0");
        let bytes = initiator.frame(login_request(0x81).as_bytes(), text.as_bytes());
        initiator.pump.client_sends(&bytes).unwrap();
        assert!(initiator.receive().is_empty(), "the refusal is delayed");
        let deadline = initiator.pump.session.poll_timeout().unwrap();
        let error = initiator.pump.session.on_timeout(deadline).unwrap_err();
        assert!(error.what.contains("CHAP"), "{error}");
        let [refusal] = initiator.receive().try_into().unwrap();
        let status = LoginStatus(refusal.as_a::<IscsiLoginResponse>().status.get());
        assert_eq!(status, LoginStatus::AUTHENTICATION_FAILURE, "{} characters", response.len());
    }
}
