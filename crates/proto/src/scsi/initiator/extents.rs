//! Conversion of LBA status descriptors to extents (SBC-4).

use blockmux_volume::Extent;
use blockmux_wire::scsi::provisioning::{ANCHORED, DEALLOCATED, LbaStatusDescriptor};
use zerocopy::FromBytes;

/// Converts GET LBA STATUS parameter data that covers `block_count` blocks from `lba` on to merged
/// extents in bytes. Empty if it describes none of these blocks.
pub(super) fn parse(
    data: &[u8],
    lba: u64,
    block_count: u64,
    block_len: u32,
    unmapped_is_zero: bool,
) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    let mut rest = data.get(HEADER_LEN..).unwrap_or_default();
    let mut at = lba;
    let end = lba.saturating_add(block_count);
    while at < end
        && let Ok((descriptor, tail)) = LbaStatusDescriptor::read_from_prefix(rest)
    {
        rest = tail;
        let first = descriptor.lba_status_logical_block_address.get();
        let count = u64::from(descriptor.lba_status_number_of_logical_blocks.get());
        let last = first.saturating_add(count).min(end);
        // The first descriptor may begin earlier; after it there are no gaps.
        if first > at || last <= at {
            break;
        }
        let len = last.saturating_sub(at).saturating_mul(block_len.into());
        at = last;
        let status = descriptor.provisioning_status & STATUS_MASK;
        // Anchored blocks have space allocated. Blocks with other statuses may hold data: SBC-4
        // defines 3 as mapped and 4 as unknown.
        let hole = status == DEALLOCATED;
        let zero = (hole || status == ANCHORED) && unmapped_is_zero;
        match extents.last_mut() {
            Some(before) if (before.hole, before.zero) == (hole, zero) => {
                before.len = before.len.saturating_add(len);
            }
            _ => extents.push(Extent { len, hole, zero }),
        }
    }
    extents
}

/// Length of the header: PARAMETER DATA LENGTH and reserved bytes.
const HEADER_LEN: usize = 8;
/// PROVISIONING STATUS.
const STATUS_MASK: u8 = 0x0f;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    fn data(descriptors: &[(u64, u32, u8)]) -> Vec<u8> {
        let mut data = vec![0; HEADER_LEN];
        for &(lba, count, provisioning_status) in descriptors {
            let descriptor = LbaStatusDescriptor {
                lba_status_logical_block_address: lba.into(),
                lba_status_number_of_logical_blocks: count.into(),
                provisioning_status,
                reserved: [0; 3],
            };
            data.extend(descriptor.as_bytes());
        }
        data
    }

    fn extent(blocks: u64, hole: bool, zero: bool) -> Extent {
        Extent { len: blocks.saturating_mul(512), hole, zero }
    }

    #[test]
    fn descriptors_are_cut_to_the_requested_blocks_and_merged() {
        let data = data(&[(0, 12, 1), (12, 4, 0), (16, 4, 0), (20, 100, 2)]);
        let expected = [extent(2, true, true), extent(8, false, false), extent(10, false, true)];
        assert_eq!(parse(&data, 10, 20, 512, true), expected);
        assert_eq!(parse(&data, 10, 2, 512, false), [extent(2, true, false)]);
    }

    #[test]
    fn blocks_with_other_statuses_may_hold_data() {
        for status in 3..16 {
            assert_eq!(
                parse(&data(&[(0, 4, status)]), 0, 4, 512, true),
                [extent(4, false, false)],
                "{status}"
            );
        }
    }

    #[test]
    fn descriptors_of_other_blocks_are_dropped() {
        assert_eq!(parse(&data(&[(0, 4, 1), (9, 4, 0)]), 0, 20, 512, true), [extent(4, true, true)]);
        for wrong in [&[(5, 4, 1)][..], &[(0, 0, 1)], &[]] {
            assert_eq!(parse(&data(wrong), 0, 20, 512, true), []);
        }
        assert_eq!(parse(b"short", 0, 20, 512, true), []);
        assert_eq!(parse(&data(&[(u64::MAX, u32::MAX, 0)]), u64::MAX, 1, 512, true), []);
    }
}
