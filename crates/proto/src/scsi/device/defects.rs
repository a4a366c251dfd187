//! READ DEFECT DATA (SBC-4).

use super::task::{Context, TaskOutcome, answer};

/// The lists are empty: whatever is below a volume hides its defects.
pub(super) fn read_10(cx: &mut Context<'_>) -> TaskOutcome {
    let cdb = &cx.command.cdb;
    answer(&[0, format(cdb.byte(2)), 0, 0], cdb.u16(7).into())
}

/// READ DEFECT DATA(12): no defects, with a head of eight bytes.
pub(super) fn read_12(cx: &mut Context<'_>) -> TaskOutcome {
    let cdb = &cx.command.cdb;
    answer(&[0, format(cdb.byte(1)), 0, 0, 0, 0, 0, 0], cdb.u32(6) as usize)
}

/// REQ_PLIST, REQ_GLIST and DEFECT LIST FORMAT come back as they were asked for.
fn format(wanted: u8) -> u8 {
    wanted & 0x1f
}

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::Bench;

    #[test]
    fn there_are_no_defects() {
        let mut client = Bench::new().client("a");
        assert_eq!(client.run(&[0x37, 0, 0x1d, 0, 0, 0, 0, 0, 32, 0]).good(), [0, 0x1d, 0, 0]);
        assert_eq!(
            client.run(&[0xb7, 0x0d, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0]).good(),
            [0, 0x0d, 0, 0, 0, 0, 0, 0]
        );
    }
}
