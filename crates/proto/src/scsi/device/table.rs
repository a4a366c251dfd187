//! The command table: handler, CDB length, evaluated bits and rules of each command. Both dispatch
//! and REPORT SUPPORTED OPERATION CODES use it.

use super::cdb::Cdb;
use super::task::{CommandContext, TaskFailure, TaskOutcome};
use super::view::NexusView;
use super::{
    AccessState, alua, cache, capacity, compare, defects, diagnostic, extended_copy, format, inquiry, luns,
    mode, persistent_reserve, provisioning, read_write, ready, report, reserve, sanitize, start_stop,
    token_copy, verify, write_same,
};
use crate::scsi::ScsiStatus;
use crate::scsi::sense::Sense;
use blockmux_wire::scsi::cdb::SERVICE_ACTION_MASK;
use blockmux_wire::scsi::opcode::sanitize as how;
use blockmux_wire::scsi::opcode::{
    ScsiOpcode, cdb_len, maintenance_in, maintenance_out, service_action_in_16,
};
use blockmux_wire::scsi::opcode::{persistent_reserve_in as pr_in, persistent_reserve_out as pr_out};
use blockmux_wire::scsi::opcode::{third_party_copy_in as copy_in, third_party_copy_out as copy_out};
use blockmux_wire::scsi::sense::Asc;

/// A supported command.
pub(super) struct CommandEntry {
    pub(super) opcode: ScsiOpcode,
    /// The service action, for operation codes with several.
    pub(super) service_action: Option<u16>,
    usage: [u8; 16],
    pub(super) rules: CommandRules,
    pub(super) begin: CommandHandler,
}

pub(super) type CommandHandler = fn(&mut CommandContext<'_>) -> TaskOutcome;

/// Rules about when a command may execute.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct CommandRules(u16);

impl CommandRules {
    pub(super) const NONE: CommandRules = CommandRules(0);
    /// Executes despite a pending unit attention, which stays pending (SAM-5 §5.14).
    pub(super) const DESPITE_ATTENTION: CommandRules = CommandRules(1);
    /// Fails while the medium is inaccessible.
    pub(super) const NEEDS_MEDIUM: CommandRules = CommandRules(2);
    /// Only for units that support unmapping.
    pub(super) const THIN: CommandRules = CommandRules(4);
    /// Only for units that support atomic writes.
    pub(super) const ATOMIC: CommandRules = CommandRules(8);
    /// Requires only read access under persistent reservations (SPC-5 and SBC-4, conflict tables).
    /// Other commands require write access.
    pub(super) const READS: CommandRules = CommandRules(16);
    /// Never conflicts with persistent reservations, or only for some values of its bits.
    pub(super) const DESPITE_PERSISTENT: CommandRules = CommandRules(32);
    /// Does not conflict with the SPC-2 reservation of another nexus.
    pub(super) const DESPITE_RESERVE: CommandRules = CommandRules(64);
    /// Permitted during a sanitize operation (SBC-4).
    pub(super) const DESPITE_SANITIZE: CommandRules = CommandRules(128);
    /// Permitted for every nexus at any time.
    const ALWAYS: CommandRules = CommandRules(1 | 32 | 64 | 128 | 256);
    /// Permitted while the port is unavailable (SPC-4, asymmetric access states).
    const DESPITE_UNAVAILABLE: CommandRules = CommandRules(256);
    /// Permitted while the port is in standby: it needs the medium but accesses no block.
    const DESPITE_STANDBY: CommandRules = CommandRules(512);
    /// About reservations, which the process has that serves the volume.
    pub(super) const NEEDS_OWNER: CommandRules = CommandRules(1024);
    /// Changes state of the unit or the volume otherwise than by I/O, so a fenced session may not:
    /// what it has sent may be out of date.
    pub(super) const CHANGES_STATE: CommandRules = CommandRules(2048);

    #[inline]
    pub(super) const fn contains(self, other: CommandRules) -> bool {
        self.0 & other.0 == other.0
    }

    const fn and(self, other: CommandRules) -> CommandRules {
        CommandRules(self.0 | other.0)
    }
}

impl CommandEntry {
    /// CDB USAGE DATA (SPC-5): the operation code, then a 1 for each evaluated bit. As long as the
    /// CDB.
    pub(super) fn usage(&self) -> &[u8] {
        self.usage.get(..self.cdb_len()).unwrap_or(&self.usage)
    }

    /// Length of the CDB, in bytes.
    #[inline]
    pub(super) fn cdb_len(&self) -> usize {
        cdb_len(self.opcode.0).unwrap_or(self.usage.len())
    }

    /// Checks that reservations permit the command for this nexus.
    #[inline]
    pub(super) fn check_reservation(&self, view: &NexusView) -> Result<(), TaskFailure> {
        if view.is_reserved && !self.is_permitted(view) {
            return Err(TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT));
        }
        Ok(())
    }

    fn is_permitted(&self, view: &NexusView) -> bool {
        if view.is_reserved_by_other && !self.rules.contains(CommandRules::DESPITE_RESERVE) {
            return false;
        }
        let by_type = view.access.writes || view.access.reads && self.rules.contains(CommandRules::READS);
        by_type || self.rules.contains(CommandRules::DESPITE_PERSISTENT)
    }

    /// Whether the command is permitted on a unit that is not ready: its port is not active, or it
    /// has no medium.
    pub(super) fn is_permitted_not_ready(&self, view: &NexusView) -> bool {
        if !view.is_served && self.rules.contains(CommandRules::NEEDS_OWNER) {
            return false;
        }
        let needs_medium = self.rules.contains(CommandRules::NEEDS_MEDIUM);
        match view.port {
            AccessState::ACTIVE_OPTIMIZED | AccessState::ACTIVE_NON_OPTIMIZED => !needs_medium,
            AccessState::STANDBY => !needs_medium || self.rules.contains(CommandRules::DESPITE_STANDBY),
            _ => self.rules.contains(CommandRules::DESPITE_UNAVAILABLE),
        }
    }

    /// Whether a unit with these properties supports the command.
    #[inline]
    pub(super) fn is_supported(&self, view: &NexusView) -> bool {
        (!self.rules.contains(CommandRules::THIN) || view.is_thin())
            && (!self.rules.contains(CommandRules::ATOMIC) || view.max_atomic_blocks() > 0)
    }
}

/// The table entry of a CDB.
#[inline]
pub(super) fn find(cdb: &Cdb) -> Result<&'static CommandEntry, TaskFailure> {
    let mut entries = of_opcode(cdb.opcode()).peekable();
    if entries.peek().is_none() {
        return Err(Sense::illegal(Asc::INVALID_COMMAND_OPERATION_CODE).into());
    }
    let action = u16::from(cdb.byte(1) & SERVICE_ACTION_MASK);
    entries
        .find(|entry| entry.service_action.is_none_or(|expected| expected == action))
        // SPC-5, SERVICE ACTION: an unknown service action is an invalid field.
        .ok_or_else(|| Sense::cdb_bit(1, 4).into())
}

/// All entries of an operation code.
#[inline]
pub(super) fn of_opcode(opcode: ScsiOpcode) -> impl Iterator<Item = &'static CommandEntry> {
    let first = FIRST.get(usize::from(opcode.0)).copied().unwrap_or(NOWHERE);
    let entries = TABLE.get(usize::from(first)..).unwrap_or_default();
    entries.iter().take_while(move |entry| entry.opcode == opcode)
}

const fn padded<const N: usize>(opcode: ScsiOpcode, rest: [u8; N]) -> [u8; 16] {
    let mut usage = [0; 16];
    usage[0] = opcode.0;
    let mut at = 0;
    #[expect(clippy::arithmetic_side_effects, clippy::indexing_slicing, reason = "evaluated by the compiler")]
    while at < N {
        usage[at + 1] = rest[at];
        at += 1;
    }
    usage
}

const fn entry<const N: usize>(
    opcode: ScsiOpcode,
    usage: [u8; N],
    rules: CommandRules,
    begin: CommandHandler,
) -> CommandEntry {
    CommandEntry { opcode, service_action: None, usage: padded(opcode, usage), rules, begin }
}

const fn action<const N: usize>(
    opcode: ScsiOpcode,
    service_action: u16,
    usage: [u8; N],
    rules: CommandRules,
    begin: CommandHandler,
) -> CommandEntry {
    CommandEntry { service_action: Some(service_action), ..entry(opcode, usage, rules, begin) }
}

/// A 6-byte command on a range of blocks.
const fn range_6(opcode: ScsiOpcode, begin: CommandHandler) -> CommandEntry {
    entry(opcode, [0x1f, 0xff, 0xff, 0xff, 7], CommandRules::NEEDS_MEDIUM, begin)
}

/// A 10-byte command on a range of blocks, with these flags.
const fn range_10(opcode: ScsiOpcode, flags: u8, begin: CommandHandler) -> CommandEntry {
    entry(opcode, [flags, 0xff, 0xff, 0xff, 0xff, 0x3f, 0xff, 0xff, 7], CommandRules::NEEDS_MEDIUM, begin)
}

/// A 12-byte command on a range of blocks, with these flags.
const fn range_12(opcode: ScsiOpcode, flags: u8, begin: CommandHandler) -> CommandEntry {
    let usage = [flags, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 7];
    entry(opcode, usage, CommandRules::NEEDS_MEDIUM, begin)
}

/// A 16-byte command on a range of blocks, with these flags.
const fn range_16(opcode: ScsiOpcode, flags: u8, begin: CommandHandler) -> CommandEntry {
    let usage = [flags, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 7];
    entry(opcode, usage, CommandRules::NEEDS_MEDIUM, begin)
}

/// Reduces the required access to reading.
const fn reads(entry: CommandEntry) -> CommandEntry {
    CommandEntry { rules: entry.rules.and(CommandRules::READS), ..entry }
}

/// A service action of PERSISTENT RESERVE IN.
const fn reserve_in(service_action: u16) -> CommandEntry {
    let rules =
        CommandRules::DESPITE_PERSISTENT.and(CommandRules::DESPITE_SANITIZE).and(CommandRules::NEEDS_OWNER);
    let usage = [0x1f, 0, 0, 0, 0, 0, 0xff, 0xff, 7];
    action(ScsiOpcode::PERSISTENT_RESERVE_IN, service_action, usage, rules, persistent_reserve::reserve_in)
}

/// A service action of PERSISTENT RESERVE OUT.
const fn reserve_out(service_action: u16) -> CommandEntry {
    let rules =
        CommandRules::DESPITE_PERSISTENT.and(CommandRules::NEEDS_OWNER).and(CommandRules::CHANGES_STATE);
    let usage = [0x1f, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 7];
    action(ScsiOpcode::PERSISTENT_RESERVE_OUT, service_action, usage, rules, persistent_reserve::reserve_out)
}

/// A service action of RECEIVE COPY RESULTS.
const fn copy_in(service_action: u16, begin: CommandHandler) -> CommandEntry {
    let usage = [0x1f, 0xff, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 7];
    action(ScsiOpcode::THIRD_PARTY_COPY_IN, service_action, usage, CommandRules::NONE, begin)
}

/// POPULATE TOKEN and WRITE USING TOKEN.
const fn token_command(service_action: u16, begin: CommandHandler) -> CommandEntry {
    let usage = [0x1f, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 7];
    action(ScsiOpcode::THIRD_PARTY_COPY_OUT, service_action, usage, CommandRules::NEEDS_MEDIUM, begin)
}

/// A service action of SANITIZE. The handler checks for a current or failed operation itself.
const fn erase(service_action: u16, begin: CommandHandler) -> CommandEntry {
    let rules =
        CommandRules::NEEDS_MEDIUM.and(CommandRules::DESPITE_SANITIZE).and(CommandRules::CHANGES_STATE);
    action(ScsiOpcode::SANITIZE, service_action, [0xbf, 0, 0, 0, 0, 0, 0xff, 0xff, 7], rules, begin)
}

/// RESERVE and RELEASE of SPC-2.
const fn legacy<const N: usize>(opcode: ScsiOpcode, usage: [u8; N], begin: CommandHandler) -> CommandEntry {
    let rules = CommandRules::DESPITE_PERSISTENT
        .and(CommandRules::DESPITE_RESERVE)
        .and(CommandRules::NEEDS_OWNER)
        .and(CommandRules::CHANGES_STATE);
    entry(opcode, usage, rules, begin)
}

/// Ordered by operation code, then by service action.
pub(super) static TABLE: &[CommandEntry] = &[
    entry(
        ScsiOpcode::TEST_UNIT_READY,
        [0, 0, 0, 0, 7],
        CommandRules::NEEDS_MEDIUM.and(CommandRules::DESPITE_PERSISTENT),
        ready::test_unit_ready,
    ),
    entry(ScsiOpcode::REQUEST_SENSE, [1, 0, 0, 0xff, 7], CommandRules::ALWAYS, ready::request_sense),
    entry(
        ScsiOpcode::FORMAT_UNIT,
        [0xff, 0, 0, 3, 7],
        CommandRules::NEEDS_MEDIUM.and(CommandRules::DESPITE_SANITIZE).and(CommandRules::CHANGES_STATE),
        format::format_unit,
    ),
    reads(range_6(ScsiOpcode::READ_6, read_write::read)),
    range_6(ScsiOpcode::WRITE_6, read_write::write),
    entry(ScsiOpcode::INQUIRY, [1, 0xff, 0xff, 0xff, 7], CommandRules::ALWAYS, inquiry::inquiry),
    entry(ScsiOpcode::MODE_SELECT_6, [0x11, 0, 0, 0xff, 7], CommandRules::CHANGES_STATE, mode::select_6),
    legacy(ScsiOpcode::RESERVE_6, [0, 0, 0, 0, 7], reserve::reserve),
    legacy(ScsiOpcode::RELEASE_6, [0, 0, 0, 0, 7], reserve::release),
    entry(
        ScsiOpcode::MODE_SENSE_6,
        [0x08, 0xff, 0xff, 0xff, 7],
        CommandRules::DESPITE_SANITIZE.and(CommandRules::READS),
        mode::sense_6,
    ),
    entry(
        ScsiOpcode::START_STOP_UNIT,
        [1, 0, 0x0f, 0xf7, 7],
        CommandRules::DESPITE_PERSISTENT.and(CommandRules::CHANGES_STATE),
        start_stop::start_stop_unit,
    ),
    entry(
        ScsiOpcode::SEND_DIAGNOSTIC,
        [0xf7, 0, 0xff, 0xff, 7],
        CommandRules::NEEDS_MEDIUM,
        diagnostic::send_diagnostic,
    ),
    entry(
        ScsiOpcode::PREVENT_ALLOW_MEDIUM_REMOVAL,
        [0, 0, 0, 3, 7],
        CommandRules::DESPITE_PERSISTENT.and(CommandRules::DESPITE_RESERVE).and(CommandRules::CHANGES_STATE),
        start_stop::prevent_allow,
    ),
    entry(
        ScsiOpcode::READ_CAPACITY_10,
        [0, 0, 0, 0, 0, 0, 0, 0, 7],
        CommandRules::NEEDS_MEDIUM.and(CommandRules::DESPITE_PERSISTENT).and(CommandRules::DESPITE_STANDBY),
        capacity::read_capacity_10,
    ),
    reads(range_10(ScsiOpcode::READ_10, 0xf8, read_write::read)),
    range_10(ScsiOpcode::WRITE_10, 0xf8, read_write::write),
    range_10(ScsiOpcode::WRITE_AND_VERIFY_10, 0xf6, verify::write_and_verify),
    reads(range_10(ScsiOpcode::VERIFY_10, 0xf6, verify::verify)),
    reads(range_10(ScsiOpcode::PRE_FETCH_10, 0x02, cache::pre_fetch)),
    range_10(ScsiOpcode::SYNCHRONIZE_CACHE_10, 0x02, cache::synchronize),
    entry(
        ScsiOpcode::READ_DEFECT_DATA_10,
        [0, 0x1f, 0, 0, 0, 0, 0xff, 0xff, 7],
        CommandRules::NEEDS_MEDIUM.and(CommandRules::READS),
        defects::read_10,
    ),
    range_10(ScsiOpcode::WRITE_SAME_10, 0xf8, write_same::write_same),
    entry(
        ScsiOpcode::UNMAP,
        [1, 0, 0, 0, 0, 0x3f, 0xff, 0xff, 7],
        CommandRules::NEEDS_MEDIUM.and(CommandRules::THIN),
        provisioning::unmap,
    ),
    erase(how::OVERWRITE, sanitize::overwrite),
    erase(how::BLOCK_ERASE, sanitize::block_erase),
    erase(how::EXIT_FAILURE_MODE, sanitize::exit_failure_mode),
    entry(
        ScsiOpcode::MODE_SELECT_10,
        [0x11, 0, 0, 0, 0, 0, 0xff, 0xff, 7],
        CommandRules::CHANGES_STATE,
        mode::select_10,
    ),
    legacy(ScsiOpcode::RESERVE_10, [0x13, 0, 0, 0, 0, 0, 0, 0, 7], reserve::reserve),
    legacy(ScsiOpcode::RELEASE_10, [0x13, 0, 0, 0, 0, 0, 0, 0, 7], reserve::release),
    entry(
        ScsiOpcode::MODE_SENSE_10,
        [0x18, 0xff, 0xff, 0, 0, 0, 0xff, 0xff, 7],
        CommandRules::DESPITE_SANITIZE.and(CommandRules::READS),
        mode::sense_10,
    ),
    reserve_in(pr_in::READ_KEYS),
    reserve_in(pr_in::READ_RESERVATION),
    reserve_in(pr_in::REPORT_CAPABILITIES),
    reserve_in(pr_in::READ_FULL_STATUS),
    reserve_out(pr_out::REGISTER),
    reserve_out(pr_out::RESERVE),
    reserve_out(pr_out::RELEASE),
    reserve_out(pr_out::CLEAR),
    reserve_out(pr_out::PREEMPT),
    reserve_out(pr_out::PREEMPT_AND_ABORT),
    reserve_out(pr_out::REGISTER_AND_IGNORE_EXISTING_KEY),
    reserve_out(pr_out::REGISTER_AND_MOVE),
    action(
        ScsiOpcode::THIRD_PARTY_COPY_OUT,
        copy_out::EXTENDED_COPY_LID1,
        [0x1f, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 7],
        CommandRules::NEEDS_MEDIUM,
        extended_copy::extended_copy,
    ),
    reads(token_command(copy_out::POPULATE_TOKEN, token_copy::populate_token)),
    token_command(copy_out::WRITE_USING_TOKEN, token_copy::write_using_token),
    copy_in(copy_in::RECEIVE_COPY_STATUS_LID1, extended_copy::copy_status),
    copy_in(copy_in::RECEIVE_COPY_OPERATING_PARAMETERS, extended_copy::operating_parameters),
    action(
        ScsiOpcode::THIRD_PARTY_COPY_IN,
        copy_in::RECEIVE_ROD_TOKEN_INFORMATION,
        [0x1f, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 7],
        CommandRules::DESPITE_PERSISTENT,
        token_copy::rod_token_information,
    ),
    reads(range_16(ScsiOpcode::READ_16, 0xf8, read_write::read)),
    entry(
        ScsiOpcode::COMPARE_AND_WRITE,
        [0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0xff, 0x3f, 7],
        CommandRules::NEEDS_MEDIUM,
        compare::compare_and_write,
    ),
    range_16(ScsiOpcode::WRITE_16, 0xf8, read_write::write),
    range_16(ScsiOpcode::ORWRITE_16, 0xf8, compare::orwrite),
    range_16(ScsiOpcode::WRITE_AND_VERIFY_16, 0xf6, verify::write_and_verify),
    reads(range_16(ScsiOpcode::VERIFY_16, 0xf6, verify::verify)),
    reads(range_16(ScsiOpcode::PRE_FETCH_16, 0x02, cache::pre_fetch)),
    range_16(ScsiOpcode::SYNCHRONIZE_CACHE_16, 0x02, cache::synchronize),
    range_16(ScsiOpcode::WRITE_SAME_16, 0xf9, write_same::write_same),
    entry(
        ScsiOpcode::WRITE_ATOMIC_16,
        [0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f, 7],
        CommandRules::NEEDS_MEDIUM.and(CommandRules::ATOMIC),
        read_write::write_atomic,
    ),
    action(
        ScsiOpcode::SERVICE_ACTION_IN_16,
        service_action_in_16::READ_CAPACITY_16,
        [0x1f, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 7],
        CommandRules::NEEDS_MEDIUM.and(CommandRules::DESPITE_PERSISTENT).and(CommandRules::DESPITE_STANDBY),
        capacity::read_capacity_16,
    ),
    action(
        ScsiOpcode::SERVICE_ACTION_IN_16,
        service_action_in_16::GET_LBA_STATUS,
        [0x1f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 7],
        CommandRules::NEEDS_MEDIUM.and(CommandRules::READS),
        provisioning::get_lba_status,
    ),
    entry(
        ScsiOpcode::REPORT_LUNS,
        [0, 0xff, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 7],
        CommandRules::ALWAYS,
        luns::report_luns,
    ),
    action(
        ScsiOpcode::MAINTENANCE_IN,
        maintenance_in::REPORT_TARGET_PORT_GROUPS,
        [0xff, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 7],
        CommandRules::DESPITE_PERSISTENT
            .and(CommandRules::DESPITE_SANITIZE)
            .and(CommandRules::DESPITE_UNAVAILABLE),
        alua::report,
    ),
    action(
        ScsiOpcode::MAINTENANCE_IN,
        maintenance_in::REPORT_SUPPORTED_OPERATION_CODES,
        [0x1f, 0x87, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 7],
        CommandRules::DESPITE_SANITIZE.and(CommandRules::READS),
        report::operation_codes,
    ),
    action(
        ScsiOpcode::MAINTENANCE_IN,
        maintenance_in::REPORT_SUPPORTED_TASK_MANAGEMENT_FUNCTIONS,
        [0x1f, 0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 7],
        CommandRules::DESPITE_SANITIZE.and(CommandRules::READS),
        report::task_management_functions,
    ),
    action(
        ScsiOpcode::MAINTENANCE_OUT,
        maintenance_out::SET_TARGET_PORT_GROUPS,
        [0x1f, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 7],
        CommandRules::DESPITE_UNAVAILABLE.and(CommandRules::CHANGES_STATE),
        alua::set_groups,
    ),
    reads(range_12(ScsiOpcode::READ_12, 0xf8, read_write::read)),
    range_12(ScsiOpcode::WRITE_12, 0xf8, read_write::write),
    range_12(ScsiOpcode::WRITE_AND_VERIFY_12, 0xf6, verify::write_and_verify),
    reads(range_12(ScsiOpcode::VERIFY_12, 0xf6, verify::verify)),
    entry(
        ScsiOpcode::READ_DEFECT_DATA_12,
        [0x1f, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 7],
        CommandRules::NEEDS_MEDIUM.and(CommandRules::READS),
        defects::read_12,
    ),
];

/// Marks an operation code without an entry.
const NOWHERE: u8 = u8::MAX;

/// Index of the first entry of each operation code.
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

    #[test]
    fn the_table_is_in_order_and_every_entry_has_a_name_and_a_length() {
        assert!(TABLE.len() < NOWHERE.into());
        assert!(TABLE.is_sorted_by_key(|entry| (entry.opcode.0, entry.service_action)));
        for entry in TABLE {
            assert!(cdb_len(entry.opcode.0).is_some() && entry.opcode.name().is_some());
            assert_eq!(entry.usage()[0], entry.opcode.0);
            assert_eq!(entry.usage().last(), Some(&7), "{}: CONTROL is last", entry.opcode);
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
