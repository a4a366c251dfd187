//! The responder: requests of the peer, in the order of their sequence numbers, and the answers.
//!
//! ```text
//!   packet ──▶ expected   ──▶ a message, memory written, or a read to answer ──▶ acknowledgement
//!          ├─▶ earlier    ──▶ a duplicate: acknowledged again, or the read answered again
//!          └─▶ later      ──▶ dropped; one negative acknowledgement asks for the expected one
//! ```
//! Everything is checked before any memory is touched: the place of the packet in its message, its
//! length, and the rights of the peer. Each packet of a write and of a response is checked again,
//! as memory may have been invalidated meanwhile.
//!
//! # Answers
//! There is one acknowledgement to send at most, the latest: it includes all earlier ones. Answers
//! leave in the order of their sequence numbers, since an acknowledgement that comes before the
//! data of an earlier read says that the data was lost. Reads that were answered are remembered, as
//! many as the peer may have in flight; a duplicate of one, or of its end, is answered from the
//! memory again.

use super::ack_delay::Unanswered;
use super::cm::RoceTerms;
use super::encode::{PacketHead, put_aeth, put_list, put_pad};
use super::psn::{HALF, Psn, packets};
use crate::queue_pair::Violation;
use crate::regions::{Refusal, Regions};
use blockmux_proto::rdma::{Event, RemoteRights, Stag};
use blockmux_volume::{MAX_TRANSFER, Memory, Pool, Seg, SgList};
use blockmux_wire::roce::eth::{CREDITS_UNLIMITED, NakCode, Reth, Syndrome};
use blockmux_wire::roce::opcode::{PacketPlace, RoceOpcode};
use blockmux_wire::roce::packet::RocePacket;
use std::collections::VecDeque;

/// State of the responder.
pub(super) struct Responder {
    peer_qp: u32,
    /// Payload of a full packet, in bytes.
    mtu: u16,
    expected: Psn,
    /// Number of completed messages, modulo 2^24.
    msn: u32,
    /// Number of posted receive buffers, and the length of each in bytes.
    receives: u32,
    receive_len: usize,
    /// The message of which some packets have arrived.
    incoming: Option<IncomingMessage>,
    /// The last reads of the peer, as many as it may have in flight.
    reads: VecDeque<PeerRead>,
    /// Number of RDMA Reads that the peer may have in flight.
    pub(super) max_reads: u32,
    /// The acknowledgement to send.
    reply: Option<ResponderReply>,
    unanswered: Unanswered,
    /// Whether the peer was asked to send the expected packet again.
    has_asked: bool,
    /// Whether the last answer that was sent has asked for a packet.
    is_asking: bool,
    /// How often the expected packet has found no receive buffer.
    not_ready: usize,
    /// The answer that has ended the connection.
    refusal: Option<ResponderReply>,
}

enum IncomingMessage {
    /// A message that is reassembled.
    Send { buffer: Seg, filled: usize },
    /// A write, of which `left` bytes from `address` on are still to come.
    Write { stag: Stag, address: u64, left: u32 },
}

/// A read of the peer, of which the packets from index `next` on are to be sent.
struct PeerRead {
    first: Psn,
    packets: u32,
    stag: Stag,
    address: u64,
    len: u32,
    msn: u32,
    next: u32,
    /// Index of the packet that the response begins with; 0 but for duplicates.
    from: u32,
    /// The peer has asked again for what was sent.
    is_repeated: bool,
}

impl PeerRead {
    fn is_pending(&self) -> bool {
        self.next < self.packets
    }

    /// The memory of the next packet to send.
    fn next_memory(&self, regions: &Regions, mtu: u16) -> Result<SgList, Refusal> {
        let offset = self.next.saturating_mul(mtu.into());
        let len = self.len.saturating_sub(offset).min(mtu.into());
        let address = self.address.wrapping_add(offset.into());
        match len {
            0 => Ok(SgList::default()),
            _ => regions.look_up(self.stag, address, len),
        }
    }

    /// The packet of a request for the rest of this read, if it is one.
    fn index_of(&self, psn: Psn, reth: &Reth, mtu: u16) -> Option<u32> {
        let index = psn.since(self.first);
        let offset = index.checked_mul(mtu.into()).filter(|_| index < self.packets)?;
        let is_rest = reth.r_key.get() == self.stag.0
            && reth.virtual_address.get() == self.address.wrapping_add(offset.into())
            && Some(reth.dma_length.get()) == self.len.checked_sub(offset);
        is_rest.then_some(index)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ResponderReply {
    psn: Psn,
    syndrome: Syndrome,
    msn: u32,
}

/// A request that is refused: what the peer did, and what it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RefusedRequest {
    pub(super) violation: Violation,
    code: NakCode,
}

impl From<Refusal> for RefusedRequest {
    fn from(refusal: Refusal) -> RefusedRequest {
        RefusedRequest { violation: refusal.into(), code: NakCode::REMOTE_ACCESS_ERROR }
    }
}

/// A request that breaks the protocol.
const fn invalid(violation: Violation) -> RefusedRequest {
    RefusedRequest { violation, code: NakCode::INVALID_REQUEST }
}

/// What the responder uses of the queue pair.
pub(super) struct ResponderContext<'a> {
    pub(super) regions: &'a mut Regions,
    pub(super) pool: &'a Pool,
    pub(super) events: &'a mut VecDeque<Event>,
}

impl Responder {
    /// `expected` is the first sequence number of the peer's packets.
    pub(super) fn new(receives: u32, receive_len: u32, expected: Psn) -> Responder {
        Responder {
            peer_qp: 0,
            mtu: 0,
            expected,
            msn: 0,
            receives,
            receive_len: receive_len as usize,
            incoming: None,
            reads: VecDeque::new(),
            max_reads: 0,
            reply: None,
            unanswered: Unanswered::default(),
            has_asked: false,
            is_asking: false,
            not_ready: 0,
            refusal: None,
        }
    }

    /// Sets what both sides have agreed on.
    pub(super) fn connect(&mut self, terms: &RoceTerms) {
        (self.peer_qp, self.mtu, self.max_reads) = (terms.peer_qp, terms.mtu, terms.peer_reads);
    }

    #[inline]
    pub(super) fn post_receives(&mut self, count: u32) {
        self.receives = self.receives.saturating_add(count);
    }

    /// Whether nothing is left to send.
    pub(super) fn is_idle(&self) -> bool {
        self.reply.is_none() && !self.has_data()
    }

    /// Whether data of a read is the next to send.
    pub(super) fn has_data(&self) -> bool {
        self.reads.iter().any(PeerRead::is_pending)
    }

    /// If a plain acknowledgement is the next to send, what it is about.
    #[inline]
    pub(super) fn acknowledgement_only(&self) -> Option<Unanswered> {
        let is_plain = matches!(self.reply?.syndrome, Syndrome::Ack(_)) && !self.has_data();
        is_plain.then_some(self.unanswered)
    }

    /// Whether the peer has a message for which there was no receive buffer.
    pub(super) fn is_out_of_receives(&self) -> bool {
        self.not_ready > 0
    }

    /// Whether a packet with this number is the next one.
    #[inline]
    pub(super) fn is_expected(&self, psn: Psn) -> bool {
        psn == self.expected
    }

    /// Handles a request. `borrow` borrows its payload from the receive buffer.
    ///
    /// # Errors
    /// If the request is refused, which ends the connection. Nothing of it was carried out.
    pub(super) fn on_request(
        &mut self,
        packet: &RocePacket<'_>,
        context: ResponderContext<'_>,
        borrow: impl FnOnce() -> Seg,
    ) -> Result<(), RefusedRequest> {
        let psn = Psn::from(packet.bth.psn);
        if psn != self.expected {
            match self.expected.is_before(psn) {
                true => self.ask_again(Syndrome::Nak(NakCode::PSN_SEQUENCE_ERROR)),
                false => self.on_duplicate(psn, packet),
            }
            return Ok(());
        }
        let opcode = packet.bth.opcode();
        if packet.immediate.is_some() {
            // No protocol above uses immediate data.
            return Err(invalid(Violation::Other));
        }
        if let Some(place) = opcode.send_place() {
            if place.is_first() && self.receives == 0 {
                self.on_not_ready();
                return Ok(());
            }
            self.on_send(packet, place, context, borrow)?;
        } else if let Some(place) = opcode.write_place() {
            self.on_write(packet, place, context.regions)?;
        } else {
            return self.on_read(packet, context.regions);
        }
        self.advance(1, packet.payload.len());
        if packet.bth.requests_ack() {
            self.acknowledge();
        }
        Ok(())
    }

    fn on_send(
        &mut self,
        packet: &RocePacket<'_>,
        place: PacketPlace,
        context: ResponderContext<'_>,
        borrow: impl FnOnce() -> Seg,
    ) -> Result<(), RefusedRequest> {
        let filled = match (&self.incoming, place.is_first()) {
            (None, true) => 0,
            (Some(IncomingMessage::Send { filled, .. }), false) => *filled,
            _ => return Err(invalid(Violation::Other)),
        };
        let len = packet.payload.len();
        self.check_len(len, place)?;
        if filled.saturating_add(len) > self.receive_len {
            return Err(invalid(Violation::TooLong));
        }
        let invalidated = packet.invalidate.map(|r_key| Stag(r_key.get()));
        if let Some(stag) = invalidated {
            context.regions.invalidate(stag)?;
        }
        let message = match place {
            PacketPlace::Only => borrow(),
            _ => {
                let buffer = self.reassemble(packet.payload, context.pool);
                if !place.is_last() {
                    return Ok(());
                }
                self.incoming = None;
                buffer
            }
        };
        self.receives = self.receives.saturating_sub(1);
        self.complete_message();
        context.events.push_back(Event::Received { message, invalidated, written: None });
        Ok(())
    }

    /// Appends a part of a message; returns the message so far.
    fn reassemble(&mut self, part: &[u8], pool: &Pool) -> Seg {
        let len = self.receive_len;
        let incoming = self.incoming.get_or_insert_with(|| {
            let memory = if len <= MAX_TRANSFER as usize { pool.take(len) } else { None };
            // Without the buffer neither this message nor any later one could be received.
            let memory = memory.unwrap_or_else(|| Memory::from_heap(len));
            IncomingMessage::Send { buffer: memory.seg(0, len), filled: 0 }
        });
        let IncomingMessage::Send { buffer, filled } = incoming else { return Seg::from_slice(part) };
        // The caller has checked that it fits.
        buffer.slice(*filled, part.len()).copy_from(part);
        *filled = filled.saturating_add(part.len());
        buffer.slice(0, *filled)
    }

    fn on_write(
        &mut self,
        packet: &RocePacket<'_>,
        place: PacketPlace,
        regions: &mut Regions,
    ) -> Result<(), RefusedRequest> {
        let payload = packet.payload;
        let (stag, address, left) = match (&self.incoming, packet.reth) {
            (None, Some(reth)) => {
                let (stag, address) = (Stag(reth.r_key.get()), reth.virtual_address.get());
                let len = reth.dma_length.get();
                // An empty write may have any key.
                if len > 0 {
                    regions.check_grant(stag, address, len, RemoteRights::RemoteWrite)?;
                }
                (stag, address, len)
            }
            (Some(IncomingMessage::Write { stag, address, left }), None) => (*stag, *address, *left),
            _ => return Err(invalid(Violation::Other)),
        };
        self.check_len(payload.len(), place)?;
        // A packet's length has 16 bits.
        let len = payload.len() as u32;
        let rest = left.checked_sub(len).ok_or(invalid(Violation::Other))?;
        if place.is_last() != (rest == 0) {
            return Err(invalid(Violation::Other));
        }
        if len > 0 {
            regions.write(stag, address, payload, || Seg::from_slice(payload))?;
        }
        if place.is_last() {
            self.incoming = None;
            self.complete_message();
        } else {
            let address = address.wrapping_add(len.into());
            self.incoming = Some(IncomingMessage::Write { stag, address, left: rest });
        }
        Ok(())
    }

    fn on_read(&mut self, packet: &RocePacket<'_>, regions: &Regions) -> Result<(), RefusedRequest> {
        let (None, Some(reth)) = (&self.incoming, packet.reth) else {
            return Err(invalid(Violation::Other));
        };
        if !packet.payload.is_empty() {
            return Err(invalid(Violation::Other));
        }
        let (stag, address) = (Stag(reth.r_key.get()), reth.virtual_address.get());
        let len = reth.dma_length.get();
        if len > 0 {
            regions.check_grant(stag, address, len, RemoteRights::RemoteRead)?;
        }
        let packets = packets(len, self.mtu);
        if packets >= HALF {
            return Err(invalid(Violation::Other));
        }
        if self.reads.len() >= self.max_reads as usize {
            if self.reads.front().is_none_or(PeerRead::is_pending) {
                return Err(invalid(Violation::TooManyReads));
            }
            self.reads.pop_front();
        }
        let first = self.expected;
        self.complete_message();
        let msn = self.msn;
        self.reads.push_back(PeerRead {
            first,
            packets,
            stag,
            address,
            len,
            msn,
            next: 0,
            from: 0,
            is_repeated: false,
        });
        self.advance(packets, 0);
        Ok(())
    }

    /// Full packets carry the path MTU, and only the last of a message is shorter.
    fn check_len(&self, len: usize, place: PacketPlace) -> Result<(), RefusedRequest> {
        let mtu = usize::from(self.mtu);
        let is_right = match place {
            PacketPlace::First | PacketPlace::Middle => len == mtu,
            PacketPlace::Last => (1..=mtu).contains(&len),
            PacketPlace::Only => len <= mtu,
        };
        if is_right { Ok(()) } else { Err(invalid(Violation::Other)) }
    }

    fn complete_message(&mut self) {
        self.msn = self.msn.wrapping_add(1);
    }

    /// Expects the packet behind so many, whose payload had `len` bytes.
    fn advance(&mut self, packets: u32, len: usize) {
        self.expected = self.expected.plus(packets);
        self.unanswered.add(packets, len);
        (self.has_asked, self.not_ready) = (false, 0);
        // An acknowledgement replaces it.
        self.reply = self.reply.filter(|reply| matches!(reply.syndrome, Syndrome::Ack(_)));
    }

    /// Acknowledges everything before the expected packet.
    fn acknowledge(&mut self) {
        self.reply = Some(self.acknowledgement());
    }

    fn acknowledgement(&self) -> ResponderReply {
        let psn = self.expected.previous();
        ResponderReply { psn, syndrome: Syndrome::Ack(CREDITS_UNLIMITED), msn: self.msn }
    }

    /// Asks for the expected packet, once.
    fn ask_again(&mut self, syndrome: Syndrome) {
        if !std::mem::replace(&mut self.has_asked, true) {
            self.reply = Some(ResponderReply { psn: self.expected, syndrome, msn: self.msn });
        }
    }

    /// Makes the peer wait for a receive buffer, longer each time.
    fn on_not_ready(&mut self) {
        let timer = NOT_READY_TIMERS.get(self.not_ready).or(NOT_READY_TIMERS.last()).copied();
        self.not_ready = self.not_ready.saturating_add(1);
        self.has_asked = false;
        self.ask_again(Syndrome::ReceiverNotReady(timer.unwrap_or_default()));
    }

    /// Handles a packet that has arrived before.
    fn on_duplicate(&mut self, psn: Psn, packet: &RocePacket<'_>) {
        if let (RoceOpcode::RC_READ_REQUEST, Some(reth)) = (packet.bth.opcode(), packet.reth) {
            let mtu = self.mtu;
            for read in &mut self.reads {
                if let Some(index) = read.index_of(psn, reth, mtu) {
                    (read.next, read.from, read.is_repeated) = (index, index, true);
                }
            }
        } else {
            if self.reply.is_none() {
                self.acknowledge();
            }
            // The peer waits for it.
            self.unanswered = Unanswered::MUCH;
        }
    }

    /// Refuses the expected packet, as the last answer of the connection.
    pub(super) fn refuse(&mut self, refused: RefusedRequest) {
        self.refuse_at(self.expected, refused);
    }

    fn refuse_at(&mut self, psn: Psn, refused: RefusedRequest) {
        let syndrome = Syndrome::Nak(refused.code);
        self.refusal = Some(ResponderReply { psn, syndrome, msn: self.msn });
        self.reply = self.refusal;
    }

    /// Answers a packet that came after a refusal, since the answer may have been lost. Without a
    /// refusal there is no answer.
    pub(super) fn repeat_refusal(&mut self) {
        self.reply = self.refusal;
    }

    /// Takes the acknowledgement to send.
    ///
    /// Linux's rxe goes back for one sequence error, and not for another one before an
    /// acknowledgement: it would wait for its timeout. So there is one in between.
    fn next_reply(&mut self) -> Option<ResponderReply> {
        let reply = self.reply?;
        let asks = reply.syndrome == Syndrome::Nak(NakCode::PSN_SEQUENCE_ERROR);
        if std::mem::replace(&mut self.is_asking, asks) && asks {
            self.is_asking = false;
            return Some(self.acknowledgement());
        }
        self.reply.take()
    }

    /// Appends the next answer to `packet`; returns whether there is one.
    ///
    /// # Errors
    /// If memory that the peer reads was invalidated. The connection ends; the negative
    /// acknowledgement is the next answer.
    pub(super) fn transmit(
        &mut self,
        regions: &Regions,
        packet: &mut Vec<u8>,
    ) -> Result<bool, RefusedRequest> {
        let (read, memory) = loop {
            let Some(read) = self.reads.iter_mut().find(|read| read.is_pending()) else {
                let Some(reply) = self.next_reply() else { return Ok(false) };
                put_reply(packet, self.peer_qp, reply);
                self.unanswered = Unanswered::default();
                return Ok(true);
            };
            match read.next_memory(regions, self.mtu) {
                Ok(memory) => break (read, memory),
                // The peer has asked again too early, got the first answer, and invalidated the
                // memory. It waits for nothing.
                Err(_) if read.is_repeated => read.next = read.packets,
                Err(refusal) => {
                    let (psn, refused) = (read.first.plus(read.next), RefusedRequest::from(refusal));
                    self.reads.clear();
                    self.refuse_at(psn, refused);
                    return Err(refused);
                }
            }
        };
        // The response acknowledges everything before it.
        self.reply = self.reply.filter(|reply| read.first.is_before(reply.psn));
        let psn = read.first.plus(read.next);
        self.is_asking = false;
        let index = read.next;
        read.next = index.saturating_add(1);
        let place = PacketPlace::of(index == read.from, !read.is_pending());
        let len = memory.len();
        PacketHead::new(RoceOpcode::read_response(place), self.peer_qp, psn, len).put(packet);
        if place != PacketPlace::Middle {
            put_aeth(packet, Syndrome::Ack(CREDITS_UNLIMITED), read.msn);
        }
        put_list(packet, &memory, 0, len);
        put_pad(packet, len);
        Ok(true)
    }

    /// Drops what is left at the end of the connection, but for the last answer.
    pub(super) fn stop(&mut self) {
        self.incoming = None;
        self.reads.clear();
    }
}

fn put_reply(packet: &mut Vec<u8>, peer_qp: u32, reply: ResponderReply) {
    PacketHead::new(RoceOpcode::RC_ACKNOWLEDGE, peer_qp, reply.psn, 0).put(packet);
    put_aeth(packet, reply.syndrome, reply.msn);
}

/// Codes of the times to wait for a receive buffer: 0.64, 2.56, 10.24, 41 and 164 ms, then 655 ms.
const NOT_READY_TIMERS: [u8; 6] = [12, 16, 20, 24, 28, 0];
