//! What comes: headers and data segments out of a stream, or whole messages; and where the bytes
//! behind a header go.
//!
//! ```text
//!              ┌─────────────────── no data segment ────────────────────┐
//!              ▼                                                        │
//!   ┌──────▶ Head ──── a segment that is here, or short ──▶ Segment ────┤
//!   │          │ │                                                      ├─▶ the command, the text, the ping ...
//!   │          │ └─ long data-out ─▶ Memory ──▶ Place ──┐               │
//!   │          │                 (pool empty)           ▼               │
//!   │          └─ nobody wants it ────────────────────▶ Tail ───────────┘
//!   │                                      (excess, padding, digest)
//!   └── the next header
//! ```
//! A header is acted upon as soon as it is whole: a command begins before its immediate data has
//! come, so that the device server has said by then how much of it is wanted and where. Data-out
//! that is wholly in the receive buffer is lent from there to the volume if it is all that the
//! command wants; else the command's data is gathered in memory from the pool, and what has not
//! come yet is received straight into it.
//!

use super::command::{CRC_ERROR, data_sense};
use super::datamover::Remotes;
use super::full::{ConnectionTurn, data_in_of};
use super::tasks::TaskState;
use crate::digest;
use crate::iscsi::iser::Message;
use crate::iscsi::login::operational::OperationalKey;
use crate::iscsi::pdu::{self, IscsiHeader, ParsedIscsiPdu};
use crate::scsi::task_set::TaskRouter;
use crate::scsi::{Response, ScsiStatus};
use crate::session::ProtocolError;
use blockmux_volume::{Chunk, Crc32c, Seg};
use blockmux_wire::iscsi::scsi::DataOut;
use blockmux_wire::iscsi::session::RejectReason;
use blockmux_wire::iscsi::{BHS_LEN, Bhs, DIGEST_LEN, IscsiOpcode, RESERVED_TAG, padding};
use zerocopy::transmute_ref;

/// What the next bytes are.
pub(super) enum AwaitedIscsiPdu {
    /// A header, of at least so many bytes.
    Head(usize),
    /// A data segment with padding and digest, in one piece.
    Segment(DataSegment),
    /// Data-out, for which the pool had no memory.
    Memory(DataSegment),
    /// Data-out, straight into `place`. `filled` bytes came with the receive buffer; until that was
    /// seen empty, more of them may be there.
    Place { segment: DataSegment, place: Seg, filled: usize, buffer_is_empty: bool },
    /// What is left of a segment that is not kept: `excess` bytes of data, then padding and digest.
    Tail { segment: DataSegment, crc: Crc32c, excess: usize },
}

/// A data segment and whom it is for.
#[derive(Clone, Copy)]
pub(super) struct DataSegment {
    pub(super) bhs: Bhs,
    /// In bytes, without padding.
    pub(super) len: usize,
    pub(super) purpose: SegmentPurpose,
}

/// Whom a data segment is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SegmentPurpose {
    /// A task's data-out.
    Data { slot: usize, offset: u32, is_final: bool, is_immediate: bool },
    /// A request that is done when its data is here.
    Talk,
    /// A request that waits for its turn, or is acted upon only with all its data.
    Whole,
    /// Nobody.
    Nothing,
}

impl AwaitedIscsiPdu {
    /// The task whose data comes now.
    pub(super) fn slot(&self) -> Option<usize> {
        match self.segment()?.purpose {
            SegmentPurpose::Data { slot, .. } => Some(slot),
            SegmentPurpose::Talk | SegmentPurpose::Whole | SegmentPurpose::Nothing => None,
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

    /// The data that comes now is for nobody.
    pub(super) fn discard(&mut self) {
        match self {
            AwaitedIscsiPdu::Memory(segment) => {
                let segment = DataSegment { purpose: SegmentPurpose::Nothing, ..*segment };
                *self = AwaitedIscsiPdu::Tail { segment, crc: Crc32c::default(), excess: segment.len };
            }
            AwaitedIscsiPdu::Segment(segment)
            | AwaitedIscsiPdu::Place { segment, .. }
            | AwaitedIscsiPdu::Tail { segment, .. } => segment.purpose = SegmentPurpose::Nothing,
            AwaitedIscsiPdu::Head(_) => {}
        }
    }
}

impl ConnectionTurn<'_> {
    /// The memory of [`Demand::Place`] is full.
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

    /// A segment has come, and was put where it belongs unless it is `lent`.
    #[inline]
    pub(super) fn conclude(&mut self, segment: DataSegment, lent: Option<Seg>, is_good: bool) {
        let is_judged_later = segment.purpose == SegmentPurpose::Whole && !self.comes_again(&segment.bhs);
        if !is_good && segment.purpose != SegmentPurpose::Nothing && !is_judged_later {
            self.reject(RejectReason::DATA_DIGEST_ERROR, &segment.bhs);
        }
        if segment.purpose == SegmentPurpose::Whole {
            let data = lent.or_else(|| self.connection.gathering.1.take());
            return self.on_whole(segment.bhs, data, is_good);
        }
        if let SegmentPurpose::Data { slot, offset, is_final, is_immediate } = segment.purpose {
            let may_come_again = self.connection.level > 0;
            if !is_good && (!may_come_again || !self.lose(slot)) {
                self.fail(slot, Response::failed(data_sense(CRC_ERROR)));
            }
            self.on_data(slot, offset, segment.len, lent.filter(|_| is_good), (is_final, is_immediate));
        }
    }

    /// Gives memory to the data-out that waits for some, if the pool has any; whether it need not
    /// wait any more.
    pub(super) fn take_memory(&mut self) -> bool {
        let AwaitedIscsiPdu::Memory(segment) = self.connection.awaiting else { return true };
        let SegmentPurpose::Data { slot, offset, .. } = segment.purpose else { return true };
        let wants = self.session.tasks.get_mut(slot).is_some_and(|entry| {
            entry.state == TaskState::Data
                && !entry.progress.transfer.is_lost()
                && entry.progress.transfer.wanted(offset, segment.len).1 > 0
        });
        if !wants {
            self.connection.awaiting =
                AwaitedIscsiPdu::Tail { segment, crc: Crc32c::default(), excess: segment.len };
            return true;
        }
        if self.session.tasks.get_mut(slot).is_some_and(|entry| {
            entry.progress.transfer.round_len().next_power_of_two() > self.connection.pool.limit_bytes()
        }) {
            // It would wait for ever.
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

    /// Whether data waits for memory that only data behind it gives back, so that no other
    /// connection can help.
    pub(super) fn waits_for_itself(&mut self, segment: DataSegment) -> bool {
        let SegmentPurpose::Data { slot, .. } = segment.purpose else { return false };
        let round = self.session.tasks.get_mut(slot).map(|entry| entry.progress.transfer.round_len());
        round.is_some_and(|len| self.connection.exceeds_share(len))
    }

    /// Receives the data of a request that is taken whole into memory of its own.
    #[cold]
    pub(super) fn gather(&mut self, segment: DataSegment) {
        let place = self.connection.take_or_make(segment.len);
        self.connection.gathering.1 = Some(place.clone());
        self.connection.awaiting =
            AwaitedIscsiPdu::Place { segment, place, filled: 0, buffer_is_empty: false };
    }

    /// There is no memory for a command's data: it may be tried again.
    pub(super) fn refuse_busy(&mut self, segment: DataSegment) {
        if let SegmentPurpose::Data { slot, .. } = segment.purpose {
            self.fail(slot, Response::bare(ScsiStatus::BUSY));
        }
        self.connection.awaiting =
            AwaitedIscsiPdu::Tail { segment, crc: Crc32c::default(), excess: segment.len };
    }

    /// Copies what the receive buffer has of a payload to its place; returns how many bytes it
    /// took.
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

    /// Drops data, then checks padding and digest behind it.
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
        let (segment, is_good) = (*segment, !digests.data || sent == crc.to_le_bytes());
        let taken = dropped.len().saturating_add(tail_len);
        self.connection.awaiting = AwaitedIscsiPdu::Head(BHS_LEN);
        self.conclude(segment, None, is_good);
        Some(taken)
    }

    /// One header, or a part of a segment; `None` if more bytes, room or memory are needed.
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
            ParsedIscsiPdu::Needs(len) => {
                self.connection.awaiting = AwaitedIscsiPdu::Head(len);
                return Ok(None);
            }
            ParsedIscsiPdu::Head(head) => head,
        };
        let data_in = data_in_of(&head.bhs);
        if !self.connection.has_room(data_in) {
            (self.connection.waits_for, self.connection.awaiting) =
                (data_in, AwaitedIscsiPdu::Head(head.len));
            return Ok(None);
        }
        self.connection.waits_for = 0;
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
            SegmentPurpose::Talk if segment.len == 0 => self.on_text_or_nop(&head.bhs, &[]),
            _ if segment.len == 0 => self.conclude(segment, None, true),
            SegmentPurpose::Nothing => {
                self.connection.awaiting =
                    AwaitedIscsiPdu::Tail { segment, crc: Crc32c::default(), excess: segment.len };
            }
            SegmentPurpose::Talk if whole > here && segment.len > MAX_BORROWED_PAYLOAD => {
                self.reject(RejectReason::LONG_OPERATION_REJECT, &head.bhs);
                let segment = DataSegment { purpose: SegmentPurpose::Nothing, ..segment };
                self.connection.awaiting =
                    AwaitedIscsiPdu::Tail { segment, crc: Crc32c::default(), excess: segment.len };
            }
            SegmentPurpose::Data { .. } if whole > here && segment.len > MAX_BORROWED_PAYLOAD => {
                self.connection.awaiting = AwaitedIscsiPdu::Memory(segment);
                self.take_memory();
            }
            SegmentPurpose::Whole if whole > here && segment.len > MAX_BORROWED_PAYLOAD => {
                self.gather(segment)
            }
            SegmentPurpose::Talk | SegmentPurpose::Data { .. } | SegmentPurpose::Whole => {
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

    /// A segment lies `whole` in the receive buffer, `at` there, with padding and digest.
    #[inline]
    fn on_segment(&mut self, segment: DataSegment, whole: &[u8], input: &Chunk, at: usize) {
        let is_good = !self.connection.replies.digests().data || is_intact(whole);
        if segment.purpose == SegmentPurpose::Talk && is_good {
            self.on_text_or_nop(&segment.bhs, whole.get(..segment.len).unwrap_or_default());
        } else {
            self.conclude(segment, Some(input.lend(at, segment.len)), is_good);
        }
    }

    /// Takes a message; `false`: there is no room for its data-in yet.
    ///
    /// # Errors
    /// If it is none that may come.
    pub(super) fn on_message(&mut self, message: &Message) -> Result<bool, ProtocolError> {
        self.connection.keep_alive.heard = true;
        let (Message { header, bhs, ahs, data }, data_len) = (message, message.data_len());
        if !self.connection.has_room(data_in_of(bhs)) {
            return Ok(false);
        }
        if data_len > self.connection.parameters.get(OperationalKey::MaxRecvDataSegmentLength) as usize {
            return Err(ProtocolError {
                what: "sent a data segment above TargetRecvDataSegmentLength",
                reference: "RFC 7145 §6.4",
            });
        }
        if bhs.opcode() == IscsiOpcode::DATA_OUT && !self.may_come_unasked(transmute_ref!(bhs)) {
            return Err(ProtocolError {
                what: "sent data as a message that RDMA Read is to bring",
                reference: "RFC 7145 §7.3.4",
            });
        }
        if let Some(mover) = &mut self.connection.replies.mover {
            mover.arrive(Remotes::from(header));
        }
        let head = IscsiHeader { bhs: *bhs, len: BHS_LEN.saturating_add(ahs.len()), data_len };
        match self.on_head(&head, ahs)? {
            SegmentPurpose::Talk => {
                self.on_text_or_nop(bhs, &data.as_ref().map(Seg::to_vec).unwrap_or_default())
            }
            purpose => self.conclude(DataSegment { bhs: *bhs, len: data_len, purpose }, data.clone(), true),
        }
        if !self.session.early.is_empty() {
            self.deliver_early();
        }
        Ok(true)
    }

    /// Whether a Data-Out is of no task, or of one whose data is not being read: else its memory
    /// would have two writers.
    fn may_come_unasked(&mut self, data_out: &DataOut) -> bool {
        let slot = self.session.tasks.find(data_out.initiator_task_tag.get());
        let is_fetched = slot
            .and_then(|slot| self.session.tasks.get_mut(slot))
            .is_some_and(|entry| entry.progress.transfer.is_asked());
        data_out.target_transfer_tag.get() == RESERVED_TAG && !is_fetched
    }
}

/// Whether the digest at the end of these bytes is that of the rest.
pub(super) fn is_intact(segment: &[u8]) -> bool {
    let (covered, sent) = segment.split_at(segment.len().saturating_sub(DIGEST_LEN));
    digest::of(covered) == sent
}

/// A segment up to this many bytes is waited for in the receive buffer: one large receive for many
/// PDUs costs less than a receive for each. With its digest at most `MAX_DEMAND`.
pub(super) const MAX_BORROWED_PAYLOAD: usize = 64 << 10;
