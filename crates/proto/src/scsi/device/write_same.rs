//! WRITE SAME (SBC-4).

use super::task::{CommandContext, HandlerAction, MultiStepCommand, PIECE, TaskOutcome};
use crate::scsi::bytes::is_zero;
use crate::scsi::sense::Sense;
use blockmux_volume::{Op, Output, Seg, SgList};
use blockmux_wire::scsi::opcode::ScsiOpcode;
use blockmux_wire::scsi::provisioning::{WRITE_SAME_ANCHOR, WRITE_SAME_NDOB, WRITE_SAME_UNMAP};

/// WRITE SAME: writes one block to each block of the range. A length of 0 is rejected (VPD page
/// B0h, WSNZ): initiators that use it with UNMAP expect zeroes whatever the block, as in libiscsi's
/// test with FFh.
///
/// A block of zeroes becomes one request, which may unmap with UNMAP and keeps the blocks
/// provisioned with ANCHOR. Any other block is written even with UNMAP, because later reads must
/// return it.
pub(super) fn write_same(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let range = cx.range()?;
    if range.blocks == 0 {
        return Err(Sense::in_cdb(cx.length_field()).into());
    }
    let (anchor, unmap) = (range.flags & WRITE_SAME_ANCHOR != 0, range.flags & WRITE_SAME_UNMAP != 0);
    let has_data = cx.command.cdb.opcode() != ScsiOpcode::WRITE_SAME_16 || range.flags & WRITE_SAME_NDOB == 0;
    if anchor && !unmap {
        return Err(Sense::cdb_bit(1, 4).into());
    }
    if unmap && !cx.unit.view.is_thin() {
        return Err(Sense::cdb_bit(1, 3).into());
    }
    cx.check_writable()?;
    let zeroes = Op::WriteZeroes { fua: false, may_unmap: unmap && !anchor, only_fast: false };
    if !has_data {
        return cx.last_io(zeroes, range.offset, range.len, None);
    }
    cx.work(WriteSame {
        offset: range.offset,
        left: range.len,
        writing: 0,
        zeroes,
        piece: SgList::default(),
    });
    cx.exact_data_out(cx.unit.view.block_len.into())
}

struct WriteSame {
    /// Offset and remaining length, in bytes.
    offset: u64,
    left: u64,
    /// Length of the current write, in bytes.
    writing: u64,
    zeroes: Op,
    /// Copies of the block for one write.
    piece: SgList,
}

impl WriteSame {
    fn next(&mut self) -> TaskOutcome {
        self.offset = self.offset.saturating_add(self.writing);
        self.left = self.left.saturating_sub(self.writing);
        if self.left == 0 {
            return Ok(HandlerAction::good());
        }
        self.writing = self.left.min(self.piece.len() as u64);
        let data = self.piece.slice(0, self.writing as usize);
        Ok(HandlerAction::Io(Op::Write { fua: false }, self.offset, self.writing, Some(data)))
    }
}

impl MultiStepCommand for WriteSame {
    fn on_data_out(&mut self, cx: &mut CommandContext<'_>, data: SgList) -> TaskOutcome {
        if is_zero(&data) {
            return cx.last_io(self.zeroes, self.offset, self.left, None);
        }
        let copies = self.left.min(PIECE).checked_div(data.len() as u64).unwrap_or(0).max(1);
        self.piece = Seg::from_slice(&data.to_vec().repeat(copies as usize)).into();
        self.next()
    }

    fn on_io(&mut self, _cx: &mut CommandContext<'_>, _output: Output) -> TaskOutcome {
        self.next()
    }
}

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::{DeviceBench, TestNexus, command};
    use crate::scsi::{Lun, TaskStep};
    use blockmux_volume::Op;

    fn read(client: &mut TestNexus, lba: u8, blocks: u16) -> Vec<u8> {
        let [high, low] = blocks.to_be_bytes();
        client.run(&[0x28, 0, 0, 0, 0, lba, 0, high, low, 0]).good()
    }

    #[test]
    fn one_block_is_written_to_every_block_of_the_range() {
        let mut client = DeviceBench::new().client("a");
        let block: Vec<u8> = (0..512).map(|i| i as u8).collect();
        client.run_with(&[0x41, 0, 0, 0, 0, 3, 0, 0x10, 1, 0], &block).good();
        assert_eq!(read(&mut client, 3, 4097), block.repeat(4097));
        assert_eq!(read(&mut client, 2, 1), [0; 512]);
        client.run_with(&[0x93, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 9, 0, 0], &[8; 512]).good();
        assert_eq!(read(&mut client, 3, 9), [8; 9 * 512]);
        assert_eq!(read(&mut client, 12, 1), block);
    }

    #[test]
    fn write_same_of_zero_blocks_is_rejected() {
        let mut client = DeviceBench::new().client("a");
        assert_eq!(client.run(&[0x12, 1, 0xb0, 1, 0, 0]).good()[4], 1);
        let none = |opcode: u8, flags: u8, len: usize| [&[opcode, flags][..], &vec![0; len]].concat();
        for cdb in [none(0x41, 0, 8), none(0x41, 8, 8), none(0x93, 0, 14)] {
            assert_eq!(client.run_with(&cdb, &[6; 512]).check(), (5, 0x2400));
        }
        assert_eq!(client.run(&none(0x93, 1, 14)).check(), (5, 0x2400));
    }

    #[test]
    fn zeroes_become_one_request_with_unmap_permission() {
        let bench = DeviceBench::new();
        let mut client = bench.client("a");
        let table = [(0x00, false), (0x08, true), (0x18, false)];
        for (flags, expected) in table {
            let cdb = [0x93, flags | 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0];
            let (_, step) = client.server.begin(&command(Lun::new(0), &cdb, 0));
            let TaskStep::Io { io, .. } = step else { panic!("{step:?}") };
            assert_eq!(io.op, Op::WriteZeroes { fua: false, may_unmap: expected, only_fast: false });
            let cdb = [0x41, flags, 0, 0, 0, 0, 0, 0, 8, 0];
            client.run_with(&cdb, &[0; 512]).good();
        }
    }

    #[test]
    fn contradictory_flags_are_rejected() {
        let mut client = DeviceBench::new().client("a");
        let anchor_alone = [0x41, 0x10, 0, 0, 0, 0, 0, 0, 8, 0];
        assert_eq!(client.run_with(&anchor_alone, &[0; 512]).check(), (5, 0x2400));
        for wrong in [256, 1024] {
            let unmap = [0x41, 8, 0, 0, 0, 0, 0, 0, 1, 0];
            assert_eq!(client.run_with(&unmap, &vec![0; wrong]).check(), (5, 0x0e03));
        }
    }
}
