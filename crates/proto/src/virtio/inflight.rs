//! The record of a queue's requests in flight, in memory that outlives the back end.
//!
//! If the back end is killed, the front end gives the record to the next one, which executes the
//! requests again that were not answered ("Inflight I/O tracking" of vhost-user).

use blockmux_volume::Seg;
use blockmux_wire::virtio::vhost_user::inflight_region as layout;

/// The record of one queue.
pub struct InflightRecord {
    memory: Seg,
    /// Number of entries: the queue size for which the record was made.
    entries: u16,
    /// Size of the virtqueue.
    size: u16,
    /// Numbers requests in the order in which they were fetched.
    counter: u64,
}

impl InflightRecord {
    /// The record of the queue number `index` of `size` in `memory`, which has one with so many
    /// entries for each queue: a guest may choose a smaller queue than its front end has room for.
    /// `None` if the memory is too short, or misaligned, or if there are too few entries.
    #[must_use]
    pub fn of_queue(memory: &Seg, index: usize, entries: u16, size: u16) -> Option<InflightRecord> {
        let len = layout::len(entries);
        let start = index.checked_mul(len)?;
        let is_there = start.checked_add(len).is_some_and(|end| end <= memory.len());
        let memory = is_there.then(|| memory.slice(start, len))?;
        let is_usable = memory.is_aligned_to(size_of::<u64>()) && size <= entries;
        is_usable.then_some(InflightRecord { memory, entries, size, counter: 0 })
    }

    /// Begins to record, or goes on with a record of a process that has ended: returns the first
    /// descriptors of its requests that were not answered, in order. `used_idx` is that of the used
    /// ring.
    pub(super) fn recover(&mut self, used_idx: u16) -> Vec<u16> {
        let is_ours = self.memory.load_u16(layout::VERSION) == layout::CURRENT_VERSION
            && self.memory.load_u16(layout::DESC_NUM) == self.entries;
        if !is_ours {
            self.memory.fill_zero();
            self.memory.store_u16(layout::DESC_NUM, self.entries);
            self.memory.store_u16(layout::USED_IDX, used_idx);
            self.memory.store_u16(layout::VERSION, layout::CURRENT_VERSION);
            return Vec::new();
        }
        // The last batch is in the used ring, but may be marked as in flight.
        let published = used_idx.wrapping_sub(self.memory.load_u16(layout::USED_IDX)).min(self.entries);
        let mut head = self.memory.load_u16(layout::LAST_BATCH_HEAD);
        for _ in 0..published {
            if head >= self.entries {
                break;
            }
            self.memory.store_u16(entry(head, layout::ENTRY_INFLIGHT), 0);
            head = self.memory.load_u16(entry(head, layout::ENTRY_NEXT));
        }
        self.memory.store_u16(layout::USED_IDX, used_idx);
        let is_in_flight =
            |head: &u16| self.memory.load_u16(entry(*head, layout::ENTRY_INFLIGHT)) & 0xff != 0;
        let counter = |head: u16| self.memory.load_u64(entry(head, layout::ENTRY_COUNTER));
        let mut unanswered: Vec<_> =
            (0..self.size).filter(is_in_flight).map(|head| (counter(head), head)).collect();
        unanswered.sort_unstable();
        self.counter = unanswered.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        unanswered.into_iter().map(|(_, head)| head).collect()
    }

    /// Notes that a request was fetched.
    #[inline]
    pub(super) fn begin(&mut self, head: u16) {
        self.memory.store_u64(entry(head, layout::ENTRY_COUNTER), self.counter);
        self.memory.store_u16(entry(head, layout::ENTRY_INFLIGHT), 1);
        self.counter = self.counter.wrapping_add(1);
    }

    /// Adds a request to the batch that the used ring gets next.
    #[inline]
    pub(super) fn add_to_batch(&self, head: u16) {
        let last = self.memory.load_u16(layout::LAST_BATCH_HEAD);
        self.memory.store_u16(entry(head, layout::ENTRY_NEXT), last);
        self.memory.store_u16(layout::LAST_BATCH_HEAD, head);
    }

    /// Notes that the used ring has the batch, and now `used_idx`.
    #[inline]
    pub(super) fn end_batch(&self, batch: &[u16], used_idx: u16) {
        for head in batch {
            self.memory.store_u16(entry(*head, layout::ENTRY_INFLIGHT), 0);
        }
        self.memory.store_u16(layout::USED_IDX, used_idx);
    }
}

/// Offset of a field of an entry. Callers have checked the descriptor against the size.
#[inline]
fn entry(head: u16, field: usize) -> usize {
    usize::from(head).wrapping_mul(layout::ENTRY).wrapping_add(layout::ENTRIES).wrapping_add(field)
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Memory;

    const SIZE: u16 = 8;

    /// The memory of two queues' records.
    fn memory() -> Seg {
        let len = layout::len(SIZE).saturating_mul(2);
        Memory::from_heap(len).seg(0, len)
    }

    fn record(memory: &Seg) -> InflightRecord {
        InflightRecord::of_queue(memory, 1, SIZE, SIZE).unwrap()
    }

    #[test]
    fn the_next_process_gets_the_requests_that_were_not_answered_in_order() {
        let memory = memory();
        let mut first = record(&memory);
        assert_eq!(first.recover(7), [0; 0]);
        [5, 0, 3, 1].into_iter().for_each(|head| first.begin(head));
        [0, 5].into_iter().for_each(|head| first.add_to_batch(head));
        first.end_batch(&[0, 5], 9);
        first.begin(0);
        let mut next = record(&memory);
        assert_eq!(next.recover(9), [3, 1, 0]);
        next.begin(2);
        assert_eq!(record(&memory).recover(9), [3, 1, 0, 2]);
    }

    #[test]
    fn a_process_that_was_killed_between_both_rings_has_answered_its_last_batch() {
        let memory = memory();
        let mut first = record(&memory);
        first.recover(u16::MAX);
        [4, 6, 2].into_iter().for_each(|head| first.begin(head));
        // The used ring has both, and the record only knows of their batch.
        [4, 2].into_iter().for_each(|head| first.add_to_batch(head));
        assert_eq!(record(&memory).recover(1), [6]);
        assert_eq!(record(&memory).recover(1), [6]);
    }

    #[test]
    fn records_are_as_far_apart_as_the_front_end_says_also_if_a_queue_is_smaller() {
        let memory = memory();
        let small = |index| InflightRecord::of_queue(&memory, index, SIZE, 2);
        let mut first = small(1).unwrap();
        first.recover(0);
        first.begin(1);
        let own = memory.slice(layout::len(SIZE), 16);
        assert_eq!(own.load_u16(layout::DESC_NUM), SIZE);
        assert_eq!(small(1).unwrap().recover(0), [1]);
        // The queue of the next guest may be larger; the one after it has no such descriptor.
        record(&memory).begin(5);
        assert_eq!(small(1).unwrap().recover(0), [1]);
        assert!(InflightRecord::of_queue(&memory, 0, SIZE, 16).is_none());
    }

    #[test]
    fn a_record_of_another_size_or_version_is_begun_anew() {
        let memory = memory();
        let mut first = record(&memory);
        first.recover(0);
        first.begin(1);
        memory.slice(layout::len(SIZE), 16).store_u16(layout::DESC_NUM, 4);
        assert_eq!(record(&memory).recover(0), [0; 0]);
        assert_eq!(memory.slice(layout::len(SIZE), 16).load_u16(layout::DESC_NUM), SIZE);
    }

    #[test]
    fn a_garbled_record_leads_nowhere_else() {
        let memory = memory();
        memory.copy_from(&vec![0xff; memory.len()]);
        let own = memory.slice(layout::len(SIZE), 16);
        own.store_u16(layout::VERSION, layout::CURRENT_VERSION);
        own.store_u16(layout::DESC_NUM, SIZE);
        assert_eq!(record(&memory).recover(3).len(), usize::from(SIZE));
        assert!(InflightRecord::of_queue(&memory, 2, SIZE, SIZE).is_none());
        assert!(InflightRecord::of_queue(&memory, usize::MAX, SIZE, SIZE).is_none());
        assert!(InflightRecord::of_queue(&memory.slice(4, layout::len(SIZE)), 0, SIZE, SIZE).is_none());
    }
}
