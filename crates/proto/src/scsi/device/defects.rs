//! READ DEFECT DATA (SBC-4).

use super::task::{CommandContext, TaskOutcome, answer};

/// READ DEFECT DATA (10): empty defect lists, because the storage below a volume hides its defects.
pub(super) fn read_10(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let cdb = &cx.command.cdb;
    answer(&[0, format(cdb.byte(2)), 0, 0], cdb.u16(7).into())
}

/// READ DEFECT DATA (12): empty defect lists with a header of eight bytes.
pub(super) fn read_12(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let cdb = &cx.command.cdb;
    answer(&[0, format(cdb.byte(1)), 0, 0, 0, 0, 0, 0], cdb.u32(6) as usize)
}

/// Returns REQ_PLIST, REQ_GLIST and DEFECT LIST FORMAT of the CDB.
fn format(flags: u8) -> u8 {
    flags & 0x1f
}

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::DeviceBench;

    #[test]
    fn there_are_no_defects() {
        let mut client = DeviceBench::new().client("a");
        assert_eq!(client.run(&[0x37, 0, 0x1d, 0, 0, 0, 0, 0, 32, 0]).good(), [0, 0x1d, 0, 0]);
        assert_eq!(
            client.run(&[0xb7, 0x0d, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0]).good(),
            [0, 0x0d, 0, 0, 0, 0, 0, 0]
        );
    }
}
