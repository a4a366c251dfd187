//! Converts a server's block status descriptors to extents of whole logical blocks.

use blockmux_volume::Extent;

/// Collects descriptors in order. A block that several descriptors cover is a hole, or zero, if all
/// of them are.
pub(super) struct ExtentCollector {
    list: Vec<Extent>,
    /// Length of the request, in bytes; descriptors are truncated there.
    asked: u64,
    /// Number of bytes described so far.
    described: u64,
    /// The volume's logical block, in bytes.
    block: u64,
    /// The described beginning of an incomplete block; less than a block long.
    partial: Extent,
}

impl ExtentCollector {
    /// A collector for a request of `asked` bytes and logical blocks of `block` bytes.
    pub(super) fn new(asked: u64, block: u32) -> ExtentCollector {
        let partial = Extent { len: 0, hole: false, zero: false };
        ExtentCollector { list: Vec::new(), asked, described: 0, block: u64::from(block).max(1), partial }
    }

    /// Whether the complete request has been described.
    pub(super) fn is_whole(&self) -> bool {
        self.described >= self.asked
    }

    /// Whether nothing has been described.
    pub(super) fn is_empty(&self) -> bool {
        self.described == 0
    }

    /// Adds the next descriptor.
    pub(super) fn push(&mut self, next: Extent) {
        let len = next.len.min(self.asked.saturating_sub(self.described));
        self.described = self.described.saturating_add(len);
        if self.list.len() >= MAX_EXTENTS {
            return;
        }
        let mut left = len;
        if self.partial.len > 0 {
            let here = left.min(self.block.saturating_sub(self.partial.len));
            left = left.saturating_sub(here);
            self.partial.len = self.partial.len.saturating_add(here);
            self.partial.hole &= next.hole;
            self.partial.zero &= next.zero;
            if self.partial.len == self.block {
                self.append(self.partial);
                self.partial.len = 0;
            }
        }
        let partial = left.checked_rem(self.block).unwrap_or(0);
        self.append(Extent { len: left.saturating_sub(partial), ..next });
        if partial > 0 {
            self.partial = Extent { len: partial, ..next };
        }
    }

    /// The extents, in whole blocks; at least one if there was a descriptor.
    pub(super) fn into_list(mut self) -> Vec<Extent> {
        if self.list.is_empty() && self.partial.len > 0 {
            // The end of the block is unknown, and reporting data is always correct.
            self.append(Extent { len: self.block, hole: false, zero: false });
        }
        self.list
    }

    fn append(&mut self, next: Extent) {
        if next.len == 0 {
            return;
        }
        match self.list.last_mut() {
            Some(last) if (last.hole, last.zero) == (next.hole, next.zero) => {
                last.len = last.len.saturating_add(next.len);
            }
            _ => self.list.push(next),
        }
    }
}

/// The maximum number of extents of one reply; block status may cover less than the request.
pub(super) const MAX_EXTENTS: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(len: u64, state: u32) -> Extent {
        Extent { len, hole: state & 1 != 0, zero: state & 2 != 0 }
    }

    fn collect(asked: u64, block: u32, descriptors: &[(u64, u32)]) -> Vec<Extent> {
        let mut extents = ExtentCollector::new(asked, block);
        descriptors.iter().for_each(|&(len, state)| extents.push(extent(len, state)));
        extents.into_list()
    }

    #[test]
    fn equal_neighbours_join_and_the_excess_is_cut() {
        assert_eq!(
            collect(4096, 512, &[(1024, 3), (1024, 3), (1024, 0), (u64::MAX, 3)]),
            [extent(2048, 3), extent(1024, 0), extent(1024, 3)]
        );
    }

    #[test]
    fn a_block_that_is_described_in_pieces_is_what_all_of_them_are() {
        assert_eq!(
            collect(2048, 512, &[(600, 3), (300, 2), (124, 2), (1024, 0)]),
            [extent(512, 3), extent(512, 2), extent(1024, 0)]
        );
    }

    #[test]
    fn less_than_a_block_is_a_block_of_data_and_a_cut_off_tail_is_dropped() {
        assert_eq!(collect(2048, 512, &[(100, 3)]), [extent(512, 0)]);
        assert_eq!(collect(2048, 512, &[(700, 3)]), [extent(512, 3)]);
    }

    #[test]
    fn the_number_of_stored_extents_is_limited() {
        let many: Vec<_> = (0..2 * MAX_EXTENTS as u64).map(|n| (512, (n % 2) as u32)).collect();
        assert_eq!(collect(u64::MAX, 512, &many).len(), MAX_EXTENTS);
    }
}
