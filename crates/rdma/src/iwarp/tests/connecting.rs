//! Connection set-up with peers of every valid kind, and with invalid ones.

use super::super::{Iwarp, IwarpConfig, SETUP_TIMEOUT};
use super::{
    READ, SEND, StreamPair, TestDriver, WRITE, ample, fpdu, read_request, setup_frame, tagged, ulpdus,
    untagged,
};
use crate::queue_pair::{Fault, Provider, Violation};
use blockmux_proto::driver::session::{StreamSession, Timed};
use blockmux_proto::rdma::{Endpoint, Event, MessageHead, WorkId, WorkRequest};
use blockmux_volume::{Pool, SgList};
use std::time::{Duration, Instant};

fn passive() -> TestDriver {
    TestDriver::new(
        Iwarp::passive(&ample(), IwarpConfig::default(), Pool::new(1 << 20), [1; 32], Instant::now()),
        usize::MAX,
    )
}

/// An active end that has sent its request.
fn active(config: IwarpConfig) -> TestDriver {
    let endpoint = Endpoint { private_data: b"ours".to_vec(), ..ample() };
    let iwarp = Iwarp::active(&endpoint, config, Pool::new(1 << 20), [1; 32], Instant::now());
    TestDriver::new(iwarp, usize::MAX)
}

fn run(driver: &mut TestDriver, bytes: &[u8]) -> Vec<Event> {
    driver.push(bytes);
    while driver.receive() {}
    driver.events()
}

fn send(driver: &mut TestDriver, message: &[u8]) {
    let (head, payload) = (MessageHead::from_slice(message), SgList::default());
    driver.post(WorkRequest::Send { id: WorkId(1), head, payload, invalidate: None, is_solicited: false });
}

/// Accepts the connection and takes the reply.
fn accept(driver: &mut TestDriver) -> Vec<u8> {
    driver.post(WorkRequest::Accept { private_data: b"yes".to_vec() });
    assert!(matches!(&driver.events()[..], [Event::Connected { .. }]));
    driver.sent(usize::MAX)
}

#[test]
fn a_request_is_encoded_by_rfc_6581() {
    let request = active(IwarpConfig::default()).sent(usize::MAX);
    assert_eq!(request, b"MPA ID Req Frame\x10\x02\x00\x08\x80\x08\xc0\x08ours");
    let config = IwarpConfig { has_crc: true, is_enhanced: false, ..IwarpConfig::default() };
    assert_eq!(active(config).sent(usize::MAX), b"MPA ID Req Frame\x40\x01\x00\x04ours");
}

#[test]
fn private_data_of_any_length_and_content_reaches_the_session() {
    for len in [0, 1, 4, 56, 508, 511, 512] {
        let data: Vec<u8> = (0..len).map(|at| (at * 7) as u8).collect();
        let mut driver = passive();
        let events = run(&mut driver, &setup_frame(b"q", 0, 1, &data));
        assert!(matches!(&events[..], [Event::Requested { private_data, .. }] if *private_data == data));
        let mut driver = active(IwarpConfig { is_enhanced: false, ..IwarpConfig::default() });
        let events = run(&mut driver, &setup_frame(b"p", 0, 1, &data));
        assert!(matches!(&events[..], [Event::Connected { private_data }] if *private_data == data));
        let mut driver = active(IwarpConfig::default());
        drop(driver.sent(usize::MAX));
        let events = run(&mut driver, &setup_frame(b"p", 0x20, 1, &data));
        assert!(matches!(&events[..], [Event::Refused { private_data }] if *private_data == data));
        assert!(driver.has_left());
    }
}

#[test]
fn a_session_may_post_as_many_reads_as_both_sides_support() {
    // The IRD of a request is the number of reads that the peer answers at a time (RFC 6581).
    let cases: [(u8, u8, &[u8], u32); 4] = [
        (0x10, 2, &[0, 4, 0, 8], 4),
        (0x10, 2, &[0, 0, 0, 8], 0),
        (0x10, 2, &[0x3f, 0, 0, 8], ample().reads),
        (0, 1, &[], ample().reads),
    ];
    for (flags, revision, data, expected) in cases {
        let events = run(&mut passive(), &setup_frame(b"q", flags, revision, data));
        assert!(
            matches!(&events[..], [Event::Requested { reads, .. }] if *reads == expected),
            "{data:?}: {events:?}"
        );
    }
}

#[test]
fn a_malformed_request_closes_the_stream_without_a_reply() {
    let long = [&b"MPA ID Req Frame\0\x01\x02\x01"[..], &[0; 513]].concat();
    let cases = [
        b"GET / HTTP/1.1\r\nHost: a\r\n".to_vec(),
        setup_frame(b"p", 0, 1, &[]),
        setup_frame(b"q", 0, 0, &[]),
        setup_frame(b"q", 0x10, 2, &[0; 3]),
        long,
    ];
    for bytes in cases {
        let mut driver = passive();
        let events = run(&mut driver, &bytes);
        assert!(matches!(&events[..], [Event::Disconnected]), "{events:?}");
        assert!(driver.error.is_some() && driver.sent(usize::MAX).is_empty() && driver.has_left());
    }
}

#[test]
fn a_request_for_markers_is_rejected() {
    for (request, reply) in [
        (setup_frame(b"q", 0xc0, 1, b"data"), setup_frame(b"p", 0x60, 1, b"")),
        (setup_frame(b"q", 0x90, 2, &[0, 4, 0, 4]), setup_frame(b"p", 0x30, 2, &[0, 4, 0, 4])),
    ] {
        let mut driver = passive();
        let events = run(&mut driver, &request);
        assert!(matches!(&events[..], [Event::Disconnected]), "{events:?}");
        assert_eq!(driver.error.unwrap().what, "asked for MPA markers, which are not supported");
        assert_eq!(driver.sent(usize::MAX), reply);
        assert!(driver.has_left());
    }
}

#[test]
fn a_peer_that_sends_before_the_reply_is_disconnected() {
    let mut driver = passive();
    let mut bytes = setup_frame(b"q", 0, 1, b"data");
    bytes.extend(fpdu(&untagged(SEND, 0, [0, 1, 0], b"early"), false));
    let events = run(&mut driver, &bytes);
    assert!(matches!(&events[..], [Event::Requested { .. }, Event::Disconnected]), "{events:?}");
    assert!(driver.error.is_some());
}

#[test]
fn a_wrong_reply_is_answered_by_terminate() {
    let cases: [(&[u8], u8); 6] = [
        (&setup_frame(b"p", 0, 2, &[]), 4),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", 4),
        (&setup_frame(b"q", 0x10, 2, &[0; 4]), 4),
        (&setup_frame(b"p", 0x90, 2, &[0x80, 8, 0x80, 8]), 4),
        (&setup_frame(b"p", 0x10, 2, &[0x80, 8, 0x80, 9]), 6),
        (&setup_frame(b"p", 0x10, 2, &[0, 8, 0, 8]), 7),
    ];
    for (reply, code) in cases {
        let mut driver = active(IwarpConfig::default());
        drop(driver.sent(usize::MAX));
        let events = run(&mut driver, reply);
        assert!(matches!(&events[..], [Event::Disconnected]), "{events:?}");
        let sent = ulpdus(&driver.sent(usize::MAX));
        assert_eq!(sent, [untagged([0x41, 0x47], 0, [2, 1, 0], &[0x20, code, 0, 0])]);
        assert_eq!(driver.iwarp.fault(), Some(Fault::Peer(Violation::Other)));
        assert!(driver.iwarp.has_answered(), "it has replied by RFC 6581, or not by MPA at all");
    }
}

#[test]
fn a_reply_of_revision_1_is_accepted_and_its_rejection_may_be_due_to_the_revision() {
    let mut driver = active(IwarpConfig::default());
    drop(driver.sent(usize::MAX));
    let events = run(&mut driver, &setup_frame(b"p", 0, 1, b"yes"));
    assert!(matches!(&events[..], [Event::Connected { private_data }] if private_data == b"yes"));
    send(&mut driver, b"hello");
    assert_eq!(ulpdus(&driver.sent(usize::MAX)), [untagged(SEND, 0, [0, 1, 0], b"hello")], "and no RTR");
    assert_eq!((driver.iwarp.caps().reads, driver.iwarp.has_answered()), (ample().reads, true));
    let cases = [(0x20, 1, true, false), (0x20, 1, false, true), (0x30, 2, true, true)];
    for (flags, rev, is_enhanced, has_answered) in cases {
        let mut driver = active(IwarpConfig { is_enhanced, ..IwarpConfig::default() });
        drop(driver.sent(usize::MAX));
        let events = run(&mut driver, &setup_frame(b"p", flags, rev, &[0, 8, 0, 8]));
        assert!(matches!(&events[..], [Event::Refused { .. }]), "{events:?}");
        assert_eq!(driver.iwarp.has_answered(), has_answered);
    }
}

#[test]
fn a_peer_that_closes_without_a_reply_may_not_know_rfc_6581() {
    for is_enhanced in [true, false] {
        let mut driver = active(IwarpConfig { is_enhanced, ..IwarpConfig::default() });
        let _ = driver.iwarp.on_end(Instant::now());
        assert_eq!((driver.iwarp.has_answered(), driver.iwarp.is_enhanced()), (false, is_enhanced));
    }
}

#[test]
fn the_passive_side_sends_nothing_before_it_has_received_something() {
    for request in [setup_frame(b"q", 0, 1, b""), setup_frame(b"q", 0x10, 2, &[0, 1, 0, 1])] {
        let mut driver = passive();
        run(&mut driver, &request);
        let reply = accept(&mut driver);
        assert!(reply.starts_with(b"MPA ID Rep Frame") && reply.ends_with(b"yes"));
        send(&mut driver, b"hello");
        assert!(driver.events().is_empty() && driver.sent(usize::MAX).is_empty());
        let events = run(&mut driver, &fpdu(&untagged(SEND, 0, [0, 1, 0], b"first"), false));
        assert!(matches!(&events[..], [Event::Received { .. }, Event::Done { .. }]), "{events:?}");
        assert_eq!(ulpdus(&driver.sent(usize::MAX)), [untagged(SEND, 0, [0, 1, 0], b"hello")]);
    }
}

#[test]
fn an_rtr_message_of_each_kind_lets_the_passive_side_send_and_is_not_delivered() {
    let write = (&[0x80, 0, 0x80, 0], tagged(WRITE, 1, 0, b""), None);
    let answer = tagged([0xc1, 0x42], 9, 0, b"");
    let request = untagged(READ, 0, [1, 1, 0], &read_request((9, 0), 0, (1, 0)));
    let read = (&[0x80, 0, 0x40, 1], request, Some(answer));
    let send_rtr = (&[0xc0, 0, 0, 0], untagged(SEND, 0, [0, 1, 0], b""), None);
    for (bits, rtr, answer) in [write, read, send_rtr] {
        let mut driver = passive();
        run(&mut driver, &setup_frame(b"q", 0x10, 2, bits));
        let reply = accept(&mut driver);
        assert_eq!([reply[20] & 0xc0, reply[22] & 0xc0], [bits[0] & 0xc0, bits[2] & 0xc0]);
        send(&mut driver, b"hello");
        assert!(driver.sent(usize::MAX).is_empty());
        let events = run(&mut driver, &fpdu(&rtr, false));
        assert!(matches!(&events[..], [Event::Done { .. }]), "{events:?}");
        let mut sent = ulpdus(&driver.sent(usize::MAX));
        assert_eq!(sent.remove(0), untagged(SEND, 0, [0, 1, 0], b"hello"));
        assert_eq!(sent, answer.into_iter().collect::<Vec<_>>());
        let msn = if bits[0] == 0xc0 { 2 } else { 1 };
        let events = run(&mut driver, &fpdu(&untagged(SEND, 0, [0, msn, 0], b"first"), false));
        assert!(matches!(&events[..], [Event::Received { .. }]), "{events:?}");
    }
}

#[test]
fn the_active_side_sends_the_chosen_rtr_message_first() {
    for (bits, first) in [([0x80, 8, 0x80, 8], WRITE), ([0x80, 8, 0x40, 8], READ)] {
        let mut driver = active(IwarpConfig::default());
        drop(driver.sent(usize::MAX));
        let events = run(&mut driver, &setup_frame(b"p", 0x10, 2, &bits));
        assert!(matches!(&events[..], [Event::Connected { .. }]));
        assert_eq!(driver.iwarp.room(), 64, "a zero-length RTR read is not posted work");
        send(&mut driver, b"hello");
        let sent = ulpdus(&driver.sent(usize::MAX));
        assert_eq!((&sent[0][..2], &sent[1][..2]), (&first[..], &SEND[..]));
        if first == READ {
            let sink = u32::from_be_bytes(sent[0][18..22].try_into().unwrap());
            let events = run(&mut driver, &fpdu(&tagged([0xc1, 0x42], sink, 0, b""), false));
            assert!(matches!(&events[..], [Event::Done { id: WorkId(1), .. }]), "{events:?}");
        }
    }
}

#[test]
fn a_peer_has_20_seconds_to_connect() {
    let begins = |driver: &mut TestDriver| {
        let deadline = driver.iwarp.poll_timeout().unwrap();
        driver.iwarp.on_timeout(deadline - Duration::from_nanos(1)).unwrap();
        assert!(driver.events().is_empty());
        deadline
    };
    let mut idle = passive();
    let mut unanswered = active(IwarpConfig::default());
    let mut without_rtr = passive();
    run(&mut without_rtr, &setup_frame(b"q", 0x10, 2, &[0x80, 0, 0x80, 0]));
    accept(&mut without_rtr);
    for driver in [&mut idle, &mut unanswered, &mut without_rtr] {
        let deadline = begins(driver);
        assert!(deadline <= Instant::now() + SETUP_TIMEOUT);
        driver.iwarp.on_timeout(deadline).unwrap_err();
        assert!(matches!(&driver.events()[..], [Event::Disconnected]));
        assert!(driver.iwarp.poll_timeout().is_none());
    }
    let mut link = StreamPair::new([&ample(), &ample()], [&IwarpConfig::default(); 2], usize::MAX);
    link.connect();
    assert!(link.ends[1].iwarp.poll_timeout().is_none());
}

#[test]
fn a_silent_peer_that_has_accepted_is_nudged_a_few_times() {
    let connect = || {
        let mut driver = active(IwarpConfig::default());
        drop(driver.sent(usize::MAX));
        run(&mut driver, &setup_frame(b"p", 0x10, 2, &[0x80, 8, 0x80, 8]));
        send(&mut driver, b"hello");
        assert_eq!(ulpdus(&driver.sent(usize::MAX)).len(), 2);
        driver
    };
    let mut idle = connect();
    let mut nudges = 0;
    while let Some(deadline) = idle.iwarp.poll_timeout() {
        idle.iwarp.on_timeout(deadline).unwrap();
        assert_eq!(ulpdus(&idle.sent(usize::MAX)), [tagged(WRITE, 1, 0, b"")]);
        nudges += 1;
    }
    assert!(nudges == 5 && idle.iwarp.room() > 0, "the connection is still there");
    let mut talks = connect();
    run(&mut talks, &fpdu(&untagged(SEND, 0, [0, 1, 0], b"hello"), false));
    assert!(talks.iwarp.poll_timeout().is_none());
}

#[test]
fn a_peer_that_disconnects_while_connecting_is_reported() {
    for bytes in [&b""[..], b"MPA ID", &setup_frame(b"q", 0, 1, b"data")] {
        let mut driver = passive();
        driver.peer_has_closed = true;
        let events = run(&mut driver, bytes);
        assert!(matches!(events.last(), Some(Event::Disconnected)), "{events:?}");
        driver.post(WorkRequest::Accept { private_data: Vec::new() });
        assert!(driver.events().is_empty() && driver.sent(usize::MAX).is_empty());
    }
}
