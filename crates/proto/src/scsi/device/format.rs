//! FORMAT UNIT (SBC-4): erases the volume as SANITIZE does, see decision 71.
//!
//! A volume has neither defects nor protection information, and its blocks have one length. So what
//! remains is the initialization of all blocks: with zeroes, or with a pattern of the initiator.

use super::sanitize::{self, EraseCommand, SanitizeRequest};
use super::task::{CommandContext, TaskOutcome};
use crate::scsi::sense::Sense;
use blockmux_wire::scsi::sense::Asc;
use std::sync::Arc;

pub(super) fn format_unit(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let (flags, fast) = (cx.command.cdb.byte(1), cx.command.cdb.byte(4));
    if flags & FMTPINFO != 0 {
        return Err(Sense::cdb_bit(1, 7).into());
    }
    // Without initialization of blocks that would be read as zeroes: zeroes fulfil that too.
    if fast & FFMT == FFMT {
        return Err(Sense::cdb_bit(4, 1).into());
    }
    cx.check_writable()?;
    if flags & FMTDATA == 0 {
        return begin(cx, None, false);
    }
    // The CDB has no parameter list length.
    let header = if flags & LONGLIST == 0 { SHORT_HEADER } else { LONG_HEADER };
    let most = (cx.unit.view.block_len as usize).saturating_add(LONG_HEADER).saturating_add(DESCRIPTOR);
    let len = (cx.command.data_out_len as usize).min(most);
    if len < header {
        return Err(Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    cx.parameters(len, header, if header == SHORT_HEADER { on_short_list } else { on_long_list })
}

fn on_short_list(cx: &mut CommandContext<'_>, list: &[u8]) -> TaskOutcome {
    let [usage, options, high, low, rest @ ..] = list else { return Err(Sense::in_parameters(0).into()) };
    on_list(cx, (*usage, *options), (&[*high, *low], 2), (rest, SHORT_HEADER))
}

fn on_long_list(cx: &mut CommandContext<'_>, list: &[u8]) -> TaskOutcome {
    let [usage, options, _, interval, a, b, c, d, rest @ ..] = list else {
        return Err(Sense::in_parameters(0).into());
    };
    if *interval != 0 {
        return Err(Sense::in_parameters(3).into());
    }
    on_list(cx, (*usage, *options), (&[*a, *b, *c, *d], 4), (rest, LONG_HEADER))
}

/// Handles a parameter list: its first bytes, the defect list length, and what follows the header;
/// the latter two with their offset.
fn on_list(
    cx: &mut CommandContext<'_>,
    (usage, options): (u8, u8),
    (defects, defects_at): (&[u8], u16),
    (rest, rest_at): (&[u8], usize),
) -> TaskOutcome {
    if usage & PROTECTION_FIELD_USAGE != 0 {
        return Err(Sense::in_parameters(0).into());
    }
    // SBC-4, Parameter list header: without FOV, only IMMED may be set.
    if options & FOV == 0 && options & !IMMED != 0 {
        return Err(Sense::in_parameters(1).into());
    }
    if defects.iter().any(|byte| *byte != 0) {
        return Err(Sense::in_parameters(defects_at).into());
    }
    let pattern = if options & IP == 0 { None } else { pattern(cx, rest, rest_at as u16)? };
    begin(cx, pattern, options & IMMED != 0)
}

/// The block that an initialization pattern descriptor at this offset describes; `None` for the
/// default pattern.
fn pattern(cx: &CommandContext<'_>, descriptor: &[u8], at: u16) -> Result<Option<Arc<[u8]>>, Sense> {
    let wrong = |offset: u16| Sense::in_parameters(at.saturating_add(offset));
    let [modifier, kind, high, low, pattern @ ..] = descriptor else { return Err(wrong(0)) };
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    let block_len = cx.unit.view.block_len as usize;
    match (modifier, *kind) {
        (0, PATTERN_DEFAULT) if length == 0 => Ok(None),
        (0, PATTERN_REPEAT) if (1..=block_len).contains(&length) => {
            let pattern = pattern.get(..length).ok_or(wrong(2))?;
            Ok(Some(pattern.iter().copied().cycle().take(block_len).collect()))
        }
        (0, PATTERN_DEFAULT | PATTERN_REPEAT) => Err(wrong(2)),
        (0, _) => Err(wrong(1)),
        _ => Err(wrong(0)),
    }
}

fn begin(cx: &mut CommandContext<'_>, pattern: Option<Arc<[u8]>>, is_immediate: bool) -> TaskOutcome {
    let request = SanitizeRequest { command: EraseCommand::FormatUnit, pattern, inverts: false, passes: 1 };
    sanitize::begin(cx, request, (is_immediate, false))
}

const FMTPINFO: u8 = 0b11 << 6;
const LONGLIST: u8 = 1 << 5;
const FMTDATA: u8 = 1 << 4;
/// FFMT: a fast format. Both bits are reserved.
const FFMT: u8 = 0b11;
const PROTECTION_FIELD_USAGE: u8 = 7;
const FOV: u8 = 1 << 7;
const IP: u8 = 1 << 3;
const IMMED: u8 = 1 << 1;
const SHORT_HEADER: usize = 4;
const LONG_HEADER: usize = 8;
/// Length of an initialization pattern descriptor without its pattern.
const DESCRIPTOR: usize = 4;
const PATTERN_DEFAULT: u8 = 0;
const PATTERN_REPEAT: u8 = 1;

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::{DeviceBench, TestNexus, command, shaped};
    use crate::scsi::{Lun, ScsiStatus, TaskStep};
    use blockmux_volume::{Completion, IoError, Op, Tag, VolumeInfo};

    const FORMAT: [u8; 6] = [4, 0, 0, 0, 0, 0];
    const WITH_LIST: [u8; 6] = [4, 0x10, 0, 0, 0, 0];
    const WITH_LONG_LIST: [u8; 6] = [4, 0x30, 0, 0, 0, 0];
    const ERASE: [u8; 10] = [0x48, 2, 0, 0, 0, 0, 0, 0, 0, 0];
    const TUR: [u8; 6] = [0; 6];

    fn write(client: &mut TestNexus) {
        client.run_with(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[9; 512]).good();
    }

    fn first_block(client: &mut TestNexus) -> Vec<u8> {
        client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good()
    }

    #[test]
    fn a_format_leaves_zeroes_or_the_pattern_of_the_initiator() {
        let mut client = DeviceBench::new().client("a");
        let lists: [(&[u8], &[u8], [u8; 3]); 6] = [
            (&FORMAT, &[], [0; 3]),
            (&[4, 0, 0, 0, 1, 0], &[], [0; 3]),
            (&WITH_LIST, &[0; 4], [0; 3]),
            (&WITH_LONG_LIST, &[0, 0x80 | 0x70, 0, 0, 0, 0, 0, 0], [0; 3]),
            (&WITH_LIST, &[0, 0x88, 0, 0, 0, 0, 0, 0], [0; 3]),
            (&WITH_LIST, &[0, 0x88, 0, 0, 0, 1, 0, 2, 5, 6], [5, 6, 5]),
        ];
        for (cdb, list, expected) in lists {
            write(&mut client);
            client.run_waiting(cdb, list).good();
            assert_eq!(first_block(&mut client)[..3], expected, "{cdb:x?} {list:x?}");
            client.run(&TUR).good();
        }
    }

    #[test]
    fn a_format_needs_what_a_write_needs() {
        let read_only = shaped(VolumeInfo { read_only: true, ..VolumeInfo::new(1 << 20) });
        let mut protected = DeviceBench::over(read_only).client("a");
        assert_eq!(protected.run(&FORMAT).check(), (7, 0x2700));
        let bench = DeviceBench::new();
        let (mut owner, mut other) = (bench.client("a"), bench.client("b"));
        write(&mut owner);
        owner.run(&[0x16, 0, 0, 0, 0, 0]).good();
        assert_eq!(other.run(&FORMAT).status, ScsiStatus::RESERVATION_CONFLICT);
        assert_eq!(first_block(&mut owner), [9; 512]);
        owner.run_waiting(&FORMAT, &[]).good();
    }

    #[test]
    fn a_format_in_progress_is_reported_and_an_immediate_one_answers_at_once() {
        let mut client = DeviceBench::new().client("a");
        client.run_with(&WITH_LIST, &[0, 2, 0, 0]).good();
        assert_eq!(client.run(&TUR).check(), (2, 0x0404));
        assert_eq!(client.run(&FORMAT).check(), (2, 0x0404));
        assert_eq!(client.run(&ERASE).check(), (2, 0x0404));
        let sense = client.run(&[3, 0, 0, 0, 18, 0]).good();
        assert_eq!((sense[2], &sense[12..16]), (2, &[4, 4, 0, 0x80][..]));
        assert!(client.server.poll_background().is_some());
    }

    #[test]
    fn a_failed_format_leaves_the_medium_corrupted_until_it_is_formatted() {
        let mut client = DeviceBench::new().client("a");
        let (mut task, step) = client.server.begin(&command(Lun::new(0), &FORMAT, 0));
        assert!(matches!(step, TaskStep::Io { io, .. } if io.op != Op::Flush));
        let done = Completion { tag: Tag(0), result: Err(IoError::Medium) };
        assert!(matches!(client.server.on_io(&mut task, done), TaskStep::Done(_)));
        assert_eq!(client.run(&TUR).check(), (3, 0x3100));
        assert_eq!(client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).check(), (3, 0x3100));
        client.run_waiting(&FORMAT, &[]).good();
        client.run(&TUR).good();
    }

    #[test]
    fn wrong_parameters_are_refused_and_nothing_is_erased() {
        let mut client = DeviceBench::new().client("a");
        write(&mut client);
        for cdb in [[4, 0x40, 0, 0, 0, 0], [4, 0x80, 0, 0, 0, 0], [4, 0, 0, 0, 3, 0]] {
            assert_eq!(client.run(&cdb).check(), (5, 0x2400), "{cdb:x?}");
        }
        for (cdb, list) in [(WITH_LIST, &[0; 3][..]), (WITH_LIST, &[]), (WITH_LONG_LIST, &[0; 7])] {
            assert_eq!(client.run_with(&cdb, list).check(), (5, 0x1a00));
        }
        let lists: [(&[u8; 6], &[u8]); 10] = [
            (&WITH_LIST, &[1, 0, 0, 0]),
            (&WITH_LIST, &[0, 0x08, 0, 0]),
            (&WITH_LIST, &[0, 0, 0, 4, 0, 0, 0, 7]),
            (&WITH_LONG_LIST, &[0, 0, 0, 1, 0, 0, 0, 0]),
            (&WITH_LONG_LIST, &[0, 0, 0, 0, 0, 0, 1, 0]),
            (&WITH_LIST, &[0, 0x88, 0, 0, 0, 0, 0]),
            (&WITH_LIST, &[0, 0x88, 0, 0, 0x40, 0, 0, 0]),
            (&WITH_LIST, &[0, 0x88, 0, 0, 0, 2, 0, 0]),
            (&WITH_LIST, &[0, 0x88, 0, 0, 0, 1, 0, 0]),
            (&WITH_LIST, &[0, 0x88, 0, 0, 0, 1, 0, 3, 1, 2]),
        ];
        for (cdb, list) in lists {
            assert_eq!(client.run_with(cdb, list).check(), (5, 0x2600), "{list:x?}");
        }
        assert_eq!(first_block(&mut client), [9; 512]);
    }
}
