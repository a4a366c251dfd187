//! Requests in flight, with what their replies need.

use super::reply::{MAX_STATUS_LEN, ReplyAddress};
use crate::volume_state::IoGuard;
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
}

impl PendingRequest {
    /// The address of the reply.
    #[inline]
    pub(super) fn address(&self) -> ReplyAddress {
        ReplyAddress { cookie: self.cookie, offset: self.offset }
    }

    /// The maximum memory that its data or its reply may hold, in bytes.
    #[inline]
    fn payload(&self) -> usize {
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
    slots: Slab<(PendingRequest, Option<IoGuard>)>,
    payload: usize,
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

    /// Adds a request; returns its tag.
    #[inline]
    pub(super) fn insert(&mut self, pending: PendingRequest) -> Tag {
        self.payload = self.payload.saturating_add(pending.payload());
        Tag(self.slots.insert((pending, None)) as u64)
    }

    /// Marks the I/O of a request as started; `guard` counts it until the request is removed.
    #[inline]
    pub(super) fn begin(&mut self, tag: Tag, guard: Option<IoGuard>) {
        let slot = usize::try_from(tag.0).ok();
        if let Some((_, place)) = slot.and_then(|slot| self.slots.get_mut(slot)) {
            *place = guard;
        }
    }

    /// The guard of a request's I/O.
    pub(super) fn guard(&mut self, tag: Tag) -> Option<&mut IoGuard> {
        let slot = usize::try_from(tag.0).ok()?;
        self.slots.get_mut(slot)?.1.as_mut()
    }

    /// Removes a request; `None` if no request in flight has this tag.
    #[inline]
    pub(super) fn remove(&mut self, tag: Tag) -> Option<PendingRequest> {
        let slot = usize::try_from(tag.0).ok()?;
        let (pending, _guard) = self.slots.remove(slot)?;
        self.payload = self.payload.saturating_sub(pending.payload());
        Some(pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(cookie: u64) -> PendingRequest {
        PendingRequest { cookie, offset: 0, length: 4096, op: Op::Read, one_extent: false }
    }

    #[test]
    fn freed_slots_are_reused() {
        let mut table = PendingTable::default();
        let tags: Vec<Tag> = (0..3).map(|cookie| table.insert(read(cookie))).collect();
        assert_eq!((table.len(), table.payload()), (3, 3 * 4096));
        assert_eq!(table.remove(tags[1]).map(|pending| pending.cookie), Some(1));
        assert_eq!(table.insert(read(7)), tags[1]);
        assert_eq!((table.len(), table.slots.slots()), (3, 3));
    }

    #[test]
    fn a_block_status_counts_as_its_longest_answer() {
        let mut table = PendingTable::default();
        let status = PendingRequest { length: 1 << 40, op: Op::BlockStatus, ..read(1) };
        let tag = table.insert(status);
        assert_eq!(table.payload(), MAX_STATUS_LEN);
        table.insert(PendingRequest { one_extent: true, ..status });
        assert_eq!(table.payload(), MAX_STATUS_LEN);
        table.remove(tag);
        assert_eq!(table.payload(), 0);
    }

    #[test]
    fn a_tag_that_is_not_in_flight_finds_nothing() {
        let mut table = PendingTable::default();
        let tag = table.insert(read(1));
        assert!(table.remove(Tag(99)).is_none());
        assert!(table.remove(tag).is_some());
        assert!(table.remove(tag).is_none());
        assert!(table.is_empty());
        assert_eq!(table.payload(), 0);
    }
}
