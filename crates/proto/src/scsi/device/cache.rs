//! SYNCHRONIZE CACHE and PRE-FETCH (SBC-4).

use super::task::{Action, Context, TaskOutcome};
use blockmux_volume::Op;

/// Makes every completed write stable, whatever the range: a volume has one cache. IMMED is not
/// taken at its word, so that GOOD always means stable.
pub(super) fn synchronize(cx: &mut Context<'_>) -> TaskOutcome {
    let Some(range) = cx.command.cdb.range() else { return Ok(Action::good()) };
    cx.blocks(range.lba, range.blocks.into())?;
    cx.last_io(Op::Flush, 0, 0, None)
}

/// SBC-4, the PRE-FETCH commands: GOOD, and not CONDITION MET, says that there may be no room in
/// the cache for all of the blocks: a volume takes it as a hint. 0 blocks mean all that follow.
pub(super) fn pre_fetch(cx: &mut Context<'_>) -> TaskOutcome {
    let Some(range) = cx.command.cdb.range() else { return Ok(Action::good()) };
    let rest = cx.unit.view.blocks.saturating_sub(range.lba);
    let range = cx.blocks(range.lba, range.blocks.into())?;
    let range = if range.blocks == 0 { cx.blocks(range.lba, rest)? } else { range };
    if range.len == 0 {
        return Ok(Action::good());
    }
    cx.last_io(Op::Prefetch, range.offset, range.len, None)
}

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::{Bench, command};
    use crate::scsi::{Lun, Step};
    use blockmux_volume::Op;

    #[test]
    fn both_forms_of_synchronize_cache_flush() {
        let bench = Bench::new();
        let mut client = bench.client("a");
        for cdb in
            [&[0x35, 2, 0, 0, 0, 1, 0, 0, 0, 0][..], &[0x91, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0]]
        {
            let (_, step) = client.server.begin(&command(Lun::new(0), cdb, 0));
            assert!(matches!(step, Step::Io { io, .. } if io.op == Op::Flush), "{cdb:x?}");
            assert_eq!(client.run(cdb).good(), []);
        }
        assert_eq!(client.run(&[0x35, 0, 0, 0, 0x40, 1, 0, 0, 0, 0]).check(), (5, 0x2100));
    }

    #[test]
    fn pre_fetch_takes_every_range_that_exists() {
        let mut client = Bench::new().client("a");
        client.run(&[0x34, 2, 0, 0, 0, 0, 0, 0, 1, 0]).good();
        client.run(&[0x34, 0, 0, 0, 0, 9, 0, 0, 0, 0]).good();
        client.run(&[0x90, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 0, 0, 0]).good();
        assert_eq!(client.run(&[0x34, 0, 0, 0, 0x40, 1, 0, 0, 0, 0]).check(), (5, 0x2100));
        assert_eq!(client.run(&[0x34, 0, 0, 0, 0x3f, 0xff, 0, 0, 2, 0]).check(), (5, 0x2100));
    }
}
