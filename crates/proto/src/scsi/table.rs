//! Every command: what carries it out, how long its CDB is, which of its bits are looked at, and what may stand in
//! its way. Dispatch and REPORT SUPPORTED OPERATION CODES both read this.

use super::cdb::Cdb;
use super::sense::Sense;
use super::task::{Context, Failure, Outcome};
use super::{capacity, inquiry, luns, read_write, ready};
use blockmux_wire::scsi::cdb::SERVICE_ACTION_MASK;
use blockmux_wire::scsi::opcode::{Opcode, service_action_in_16};
use blockmux_wire::scsi::sense::Asc;

/// One command.
pub(super) struct Entry {
    pub(super) opcode: Opcode,
    /// Where the operation code alone does not tell.
    pub(super) service_action: Option<u16>,
    /// CDB USAGE DATA (SPC-5 §6.35.3): the operation code, then a 1 for each bit that is evaluated. Its length is
    /// the CDB's.
    pub(super) usage: &'static [u8],
    pub(super) rules: Rules,
    pub(super) begin: fn(&mut Context<'_>) -> Outcome,
}

/// What may stand in a command's way.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Rules(u8);

impl Rules {
    pub(super) const NONE: Rules = Rules(0);
    /// Carried out although a unit attention waits, and leaves it (SAM-5 §5.14).
    pub(super) const DESPITE_ATTENTION: Rules = Rules(1);

    #[inline]
    pub(super) const fn contains(self, other: Rules) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The entry of a CDB.
#[inline]
pub(super) fn find(cdb: &Cdb) -> Result<&'static Entry, Failure> {
    let opcode = cdb.opcode();
    let first = FIRST.get(usize::from(opcode.0)).copied().unwrap_or(NOWHERE);
    let mut entries = TABLE.get(usize::from(first)..).unwrap_or_default().iter().peekable();
    if entries.peek().is_none() {
        return Err(Sense::illegal(Asc::INVALID_COMMAND_OPERATION_CODE).into());
    }
    let action = u16::from(cdb.byte(1) & SERVICE_ACTION_MASK);
    entries
        .take_while(|entry| entry.opcode == opcode)
        .find(|entry| entry.service_action.is_none_or(|wanted| wanted == action))
        // SPC-5 §4.2.5.2: an unknown service action is an invalid field.
        .ok_or_else(|| Sense::cdb_bit(1, 4).into())
}

const fn entry(
    opcode: Opcode,
    usage: &'static [u8],
    rules: Rules,
    begin: fn(&mut Context<'_>) -> Outcome,
) -> Entry {
    Entry { opcode, service_action: None, usage, rules, begin }
}

const fn action(
    opcode: Opcode,
    service_action: u16,
    usage: &'static [u8],
    rules: Rules,
    begin: fn(&mut Context<'_>) -> Outcome,
) -> Entry {
    Entry { opcode, service_action: Some(service_action), usage, rules, begin }
}

/// In order of operation code, then service action.
pub(super) static TABLE: &[Entry] = &[
    entry(Opcode::TEST_UNIT_READY, &[0x00, 0, 0, 0, 0, 7], Rules::NONE, ready::test_unit_ready),
    entry(Opcode::REQUEST_SENSE, &[0x03, 1, 0, 0, 0xff, 7], Rules::DESPITE_ATTENTION, ready::request_sense),
    entry(Opcode::READ_6, &[0x08, 0x1f, 0xff, 0xff, 0xff, 7], Rules::NONE, read_write::read),
    entry(Opcode::WRITE_6, &[0x0a, 0x1f, 0xff, 0xff, 0xff, 7], Rules::NONE, read_write::write),
    entry(Opcode::INQUIRY, &[0x12, 1, 0xff, 0xff, 0xff, 7], Rules::DESPITE_ATTENTION, inquiry::inquiry),
    entry(
        Opcode::READ_CAPACITY_10,
        &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 7],
        Rules::NONE,
        capacity::read_capacity_10,
    ),
    entry(Opcode::READ_10, RANGE_10_READ, Rules::NONE, read_write::read),
    entry(Opcode::WRITE_10, RANGE_10_WRITE, Rules::NONE, read_write::write),
    entry(Opcode::READ_16, RANGE_16_READ, Rules::NONE, read_write::read),
    entry(Opcode::WRITE_16, RANGE_16_WRITE, Rules::NONE, read_write::write),
    action(
        Opcode::SERVICE_ACTION_IN_16,
        service_action_in_16::READ_CAPACITY_16,
        &[0x9e, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 7],
        Rules::NONE,
        capacity::read_capacity_16,
    ),
    entry(
        Opcode::REPORT_LUNS,
        &[0xa0, 0, 0xff, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 7],
        Rules::DESPITE_ATTENTION,
        luns::report_luns,
    ),
    entry(Opcode::READ_12, RANGE_12_READ, Rules::NONE, read_write::read),
    entry(Opcode::WRITE_12, RANGE_12_WRITE, Rules::NONE, read_write::write),
];

const RANGE_10_READ: &[u8] = &[0x28, 0xf8, 0xff, 0xff, 0xff, 0xff, 0x3f, 0xff, 0xff, 7];
const RANGE_10_WRITE: &[u8] = &[0x2a, 0xf8, 0xff, 0xff, 0xff, 0xff, 0x3f, 0xff, 0xff, 7];
const RANGE_12_READ: &[u8] = &[0xa8, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 7];
const RANGE_12_WRITE: &[u8] = &[0xaa, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 7];
const RANGE_16_READ: &[u8] =
    &[0x88, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 7];
const RANGE_16_WRITE: &[u8] =
    &[0x8a, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 7];

/// No entry has the operation code.
const NOWHERE: u8 = u8::MAX;

/// The first entry of each operation code.
static FIRST: [u8; 256] = {
    let mut first = [NOWHERE; 256];
    let mut index = TABLE.len();
    #[expect(clippy::indexing_slicing, reason = "evaluated by the compiler")]
    while index > 0 {
        index -= 1;
        first[TABLE[index].opcode.0 as usize] = index as u8;
    }
    first
};

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_wire::scsi::opcode::cdb_len;

    #[test]
    fn the_table_is_in_order_and_says_its_own_operation_codes() {
        assert!(TABLE.len() < NOWHERE.into());
        assert!(TABLE.is_sorted_by_key(|entry| (entry.opcode.0, entry.service_action)));
        for entry in TABLE {
            assert_eq!(entry.usage[0], entry.opcode.0, "{}", entry.opcode);
            assert_eq!(Some(entry.usage.len()), cdb_len(entry.opcode.0), "{}", entry.opcode);
            assert!(entry.opcode.name().is_some());
        }
    }

    #[test]
    fn an_unknown_operation_code_and_an_unknown_service_action_differ() {
        let sense = |bytes: &[u8]| find(&Cdb::new(bytes).unwrap()).err().and_then(|failure| failure.sense);
        assert_eq!(sense(&[0xff]), Some(Sense::illegal(Asc::INVALID_COMMAND_OPERATION_CODE)));
        assert_eq!(sense(&[0x9e, 0x1f]), Some(Sense::cdb_bit(1, 4)));
        assert_eq!(sense(&[0x9e, 0x10]), None);
    }
}
