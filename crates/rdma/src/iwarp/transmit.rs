//! Messages on their way out: ours in the order of their work, and answers to the peer's reads
//! between them.
//!
//! A message is cut into FPDUs one by one, as the outbox has room, and the next begins only behind
//! it: receivers follow one tagged message at a time.

use super::framing::Framer;
use super::pending::Transfer;
use super::setup::Rtr;
use super::wrong::Wrong;
use super::{Iwarp, OUTBOX_FULL, OUTBOX_FULL_OF_COPIES, Phase};
use blockmux_proto::outbox::Outbox;
use blockmux_proto::rdma::{MessageHead, Remote, RemoteRights, Stag, WorkId, WorkRequest};
use blockmux_volume::SgList;
use blockmux_wire::iwarp::ddp::{
    Control, FLAG_LAST, FLAG_TAGGED, QUEUE_READ, QUEUE_SEND, TAGGED_LEN, Tagged, UNTAGGED_LEN, Untagged,
};
use blockmux_wire::iwarp::rdmap::{READ_REQUEST_LEN, RdmapOpcode, ReadRequest};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes, U32, U64, transmute};

/// The whole sending side.
pub(super) struct Transmitter {
    pub(super) framer: Framer,
    /// The passive side has to hear something first.
    pub(super) may_send: bool,
    /// Bytes that went into the outbox, in all.
    pushed: u64,
    current: Option<Outgoing>,
    /// Whether that is of our work, and no answer.
    is_work: bool,
    /// Reads of the peer that wait for their answer.
    asked: VecDeque<Asked>,
    /// Messages and Read Requests so far.
    sends: u32,
    reads: u32,
}

/// A Read Request of the peer: the whole segment.
pub(super) type Asked = [u8; UNTAGGED_LEN + READ_REQUEST_LEN];

/// A message that is being cut.
struct Outgoing {
    header: Header,
    /// What is left of its head, from `head_at` on.
    head: MessageHead,
    head_at: usize,
    /// What is left of its payload, from the byte `seg_at` of the piece `seg` on.
    payload: SgList,
    seg: usize,
    seg_at: usize,
    /// In bytes, of head and payload.
    left: usize,
}

/// Of the next FPDU.
enum Header {
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
            asked: VecDeque::new(),
            sends: 0,
            reads: 0,
        }
    }

    /// So many bytes went into the outbox.
    #[inline]
    pub(super) fn count(&mut self, bytes: usize) {
        self.pushed = self.pushed.wrapping_add(bytes as u64);
    }

    /// How many bytes have left the outbox, in all.
    #[inline]
    pub(super) fn sent(&self, outbox: &Outbox) -> u64 {
        self.pushed.wrapping_sub(outbox.len() as u64)
    }

    /// Whether no message is begun, and no read unanswered.
    pub(super) fn is_idle(&self) -> bool {
        self.current.is_none() && self.asked.is_empty()
    }

    /// How many reads of the peer wait for their answer, or for its end.
    pub(super) fn asked(&self) -> usize {
        let answering = self.current.is_some() && !self.is_work;
        self.asked.len().saturating_add(answering.into())
    }

    /// Takes a read of the peer, which was checked.
    pub(super) fn ask(&mut self, request: Asked) {
        self.asked.push_back(request);
    }

    /// The connection is over.
    pub(super) fn stop(&mut self) {
        self.current = None;
        self.asked.clear();
    }

    /// Puts the next FPDU of the current message into the outbox; whether that was the last.
    #[inline]
    fn cut(&mut self, outbox: &mut Outbox) -> bool {
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

impl Header {
    #[inline]
    fn len(&self) -> usize {
        match self {
            Header::Tagged(..) => TAGGED_LEN,
            Header::Untagged { .. } => UNTAGGED_LEN,
        }
    }

    /// As it goes on the wire: the first [`Header::len`] bytes.
    #[inline]
    fn on_wire(&self, last: u8) -> [u8; UNTAGGED_LEN] {
        match self {
            Header::Tagged(opcode, stag, to) => {
                let mut bytes = [0; UNTAGGED_LEN];
                if let Some(place) = bytes.first_chunk_mut::<TAGGED_LEN>() {
                    *place = tagged(last, *opcode, *stag, *to);
                }
                bytes
            }
            Header::Untagged { opcode, invalidate, msn, mo } => {
                untagged(last, *opcode, *invalidate, *msn, *mo)
            }
        }
    }

    #[inline]
    fn advance(&mut self, len: usize) {
        match self {
            Header::Tagged(.., to) => *to = to.wrapping_add(len as u64),
            // A message is shorter than 4 GiB.
            Header::Untagged { mo, .. } => *mo = mo.wrapping_add(len as u32),
        }
    }
}

impl Outgoing {
    #[inline]
    fn new(header: Header, head: MessageHead, payload: SgList) -> Outgoing {
        let left = head.len().saturating_add(payload.len());
        Outgoing { header, head, head_at: 0, payload, seg: 0, seg_at: 0, left }
    }

    /// Puts the next `len` bytes.
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
                framer.put_seg(outbox, &seg.slice(self.seg_at, here));
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
    /// Whether more may go into the outbox.
    #[inline]
    fn has_room_to_send(&self) -> bool {
        let full = if self.transmitter.framer.looks_at_bytes() { OUTBOX_FULL_OF_COPIES } else { OUTBOX_FULL };
        self.outbox.len() < full
    }

    /// Moves what can be moved into the outbox.
    #[inline]
    pub(super) fn transmit(&mut self) {
        if !self.transmitter.may_send || !matches!(self.phase, Phase::Connected | Phase::Leaving) {
            return;
        }
        while self.has_room_to_send() {
            if self.transmitter.current.is_none() && !self.begin_next() {
                return;
            }
            if self.transmitter.cut(&mut self.outbox) {
                self.end_message();
            }
        }
    }

    /// Puts a send that fits in one FPDU, or a write, into the outbox if it has nothing before it,
    /// as most have; whether it could. What waits, or is a longer message, is moved from place to
    /// place until it is sent.
    #[inline]
    pub(super) fn transmit_at_once(&mut self, work: &WorkRequest) -> bool {
        match work {
            WorkRequest::Send { id, head, payload, invalidate, is_solicited } => {
                self.room() > 0
                    && self.send_whole(head, payload, *invalidate, *is_solicited)
                    && self.await_sent(*id, payload)
            }
            WorkRequest::Write { id, local, remote } => {
                self.room() > 0 && self.write_whole(local, *remote) && self.await_sent(*id, local)
            }
            _ => false,
        }
    }

    /// Puts a write into the outbox that has nothing before it; whether it could.
    pub(super) fn write_whole(&mut self, local: &SgList, remote: Remote) -> bool {
        if local.len() > remote.len as usize {
            return false;
        }
        let header = tagged(FLAG_LAST, RdmapOpcode::RDMA_WRITE, remote.stag, remote.address);
        self.transmit_whole(&header, &[], local) || self.write_in_pieces(local, remote)
    }

    /// Puts a write into the outbox that takes several FPDUs and has nothing before it; whether it
    /// could. Payload that is copied is moved piece by piece instead, as the outbox has room.
    fn write_in_pieces(&mut self, local: &SgList, remote: Remote) -> bool {
        let before = self.outbox.len();
        let framer = &mut self.transmitter.framer;
        let fits = !framer.looks_at_bytes() && before.saturating_add(local.len()) <= OUTBOX_FULL;
        let room = framer.room(TAGGED_LEN);
        if !fits || room == 0 || !self.is_clear() {
            return false;
        }
        let mut at: usize = 0;
        while at < local.len() {
            let here = local.len().saturating_sub(at).min(room);
            let end = at.saturating_add(here);
            let last = if end == local.len() { FLAG_LAST } else { 0 };
            let address = remote.address.wrapping_add(at as u64);
            let header = tagged(last, RdmapOpcode::RDMA_WRITE, remote.stag, address);
            self.transmitter.framer.put_whole(&mut self.outbox, &header, &[], &local.slice(at, here));
            at = end;
        }
        self.transmitter.count(self.outbox.len().saturating_sub(before));
        true
    }

    /// Whether a message may go into the outbox and has nothing before it.
    #[inline]
    fn is_clear(&self) -> bool {
        let transmitter = &self.transmitter;
        self.has_room_to_send() && transmitter.may_send && transmitter.is_idle() && self.pending.is_clear()
    }

    /// Puts the next message into the outbox, as [`Iwarp::transmit_whole`].
    ///
    /// Within a caller that chooses between a name and none, the compiler takes what was chosen
    /// apart into bits and puts them together again: 600 instructions for each message.
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

    /// Puts a message into the outbox that fits in one FPDU and has nothing before it; whether it
    /// could.
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

    /// What was just put into the outbox comes back once it is sent, or at once if nothing of it is
    /// referred to.
    #[inline]
    fn await_sent(&mut self, id: WorkId, payload: &SgList) -> bool {
        let is_referred_to = self.transmitter.framer.refers_to(payload);
        self.pending.post_sending(id, if is_referred_to { self.transmitter.pushed } else { 0 });
        true
    }

    /// Begins a message that has to be cut, if there is one: work and answers in turn.
    #[inline]
    fn begin_next(&mut self) -> bool {
        let is_answers_turn = self.transmitter.is_work;
        (is_answers_turn && self.begin_answer()) || self.begin_work() || self.begin_answer()
    }

    #[inline]
    fn begin_work(&mut self) -> bool {
        while self.has_room_to_send()
            && let Some(transfer) = self.pending.begin(self.agreement.ord)
        {
            let message = match transfer {
                Transfer::Send { head, payload, invalidate, is_solicited } => {
                    let opcode = send_opcode(invalidate, is_solicited);
                    self.transmitter.sends = self.transmitter.sends.wrapping_add(1);
                    let header = Header::Untagged { opcode, invalidate, msn: self.transmitter.sends, mo: 0 };
                    Outgoing::new(header, head, payload)
                }
                Transfer::Write { local, remote } => {
                    let header = Header::Tagged(RdmapOpcode::RDMA_WRITE, remote.stag, remote.address);
                    Outgoing::new(header, MessageHead::new(), local)
                }
                Transfer::Read { local, remote } => {
                    self.request_read(local, remote);
                    continue;
                }
            };
            (self.transmitter.current, self.transmitter.is_work) = (Some(message), true);
            return true;
        }
        false
    }

    /// Answers the oldest read of the peer. Its memory may have been closed since it was asked for.
    #[inline]
    fn begin_answer(&mut self) -> bool {
        let Some(asked) = self.transmitter.asked.pop_front() else { return false };
        let request = asked.get(UNTAGGED_LEN..).unwrap_or_default();
        let Ok(request) = ReadRequest::read_from_bytes(request) else { return false };
        let memory = match request.rdma_rd_sz.get() {
            0 => SgList::default(),
            len => {
                let stag = Stag(request.src_stag.get());
                match self.regions.look_up(stag, request.src_to.get(), len, RemoteRights::RemoteRead) {
                    Ok(memory) => memory,
                    Err(refusal) => {
                        let _ = self.terminate(Wrong::read(refusal), &asked, asked.len());
                        return false;
                    }
                }
            }
        };
        let sink = Stag(request.sink_stag.get());
        let header = Header::Tagged(RdmapOpcode::RDMA_READ_RESPONSE, sink, request.sink_to.get());
        (self.transmitter.current, self.transmitter.is_work) =
            (Some(Outgoing::new(header, MessageHead::new(), memory)), false);
        true
    }

    /// The last FPDU of the current message is in the outbox.
    #[inline]
    fn end_message(&mut self) {
        let message = self.transmitter.current.take();
        if self.transmitter.is_work {
            let framer = &self.transmitter.framer;
            let is_referred_to = message.is_some_and(|message| framer.refers_to(&message.payload));
            self.pending.end_current(if is_referred_to { self.transmitter.pushed } else { 0 });
        }
    }

    /// Asks the peer for data; what for stands last among the reads.
    #[inline]
    fn request_read(&mut self, local: SgList, remote: Remote) {
        let transmitter = &mut self.transmitter;
        transmitter.reads = transmitter.reads.wrapping_add(1);
        // Nobody but the answer to this read gets at its memory by that name: it is not registered.
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
        transmitter.framer.begin(&mut self.outbox, size_of::<Asked>(), header.as_bytes());
        transmitter.framer.put(&mut self.outbox, request.as_bytes());
        transmitter.framer.finish(&mut self.outbox, size_of::<Asked>());
        transmitter.count(self.outbox.len().saturating_sub(before));
        self.pending.await_read(msn, sink, local, remote.len);
    }

    /// Tells the passive side that it may send.
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

    /// The peer has accepted us and said nothing since. siw does not notice what comes right behind
    /// its answer until more comes: so here is more, a write of nothing.
    #[cold]
    pub(super) fn nudge(&mut self, now: Instant) {
        self.nudges = self.nudges.saturating_sub(1);
        let pause = NUDGE.saturating_mul(2_u32.saturating_pow(NUDGES.saturating_sub(self.nudges)));
        self.deadline = if self.nudges > 0 { now.checked_add(pause) } else { None };
        self.send_nothing();
    }

    /// Writes nothing to the peer, unless a message is half sent.
    #[cold]
    pub(super) fn send_nothing(&mut self) {
        if self.transmitter.current.is_none() {
            let header = Header::Tagged(RdmapOpcode::RDMA_WRITE, NOTHING.stag, NOTHING.address);
            self.transmitter.current = Some(Outgoing::new(header, MessageHead::new(), SgList::default()));
            self.transmitter.cut(&mut self.outbox);
            self.transmitter.current = None;
        }
    }
}

/// The header of a tagged segment.
#[inline]
fn tagged(last: u8, opcode: RdmapOpcode, stag: Stag, to: u64) -> [u8; TAGGED_LEN] {
    let control = Control::new(FLAG_TAGGED | last, opcode);
    transmute!(Tagged { control, stag: U32::new(stag.0), to: U64::new(to) })
}

/// That of a segment of a message.
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

/// What a message is called.
#[inline]
fn send_opcode(invalidate: Option<Stag>, is_solicited: bool) -> RdmapOpcode {
    match (invalidate, is_solicited) {
        (None, false) => RdmapOpcode::SEND,
        (None, true) => RdmapOpcode::SEND_WITH_SE,
        (Some(_), false) => RdmapOpcode::SEND_WITH_INVALIDATE,
        (Some(_), true) => RdmapOpcode::SEND_WITH_SE_AND_INVALIDATE,
    }
}

/// How long a peer may be silent that has accepted us, before it is nudged; each time twice as long
/// as the last.
pub(super) const NUDGE: Duration = Duration::from_millis(250);
pub(super) const NUDGES: u32 = 5;

/// Nothing is written or read there, so that no name is looked at; 0 may be a special one to
/// hardware.
const NOTHING: Remote = Remote { stag: Stag(1), address: 0, len: 0 };

/// In the names under which answers to our reads come.
const SINK: u32 = 1 << 31;
