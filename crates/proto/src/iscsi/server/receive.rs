//! Receives PDUs: parses headers and data segments of a stream, or whole iSER messages.
//!
//! ```text
//!             ┌─────────────────── no data segment ────────────────────┐
//!             ▼                                                        │
//!   ┌──────▶ Head ─── short, or already received ──▶ Segment ──────────┤
//!   │         │ │                                                      ├─▶ command, text, ping ...
//!   │         │ └─ long Data-Out ─▶ Memory ──▶ Place ──┐               │
//!   │         │                  (pool empty)          ▼               │
//!   │         └─ discarded data ────────────────────▶ Tail ────────────┘
//!   │                                      (excess, padding, digest)
//!   └── next header
//! ```
//! A header is processed as soon as it is complete. A command starts before its immediate data has
//! arrived, so the device server has already requested the data that it needs. If the receive
//! buffer holds all of a command's data-out, the volume borrows it from there. Otherwise the data
//! is gathered in memory from the pool, and the rest is received directly into it.

use super::command::{CRC_ERROR, data_sense};
use super::datamover::RemoteBuffers;
use super::full::{ConnectionTurn, data_in_of};
use super::tasks::TaskState;
use crate::digest;
use crate::driver::session::ProtocolError;
use crate::iscsi::iser::IserMessage;
use crate::iscsi::login::operational::OperationalKey;
use crate::iscsi::pdu::{self, IscsiHeader, ParsedIscsiPdu};
use crate::scsi::{Response, ScsiStatus};
use blockmux_volume::{Chunk, Crc32c, Seg};
use blockmux_wire::iscsi::scsi::DataOut;
use blockmux_wire::iscsi::session::RejectReason;
use blockmux_wire::iscsi::{BHS_LEN, Bhs, DIGEST_LEN, IscsiOpcode, RESERVED_TAG, padding};
use zerocopy::transmute_ref;

/// Position of the receiver in the PDU: meaning of the next received bytes.
pub(super) enum AwaitedIscsiPdu {
    /// A header of at least this many bytes.
    Head(usize),
    /// A data segment with padding and digest, contiguous in the receive buffer.
    Segment(DataSegment),
    /// A Data-Out segment that waits for memory.
    Memory(DataSegment),
    /// A data segment received directly into `place`. The first `filled` bytes came from the
    /// receive buffer, which may hold more until it was seen empty.
    Place { segment: DataSegment, place: Seg, filled: usize, buffer_is_empty: bool },
    /// The rest of a segment: `excess` bytes of dropped data, then padding and digest.
    Tail { segment: DataSegment, crc: Crc32c, excess: usize },
}

/// A data segment and its purpose.
#[derive(Clone, Copy)]
pub(super) struct DataSegment {
    pub(super) bhs: Bhs,
    /// Length in bytes, without padding.
    pub(super) len: usize,
    pub(super) purpose: SegmentPurpose,
}

/// Destination of a data segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SegmentPurpose {
    /// Data-out of a task.
    Data { slot: usize, offset: u32, is_final: bool, is_immediate: bool },
    /// A text, NOP-Out, task management or logout request that executes when its data is complete.
    TextOrNop,
    /// A request that waits for its CmdSN, or executes only after its data digest was checked.
    WholePdu,
    /// Dropped data.
    Discard,
}

impl AwaitedIscsiPdu {
    /// Slot of the task that receives the current data.
    pub(super) fn slot(&self) -> Option<usize> {
        match self.segment()?.purpose {
            SegmentPurpose::Data { slot, .. } => Some(slot),
            SegmentPurpose::TextOrNop | SegmentPurpose::WholePdu | SegmentPurpose::Discard => None,
        }
    }

    fn segment(&self) -> Option<&DataSegment> {
        match self {
            AwaitedIscsiPdu::Segment(segment)
            | AwaitedIscsiPdu::Memory(segment)
            | AwaitedIscsiPdu::Place { segment, .. }
            | AwaitedIscsiPdu::Tail { segment, .. } => Some(segment),
            AwaitedIscsiPdu::Head(_) => None,
        }
    }

    /// Discards the current data segment.
    pub(super) fn discard(&mut self) {
        match self {
            AwaitedIscsiPdu::Memory(segment) => {
                let segment = DataSegment { purpose: SegmentPurpose::Discard, ..*segment };
                *self = AwaitedIscsiPdu::Tail { segment, crc: Crc32c::default(), excess: segment.len };
            }
            AwaitedIscsiPdu::Segment(segment)
            | AwaitedIscsiPdu::Place { segment, .. }
            | AwaitedIscsiPdu::Tail { segment, .. } => segment.purpose = SegmentPurpose::Discard,
            AwaitedIscsiPdu::Head(_) => {}
        }
    }
}

impl ConnectionTurn<'_> {
    /// Called when the memory of [`Demand::Place`] is full.
    pub(super) fn on_placed(&mut self) {
        match std::mem::replace(&mut self.connection.awaiting, AwaitedIscsiPdu::Head(BHS_LEN)) {
            AwaitedIscsiPdu::Place { segment, place, .. } => {
                let mut crc = Crc32c::default();
                let excess = segment.len.saturating_sub(place.len());
                if self.connection.replies.digests().data {
                    crc.add_seg(&place);
                }
                if excess == 0 && self.connection.replies.digests().tail_len(segment.len) == 0 {
                    self.conclude(segment, None, true);
                } else {
                    self.connection.awaiting = AwaitedIscsiPdu::Tail { segment, crc, excess };
                }
            }
            other => self.connection.awaiting = other,
        }
    }

    /// Ends a data segment. `borrowed` is its data in the receive buffer, unless it was received in
    /// place.
    #[inline]
    pub(super) fn conclude(&mut self, segment: DataSegment, borrowed: Option<Seg>, digest_ok: bool) {
        let is_checked_later =
            segment.purpose == SegmentPurpose::WholePdu && !self.is_retransmitted(&segment.bhs);
        if !digest_ok && segment.purpose != SegmentPurpose::Discard && !is_checked_later {
            self.reject(RejectReason::DATA_DIGEST_ERROR, &segment.bhs);
        }
        if segment.purpose == SegmentPurpose::WholePdu {
            let data = borrowed.or_else(|| self.connection.gathering.1.take());
            return self.on_whole_pdu(segment.bhs, data, digest_ok);
        }
        if let SegmentPurpose::Data { slot, offset, is_final, is_immediate } = segment.purpose {
            let may_be_retransmitted = self.connection.level > 0;
            if !digest_ok && (!may_be_retransmitted || !self.lose(slot)) {
                self.session.tasks.fail(slot, Response::failed(data_sense(CRC_ERROR)));
            }
            self.on_data(slot, offset, segment.len, borrowed.filter(|_| digest_ok), (is_final, is_immediate));
        }
    }

    /// Allocates memory for the Data-Out segment that waits for it; returns whether it no longer
    /// waits.
    pub(super) fn take_memory(&mut self) -> bool {
        let AwaitedIscsiPdu::Memory(segment) = self.connection.awaiting else { return true };
        let SegmentPurpose::Data { slot, offset, .. } = segment.purpose else { return true };
        let is_needed = self.session.tasks.get_mut(slot).is_some_and(|entry| {
            entry.state == TaskState::Data
                && !entry.progress.transfer.is_lost()
                && entry.progress.transfer.overlap(offset, segment.len).1 > 0
        });
        if !is_needed {
            self.connection.awaiting =
                AwaitedIscsiPdu::Tail { segment, crc: Crc32c::default(), excess: segment.len };
            return true;
        }
        if self.session.tasks.get_mut(slot).is_some_and(|entry| {
            entry.progress.transfer.round_len().next_power_of_two() > self.connection.pool.limit_bytes()
        }) {
            // The request exceeds the pool and would wait forever.
            self.refuse_busy(segment);
            return true;
        }
        if !self.give_memory(slot) {
            return false;
        }
        let place = self
            .session
            .tasks
            .get_mut(slot)
            .and_then(|entry| entry.progress.transfer.place(offset, segment.len));
        self.connection.awaiting = match place {
            Some(place) => AwaitedIscsiPdu::Place { segment, place, filled: 0, buffer_is_empty: false },
            None => AwaitedIscsiPdu::Tail { segment, crc: Crc32c::default(), excess: segment.len },
        };
        true
    }

    /// Whether the segment waits for memory of this connection itself, which only later data frees.
    pub(super) fn waits_for_itself(&mut self, segment: DataSegment) -> bool {
        let SegmentPurpose::Data { slot, .. } = segment.purpose else { return false };
        let round = self.session.tasks.get_mut(slot).map(|entry| entry.progress.transfer.round_len());
        round.is_some_and(|len| self.connection.exceeds_share(len))
    }

    /// Receives the data of a request that must be complete into memory of its own.
    #[cold]
    pub(super) fn gather(&mut self, segment: DataSegment) {
        let place = self.connection.take_or_allocate(segment.len);
        self.connection.gathering.1 = Some(place.clone());
        self.connection.awaiting =
            AwaitedIscsiPdu::Place { segment, place, filled: 0, buffer_is_empty: false };
    }

    /// Ends a command with BUSY, because there is no memory for its data; the initiator may retry.
    pub(super) fn refuse_busy(&mut self, segment: DataSegment) {
        if let SegmentPurpose::Data { slot, .. } = segment.purpose {
            self.session.tasks.fail(slot, Response::bare(ScsiStatus::BUSY));
        }
        self.connection.awaiting =
            AwaitedIscsiPdu::Tail { segment, crc: Crc32c::default(), excess: segment.len };
    }

    /// Copies received bytes to their place; returns how many bytes were consumed.
    pub(super) fn fill_place(&mut self, unread: &[u8]) -> Option<usize> {
        let AwaitedIscsiPdu::Place { place, filled, buffer_is_empty, .. } = &mut self.connection.awaiting
        else {
            return None;
        };
        let left = place.len().saturating_sub(*filled);
        let here = unread.get(..left.min(unread.len())).unwrap_or_default();
        place.slice(*filled, here.len()).copy_from(here);
        *filled = filled.saturating_add(here.len());
        *buffer_is_empty = true;
        if here.len() == left {
            self.on_placed();
            return Some(left);
        }
        (!here.is_empty()).then_some(here.len())
    }

    /// Drops excess data, then checks padding and digest.
    pub(super) fn step_tail(&mut self, unread: &[u8]) -> Option<usize> {
        let digests = self.connection.replies.digests();
        let AwaitedIscsiPdu::Tail { segment, crc, excess } = &mut self.connection.awaiting else {
            return None;
        };
        let dropped = unread.get(..unread.len().min(*excess)).unwrap_or_default();
        *excess = excess.saturating_sub(dropped.len());
        if digests.data {
            crc.add(dropped);
        }
        let tail_len = digests.tail_len(segment.len);
        let rest = unread.get(dropped.len()..).unwrap_or_default();
        let Some(tail) = rest.get(..tail_len).filter(|_| *excess == 0) else {
            return (!dropped.is_empty()).then_some(dropped.len());
        };
        let (padding, sent) = tail.split_at(padding(segment.len).min(tail.len()));
        if digests.data {
            crc.add(padding);
        }
        let (segment, digest_ok) = (*segment, !digests.data || sent == crc.to_le_bytes());
        let taken = dropped.len().saturating_add(tail_len);
        self.connection.awaiting = AwaitedIscsiPdu::Head(BHS_LEN);
        self.conclude(segment, None, digest_ok);
        Some(taken)
    }

    /// Processes one header or part of a segment; `None` if it needs more bytes, room or memory.
    #[inline]
    pub(super) fn step(&mut self, input: &Chunk, at: usize) -> Result<Option<usize>, ProtocolError> {
        let unread = input.unread().get(at..).unwrap_or_default();
        match &mut self.connection.awaiting {
            AwaitedIscsiPdu::Head(_) => self.step_head(input, at, unread),
            AwaitedIscsiPdu::Segment(segment) => {
                let segment = *segment;
                let Some(whole) = unread.get(..self.connection.segment_len(&segment)) else {
                    return Ok(None);
                };
                self.connection.awaiting = AwaitedIscsiPdu::Head(BHS_LEN);
                self.on_segment(segment, whole, input, at);
                Ok(Some(whole.len()))
            }
            AwaitedIscsiPdu::Place { .. } => Ok(self.fill_place(unread)),
            AwaitedIscsiPdu::Tail { .. } => Ok(self.step_tail(unread)),
            AwaitedIscsiPdu::Memory(_) => Ok(None),
        }
    }

    #[inline]
    fn step_head(&mut self, input: &Chunk, at: usize, unread: &[u8]) -> Result<Option<usize>, ProtocolError> {
        let head = match pdu::parse(unread, self.connection.replies.digests())? {
            ParsedIscsiPdu::Incomplete(len) => {
                self.connection.awaiting = AwaitedIscsiPdu::Head(len);
                return Ok(None);
            }
            ParsedIscsiPdu::Head(head) => head,
        };
        let data_in = data_in_of(&head.bhs);
        if !self.connection.has_room(data_in) {
            (self.connection.blocked_data_in, self.connection.awaiting) =
                (data_in, AwaitedIscsiPdu::Head(head.len));
            return Ok(None);
        }
        self.connection.blocked_data_in = 0;
        if let AwaitedIscsiPdu::Head(need) = &mut self.connection.awaiting {
            *need = BHS_LEN;
        }
        if head.data_len > self.connection.parameters.get(OperationalKey::MaxRecvDataSegmentLength) as usize {
            return Err(ProtocolError {
                what: "sent a data segment above MaxRecvDataSegmentLength",
                reference: "RFC 7143 §13.12",
            });
        }
        let ahs = unread.get(BHS_LEN..BHS_LEN.saturating_add(head.bhs.ahs_len())).unwrap_or_default();
        let purpose = self.on_head(&head, ahs)?;
        let segment = DataSegment { bhs: head.bhs, len: head.data_len, purpose };
        let here = unread.len().saturating_sub(head.len);
        let whole = self.connection.segment_len(&segment);
        match purpose {
            SegmentPurpose::TextOrNop if segment.len == 0 => self.on_text_or_nop(&head.bhs, &[]),
            _ if segment.len == 0 => self.conclude(segment, None, true),
            SegmentPurpose::Discard => {
                self.connection.awaiting =
                    AwaitedIscsiPdu::Tail { segment, crc: Crc32c::default(), excess: segment.len };
            }
            SegmentPurpose::TextOrNop if whole > here && segment.len > MAX_BORROWED_PAYLOAD => {
                self.reject(RejectReason::LONG_OPERATION_REJECT, &head.bhs);
                let segment = DataSegment { purpose: SegmentPurpose::Discard, ..segment };
                self.connection.awaiting =
                    AwaitedIscsiPdu::Tail { segment, crc: Crc32c::default(), excess: segment.len };
            }
            SegmentPurpose::Data { .. } if whole > here && segment.len > MAX_BORROWED_PAYLOAD => {
                self.connection.awaiting = AwaitedIscsiPdu::Memory(segment);
                self.take_memory();
            }
            SegmentPurpose::WholePdu if whole > here && segment.len > MAX_BORROWED_PAYLOAD => {
                self.gather(segment)
            }
            SegmentPurpose::TextOrNop | SegmentPurpose::Data { .. } | SegmentPurpose::WholePdu => {
                let end = head.len.saturating_add(whole);
                if let Some(whole) = unread.get(head.len..end) {
                    self.on_segment(segment, whole, input, at.saturating_add(head.len));
                    return Ok(Some(end));
                }
                self.connection.awaiting = AwaitedIscsiPdu::Segment(segment);
            }
        }
        Ok(Some(head.len))
    }

    /// Processes a segment in the receive buffer: `whole` includes padding and digest, `at` is its
    /// offset.
    #[inline]
    fn on_segment(&mut self, segment: DataSegment, whole: &[u8], input: &Chunk, at: usize) {
        let digest_ok = !self.connection.replies.digests().data || is_intact(whole);
        if segment.purpose == SegmentPurpose::TextOrNop && digest_ok {
            self.on_text_or_nop(&segment.bhs, whole.get(..segment.len).unwrap_or_default());
        } else {
            self.conclude(segment, Some(input.slice(at, segment.len)), digest_ok);
        }
    }

    /// Processes an iSER message; `false` if there is no room for its data-in yet.
    ///
    /// # Errors
    /// If the message violates the protocol.
    pub(super) fn on_message(&mut self, message: &IserMessage) -> Result<bool, ProtocolError> {
        self.connection.keep_alive.has_received = true;
        let (IserMessage { header, bhs, ahs, data }, data_len) = (message, message.data_len());
        if !self.connection.has_room(data_in_of(bhs)) {
            return Ok(false);
        }
        if data_len > self.connection.parameters.get(OperationalKey::MaxRecvDataSegmentLength) as usize {
            return Err(ProtocolError {
                what: "sent a data segment above TargetRecvDataSegmentLength",
                reference: "RFC 7145 §6.4",
            });
        }
        if bhs.opcode() == IscsiOpcode::DATA_OUT && !self.is_unsolicited_allowed(transmute_ref!(bhs)) {
            return Err(ProtocolError {
                what: "sent solicited data as a message, but the target reads it by RDMA",
                reference: "RFC 7145 §7.3.4",
            });
        }
        if let Some(mover) = &mut self.connection.replies.mover {
            mover.set_current(RemoteBuffers::from(header));
        }
        let head = IscsiHeader { bhs: *bhs, len: BHS_LEN.saturating_add(ahs.len()), data_len };
        match self.on_head(&head, ahs)? {
            SegmentPurpose::TextOrNop => {
                self.on_text_or_nop(bhs, &data.as_ref().map(Seg::to_vec).unwrap_or_default())
            }
            // The common case: a command without data.
            SegmentPurpose::Discard => {}
            purpose => self.conclude(DataSegment { bhs: *bhs, len: data_len, purpose }, data.clone(), true),
        }
        if !self.session.early.is_empty() {
            self.deliver_early();
        }
        Ok(true)
    }

    /// Whether a Data-Out message is acceptable: unsolicited, and not for a task whose data is
    /// being read by RDMA (its memory would have two writers).
    fn is_unsolicited_allowed(&mut self, data_out: &DataOut) -> bool {
        let slot = self.session.tasks.find(data_out.initiator_task_tag.get());
        let is_fetched = slot
            .and_then(|slot| self.session.tasks.get_mut(slot))
            .is_some_and(|entry| entry.progress.transfer.has_outstanding_r2t());
        data_out.target_transfer_tag.get() == RESERVED_TAG && !is_fetched
    }
}

/// Whether the data digest in the last four bytes matches the rest.
pub(super) fn is_intact(segment: &[u8]) -> bool {
    let (covered, sent) = segment.split_at(segment.len().saturating_sub(DIGEST_LEN));
    digest::of(covered) == sent
}

/// Segments up to this many bytes are received contiguously in the receive buffer: one large
/// receive for many PDUs costs less than one for each. With the digest at most `MAX_DEMAND`.
pub(super) const MAX_BORROWED_PAYLOAD: usize = 64 << 10;
