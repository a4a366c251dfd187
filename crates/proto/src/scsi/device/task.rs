//! One command under way, and what its handler has to work with.

use super::cdb::CdbRange;
use super::nexus::Nexus;
use super::target::ScsiTarget;
use super::units::AttachedUnit;
use super::{Command, ScsiStatus};
use crate::exports::VolumeId;
use crate::scsi::sense::Sense;
use crate::volume_state::IoGuard;
use blockmux_volume::{Io, MAX_TRANSFER, Op, Output, SgList};
use blockmux_wire::scsi::cdb::PROTECT_MASK;
use blockmux_wire::scsi::opcode::{ScsiOpcode, persistent_reserve_out as out};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::time::Duration;

/// One command under way. To abort it, wait until its I/O has completed, then drop it.
#[derive(Debug)]
pub struct Task {
    pub(super) command: Command,
    /// The logical unit's place in the device server; `None` for a LUN that there is not.
    pub(super) unit: Option<usize>,
    pub(super) state: DeviceTaskState,
    /// The operation of the I/O in flight.
    pub(super) op: Op,
    pub(super) transfer_len: u64,
    /// As it was when the task began; another one aborts it.
    pub(super) abort_epoch: u32,
    /// Counts the I/O in flight.
    pub(super) guard: Option<IoGuard>,
    /// An I/O that waits until its range is not locked any more.
    pub(super) held: Option<Box<(VolumeId, Io)>>,
}

impl Task {
    /// A command that nobody has looked at yet.
    #[inline]
    #[must_use]
    pub fn new(command: &Command) -> Task {
        Task {
            command: *command,
            unit: None,
            state: DeviceTaskState::Ended,
            op: Op::Flush,
            transfer_len: 0,
            abort_epoch: 0,
            guard: None,
            held: None,
        }
    }

    /// The name of the command, if it is one that changes registrations or reservations.
    #[inline]
    pub(crate) fn reservation_change(&self) -> Option<&'static str> {
        let cdb = &self.command.cdb;
        match cdb.opcode() {
            ScsiOpcode::RESERVE_6 | ScsiOpcode::RESERVE_10 => Some("RESERVE"),
            ScsiOpcode::RELEASE_6 | ScsiOpcode::RELEASE_10 => Some("RELEASE"),
            ScsiOpcode::PERSISTENT_RESERVE_OUT => Some(match u16::from(cdb.byte(1) & 0x1f) {
                out::REGISTER => "REGISTER",
                out::RESERVE => "PERSISTENT RESERVE",
                out::RELEASE => "PERSISTENT RELEASE",
                out::CLEAR => "CLEAR",
                out::PREEMPT => "PREEMPT",
                out::PREEMPT_AND_ABORT => "PREEMPT AND ABORT",
                out::REGISTER_AND_IGNORE_EXISTING_KEY => "REGISTER AND IGNORE EXISTING KEY",
                out::REGISTER_AND_MOVE => "REGISTER AND MOVE",
                _ => "PERSISTENT RESERVE OUT",
            }),
            _ => None,
        }
    }
}

/// What a task waits for.
pub(super) enum DeviceTaskState {
    /// Nothing: it is over.
    Ended,
    /// Its last I/O: what that brings is the answer.
    LastIo,
    /// Data to write.
    WriteData { offset: u64, fua: bool },
    /// A parameter list.
    Parameters(OnParameters),
    /// Whatever the work says.
    Work(Box<dyn MultiStepCommand>),
}

impl std::fmt::Debug for DeviceTaskState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DeviceTaskState::Ended => "Ended",
            DeviceTaskState::LastIo => "LastIo",
            DeviceTaskState::WriteData { .. } => "WriteData",
            DeviceTaskState::Parameters(_) => "Parameters",
            DeviceTaskState::Work(_) => "Work",
        })
    }
}

/// Takes a parameter list.
pub(super) type OnParameters = fn(&mut Context<'_>, &[u8]) -> TaskOutcome;

/// A command of several steps, none of them long: what others want of this core waits meanwhile. It
/// is asked again until it is done, fails, or leaves another state in the context.
pub(super) trait MultiStepCommand {
    /// The data-out that it asked for.
    fn on_data_out(&mut self, _cx: &mut Context<'_>, _data: SgList) -> TaskOutcome {
        Err(TaskFailure::internal())
    }

    /// The I/O that it asked for is done.
    fn on_io(&mut self, cx: &mut Context<'_>, output: Output) -> TaskOutcome;

    /// The I/O that it asked for has failed; the command is over.
    fn on_error(&mut self, _cx: &mut Context<'_>) {}

    /// Asked when an I/O that it wants on the unit `end` is counted as in flight: whether that may
    /// still begin. If not, the I/O has failed.
    fn check(&self, end: &AttachedUnit, _op: Op) -> Result<(), TaskFailure> {
        end.view.check_sanitize()
    }

    /// It waited.
    fn on_resume(&mut self, _cx: &mut Context<'_>) -> TaskOutcome {
        Err(TaskFailure::internal())
    }
}

/// What a handler wants next. I/O on a range that another task has locked waits, without asking the
/// handler.
#[derive(Debug)]
pub(super) enum Action {
    /// GOOD, with data-in.
    Done(SgList),
    /// So much data-out, not 0; the context's state says what for.
    DataOut(usize),
    /// An I/O: operation, offset and length in bytes, data.
    Io(Op, u64, u64, Option<SgList>),
    /// An I/O within the range that the task has locked: operation, offset and length in bytes,
    /// data.
    IoAlone(Op, u64, u64, Option<SgList>),
    /// An I/O on another unit of the target.
    IoOn(VolumeId, Op, u64, u64, Option<SgList>),
    /// To be asked again later.
    Wait,
    /// To be asked again after that long.
    Pause(Duration),
}

impl Action {
    /// GOOD, without data.
    pub(super) fn good() -> Action {
        Action::Done(SgList::default())
    }
}

/// How a command fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TaskFailure {
    pub(super) status: ScsiStatus,
    pub(super) sense: Option<Sense>,
}

impl TaskFailure {
    pub(super) fn status(status: ScsiStatus) -> TaskFailure {
        TaskFailure { status, sense: None }
    }

    /// A state that the code cannot be in; said to the initiator rather than by a panic.
    pub(super) fn internal() -> TaskFailure {
        TaskFailure::internal_sense().into()
    }

    /// The sense data of an internal target failure.
    pub(super) fn internal_sense() -> Sense {
        Sense::new(SenseKey::HARDWARE_ERROR, Asc::INTERNAL_TARGET_FAILURE)
    }
}

impl From<Sense> for TaskFailure {
    fn from(sense: Sense) -> TaskFailure {
        TaskFailure { status: ScsiStatus::CHECK_CONDITION, sense: Some(sense) }
    }
}

pub(super) type TaskOutcome = Result<Action, TaskFailure>;

/// What a handler has to work with.
pub(super) struct Context<'a> {
    pub(super) target: &'a ScsiTarget,
    pub(super) nexus: &'a Nexus,
    pub(super) unit: &'a mut AttachedUnit,
    pub(super) command: &'a Command,
    pub(super) state: &'a mut DeviceTaskState,
    pub(super) transfer_len: &'a mut u64,
}

/// A range of blocks that lies within the logical unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockRange {
    pub(super) lba: u64,
    pub(super) blocks: u64,
    /// In bytes.
    pub(super) offset: u64,
    /// In bytes.
    pub(super) len: u64,
    /// The second byte of the CDB.
    pub(super) flags: u8,
}

impl Context<'_> {
    /// The blocks that the CDB names: they exist, and no protection information is asked for.
    #[inline]
    pub(super) fn range(&self) -> Result<BlockRange, TaskFailure> {
        let Some(CdbRange { lba, blocks }) = self.command.cdb.range() else {
            return Err(Sense::in_cdb(0).into());
        };
        self.range_of(lba, blocks.into())
    }

    /// `blocks` blocks from `lba` on, with the flags of the CDB's second byte.
    #[inline]
    pub(super) fn range_of(&self, lba: u64, blocks: u64) -> Result<BlockRange, TaskFailure> {
        // A CDB of 6 bytes has no flags.
        let flags = if self.command.cdb.byte(0) < 0x20 { 0 } else { self.command.cdb.byte(1) };
        // SBC-4, RDPROTECT and its relatives: without protection information, only 000b.
        if flags & PROTECT_MASK != 0 {
            return Err(Sense::cdb_bit(1, 7).into());
        }
        Ok(BlockRange { flags, ..self.blocks(lba, blocks)? })
    }

    /// `blocks` blocks from `lba` on, if they exist.
    #[inline]
    pub(super) fn blocks(&self, lba: u64, blocks: u64) -> Result<BlockRange, TaskFailure> {
        let view = &self.unit.view;
        let is_within = lba.checked_add(blocks).is_some_and(|end| end <= view.blocks);
        let block_len = u64::from(view.block_len);
        match (lba.checked_mul(block_len), blocks.checked_mul(block_len)) {
            (Some(offset), Some(len)) if is_within => Ok(BlockRange { lba, blocks, offset, len, flags: 0 }),
            _ => Err(Sense::illegal(Asc::LOGICAL_BLOCK_ADDRESS_OUT_OF_RANGE).with_information(lba).into()),
        }
    }

    /// Refuses what would move more at once than VPD page B0h allows (SBC-4, MAXIMUM TRANSFER
    /// LENGTH).
    #[inline]
    pub(super) fn check_transfer(&self, range: &BlockRange, field: u16) -> Result<(), TaskFailure> {
        if range.len > MAX_TRANSFER.into() { Err(Sense::in_cdb(field).into()) } else { Ok(()) }
    }

    /// Where this CDB has its TRANSFER LENGTH.
    #[inline]
    pub(super) fn length_field(&self) -> u16 {
        match self.command.cdb.byte(0) >> 5 {
            0 => 4,
            5 => 6,
            4 => 10,
            _ => 7,
        }
    }

    /// Refuses what only a reservation holder may do, where a command's bits decide whether it is
    /// that.
    pub(super) fn check_holder(&self) -> Result<(), TaskFailure> {
        let is_holder = self.unit.view.access.writes && !self.unit.view.is_reserved_by_other;
        if is_holder { Ok(()) } else { Err(TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT)) }
    }

    /// Refuses to change blocks of a write-protected unit.
    #[inline]
    pub(super) fn check_writable(&self) -> Result<(), TaskFailure> {
        self.unit.view.check_writable()
    }

    /// Asks for `len` bytes of data-out, which the state that was set then gets.
    #[inline]
    pub(super) fn data_out(&mut self, len: u64) -> TaskOutcome {
        *self.transfer_len = len;
        // The initiator's buffer ends before the data that its CDB names: nothing is written.
        if u64::from(self.command.data_out_len) < len {
            return Err(Sense::illegal(Asc::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT).into());
        }
        match usize::try_from(len) {
            Ok(len) if len > 0 && len <= MAX_TRANSFER as usize => Ok(Action::DataOut(len)),
            _ => Err(TaskFailure::internal()),
        }
    }

    /// How much of `len` bytes a write takes when the initiator's data ends before what its CDB
    /// names: the whole blocks that are there, and the residual tells of the rest. FCP-4 §9.4.2
    /// lets this be, or writing nothing; initiators test for this. Data that ends within a block is
    /// refused.
    #[inline]
    fn whole_blocks(&self, len: u64) -> Result<u64, TaskFailure> {
        let has = u64::from(self.command.data_out_len);
        if has >= len {
            return Ok(len);
        }
        // An initiator that means to read is told that this is a write, for it would take GOOD for
        // done. The other way round nothing is lost, and libiscsi's suite wants GOOD.
        let means_to_read = has == 0 && self.command.data_in_len > 0;
        match has.checked_rem(self.unit.view.block_len.into()) {
            Some(0) if !means_to_read => Ok(has),
            _ => Err(Sense::illegal(Asc::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT).into()),
        }
    }

    /// How much of `range` a write takes, which may end with the initiator's data; `None`: it has
    /// nothing to do.
    #[inline]
    pub(super) fn begin_write(&mut self, range: &BlockRange) -> Result<Option<u64>, TaskFailure> {
        self.check_writable()?;
        if range.len == 0 {
            return Ok(None);
        }
        *self.transfer_len = range.len;
        let len = self.whole_blocks(range.len)?;
        Ok((len > 0).then_some(len))
    }

    /// Asks for the `len` bytes that [`Context::begin_write`] found; the residual is that of the
    /// whole range.
    #[inline]
    pub(super) fn write_data_out(&mut self, range: &BlockRange, len: u64) -> TaskOutcome {
        let outcome = self.data_out(len);
        *self.transfer_len = range.len;
        outcome
    }

    /// Asks for `len` bytes of data-out, where more would be as wrong as less.
    pub(super) fn exact_data_out(&mut self, len: u64) -> TaskOutcome {
        *self.transfer_len = len;
        if u64::from(self.command.data_out_len) != len {
            return Err(Sense::illegal(Asc::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT).into());
        }
        self.data_out(len)
    }

    /// Asks for a parameter list of `len` bytes, of which `least` must be there; nothing is done
    /// without one.
    pub(super) fn parameters(&mut self, len: usize, least: usize, then: OnParameters) -> TaskOutcome {
        if len == 0 {
            return Ok(Action::good());
        }
        if len < least || (self.command.data_out_len as usize) < len {
            return Err(Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR).into());
        }
        *self.state = DeviceTaskState::Parameters(then);
        self.data_out(len as u64)
    }

    /// Goes on with work of several steps.
    pub(super) fn work(&mut self, work: impl MultiStepCommand + 'static) {
        *self.state = DeviceTaskState::Work(Box::new(work));
    }

    /// Asks for an I/O that is the command's last: what it brings is the answer.
    #[inline]
    pub(super) fn last_io(&mut self, op: Op, offset: u64, len: u64, data: Option<SgList>) -> TaskOutcome {
        *self.state = DeviceTaskState::LastIo;
        Ok(Action::Io(op, offset, len, data))
    }
}

/// Parameter data for the initiator, cut off at the allocation length (SPC-5).
pub(super) fn answer(bytes: &[u8], allocation_length: usize) -> TaskOutcome {
    let bytes = bytes.get(..allocation_length).unwrap_or(bytes);
    if bytes.is_empty() {
        return Ok(Action::good());
    }
    Ok(Action::Done(SgList::one(blockmux_volume::Seg::from_slice(bytes))))
}

/// Bytes that a command of several steps reads, compares or writes in one of them.
pub(super) const PIECE: u64 = 1 << 20;
