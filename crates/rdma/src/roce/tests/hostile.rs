//! A peer that breaks the protocol, and a network that forges packets: memory that was not granted
//! is not touched, nothing is reported twice, and what is refused is refused again.

use super::{PERFECT, RocePair};
use crate::queue_pair::{Fault, Provider, Violation};
use crate::regions::Refusal;
use blockmux_proto::rdma::{Endpoint, Event, MESSAGE, QueuePair, Remote, RemoteRights, WorkId, WorkRequest};
use blockmux_volume::{Chunk, Memory, SgList};
use blockmux_wire::roce::bth::{Bth, FLAG_ACK_REQUEST, P_KEY_DEFAULT, U24, pad_flags};
use blockmux_wire::roce::eth::{Aeth, NakCode, Reth, Syndrome};
use blockmux_wire::roce::opcode::RoceOpcode;
use blockmux_wire::roce::packet::RocePacket;
use zerocopy::{FromZeros, IntoBytes, U16, U32, U64};

const MTU: usize = 256;
/// The first sequence number of the active end of a pair with an even seed.
const FIRST_PSN: u32 = 0xff_fff0;

/// The passive end of a connection whose active end is the test.
struct Victim {
    pair: RocePair,
    target: SgList,
    readable: Remote,
    writable: Remote,
}

impl Victim {
    fn new() -> Victim {
        let endpoint = Endpoint {
            receives: 3,
            receive_len: 600,
            sends: 4,
            reads: 2,
            regions: 4,
            private_data: vec![1],
            without_invalidation: None,
        };
        let mut pair = RocePair::new([&endpoint, &endpoint], MTU as u16, 16, PERFECT, 2);
        while pair.turn() {}
        assert!(matches!(pair.ends[1].poll(), Some(Event::Requested { .. })));
        pair.ends[1].accept(vec![2]);
        while pair.turn() {}
        assert!(matches!(pair.ends[1].poll(), Some(Event::Connected { .. })));
        let memory = Memory::from_heap(3000);
        memory.seg(0, 3000).copy_from(&[CLEAN; 3000]);
        let target = SgList::one(memory.seg(0, 3000));
        let mut register = |at, access| {
            let mut part = SgList::one(memory.seg(at, 1000));
            pair.ends[1].register(WorkId(1), &mut part, access).unwrap()
        };
        let readable = register(500, RemoteRights::RemoteRead);
        let writable = register(1750, RemoteRights::RemoteWrite);
        Victim { pair, target, readable, writable }
    }

    /// Sends a packet whose sequence number is `ahead` of the first one.
    fn packet(&mut self, opcode: RoceOpcode, ahead: u32, headers: &[u8], payload: &[u8]) -> bool {
        let bth = Bth {
            opcode: opcode.0,
            flags: pad_flags(payload.len()),
            p_key: U16::new(P_KEY_DEFAULT),
            dest_qp: U24::new(7),
            ack_request: FLAG_ACK_REQUEST,
            psn: U24::new(FIRST_PSN.wrapping_add(ahead)),
            ..Bth::new_zeroed()
        };
        let mut packet = [bth.as_bytes(), headers, payload].concat();
        packet.resize(packet.len().next_multiple_of(4) + 4, 0);
        let now = self.pair.now;
        self.pair.ends[1].on_packet(&Chunk::from_slice(&packet), false, now).is_ok()
    }

    /// The answers that the victim sends: opcode, sequence number from the first one on, syndrome.
    fn answers(&mut self) -> Vec<(RoceOpcode, u32, Option<Syndrome>)> {
        let mut answers = Vec::new();
        let mut packet = Vec::new();
        while self.pair.ends[1].poll_transmit(self.pair.now, &mut packet) {
            packet.extend([0; 4]);
            let parsed = RocePacket::parse(&packet).unwrap();
            let ahead = parsed.bth.psn.get().wrapping_sub(FIRST_PSN) & 0xff_ffff;
            let syndrome = parsed.aeth.map(|aeth| Syndrome::from(aeth.syndrome));
            answers.push((parsed.bth.opcode(), ahead, syndrome));
            packet.clear();
        }
        answers
    }

    fn next_event(&mut self) -> Option<Event> {
        self.pair.ends[1].poll()
    }

    /// Whether no byte of memory was written.
    fn is_untouched(&self) -> bool {
        self.target.to_vec().iter().all(|byte| *byte == CLEAN)
    }

    /// Fails unless the last packet was refused with this code, and nothing came of it.
    fn assert_refused(&mut self, ahead: u32, code: NakCode, violation: Violation) {
        let refusal = (RoceOpcode::RC_ACKNOWLEDGE, ahead, Some(Syndrome::Nak(code)));
        assert_eq!(self.answers(), [refusal]);
        assert_eq!(self.pair.ends[1].fault(), Some(Fault::Peer(violation)));
        assert!(matches!(self.next_event(), Some(Event::Disconnected)));
        assert!(self.next_event().is_none() && self.is_untouched());
        // The answer may be lost; later packets get it again, and nothing else (CVE-2026-93107).
        for _ in 0..3 {
            assert!(self.packet(RoceOpcode::RC_SEND_ONLY, ahead, &[], b"late"));
            assert_eq!(self.answers(), [refusal]);
        }
        assert!(self.next_event().is_none() && self.is_untouched());
    }
}

fn reth(remote: Remote) -> [u8; 16] {
    let reth = Reth {
        virtual_address: U64::new(remote.address),
        r_key: U32::new(remote.stag.0),
        dma_length: U32::new(remote.len),
    };
    reth.as_bytes().try_into().unwrap()
}

#[test]
fn memory_that_was_not_granted_is_neither_written_nor_read() {
    let access = NakCode::REMOTE_ACCESS_ERROR;
    type Change = fn(Remote) -> Remote;
    let cases: [(Change, Refusal); 5] = [
        (|remote| Remote { len: remote.len + 1, ..remote }, Refusal::Bounds),
        (|remote| Remote { address: remote.address - 1, ..remote }, Refusal::Bounds),
        (|remote| Remote { len: u32::MAX, ..remote }, Refusal::Bounds),
        // Address plus length wraps (CVE-2026-98365).
        (|remote| Remote { address: u64::MAX - 10, ..remote }, Refusal::Wrap),
        (
            |remote| Remote { stag: blockmux_proto::rdma::Stag(!remote.stag.0), ..remote },
            Refusal::InvalidStag,
        ),
    ];
    for (change, refusal) in cases {
        let mut victim = Victim::new();
        let header = reth(change(victim.writable));
        assert!(!victim.packet(RoceOpcode::RC_WRITE_FIRST, 0, &header, &[1; MTU]));
        victim.assert_refused(0, access, refusal.into());
        let mut victim = Victim::new();
        let header = reth(change(victim.readable));
        assert!(!victim.packet(RoceOpcode::RC_READ_REQUEST, 0, &header, &[]));
        victim.assert_refused(0, access, refusal.into());
    }
    let mut victim = Victim::new();
    let header = reth(victim.readable);
    assert!(!victim.packet(RoceOpcode::RC_WRITE_FIRST, 0, &header, &[1; MTU]));
    victim.assert_refused(0, access, Refusal::Access.into());
}

#[test]
fn packets_out_of_their_message_are_refused() {
    let invalid = NakCode::INVALID_REQUEST;
    let whole = [1; MTU];
    let cases: [(RoceOpcode, &[u8]); 8] = [
        (RoceOpcode::RC_SEND_MIDDLE, &whole),
        (RoceOpcode::RC_SEND_LAST, &whole),
        (RoceOpcode::RC_WRITE_MIDDLE, &whole),
        (RoceOpcode::RC_WRITE_LAST, &whole),
        (RoceOpcode::RC_SEND_FIRST, b"a first packet that is not full"),
        (RoceOpcode::RC_SEND_ONLY, &[1; MTU + 1]),
        (RoceOpcode::RC_SEND_ONLY_IMMEDIATE, b"four bytes of immediate data"),
        (RoceOpcode::RC_SEND_LAST_IMMEDIATE, b"four bytes of immediate data"),
    ];
    for (opcode, payload) in cases {
        let mut victim = Victim::new();
        assert!(!victim.packet(opcode, 0, &[], payload), "{opcode}");
        victim.assert_refused(0, invalid, Violation::Other);
    }
    // Another message begins within one.
    for opcode in [RoceOpcode::RC_SEND_FIRST, RoceOpcode::RC_SEND_ONLY, RoceOpcode::RC_WRITE_LAST] {
        let mut victim = Victim::new();
        assert!(victim.packet(RoceOpcode::RC_SEND_FIRST, 0, &[], &whole));
        assert_eq!(victim.answers().len(), 1);
        assert!(!victim.packet(opcode, 1, &[], &whole), "{opcode}");
        victim.assert_refused(1, invalid, Violation::Other);
    }
}

#[test]
fn a_write_is_as_long_as_its_header_says() {
    for (len, parts) in [
        (MTU as u32 * 2, &[RoceOpcode::RC_WRITE_ONLY][..]),
        (MTU as u32, &[RoceOpcode::RC_WRITE_FIRST]),
        (MTU as u32 - 1, &[RoceOpcode::RC_WRITE_ONLY]),
        (0, &[RoceOpcode::RC_WRITE_ONLY]),
    ] {
        let mut victim = Victim::new();
        let header = reth(Remote { len, ..victim.writable });
        assert!(!victim.packet(parts[0], 0, &header, &[1; MTU]), "{len}");
        victim.assert_refused(0, NakCode::INVALID_REQUEST, Violation::Other);
    }
}

#[test]
fn the_rest_of_a_write_to_invalidated_memory_is_refused() {
    let mut victim = Victim::new();
    let header = reth(Remote { len: 2 * MTU as u32, ..victim.writable });
    assert!(victim.packet(RoceOpcode::RC_WRITE_FIRST, 0, &header, &[CLEAN; MTU]));
    assert_eq!(victim.answers().len(), 1);
    let stag = victim.writable.stag;
    victim.pair.ends[1].invalidate(stag);
    assert!(!victim.packet(RoceOpcode::RC_WRITE_LAST, 1, &[], &[1; MTU]));
    victim.assert_refused(1, NakCode::REMOTE_ACCESS_ERROR, Refusal::InvalidStag.into());
}

#[test]
fn a_response_from_invalidated_memory_ends_with_a_refusal() {
    let mut victim = Victim::new();
    let header = reth(victim.readable);
    assert!(victim.packet(RoceOpcode::RC_READ_REQUEST, 0, &header, &[]));
    let stag = victim.readable.stag;
    victim.pair.ends[1].invalidate(stag);
    victim.assert_refused(0, NakCode::REMOTE_ACCESS_ERROR, Refusal::InvalidStag.into());
}

#[test]
fn more_reads_than_agreed_are_refused() {
    let mut victim = Victim::new();
    let header = reth(Remote { len: 10, ..victim.readable });
    for ahead in 0..2 {
        assert!(victim.packet(RoceOpcode::RC_READ_REQUEST, ahead, &header, &[]));
    }
    assert!(!victim.packet(RoceOpcode::RC_READ_REQUEST, 2, &header, &[]));
    victim.assert_refused(2, NakCode::INVALID_REQUEST, Violation::TooManyReads);
}

#[test]
fn a_packet_that_comes_twice_is_carried_out_once() {
    let mut victim = Victim::new();
    let header = reth(Remote { len: 4, ..victim.writable });
    let ack = |ahead| [(RoceOpcode::RC_ACKNOWLEDGE, ahead, Some(Syndrome::Ack(0x1f)))];
    assert!(victim.packet(RoceOpcode::RC_WRITE_ONLY, 0, &header, &[1; 4]));
    assert_eq!(victim.answers(), ack(0));
    // The session has used that memory for something else meanwhile.
    victim.target.copy_from(&[CLEAN; 3000]);
    assert!(victim.packet(RoceOpcode::RC_WRITE_ONLY, 0, &header, &[1; 4]));
    assert_eq!((victim.answers(), victim.is_untouched()), (ack(0).to_vec(), true));
    for _ in 0..3 {
        assert!(victim.packet(RoceOpcode::RC_SEND_ONLY, 1, &[], b"once"));
        assert_eq!(victim.answers(), ack(1));
    }
    assert!(
        matches!(victim.next_event(), Some(Event::Received { message, .. }) if message.to_vec() == b"once")
    );
    assert!(victim.next_event().is_none());
    assert!(victim.packet(RoceOpcode::RC_WRITE_ONLY, 0, &header, &[1; 4]));
    assert_eq!(victim.answers(), ack(1), "the latest acknowledgement");
}

#[test]
fn a_missing_packet_is_asked_for_once() {
    let mut victim = Victim::new();
    for ahead in [1, 2, 3, 100] {
        assert!(victim.packet(RoceOpcode::RC_SEND_ONLY, ahead, &[], b"early"));
    }
    let nak = Syndrome::Nak(NakCode::PSN_SEQUENCE_ERROR);
    assert_eq!(victim.answers(), [(RoceOpcode::RC_ACKNOWLEDGE, 0, Some(nak))]);
    assert!(victim.next_event().is_none(), "nothing out of order is delivered");
    assert!(victim.packet(RoceOpcode::RC_SEND_ONLY, 0, &[], b"now"));
    assert!(matches!(victim.next_event(), Some(Event::Received { .. })));
}

/// Linux's rxe ignores a second sequence error without an acknowledgement before it: in a capture,
/// it went on with new packets, and came back to the missing one after 2.3 seconds.
#[test]
fn an_acknowledgement_goes_before_each_further_question() {
    let mut victim = Victim::new();
    let answer = |ahead, syndrome| (RoceOpcode::RC_ACKNOWLEDGE, ahead, Some(syndrome));
    let (ack, nak) = (Syndrome::Ack(0x1f), Syndrome::Nak(NakCode::PSN_SEQUENCE_ERROR));
    assert!(victim.packet(RoceOpcode::RC_WRITE_ONLY, 1, &[0; 16], &[]));
    assert_eq!(victim.answers(), [answer(0_u32, nak)]);
    // What was missing comes, and the next packet is lost before anything is acknowledged.
    for ahead in [0, 2] {
        assert!(victim.packet(RoceOpcode::RC_WRITE_ONLY, ahead, &[0; 16], &[]));
    }
    assert_eq!(victim.answers(), [answer(0, ack), answer(1, nak)]);
    // After an acknowledgement, a question goes alone.
    assert!(victim.packet(RoceOpcode::RC_WRITE_ONLY, 1, &[0; 16], &[]));
    assert_eq!(victim.answers(), [answer(1, ack)]);
    assert!(victim.packet(RoceOpcode::RC_WRITE_ONLY, 3, &[0; 16], &[]));
    assert_eq!(victim.answers(), [answer(2, nak)]);
}

#[test]
fn a_duplicate_read_is_answered_from_where_it_asks() {
    let mut victim = Victim::new();
    let remote = Remote { len: 3 * MTU as u32, ..victim.readable };
    assert!(victim.packet(RoceOpcode::RC_READ_REQUEST, 0, &reth(remote), &[]));
    let opcodes = |answers: Vec<(RoceOpcode, u32, _)>| -> Vec<_> {
        answers.into_iter().map(|(opcode, ahead, _)| (opcode, ahead)).collect()
    };
    let (first, middle) = (RoceOpcode::RC_READ_RESPONSE_FIRST, RoceOpcode::RC_READ_RESPONSE_MIDDLE);
    let last = RoceOpcode::RC_READ_RESPONSE_LAST;
    assert_eq!(opcodes(victim.answers()), [(first, 0), (middle, 1), (last, 2)]);
    let rest = |packets: u32| Remote {
        address: remote.address + u64::from(packets) * MTU as u64,
        len: remote.len - packets * MTU as u32,
        ..remote
    };
    assert!(victim.packet(RoceOpcode::RC_READ_REQUEST, 1, &reth(rest(1)), &[]));
    assert_eq!(opcodes(victim.answers()), [(first, 1), (last, 2)]);
    assert!(victim.packet(RoceOpcode::RC_READ_REQUEST, 2, &reth(rest(2)), &[]));
    assert_eq!(opcodes(victim.answers()), [(RoceOpcode::RC_READ_RESPONSE_ONLY, 2)]);
    // A request that is none of those that came before.
    for other in [rest(2), Remote { len: 10, ..rest(1) }, victim.writable] {
        assert!(victim.packet(RoceOpcode::RC_READ_REQUEST, 1, &reth(other), &[]));
        assert_eq!(victim.answers(), []);
    }
    // And once the memory is invalidated, a duplicate that comes late is no reason to end.
    victim.pair.ends[1].invalidate(remote.stag);
    assert!(victim.packet(RoceOpcode::RC_READ_REQUEST, 2, &reth(rest(2)), &[]));
    assert_eq!(victim.answers(), []);
    assert!(victim.next_event().is_none());
    // The first request for it is.
    assert!(!victim.packet(RoceOpcode::RC_READ_REQUEST, 3, &reth(remote), &[]));
    victim.assert_refused(3, NakCode::REMOTE_ACCESS_ERROR, Refusal::InvalidStag.into());
}

#[test]
fn answers_to_nothing_are_ignored() {
    let mut victim = Victim::new();
    victim.pair.ends[1].send(b"waits for its acknowledgement", &SgList::default(), None);
    let sent = victim.answers();
    let (_, first, _) = sent[0];
    let aeth = |syndrome: Syndrome| Aeth { syndrome: syndrome.into(), msn: U24::new(1) };
    for syndrome in
        [Syndrome::Ack(0x1f), Syndrome::Nak(NakCode::REMOTE_ACCESS_ERROR), Syndrome::ReceiverNotReady(1)]
    {
        for ahead in [first.wrapping_sub(1), first.wrapping_add(1), first.wrapping_add(1 << 23)] {
            assert!(victim.packet(RoceOpcode::RC_ACKNOWLEDGE, ahead, aeth(syndrome).as_bytes(), &[]));
        }
    }
    let aeth = aeth(Syndrome::Ack(0x1f));
    assert!(victim.packet(
        RoceOpcode::RC_READ_RESPONSE_ONLY,
        first.wrapping_add(1),
        aeth.as_bytes(),
        b"data"
    ));
    assert!(victim.next_event().is_none());
    assert!(victim.packet(RoceOpcode::RC_ACKNOWLEDGE, first, aeth.as_bytes(), &[]));
    assert!(matches!(victim.next_event(), Some(Event::Done { id: MESSAGE, result: Ok(()) })));
}

#[test]
fn a_response_to_what_is_no_read_ends_the_connection() {
    let mut victim = Victim::new();
    victim.pair.ends[1].send(b"no read", &SgList::default(), None);
    let (_, first, _) = victim.answers()[0];
    let aeth = Aeth { syndrome: Syndrome::Ack(0x1f).into(), msn: U24::new(1) };
    assert!(!victim.packet(RoceOpcode::RC_READ_RESPONSE_ONLY, first, aeth.as_bytes(), b"data"));
    assert_eq!(victim.pair.ends[1].fault(), Some(Fault::Peer(Violation::Other)));
}

#[test]
fn a_response_of_another_length_than_asked_for_ends_the_connection() {
    for len in [0, 9, 11, MTU] {
        let mut victim = Victim::new();
        let local = SgList::one(Memory::from_heap(10).seg(0, 10));
        let remote = Remote { stag: blockmux_proto::rdma::Stag(5), address: 0, len: 10 };
        victim.pair.ends[1].post(WorkRequest::Read { id: WorkId(9), local: local.clone(), remote });
        let (_, first, _) = victim.answers()[0];
        let aeth = Aeth { syndrome: Syndrome::Ack(0x1f).into(), msn: U24::new(1) };
        assert!(!victim.packet(RoceOpcode::RC_READ_RESPONSE_ONLY, first, aeth.as_bytes(), &vec![1; len]));
        assert_eq!(local.to_vec(), [0; 10], "{len}");
        assert_eq!(victim.pair.ends[1].fault(), Some(Fault::Peer(Violation::Other)));
    }
}

const CLEAN: u8 = 0xcc;
