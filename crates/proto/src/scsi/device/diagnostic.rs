//! SEND DIAGNOSTIC (SPC-5): the default self-test, the only part that is mandatory.

use super::task::{CommandContext, HandlerAction, TaskOutcome};
use crate::scsi::sense::Sense;
use blockmux_volume::Op;

/// The self-test of a volume is a flush: it fails if the storage does not take what was written.
pub(super) fn send_diagnostic(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let (flags, len) = (cx.command.cdb.byte(1), cx.command.cdb.u16(3));
    if flags & SELF_TEST_CODE != 0 {
        return Err(Sense::cdb_bit(1, 7).into());
    }
    // There are no diagnostic pages.
    if len != 0 {
        return Err(Sense::in_cdb(3).into());
    }
    if flags & SELFTEST == 0 {
        return Ok(HandlerAction::good());
    }
    cx.last_io(Op::Flush, 0, 0, None)
}

const SELF_TEST_CODE: u8 = 0b111 << 5;
const SELFTEST: u8 = 1 << 2;

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::{DeviceBench, answer, command};
    use crate::scsi::{Lun, TaskStep};
    use blockmux_volume::{Completion, IoError, Op, Tag};

    const SELF_TEST: [u8; 6] = [0x1d, 4, 0, 0, 0, 0];

    #[test]
    fn a_self_test_succeeds_if_the_volume_can_be_flushed() {
        let mut client = DeviceBench::new().client("a");
        for flags in [4, 4 | 0x10, 4 | 3, 0] {
            client.run(&[0x1d, flags, 0, 0, 0, 0]).good();
        }
        let (mut task, step) = client.server.begin(&command(Lun::new(0), &SELF_TEST, 0));
        assert!(matches!(step, TaskStep::Io { io, .. } if io.op == Op::Flush));
        let done = Completion { tag: Tag(0), result: Err(IoError::Medium) };
        let TaskStep::Done(response) = client.server.on_io(&mut task, done) else { panic!("it is done") };
        assert_eq!(answer(response).check().0, 3, "MEDIUM ERROR");
    }

    #[test]
    fn other_self_tests_and_diagnostic_pages_are_refused() {
        let mut client = DeviceBench::new().client("a");
        for code in 1..8 {
            assert_eq!(client.run(&[0x1d, code << 5, 0, 0, 0, 0]).check(), (5, 0x2400), "{code}");
        }
        assert_eq!(client.run_with(&[0x1d, 0x10, 0, 0, 4, 0], &[0; 4]).check(), (5, 0x2400));
    }
}
