//! UNMAP and GET LBA STATUS (SBC-4).

use super::task::{BlockRange, CommandContext, HandlerAction, MultiStepCommand, TaskOutcome, answer};
use crate::scsi::sense::Sense;
use blockmux_volume::{Extent, Op, Output};
use blockmux_wire::scsi::provisioning::*;
use blockmux_wire::scsi::sense::Asc;
use smallvec::SmallVec;
use zerocopy::{FromBytes, IntoBytes, U32, U64};

/// MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT.
pub(super) const MAX_UNMAP_DESCRIPTORS: u32 = 256;

pub(super) fn unmap(cx: &mut CommandContext<'_>) -> TaskOutcome {
    cx.check_writable()?;
    let len = cx.command.cdb.u16(7).into();
    cx.parameters(len, size_of::<UnmapHeader>(), unmap_listed)
}

/// Checks all descriptors before the first is executed.
fn unmap_listed(cx: &mut CommandContext<'_>, bytes: &[u8]) -> TaskOutcome {
    let (header, rest) = UnmapHeader::ref_from_prefix(bytes).map_err(|_| Sense::in_parameters(0))?;
    let listed = rest.get(..header.unmap_block_descriptor_data_length.get().into()).unwrap_or(rest);
    let count = listed.len().checked_div(size_of::<UnmapDescriptor>()).unwrap_or(0);
    // SBC-4, the UNMAP command: an incomplete descriptor at the end is ignored.
    let (descriptors, _) = <[UnmapDescriptor]>::ref_from_prefix_with_elems(listed, count)
        .map_err(|_| Sense::in_parameters(2))?;
    if descriptors.len() > MAX_UNMAP_DESCRIPTORS as usize {
        return Err(Sense::in_parameters(2).into());
    }
    let mut ranges: SmallVec<[BlockRange; 1]> = SmallVec::new();
    for descriptor in descriptors {
        let range = cx.blocks(
            descriptor.logical_block_address.get(),
            descriptor.number_of_logical_blocks.get().into(),
        )?;
        if range.len > 0 {
            ranges.push(range);
        }
    }
    let anchor = cx.command.cdb.byte(1) & UNMAP_ANCHOR != 0;
    let op = match cx.unit.view.unmaps_to_zeroes() {
        _ if anchor => Op::WriteZeroes { fua: false, may_unmap: false, only_fast: false },
        true => Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false },
        false => Op::Discard { fua: false },
    };
    match ranges.as_slice() {
        [] => Ok(HandlerAction::good()),
        [only] => cx.last_io(op, only.offset, only.len, None),
        [first, ..] => {
            let first = *first;
            cx.work(Unmap { op, ranges, next: 1 });
            Ok(HandlerAction::Io(op, first.offset, first.len, None))
        }
    }
}

/// Executes the ranges of an UNMAP one after the other.
struct Unmap {
    op: Op,
    ranges: SmallVec<[BlockRange; 1]>,
    next: usize,
}

impl MultiStepCommand for Unmap {
    fn on_io(&mut self, _cx: &mut CommandContext<'_>, _output: Output) -> TaskOutcome {
        let Some(range) = self.ranges.get(self.next) else { return Ok(HandlerAction::good()) };
        self.next = self.next.saturating_add(1);
        Ok(HandlerAction::Io(self.op, range.offset, range.len, None))
    }
}

pub(super) fn get_lba_status(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let lba = cx.command.cdb.u64(2);
    let rest = cx.unit.view.blocks.saturating_sub(lba);
    if rest == 0 {
        return Err(Sense::illegal(Asc::LOGICAL_BLOCK_ADDRESS_OUT_OF_RANGE).with_information(lba).into());
    }
    let range = cx.blocks(lba, rest)?;
    if !cx.unit.view.is_thin() {
        return answer_status(cx, lba, &[(rest, false)]);
    }
    let size = cx.unit.view.blocks.saturating_mul(cx.unit.view.block_len.into());
    let erased = cx.unit.unit.read_state(|state| state.erased);
    if erased.is_some_and(|erased| erased.holds(&cx.unit.unit.volume_state, size)) {
        return answer_status(cx, lba, &[(rest, true)]);
    }
    cx.work(GetLbaStatus { range });
    Ok(HandlerAction::Io(Op::BlockStatus, range.offset, range.len, None))
}

struct GetLbaStatus {
    range: BlockRange,
}

impl MultiStepCommand for GetLbaStatus {
    fn on_io(&mut self, cx: &mut CommandContext<'_>, output: Output) -> TaskOutcome {
        let extents = match output {
            Output::Extents(extents) => extents,
            _ => Vec::new(),
        };
        let runs = to_blocks(&extents, cx.unit.view.block_len.into());
        match runs.is_empty() {
            true => answer_status(cx, self.range.lba, &[(self.range.blocks, false)]),
            false => answer_status(cx, self.range.lba, &runs),
        }
    }
}

/// Converts extents to runs of blocks with their deallocated flag. A block that is partly a hole is
/// mapped.
fn to_blocks(extents: &[Extent], block_len: u64) -> Vec<(u64, bool)> {
    let (mut byte, mut block) = (0_u64, 0_u64);
    let mut runs: Vec<(u64, bool)> = Vec::new();
    for extent in extents {
        byte = byte.saturating_add(extent.len);
        let whole = byte.checked_div(block_len).unwrap_or(0);
        let end = if extent.hole { whole } else { byte.div_ceil(block_len.max(1)) };
        let blocks = end.saturating_sub(block);
        block = block.max(end);
        match runs.last_mut() {
            _ if blocks == 0 => {}
            Some(last) if last.1 == extent.hole => last.0 = last.0.saturating_add(blocks),
            _ => runs.push((blocks, extent.hole)),
        }
    }
    runs
}

fn answer_status(cx: &CommandContext<'_>, lba: u64, runs: &[(u64, bool)]) -> TaskOutcome {
    let allocation_length = cx.command.cdb.u32(10) as usize;
    let room = allocation_length.saturating_sub(8).checked_div(16).unwrap_or(0).clamp(1, MAX_STATUS);
    let mut descriptors = Vec::new();
    let mut lba = lba;
    for &(blocks, deallocated) in runs {
        let mut left = blocks;
        while left > 0 && descriptors.len() < room {
            // NUMBER OF LOGICAL BLOCKS has 32 bits.
            let here = left.min(u32::MAX.into());
            descriptors.push(LbaStatusDescriptor {
                lba_status_logical_block_address: U64::new(lba),
                lba_status_number_of_logical_blocks: U32::new(here as u32),
                provisioning_status: if deallocated { DEALLOCATED } else { MAPPED },
                reserved: [0; 3],
            });
            lba = lba.saturating_add(here);
            left = left.saturating_sub(here);
        }
    }
    let length = descriptors.as_bytes().len().saturating_add(4);
    let mut bytes = (length as u32).to_be_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(descriptors.as_bytes());
    answer(&bytes, allocation_length)
}

/// Maximum number of descriptors in the parameter data.
const MAX_STATUS: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scsi::device::testing::{DeviceBench, TestNexus, command, shaped};
    use crate::scsi::{Lun, TaskStep};
    use crate::volume_state::{Meter, Origin};
    use blockmux_volume::{Io, Tag, VolumeInfo};

    fn list(ranges: &[(u64, u32)]) -> Vec<u8> {
        let len = 16_u16.checked_mul(ranges.len() as u16).unwrap();
        let mut bytes = Vec::new();
        bytes.extend(len.saturating_add(6).to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes.extend([0; 4]);
        for (lba, blocks) in ranges {
            bytes.extend(lba.to_be_bytes());
            bytes.extend(blocks.to_be_bytes());
            bytes.extend([0; 4]);
        }
        bytes
    }

    fn unmap(client: &mut TestNexus, ranges: &[(u64, u32)]) -> crate::scsi::device::testing::TestResponse {
        let list = list(ranges);
        let [high, low] = (list.len() as u16).to_be_bytes();
        client.run_with(&[0x42, 0, 0, 0, 0, 0, 0, high, low, 0], &list)
    }

    fn status(client: &mut TestNexus, lba: u32, allocation_length: u8) -> Vec<u8> {
        let [a, b, c, d] = lba.to_be_bytes();
        client.run(&[0x9e, 0x12, 0, 0, 0, 0, a, b, c, d, 0, 0, 0, allocation_length, 0, 0]).good()
    }

    /// On a block device with 4096-byte blocks, whatever its block status.
    #[test]
    fn all_blocks_are_deallocated_after_a_block_erase_until_the_volume_changes() {
        let device = VolumeInfo {
            logical_block: 4096,
            discard_granularity: 4096,
            fast_zeroes: true,
            ..VolumeInfo::new(1 << 20)
        };
        let bench = DeviceBench::over(shaped(device));
        let meter = Meter::new(&bench.unit.volume_state, Origin::default());
        let mut client = bench.client("a");
        let mut asks_volume = || {
            let cdb = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 0, 0];
            matches!(client.server.begin(&command(Lun::new(0), &cdb, 0)).1, TaskStep::Io { .. })
        };
        assert!(asks_volume());
        bench.client("b").run_waiting(&[0x48, 2, 0, 0, 0, 0, 0, 0, 0, 0], &[]).good();
        let answer = status(&mut bench.client("c"), 0, 255);
        let expected = (&[0, 0, 0, 20][..], &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1][..]);
        assert_eq!((&answer[..4], &answer[8..21]), expected);
        let io = |op| Io { tag: Tag(0), op, offset: 0, len: 4096, data: None };
        for op in [Op::Read, Op::Flush, Op::BlockStatus, Op::Prefetch] {
            meter.count(&io(op));
            assert!(!asks_volume(), "{op:?} maps nothing");
        }
        meter.count(&io(Op::Write { fua: false }));
        assert!(asks_volume());
        // After an overwrite they are mapped.
        bench.client("d").run_waiting(&[0x48, 1, 0, 0, 0, 0, 0, 0, 8, 0], &[1, 0, 0, 4, 1, 2, 3, 4]).good();
        assert!(asks_volume());
    }

    #[test]
    fn unmapped_blocks_read_as_zeroes() {
        let mut client = DeviceBench::new().client("a");
        client.run_with(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0], &[1; 4096]).good();
        unmap(&mut client, &[(1, 2)]).good();
        unmap(&mut client, &[(4, 1), (5, 0), (7, 1)]).good();
        let read = client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0]).good();
        let zero: Vec<bool> = read.chunks(512).map(|block| block == [0; 512]).collect();
        assert_eq!(zero, [false, true, true, false, true, false, false, true]);
    }

    #[test]
    fn an_unmap_out_of_range_or_of_too_much_does_nothing() {
        let mut client = DeviceBench::new().client("a");
        client.run_with(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[1; 512]).good();
        assert_eq!(unmap(&mut client, &[(0, 1), (16384, 1)]).check(), (5, 0x2100));
        assert_eq!(unmap(&mut client, &[(0, 1); 257]).check(), (5, 0x2600));
        assert_eq!(client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good(), [1; 512]);
        unmap(&mut client, &[(16384, 0)]).good();
        unmap(&mut client, &[]).good();
        client.run(&[0x42, 0, 0, 0, 0, 0, 0, 0, 0, 0]).good();
        assert_eq!(client.run_with(&[0x42, 0, 0, 0, 0, 0, 0, 0, 7, 0], &[0; 7]).check(), (5, 0x1a00));
    }

    #[test]
    fn lba_status_distinguishes_holes_from_data() {
        let mut client = DeviceBench::new().client("a");
        client.run_with(&[0x2a, 0, 0, 0, 0, 0, 0, 1, 0, 0], &[1; 256 * 512]).good();
        unmap(&mut client, &[(128, 128)]).good();
        let descriptor = |lba: u32, blocks: u32, hole: u8| {
            let mut bytes = vec![0; 4];
            bytes.extend(lba.to_be_bytes());
            bytes.extend(blocks.to_be_bytes());
            bytes.extend([hole, 0, 0, 0]);
            bytes
        };
        let two = [descriptor(5, 123, 0), descriptor(128, 16256, 1)].concat();
        assert_eq!(status(&mut client, 5, 255), [vec![0, 0, 0, 36, 0, 0, 0, 0], two].concat());
        let one = [vec![0, 0, 0, 20, 0, 0, 0, 0], descriptor(5, 123, 0)].concat();
        assert_eq!(status(&mut client, 5, 24), one);
        let beyond = client.run(&[0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 24, 0, 0]);
        assert_eq!(beyond.check(), (5, 0x2100));
    }

    #[test]
    fn a_block_that_is_a_hole_in_part_is_mapped() {
        let extent = |len, hole| Extent { len, hole, zero: hole };
        let extents = [extent(100, true), extent(500, false), extent(1000, true), extent(448, false)];
        assert_eq!(to_blocks(&extents, 512), [(2, false), (1, true), (1, false)]);
    }
}
