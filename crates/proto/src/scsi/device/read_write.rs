//! READ and WRITE of 6 to 16 bytes, WRITE ATOMIC (SBC-4).

use super::task::{CommandContext, DeviceTaskState, HandlerAction, MultiStepCommand, TaskOutcome};
use crate::scsi::sense::Sense;
use crate::volume_state::AtomicRange;
use blockmux_volume::{Op, Output, SgList};
use blockmux_wire::scsi::cdb::FUA;

#[inline]
pub(super) fn read(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let range = cx.range()?;
    cx.check_transfer(&range, cx.length_field())?;
    if range.len == 0 {
        return Ok(HandlerAction::good());
    }
    if range.flags & FUA != 0 && cx.unit.view.info.write_cache {
        // SBC-4, FUA of the READ commands: cached blocks are written to the medium first.
        cx.work(FlushThenRead { offset: range.offset, len: range.len });
        return Ok(HandlerAction::Io(Op::Flush, 0, 0, None));
    }
    cx.last_io(Op::Read, range.offset, range.len, None)
}

#[inline]
pub(super) fn write(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let range = cx.range()?;
    cx.check_transfer(&range, cx.length_field())?;
    let Some(len) = cx.begin_write(&range)? else { return Ok(HandlerAction::good()) };
    *cx.state = DeviceTaskState::WriteData { offset: range.offset, fua: range.flags & FUA != 0 };
    cx.write_data_out(&range, len)
}

/// WRITE ATOMIC (16): TRANSFER LENGTH has 16 bits, and ATOMIC BOUNDARY the two bytes before it.
pub(super) fn write_atomic(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let cdb = &cx.command.cdb;
    let (boundary, blocks) = (cdb.u16(10), cdb.u16(12));
    let range = cx.range_of(cdb.u64(2), blocks.into())?;
    // Boundaries are not supported (VPD page B0h, MAXIMUM ATOMIC BOUNDARY SIZE is 0).
    if boundary != 0 {
        return Err(Sense::in_cdb(10).into());
    }
    if u32::from(blocks) > cx.unit.view.max_atomic_blocks() {
        return Err(Sense::in_cdb(12).into());
    }
    cx.check_writable()?;
    if range.len == 0 {
        return Ok(HandlerAction::good());
    }
    let fua = range.flags & FUA != 0;
    let atomic = AtomicRange::new(&cx.unit.unit.volume_state, range.offset, range.len);
    cx.work(Atomic { range: atomic, fua });
    cx.data_out(range.len)
}

/// A READ with FUA on a volume with a write cache.
struct FlushThenRead {
    offset: u64,
    len: u64,
}

impl MultiStepCommand for FlushThenRead {
    fn on_io(&mut self, cx: &mut CommandContext<'_>, _output: Output) -> TaskOutcome {
        cx.last_io(Op::Read, self.offset, self.len, None)
    }
}

/// A write that other commands see completely or not at all.
struct Atomic {
    range: AtomicRange,
    fua: bool,
}

impl MultiStepCommand for Atomic {
    fn on_data_out(&mut self, _cx: &mut CommandContext<'_>, data: SgList) -> TaskOutcome {
        let (offset, len) = (self.range.offset(), self.range.len());
        Ok(HandlerAction::Io(Op::Write { fua: self.fua }, offset, len, Some(data)))
    }

    fn atomic_range(&mut self) -> Option<&mut AtomicRange> {
        Some(&mut self.range)
    }

    fn on_io(&mut self, _cx: &mut CommandContext<'_>, _output: Output) -> TaskOutcome {
        Ok(HandlerAction::good())
    }
}

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::DeviceBench;

    #[test]
    fn all_forms_of_read_and_write_access_the_same_data() {
        let bench = DeviceBench::new();
        let mut client = bench.client("a");
        let blocks: Vec<u8> = (0..1024).map(|i| (i / 7) as u8).collect();
        let writes: [&[u8]; 4] = [
            &[0x0a, 0, 0, 5, 2, 0],
            &[0x2a, 8, 0, 0, 0, 5, 0, 0, 2, 0],
            &[0xaa, 0, 0, 0, 0, 5, 0, 0, 0, 2, 0, 0],
            &[0x8a, 0x18, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 2, 0, 0],
        ];
        for (i, write) in writes.into_iter().enumerate() {
            let mut blocks = blocks.clone();
            blocks[0] = i as u8;
            client.run_with(write, &blocks).good();
            for mut read in writes.map(<[u8]>::to_vec) {
                read[0] -= 2;
                assert_eq!(client.run(&read).good(), blocks);
            }
        }
    }

    #[test]
    fn a_write_from_an_initiator_that_expects_to_read_is_rejected() {
        let bench = DeviceBench::new();
        let mut client = bench.client("a");
        let (read, write) = ([0x28, 0, 0, 0, 0, 5, 0, 0, 2, 0], [0x2a, 0, 0, 0, 0, 5, 0, 0, 2, 0]);
        client.run_with(&write, &[7; 1024]).good();
        assert_eq!(client.run(&write).check(), (5, 0x0e03));
        assert_eq!(client.run(&read).good(), [7; 1024]);
    }

    #[test]
    fn blocks_beyond_the_end_are_out_of_range() {
        let bench = DeviceBench::new();
        let mut client = bench.client("a");
        let last = 16384_u32;
        let read = |client: &mut super::super::testing::TestNexus, lba: u32, blocks: u16| {
            let mut cdb = vec![0x28, 0];
            cdb.extend(lba.to_be_bytes());
            cdb.push(0);
            cdb.extend(blocks.to_be_bytes());
            cdb.push(0);
            client.run(&cdb)
        };
        assert_eq!(read(&mut client, last - 1, 1).good().len(), 512);
        assert_eq!(read(&mut client, last - 1, 2).check(), (5, 0x2100));
        assert_eq!(read(&mut client, last, 0).good(), []);
        assert_eq!(read(&mut client, last + 1, 0).check(), (5, 0x2100));
        assert_eq!(
            client.run(&[0x88, 0, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 1, 0, 0]).check(),
            (5, 0x2100)
        );
    }

    #[test]
    fn protection_information_is_refused() {
        let mut client = DeviceBench::new().client("a");
        assert_eq!(client.run(&[0x28, 0x20, 0, 0, 0, 0, 0, 0, 1, 0]).check(), (5, 0x2400));
        assert_eq!(client.run_with(&[0x2a, 0xe0, 0, 0, 0, 0, 0, 0, 1, 0], &[0; 512]).check(), (5, 0x2400));
    }

    #[test]
    fn a_write_with_too_little_data_writes_whole_blocks_and_reports_the_residual() {
        let mut client = DeviceBench::new().client("a");
        let two = [0x2a, 0, 0, 0, 0, 0, 0, 0, 2, 0];
        let none = client.run_with(&two, &[]);
        assert_eq!(none.transfer_len, 1024);
        none.good();
        let part = client.run_with(&two, &[7; 500]);
        assert_eq!(part.transfer_len, 1024);
        assert_eq!(part.check(), (5, 0x0e03));
        assert_eq!(client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good(), [0; 512]);
        let short = client.run_with(&two, &[7; 512]);
        assert_eq!(short.transfer_len, 1024);
        short.good();
        let both = client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 2, 0]).good();
        assert_eq!((&both[..512], &both[512..]), (&[7; 512][..], &[0; 512][..]));
        let long = client.run_with(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[7; 1024]);
        assert_eq!(long.transfer_len, 512);
        long.good();
    }
}
