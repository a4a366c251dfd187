//! The device server: dispatches commands and executes tasks step by step.

use super::error::from_io_error;
use super::nexus::ItNexus;
use super::open_nexus::OpenNexus;
use super::table::{self, CommandEntry, CommandRules};
use super::target::ScsiTarget;
use super::task::{CommandContext, DeviceTaskState, HandlerAction, Task, TaskFailure, TaskOutcome};
use super::unit::{LogicalUnit, UNIT_REMOVED, UnitState};
use super::units::{AttachedUnit, AttachedUnits};
use super::{Cdb, Command, Lun, Response, ScsiStatus, TaskAttribute, TaskStep, inquiry, luns, sanitize};
use crate::exports::VolumeId;
use crate::scsi::sense::Sense;
use crate::volume_state::{AtomicRange, Drain, Fenced, NotAdmitted};
use blockmux_volume::{Completion, Cost, Io, IoError, Op, SgList, Tag};
use blockmux_wire::scsi::cdb::NACA;
use blockmux_wire::scsi::opcode::ScsiOpcode;
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use smallvec::SmallVec;
use std::sync::Arc;

/// The device server of one session of an I_T nexus. It lives as long as the session and on its
/// core; the module documentation describes the design.
pub struct DeviceServer {
    /// The target.
    pub(crate) target: Arc<ScsiTarget>,
    units: AttachedUnits,
}

/// Task management functions of a logical unit (SAM-5 §7). The transport handles ABORT TASK and
/// QUERY TASK itself, and implements target resets as resets of all logical units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskManagement {
    /// Abort the tasks of this nexus.
    AbortTaskSet,
    /// Abort the tasks of all nexuses.
    ClearTaskSet,
    /// Reset the logical unit.
    LogicalUnitReset,
}

/// Service response of a task management function (SAM-5 §7.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManagementResponse {
    /// The function is complete. The transport aborts its own tasks of that logical unit.
    FunctionComplete,
    /// No such logical unit exists.
    IncorrectLogicalUnitNumber,
}

impl DeviceServer {
    /// The device server for a session that is a nexus by itself.
    #[must_use]
    pub fn new(target: Arc<ScsiTarget>, nexus: ItNexus) -> DeviceServer {
        DeviceServer::of_nexus(OpenNexus::new(&target, nexus))
    }

    /// The device server for a session of a nexus that may have others.
    pub(crate) fn of_nexus(nexus: Arc<OpenNexus>) -> DeviceServer {
        let target = nexus.target.clone();
        DeviceServer { units: AttachedUnits::new(&target, nexus), target }
    }

    /// The I_T nexus.
    #[must_use]
    pub fn nexus(&self) -> &ItNexus {
        &self.units.nexus.identity
    }

    /// Starts a command.
    pub fn begin(&mut self, command: &Command) -> (Task, TaskStep) {
        let mut task = Task::new(command);
        let step = self.start(&mut task);
        (task, step)
    }

    /// Starts a task in place, because a task is too large to be moved.
    #[inline]
    pub fn start(&mut self, task: &mut Task) -> TaskStep {
        self.units.update(&self.target);
        task.unit = self.units.find(task.command.lun, &self.target);
        let outcome = match task.unit.and_then(|unit| self.units.get_mut(unit)) {
            Some(unit) => dispatch(&self.target, unit, task),
            None => execute_without_unit(&self.target, &task.command),
        };
        self.step(task, outcome)
    }

    /// Processes the data-out that [`TaskStep::DataOut`] requested; the lengths are equal.
    #[inline]
    pub fn on_data_out(&mut self, task: &mut Task, data: SgList) -> TaskStep {
        let outcome = self.advance(task, |cx| match std::mem::replace(cx.state, DeviceTaskState::Ended) {
            DeviceTaskState::WriteData { offset, fua } => {
                let len = data.len() as u64;
                cx.last_io(Op::Write { fua }, offset, len, Some(data))
            }
            DeviceTaskState::Parameters(on_parameters) => {
                let mut bytes: SmallVec<[u8; 64]> = SmallVec::from_elem(0, data.len());
                data.copy_to(&mut bytes);
                check_turn(cx.unit, find_entry(cx.command)?)?;
                on_parameters(cx, &bytes)
            }
            DeviceTaskState::Work(mut work) => {
                let outcome = work.on_data_out(cx, data);
                keep_command(cx, work, outcome)
            }
            DeviceTaskState::Ended | DeviceTaskState::LastIo => Err(TaskFailure::internal()),
        });
        self.step(task, outcome)
    }

    /// Processes the completion of the I/O of a [`TaskStep::Io`].
    #[inline]
    pub fn on_io(&mut self, task: &mut Task, done: Completion) -> TaskStep {
        task.guard = None;
        let output = match done.result {
            Ok(output) => output,
            Err(error) => return self.on_io_error(task, error),
        };
        let outcome = self.advance(task, |cx| match std::mem::replace(cx.state, DeviceTaskState::Ended) {
            DeviceTaskState::LastIo => Ok(HandlerAction::Done(output.into_data())),
            DeviceTaskState::Work(mut work) => {
                work.atomic_range().into_iter().for_each(AtomicRange::on_io);
                let outcome = work.on_io(cx, output);
                keep_command(cx, work, outcome)
            }
            _ => Err(TaskFailure::internal()),
        });
        self.step(task, outcome)
    }

    #[cold]
    fn on_io_error(&mut self, task: &mut Task, error: IoError) -> TaskStep {
        self.notify_failure(task);
        self.step(task, Err(from_io_error(error, task.op).into()))
    }

    /// What limits charge for the I/O of a [`TaskStep::Io`].
    pub(crate) fn cost(task: &mut Task, io: &Io) -> Option<Cost> {
        match &mut task.state {
            DeviceTaskState::Work(work) => work.cost(io),
            _ => Cost::of(io),
        }
    }

    /// Admits the I/O of a [`TaskStep::Io`], which is submitted at once. `is_late`: it was
    /// throttled or has waited for its range.
    ///
    /// # Errors
    /// If it may not begin. A denied task is ended with [`DeviceServer::fail_denied`].
    #[inline]
    pub(crate) fn admit(
        &mut self,
        task: &mut Task,
        volume: VolumeId,
        io: &Io,
        is_late: bool,
    ) -> Result<(), NotAdmitted<TaskFailure>> {
        let is_write = io.op.is_write();
        if !is_write && !matches!(io.op, Op::Read) {
            return Ok(());
        }
        if is_late {
            self.units.update(&self.target);
        }
        let index = self.index_of(task, volume);
        let owns_lock = task.state.atomic_range().is_some();
        if owns_lock {
            // Who has no access must not hold up others.
            self.check_begin(task, volume, index, true, is_late).map_err(NotAdmitted::Denied)?;
            task.state.atomic_range().map_or(Ok(()), AtomicRange::lock)?;
        }
        let counter = index.and_then(|index| self.units.get_mut(index)).map(AttachedUnit::counter);
        let counter = counter.ok_or(NotAdmitted::Denied(UNIT_REMOVED.into()))?;
        // The abort check follows the counting of the I/O: either the aborting side sees the I/O in
        // flight when it waits (`Drain`), or this check sees the abort.
        let check = || self.check_begin(task, volume, index, owns_lock || is_write, is_late);
        let guard = counter.admit(is_write, (io.offset, io.len), owns_lock, check)?;
        task.guard = Some(guard);
        Ok(())
    }

    /// Ends a task whose I/O was denied.
    #[cold]
    pub(crate) fn fail_denied(&mut self, task: &mut Task, failure: TaskFailure) -> TaskStep {
        self.notify_failure(task);
        self.fail(task, failure)
    }

    /// Resumes a task after [`TaskStep::Wait`] or [`TaskStep::Pause`].
    pub fn resume(&mut self, task: &mut Task) -> TaskStep {
        let outcome = self.advance(task, |cx| match std::mem::replace(cx.state, DeviceTaskState::Ended) {
            DeviceTaskState::Work(mut work) => {
                let outcome = work.on_resume(cx);
                keep_command(cx, work, outcome)
            }
            _ => Err(TaskFailure::internal()),
        });
        self.step(task, outcome)
    }

    /// Takes over background work of a logical unit: a sanitize operation whose command has
    /// ended. The caller executes the returned task and drops its response. Call this when
    /// [`LogicalUnit::on_background`](super::LogicalUnit::on_background) notifies; without work it
    /// costs one look at each unit.
    pub fn poll_background(&mut self) -> Option<(Task, TaskStep)> {
        self.units.update(&self.target);
        let number = self.target.position(|own| own.mapping.unit.read_state(UnitState::has_background))?;
        let at = self.units.find(Lun::new(number), &self.target)?;
        let unit = self.units.get(at)?;
        let command = Command {
            lun: Lun::new(unit.number),
            cdb: Cdb::default(),
            attribute: TaskAttribute::Simple,
            data_out_len: 0,
            data_in_len: 0,
        };
        let mut task = Task { unit: Some(at), abort_epoch: unit.view.abort_epoch, ..Task::new(&command) };
        let outcome = self.advance(&mut task, sanitize::take_over);
        match self.step(&mut task, outcome) {
            // Another session has taken over the work.
            TaskStep::Done(_) => None,
            step => Some((task, step)),
        }
    }

    /// Units with tokens and without a clock. The caller must call `tick` of their tokens every
    /// second.
    pub(crate) fn claim_token_clocks(&self) -> Vec<Arc<LogicalUnit>> {
        self.target.units_where(|unit| unit.tokens.claim_clock())
    }

    /// Executes a task management function on the shared state; the transport aborts its own tasks.
    pub fn manage(&mut self, function: TaskManagement, lun: Lun) -> ManagementResponse {
        let Some(unit) = self.unit(lun) else {
            return ManagementResponse::IncorrectLogicalUnitNumber;
        };
        // What the session has sent may be out of date, and those of others are of a later turn.
        if unit.volume_state.fences(self.units.epoch) {
            return ManagementResponse::FunctionComplete;
        }
        // Aborted tasks of other nexuses end with their next step; `drain` waits for their I/O in
        // flight.
        match function {
            TaskManagement::AbortTaskSet => {}
            // SAM-5 §5.14: with TAS, tasks of other nexuses end with TASK ABORTED, and there is no
            // unit attention.
            TaskManagement::ClearTaskSet => unit.change(UnitState::abort_all_tasks),
            TaskManagement::LogicalUnitReset => unit.reset(),
        }
        ManagementResponse::FunctionComplete
    }

    /// Whether a unit with this LUN exists.
    #[must_use]
    pub fn has_unit(&self, lun: Lun) -> bool {
        self.unit(lun).is_some()
    }

    fn unit(&self, lun: Lun) -> Option<Arc<LogicalUnit>> {
        Some(self.target.unit(lun.number()?)?.mapping.unit)
    }

    /// Handles the loss or reset of the nexus while its session continues: clears its state in
    /// every unit and establishes a unit attention. The transport aborts its own tasks.
    pub fn on_nexus_loss(&mut self) {
        self.units.nexus.on_loss();
    }

    /// Waits for the I/O of tasks that [`DeviceServer::manage`] has just aborted, in any nexus; a
    /// function that aborts tasks of others is answered only afterwards. `None` if there is no such
    /// unit.
    pub(crate) fn drain(&self, lun: Lun) -> Option<Drain> {
        Some(Drain::new(&self.unit(lun)?.volume_state))
    }

    #[inline]
    fn advance(
        &mut self,
        task: &mut Task,
        next: impl FnOnce(&mut CommandContext<'_>) -> TaskOutcome,
    ) -> TaskOutcome {
        let unit = self.units.of_task(task)?;
        if unit.is_aborted(task) {
            return Err(TaskFailure::status(ScsiStatus::TASK_ABORTED));
        }
        next(&mut CommandContext {
            target: &self.target,
            unit,
            command: &task.command,
            state: &mut task.state,
            transfer_len: &mut task.transfer_len,
            is_data_out: &mut task.is_data_out,
        })
    }

    #[inline]
    fn step(&mut self, task: &mut Task, outcome: TaskOutcome) -> TaskStep {
        match outcome {
            Ok(HandlerAction::Io(op, offset, len, data)) => {
                let volume = self.volume_of(task);
                DeviceServer::submit(task, volume, Io { tag: Tag(0), op, offset, len, data })
            }
            Ok(HandlerAction::IoOnVolume(volume, op, offset, len, data)) => {
                DeviceServer::submit(task, volume, Io { tag: Tag(0), op, offset, len, data })
            }
            Ok(HandlerAction::DataOut(len)) => TaskStep::DataOut { len },
            Ok(HandlerAction::Wait) => TaskStep::Wait,
            Ok(HandlerAction::Pause(time)) => TaskStep::Pause(time),
            Ok(HandlerAction::Done(data_in)) => {
                if !data_in.is_empty() {
                    task.transfer_len = data_in.len() as u64;
                }
                end(task, ScsiStatus::GOOD, None, data_in)
            }
            Err(failure) => self.fail(task, failure),
        }
    }

    #[cold]
    fn fail(&mut self, task: &mut Task, TaskFailure { status, sense }: TaskFailure) -> TaskStep {
        let unit = task.unit.and_then(|unit| self.units.get(unit));
        let descriptor_format = unit.is_some_and(|unit| unit.view.descriptor_sense);
        end(task, status, sense.map(|sense| Sense { descriptor_format, ..sense }), SgList::default())
    }

    /// The volume of the task's unit.
    #[inline]
    fn volume_of(&self, task: &Task) -> VolumeId {
        task.unit.and_then(|unit| self.units.get(unit)).map_or(NO_VOLUME, |unit| unit.volume)
    }

    #[inline]
    fn submit(task: &mut Task, volume: VolumeId, io: Io) -> TaskStep {
        task.op = io.op;
        TaskStep::Io { volume, io }
    }

    #[inline]
    fn check_counted(&mut self, task: &Task, index: Option<usize>) -> Result<(), TaskFailure> {
        if self.units.of_task(task)?.is_aborted(task) {
            return Err(TaskFailure::status(ScsiStatus::TASK_ABORTED));
        }
        let other = index.and_then(|index| self.units.get_mut(index)).ok_or(UNIT_REMOVED)?;
        if other.unit.generation() != other.seen {
            other.refresh();
        }
        match &task.state {
            DeviceTaskState::Work(work) => work.check(other, task.op),
            _ => other.view.check_sanitize(),
        }
    }

    /// Checks whether an I/O of the task may begin; `changes`: its command changes the data.
    #[inline]
    fn check_begin(
        &mut self,
        task: &Task,
        volume: VolumeId,
        index: Option<usize>,
        changes: bool,
        is_late: bool,
    ) -> Result<(), TaskFailure> {
        self.check_counted(task, index)?;
        if is_late { self.check_again(task, volume, changes) } else { Ok(()) }
    }

    /// Checks for a late I/O what was checked when its command began. Nobody waited for it, so it
    /// must not begin after a change that excludes it.
    #[cold]
    fn check_again(&mut self, task: &Task, volume: VolumeId, changes: bool) -> Result<(), TaskFailure> {
        let unit = self.units.of_task(task)?;
        let entry = find_entry(&task.command)?;
        entry.check_reservation(&unit.view)?;
        if let Some(sense) = unit.view.not_ready
            && !entry.is_permitted_not_ready(&unit.view)
        {
            return Err(sense.into());
        }
        // A multi-step command checks other units itself.
        if changes && unit.volume == volume { unit.view.check_writable() } else { Ok(()) }
    }

    /// Reports a failed I/O to a multi-step command.
    #[cold]
    fn notify_failure(&mut self, task: &mut Task) {
        if let DeviceTaskState::Work(mut work) = std::mem::replace(&mut task.state, DeviceTaskState::Ended) {
            let _ = self.advance(task, |cx| {
                work.on_error(cx);
                Ok(HandlerAction::good())
            });
        }
    }

    /// The attached unit that checks an I/O of the task on this volume.
    #[inline]
    fn index_of(&mut self, task: &Task, volume: VolumeId) -> Option<usize> {
        let is_on_volume = |unit: &AttachedUnit| unit.volume == volume;
        let own = task.unit.filter(|&unit| self.units.get(unit).is_some_and(is_on_volume));
        own.or_else(|| self.units.find_volume(volume, &self.target))
    }
}

/// Ends a task.
#[inline]
fn end(task: &mut Task, status: ScsiStatus, sense: Option<Sense>, data_in: SgList) -> TaskStep {
    task.state = DeviceTaskState::Ended;
    let Task { transfer_len, is_data_out, .. } = *task;
    TaskStep::Done(Response { status, sense, data_in, transfer_len, is_data_out })
}

/// Performs the checks that all commands share, then starts the command.
#[inline]
fn dispatch(target: &ScsiTarget, unit: &mut AttachedUnit, task: &mut Task) -> TaskOutcome {
    if unit.unit.generation() != unit.seen {
        unit.refresh();
    }
    let entry = find_entry(&task.command)?;
    if unit.view.has_attention && !entry.rules.contains(CommandRules::DESPITE_ATTENTION) {
        if let Some(asc) = unit.unit.take_attention(unit.key) {
            unit.refresh();
            return Err(Sense::new(SenseKey::UNIT_ATTENTION, asc).into());
        }
        unit.refresh();
    }
    task.abort_epoch = unit.view.abort_epoch;
    entry.check_reservation(&unit.view).inspect_err(|_| unit.unit.volume_state.note_conflict())?;
    if let Some(sense) = unit.view.sanitizing
        && !entry.rules.contains(CommandRules::DESPITE_SANITIZE)
    {
        return Err(sense.into());
    }
    if let Some(sense) = unit.view.not_ready
        && !entry.is_permitted_not_ready(&unit.view)
    {
        return Err(sense.into());
    }
    if !entry.is_supported(&unit.view) {
        return Err(Sense::illegal(Asc::INVALID_COMMAND_OPERATION_CODE).into());
    }
    check_turn(unit, entry)?;
    let mut cx = CommandContext {
        target,
        unit,
        command: &task.command,
        state: &mut task.state,
        transfer_len: &mut task.transfer_len,
        is_data_out: &mut task.is_data_out,
    };
    (entry.begin)(&mut cx)
}

/// Refuses a change of state to a fenced session, also once its parameter list has arrived.
#[inline]
fn check_turn(unit: &AttachedUnit, entry: &CommandEntry) -> Result<(), Fenced> {
    let is_change = entry.rules.contains(CommandRules::CHANGES_STATE);
    if is_change && unit.unit.volume_state.fences(unit.epoch) { Err(Fenced) } else { Ok(()) }
}

/// The table entry of a command with a complete CDB.
#[inline]
fn find_entry(command: &Command) -> Result<&'static CommandEntry, TaskFailure> {
    let cdb = &command.cdb;
    let entry = table::find(cdb)?;
    if cdb.len() < entry.cdb_len() {
        return Err(Sense::illegal(Asc::INVALID_COMMAND_OPERATION_CODE).into());
    }
    let control = entry.cdb_len().saturating_sub(1);
    // NORMACA of the INQUIRY data is 0: auto contingent allegiance is not supported.
    if cdb.byte(control) & NACA != 0 {
        return Err(Sense::cdb_bit(control as u16, 2).into());
    }
    Ok(entry)
}

/// Executes a command for a LUN without a logical unit (SPC-5, SAM-5).
fn execute_without_unit(target: &ScsiTarget, command: &Command) -> TaskOutcome {
    match command.cdb.opcode() {
        ScsiOpcode::REPORT_LUNS => luns::report(target, command),
        ScsiOpcode::INQUIRY => inquiry::without_unit(command),
        ScsiOpcode::REQUEST_SENSE => super::ready::sense_without_unit(command),
        ScsiOpcode::TEST_UNIT_READY if command.lun.is_report_luns() => Ok(HandlerAction::good()),
        _ if command.lun.is_report_luns() => Err(Sense::illegal(Asc::INVALID_COMMAND_OPERATION_CODE).into()),
        _ => Err(Sense::illegal(Asc::LOGICAL_UNIT_NOT_SUPPORTED).into()),
    }
}

/// Keeps an unfinished multi-step command, unless it has set another state.
fn keep_command(
    cx: &mut CommandContext<'_>,
    work: Box<dyn super::task::MultiStepCommand>,
    outcome: TaskOutcome,
) -> TaskOutcome {
    let continues = !matches!(outcome, Ok(HandlerAction::Done(_)) | Err(_));
    if continues && matches!(cx.state, DeviceTaskState::Ended) {
        *cx.state = DeviceTaskState::Work(work);
    }
    outcome
}

/// Placeholder for I/O without a unit; never submitted.
const NO_VOLUME: VolumeId = VolumeId(u32::MAX);
