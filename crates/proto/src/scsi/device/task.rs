//! Tasks, and the context of command handlers.

use super::cdb::CdbRange;
use super::target::ScsiTarget;
use super::units::AttachedUnit;
use super::{Command, ScsiStatus};
use crate::exports::VolumeId;
use crate::scsi::sense::Sense;
use crate::volume_state::{AtomicRange, IoGuard};
use blockmux_volume::{Cost, Io, IoError, MAX_TRANSFER, Op, Output, SgList};
use blockmux_wire::scsi::cdb::PROTECT_MASK;
use blockmux_wire::scsi::opcode::{ScsiOpcode, persistent_reserve_out as out};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::time::Duration;

/// A command in progress. To abort it, wait for its I/O, then drop it.
#[derive(Debug)]
pub struct Task {
    pub(super) command: Command,
    /// Index of the logical unit in the device server; `None` if the LUN does not exist.
    pub(super) unit: Option<usize>,
    pub(super) state: DeviceTaskState,
    /// Operation of the I/O in flight.
    pub(super) op: Op,
    pub(super) transfer_len: u64,
    /// `transfer_len` is a length of data-out.
    pub(super) is_data_out: bool,
    /// Abort epoch of the nexus at the start of the task; a different value aborts the task.
    pub(super) abort_epoch: u32,
    /// Counts the I/O in flight.
    pub(super) guard: Option<IoGuard>,
}

impl Task {
    /// A task that has not started.
    #[inline]
    #[must_use]
    pub fn new(command: &Command) -> Task {
        Task {
            command: *command,
            unit: None,
            state: DeviceTaskState::Ended,
            op: Op::Flush,
            transfer_len: 0,
            is_data_out: false,
            abort_epoch: 0,
            guard: None,
        }
    }

    /// Name of the command if it changes registrations or reservations.
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

/// State of a task.
pub(super) enum DeviceTaskState {
    /// The task has ended.
    Ended,
    /// The last I/O is in flight; its result is the response.
    LastIo,
    /// Waits for data to write.
    WriteData { offset: u64, fua: bool },
    /// Waits for a parameter list.
    Parameters(OnParameters),
    /// A multi-step command.
    Work(Box<dyn MultiStepCommand>),
}

impl DeviceTaskState {
    /// The range that the command reads and writes atomically.
    pub(super) fn atomic_range(&mut self) -> Option<&mut AtomicRange> {
        match self {
            DeviceTaskState::Work(work) => work.atomic_range(),
            _ => None,
        }
    }
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

/// Processes a parameter list.
pub(super) type OnParameters = fn(&mut CommandContext<'_>, &[u8]) -> TaskOutcome;

/// A command of several steps, each of them short so that the core stays responsive. It is called
/// until it completes, fails, or sets another state in the context.
pub(super) trait MultiStepCommand {
    /// Processes the requested data-out.
    fn on_data_out(&mut self, _cx: &mut CommandContext<'_>, _data: SgList) -> TaskOutcome {
        Err(TaskFailure::internal())
    }

    /// Processes the completion of the requested I/O.
    fn on_io(&mut self, cx: &mut CommandContext<'_>, output: Output) -> TaskOutcome;

    /// Called when the requested I/O has failed; the command ends.
    fn on_error(&mut self, _cx: &mut CommandContext<'_>) {}

    /// Called when an I/O on `unit` is counted as in flight: returns whether it may start. An error
    /// fails the I/O.
    fn check(&self, unit: &AttachedUnit, _op: Op) -> Result<(), TaskFailure> {
        unit.view.check_sanitize()
    }

    /// The range that the command reads and writes atomically.
    fn atomic_range(&mut self) -> Option<&mut AtomicRange> {
        None
    }

    /// What limits charge for the requested I/O; `None`: it is free.
    fn cost(&mut self, io: &Io) -> Option<Cost> {
        self.atomic_range().map_or_else(|| Cost::of(io), |range| range.cost())
    }

    /// Called after a wait.
    fn on_resume(&mut self, _cx: &mut CommandContext<'_>) -> TaskOutcome {
        Err(TaskFailure::internal())
    }
}

/// The next action of a command handler.
#[derive(Debug)]
pub(super) enum HandlerAction {
    /// Ends the command with GOOD and data-in.
    Done(SgList),
    /// Requests this many bytes of data-out, not 0. The state in the context records their purpose.
    DataOut(usize),
    /// Submits an I/O: operation, offset and length in bytes, data.
    Io(Op, u64, u64, Option<SgList>),
    /// Submits an I/O on another unit of the target.
    IoOnVolume(VolumeId, Op, u64, u64, Option<SgList>),
    /// Waits; the handler is called again later.
    Wait,
    /// Waits for this time.
    Pause(Duration),
}

impl HandlerAction {
    /// GOOD without data.
    pub(super) fn good() -> HandlerAction {
        HandlerAction::Done(SgList::default())
    }
}

/// Failure of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TaskFailure {
    pub(super) status: ScsiStatus,
    pub(super) sense: Option<Sense>,
}

impl TaskFailure {
    pub(super) fn status(status: ScsiStatus) -> TaskFailure {
        TaskFailure { status, sense: None }
    }

    /// The error that is counted for the volume.
    pub(crate) fn io_error(&self) -> IoError {
        match self.status {
            ScsiStatus::TASK_ABORTED => IoError::Aborted,
            ScsiStatus::RESERVATION_CONFLICT => IoError::Reserved,
            _ => IoError::PathLost,
        }
    }

    /// An internal error, reported to the initiator instead of a panic.
    pub(super) fn internal() -> TaskFailure {
        TaskFailure::internal_sense().into()
    }

    /// Sense data of an internal target failure.
    pub(super) fn internal_sense() -> Sense {
        Sense::new(SenseKey::HARDWARE_ERROR, Asc::INTERNAL_TARGET_FAILURE)
    }
}

impl From<Sense> for TaskFailure {
    fn from(sense: Sense) -> TaskFailure {
        TaskFailure { status: ScsiStatus::CHECK_CONDITION, sense: Some(sense) }
    }
}

pub(super) type TaskOutcome = Result<HandlerAction, TaskFailure>;

/// Context of a command handler.
pub(super) struct CommandContext<'a> {
    pub(super) target: &'a ScsiTarget,
    pub(super) unit: &'a mut AttachedUnit,
    pub(super) command: &'a Command,
    pub(super) state: &'a mut DeviceTaskState,
    pub(super) transfer_len: &'a mut u64,
    pub(super) is_data_out: &'a mut bool,
}

/// A range of existing blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockRange {
    pub(super) lba: u64,
    pub(super) blocks: u64,
    /// Offset in bytes.
    pub(super) offset: u64,
    /// Length in bytes.
    pub(super) len: u64,
    /// Second byte of the CDB.
    pub(super) flags: u8,
}

impl CommandContext<'_> {
    /// The blocks of the CDB; checks that they exist and that no protection information is
    /// requested.
    #[inline]
    pub(super) fn range(&self) -> Result<BlockRange, TaskFailure> {
        let Some(CdbRange { lba, blocks }) = self.command.cdb.range() else {
            return Err(Sense::in_cdb(0).into());
        };
        self.range_of(lba, blocks.into())
    }

    /// `blocks` blocks at `lba`, with the flags of the CDB's second byte.
    #[inline]
    pub(super) fn range_of(&self, lba: u64, blocks: u64) -> Result<BlockRange, TaskFailure> {
        // A 6-byte CDB has no flags.
        let flags = if self.command.cdb.byte(0) < 0x20 { 0 } else { self.command.cdb.byte(1) };
        // SBC-4, RDPROTECT and similar fields: only 000b without protection information.
        if flags & PROTECT_MASK != 0 {
            return Err(Sense::cdb_bit(1, 7).into());
        }
        Ok(BlockRange { flags, ..self.blocks(lba, blocks)? })
    }

    /// `blocks` blocks at `lba`, if they exist.
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

    /// Rejects transfers above MAXIMUM TRANSFER LENGTH of VPD page B0h (SBC-4).
    #[inline]
    pub(super) fn check_transfer(&self, range: &BlockRange, field: u16) -> Result<(), TaskFailure> {
        if range.len > MAX_TRANSFER.into() { Err(Sense::in_cdb(field).into()) } else { Ok(()) }
    }

    /// Offset of TRANSFER LENGTH in this CDB.
    #[inline]
    pub(super) fn length_field(&self) -> u16 {
        match self.command.cdb.byte(0) >> 5 {
            0 => 4,
            5 => 6,
            4 => 10,
            _ => 7,
        }
    }

    /// Rejects the command unless the nexus holds write access, for commands whose bits decide
    /// whether they conflict with reservations.
    pub(super) fn check_write_access(&self) -> Result<(), TaskFailure> {
        let is_holder = self.unit.view.access.writes && !self.unit.view.is_reserved_by_other;
        if is_holder { Ok(()) } else { Err(TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT)) }
    }

    /// Rejects changes of a write-protected unit.
    #[inline]
    pub(super) fn check_writable(&self) -> Result<(), TaskFailure> {
        self.unit.view.check_writable()
    }

    /// Requests `len` bytes of data-out for the current state.
    #[inline]
    pub(super) fn data_out(&mut self, len: u64) -> TaskOutcome {
        (*self.transfer_len, *self.is_data_out) = (len, true);
        // The initiator's buffer is shorter than the data of the CDB: nothing is written.
        if u64::from(self.command.data_out_len) < len {
            return Err(Sense::illegal(Asc::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT).into());
        }
        match usize::try_from(len) {
            Ok(len) if len > 0 && len <= MAX_TRANSFER as usize => Ok(HandlerAction::DataOut(len)),
            _ => Err(TaskFailure::internal()),
        }
    }

    /// The part of `len` bytes that a write executes if the initiator's data is shorter than the
    /// CDB requires: the complete blocks; the residual count reports the rest. FCP-4 §9.4.2 permits
    /// this or writing nothing, and initiators test for it. A partial block is rejected.
    #[inline]
    fn whole_blocks(&self, len: u64) -> Result<u64, TaskFailure> {
        let has = u64::from(self.command.data_out_len);
        if has >= len {
            return Ok(len);
        }
        // An initiator that expects a read gets an error, because it would take GOOD for success.
        // In the opposite case nothing is lost, and libiscsi's test suite expects
        // GOOD.
        let means_to_read = has == 0 && self.command.data_in_len > 0;
        match has.checked_rem(self.unit.view.block_len.into()) {
            Some(0) if !means_to_read => Ok(has),
            _ => Err(Sense::illegal(Asc::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT).into()),
        }
    }

    /// The part of `range` that a write executes, in bytes, possibly limited by the initiator's
    /// data; `None` if there is nothing to write.
    #[inline]
    pub(super) fn begin_write(&mut self, range: &BlockRange) -> Result<Option<u64>, TaskFailure> {
        self.check_writable()?;
        if range.len == 0 {
            return Ok(None);
        }
        (*self.transfer_len, *self.is_data_out) = (range.len, true);
        let len = self.whole_blocks(range.len)?;
        Ok((len > 0).then_some(len))
    }

    /// Requests the `len` bytes from [`CommandContext::begin_write`]; the residual count refers to
    /// the whole range.
    #[inline]
    pub(super) fn write_data_out(&mut self, range: &BlockRange, len: u64) -> TaskOutcome {
        let outcome = self.data_out(len);
        *self.transfer_len = range.len;
        outcome
    }

    /// Requests exactly `len` bytes of data-out; more or fewer are rejected.
    pub(super) fn exact_data_out(&mut self, len: u64) -> TaskOutcome {
        (*self.transfer_len, *self.is_data_out) = (len, true);
        if u64::from(self.command.data_out_len) != len {
            return Err(Sense::illegal(Asc::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT).into());
        }
        self.data_out(len)
    }

    /// Requests a parameter list of `len` bytes, at least `least`; an empty list does nothing.
    pub(super) fn parameters(&mut self, len: usize, least: usize, then: OnParameters) -> TaskOutcome {
        if len == 0 {
            return Ok(HandlerAction::good());
        }
        if len < least || (self.command.data_out_len as usize) < len {
            return Err(Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR).into());
        }
        *self.state = DeviceTaskState::Parameters(then);
        self.data_out(len as u64)
    }

    /// Continues with a multi-step command.
    pub(super) fn work(&mut self, work: impl MultiStepCommand + 'static) {
        *self.state = DeviceTaskState::Work(Box::new(work));
    }

    /// Submits the command's last I/O; its result is the response.
    #[inline]
    pub(super) fn last_io(&mut self, op: Op, offset: u64, len: u64, data: Option<SgList>) -> TaskOutcome {
        *self.state = DeviceTaskState::LastIo;
        Ok(HandlerAction::Io(op, offset, len, data))
    }
}

/// Returns parameter data, truncated at the allocation length (SPC-5).
pub(super) fn answer(bytes: &[u8], allocation_length: usize) -> TaskOutcome {
    let bytes = bytes.get(..allocation_length).unwrap_or(bytes);
    if bytes.is_empty() {
        return Ok(HandlerAction::good());
    }
    Ok(HandlerAction::Done(SgList::one(blockmux_volume::Seg::from_slice(bytes))))
}

/// Number of bytes that a multi-step command reads, compares or writes per step.
pub(super) const PIECE: u64 = 1 << 20;
