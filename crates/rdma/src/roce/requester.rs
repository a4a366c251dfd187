//! The requester: sends, writes and reads of this side, until the peer has acknowledged them.
//!
//! ```text
//!   queue:  │ acknowledged, removed │ in flight      │ begun, to be sent again │ not begun │
//!   PSN:                            ^ unacknowledged ^ next                    ^ end
//! ```
//! Every packet has a sequence number. A read has as many as its response has packets, and the
//! response carries them. Acknowledgements are cumulative, so work completes in the order of
//! posting. If a packet is lost, the peer discards everything behind it, and everything from it on
//! is sent again (go-back-N, volume 1, §9.7.5.1): `next` goes back to `unacknowledged`.
//!
//! # Why packets are sent again
//! - A negative acknowledgement: the peer misses a packet (PSN sequence error), or had no receive
//!   buffer (RNR), for which it names a time to wait.
//! - An acknowledgement or a response that comes before the data of an earlier read: the response
//!   was lost. This counts once for each point to go back to, because all packets that are still on
//!   their way say the same.
//! - A timeout, which follows the times of answers ([`RoundTrip`]). It doubles each time, and
//!   [`RETRIES`] of them without progress end the connection.

use super::cm::RoceTerms;
use super::encode::{PacketHead, put_list, put_pad};
use super::psn::{HALF, Psn, packets};
use super::round_trip::RoundTrip;
use crate::queue_pair::Violation;
use blockmux_proto::rdma::{Event, MESSAGE, MessageHead, Remote, Stag, WorkError, WorkId};
use blockmux_volume::SgList;
use blockmux_wire::roce::eth::{Aeth, NakCode, Reth, Syndrome, rnr_timer_us};
use blockmux_wire::roce::opcode::{PacketPlace, RoceOpcode};
use blockmux_wire::roce::packet::RocePacket;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use zerocopy::{IntoBytes, U32, U64};

/// State of the requester.
pub(super) struct Requester {
    peer_qp: u32,
    /// Payload of a full packet, in bytes.
    mtu: u16,
    /// RDMA Reads that may be in flight.
    pub(super) reads: u32,
    /// Packets that may be in flight.
    window: u32,
    /// Posted work in order, from the oldest that is not acknowledged.
    queue: VecDeque<PostedRequest>,
    /// How much of the queue has sequence numbers.
    begun: usize,
    /// Index in the queue of the work that `next` belongs to.
    at: usize,
    /// RDMA Reads that have sequence numbers and have not completed.
    reads_in_flight: u32,
    unacknowledged: Psn,
    next: Psn,
    end: Psn,
    /// Bytes of payload from `unacknowledged` to `next`.
    in_flight: usize,
    /// Packets, and bytes of payload, sent since an acknowledgement was last requested.
    unrequested: (u32, usize),
    round_trip: RoundTrip,
    /// Whether there is a probe in the queue.
    is_probing: bool,
    /// Where a lost response has made this side go back to.
    went_back_to: Option<Psn>,
    retries: u32,
    /// How often the peer had no receive buffer since the last progress, and how often it may.
    not_ready: u8,
    not_ready_limit: u8,
    /// When unacknowledged packets count as lost.
    lost_at: Option<Instant>,
    /// Until when nothing is sent, because the peer had no receive buffer.
    wait_until: Option<Instant>,
}

/// What work transfers.
pub(super) enum RequestedTransfer {
    Send {
        head: MessageHead,
        payload: SgList,
        invalidate: Option<Stag>,
        is_solicited: bool,
    },
    Read {
        local: SgList,
        remote: Remote,
    },
    Write {
        local: SgList,
        remote: Remote,
    },
    /// An empty write, which asks whether the peer is still there.
    Probe,
}

impl RequestedTransfer {
    /// Length in bytes; of a read, that of its response.
    fn len(&self) -> usize {
        match self {
            RequestedTransfer::Send { head, payload, .. } => head.len().saturating_add(payload.len()),
            RequestedTransfer::Read { local, .. } | RequestedTransfer::Write { local, .. } => local.len(),
            RequestedTransfer::Probe => 0,
        }
    }

    fn is_read(&self) -> bool {
        matches!(self, RequestedTransfer::Read { .. })
    }
}

struct PostedRequest {
    id: WorkId,
    transfer: RequestedTransfer,
    len: u32,
    /// The first sequence number, and how many there are; unset until it has begun.
    first: Psn,
    packets: u32,
}

impl PostedRequest {
    fn last(&self) -> Psn {
        self.first.plus(self.packets).previous()
    }

    /// Offset of the payload of the packet with this number; the length, behind the last one.
    fn offset(&self, psn: Psn, mtu: u16) -> usize {
        psn.since(self.first).saturating_mul(mtu.into()).min(self.len) as usize
    }

    /// Offset and length of the payload of the packet with this number.
    fn part(&self, psn: Psn, mtu: u16) -> (usize, usize) {
        let offset = self.offset(psn, mtu);
        (offset, (self.len as usize).saturating_sub(offset).min(mtu.into()))
    }
}

/// Why the requester ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequesterEnd {
    /// The peer does not answer.
    Lost,
    /// The peer has refused work, as a violation by this side.
    Refused(Violation),
    /// A response of the peer breaks the protocol.
    PeerViolation,
}

impl Requester {
    pub(super) fn new(window: u32) -> Requester {
        let first = Psn::default();
        Requester {
            peer_qp: 0,
            mtu: 0,
            reads: 0,
            window: window.clamp(1, MAX_WINDOW),
            queue: VecDeque::new(),
            begun: 0,
            at: 0,
            reads_in_flight: 0,
            unacknowledged: first,
            next: first,
            end: first,
            in_flight: 0,
            unrequested: (0, 0),
            round_trip: RoundTrip::default(),
            is_probing: false,
            went_back_to: None,
            retries: 0,
            not_ready: 0,
            not_ready_limit: 0,
            lost_at: None,
            wait_until: None,
        }
    }

    /// Sets what both sides have agreed on.
    pub(super) fn connect(&mut self, terms: &RoceTerms) {
        (self.peer_qp, self.mtu, self.reads) = (terms.peer_qp, terms.mtu, terms.reads);
        self.not_ready_limit = terms.not_ready_limit;
        let first = terms.first_psn;
        (self.unacknowledged, self.next, self.end) = (first, first, first);
    }

    /// Number of sends, reads and writes that have not completed.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.queue.len().saturating_sub(self.is_probing.into())
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// Payload of a full packet, in bytes.
    pub(super) fn mtu(&self) -> usize {
        self.mtu.into()
    }

    /// How often the peer has had no receive buffer since the last progress.
    #[cfg(test)]
    pub(super) fn not_ready(&self) -> u8 {
        self.not_ready
    }

    /// Appends work, which is shorter than 4 GiB.
    #[inline]
    pub(super) fn post(&mut self, id: WorkId, transfer: RequestedTransfer) {
        let len = transfer.len() as u32;
        self.queue.push_back(PostedRequest { id, transfer, len, first: Psn::default(), packets: 0 });
    }

    /// Asks whether the peer is still there, if nothing else does. A peer that does not answer ends
    /// the connection, as with any request.
    pub(super) fn probe(&mut self) {
        if self.is_idle() {
            self.is_probing = true;
            self.post(MESSAGE, RequestedTransfer::Probe);
        }
    }

    /// Appends the next packet to `packet`; returns whether there is one that may be sent now. If a
    /// pause follows, the packet requests an acknowledgement.
    pub(super) fn transmit(&mut self, now: Instant, pause_follows: bool, packet: &mut Vec<u8>) -> bool {
        if self.wait_until.is_some_and(|until| now < until) {
            return false;
        }
        self.wait_until = None;
        if !self.has_next() {
            return false;
        }
        let Some(request) = self.queue.get(self.at) else { return false };
        let psn = self.next;
        let is_read = request.transfer.is_read();
        let after = if is_read { request.first.plus(request.packets) } else { psn.plus(1) };
        let is_end_of_work = psn == request.last() || is_read;
        let len = request.offset(after, self.mtu).saturating_sub(request.offset(psn, self.mtu));
        let in_flight = self.in_flight.saturating_add(len);
        let is_window_full = self.is_window_full(after, in_flight);
        let has_more = !is_end_of_work
            || self.begun > self.at.saturating_add(1)
            || self.may_begin_after(after, in_flight);
        // A read's response acknowledges what is before it.
        let (packets, bytes) = self.unrequested;
        self.unrequested = (packets.saturating_add(1), bytes.saturating_add(len));
        let is_much =
            self.unrequested.0 >= self.window.div_ceil(4) || self.unrequested.1 >= MAX_IN_FLIGHT / 4;
        let requests_ack = !is_read && (!has_more || is_window_full || pause_follows || is_much);
        put_request(packet, request, psn, self.mtu, self.peer_qp, requests_ack);
        let is_new = self.end.is_before(after);
        if requests_ack || is_read {
            self.unrequested = (0, 0);
            if is_new {
                self.round_trip.on_sent(psn, now);
            }
        }
        (self.next, self.in_flight) = (after, in_flight);
        if is_new {
            self.end = after;
        }
        if is_end_of_work {
            self.at = self.at.saturating_add(1);
        }
        if self.lost_at.is_none() {
            self.arm(now);
        }
        true
    }

    /// Whether a packet may be sent now; begins the work that it belongs to.
    fn has_next(&mut self) -> bool {
        if self.is_window_full(self.next, self.in_flight) {
            return false;
        }
        if self.at < self.begun {
            return true;
        }
        if !self.may_begin_after(self.next, self.in_flight) {
            return false;
        }
        let (mtu, first) = (self.mtu, self.end);
        let Some(request) = self.queue.get_mut(self.begun) else { return false };
        (request.first, request.packets) = (first, packets(request.len, mtu));
        self.reads_in_flight = self.reads_in_flight.saturating_add(request.transfer.is_read().into());
        self.begun = self.begun.saturating_add(1);
        true
    }

    /// Whether no more may be sent if `next` were the next sequence number, with so many bytes of
    /// payload in flight.
    fn is_window_full(&self, next: Psn, in_flight: usize) -> bool {
        next.since(self.unacknowledged) >= self.window || in_flight >= MAX_IN_FLIGHT
    }

    /// Whether the next work could begin then.
    fn may_begin_after(&self, next: Psn, in_flight: usize) -> bool {
        let is_clear = !self.is_window_full(next, in_flight);
        let fits = |request: &PostedRequest| !request.transfer.is_read() || self.reads_in_flight < self.reads;
        is_clear && self.queue.get(self.begun).is_some_and(fits)
    }

    /// Handles an acknowledgement, of either kind.
    pub(super) fn on_acknowledge(
        &mut self,
        psn: Psn,
        aeth: &Aeth,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) -> Result<(), RequesterEnd> {
        // A duplicate, or nothing that was sent.
        if psn.since(self.unacknowledged) >= self.end.since(self.unacknowledged) {
            return Ok(());
        }
        match Syndrome::from(aeth.syndrome) {
            Syndrome::Ack(_) => {
                if self.complete_through(psn, now, events) == Completion::DataIsMissing {
                    self.go_back_once();
                }
                Ok(())
            }
            Syndrome::ReceiverNotReady(timer) => self.on_not_ready(psn, timer, now, events),
            Syndrome::Nak(NakCode::PSN_SEQUENCE_ERROR) => {
                self.complete_before(psn, now, events);
                self.go_back_once();
                Ok(())
            }
            Syndrome::Nak(code) => {
                self.complete_before(psn, now, events);
                Err(self.on_refused(psn, code, events))
            }
            Syndrome::Reserved(_) => Ok(()),
        }
    }

    fn on_not_ready(
        &mut self,
        psn: Psn,
        timer: u8,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) -> Result<(), RequesterEnd> {
        self.complete_before(psn, now, events);
        // A second answer for packets that were sent together with the first.
        if self.wait_until.is_some_and(|until| now < until) {
            return Ok(());
        }
        if self.not_ready_limit != UNLIMITED_NOT_READY && self.not_ready >= self.not_ready_limit {
            return Err(RequesterEnd::Refused(Violation::NoReceive));
        }
        self.not_ready = self.not_ready.saturating_add(1);
        self.go_back();
        self.wait_until = now.checked_add(Duration::from_micros(rnr_timer_us(timer).into()));
        // Counts from the next packet on.
        self.lost_at = None;
        Ok(())
    }

    /// Fails the work that the peer has refused at that packet.
    #[cold]
    fn on_refused(&mut self, psn: Psn, code: NakCode, events: &mut VecDeque<Event>) -> RequesterEnd {
        let violation = match code {
            NakCode::REMOTE_ACCESS_ERROR => Violation::Access,
            _ => Violation::Other,
        };
        // It is the oldest, unless data of a read before it is missing.
        let is_refused = |request: &PostedRequest| psn.since(request.first) < request.packets;
        if code == NakCode::REMOTE_ACCESS_ERROR
            && self.queue.front().is_some_and(is_refused)
            && let Some(request) = self.queue.pop_front()
        {
            self.report(&request, Err(WorkError::RemoteAccess), events);
        }
        RequesterEnd::Refused(violation)
    }

    /// Handles a packet of a response to a read.
    pub(super) fn on_read_response(
        &mut self,
        packet: &RocePacket<'_>,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) -> Result<(), RequesterEnd> {
        let psn = Psn::from(packet.bth.psn);
        if psn.since(self.unacknowledged) >= self.end.since(self.unacknowledged) {
            return Ok(());
        }
        // It acknowledges what was sent before its read.
        self.complete_before(psn, now, events);
        if psn != self.unacknowledged {
            self.go_back_once();
            return Ok(());
        }
        let mtu = self.mtu;
        let Some(request) = self.queue.front().filter(|_| self.begun > 0) else { return Ok(()) };
        let RequestedTransfer::Read { local, .. } = &request.transfer else {
            return Err(RequesterEnd::PeerViolation);
        };
        let (offset, len) = request.part(psn, mtu);
        if packet.payload.len() != len {
            return Err(RequesterEnd::PeerViolation);
        }
        match local.segs() {
            [seg] => seg.slice(offset, len).copy_from(packet.payload),
            _ => local.slice(offset, len).copy_from(packet.payload),
        }
        let is_last = psn == request.last();
        self.advance(psn.plus(1), now);
        if is_last {
            self.pop(events);
        }
        Ok(())
    }

    /// Completes work of which all packets up to `psn` are acknowledged, but no read.
    fn complete_through(&mut self, psn: Psn, now: Instant, events: &mut VecDeque<Event>) -> Completion {
        while let Some(request) = self.queue.front().filter(|_| self.begun > 0) {
            if psn.since(self.unacknowledged) >= HALF {
                return Completion::UpToDate;
            }
            if request.transfer.is_read() {
                return Completion::DataIsMissing;
            }
            let last = request.last();
            if psn.is_before(last) {
                self.advance(psn.plus(1), now);
                return Completion::UpToDate;
            }
            self.advance(last.plus(1), now);
            self.pop(events);
        }
        Completion::UpToDate
    }

    /// Completes work of which all packets before `psn` are acknowledged, but no read.
    fn complete_before(&mut self, psn: Psn, now: Instant, events: &mut VecDeque<Event>) {
        if psn != self.unacknowledged {
            self.complete_through(psn.previous(), now, events);
        }
    }

    /// Removes the oldest work, which has completed.
    fn pop(&mut self, events: &mut VecDeque<Event>) {
        let Some(request) = self.queue.pop_front() else { return };
        self.reads_in_flight = self.reads_in_flight.saturating_sub(request.transfer.is_read().into());
        self.begun = self.begun.saturating_sub(1);
        self.at = self.at.saturating_sub(1);
        self.report(&request, Ok(()), events);
    }

    /// Reports the completion of work. A probe is nobody's.
    fn report(
        &mut self,
        request: &PostedRequest,
        result: Result<(), WorkError>,
        events: &mut VecDeque<Event>,
    ) {
        match request.transfer {
            RequestedTransfer::Probe => self.is_probing = false,
            _ => events.push_back(Event::Done { id: request.id, result }),
        }
    }

    /// Moves the oldest unacknowledged packet, which is progress.
    fn advance(&mut self, to: Psn, now: Instant) {
        if let Some(oldest) = self.queue.front() {
            let [from, to] = [self.unacknowledged, to].map(|psn| oldest.offset(psn, self.mtu));
            self.in_flight = self.in_flight.saturating_sub(to.saturating_sub(from));
        }
        self.unacknowledged = to;
        if self.next.is_before(to) {
            // Packets that were about to be sent again have arrived after all.
            (self.next, self.in_flight) = (to, 0);
        }
        self.round_trip.on_acknowledged(to, now);
        (self.retries, self.not_ready, self.wait_until) = (0, 0, None);
        self.lost_at = None;
        if self.unacknowledged != self.end {
            self.arm(now);
        }
    }

    /// Sends again from the oldest unacknowledged packet on.
    fn go_back(&mut self) {
        (self.next, self.in_flight) = (self.unacknowledged, 0);
        self.at = 0;
        self.unrequested = (0, 0);
        self.round_trip.on_sent_again();
    }

    /// Sends again from the oldest unacknowledged packet on, unless that was done for this packet.
    fn go_back_once(&mut self) {
        if self.went_back_to != Some(self.unacknowledged) {
            self.went_back_to = Some(self.unacknowledged);
            self.go_back();
        }
    }

    fn arm(&mut self, now: Instant) {
        self.lost_at = now.checked_add(self.round_trip.timeout());
    }

    /// When [`Requester::on_timeout`] is due, or a packet may be sent again.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.wait_until.or(self.lost_at)
    }

    /// Sends again what was not acknowledged in time.
    pub(super) fn on_timeout(&mut self, now: Instant) -> Result<(), RequesterEnd> {
        if self.wait_until.is_some_and(|until| until <= now) {
            self.wait_until = None;
        }
        if self.lost_at.is_none_or(|lost_at| now < lost_at) {
            return Ok(());
        }
        if self.retries >= RETRIES {
            return Err(RequesterEnd::Lost);
        }
        self.retries = self.retries.saturating_add(1);
        self.round_trip.on_timeout();
        self.go_back();
        self.arm(now);
        Ok(())
    }

    /// Completes all remaining work as flushed.
    pub(super) fn flush(&mut self, events: &mut VecDeque<Event>) {
        for request in std::mem::take(&mut self.queue) {
            self.report(&request, Err(WorkError::Flushed), events);
        }
        (self.begun, self.at, self.reads_in_flight) = (0, 0, 0);
        (self.lost_at, self.wait_until) = (None, None);
        (self.unacknowledged, self.next, self.in_flight) = (self.end, self.end, 0);
    }
}

/// Result of completing work by an acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Completion {
    UpToDate,
    /// A read is acknowledged and its data has not arrived.
    DataIsMissing,
}

/// Appends the packet `psn` of a request.
fn put_request(
    packet: &mut Vec<u8>,
    request: &PostedRequest,
    psn: Psn,
    mtu: u16,
    peer_qp: u32,
    requests_ack: bool,
) {
    let (offset, len) = request.part(psn, mtu);
    let is_last = psn == request.last();
    let place = PacketPlace::of(psn == request.first, is_last);
    let head = |opcode, len| PacketHead { requests_ack, ..PacketHead::new(opcode, peer_qp, psn, len) };
    match &request.transfer {
        RequestedTransfer::Send { head: bytes, payload, invalidate, is_solicited } => {
            let opcode = RoceOpcode::send(place, invalidate.is_some());
            let is_solicited = *is_solicited && is_last;
            PacketHead { is_solicited, ..head(opcode, len) }.put(packet);
            if let Some(stag) = invalidate.filter(|_| is_last) {
                packet.extend_from_slice(&stag.0.to_be_bytes());
            }
            let from_head = bytes.get(offset.min(bytes.len())..).unwrap_or_default();
            let from_head = from_head.get(..len.min(from_head.len())).unwrap_or_default();
            packet.extend_from_slice(from_head);
            let rest = len.saturating_sub(from_head.len());
            if rest > 0 {
                put_list(packet, payload, offset.saturating_sub(bytes.len()), rest);
            }
            put_pad(packet, len);
        }
        RequestedTransfer::Write { local, remote } => {
            head(RoceOpcode::write(place), len).put(packet);
            if place.is_first() {
                put_reth(packet, remote.stag, remote.address, request.len);
            }
            if len > 0 {
                put_list(packet, local, offset, len);
            }
            put_pad(packet, len);
        }
        // An empty write may have any key, and its peer does not look at it (volume 1, C9-88).
        RequestedTransfer::Probe => {
            head(RoceOpcode::RC_WRITE_ONLY, 0).put(packet);
            put_reth(packet, Stag(0), 0, 0);
        }
        // What has not arrived of it.
        RequestedTransfer::Read { remote, .. } => {
            head(RoceOpcode::RC_READ_REQUEST, 0).put(packet);
            let address = remote.address.wrapping_add(offset as u64);
            put_reth(packet, remote.stag, address, request.len.saturating_sub(offset as u32));
        }
    }
}

fn put_reth(packet: &mut Vec<u8>, stag: Stag, address: u64, len: u32) {
    let reth =
        Reth { virtual_address: U64::new(address), r_key: U32::new(stag.0), dma_length: U32::new(len) };
    packet.extend_from_slice(reth.as_bytes());
}

/// Timeouts without progress after which the peer counts as lost; the last one ends after 4.3
/// seconds.
const RETRIES: u32 = 6;
/// The count of retries without a receive buffer that stands for any number.
const UNLIMITED_NOT_READY: u8 = 7;
/// Payload in flight after which nothing is sent, in bytes: the receive buffer of a peer without
/// privileges has room for it.
const MAX_IN_FLIGHT: usize = 256 << 10;
/// Most packets in flight, beside those of one read.
const MAX_WINDOW: u32 = 1 << 16;
