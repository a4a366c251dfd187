//! Requests in flight, with what their replies need.

use super::reply::{MAX_STATUS_LEN, ReplyAddress};
use super::transmission::ALL_ROOM;
use crate::multi_step::{ByteRequest, MultiStepRequest};
use crate::volume_state::{AtomicRange, IoGuard};
use blockmux_volume::{Op, Slab, Tag};

/// A valid request, from its arrival until its reply.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingRequest {
    pub(super) cookie: u64,
    /// In bytes; an extended reply repeats it.
    pub(super) offset: u64,
    /// In bytes.
    pub(super) length: u64,
    pub(super) op: Op,
    /// `NBD_CMD_FLAG_REQ_ONE`.
    pub(super) one_extent: bool,
    /// Whether the volume can carry it out as one I/O.
    pub(super) is_one_io: bool,
}

impl PendingRequest {
    /// The address of the reply.
    #[inline]
    pub(super) fn address(&self) -> ReplyAddress {
        ReplyAddress { cookie: self.cookie, offset: self.offset }
    }

    /// What it does with which bytes.
    #[inline]
    pub(super) fn bytes(&self) -> ByteRequest {
        ByteRequest { op: self.op, offset: self.offset, length: self.length }
    }

    /// The offset after its range, in bytes.
    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.bytes().end()
    }

    /// The maximum memory that its data or its reply may hold, in bytes.
    #[inline]
    pub(super) fn payload(&self) -> usize {
        match self.op {
            Op::Read | Op::Write { .. } => usize::try_from(self.length).unwrap_or(usize::MAX),
            Op::BlockStatus if !self.one_extent => MAX_STATUS_LEN,
            _ => 0,
        }
    }
}

/// The table of requests in flight. A tag is the index of an entry; entries are reused, so the
/// table grows only to the deepest queue that this client ever had.
#[derive(Default)]
pub(super) struct PendingTable {
    slots: Slab<PendingSlot>,
    payload: usize,
}

/// A request whose I/O is to be admitted.
pub(super) struct AdmittingRequest<'a> {
    /// Counts the I/O until the request is removed.
    pub(super) guard: &'a mut Option<IoGuard>,
    /// The blocks that are locked for it.
    pub(super) range: Option<&'a mut AtomicRange>,
}

struct PendingSlot {
    request: PendingRequest,
    guard: Option<IoGuard>,
    /// The progress of a request of several I/O.
    steps: Option<Box<MultiStepRequest>>,
}

impl PendingSlot {
    #[inline]
    fn payload(&self) -> usize {
        match &self.steps {
            None => self.request.payload(),
            Some(steps) if steps.is_long_read(&self.request.bytes()) => ALL_ROOM,
            Some(steps) => self.request.payload().saturating_add(steps.extra_payload()),
        }
    }
}

impl PendingTable {
    /// The number of requests in flight.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Bytes of data in flight, plus the maximum of pending block status replies.
    #[inline]
    pub(super) fn payload(&self) -> usize {
        self.payload
    }

    /// Adds a request; returns its tag. `steps` is the progress of one of several I/O.
    #[inline]
    pub(super) fn insert(&mut self, request: PendingRequest, steps: Option<Box<MultiStepRequest>>) -> Tag {
        let slot = PendingSlot { request, guard: None, steps };
        self.payload = self.payload.saturating_add(slot.payload());
        Tag(self.slots.insert(slot) as u64)
    }

    /// What the admission of a request's I/O concerns.
    #[inline]
    pub(super) fn admitting(&mut self, tag: Tag) -> Option<AdmittingRequest<'_>> {
        let PendingSlot { guard, steps, .. } = self.slots.get_mut(usize::try_from(tag.0).ok()?)?;
        Some(AdmittingRequest { guard, range: steps.as_mut().and_then(|steps| steps.locked_range()) })
    }

    /// Removes a request, with its progress if it has several I/O; `None` if no request in flight
    /// has this tag.
    #[inline]
    pub(super) fn remove(&mut self, tag: Tag) -> Option<(PendingRequest, Option<Box<MultiStepRequest>>)> {
        let slot = self.slots.remove(usize::try_from(tag.0).ok()?)?;
        self.payload = self.payload.saturating_sub(slot.payload());
        Some((slot.request, slot.steps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(cookie: u64) -> PendingRequest {
        PendingRequest { cookie, offset: 0, length: 4096, op: Op::Read, one_extent: false, is_one_io: true }
    }

    #[test]
    fn freed_slots_are_reused() {
        let mut table = PendingTable::default();
        let tags: Vec<Tag> = (0..3).map(|cookie| table.insert(read(cookie), None)).collect();
        assert_eq!((table.len(), table.payload()), (3, 3 * 4096));
        assert_eq!(table.remove(tags[1]).map(|(request, _)| request.cookie), Some(1));
        assert_eq!(table.insert(read(7), None), tags[1]);
        assert_eq!((table.len(), table.slots.slots()), (3, 3));
    }

    #[test]
    fn a_block_status_counts_as_its_longest_answer() {
        let mut table = PendingTable::default();
        let status = PendingRequest { length: 1 << 40, op: Op::BlockStatus, ..read(1) };
        let tag = table.insert(status, None);
        assert_eq!(table.payload(), MAX_STATUS_LEN);
        table.insert(PendingRequest { one_extent: true, ..status }, None);
        assert_eq!(table.payload(), MAX_STATUS_LEN);
        table.remove(tag);
        assert_eq!(table.payload(), 0);
    }

    #[test]
    fn a_tag_that_is_not_in_flight_finds_nothing() {
        let mut table = PendingTable::default();
        let tag = table.insert(read(1), None);
        assert!(table.remove(Tag(99)).is_none());
        assert!(table.remove(tag).is_some());
        assert!(table.remove(tag).is_none());
        assert!(table.is_empty());
        assert_eq!(table.payload(), 0);
    }
}
