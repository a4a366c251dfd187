//! The server's transmission phase: requests in, I/O out, completions in, replies out (proto.md,
//! "Transmission").
//!
//! ```text
//!              ┌──────────────────── no payload ───────────────────┐
//!              ▼                                                   │
//!   ┌──────▶ Head ──── payload that is here, or short ──▶ Payload ─┤
//!   │          │ │                                                 ├─▶ in flight ─▶ reply
//!   │          │ └─ long payload ─▶ Memory ───▶ Place ─────────────┘
//!   │          │                 (pool empty) (straight from the socket)
//!   ├── Skip ◀─┤ refused, with payload
//!   └─ Pieces ◀┤ payload for several I/O
//!              └─ NBD_CMD_DISC ─▶ Over
//! ```
//! The volume borrows a payload from the receive buffer if it is complete there or at most 64 KiB
//! long. A longer payload gets memory from the pool, and the rest of it is received directly there.
//!
//! A flush covers the writes that were answered before it arrived. Those have completed, so the
//! volume's flush covers them.

use super::long_write::LongWrite;
use super::params::ServerParams;
use super::pending::{AdmittingRequest, PendingRequest, PendingTable};
use super::reply::{BASE_ALLOCATION_ID, ReplyAddress, ReplyWriter};
use super::request::{NbdRequest, NbdRequestRefusal};
use crate::driver::audit_event::AuditEvent;
use crate::driver::backoff::Backoff;
use crate::driver::outbox::Outbox;
use crate::driver::session::{Demand, ProtocolError};
use crate::driver::target::Charge;
use crate::exports::VolumeId;
use crate::multi_step::{MultiStepRequest, PIECE, RequestStep, enclosing_blocks, whole_blocks_within};
use crate::volume_state::{Admission, NotAdmitted, RequiredAccess};
use blockmux_volume::{
    Chunk, Completion, Cost, Io, IoError, Op, Output, Pool, SHORT_PAYLOAD, Seg, SgList, Tag,
};
use blockmux_wire::nbd::transmission::*;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::time::Instant;

/// State of the transmission phase with one client.
pub(super) struct ServerTransmission {
    /// The parameters that the handshake resulted in.
    pub(super) params: ServerParams,
    replies: ReplyWriter,
    awaiting: AwaitedRequest,
    pending: PendingTable,
    /// I/O that the driver has not taken yet.
    queue: VecDeque<Io>,
    admission: Admission,
    /// Why reservations refused a request; `None` once it is logged.
    complaint: Option<&'static str>,
    /// Data length of the request that waits for room, in bytes; 0 if none waits.
    waits_for: usize,
    pool: Pool,
    /// When to retry memory, in addition to every completion.
    retry: Backoff,
    stopping: bool,
    /// Another process will continue: no further request is taken.
    paused: bool,
}

/// What the next bytes of the client are.
enum AwaitedRequest {
    /// The head of a request.
    Head,
    /// The payload of a write, which the volume borrows once it is complete.
    Payload(PendingRequest),
    /// The payload of a block status, and its length in bytes.
    Query(NbdRequest, usize),
    /// The payload of a write that waits for memory from the pool.
    Memory(PendingRequest),
    /// The payload of a write, received directly into `data`.
    Place { write: PendingRequest, data: SgList },
    /// The payload of a refused request, which is discarded. The error is sent after it, where
    /// clients expect it.
    Skip { to: ReplyAddress, left: usize, refusal: NbdRequestRefusal },
    /// The payload of a write of several I/O.
    Pieces(Box<LongWrite>),
    /// Nothing: the session is over. The reason, until it is logged.
    Over(Option<&'static str>),
}

impl ServerTransmission {
    pub(super) fn new(
        params: ServerParams,
        admission: Admission,
        pool: Pool,
        now: Instant,
    ) -> ServerTransmission {
        ServerTransmission {
            replies: ReplyWriter::new(params.headers),
            params,
            awaiting: AwaitedRequest::Head,
            pending: PendingTable::default(),
            queue: VecDeque::new(),
            admission,
            complaint: None,
            waits_for: 0,
            pool,
            retry: Backoff::new(now),
            stopping: false,
            paused: false,
        }
    }

    /// Takes no further request. One whose payload is on its way is received whole.
    pub(super) fn pause(&mut self) {
        self.paused = true;
    }

    /// Whether the volume refuses the client's I/O for good.
    pub(super) fn is_fenced(&self) -> bool {
        self.admission.is_fenced()
    }

    /// Whether every request that was taken has its reply in the outbox.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.awaiting, AwaitedRequest::Head) && self.pending.is_empty() && self.queue.is_empty()
    }

    pub(super) fn demand(&self, outbox: &Outbox) -> Demand {
        if self.stopping && self.pending.is_empty() {
            return Demand::Close;
        }
        match &self.awaiting {
            AwaitedRequest::Head if self.paused => Demand::Nothing,
            AwaitedRequest::Head if self.has_room(self.waits_for, outbox) => {
                Demand::Bytes(self.params.headers.request_len())
            }
            AwaitedRequest::Head | AwaitedRequest::Memory(_) => Demand::Nothing,
            AwaitedRequest::Payload(write) => Demand::Bytes(write.length as usize),
            AwaitedRequest::Query(_, length) => Demand::Bytes(*length),
            AwaitedRequest::Skip { .. } => Demand::Bytes(1),
            AwaitedRequest::Place { data, .. } => Demand::Place(data.clone()),
            AwaitedRequest::Pieces(long) => long.demand(),
            AwaitedRequest::Over(_) => Demand::Close,
        }
    }

    /// Consumes complete messages from offset `at` on; returns the offset after the last one.
    #[inline]
    pub(super) fn on_bytes(
        &mut self,
        input: &Chunk,
        mut at: usize,
        now: Instant,
        outbox: &mut Outbox,
    ) -> Result<usize, ProtocolError> {
        self.retry.reset(now);
        while let Some(taken) = self.step(input, at, outbox)? {
            at = at.saturating_add(taken);
        }
        Ok(at)
    }

    /// The memory of [`Demand::Place`] is full.
    pub(super) fn on_placed(&mut self, outbox: &mut Outbox) {
        match std::mem::replace(&mut self.awaiting, AwaitedRequest::Head) {
            AwaitedRequest::Place { write, data } => self.start(write, Some(data), outbox),
            AwaitedRequest::Pieces(mut long) => {
                let piece = long.on_placed();
                self.awaiting = AwaitedRequest::Pieces(long);
                self.start_piece(piece, outbox);
            }
            other => self.awaiting = other,
        }
    }

    /// The client has closed its side, which is an error within a message.
    pub(super) fn on_end(&mut self) -> Result<(), ProtocolError> {
        match &mut self.awaiting {
            AwaitedRequest::Head => self.awaiting = AwaitedRequest::Over(None),
            AwaitedRequest::Over(_) => {}
            AwaitedRequest::Pieces(long) if long.is_received() => long.is_last = true,
            _ => {
                self.awaiting = AwaitedRequest::Over(None);
                return Err(ProtocolError {
                    what: "closed the connection in the middle of a request's payload",
                    reference: "proto.md, \"Terminating the transmission phase\"",
                });
            }
        }
        Ok(())
    }

    pub(super) fn on_stop(&mut self) {
        self.stopping = true;
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let wants_memory = match &self.awaiting {
            AwaitedRequest::Memory(_) => true,
            AwaitedRequest::Pieces(long) => long.wants_memory(),
            _ => false,
        };
        wants_memory.then_some(self.retry.at())
    }

    pub(super) fn on_timeout(&mut self, now: Instant) {
        self.retry.on_try(now);
        self.take_memory();
    }

    #[inline]
    pub(super) fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        self.queue.pop_front().map(|io| (self.params.volume, io))
    }

    #[inline]
    pub(super) fn poll_event(&mut self) -> Option<AuditEvent> {
        if let AwaitedRequest::Over(reason) = &mut self.awaiting
            && let Some(reason) = reason.take()
        {
            return Some(AuditEvent::Logout { reason });
        }
        let reason = self.complaint.take()?;
        Some(AuditEvent::RequestsRefused { volume: self.params.volume, reason })
    }

    #[inline]
    pub(super) fn on_io(&mut self, done: Completion, now: Instant, outbox: &mut Outbox) {
        self.retry.reset(now);
        match self.pending.remove(done.tag) {
            Some((request, None)) => self.replies.finish(outbox, &request, done.result),
            Some((request, Some(steps))) => self.advance(request, steps, done.result, outbox),
            None => debug_assert!(false, "{:?} completed but is not in flight", done.tag),
        }
        // The completed request may have returned memory to the pool.
        self.take_memory();
    }

    /// Whether a request with `data_len` bytes of data may be accepted now. When the core's pool is
    /// short, each client gets a small share of it, or one request at a time. One that gets
    /// [`ALL_ROOM`] has no other beside it.
    #[inline]
    fn has_room(&self, data_len: usize, outbox: &Outbox) -> bool {
        let payload = self.pending.payload().saturating_add(outbox.len()).saturating_add(data_len);
        let is_alone = self.pending.is_empty() && outbox.is_empty();
        self.pending.len() < DEPTH as usize
            && (payload <= SHORT_PAYLOAD
                || data_len == ALL_ROOM && is_alone
                || payload <= PAYLOAD_IN_FLIGHT
                    && (is_alone || payload <= self.pool.peer_share() && !self.pool.is_short()))
            && self.replies.has_room(outbox)
    }

    /// Consumes one message or a part of a payload; returns the number of bytes. `None`: it needs
    /// more bytes, room or memory.
    #[inline]
    fn step(
        &mut self,
        input: &Chunk,
        at: usize,
        outbox: &mut Outbox,
    ) -> Result<Option<usize>, ProtocolError> {
        let unread = input.unread().get(at..).unwrap_or_default();
        match &mut self.awaiting {
            AwaitedRequest::Head if self.paused => Ok(None),
            AwaitedRequest::Head => {
                let Some(request) = NbdRequest::parse(self.params.headers, unread)? else { return Ok(None) };
                let data_len = request.data_len(&self.params);
                if !self.has_room(data_len, outbox) {
                    // An invalid request is refused now, without waiting for room.
                    request.payload_len(&self.params)?;
                    self.waits_for = data_len;
                    return Ok(None);
                }
                self.waits_for = 0;
                let head_len = self.params.headers.request_len();
                let (after, here) = (at.saturating_add(head_len), unread.len().saturating_sub(head_len));
                let taken = self.on_request(request, here, |length| input.slice(after, length), outbox)?;
                Ok(Some(head_len.saturating_add(taken)))
            }
            AwaitedRequest::Payload(write) => {
                let (write, length) = (*write, write.length as usize);
                if unread.len() < length {
                    return Ok(None);
                }
                self.awaiting = AwaitedRequest::Head;
                self.start(write, Some(input.slice(at, length).into()), outbox);
                Ok(Some(length))
            }
            AwaitedRequest::Query(request, length) => {
                let (request, length) = (*request, *length);
                let Some(payload) = unread.get(..length) else { return Ok(None) };
                self.awaiting = AwaitedRequest::Head;
                self.on_query(request, payload, outbox);
                Ok(Some(length))
            }
            AwaitedRequest::Skip { to, left, refusal } => {
                let taken = unread.len().min(*left);
                *left = left.saturating_sub(taken);
                if *left > 0 {
                    return Ok((taken > 0).then_some(taken));
                }
                self.replies.refuse(outbox, *to, refusal);
                self.awaiting = AwaitedRequest::Head;
                Ok(Some(taken))
            }
            AwaitedRequest::Pieces(long) => {
                let discarded = long.discard(unread.len());
                if discarded == 0 {
                    return Ok(None);
                }
                self.finish_long(outbox);
                Ok(Some(discarded))
            }
            AwaitedRequest::Memory(_) | AwaitedRequest::Place { .. } | AwaitedRequest::Over(_) => Ok(None),
        }
    }

    /// Handles the head of a request; `here` bytes after it are in the receive buffer, and `borrow`
    /// returns the first of them. Returns how many of them were consumed: all of a short payload
    /// that has arrived.
    #[inline]
    fn on_request(
        &mut self,
        request: NbdRequest,
        here: usize,
        borrow: impl FnOnce(usize) -> Seg,
        outbox: &mut Outbox,
    ) -> Result<usize, ProtocolError> {
        if request.command == Cmd::NBD_CMD_DISC {
            self.awaiting = AwaitedRequest::Over(Some("the client disconnected"));
            return Ok(0);
        }
        let length = request.payload_len(&self.params)?;
        if length == 0 {
            self.perform(&request, outbox);
            return Ok(0);
        }
        let skip = |refusal| AwaitedRequest::Skip { to: request.address(), left: length, refusal };
        self.awaiting = if request.has_payload_form(&self.params) {
            match length {
                QUERY_OF_NONE | QUERY_OF_ONE => AwaitedRequest::Query(request, length),
                _ => skip(NbdRequestRefusal::invalid("more metadata contexts than there are")),
            }
        } else {
            match request.accept(&self.params) {
                Err(refusal) => skip(refusal),
                Ok(write) if request.is_long(&self.params) => self.awaits_pieces(write),
                Ok(write) if length <= here => {
                    self.start(write, Some(borrow(length).into()), outbox);
                    return Ok(length);
                }
                Ok(write) if length <= MAX_BORROWED_PAYLOAD => AwaitedRequest::Payload(write),
                // The pool can never hold that much, so waiting would not end.
                Ok(_) if !self.pool.could_hold(length) => skip(NO_MEMORY),
                Ok(write) => AwaitedRequest::Memory(write),
            }
        };
        self.take_memory();
        Ok(0)
    }

    /// Handles the payload of a block status: the length, then the ids of metadata contexts.
    fn on_query(&mut self, request: NbdRequest, payload: &[u8], outbox: &mut Outbox) {
        let (length, ids) = payload.split_first_chunk().unwrap_or((&[0; 8], &[]));
        let flags = request.flags.difference(CmdFlags::PAYLOAD_LEN);
        let request = NbdRequest { flags, length: u64::from_be_bytes(*length), ..request };
        if *ids == BASE_ALLOCATION_ID.to_be_bytes() {
            return self.perform(&request, outbox);
        }
        // Without a context no status is sent, but the range must still be valid.
        match request.accept(&self.params) {
            Err(refusal) => self.replies.refuse(outbox, request.address(), &refusal),
            Ok(query) if ids.is_empty() => self.replies.success(outbox, query.address()),
            Ok(query) => self.replies.refuse(
                outbox,
                query.address(),
                &NbdRequestRefusal::invalid("a metadata context that was not selected"),
            ),
        }
    }

    /// Starts or refuses a request without payload, or one whose payload has been received.
    #[inline]
    fn perform(&mut self, request: &NbdRequest, outbox: &mut Outbox) {
        match request.accept(&self.params) {
            Ok(accepted) => self.start(accepted, None, outbox),
            Err(refusal) => self.replies.refuse(outbox, request.address(), &refusal),
        }
    }

    /// Adds a request to the table and submits its I/O, or refuses it when the server is stopping.
    #[inline]
    fn start(&mut self, accepted: PendingRequest, data: Option<SgList>, outbox: &mut Outbox) {
        let PendingRequest { offset, length, op, .. } = accepted;
        if self.stopping {
            self.replies.refuse(outbox, accepted.address(), &STOPPING);
            return;
        }
        if !accepted.is_one_io {
            return self.start_steps(accepted, data, outbox);
        }
        if length == 0 && op != Op::Flush {
            return self.finish_empty(&accepted, outbox);
        }
        let tag = self.pending.insert(accepted, None);
        self.queue.push_back(Io { tag, op, offset, len: length, data });
    }

    /// Starts a request of any alignment. A hint covers the enclosing blocks, a trim those within
    /// its range.
    #[cold]
    fn start_steps(&mut self, accepted: PendingRequest, data: Option<SgList>, outbox: &mut Outbox) {
        let PendingRequest { offset, length, op, .. } = accepted;
        let (end, block) = (accepted.end(), self.params.block());
        let (offset, len) = match op {
            _ if length == 0 => (offset, 0),
            Op::Discard { .. } => whole_blocks_within(offset, end, block),
            Op::Prefetch => enclosing_blocks(offset, end, block),
            _ => {
                let steps = MultiStepRequest::new(&accepted.bytes(), data, block, &self.admission);
                return self.next_step(accepted, Box::new(steps));
            }
        };
        if len == 0 {
            return self.finish_empty(&accepted, outbox);
        }
        let tag = self.pending.insert(accepted, None);
        self.queue.push_back(Io::new(tag, op, offset, len));
    }

    /// Submits the next I/O of a request.
    fn next_step(&mut self, request: PendingRequest, mut steps: Box<MultiStepRequest>) {
        let io = steps.next(&request.bytes(), &self.admission);
        let tag = self.pending.insert(request, Some(steps));
        self.queue.push_back(Io { tag, ..io });
    }

    /// Handles the completion of an I/O of a request with several.
    #[cold]
    fn advance(
        &mut self,
        request: PendingRequest,
        mut steps: Box<MultiStepRequest>,
        result: Result<Output, IoError>,
        outbox: &mut Outbox,
    ) {
        let to = request.address();
        match steps.on_io(&request.bytes(), result) {
            RequestStep::Next => self.next_step(request, steps),
            RequestStep::SendPart(at, data) => {
                self.replies.part(outbox, to, at, data, false);
                self.next_step(request, steps);
            }
            RequestStep::SendLast(at, data) => self.replies.part(outbox, to, at, data, true),
            RequestStep::Done(result) => self.finish_steps(&request, &steps, result, outbox),
        }
    }

    /// Replies to a request of several I/O. A simple reply that has begun cannot report an error:
    /// the session ends.
    fn finish_steps(
        &mut self,
        request: &PendingRequest,
        steps: &MultiStepRequest,
        result: Result<Output, IoError>,
        outbox: &mut Outbox,
    ) {
        if steps.is_piece {
            let written = result.map(drop);
            let written = written.map_err(|error| NbdRequestRefusal::of_io_error(error, request.op));
            self.on_piece(written, outbox);
        } else if result.is_err() && steps.has_sent(&request.bytes()) && !self.replies.can_fail_later() {
            outbox.clear();
            self.awaiting = AwaitedRequest::Over(Some("a read failed after a part of its data was sent"));
        } else {
            self.replies.finish(outbox, request, result);
        }
    }

    /// What to wait for after the head of a long write.
    #[cold]
    fn awaits_pieces(&self, write: PendingRequest) -> AwaitedRequest {
        let mut long = LongWrite::new(write, self.params.block());
        if !self.pool.could_hold(PIECE as usize) {
            long.fail(NO_MEMORY);
        }
        AwaitedRequest::Pieces(Box::new(long))
    }

    /// Writes a piece of a long write whose payload is complete, if the write has not failed.
    #[cold]
    fn start_piece(&mut self, piece: Option<(PendingRequest, SgList)>, outbox: &mut Outbox) {
        match piece {
            Some(_) if self.stopping => return self.on_piece(Err(STOPPING), outbox),
            Some((piece, data)) => {
                let mut steps =
                    MultiStepRequest::new(&piece.bytes(), Some(data), self.params.block(), &self.admission);
                steps.is_piece = true;
                self.next_step(piece, Box::new(steps));
            }
            None => {}
        }
        self.take_memory();
        self.finish_long(outbox);
    }

    /// Records the result of writing a piece of the long write, and replies if it was the last.
    fn on_piece(&mut self, written: Result<(), NbdRequestRefusal>, outbox: &mut Outbox) {
        // The connection may have ended meanwhile.
        if let AwaitedRequest::Pieces(long) = &mut self.awaiting {
            long.on_written(written);
            self.take_memory();
            self.finish_long(outbox);
        }
    }

    /// Replies to the long write if it is over.
    fn finish_long(&mut self, outbox: &mut Outbox) {
        let AwaitedRequest::Pieces(long) = &self.awaiting else { return };
        let to = long.write.address();
        match long.result() {
            Some(Ok(())) => self.replies.success(outbox, to),
            Some(Err(refusal)) => self.replies.refuse(outbox, to, refusal),
            None => return,
        }
        self.awaiting = if long.is_last { AwaitedRequest::Over(None) } else { AwaitedRequest::Head };
    }

    pub(super) fn charge(&mut self, io: &Io) -> Charge {
        let range = self.pending.admitting(io.tag).and_then(|request| request.range);
        Charge { cost: range.map_or_else(|| Cost::of(io), |range| range.cost()), station: None }
    }

    /// Admits an I/O, or refuses its request because of a reservation or because the volume was
    /// removed.
    #[inline]
    pub(super) fn begin(&mut self, io: &Io, outbox: &mut Outbox) -> Result<(), NotAdmitted<IoError>> {
        let Some(AdmittingRequest { guard, range }) = self.pending.admitting(io.tag) else {
            return Err(NotAdmitted::Denied(IoError::Aborted));
        };
        match self.admission.admit(io.op, (io.offset, io.len), RequiredAccess::of(io.op), range) {
            Ok(admitted) => *guard = admitted,
            Err(NotAdmitted::Denied(error)) => {
                self.finish_denied(io.tag, error, outbox);
                return Err(NotAdmitted::Denied(error));
            }
            Err(wait) => return Err(wait),
        }
        Ok(())
    }

    /// Refuses a request that the volume does not admit.
    #[cold]
    fn finish_denied(&mut self, tag: Tag, error: IoError, outbox: &mut Outbox) {
        self.complaint = self.admission.complaint().or(self.complaint);
        match self.pending.remove(tag) {
            Some((request, None)) => self.replies.finish(outbox, &request, Err(error)),
            Some((request, Some(steps))) => self.finish_steps(&request, &steps, Err(error), outbox),
            None => {}
        }
    }

    /// Answers a request for which the volume has nothing to do.
    #[cold]
    fn finish_empty(&mut self, request: &PendingRequest, outbox: &mut Outbox) {
        match self.admission.check(RequiredAccess::of(request.op)) {
            Err(error) => {
                self.complaint = self.admission.complaint().or(self.complaint);
                self.replies.finish(outbox, request, Err(error));
            }
            Ok(()) if request.op == Op::Read => self.replies.no_data(outbox, request.address()),
            Ok(()) => self.replies.success(outbox, request.address()),
        }
    }

    /// Takes memory from the pool for the payload that waits for it, if the pool has enough.
    #[inline]
    pub(super) fn take_memory(&mut self) {
        if matches!(self.awaiting, AwaitedRequest::Memory(_) | AwaitedRequest::Pieces(_)) {
            self.take_awaited_memory();
        }
    }

    #[inline(never)]
    fn take_awaited_memory(&mut self) {
        match &mut self.awaiting {
            AwaitedRequest::Memory(write) => {
                let length = write.length as usize;
                if let Some(memory) = self.pool.take_payload_or_wait(length) {
                    let data = memory.seg(0, length).into();
                    self.awaiting = AwaitedRequest::Place { write: *write, data };
                }
            }
            AwaitedRequest::Pieces(long) if long.wants_memory() => {
                let length = long.piece().length as usize;
                let memory = self.pool.take_payload_or_wait(length);
                memory.iter().for_each(|memory| long.place(memory.seg(0, length).into()));
            }
            _ => {}
        }
    }
}

impl NbdRequest {
    #[inline]
    fn address(&self) -> ReplyAddress {
        ReplyAddress { cookie: self.cookie, offset: self.offset }
    }
}

const STOPPING: NbdRequestRefusal =
    NbdRequestRefusal { errno: Errno::NBD_ESHUTDOWN, text: Cow::Borrowed("the server is stopping") };
const NO_MEMORY: NbdRequestRefusal = NbdRequestRefusal {
    errno: Errno::NBD_ENOMEM,
    text: Cow::Borrowed("more data than the server's buffers hold"),
};

/// The maximum number of requests of one session in flight.
pub(super) const DEPTH: u32 = 1024;

/// The maximum data of one session in flight, in bytes, including the outbox. More than any one
/// request.
const PAYLOAD_IN_FLIGHT: usize = 64 << 20;

/// The data of a request that runs alone: more than others could have beside it.
pub(super) const ALL_ROOM: usize = PAYLOAD_IN_FLIGHT + 1;

/// A payload of up to this many bytes is completed in the receive buffer and borrowed from there:
/// one large receive for many requests costs less than a receive for each. At most `MAX_DEMAND`.
const MAX_BORROWED_PAYLOAD: usize = 64 << 10;

/// Length of a block status payload without a context id, in bytes.
const QUERY_OF_NONE: usize = size_of::<u64>();

/// Length of a block status payload with one context id, in bytes.
const QUERY_OF_ONE: usize = size_of::<u64>() + size_of::<u32>();
