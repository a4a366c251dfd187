//! What is sent again, and when a side gives up.

use super::{NetworkConditions, PERFECT, RocePair};
use crate::queue_pair::{Fault, Provider, Violation};
use crate::roce::SETUP_TIMEOUT;
use blockmux_proto::driver::session::Timed;
use blockmux_proto::rdma::{Endpoint, Event, QueuePair, RemoteRights, WorkError, WorkId, WorkRequest};
use blockmux_volume::{Memory, SgList};
use std::time::Duration;

fn endpoint(receives: u32) -> Endpoint {
    Endpoint {
        receives,
        receive_len: 5000,
        sends: 64,
        reads: 4,
        regions: 4,
        private_data: Vec::new(),
        without_invalidation: None,
    }
}

/// A connection over a network with these conditions.
fn connected(receives: u32, conditions: NetworkConditions) -> RocePair {
    let endpoint = endpoint(receives);
    let mut pair = RocePair::new([&endpoint, &endpoint], 256, 32, conditions, 7);
    while !matches!(pair.ends[1].poll(), Some(Event::Requested { .. })) {
        assert!(pair.turn(), "no request arrives");
    }
    pair.ends[1].accept(Vec::new());
    while !matches!(pair.ends[0].poll(), Some(Event::Connected { .. })) {
        assert!(pair.turn(), "no reply arrives");
    }
    while !matches!(pair.ends[1].poll(), Some(Event::Connected { .. })) {
        assert!(pair.turn(), "no answer to the reply arrives");
    }
    pair
}

fn events(pair: &mut RocePair, side: usize) -> Vec<Event> {
    std::iter::from_fn(|| pair.ends[side].poll()).collect()
}

#[test]
fn a_peer_that_is_gone_is_noticed_after_seven_timeouts() {
    let mut pair = connected(4, PERFECT);
    while pair.turn() {}
    pair.network.is_broken = true;
    let begun = pair.now;
    pair.ends[0].send(b"into the void", &SgList::default(), None);
    while pair.turn() {}
    let events = events(&mut pair, 0);
    assert!(
        matches!(&events[..], [Event::Done { result: Err(WorkError::Flushed), .. }, Event::Disconnected]),
        "{events:?}"
    );
    assert_eq!(pair.ends[0].fault(), None);
    assert!(pair.now - begun > Duration::from_secs(4));
    assert!(pair.ends[0].is_drained(), "it tries to release the connection, and stops");
}

/// A connection with a keep-alive of the active side, which has done nothing so far.
fn idle() -> RocePair {
    let mut pair = connected(2, PERFECT);
    while pair.turn() {}
    pair.ends[0].config.keep_alive = Some(KEEP_ALIVE);
    pair
}

#[test]
fn the_keep_alive_notices_a_peer_that_is_gone() {
    let mut pair = idle();
    pair.network.is_broken = true;
    let begun = pair.now;
    while pair.turn() {}
    assert!(matches!(&events(&mut pair, 0)[..], [Event::Disconnected]));
    assert!(pair.now - begun > KEEP_ALIVE + Duration::from_secs(4));
    // The other side has none, and waits for nothing.
    assert!(events(&mut pair, 1).is_empty());
}

#[test]
fn the_keep_alive_of_an_idle_connection_disturbs_nobody() {
    let mut pair = idle();
    let (begun, sent, room) = (pair.now, pair.network.sent, pair.ends[0].room());
    while pair.now < begun + 100 * KEEP_ALIVE {
        assert!(pair.turn(), "the keep-alive has ended");
        assert_eq!(pair.ends[0].room(), room);
    }
    let sent = pair.network.sent - sent;
    assert!((198..=202).contains(&sent), "{sent} probes and answers");
    assert!(events(&mut pair, 0).is_empty() && events(&mut pair, 1).is_empty());
    // As much work as ever may be posted while a probe is in flight.
    pair.now += KEEP_ALIVE;
    pair.ends[0].on_timeout(pair.now).unwrap();
    pair.send(0);
    pair.ends[1].receive(room as u32);
    for _ in 0..room {
        pair.ends[0].send(b"meanwhile", &SgList::default(), None);
    }
    assert_eq!(pair.ends[0].room(), 0);
    for _ in 0..4 * room {
        pair.turn();
    }
    assert_eq!([0, 1].map(|side| events(&mut pair, side).len()), [room, room]);
    pair.ends[0].disconnect();
    while pair.turn() {}
    for side in 0..2 {
        assert!(matches!(&events(&mut pair, side)[..], [Event::Disconnected]));
        assert!(pair.ends[side].is_drained() && pair.ends[side].fault().is_none());
    }
}

const KEEP_ALIVE: Duration = Duration::from_secs(1);

#[test]
fn a_peer_that_never_answers_is_given_up() {
    let endpoint = endpoint(4);
    let mut pair = RocePair::new([&endpoint, &endpoint], 256, 32, PERFECT, 7);
    pair.network.is_broken = true;
    let begun = pair.now;
    while pair.turn() {}
    assert!(matches!(&events(&mut pair, 0)[..], [Event::Disconnected]));
    assert!(pair.now - begun <= SETUP_TIMEOUT && pair.ends[0].is_drained());
}

/// A sender that has forged the request of a host does not answer, and that host gets the replies.
#[test]
fn a_reply_that_nobody_answers_is_repeated_a_few_times() {
    let endpoint = endpoint(4);
    let mut pair = RocePair::new([&endpoint, &endpoint], 256, 32, PERFECT, 7);
    while !matches!(pair.ends[1].poll(), Some(Event::Requested { .. })) {
        assert!(pair.turn(), "no request arrives");
    }
    let (begun, mut now, mut sent) = (pair.now, pair.now, 0);
    let passive = &mut pair.ends[1];
    passive.accept(Vec::new());
    loop {
        let mut packet = Vec::new();
        while passive.poll_transmit(now, &mut packet) {
            sent += 1;
            packet.clear();
        }
        let Some(when) = passive.poll_timeout() else { break };
        now = when;
        // The end of the connection is an event, too.
        passive.on_timeout(now).ok();
    }
    assert_eq!(sent, 1 + 3 + 1, "the reply, its repetitions, and a release");
    assert!(matches!(&events(&mut pair, 1)[..], [Event::Disconnected]), "it was never established");
    assert!(now - begun <= SETUP_TIMEOUT && pair.ends[1].is_drained());
}

#[test]
fn a_session_that_does_not_decide_is_given_up_by_both_sides() {
    let endpoint = endpoint(4);
    let mut pair = RocePair::new([&endpoint, &endpoint], 256, 32, PERFECT, 7);
    while pair.turn() {}
    assert!(matches!(&events(&mut pair, 1)[..], [Event::Requested { .. }]));
    assert!(events(&mut pair, 0).is_empty());
    let begun = pair.now;
    while let Some(when) = pair.ends.iter().filter_map(Timed::poll_timeout).min() {
        pair.now = when;
        for end in &mut pair.ends {
            // The end of the connection is an event, too.
            end.on_timeout(when).ok();
        }
        while pair.turn() {}
    }
    assert!(pair.now - begun <= SETUP_TIMEOUT);
    assert!(matches!(&events(&mut pair, 1)[..], [Event::Disconnected]));
    assert!(matches!(&events(&mut pair, 0)[..], [Event::Refused { .. } | Event::Disconnected]));
}

#[test]
fn a_message_waits_for_a_receive_buffer_that_is_posted_soon() {
    let mut pair = connected(1, PERFECT);
    for text in ["first", "second"] {
        pair.ends[0].send(text.as_bytes(), &SgList::default(), None);
    }
    while pair.ends[0].not_ready() < 3 {
        assert!(pair.turn());
    }
    assert!(matches!(&events(&mut pair, 1)[..], [Event::Received { .. }]));
    pair.ends[1].receive(1);
    while pair.turn() {}
    match &events(&mut pair, 1)[..] {
        [Event::Received { message, .. }] => assert_eq!(message.to_vec(), b"second"),
        other => panic!("{other:?}"),
    }
    assert_eq!((pair.ends[0].fault(), pair.ends[1].fault()), (None, None));
}

#[test]
fn a_message_that_finds_no_receive_buffer_for_long_ends_the_connection() {
    let mut pair = connected(0, PERFECT);
    let begun = pair.now;
    pair.ends[0].send(b"nobody listens", &SgList::default(), None);
    while pair.turn() {}
    assert!(pair.now - begun > Duration::from_millis(800));
    assert_eq!(pair.ends[0].fault(), Some(Fault::Ours(Violation::NoReceive)));
    assert_eq!(pair.ends[1].fault(), Some(Fault::Peer(Violation::NoReceive)));
}

/// Long transfers of every kind in both directions over a bad network: all of it arrives, once and
/// in order.
#[test]
fn nothing_is_lost_or_delivered_twice_over_a_bad_network() {
    let conditions = NetworkConditions {
        lost_per_mille: 50,
        duplicated_per_mille: 30,
        damaged_per_mille: 20,
        jitter_us: 200,
    };
    let mut pair = connected(64, conditions);
    let bytes: Vec<u8> = (0..100_000_u32).map(|at| (at * 31 + at / 253) as u8).collect();
    let memory = || {
        let list = SgList::one(Memory::from_heap(bytes.len()).seg(0, bytes.len()));
        list.copy_from(&bytes);
        list
    };
    let blank = || SgList::one(Memory::from_heap(bytes.len()).seg(0, bytes.len()));
    let mut copies = Vec::new();
    for side in 0..2 {
        let (written, fetched) = (blank(), blank());
        let peer = &mut pair.ends[1 - side];
        let from = peer.register(WorkId(1), &mut memory(), RemoteRights::RemoteRead).unwrap();
        let to = peer.register(WorkId(1), &mut written.clone(), RemoteRights::RemoteWrite).unwrap();
        let end = &mut pair.ends[side];
        end.post(WorkRequest::Read { id: WorkId(100), local: fetched.clone(), remote: from });
        end.post(WorkRequest::Write { id: WorkId(101), local: memory(), remote: to });
        for number in 0..20_u8 {
            end.send(&[number; 700], &SgList::default(), None);
        }
        copies.extend([written, fetched]);
    }
    while pair.turn() {}
    for side in 0..2 {
        let events = events(&mut pair, side);
        let messages = events.iter().filter_map(|event| match event {
            Event::Received { message, .. } => Some(message.to_vec()),
            _ => None,
        });
        let expected: Vec<_> = (0..20).map(|number| vec![number; 700]).collect();
        assert_eq!(messages.collect::<Vec<_>>(), expected);
        let done = events.iter().filter(|event| matches!(event, Event::Done { result: Ok(()), .. }));
        assert_eq!((done.count(), events.len()), (22, 42), "{events:?}");
    }
    assert!(copies.iter().all(|copy| copy.to_vec() == bytes));
}
