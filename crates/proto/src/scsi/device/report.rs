//! REPORT SUPPORTED OPERATION CODES and REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS (SPC-5).

use super::table::{CommandEntry, TABLE, of_opcode};
use super::task::{CommandContext, TaskOutcome, answer};
use crate::scsi::sense::Sense;
use blockmux_wire::scsi::opcode::ScsiOpcode;

pub(super) fn operation_codes(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let cdb = &cx.command.cdb;
    let with_timeouts = cdb.byte(2) & RCTD != 0;
    let (opcode, service_action) = (ScsiOpcode(cdb.byte(3)), cdb.u16(4));
    let view = &cx.unit.view;
    let supported = |entry: &&CommandEntry| entry.is_supported(view);
    let bytes = match cdb.byte(2) & 0b111 {
        ALL => all(TABLE.iter().filter(supported), with_timeouts),
        options @ (WITHOUT_SERVICE_ACTION | WITH_SERVICE_ACTION | EITHER) => {
            let has_actions = of_opcode(opcode).any(|entry| entry.service_action.is_some());
            let has_none = of_opcode(opcode).any(|entry| entry.service_action.is_none());
            let is_mismatch = match options {
                WITHOUT_SERVICE_ACTION => has_actions,
                WITH_SERVICE_ACTION => has_none,
                _ => false,
            };
            if is_mismatch {
                return Err(Sense::cdb_bit(2, 2).into());
            }
            let mut entries = of_opcode(opcode).filter(supported);
            one(
                entries.find(|entry| match entry.service_action {
                    Some(expected) => expected == service_action,
                    // A command without service actions has only service action 0.
                    None => options != EITHER || service_action == 0,
                }),
                with_timeouts,
            )
        }
        _ => return Err(Sense::cdb_bit(2, 2).into()),
    };
    answer(&bytes, cdb.u32(6) as usize)
}

/// The all_commands parameter data.
fn all(entries: impl Iterator<Item = &'static CommandEntry>, with_timeouts: bool) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    for entry in entries {
        let timeouts = if with_timeouts { CTDP_ALL } else { 0 };
        let servactv = u8::from(entry.service_action.is_some());
        bytes.extend([entry.opcode.0, 0]);
        bytes.extend(entry.service_action.unwrap_or(0).to_be_bytes());
        bytes.extend([0, timeouts | servactv]);
        bytes.extend((entry.cdb_len() as u16).to_be_bytes());
        if with_timeouts {
            bytes.extend(NO_TIMEOUTS);
        }
    }
    let length = (bytes.len() as u32).saturating_sub(4);
    if let Some(head) = bytes.first_chunk_mut() {
        *head = length.to_be_bytes();
    }
    bytes
}

/// The one_command parameter data.
fn one(entry: Option<&CommandEntry>, with_timeouts: bool) -> Vec<u8> {
    let Some(entry) = entry else { return vec![0, NOT_SUPPORTED, 0, 0] };
    let mut bytes = vec![0, SUPPORTED | if with_timeouts { CTDP_ONE } else { 0 }];
    bytes.extend((entry.cdb_len() as u16).to_be_bytes());
    let usage = bytes.len();
    bytes.extend(entry.usage());
    // CDB USAGE DATA has the service action itself, not a bit mask (SPC-5).
    if let (Some(action), Some(place)) = (entry.service_action, bytes.get_mut(usage.saturating_add(1))) {
        *place = (*place & !0x1f) | action as u8;
    }
    if with_timeouts {
        bytes.extend(NO_TIMEOUTS);
    }
    bytes
}

pub(super) fn task_management_functions(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let cdb = &cx.command.cdb;
    let extended = cdb.byte(2) & REPD != 0;
    let allocation_length = cdb.u32(6) as usize;
    if allocation_length < 4 {
        return Err(Sense::in_cdb(6).into());
    }
    let mut bytes = vec![ABORT_TASK | ATS | CTS | LURS | QTS, QTSS | ITNRS, 0, 0];
    if extended {
        if let Some(length) = bytes.last_mut() {
            *length = 12;
        }
        bytes.extend([0; 12]);
    }
    answer(&bytes, allocation_length)
}

const RCTD: u8 = 1 << 7;
const ALL: u8 = 0b000;
const WITHOUT_SERVICE_ACTION: u8 = 0b001;
const WITH_SERVICE_ACTION: u8 = 0b010;
const EITHER: u8 = 0b011;
/// CTDP in an all_commands descriptor, next to SERVACTV.
const CTDP_ALL: u8 = 1 << 1;
/// CTDP in the one_command header, next to SUPPORT.
const CTDP_ONE: u8 = 1 << 7;
const NOT_SUPPORTED: u8 = 0b001;
const SUPPORTED: u8 = 0b011;
/// A command timeouts descriptor without values.
const NO_TIMEOUTS: [u8; 12] = [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

const REPD: u8 = 1 << 7;
const ABORT_TASK: u8 = 1 << 7;
const ATS: u8 = 1 << 6;
const CTS: u8 = 1 << 4;
const LURS: u8 = 1 << 3;
const QTS: u8 = 1 << 2;
const QTSS: u8 = 1 << 1;
const ITNRS: u8 = 1 << 0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scsi::device::testing::DeviceBench;

    fn cdb(options: u8, opcode: u8, action: u8) -> [u8; 12] {
        [0xa3, 0x0c, options, opcode, 0, action, 0, 0, 0xff, 0xff, 0, 0]
    }

    #[test]
    fn every_command_that_is_listed_is_found_by_itself() {
        let mut client = DeviceBench::new().client("a");
        let all = client.run(&cdb(0, 0, 0)).good();
        assert_eq!(u32::from_be_bytes(all[..4].try_into().unwrap()) as usize, all.len() - 4);
        assert_eq!(all[4..].len() / 8, TABLE.len());
        for entry in all[4..].chunks(8) {
            let (opcode, action, has_action) = (entry[0], entry[3], entry[5] & 1 != 0);
            let (fits, is_mismatch) = if has_action { (2, 1) } else { (1, 2) };
            assert_eq!(client.run(&cdb(is_mismatch, opcode, action)).check(), (5, 0x2400));
            let one = client.run(&cdb(fits, opcode, action)).good();
            assert_eq!((one[1], &one[2..4], one[4]), (3, &entry[6..8], opcode));
            assert_eq!(client.run(&cdb(3, opcode, action)).good(), one);
        }
    }

    /// The commands that SBC-4 marks as mandatory for direct access block devices, with those of
    /// SPC-5 for every device.
    #[test]
    fn every_mandatory_command_is_supported() {
        let mut client = DeviceBench::new().client("a");
        let mandatory: [(&str, u8, Option<u8>); 11] = [
            ("TEST UNIT READY", 0x00, None),
            ("REQUEST SENSE", 0x03, None),
            ("FORMAT UNIT", 0x04, None),
            ("INQUIRY", 0x12, None),
            ("SEND DIAGNOSTIC", 0x1d, None),
            ("READ CAPACITY (10)", 0x25, None),
            ("READ (10)", 0x28, None),
            ("READ (16)", 0x88, None),
            ("READ CAPACITY (16)", 0x9e, Some(0x10)),
            ("REPORT LUNS", 0xa0, None),
            ("REPORT SUPPORTED OPERATION CODES", 0xa3, Some(0x0c)),
        ];
        for (name, opcode, action) in mandatory {
            let how = if action.is_some() { 2 } else { 1 };
            let said = client.run(&cdb(how, opcode, action.unwrap_or(0))).good();
            assert_eq!(said[1] & 7, 3, "{name}");
        }
    }

    #[test]
    fn unsupported_commands_are_reported_as_such() {
        let mut client = DeviceBench::new().client("a");
        assert_eq!(client.run(&cdb(1, 0x07, 0)).good(), [0, 1, 0, 0]);
        assert_eq!(client.run(&cdb(2, 0x9e, 0x1f)).good(), [0, 1, 0, 0]);
        assert_eq!(client.run(&cdb(3, 0x12, 5)).good(), [0, 1, 0, 0]);
        assert_eq!(client.run(&cdb(7, 0, 0)).check(), (5, 0x2400));
    }

    #[test]
    fn timeouts_occur_at_the_requested_time() {
        let mut client = DeviceBench::new().client("a");
        let all = client.run(&cdb(0x80, 0, 0)).good();
        assert_eq!(all[4..].len() / 20, TABLE.len());
        assert!(all[4..].chunks(20).all(|entry| entry[5] & 2 != 0 && entry[8..10] == [0, 10]));
        let one = client.run(&cdb(0x81, 0x28, 0)).good();
        assert_eq!((one[1], one.len()), (0x83, 4 + 10 + 12));
    }

    #[test]
    fn task_management_functions_are_listed() {
        let mut client = DeviceBench::new().client("a");
        let cdb = |flags| [0xa3, 0x0d, flags, 0, 0, 0, 0, 0, 0, 255, 0, 0];
        assert_eq!(client.run(&cdb(0)).good(), [0xdc, 3, 0, 0]);
        assert_eq!(client.run(&cdb(0x80)).good().len(), 16);
    }
}
