//! Many connections of one port, and those who would like more.

use super::super::port::{ANSWER_BURST, ANSWERS_PER_SECOND, RETIREMENT};
use super::super::port::{DroppedPacket, OpenedConnection, RocePort, RocePortLimits, RoceRequest, Routed};
use super::super::{Roce, RoceConfig, RoceNumbers};
use crate::queue_pair::Provider;
use blockmux_proto::rdma::{Endpoint, Event, QueuePair};
use blockmux_volume::{Chunk, Pool};
use blockmux_wire::roce::cm::{CmMessage, RejectReason};
use blockmux_wire::roce::icrc::{Fragmentation, RoceAddresses, RoceFlow};
use blockmux_wire::roce::packet::RocePacket;
use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

const LIMITS: RocePortLimits = RocePortLimits {
    connections: 12,
    requests: 8,
    requests_of_address: 3,
    requests_per_second: 1000,
    request_burst: 1000,
};
const TARGET: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 200);

fn host(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(192, 0, 2, number)
}

fn flow_from(source: Ipv4Addr) -> RoceFlow {
    RoceFlow { addresses: RoceAddresses::V4 { source, destination: TARGET }, source_port: 50_000 }
}

fn port() -> RocePort {
    RocePort::new(LIMITS, [3; 32])
}

fn asks(number: u8, comm_id: u32) -> RoceRequest {
    RoceRequest { peer: host(number).into(), service: Some(4420), comm_id, queue_pair: 17 }
}

fn endpoint() -> Endpoint {
    Endpoint {
        receives: 4,
        receive_len: 100,
        sends: 4,
        reads: 1,
        regions: 1,
        private_data: b"hello".to_vec(),
        without_invalidation: None,
    }
}

fn config(local: IpAddr, peer: IpAddr) -> RoceConfig {
    RoceConfig { local, peer, service: 4420, source_port: 1, mtu: 1024, window: 8, keep_alive: None }
}

/// The packets that an end has to send, with ICRCs of that flow.
fn sealed(roce: &mut Roce, flow: RoceFlow, now: Instant) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    loop {
        let mut packet = Vec::new();
        if !roce.poll_transmit(now, &mut packet) {
            return packets;
        }
        packet.extend(flow.icrc(Fragmentation::default(), &packet));
        packets.push(packet);
    }
}

/// A host that connects, with its request.
fn initiator(number: u8, now: Instant) -> (Roce, Vec<u8>) {
    initiator_with(number, 77, now)
}

fn initiator_with(number: u8, comm_id: u32, now: Instant) -> (Roce, Vec<u8>) {
    let numbers = RoceNumbers { queue_pair: 17, first_psn: 5, comm_id, guid: 1 };
    let config = config(host(number).into(), TARGET.into());
    let mut roce = Roce::active(&endpoint(), config, numbers, Pool::new(0), [1; 32], now);
    let request = sealed(&mut roce, flow_from(host(number)), now).remove(0);
    (roce, request)
}

/// Routes a packet of a host.
fn route(port: &mut RocePort, from: u8, packet: &[u8], now: Instant) -> Routed {
    let flow = flow_from(host(from));
    let icrc = flow.icrc(Fragmentation::default(), packet);
    port.route(&flow, &[packet, &icrc].concat(), now)
}

fn acknowledgement(queue_pair: u32, psn: u32) -> Vec<u8> {
    let [[_, number @ ..], [_, psn @ ..]] = [queue_pair, psn].map(u32::to_be_bytes);
    [&[0x11, 0, 0xff, 0xff, 0][..], &number, &[0], &psn, &[0x1f, 0, 0, 1]].concat()
}

/// A host shows that it receives the answer to its request.
fn establish(port: &mut RocePort, from: u8, opened: &OpenedConnection, now: Instant) {
    let RoceNumbers { queue_pair, first_psn, .. } = opened.numbers;
    let packet = acknowledgement(queue_pair, first_psn);
    assert_eq!(route(port, from, &packet, now), Routed::Connection(queue_pair));
}

#[test]
fn a_connection_is_requested_established_and_released_through_the_port() {
    let (mut port, now) = (port(), Instant::now());
    let (mut active, request) = initiator(1, now);
    let routed = port.route(&flow_from(host(1)), &request, now);
    assert_eq!(routed, Routed::Request(asks(1, 77)));
    let OpenedConnection { numbers, replaced } = port.admit(&asks(1, 77), now).unwrap();
    assert_eq!(replaced, None);
    let config = config(TARGET.into(), host(1).into());
    let mut passive = Roce::passive(&endpoint(), config, numbers, Pool::new(0), [2; 32], now);
    passive.on_packet(&Chunk::from_slice(&request), false, now).unwrap();
    assert!(matches!(passive.poll(), Some(Event::Requested { .. })));
    let again = port.route(&flow_from(host(1)), &request, now);
    assert_eq!(again, Routed::Connection(numbers.queue_pair), "a repeated request is the same connection");
    passive.accept(Vec::new());
    let answers = flow_from(TARGET);
    for packet in sealed(&mut passive, answers, now) {
        active.on_packet(&Chunk::from_slice(&packet), false, now).unwrap();
    }
    assert!(!passive.cm.is_established());
    active.send(b"first", &blockmux_volume::SgList::default(), None);
    for packet in sealed(&mut active, flow_from(host(1)), now) {
        assert_eq!(port.route(&flow_from(host(1)), &packet, now), Routed::Connection(numbers.queue_pair));
        let elsewhere = port.route(&flow_from(host(2)), &packet, now);
        assert_eq!(elsewhere, Routed::Dropped(DroppedPacket::Damaged), "the ICRC covers the addresses");
        passive.on_packet(&Chunk::from_slice(&packet), false, now).unwrap();
    }
    assert!(passive.cm.is_established());
    port.close(numbers.queue_pair, now);
    assert!(port.is_empty());
}

#[test]
fn packets_of_another_address_reach_no_connection() {
    let (mut port, now) = (port(), Instant::now());
    let opened = port.connect(host(1).into(), now).unwrap();
    let packet = acknowledgement(opened.numbers.queue_pair, 1);
    for (from, expected) in
        [(1, Routed::Connection(opened.numbers.queue_pair)), (2, Routed::Dropped(DroppedPacket::Unknown))]
    {
        assert_eq!(route(&mut port, from, &packet, now), expected);
    }
}

#[test]
fn a_flood_of_requests_displaces_itself_first() {
    let (mut port, now) = (port(), Instant::now());
    port.admit(&asks(1, 1), now).unwrap();
    // One address has no more than its share, and displaces its own oldest request.
    let admitted: Vec<_> = (0..100).map(|comm_id| port.admit(&asks(2, comm_id), now).unwrap()).collect();
    let greedy: Vec<u32> = admitted.iter().map(|opened| opened.numbers.queue_pair).collect();
    let displaced: Vec<u32> = admitted.iter().filter_map(|opened| opened.replaced).collect();
    assert_eq!(displaced, greedy[..100 - LIMITS.requests_of_address]);
    assert_eq!(port.len(), 1 + LIMITS.requests_of_address);
    let greedy = &greedy[displaced.len()..];
    // Forged addresses fill the rest, and then displace the oldest of the greedy one.
    let mut replaced = Vec::new();
    for number in 3..250 {
        replaced.extend(port.admit(&asks(number, 1), now).unwrap().replaced);
        assert!(port.len() <= LIMITS.requests);
    }
    assert_eq!(replaced[..2], greedy[..2]);
    // Established connections are not displaced.
    let (mut port, now) = (self::port(), now);
    let honest = port.admit(&asks(1, 1), now).unwrap();
    establish(&mut port, 1, &honest, now);
    for number in 2..250 {
        assert_ne!(port.admit(&asks(number, 1), now).unwrap().replaced, Some(honest.numbers.queue_pair));
    }
    assert_eq!(port.len(), LIMITS.requests + 1);
}

/// A port where the number of requests at a time is the only limit.
fn port_with_burst(request_burst: u32) -> RocePort {
    let limits = RocePortLimits {
        connections: usize::MAX,
        requests: usize::MAX,
        requests_of_address: usize::MAX,
        requests_per_second: 10,
        request_burst,
    };
    RocePort::new(limits, [3; 32])
}

#[test]
fn a_flood_of_requests_of_one_address_is_limited_and_leaves_half_of_the_rate_to_others() {
    let (mut port, mut now) = (port_with_burst(100), Instant::now());
    let established = port.admit(&asks(1, 1), now).unwrap();
    establish(&mut port, 1, &established, now);
    let mut comm_ids = 0..;
    let mut flood = |port: &mut RocePort, now| {
        comm_ids.by_ref().take(1000).filter(|comm_id| port.admit(&asks(2, *comm_id), now).is_some()).count()
    };
    assert_eq!(flood(&mut port, now), 50);
    for number in 3..53 {
        assert!(port.admit(&asks(number, 1), now).is_some(), "host {number} is kept out");
    }
    // Forged requests of many addresses may use the rest up. A connection is not affected by it.
    assert_eq!(port.admit(&asks(53, 1), now), None);
    let RoceNumbers { queue_pair, first_psn, .. } = established.numbers;
    assert_eq!(
        route(&mut port, 1, &acknowledgement(queue_pair, first_psn + 1), now),
        Routed::Connection(queue_pair)
    );
    now += Duration::from_secs(1);
    assert_eq!(flood(&mut port, now), 0);
    assert_eq!((53..100).filter(|number| port.admit(&asks(*number, 1), now).is_some()).count(), 10);
    now += Duration::from_secs(7);
    assert_eq!(flood(&mut port, now), 20);
}

#[test]
fn hosts_that_establish_what_they_request_are_not_limited() {
    let (mut port, now) = (port_with_burst(2), Instant::now());
    for comm_id in 0..1000 {
        let opened = port.admit(&asks(1, comm_id), now).unwrap();
        establish(&mut port, 1, &opened, now);
        if comm_id % 2 == 0 {
            port.close(opened.numbers.queue_pair, now);
        }
    }
    // Closing what was never established gives nothing back.
    for comm_id in [0, 1] {
        let opened = port.admit(&asks(2, comm_id), now).unwrap();
        port.close(opened.numbers.queue_pair, now);
    }
    assert_eq!(port.admit(&asks(2, 2), now), None);
}

#[test]
fn a_request_of_an_established_queue_pair_goes_to_its_connection() {
    let (mut port, now) = (port(), Instant::now());
    let opened = port.admit(&asks(1, 76), now).unwrap();
    let (_, again) = initiator_with(1, 77, now);
    let routed = |port: &mut RocePort, from: u8, packet: &[u8]| {
        route(port, from, packet.split_last_chunk::<4>().unwrap().0, now)
    };
    // A forged request keeps no host out.
    assert_eq!(routed(&mut port, 1, &again), Routed::Request(asks(1, 77)));
    establish(&mut port, 1, &opened, now);
    let connection = Routed::Connection(opened.numbers.queue_pair);
    assert_eq!(routed(&mut port, 1, &again), connection);
    let (_, of_other) = initiator_with(2, 77, now);
    assert_eq!(routed(&mut port, 2, &of_other), Routed::Request(asks(2, 77)));
    port.close(opened.numbers.queue_pair, now);
    assert_eq!(routed(&mut port, 1, &again), Routed::Request(asks(1, 77)));
    // Of two that were established, the later one counts, also when the other is closed.
    let [first, second] = [78, 79].map(|comm_id| port.admit(&asks(1, comm_id), now).unwrap());
    establish(&mut port, 1, &first, now);
    establish(&mut port, 1, &second, now);
    port.close(first.numbers.queue_pair, now);
    assert_eq!(routed(&mut port, 1, &again), Routed::Connection(second.numbers.queue_pair));
}

#[test]
fn who_has_guessed_the_number_of_a_queue_pair_establishes_nothing() {
    let (mut port, now) = (port(), Instant::now());
    let RoceNumbers { queue_pair, first_psn, .. } = port.admit(&asks(1, 1), now).unwrap().numbers;
    for guessed in (0..100).filter(|psn| *psn != first_psn) {
        let packet = acknowledgement(queue_pair, guessed);
        assert_eq!(route(&mut port, 1, &packet, now), Routed::Connection(queue_pair));
    }
    let mut replaced = (2..250).filter_map(|number| port.admit(&asks(number, 1), now).unwrap().replaced);
    assert!(replaced.any(|number| number == queue_pair), "it still waits");
}

#[test]
fn a_message_with_a_guessed_sequence_number_does_not_establish_a_connection() {
    let (mut port, now) = (port(), Instant::now());
    let (mut active, request) = initiator(1, now);
    let numbers = port.admit(&asks(1, 77), now).unwrap().numbers;
    let config = config(TARGET.into(), host(1).into());
    let mut passive = Roce::passive(&endpoint(), config, numbers, Pool::new(0), [2; 32], now);
    passive.on_packet(&Chunk::from_slice(&request), false, now).unwrap();
    passive.accept(Vec::new());
    for packet in sealed(&mut passive, flow_from(TARGET), now) {
        active.on_packet(&Chunk::from_slice(&packet), false, now).unwrap();
    }
    active.send(b"first", &blockmux_volume::SgList::default(), None);
    // The RTU has been lost.
    let first = sealed(&mut active, flow_from(host(1)), now).pop().unwrap();
    let mut guessed = first.clone();
    guessed[9] ^= 0x40;
    passive.on_packet(&Chunk::from_slice(&guessed), false, now).unwrap();
    assert!(!passive.cm.is_established());
    passive.on_packet(&Chunk::from_slice(&first), false, now).unwrap();
    assert!(passive.cm.is_established());
}

#[test]
fn any_message_but_a_request_establishes_a_connection() {
    for attribute in [0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16] {
        let (mut port, now) = (port(), Instant::now());
        let first = port.admit(&asks(1, 77), now).unwrap();
        let [number, comm_id] = [first.numbers.queue_pair, first.numbers.comm_id];
        let (_, request) = initiator(1, now);
        let mut message = request[..request.len() - 4].to_vec();
        message[37] = attribute;
        if attribute != 0x10 {
            message[48..52].copy_from_slice(&comm_id.to_be_bytes());
        }
        assert_eq!(route(&mut port, 1, &message, now), Routed::Connection(number));
        let replaced: Vec<_> =
            (2..250).filter_map(|number| port.admit(&asks(number, 1), now).unwrap().replaced).collect();
        assert_eq!(replaced.contains(&number), attribute == 0x10, "{attribute:x}");
    }
}

#[test]
fn a_port_has_no_more_connections_than_its_limit() {
    let (mut port, now) = (port(), Instant::now());
    for _ in 0..LIMITS.connections {
        let opened = port.admit(&asks(1, port.len() as u32), now).unwrap();
        establish(&mut port, 1, &opened, now);
    }
    assert_eq!(port.admit(&asks(1, 99), now), None);
    assert_eq!(port.connect(host(1).into(), now), None);
}

#[test]
fn numbers_are_unpredictable_and_rest_before_they_are_used_again() {
    let (mut port, mut now) = (port(), Instant::now());
    let mut seen = HashSet::new();
    let mut low = 0;
    for _ in 0..1000 {
        let RoceNumbers { queue_pair, first_psn, comm_id, .. } =
            port.connect(host(1).into(), now).unwrap().numbers;
        assert!(queue_pair > 1 && queue_pair < 0xff_ffff && first_psn <= 0xff_ffff && comm_id != 0);
        assert!(seen.insert(queue_pair), "{queue_pair:x} is used again at once");
        low += u32::from(first_psn < 0x80_0000);
        port.close(queue_pair, now);
        now += RETIREMENT / 10_000;
    }
    assert!((400..600).contains(&low), "{low} first sequence numbers of 1000 are low");
    let other = RocePort::new(LIMITS, [4; 32]).connect(host(1).into(), now).unwrap();
    assert!(!seen.contains(&other.numbers.queue_pair));
}

#[test]
fn messages_about_nothing_are_answered_or_dropped() {
    let (mut port, now) = (port(), Instant::now() + Duration::from_secs(1));
    let (_, request) = initiator(1, now);
    let rejected = port.refuse(&request, RejectReason::INVALID_SERVICE_ID, now).unwrap();
    let payload = &rejected[20..];
    let Some((_, CmMessage::Rej(rej))) = CmMessage::parse(payload) else { panic!("{payload:?}") };
    assert_eq!((rej.remote_comm_id.get(), rej.reason.get()), (77, RejectReason::INVALID_SERVICE_ID.0));
    // The peer hears of it.
    let (mut active, _) = initiator(1, now);
    let flow = flow_from(TARGET);
    let sealed = [&rejected[..], &flow.icrc(Fragmentation::default(), &rejected)].concat();
    active.on_packet(&Chunk::from_slice(&sealed), false, now).unwrap();
    assert!(matches!(active.poll(), Some(Event::Refused { private_data }) if private_data.is_empty()));
    assert_eq!(active.rejection(), Some(RejectReason::INVALID_SERVICE_ID));
    assert!(active.is_drained());
    // The reject itself is about no connection of this port.
    let sealed = [&rejected[..], &flow.icrc(Fragmentation::default(), &rejected)].concat();
    assert_eq!(port.route(&flow, &sealed, now), Routed::Dropped(DroppedPacket::Unknown));
    assert_eq!(port.refuse(&sealed, RejectReason::NO_QP, now), None);
    for len in 0..sealed.len() {
        assert!(matches!(port.route(&flow, &sealed[..len], now), Routed::Dropped(_)), "{len}");
    }
    // A release is confirmed.
    let mut release = sealed[..276].to_vec();
    release[37] = 0x15;
    let release = [&release[..], &flow.icrc(Fragmentation::default(), &release)].concat();
    let Routed::Answer(answer) = port.route(&flow, &release, now) else { panic!() };
    let answer = [&answer[..], &[0; 4]].concat();
    let payload = RocePacket::parse(&answer).unwrap().payload;
    assert!(
        matches!(CmMessage::parse(payload), Some((_, CmMessage::Drep(drep))) if drep.local_comm_id.get() == 77)
    );
}

#[test]
fn a_flood_of_what_asks_for_an_answer_is_limited() {
    let (mut port, mut now) = (port(), Instant::now());
    let (_, request) = initiator(1, now);
    let mut release = request[..request.len() - 4].to_vec();
    release[37] = 0x15;
    let opened = port.admit(&asks(1, 77), now).unwrap();
    let connection = Routed::Connection(opened.numbers.queue_pair);
    for expected in [ANSWER_BURST, ANSWERS_PER_SECOND.min(ANSWER_BURST)] {
        let refused = || {
            let mut port = self::port();
            (0..10_000).filter(|_| port.refuse(&request, RejectReason::NO_QP, now).is_some()).count()
        };
        assert_eq!(refused(), ANSWER_BURST as usize);
        let mut answered = 0;
        let mut repeated = 0;
        for _ in 0..10_000 {
            match route(&mut port, 1, &release, now) {
                Routed::Answer(_) => answered += 1,
                other => assert_eq!(other, Routed::Dropped(DroppedPacket::TooMany)),
            }
            match route(&mut port, 1, &request[..request.len() - 4], now) {
                Routed::Dropped(DroppedPacket::TooMany) => {}
                other => {
                    assert_eq!(other, connection);
                    repeated += 1;
                }
            }
        }
        assert_eq!((answered, repeated), (expected / 2, expected / 2));
        now += Duration::from_secs(1);
    }
    // What belongs to a connection is not limited.
    establish(&mut port, 1, &opened, now);
}
