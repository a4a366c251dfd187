//! The device server: dispatches commands, and walks each task from step to step.

use super::error::from_io_error;
use super::nexus::Nexus;
use super::table::{self, CommandEntry, Rules};
use super::target::ScsiTarget;
use super::task::{Action, Context, DeviceTaskState, Task, TaskFailure, TaskOutcome};
use super::unit::{LogicalUnit, UnitState};
use super::units::{AttachedUnit, Units};
use super::{Cdb, Command, Lun, Response, ScsiStatus, Step, TaskAttribute, inquiry, luns, sanitize};
use crate::exports::VolumeId;
use crate::scsi::sense::Sense;
use crate::volume_state::{Drain, NotAdmitted};
use blockmux_volume::{Completion, Io, Op, SgList, Tag};
use blockmux_wire::scsi::cdb::NACA;
use blockmux_wire::scsi::opcode::ScsiOpcode;
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use smallvec::SmallVec;
use std::sync::Arc;

/// One I_T nexus of a target; it lives as long as its session, on the session's core. See the
/// module's words.
pub struct DeviceServer {
    target: Arc<ScsiTarget>,
    nexus: Nexus,
    units: Units,
}

/// Task management functions (SAM-5 §7). What concerns one task alone, ABORT TASK and QUERY TASK,
/// is the transport's own, as is the reset of a target, which it makes of the resets of its logical
/// units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskManagement {
    /// Abort this nexus's tasks.
    AbortTaskSet,
    /// Abort every nexus's tasks.
    ClearTaskSet,
    /// Reset the logical unit.
    LogicalUnitReset,
}

/// The service response (SAM-5 §7.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManagementResponse {
    /// Done. The transport aborts its own tasks of that logical unit.
    FunctionComplete,
    /// There is no such logical unit.
    IncorrectLogicalUnitNumber,
}

impl DeviceServer {
    /// The device server for a new session.
    #[must_use]
    pub fn new(target: Arc<ScsiTarget>, nexus: Nexus) -> DeviceServer {
        DeviceServer { units: Units::new(&target, &nexus), target, nexus }
    }

    /// The nexus that this is.
    #[must_use]
    pub fn nexus(&self) -> &Nexus {
        &self.nexus
    }

    /// The target whose units it has.
    pub(crate) fn target(&self) -> &ScsiTarget {
        &self.target
    }

    /// Takes a command.
    pub fn begin(&mut self, command: &Command) -> (Task, Step) {
        let mut task = Task::new(command);
        let step = self.start(&mut task);
        (task, step)
    }

    /// Starts a task in place: it is too large to be moved for nothing.
    #[inline]
    pub fn start(&mut self, task: &mut Task) -> Step {
        self.units.look_again(&self.target, &self.nexus);
        task.unit = self.units.find(task.command.lun);
        let outcome = match task.unit.and_then(|unit| self.units.get_mut(unit)) {
            Some(unit) => dispatch(&self.target, &self.nexus, unit, task),
            None => begin_without_unit(&self.target, &task.command),
        };
        self.step(task, outcome)
    }

    /// The data-out that [`Step::DataOut`] asked for is in memory; the lengths are equal.
    #[inline]
    pub fn on_data_out(&mut self, task: &mut Task, data: SgList) -> Step {
        let outcome = self.advance(task, |cx| match std::mem::replace(cx.state, DeviceTaskState::Ended) {
            DeviceTaskState::WriteData { offset, fua } => {
                let len = data.len() as u64;
                cx.last_io(Op::Write { fua }, offset, len, Some(data))
            }
            DeviceTaskState::Parameters(on_parameters) => {
                let mut bytes: SmallVec<[u8; 64]> = SmallVec::from_elem(0, data.len());
                data.copy_to(&mut bytes);
                on_parameters(cx, &bytes)
            }
            DeviceTaskState::Work(mut work) => {
                let outcome = work.on_data_out(cx, data);
                keep_working(cx, work, outcome)
            }
            DeviceTaskState::Ended | DeviceTaskState::LastIo => Err(TaskFailure::internal()),
        });
        self.step(task, outcome)
    }

    /// The I/O that [`Step::Io`] asked for has completed.
    #[inline]
    pub fn on_io(&mut self, task: &mut Task, done: Completion) -> Step {
        task.guard = None;
        let output = match done.result {
            Ok(output) => output,
            Err(error) => {
                self.fail_work(task);
                let sense = from_io_error(error, task.op);
                return self.step(task, Err(sense.into()));
            }
        };
        let outcome = self.advance(task, |cx| match std::mem::replace(cx.state, DeviceTaskState::Ended) {
            DeviceTaskState::LastIo => Ok(Action::Done(output.into_data())),
            DeviceTaskState::Work(mut work) => {
                let outcome = work.on_io(cx, output);
                keep_working(cx, work, outcome)
            }
            _ => Err(TaskFailure::internal()),
        });
        self.step(task, outcome)
    }

    /// Asks a task again that has to [`Step::Wait`] or to [`Step::Pause`].
    pub fn resume(&mut self, task: &mut Task) -> Step {
        if let Some(held) = task.held.take() {
            // Whether it is aborted is asked like any time that a task goes on.
            return match self.advance(task, |_| Ok(Action::Wait)) {
                Ok(_) => self.submit(task, held.0, held.1),
                failed => self.step(task, failed),
            };
        }
        let outcome = self.advance(task, |cx| match std::mem::replace(cx.state, DeviceTaskState::Ended) {
            DeviceTaskState::Work(mut work) => {
                let outcome = work.on_resume(cx);
                keep_working(cx, work, outcome)
            }
            _ => Err(TaskFailure::internal()),
        });
        self.step(task, outcome)
    }

    /// Work of a logical unit that no command carries on any more: a sanitize operation whose
    /// command was aborted or has its status already. Drive the task like any other and drop its
    /// response. Ask when [`LogicalUnit::on_background`](super::LogicalUnit::on_background) calls;
    /// asking when there is nothing costs an atomic load for each unit.
    pub fn poll_background(&mut self) -> Option<(Task, Step)> {
        let at = self.units.first_with(AttachedUnit::has_background)?;
        let unit = self.units.get(at)?;
        let command = Command {
            lun: Lun::new(unit.number),
            cdb: Cdb::default(),
            attribute: TaskAttribute::Simple,
            data_out_len: 0,
            data_in_len: 0,
        };
        let mut task = Task { unit: Some(at), abort_epoch: unit.view.abort_epoch, ..Task::new(&command) };
        let outcome = self.advance(&mut task, sanitize::carry_on);
        match self.step(&mut task, outcome) {
            // Another session was faster.
            Step::Done(_) => None,
            step => Some((task, step)),
        }
    }

    /// Units with tokens whose seconds nobody counts: the caller does from now on, by
    /// [`LogicalUnit::count_second`].
    pub(crate) fn claim_token_clocks(&mut self) -> impl Iterator<Item = &Arc<LogicalUnit>> {
        self.units.look_again(&self.target, &self.nexus);
        self.units.iter().map(|unit| &unit.unit).filter(|unit| unit.tokens.claim_clock())
    }

    /// Carries out a task management function on what nexuses share; the transport aborts its own
    /// tasks.
    pub fn manage(&mut self, function: TaskManagement, lun: Lun) -> ManagementResponse {
        self.units.look_again(&self.target, &self.nexus);
        let Some(unit) = self.units.find(lun).and_then(|unit| self.units.get(unit)) else {
            return ManagementResponse::IncorrectLogicalUnitNumber;
        };
        // What it aborts of others ends with its next step; what is in flight by then, `drain`
        // waits for.
        match function {
            TaskManagement::AbortTaskSet => {}
            // SAM-5 §5.14: with TAS, the others' tasks end with TASK ABORTED, and there is no unit
            // attention.
            TaskManagement::ClearTaskSet => unit.unit.change(UnitState::abort_all_tasks),
            TaskManagement::LogicalUnitReset => unit.unit.reset(),
        }
        ManagementResponse::FunctionComplete
    }

    /// Whether there is a unit of that number.
    #[must_use]
    pub fn has_unit(&self, lun: Lun) -> bool {
        self.units.find(lun).is_some()
    }

    /// The nexus is lost, or reset, but its session goes on: what only lasts as long as a nexus
    /// does is over in every unit, and the next command to each is told so. The transport aborts
    /// its own tasks.
    pub fn lose_nexus(&mut self) {
        for unit in self.units.iter() {
            unit.unit.lose_nexus(unit.key);
        }
    }

    /// Tells when nothing reaches the volume any more of tasks that [`DeviceServer::manage`] has
    /// just aborted, whoever's they are: until then a function that aborts others' tasks is not
    /// answered. `None`: there is no such unit.
    pub(crate) fn drain(&self, lun: Lun) -> Option<Drain> {
        let unit = self.units.get(self.units.find(lun)?)?;
        Some(Drain::new(&unit.unit.served))
    }

    #[inline]
    fn advance(
        &mut self,
        task: &mut Task,
        next: impl FnOnce(&mut Context<'_>) -> TaskOutcome,
    ) -> TaskOutcome {
        let Some(unit) = task.unit.and_then(|unit| self.units.get_mut(unit)) else {
            // It was taken away while the task was under way.
            return Err(Sense::illegal(Asc::LOGICAL_UNIT_NOT_SUPPORTED).into());
        };
        if unit.is_aborted(task) {
            return Err(TaskFailure::status(ScsiStatus::TASK_ABORTED));
        }
        next(&mut Context {
            target: &self.target,
            nexus: &self.nexus,
            unit,
            command: &task.command,
            state: &mut task.state,
            transfer_len: &mut task.transfer_len,
        })
    }

    #[inline]
    fn step(&mut self, task: &mut Task, outcome: TaskOutcome) -> Step {
        match outcome {
            Ok(Action::Io(op, offset, len, data)) => {
                let volume = self.volume_of(task);
                self.submit(task, volume, Io { tag: Tag(0), op, offset, len, data })
            }
            Ok(Action::IoOn(volume, op, offset, len, data)) => {
                self.submit(task, volume, Io { tag: Tag(0), op, offset, len, data })
            }
            Ok(Action::IoAlone(op, offset, len, data)) => {
                self.submit_alone(task, Io { tag: Tag(0), op, offset, len, data })
            }
            Ok(Action::DataOut(len)) => Step::DataOut { len },
            Ok(Action::Wait) => Step::Wait,
            Ok(Action::Pause(time)) => Step::Pause(time),
            Ok(Action::Done(data_in)) => {
                if !data_in.is_empty() {
                    task.transfer_len = data_in.len() as u64;
                }
                end(task, ScsiStatus::GOOD, None, data_in)
            }
            Err(failure) => self.fail(task, failure),
        }
    }

    #[cold]
    fn fail(&mut self, task: &mut Task, TaskFailure { status, sense }: TaskFailure) -> Step {
        let unit = task.unit.and_then(|unit| self.units.get(unit));
        let descriptor_format = unit.is_some_and(|unit| unit.view.descriptor_sense);
        end(task, status, sense.map(|sense| Sense { descriptor_format, ..sense }), SgList::default())
    }

    /// The volume of a task's own unit.
    #[inline]
    fn volume_of(&self, task: &Task) -> VolumeId {
        task.unit.and_then(|unit| self.units.get(unit)).map_or(NO_VOLUME, |unit| unit.volume)
    }

    /// Hands an I/O out, or holds it while another task has its range for itself.
    #[inline]
    fn submit(&mut self, task: &mut Task, volume: VolumeId, io: Io) -> Step {
        task.op = io.op;
        if io.op != Op::Read && !io.op.is_write() {
            return Step::Io { volume, io };
        }
        let place = self.place_of(task, volume);
        self.admit(task, place, volume, io, false)
    }

    /// Hands an I/O out within the range that the task has locked.
    #[cold]
    fn submit_alone(&mut self, task: &mut Task, io: Io) -> Step {
        task.op = io.op;
        let volume = self.volume_of(task);
        self.admit(task, task.unit, volume, io, true)
    }

    /// Hands an I/O out if it may begin. Whether the task was aborted is asked once the I/O is
    /// counted: whoever aborts it and then waits for what is in flight (`Drain`) sees the I/O, or
    /// it is seen here that the task is aborted.
    #[inline]
    fn admit(
        &mut self,
        task: &mut Task,
        place: Option<usize>,
        volume: VolumeId,
        io: Io,
        owns_lock: bool,
    ) -> Step {
        let counter = place.and_then(|place| self.units.get(place)).map(|unit| unit.counter.clone());
        let admitted = match counter {
            Some(counter) => {
                let check = || self.check_counted(task, place);
                counter.admit(io.op, (io.offset, io.len), owns_lock, check).map(Some)
            }
            None => self.check_counted(task, place).map(|()| None).map_err(NotAdmitted::Denied),
        };
        match admitted {
            Ok(guard) => {
                task.guard = guard;
                Step::Io { volume, io }
            }
            Err(NotAdmitted::Locked) => {
                task.held = Some(Box::new((volume, io)));
                Step::Wait
            }
            Err(NotAdmitted::Denied(failure)) => self.fail_denied(task, failure),
        }
    }

    #[cold]
    fn fail_denied(&mut self, task: &mut Task, failure: TaskFailure) -> Step {
        self.fail_work(task);
        self.fail(task, failure)
    }

    #[inline]
    fn check_counted(&mut self, task: &Task, place: Option<usize>) -> Result<(), TaskFailure> {
        if let Some(unit) = task.unit.and_then(|unit| self.units.get_mut(unit))
            && unit.is_aborted(task)
        {
            return Err(TaskFailure::status(ScsiStatus::TASK_ABORTED));
        }
        let Some(end) = place.and_then(|place| self.units.get_mut(place)) else { return Ok(()) };
        if end.unit.generation() != end.seen {
            end.refresh();
        }
        match &task.state {
            DeviceTaskState::Work(work) => work.check(end, task.op),
            _ => end.view.check_sanitize(),
        }
    }

    /// Tells the work of a task that its I/O has failed.
    #[cold]
    fn fail_work(&mut self, task: &mut Task) {
        if let DeviceTaskState::Work(mut work) = std::mem::replace(&mut task.state, DeviceTaskState::Ended) {
            let _ = self.advance(task, |cx| {
                work.on_error(cx);
                Ok(Action::good())
            });
        }
    }

    /// The unit that an I/O of the task on that volume passes.
    #[inline]
    fn place_of(&self, task: &Task, volume: VolumeId) -> Option<usize> {
        let is_its = |unit: &AttachedUnit| unit.volume == volume;
        let own = task.unit.filter(|&unit| self.units.get(unit).is_some_and(is_its));
        own.or_else(|| self.units.place(is_its))
    }
}

/// How a task ends.
#[inline]
fn end(task: &mut Task, status: ScsiStatus, sense: Option<Sense>, data_in: SgList) -> Step {
    task.state = DeviceTaskState::Ended;
    Step::Done(Response { status, sense, data_in, transfer_len: task.transfer_len })
}

/// Checks what every command is checked for, then begins it.
#[inline]
fn dispatch(target: &ScsiTarget, nexus: &Nexus, unit: &mut AttachedUnit, task: &mut Task) -> TaskOutcome {
    if unit.unit.generation() != unit.seen {
        unit.refresh();
    }
    let entry = find_entry(&task.command)?;
    if unit.view.has_attention && !entry.rules.contains(Rules::DESPITE_ATTENTION) {
        if let Some(asc) = unit.unit.take_attention(unit.key) {
            unit.refresh();
            return Err(Sense::new(SenseKey::UNIT_ATTENTION, asc).into());
        }
        unit.refresh();
    }
    task.abort_epoch = unit.view.abort_epoch;
    if unit.view.is_reserved && !entry.is_admitted(&unit.view) {
        return Err(TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT));
    }
    if let Some(sense) = unit.view.sanitizing
        && !entry.rules.contains(Rules::DESPITE_SANITIZE)
    {
        return Err(sense.into());
    }
    if let Some(sense) = unit.view.not_ready
        && !entry.is_admitted_unready(&unit.view)
    {
        return Err(sense.into());
    }
    if !entry.is_supported(&unit.view) {
        return Err(Sense::illegal(Asc::INVALID_COMMAND_OPERATION_CODE).into());
    }
    let mut cx = Context {
        target,
        nexus,
        unit,
        command: &task.command,
        state: &mut task.state,
        transfer_len: &mut task.transfer_len,
    };
    (entry.begin)(&mut cx)
}

/// The command's line of the table, if the CDB is whole.
#[inline]
fn find_entry(command: &Command) -> Result<&'static CommandEntry, TaskFailure> {
    let cdb = &command.cdb;
    let entry = table::find(cdb)?;
    if cdb.len() < entry.cdb_len() {
        return Err(Sense::illegal(Asc::INVALID_COMMAND_OPERATION_CODE).into());
    }
    let control = entry.cdb_len().saturating_sub(1);
    // NORMACA of the INQUIRY data is 0: there is no auto contingent allegiance to ask for.
    if cdb.byte(control) & NACA != 0 {
        return Err(Sense::cdb_bit(control as u16, 2).into());
    }
    Ok(entry)
}

/// What a LUN without a logical unit answers (SPC-5, SAM-5).
fn begin_without_unit(target: &ScsiTarget, command: &Command) -> TaskOutcome {
    match command.cdb.opcode() {
        ScsiOpcode::REPORT_LUNS => luns::report(target, command),
        ScsiOpcode::INQUIRY => inquiry::without_unit(command),
        ScsiOpcode::REQUEST_SENSE => super::ready::sense_without_unit(command),
        ScsiOpcode::TEST_UNIT_READY if command.lun.is_report_luns() => Ok(Action::good()),
        _ if command.lun.is_report_luns() => Err(Sense::illegal(Asc::INVALID_COMMAND_OPERATION_CODE).into()),
        _ => Err(Sense::illegal(Asc::LOGICAL_UNIT_NOT_SUPPORTED).into()),
    }
}

/// Puts unfinished work back, unless it has handed on to another state.
fn keep_working(
    cx: &mut Context<'_>,
    work: Box<dyn super::task::MultiStepCommand>,
    outcome: TaskOutcome,
) -> TaskOutcome {
    let goes_on = !matches!(outcome, Ok(Action::Done(_)) | Err(_));
    if goes_on && matches!(cx.state, DeviceTaskState::Ended) {
        *cx.state = DeviceTaskState::Work(work);
    }
    outcome
}

/// Of I/O that no unit asks for; there is none.
const NO_VOLUME: VolumeId = VolumeId(u32::MAX);
