//! Data segments: where the bytes of a PDU behind its header go. The drawing is in `full`.

use super::command::{CRC_ERROR, data_sense};
use super::full::Turn;
use super::tasks::State;
use crate::digest;
use crate::scsi::task_set::TaskRouter;
use crate::scsi::{Response, Status};
use blockmux_volume::{Crc32c, Seg};
use blockmux_wire::iscsi::session::RejectReason;
use blockmux_wire::iscsi::{BHS_LEN, Bhs, DIGEST_LEN, padding};

/// What the next bytes are.
pub(super) enum Awaiting {
    /// A header, of at least so many bytes.
    Head(usize),
    /// A data segment with padding and digest, in one piece.
    Segment(Segment),
    /// Data-out, for which the pool had no memory.
    Memory(Segment),
    /// Data-out, straight into `place`. `filled` bytes came with the receive buffer; until that was seen empty, more
    /// of them may be there.
    Place { segment: Segment, place: Seg, filled: usize, buffer_is_empty: bool },
    /// What is left of a segment that is not kept: `excess` bytes of data, then padding and digest.
    Tail { segment: Segment, crc: Crc32c, excess: usize },
}

/// A data segment and whom it is for.
#[derive(Clone, Copy)]
pub(super) struct Segment {
    pub(super) bhs: Bhs,
    /// In bytes, without padding.
    pub(super) len: usize,
    pub(super) purpose: Purpose,
}

/// Whom a data segment is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A task's data-out.
    Data { slot: usize, offset: u32, is_final: bool, is_immediate: bool },
    /// A request that is done when its data is here.
    Talk,
    /// A request that waits for its turn, or is acted upon only with all its data.
    Whole,
    /// Nobody.
    Nothing,
}

impl Awaiting {
    /// The task whose data comes now.
    pub(super) fn slot(&self) -> Option<usize> {
        match self.segment()?.purpose {
            Purpose::Data { slot, .. } => Some(slot),
            Purpose::Talk | Purpose::Whole | Purpose::Nothing => None,
        }
    }

    fn segment(&self) -> Option<&Segment> {
        match self {
            Awaiting::Segment(segment)
            | Awaiting::Memory(segment)
            | Awaiting::Place { segment, .. }
            | Awaiting::Tail { segment, .. } => Some(segment),
            Awaiting::Head(_) => None,
        }
    }

    /// The data that comes now is for nobody.
    pub(super) fn discard(&mut self) {
        match self {
            Awaiting::Memory(segment) => {
                let segment = Segment { purpose: Purpose::Nothing, ..*segment };
                *self = Awaiting::Tail { segment, crc: Crc32c::default(), excess: segment.len };
            }
            Awaiting::Segment(segment) | Awaiting::Place { segment, .. } | Awaiting::Tail { segment, .. } => {
                segment.purpose = Purpose::Nothing
            }
            Awaiting::Head(_) => {}
        }
    }
}

impl Turn<'_> {
    /// The memory of [`Demand::Place`] is full.
    pub(super) fn on_placed(&mut self) {
        match std::mem::replace(&mut self.connection.awaiting, Awaiting::Head(BHS_LEN)) {
            Awaiting::Place { segment, place, .. } => {
                let mut crc = Crc32c::default();
                let excess = segment.len.saturating_sub(place.len());
                if self.connection.replies.digests().data {
                    crc.add_seg(&place);
                }
                if excess == 0 && self.connection.replies.digests().tail_len(segment.len) == 0 {
                    self.conclude(segment, None, true);
                } else {
                    self.connection.awaiting = Awaiting::Tail { segment, crc, excess };
                }
            }
            other => self.connection.awaiting = other,
        }
    }

    /// A segment has come, and was put where it belongs unless it is `lent`.
    #[inline]
    pub(super) fn conclude(&mut self, segment: Segment, lent: Option<Seg>, is_good: bool) {
        let is_judged_later = segment.purpose == Purpose::Whole && !self.comes_again(&segment.bhs);
        if !is_good && segment.purpose != Purpose::Nothing && !is_judged_later {
            self.reject(RejectReason::DATA_DIGEST_ERROR, &segment.bhs);
        }
        if segment.purpose == Purpose::Whole {
            let data = lent.or_else(|| self.connection.gathering.1.take());
            return self.on_whole(segment.bhs, data, is_good);
        }
        if let Purpose::Data { slot, offset, is_final, is_immediate } = segment.purpose {
            let may_come_again = self.connection.level > 0;
            if !is_good && (!may_come_again || !self.lose(slot)) {
                self.fail(slot, Response::failed(data_sense(CRC_ERROR)));
            }
            self.on_data(slot, offset, segment.len, lent.filter(|_| is_good), (is_final, is_immediate));
        }
    }

    /// Gives memory to the data-out that waits for some, if the pool has any; whether it need not wait any more.
    pub(super) fn take_memory(&mut self) -> bool {
        let Awaiting::Memory(segment) = self.connection.awaiting else { return true };
        let Purpose::Data { slot, offset, .. } = segment.purpose else { return true };
        let wants = self.session.tasks.get_mut(slot).is_some_and(|entry| {
            entry.state == State::Data
                && !entry.progress.transfer.is_lost()
                && entry.progress.transfer.wanted(offset, segment.len).1 > 0
        });
        if !wants {
            self.connection.awaiting =
                Awaiting::Tail { segment, crc: Crc32c::default(), excess: segment.len };
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
            Some(place) => Awaiting::Place { segment, place, filled: 0, buffer_is_empty: false },
            None => Awaiting::Tail { segment, crc: Crc32c::default(), excess: segment.len },
        };
        true
    }

    /// Receives the data of a request that is taken whole into memory of its own.
    #[cold]
    pub(super) fn gather(&mut self, segment: Segment) {
        let place = self.connection.take_or_make(segment.len);
        self.connection.gathering.1 = Some(place.clone());
        self.connection.awaiting = Awaiting::Place { segment, place, filled: 0, buffer_is_empty: false };
    }

    /// There is no memory for a command's data: it may be tried again.
    pub(super) fn refuse_busy(&mut self, segment: Segment) {
        if let Purpose::Data { slot, .. } = segment.purpose {
            self.fail(slot, Response::bare(Status::BUSY));
        }
        self.connection.awaiting = Awaiting::Tail { segment, crc: Crc32c::default(), excess: segment.len };
    }

    /// Copies what the receive buffer has of a payload to its place; returns how many bytes it took.
    pub(super) fn fill_place(&mut self, unread: &[u8]) -> Option<usize> {
        let Awaiting::Place { place, filled, buffer_is_empty, .. } = &mut self.connection.awaiting else {
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
        let Awaiting::Tail { segment, crc, excess } = &mut self.connection.awaiting else { return None };
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
        self.connection.awaiting = Awaiting::Head(BHS_LEN);
        self.conclude(segment, None, is_good);
        Some(taken)
    }
}

/// Whether the digest at the end of these bytes is that of the rest.
pub(super) fn is_intact(segment: &[u8]) -> bool {
    let (covered, sent) = segment.split_at(segment.len().saturating_sub(DIGEST_LEN));
    digest::of(covered) == sent
}

/// A segment up to this many bytes is waited for in the receive buffer: one large receive for many PDUs costs less
/// than a receive for each. With its digest at most `MAX_DEMAND`.
pub(super) const LENT_PAYLOAD: usize = 64 << 10;
