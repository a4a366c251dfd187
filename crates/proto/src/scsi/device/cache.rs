//! SYNCHRONIZE CACHE and PRE-FETCH (SBC-4).

use super::task::{CommandContext, HandlerAction, TaskOutcome};
use blockmux_volume::Op;

/// SYNCHRONIZE CACHE: flushes the whole volume, whatever the range. IMMED is ignored, so GOOD
/// always means stable data.
pub(super) fn synchronize(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let Some(range) = cx.command.cdb.range() else { return Ok(HandlerAction::good()) };
    cx.blocks(range.lba, range.blocks.into())?;
    cx.last_io(Op::Flush, 0, 0, None)
}

/// PRE-FETCH (SBC-4): returns GOOD rather than CONDITION MET, because the volume may ignore the
/// hint. A length of 0 means all blocks to the end.
pub(super) fn pre_fetch(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let Some(range) = cx.command.cdb.range() else { return Ok(HandlerAction::good()) };
    let rest = cx.unit.view.blocks.saturating_sub(range.lba);
    let range = cx.blocks(range.lba, range.blocks.into())?;
    let range = if range.blocks == 0 { cx.blocks(range.lba, rest)? } else { range };
    if range.len == 0 {
        return Ok(HandlerAction::good());
    }
    cx.last_io(Op::Prefetch, range.offset, range.len, None)
}

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::{DeviceBench, command};
    use crate::scsi::{Lun, TaskStep};
    use blockmux_volume::Op;

    #[test]
    fn both_forms_of_synchronize_cache_flush() {
        let bench = DeviceBench::new();
        let mut client = bench.client("a");
        for cdb in
            [&[0x35, 2, 0, 0, 0, 1, 0, 0, 0, 0][..], &[0x91, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0]]
        {
            let (_, step) = client.server.begin(&command(Lun::new(0), cdb, 0));
            assert!(matches!(step, TaskStep::Io { io, .. } if io.op == Op::Flush), "{cdb:x?}");
            assert_eq!(client.run(cdb).good(), []);
        }
        assert_eq!(client.run(&[0x35, 0, 0, 0, 0x40, 1, 0, 0, 0, 0]).check(), (5, 0x2100));
    }

    #[test]
    fn pre_fetch_takes_every_range_that_exists() {
        let mut client = DeviceBench::new().client("a");
        client.run(&[0x34, 2, 0, 0, 0, 0, 0, 0, 1, 0]).good();
        client.run(&[0x34, 0, 0, 0, 0, 9, 0, 0, 0, 0]).good();
        client.run(&[0x90, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 0, 0, 0]).good();
        assert_eq!(client.run(&[0x34, 0, 0, 0, 0x40, 1, 0, 0, 0, 0]).check(), (5, 0x2100));
        assert_eq!(client.run(&[0x34, 0, 0, 0, 0x3f, 0xff, 0, 0, 2, 0]).check(), (5, 0x2100));
    }
}
