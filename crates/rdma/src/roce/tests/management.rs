//! Messages of connection management that are forged, replayed or wrong: a live connection goes on,
//! and a request that cannot be accepted is dropped or refused with its reason.

use super::super::cm::put_message;
use super::{PairSettings, flow};
use crate::queue_pair::Provider;
use crate::roce::{Roce, SETUP_TIMEOUT};
use blockmux_proto::driver::session::Timed;
use blockmux_proto::rdma::{Endpoint, Event, MESSAGE, QueuePair};
use blockmux_volume::{Chunk, SgList};
use blockmux_wire::roce::bth::{QP_GSI, U24};
use blockmux_wire::roce::cm::{
    ANSWERS_REP, ANSWERS_REQ, CmAttribute, CmDrep, CmDreq, CmMessage, CmMra, CmRej, CmRep, CmReq, CmRtu,
    IpCmHeader, RejectReason, gid,
};
use blockmux_wire::roce::icrc::Fragmentation;
use blockmux_wire::roce::packet::RocePacket;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, U16, U32};

/// Both ends of a connection, between which the test carries the packets.
struct Managed {
    ends: [Roce; 2],
    now: Instant,
    /// The numbers of both sides, as their messages say them.
    comm_ids: [u32; 2],
    queue_pairs: [u32; 2],
    req: CmReq,
    rep: CmRep,
}

/// A message, by its attribute and its body.
type Message = (CmAttribute, Vec<u8>);

const MTU: u16 = 256;
const ACTIVE: usize = 0;
const PASSIVE: usize = 1;

impl Managed {
    /// Both ends before the request has arrived.
    fn requesting() -> Managed {
        let endpoint = Endpoint {
            receives: 4,
            receive_len: 200,
            sends: 4,
            reads: 2,
            regions: 1,
            private_data: b"hello".to_vec(),
            without_invalidation: None,
        };
        let now = Instant::now();
        let settings = PairSettings { mtu: MTU, window: 8, keep_alive: None, guids: [1, 2] };
        let mut ends = settings.ends([&endpoint, &endpoint], 3, now);
        let sent = management(packets(&mut ends[ACTIVE], now));
        let [(CmAttribute::REQ, body)] = &sent[..] else { panic!("{sent:?}") };
        let req = CmReq::read_from_bytes(body).unwrap();
        Managed {
            ends,
            now,
            comm_ids: [req.local_comm_id.get(), 0],
            queue_pairs: [req.local_qpn.get(), 0],
            req,
            rep: CmRep::new_zeroed(),
        }
    }

    /// Both ends when the passive one has sent its reply, which has not arrived.
    fn accepted() -> Managed {
        let mut managed = Managed::requesting();
        managed.deliver(PASSIVE, CmAttribute::REQ, &managed.req.clone());
        assert!(matches!(managed.ends[PASSIVE].poll(), Some(Event::Requested { .. })));
        managed.ends[PASSIVE].accept(Vec::new());
        let sent = managed.answers(PASSIVE);
        let [(CmAttribute::REP, body)] = &sent[..] else { panic!("{sent:?}") };
        managed.rep = CmRep::read_from_bytes(body).unwrap();
        managed.comm_ids[PASSIVE] = managed.rep.local_comm_id.get();
        managed.queue_pairs[PASSIVE] = managed.rep.local_qpn.get();
        managed
    }

    fn connected() -> Managed {
        let mut managed = Managed::accepted();
        managed.deliver(ACTIVE, CmAttribute::REP, &managed.rep.clone());
        let sent = managed.answers(ACTIVE);
        let [(CmAttribute::RTU, body)] = &sent[..] else { panic!("{sent:?}") };
        managed.deliver(PASSIVE, CmAttribute::RTU, &CmRtu::read_from_bytes(body).unwrap());
        for end in &mut managed.ends {
            assert!(matches!(end.poll(), Some(Event::Connected { .. })) && end.poll().is_none());
        }
        managed.assert_live();
        managed
    }

    /// Delivers a message to an end.
    fn deliver(&mut self, to: usize, attribute: CmAttribute, body: &(impl IntoBytes + Immutable + ?Sized)) {
        let mut packet = Vec::new();
        put_message(&mut packet, 0, 1, attribute, body.as_bytes());
        packet.extend([0; 4]);
        self.ends[to].on_packet(&Chunk::from_slice(&packet), false, self.now).unwrap();
    }

    /// The messages that an end sends now. It sends nothing else.
    fn answers(&mut self, side: usize) -> Vec<Message> {
        management(packets(&mut self.ends[side], self.now))
    }

    /// Fails unless data passes in both directions.
    fn assert_live(&mut self) {
        for side in [ACTIVE, PASSIVE] {
            self.ends[side].send(b"alive", &SgList::default(), None);
            for (to, from) in [(1 - side, side), (side, 1 - side)] {
                for packet in packets(&mut self.ends[from], self.now) {
                    self.ends[to].on_packet(&Chunk::from_slice(&packet), false, self.now).unwrap();
                }
                // An acknowledgement may be delayed.
                if let Some(when) = self.ends[1 - side].poll_timeout() {
                    self.now = self.now.max(when.min(self.now + Duration::from_millis(1)));
                }
            }
            assert!(matches!(self.ends[side].poll(), Some(Event::Done { id: MESSAGE, result: Ok(()) })));
            match self.ends[1 - side].poll() {
                Some(Event::Received { message, .. }) => assert_eq!(message.to_vec(), b"alive"),
                other => panic!("{other:?}"),
            }
            self.ends[1 - side].receive(1);
        }
        assert!(self.ends.iter_mut().all(|end| end.poll().is_none() && end.cm.is_established()));
    }

    /// Every message but the request from the peer of `to`, with these numbers.
    fn messages(&self, to: usize, (local, remote): (u32, u32), queue_pair: u32) -> Vec<Message> {
        let (local_comm_id, remote_comm_id) = (U32::new(local), U32::new(remote));
        let rep = CmRep { local_comm_id, remote_comm_id, local_qpn: U24::new(0x1234), ..self.rep };
        let reason = U16::new(RejectReason::STALE_CONNECTION.0);
        let rej = CmRej { local_comm_id, remote_comm_id, reason, ..CmRej::new_zeroed() };
        let rtu = CmRtu { local_comm_id, remote_comm_id, ..CmRtu::new_zeroed() };
        let remote_qpn = U24::new(queue_pair);
        let dreq = CmDreq { local_comm_id, remote_comm_id, remote_qpn, ..CmDreq::new_zeroed() };
        let drep = CmDrep { local_comm_id, remote_comm_id, ..CmDrep::new_zeroed() };
        let message = if to == ACTIVE { ANSWERS_REQ } else { ANSWERS_REP };
        let mra =
            CmMra { local_comm_id, remote_comm_id, message, service_timeout: 0xf8, ..CmMra::new_zeroed() };
        vec![
            (CmAttribute::REP, rep.as_bytes().to_vec()),
            (CmAttribute::REJ, rej.as_bytes().to_vec()),
            (CmAttribute::RTU, rtu.as_bytes().to_vec()),
            (CmAttribute::DREQ, dreq.as_bytes().to_vec()),
            (CmAttribute::DREP, drep.as_bytes().to_vec()),
            (CmAttribute::MRA, mra.as_bytes().to_vec()),
        ]
    }
}

/// The packets that an end has to send, with their ICRCs.
fn packets(end: &mut Roce, now: Instant) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    loop {
        let mut packet = Vec::new();
        if !end.poll_transmit(now, &mut packet) {
            return all;
        }
        packet.extend(flow(ACTIVE).icrc(Fragmentation::default(), &packet));
        all.push(packet);
    }
}

fn management(packets: Vec<Vec<u8>>) -> Vec<Message> {
    let message = |packet: Vec<u8>| {
        let packet = RocePacket::parse(&packet).unwrap();
        assert_eq!(packet.bth.dest_qp.get(), QP_GSI);
        let (_, message) = CmMessage::parse(packet.payload).unwrap();
        let (attribute, body) = message.parts();
        (attribute, body.to_vec())
    };
    packets.into_iter().map(message).collect()
}

#[test]
fn forged_messages_change_nothing_of_a_live_connection() {
    for to in [ACTIVE, PASSIVE] {
        let mut managed = Managed::connected();
        let (local, remote) = (managed.comm_ids[1 - to], managed.comm_ids[to]);
        let queue_pair = managed.queue_pairs[to];
        for (comm_ids, queue_pair) in [
            ((local ^ 1, remote), queue_pair),
            ((0, remote), queue_pair),
            ((local, remote ^ 1), queue_pair),
            ((remote, local), queue_pair),
        ] {
            for (attribute, body) in managed.messages(to, comm_ids, queue_pair) {
                managed.deliver(to, attribute, &body[..]);
                assert_eq!(managed.answers(to), [], "{attribute:?} to {to}");
                assert!(managed.ends[to].poll().is_none(), "{attribute:?} to {to}");
            }
            managed.assert_live();
        }
        // The numbers of the connection are right, but not that of the queue pair.
        let dreq = managed.messages(to, (local, remote), queue_pair ^ 1).remove(3);
        managed.deliver(to, dreq.0, &dreq.1[..]);
        assert_eq!(managed.answers(to), []);
        managed.assert_live();
    }
}

#[test]
fn messages_of_the_set_up_that_come_again_change_nothing_of_a_live_connection() {
    let mut managed = Managed::connected();
    for to in [ACTIVE, PASSIVE] {
        managed.deliver(to, CmAttribute::REQ, &managed.req.clone());
        // As of a peer that has begun anew, with another queue pair and sequence number.
        let other = CmReq { local_qpn: U24::new(0x4321), starting_psn: U24::new(7), ..managed.req };
        managed.deliver(to, CmAttribute::REQ, &other);
        assert_eq!(managed.answers(to), []);
        let numbers = (managed.comm_ids[1 - to], managed.comm_ids[to]);
        for (attribute, body) in managed.messages(to, numbers, 0) {
            // These two end a connection.
            if matches!(attribute, CmAttribute::REJ | CmAttribute::DREQ) {
                continue;
            }
            managed.deliver(to, attribute, &body[..]);
            // The peer has not got the RTU. What else the reply says has been agreed on before.
            let expected = attribute == CmAttribute::REP && to == ACTIVE;
            let answers = managed.answers(to);
            let expected = if expected { vec![CmAttribute::RTU] } else { Vec::new() };
            assert_eq!(answers.iter().map(|(attribute, _)| *attribute).collect::<Vec<_>>(), expected);
            assert!(managed.ends[to].poll().is_none());
        }
        managed.assert_live();
    }
}

/// A request of the peer's queue pair that the peer has not sent, or has sent after a restart.
fn stale_request(managed: &Managed) -> CmReq {
    CmReq { local_comm_id: U32::new(managed.comm_ids[ACTIVE] ^ 1), ..managed.req }
}

#[test]
fn a_forged_request_of_a_live_peers_queue_pair_is_rejected_and_ends_nothing() {
    let mut managed = Managed::connected();
    let stale = stale_request(&managed);
    for _ in 0..3 {
        managed.deliver(PASSIVE, CmAttribute::REQ, &stale);
        let now = managed.now;
        let mut sent = packets(&mut managed.ends[PASSIVE], now);
        let probe = sent.split_off(1);
        let answer = management(sent);
        let [(CmAttribute::REJ, body)] = &answer[..] else { panic!("{answer:?}") };
        let rej = CmRej::read_from_bytes(body).unwrap();
        assert_eq!((rej.reason.get(), rej.message), (RejectReason::STALE_CONNECTION.0, ANSWERS_REQ));
        assert_eq!((rej.local_comm_id.get(), rej.remote_comm_id), (0, stale.local_comm_id));
        // The live peer has not asked for that.
        managed.deliver(ACTIVE, CmAttribute::REJ, &rej);
        assert_eq!(probe.len(), 1);
        managed.ends[ACTIVE].on_packet(&Chunk::from_slice(&probe[0]), false, now).unwrap();
        for packet in packets(&mut managed.ends[ACTIVE], now) {
            managed.ends[PASSIVE].on_packet(&Chunk::from_slice(&packet), false, now).unwrap();
        }
        managed.now += Duration::from_millis(1);
        managed.assert_live();
    }
    // One of another queue pair is none of this connection's.
    let other = CmReq { local_qpn: U24::new(managed.queue_pairs[ACTIVE] ^ 1), ..stale };
    managed.deliver(PASSIVE, CmAttribute::REQ, &other);
    assert_eq!(managed.answers(PASSIVE), []);
}

#[test]
fn a_peer_that_requests_its_queue_pair_again_and_is_silent_loses_the_old_connection() {
    let mut managed = Managed::connected();
    let stale = stale_request(&managed);
    managed.deliver(PASSIVE, CmAttribute::REQ, &stale);
    let begun = managed.now;
    let passive = &mut managed.ends[PASSIVE];
    while packets(passive, managed.now).is_empty() || passive.poll().is_none() {
        let next = passive.poll_timeout().expect("it waits for an answer");
        managed.now = managed.now.max(next);
        passive.on_timeout(managed.now).ok();
        assert!(managed.now < begun + SETUP_TIMEOUT);
    }
    assert!(!passive.cm.is_established() || passive.cm.is_releasing());
}

#[test]
fn a_release_that_comes_again_is_confirmed_again_and_reported_once() {
    for to in [ACTIVE, PASSIVE] {
        for ending in [CmAttribute::DREQ, CmAttribute::REJ] {
            let mut managed = Managed::connected();
            let numbers = (managed.comm_ids[1 - to], managed.comm_ids[to]);
            let all = managed.messages(to, numbers, managed.queue_pairs[to]);
            let (attribute, body) = all.iter().find(|(attribute, _)| *attribute == ending).unwrap();
            for round in 0..3 {
                managed.deliver(to, *attribute, &body[..]);
                let event = managed.ends[to].poll();
                assert_eq!(matches!(event, Some(Event::Disconnected)), round == 0, "{event:?}");
                assert!(managed.ends[to].poll().is_none());
                let answers = managed.answers(to);
                let is_confirmed = matches!(&answers[..], [(CmAttribute::DREP, _)]);
                assert_eq!(is_confirmed, ending == CmAttribute::DREQ, "{answers:?}");
                assert!(managed.ends[to].is_drained());
            }
            // What was true of the connection before does not bring it back.
            for (attribute, body) in all {
                if attribute != CmAttribute::DREQ {
                    managed.deliver(to, attribute, &body[..]);
                    assert_eq!(managed.answers(to), [], "{attribute:?}");
                }
            }
            assert!(managed.ends[to].poll().is_none() && managed.ends[to].is_drained());
        }
    }
}

fn with_addresses(req: &CmReq, source: Ipv4Addr, destination: Ipv4Addr) -> CmReq {
    let mut req = *req;
    let header = IpCmHeader::new(source.into(), 40_000, destination.into());
    req.private_data[..size_of::<IpCmHeader>()].copy_from_slice(header.as_bytes());
    req
}

fn with_mtu(req: &CmReq, code: u8) -> CmReq {
    let mut req = *req;
    req.path_mtu = req.path_mtu & 15 | code << 4;
    req
}

#[test]
fn a_request_that_names_another_address_than_its_packet_is_dropped() {
    let mut managed = Managed::requesting();
    let other = Ipv4Addr::new(192, 0, 2, 99);
    let [ours, theirs] = super::ADDRESSES;
    let forged = [
        CmReq { local_gid: gid(other.into()), ..managed.req },
        with_addresses(&managed.req, other, theirs),
        with_addresses(&managed.req, ours, other),
        CmReq { local_gid: gid(other.into()), ..with_addresses(&managed.req, other, theirs) },
    ];
    for req in forged {
        managed.deliver(PASSIVE, CmAttribute::REQ, &req);
        assert_eq!(managed.answers(PASSIVE), []);
        assert!(managed.ends[PASSIVE].poll().is_none());
    }
    managed.deliver(PASSIVE, CmAttribute::REQ, &managed.req.clone());
    assert!(matches!(managed.ends[PASSIVE].poll(), Some(Event::Requested { .. })));
}

#[test]
fn a_request_for_what_is_not_supported_is_refused_with_its_reason() {
    let req = Managed::requesting().req;
    let mut versioned = req;
    versioned.private_data[0] = 0x10;
    let cases = [
        // 512 bytes, which the path has no room for, and codes without a meaning.
        (with_mtu(&req, 2), RejectReason::INVALID_MTU),
        (with_mtu(&req, 0), RejectReason::INVALID_MTU),
        (with_mtu(&req, 15), RejectReason::INVALID_MTU),
        (versioned, RejectReason::UNSUPPORTED_REQUEST),
        // An unreliable connection.
        (CmReq { remote_response: req.remote_response | 1 << 1, ..req }, RejectReason::INVALID_SERVICE_TYPE),
    ];
    for (wrong, reason) in cases {
        let mut managed = Managed::requesting();
        managed.deliver(PASSIVE, CmAttribute::REQ, &wrong);
        let sent = managed.answers(PASSIVE);
        let [(CmAttribute::REJ, body)] = &sent[..] else { panic!("{sent:?}") };
        let rej = CmRej::read_from_bytes(body).unwrap();
        assert_eq!((rej.reason.get(), rej.message), (reason.0, ANSWERS_REQ));
        // The session there hears of no request.
        let passive = &mut managed.ends[PASSIVE];
        assert!(matches!(passive.poll(), Some(Event::Disconnected)) && passive.poll().is_none());
        assert!(passive.is_drained());
        // A repeated request gets the same answer.
        managed.deliver(PASSIVE, CmAttribute::REQ, &wrong);
        assert_eq!(managed.answers(PASSIVE), sent);
        // The other one knows why.
        managed.deliver(ACTIVE, CmAttribute::REJ, &rej);
        let active = &mut managed.ends[ACTIVE];
        assert!(matches!(active.poll(), Some(Event::Refused { private_data }) if private_data.is_empty()));
        assert_eq!(active.rejection(), Some(reason));
        assert!(active.is_drained() && managed.answers(ACTIVE).is_empty());
    }
}

#[test]
fn a_peer_that_asks_for_more_time_gets_it_up_to_the_limit_of_the_set_up() {
    // The answer is due after the repetition of the request, or of the reply.
    for (side, answers, other) in [(ACTIVE, ANSWERS_REQ, ANSWERS_REP), (PASSIVE, ANSWERS_REP, ANSWERS_REQ)] {
        let mut managed = if side == ACTIVE { Managed::requesting() } else { Managed::accepted() };
        let begun = managed.now;
        let due = managed.ends[side].poll_timeout().unwrap();
        let numbers = (managed.comm_ids[1 - side], managed.comm_ids[side]);
        let mra = |message: u8, code: u8, (local, remote): (u32, u32)| CmMra {
            local_comm_id: U32::new(local),
            remote_comm_id: U32::new(remote),
            message,
            service_timeout: code << 3,
            ..CmMra::new_zeroed()
        };
        // Those are about another message or another connection.
        for wrong in [mra(other, 20, numbers), mra(answers, 20, (numbers.0, numbers.1 ^ 1))] {
            managed.deliver(side, CmAttribute::MRA, &wrong);
            assert_eq!(managed.ends[side].poll_timeout(), Some(due));
        }
        // 4.3 s more than otherwise; reserved bits have no meaning.
        managed.deliver(side, CmAttribute::MRA, &mra(answers | 1, 20, numbers));
        let later = managed.ends[side].poll_timeout().unwrap();
        assert_eq!((later - due).as_millis(), 4294);
        managed.now = due;
        managed.ends[side].on_timeout(due).unwrap();
        assert_eq!(managed.answers(side), []);
        managed.now = later;
        managed.ends[side].on_timeout(later).unwrap();
        assert_eq!(managed.answers(side).len(), 1, "the message is repeated");
        // As long as can be said, 2.4 hours.
        managed.deliver(side, CmAttribute::MRA, &mra(answers, 31, numbers));
        let last = managed.ends[side].poll_timeout().unwrap();
        assert_eq!(last, begun + SETUP_TIMEOUT);
        managed.now = last;
        assert!(managed.ends[side].on_timeout(last).is_err());
        assert!(matches!(managed.ends[side].poll(), Some(Event::Disconnected)));
    }
}
