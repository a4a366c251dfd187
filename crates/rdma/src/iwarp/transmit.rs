//! Sends messages: the session's work in the order of posting, alternating with responses to the
//! peer's RDMA Reads.
//!
//! A message is split into FPDUs as the outbox has room. The next message begins only after it,
//! because receivers handle one tagged message at a time.

use super::framing::Framer;
use super::pending::PostedTransfer;
use super::setup::Rtr;
use super::terminate::TerminateReason;
use super::{Iwarp, IwarpPhase, OUTBOX_FULL, OUTBOX_FULL_OF_COPIES};
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::rdma::{MessageHead, Remote, Stag, WorkId, WorkRequest};
use blockmux_volume::SgList;
use blockmux_wire::iwarp::ddp::{
    Control, FLAG_LAST, FLAG_TAGGED, QUEUE_READ, QUEUE_SEND, TAGGED_LEN, Tagged, UNTAGGED_LEN, Untagged,
};
use blockmux_wire::iwarp::rdmap::{READ_REQUEST_LEN, RdmapOpcode, ReadRequest};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes, U32, U64, transmute};

/// State of the sending side.
pub(super) struct Transmitter {
    pub(super) framer: Framer,
    /// Whether this side may send. The passive side may not before it has received an FPDU.
    pub(super) may_send: bool,
    /// Total number of bytes that went into the outbox.
    pushed: u64,
    current: Option<OutgoingMessage>,
    /// Whether `current` is the session's work and not a response.
    is_work: bool,
    /// RDMA Reads of the peer that wait for their response.
    pub(super) peer_reads: VecDeque<PeerReadRequest>,
    /// Number of Send messages sent so far.
    sends: u32,
    /// Number of Read Requests sent so far.
    reads: u32,
}

/// A Read Request of the peer: the whole segment, which a Terminate message may have to quote.
pub(super) type PeerReadRequest = [u8; UNTAGGED_LEN + READ_REQUEST_LEN];

/// A message that is being split into FPDUs.
struct OutgoingMessage {
    header: SegmentHeader,
    /// The head; the bytes from `head_at` on are still to be sent.
    head: MessageHead,
    head_at: usize,
    /// The payload; the bytes from byte `seg_at` of segment `seg` on are still to be sent.
    payload: SgList,
    seg: usize,
    seg_at: usize,
    /// Bytes of head and payload that are still to be sent.
    left: usize,
}

/// The DDP header of the next FPDU.
enum SegmentHeader {
    Tagged(RdmapOpcode, Stag, u64),
    Untagged { opcode: RdmapOpcode, invalidate: Option<Stag>, msn: u32, mo: u32 },
}

impl Transmitter {
    pub(super) fn new(framer: Framer) -> Transmitter {
        Transmitter {
            framer,
            may_send: false,
            pushed: 0,
            current: None,
            is_work: false,
            peer_reads: VecDeque::new(),
            sends: 0,
            reads: 0,
        }
    }

    /// Counts bytes that went into the outbox.
    #[inline]
    pub(super) fn count(&mut self, bytes: usize) {
        self.pushed = self.pushed.wrapping_add(bytes as u64);
    }

    /// Total number of bytes that have left the outbox.
    #[inline]
    pub(super) fn sent(&self, outbox: &Outbox) -> u64 {
        self.pushed.wrapping_sub(outbox.len() as u64)
    }

    /// Whether no message is in progress and no read is unanswered.
    pub(super) fn is_idle(&self) -> bool {
        self.current.is_none() && self.peer_reads.is_empty()
    }

    /// RDMA Reads of the peer that have not been answered completely.
    pub(super) fn unanswered_reads(&self) -> usize {
        let answering = self.current.is_some() && !self.is_work;
        self.peer_reads.len().saturating_add(answering.into())
    }

    /// Drops messages in progress at the end of the connection.
    pub(super) fn stop(&mut self) {
        self.current = None;
        self.peer_reads.clear();
    }

    /// Puts the next FPDU of the current message into the outbox; returns whether it was the last.
    #[inline]
    fn put_fpdu(&mut self, outbox: &mut Outbox) -> bool {
        let Some(message) = &mut self.current else { return false };
        let framer = &mut self.framer;
        let before = outbox.len();
        let len = message.left.min(framer.room(message.header.len()));
        let ulpdu = message.header.len().saturating_add(len);
        message.left = message.left.saturating_sub(len);
        let is_last = message.left == 0;
        let header = message.header.on_wire(if is_last { FLAG_LAST } else { 0 });
        framer.begin(outbox, ulpdu, header.get(..message.header.len()).unwrap_or_default());
        message.header.advance(len);
        message.put(framer, outbox, len);
        framer.finish(outbox, ulpdu);
        self.pushed = self.pushed.wrapping_add(outbox.len().saturating_sub(before) as u64);
        is_last
    }
}

impl SegmentHeader {
    #[inline]
    fn len(&self) -> usize {
        match self {
            SegmentHeader::Tagged(..) => TAGGED_LEN,
            SegmentHeader::Untagged { .. } => UNTAGGED_LEN,
        }
    }

    /// Encodes the header: the first [`SegmentHeader::len`] bytes.
    #[inline]
    fn on_wire(&self, last: u8) -> [u8; UNTAGGED_LEN] {
        match self {
            SegmentHeader::Tagged(opcode, stag, to) => {
                let mut bytes = [0; UNTAGGED_LEN];
                if let Some(place) = bytes.first_chunk_mut::<TAGGED_LEN>() {
                    *place = tagged(last, *opcode, *stag, *to);
                }
                bytes
            }
            SegmentHeader::Untagged { opcode, invalidate, msn, mo } => {
                untagged(last, *opcode, *invalidate, *msn, *mo)
            }
        }
    }

    #[inline]
    fn advance(&mut self, len: usize) {
        match self {
            SegmentHeader::Tagged(.., to) => *to = to.wrapping_add(len as u64),
            // A message is shorter than 4 GiB.
            SegmentHeader::Untagged { mo, .. } => *mo = mo.wrapping_add(len as u32),
        }
    }
}

impl OutgoingMessage {
    #[inline]
    fn new(header: SegmentHeader, head: MessageHead, payload: SgList) -> OutgoingMessage {
        let left = head.len().saturating_add(payload.len());
        OutgoingMessage { header, head, head_at: 0, payload, seg: 0, seg_at: 0, left }
    }

    /// Appends the next `len` bytes to the current FPDU.
    #[inline]
    fn put(&mut self, framer: &mut Framer, outbox: &mut Outbox, mut len: usize) {
        let head = self.head.get(self.head_at..).unwrap_or_default();
        let head = head.get(..head.len().min(len)).unwrap_or_default();
        if !head.is_empty() {
            framer.put(outbox, head);
            self.head_at = self.head_at.saturating_add(head.len());
            len = len.saturating_sub(head.len());
        }
        while let Some(seg) = self.payload.segs().get(self.seg) {
            let here = seg.len().saturating_sub(self.seg_at).min(len);
            if here > 0 {
                framer.put_seg(outbox, seg.slice(self.seg_at, here));
            }
            self.seg_at = self.seg_at.saturating_add(here);
            len = len.saturating_sub(here);
            if self.seg_at < seg.len() {
                return;
            }
            (self.seg, self.seg_at) = (self.seg.saturating_add(1), 0);
        }
    }
}

impl Iwarp {
    /// Whether more may be put into the outbox.
    #[inline]
    fn has_room_to_send(&self) -> bool {
        let full = if self.transmitter.framer.has_crc { OUTBOX_FULL_OF_COPIES } else { OUTBOX_FULL };
        self.outbox.len() < full
    }

    /// Puts posted work and responses into the outbox, as far as it has room.
    #[inline]
    pub(super) fn transmit(&mut self) {
        if !self.transmitter.may_send
            || !matches!(self.phase, IwarpPhase::Connected | IwarpPhase::Disconnecting)
        {
            return;
        }
        while self.has_room_to_send() {
            if self.transmitter.current.is_none() && !self.begin_next() {
                return;
            }
            if self.transmitter.put_fpdu(&mut self.outbox) {
                self.end_message();
            }
        }
    }

    /// Puts a send that fits one FPDU, or a write, into the outbox without queueing it, if nothing
    /// is queued before it; returns whether it could. Most work qualifies. Queued work costs
    /// several moves until it is sent.
    #[inline]
    pub(super) fn transmit_immediately(&mut self, work: &WorkRequest) -> bool {
        match work {
            WorkRequest::Send { id, head, payload, invalidate, is_solicited } => {
                self.room() > 0
                    && self.send_whole(head, payload, *invalidate, *is_solicited)
                    && self.await_transmission(*id, payload)
            }
            WorkRequest::Write { id, local, remote } => {
                self.room() > 0
                    && self.write_whole(local.clone(), *remote).is_ok()
                    && self.await_transmission(*id, local)
            }
            _ => false,
        }
    }

    /// Puts a write into the outbox if nothing is queued before it.
    ///
    /// # Errors
    /// The local memory, if it could not.
    pub(super) fn write_whole(&mut self, local: SgList, remote: Remote) -> Result<(), SgList> {
        let len = local.len();
        if len > remote.len as usize || !self.is_clear() {
            return Err(local);
        }
        if len > self.transmitter.framer.room(TAGGED_LEN) {
            return if self.write_in_pieces(&local, remote) { Ok(()) } else { Err(local) };
        }
        let (before, transmitter) = (self.outbox.len(), &mut self.transmitter);
        let header = tagged(FLAG_LAST, RdmapOpcode::RDMA_WRITE, remote.stag, remote.address);
        transmitter.framer.put_payload(&mut self.outbox, &header, local, len);
        transmitter.count(self.outbox.len().saturating_sub(before));
        Ok(())
    }

    /// Puts a write of several FPDUs into the outbox; returns whether it could. Payload that must
    /// be copied is queued and cut as the outbox has room. Nothing is queued before it.
    fn write_in_pieces(&mut self, local: &SgList, remote: Remote) -> bool {
        let before = self.outbox.len();
        let framer = &self.transmitter.framer;
        let fits = !framer.has_crc && before.saturating_add(local.len()) <= OUTBOX_FULL;
        let room = framer.room(TAGGED_LEN);
        if !fits || room == 0 {
            return false;
        }
        let mut at: usize = 0;
        while at < local.len() {
            let here = local.len().saturating_sub(at).min(room);
            let end = at.saturating_add(here);
            let last = if end == local.len() { FLAG_LAST } else { 0 };
            let address = remote.address.wrapping_add(at as u64);
            let header = tagged(last, RdmapOpcode::RDMA_WRITE, remote.stag, address);
            self.transmitter.framer.put_payload(&mut self.outbox, &header, local.slice(at, here), here);
            at = end;
        }
        self.transmitter.count(self.outbox.len().saturating_sub(before));
        true
    }

    /// Whether a message may go into the outbox and nothing is queued before it.
    #[inline]
    fn is_clear(&self) -> bool {
        let transmitter = &self.transmitter;
        self.has_room_to_send() && transmitter.may_send && transmitter.is_idle() && self.pending.is_clear()
    }

    /// Puts the next message into the outbox, under the conditions of [`Iwarp::transmit_whole`].
    ///
    /// Not inlined: in a caller that chooses between a tag and `None`, the compiler takes the
    /// option apart and reassembles it bit by bit, 600 instructions for each message.
    #[inline(never)]
    pub(super) fn send_whole(
        &mut self,
        head: &[u8],
        payload: &SgList,
        invalidate: Option<Stag>,
        is_solicited: bool,
    ) -> bool {
        let msn = self.transmitter.sends.wrapping_add(1);
        let header = untagged(FLAG_LAST, send_opcode(invalidate, is_solicited), invalidate, msn, 0);
        let is_sent = self.transmit_whole(&header, head, payload);
        if is_sent {
            self.transmitter.sends = msn;
        }
        is_sent
    }

    /// Puts a message into the outbox if it fits one FPDU and nothing is queued before it; returns
    /// whether it could.
    #[inline]
    fn transmit_whole<const N: usize>(&mut self, header: &[u8; N], head: &[u8], payload: &SgList) -> bool {
        let len = head.len().saturating_add(payload.len());
        if len > self.transmitter.framer.room(N) || !self.is_clear() {
            return false;
        }
        let (before, transmitter) = (self.outbox.len(), &mut self.transmitter);
        transmitter.framer.put_whole(&mut self.outbox, header, head, payload);
        transmitter.count(self.outbox.len().saturating_sub(before));
        true
    }

    /// Completes work that was just put into the outbox: once it is sent, or immediately if nothing
    /// of it is sent by reference.
    #[inline]
    fn await_transmission(&mut self, id: WorkId, payload: &SgList) -> bool {
        let is_referred_to = self.transmitter.framer.refers_to(payload);
        self.pending.post_transmitted(id, if is_referred_to { self.transmitter.pushed } else { 0 });
        true
    }

    /// Begins the next message, if there is one: work and responses alternate.
    #[inline]
    fn begin_next(&mut self) -> bool {
        let is_answers_turn = self.transmitter.is_work;
        (is_answers_turn && self.begin_answer()) || self.begin_work() || self.begin_answer()
    }

    #[inline]
    fn begin_work(&mut self) -> bool {
        while self.has_room_to_send()
            && let Some(transfer) = self.pending.begin(self.negotiated.ord)
        {
            let message = match transfer {
                PostedTransfer::Send { head, payload, invalidate, is_solicited } => {
                    let opcode = send_opcode(invalidate, is_solicited);
                    self.transmitter.sends = self.transmitter.sends.wrapping_add(1);
                    let header =
                        SegmentHeader::Untagged { opcode, invalidate, msn: self.transmitter.sends, mo: 0 };
                    OutgoingMessage::new(header, head, payload)
                }
                PostedTransfer::Write { local, remote } => {
                    let header = SegmentHeader::Tagged(RdmapOpcode::RDMA_WRITE, remote.stag, remote.address);
                    OutgoingMessage::new(header, MessageHead::new(), local)
                }
                PostedTransfer::Read { local, remote } => {
                    self.request_read(local, remote);
                    continue;
                }
            };
            (self.transmitter.current, self.transmitter.is_work) = (Some(message), true);
            return true;
        }
        false
    }

    /// Begins the response to the peer's oldest read. Its memory may have been invalidated since
    /// the request.
    #[inline]
    fn begin_answer(&mut self) -> bool {
        let Some(read) = self.transmitter.peer_reads.pop_front() else { return false };
        let request = read.get(UNTAGGED_LEN..).unwrap_or_default();
        let Ok(request) = ReadRequest::read_from_bytes(request) else { return false };
        let memory = match request.rdma_rd_sz.get() {
            0 => SgList::default(),
            len => {
                let stag = Stag(request.src_stag.get());
                match self.regions.look_up(stag, request.src_to.get(), len) {
                    Ok(memory) => memory,
                    Err(refusal) => {
                        let _ = self.terminate(TerminateReason::read(refusal), &read, read.len());
                        return false;
                    }
                }
            }
        };
        let sink = Stag(request.sink_stag.get());
        let header = SegmentHeader::Tagged(RdmapOpcode::RDMA_READ_RESPONSE, sink, request.sink_to.get());
        (self.transmitter.current, self.transmitter.is_work) =
            (Some(OutgoingMessage::new(header, MessageHead::new(), memory)), false);
        true
    }

    /// Ends the current message, whose last FPDU is in the outbox.
    #[inline]
    fn end_message(&mut self) {
        let message = self.transmitter.current.take();
        if self.transmitter.is_work {
            let framer = &self.transmitter.framer;
            let is_referred_to = message.is_some_and(|message| framer.refers_to(&message.payload));
            self.pending.finish_current(if is_referred_to { self.transmitter.pushed } else { 0 });
        }
    }

    /// Sends a Read Request for the read that was begun last.
    #[inline]
    fn request_read(&mut self, local: SgList, remote: Remote) {
        let transmitter = &mut self.transmitter;
        transmitter.reads = transmitter.reads.wrapping_add(1);
        // Only the response to this read can use this tag: its memory is not registered.
        let (msn, sink) = (transmitter.reads, transmitter.reads | SINK);
        let header = Untagged {
            control: Control::new(FLAG_LAST, RdmapOpcode::RDMA_READ_REQUEST),
            invalidate_stag: U32::new(0),
            qn: U32::new(QUEUE_READ),
            msn: U32::new(msn),
            mo: U32::new(0),
        };
        let request = ReadRequest {
            sink_stag: U32::new(sink),
            sink_to: U64::new(0),
            rdma_rd_sz: U32::new(remote.len),
            src_stag: U32::new(remote.stag.0),
            src_to: U64::new(remote.address),
        };
        let before = self.outbox.len();
        transmitter.framer.begin(&mut self.outbox, size_of::<PeerReadRequest>(), header.as_bytes());
        transmitter.framer.put(&mut self.outbox, request.as_bytes());
        transmitter.framer.finish(&mut self.outbox, size_of::<PeerReadRequest>());
        transmitter.count(self.outbox.len().saturating_sub(before));
        self.pending.await_read(msn, sink, local, remote.len);
    }

    /// Sends the RTR message.
    #[cold]
    pub(super) fn send_rtr(&mut self, rtr: Option<Rtr>) {
        match rtr {
            Some(Rtr::Write) => self.send_nothing(),
            Some(Rtr::Read) => {
                self.pending.begin_rtr();
                self.request_read(SgList::default(), NOTHING);
            }
            Some(Rtr::Send) | None => {}
        }
    }

    /// Sends a zero-length write to a peer that has accepted the connection and sent nothing since.
    /// siw does not notice an FPDU that arrives right behind its reply until more bytes arrive.
    #[cold]
    pub(super) fn nudge(&mut self, now: Instant) {
        self.nudges = self.nudges.saturating_sub(1);
        let pause = NUDGE_DELAY.saturating_mul(2_u32.saturating_pow(MAX_NUDGES.saturating_sub(self.nudges)));
        self.deadline = if self.nudges > 0 { now.checked_add(pause) } else { None };
        self.send_nothing();
    }

    /// Sends a zero-length write, unless a message is half sent.
    #[cold]
    pub(super) fn send_nothing(&mut self) {
        if self.transmitter.current.is_none() {
            let header = SegmentHeader::Tagged(RdmapOpcode::RDMA_WRITE, NOTHING.stag, NOTHING.address);
            self.transmitter.current =
                Some(OutgoingMessage::new(header, MessageHead::new(), SgList::default()));
            self.transmitter.put_fpdu(&mut self.outbox);
            self.transmitter.current = None;
        }
    }
}

/// Encodes the header of a tagged segment.
#[inline]
fn tagged(last: u8, opcode: RdmapOpcode, stag: Stag, to: u64) -> [u8; TAGGED_LEN] {
    let control = Control::new(FLAG_TAGGED | last, opcode);
    transmute!(Tagged { control, stag: U32::new(stag.0), to: U64::new(to) })
}

/// Encodes the header of an untagged segment of the send queue.
#[inline]
fn untagged(
    last: u8,
    opcode: RdmapOpcode,
    invalidate: Option<Stag>,
    msn: u32,
    mo: u32,
) -> [u8; UNTAGGED_LEN] {
    transmute!(Untagged {
        control: Control::new(last, opcode),
        invalidate_stag: U32::new(invalidate.map_or(0, |stag| stag.0)),
        qn: U32::new(QUEUE_SEND),
        msn: U32::new(msn),
        mo: U32::new(mo),
    })
}

/// The opcode of a Send message.
#[inline]
fn send_opcode(invalidate: Option<Stag>, is_solicited: bool) -> RdmapOpcode {
    match (invalidate, is_solicited) {
        (None, false) => RdmapOpcode::SEND,
        (None, true) => RdmapOpcode::SEND_WITH_SE,
        (Some(_), false) => RdmapOpcode::SEND_WITH_INVALIDATE,
        (Some(_), true) => RdmapOpcode::SEND_WITH_SE_AND_INVALIDATE,
    }
}

/// Time after which a peer that accepted and sent nothing is nudged; it doubles with each nudge.
pub(super) const NUDGE_DELAY: Duration = Duration::from_millis(250);
pub(super) const MAX_NUDGES: u32 = 5;

/// The remote address of zero-length transfers. Its tag is not checked, but 0 may have a special
/// meaning for hardware.
const NOTHING: Remote = Remote { stag: Stag(1), address: 0, len: 0 };

/// Bit that is set in the sink tags of this side's reads.
const SINK: u32 = 1 << 31;
