//! Commands and task management of a channel: passes information units to the task set, and sends
//! the responses.

use super::{Answer, AnswerData, SrpTargetSession};
use crate::driver::audit_event::AuditEvent;
use crate::driver::session::ProtocolError;
use crate::rdma::Remote;
use crate::scsi::task_set::{
    FunctionDone, ScsiTransport, TaskEntry, TaskEvent, TaskRouter, TaskState, TransportParts,
};
use crate::scsi::{Command, Lun, ManagementResponse, Response, ScsiStatus, Sense, Task, TaskManagement};
use crate::srp::information_unit::{CheckedCommand, CommandError, DataBuffer, ranges, slices};
use blockmux_volume::{MAX_TRANSFER, Seg, SgList};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use blockmux_wire::srp::{
    ResponseCode, ResponseFlags, SrpCommand, SrpOpcode, SrpResponse, TaskManagementFunction,
    TaskManagementRequest, TaskManagementResponseData,
};
use zerocopy::{FromZeros, IntoBytes, transmute};

/// The transport's state of a command in progress.
#[derive(Default)]
pub(crate) struct SrpTransfer {
    tag: u64,
    buffer: DataBuffer,
    /// Length of the data-out buffer in bytes.
    data_out_len: u32,
    /// Length of the data-in buffer in bytes.
    data_in_len: u32,
    /// Data-out that was read from the initiator so far, in bytes.
    fetched: usize,
    /// Destination of the current RDMA Reads: a part of data-out, or the descriptor table.
    memory: Option<Seg>,
    /// Number of bytes that the task waits for.
    round: usize,
    /// Number of RDMA Reads of this part that have not completed.
    reads: u32,
    /// Whether one of these reads has failed.
    has_failed: bool,
    /// Orders the tasks by the time at which they got `memory`.
    allocation: u64,
    /// The command to start once its descriptor table has been read.
    pending: Option<Box<Command>>,
}

impl SrpTargetSession {
    #[inline]
    pub(super) fn on_command(&mut self, message: &Seg) -> Result<(), ProtocolError> {
        let CheckedCommand { tag, command, buffer } =
            match CheckedCommand::read(message, self.immediate_offset) {
                Ok(checked) => checked,
                Err(CommandError::Violation(error)) => return Err(error),
                Err(CommandError::Refused(tag, lun, sense)) => {
                    let transfer = SrpTransfer { tag, ..SrpTransfer::default() };
                    let slot = self.insert(lun, transfer);
                    self.refuse_task(slot, sense);
                    return Ok(());
                }
            };
        let table = match &buffer {
            DataBuffer::Table(table) => Some(*table),
            _ => None,
        };
        let transfer = SrpTransfer {
            tag,
            buffer,
            data_out_len: command.data_out_len,
            data_in_len: command.data_in_len,
            pending: table.map(|_| Box::new(command)),
            ..SrpTransfer::default()
        };
        self.expected = self.expected.saturating_add(bounded(command.data_in_len));
        let slot = self.insert(command.lun, transfer);
        match table {
            None => self.start(slot, &command),
            Some(table) => self.ask(slot, table.len as usize),
        }
        Ok(())
    }

    fn insert(&mut self, lun: Lun, transfer: SrpTransfer) -> usize {
        let tag = self.next_tag();
        self.tasks.insert(OWNER, tag, lun, || transfer)
    }

    fn refuse_task(&mut self, slot: usize, sense: Sense) {
        TaskRouter::refuse(self, slot, Response::failed(sense));
    }

    /// Returns a new tag of the task set, never the reserved one.
    fn next_tag(&mut self) -> u32 {
        self.last_tag = self.last_tag.wrapping_add(1) & (u32::MAX >> 1);
        self.last_tag
    }

    /// Handles a task management request (SRP r16a §6.6).
    pub(super) fn on_management(&mut self, request: &TaskManagementRequest) {
        let (tag, lun) = (request.tag.get(), Lun(u64::from_be_bytes(request.lun)));
        let referenced = request.task_tag.get();
        if !self.tasks.has_room_for_function() {
            return self.answer_function(tag, ResponseCode::FUNCTION_FAILED);
        }
        let own = self.next_tag();
        self.functions.push((own, tag));
        let function = match TaskManagementFunction(request.tsk_mgmt_func) {
            TaskManagementFunction::ABORT_TASK => {
                self.forget_waiting(|other, unit| other == referenced && unit.names_same_unit(lun));
                let is_it = |entry: &TaskEntry<SrpTransfer>| {
                    entry.progress.tag == referenced && entry.lun.names_same_unit(lun)
                };
                let found = self.tasks.select(is_it).first().copied();
                let task = found.and_then(|slot| self.tasks.get_mut(slot)).map(|entry| entry.tag);
                return match task {
                    Some(task) => self.abort_task(own, task),
                    // An earlier function has aborted it, but its I/O is still in flight.
                    None if self.tasks.is_aborting(is_it) => {
                        self.end_function(own, ResponseCode::FUNCTION_FAILED);
                    }
                    // The task has completed already (SAM-5 §7.2).
                    None => self.end_function(own, ResponseCode::NO_FAILURE),
                };
            }
            TaskManagementFunction::ABORT_TASK_SET => TaskManagement::AbortTaskSet,
            TaskManagementFunction::CLEAR_TASK_SET => TaskManagement::ClearTaskSet,
            TaskManagementFunction::LOGICAL_UNIT_RESET => TaskManagement::LogicalUnitReset,
            _ => return self.end_function(own, ResponseCode::FUNCTION_NOT_SUPPORTED),
        };
        if self.manage_unit(own, function, lun) == ManagementResponse::IncorrectLogicalUnitNumber {
            return self.end_function(own, ResponseCode::REQUEST_FIELDS_INVALID);
        }
        self.forget_waiting(|_, unit| unit.names_same_unit(lun));
    }

    /// Drops the commands of `inbox` whose tag and logical unit satisfy `predicate`, and returns
    /// their credits and receive buffers. They have not started, so an abort ends them at once.
    fn forget_waiting(&mut self, predicate: impl Fn(u64, Lun) -> bool) {
        let before = self.inbox.len();
        self.inbox.retain(|message| {
            let mut unit = [0; size_of::<SrpCommand>()];
            if message.len() < unit.len() {
                return true;
            }
            message.slice(0, unit.len()).copy_to(&mut unit);
            let unit: SrpCommand = transmute!(unit);
            !predicate(unit.tag.get(), Lun(u64::from_be_bytes(unit.lun)))
        });
        let count = before.saturating_sub(self.inbox.len()) as u32; // at most the receive buffers
        self.credits = self.credits.saturating_add(count);
        self.receives = self.receives.saturating_add(count);
    }

    /// Answers the function that has the tag `own` in the task set.
    fn end_function(&mut self, own: u32, code: ResponseCode) {
        let Some(at) = self.functions.iter().position(|(tag, _)| *tag == own) else { return };
        let (_, tag) = self.functions.swap_remove(at);
        self.answer_function(tag, code);
    }

    fn answer_function(&mut self, tag: u64, code: ResponseCode) {
        self.credits = self.credits.saturating_add(1);
        let data = TaskManagementResponseData { reserved: [0; 3], rsp_code: code.0 };
        let response = SrpResponse {
            flags: ResponseFlags::RSPVALID,
            resp_data_len: (size_of_val(&data) as u32).into(),
            ..self.response(tag)
        };
        self.send(&[response.as_bytes(), data.as_bytes()], AnswerData::default());
    }

    /// Creates a response that returns all credits that are due.
    fn response(&mut self, tag: u64) -> SrpResponse {
        SrpResponse {
            opcode: SrpOpcode::RESPONSE.0,
            req_lim_delta: std::mem::take(&mut self.credits).into(),
            tag: tag.into(),
            ..SrpResponse::new_zeroed()
        }
    }

    pub(super) fn send(&mut self, parts: &[&[u8]], data: AnswerData) {
        let message = parts.iter().flat_map(|part| part.iter().copied()).collect();
        let receives = std::mem::take(&mut self.receives);
        self.answers.push_back(Answer { data, message, receives });
    }

    /// Requests `len` bytes of the task's data-out, or its descriptor table. The reads wait for
    /// memory if there is none.
    fn ask(&mut self, slot: usize, len: usize) {
        let Some(entry) = self.tasks.get_mut(slot) else { return };
        entry.progress.round = len;
        // Tasks get memory in the order of their requests.
        if !self.grants.is_empty() || !self.give_memory(slot) {
            self.grants.push_back(slot);
        }
    }

    /// Takes memory for a task from the pool and queues its RDMA Reads; returns whether there was
    /// memory.
    fn give_memory(&mut self, slot: usize) -> bool {
        let Some(entry) = self.tasks.get_mut(slot) else { return true };
        let SrpTransfer { buffer, fetched, round, memory, reads, allocation, .. } = &mut entry.progress;
        let Some(taken) = self.pool.take_payload_or_wait(*round) else { return false };
        let place = taken.seg(0, *round);
        let mut at = 0_usize;
        let mut queue = |remote: Remote| {
            let part = place.slice(at, remote.len as usize);
            at = at.saturating_add(remote.len as usize);
            *reads = reads.saturating_add(1);
            self.mover.read(slot as u32, part, remote); // at most as many slots as receive buffers
        };
        match buffer {
            DataBuffer::Table(table) => queue(*table),
            DataBuffer::Remote(ranges) => slices(ranges, *fetched, *round).for_each(queue),
            DataBuffer::None | DataBuffer::Immediate(_) => {}
        }
        *memory = Some(place);
        self.allocations = self.allocations.wrapping_add(1);
        *allocation = self.allocations;
        true
    }

    /// The oldest allocation of memory whose RDMA Reads have not completed.
    pub(super) fn oldest_fetch(&self) -> Option<u64> {
        let transfers = self.tasks.fetching(OWNER).map(|entry| &entry.progress);
        transfers.filter(|transfer| transfer.memory.is_some()).map(|transfer| transfer.allocation).min()
    }

    /// Gives memory to the tasks that wait for it, as long as there is any.
    pub(super) fn resume_grants(&mut self) {
        while let Some(&slot) = self.grants.front() {
            let round = self.tasks.get_mut(slot).map_or(0, |entry| entry.progress.round);
            if !self.pool.could_hold(round) {
                self.grants.pop_front();
                self.fail_transfer(slot, out_of_memory());
            } else if self.give_memory(slot) {
                self.grants.pop_front();
            } else {
                return;
            }
        }
    }

    /// Handles the end of an RDMA Read of the task in this slot, successful or not.
    pub(super) fn on_read(&mut self, slot: usize, is_good: bool) {
        let Some(entry) = self.tasks.get_mut(slot) else { return };
        let progress = &mut entry.progress;
        progress.reads = progress.reads.saturating_sub(1);
        progress.has_failed |= !is_good;
        if progress.reads > 0 {
            return;
        }
        let (memory, len) = (progress.memory.take(), progress.round);
        if matches!(entry.state, TaskState::Aborted(_)) {
            return self.drop_aborted(slot);
        }
        let Some(memory) = memory.filter(|_| !progress.has_failed) else {
            // The connection has ended, so the response is not sent.
            return self.fail_transfer(slot, transport_failure());
        };
        match progress.pending.take() {
            Some(command) => {
                let len = command.data_out_len.max(command.data_in_len);
                match ranges(&memory.to_vec(), len) {
                    Ok(ranges) => {
                        progress.buffer = DataBuffer::Remote(ranges);
                        self.start(slot, &command);
                    }
                    Err(error) => {
                        self.violation.get_or_insert(error);
                        self.drop_task(slot);
                    }
                }
            }
            None => {
                progress.fetched = progress.fetched.saturating_add(len);
                self.deliver_data(slot, Ok(SgList::one(memory)));
            }
        }
    }

    /// Fails a task whose data-out or descriptor table cannot be read.
    fn fail_transfer(&mut self, slot: usize, sense: Sense) {
        let is_pending = self.tasks.get_mut(slot).is_some_and(|entry| entry.progress.pending.is_some());
        if is_pending {
            self.refuse_task(slot, sense);
        } else {
            self.deliver_data(slot, Err(sense));
        }
    }

    /// Queues SRP_RSP to a command, with its data-in.
    #[inline]
    fn answer(&mut self, transfer: SrpTransfer, response: &mut Response) {
        let (mut flags, [out_residual, in_residual]) = residuals(&transfer, response);
        let len = response.data_in.len().min(transfer.data_in_len as usize);
        let mut data = AnswerData::default();
        if let DataBuffer::Remote(ranges) = transfer.buffer
            && len > 0
        {
            let is_whole = len == response.data_in.len();
            data.data =
                if is_whole { std::mem::take(&mut response.data_in) } else { response.data_in.slice(0, len) };
            data.ranges = ranges;
            self.mover.add_unsent(len);
        }
        let sense = response.sense.as_ref().map(Sense::to_bytes);
        let sense = sense.as_deref().unwrap_or_default();
        if !sense.is_empty() {
            flags |= ResponseFlags::SNSVALID;
        }
        let unit = SrpResponse {
            flags,
            status: response.status.0,
            data_out_res_cnt: out_residual.into(),
            data_in_res_cnt: in_residual.into(),
            sense_data_len: (sense.len() as u32).into(), // at most 252
            ..self.response(transfer.tag)
        };
        self.send(&[unit.as_bytes(), sense], data);
    }
}

/// Residuals of a command, whose transfer may be shorter or longer than its buffer: the flags, and
/// DATA-OUT and DATA-IN RESIDUAL COUNT in bytes. A buffer of the other direction stays untouched.
fn residuals(transfer: &SrpTransfer, response: &Response) -> (u8, [u32; 2]) {
    let len = response.transfer_len;
    let (out, data_in) = if response.is_data_out { (len, 0) } else { (0, len) };
    let (out_flags, out_count) =
        residual(out, transfer.data_out_len, [ResponseFlags::DOUNDER, ResponseFlags::DOOVER]);
    let (in_flags, in_count) =
        residual(data_in, transfer.data_in_len, [ResponseFlags::DIUNDER, ResponseFlags::DIOVER]);
    (out_flags | in_flags, [out_count, in_count])
}

/// Compares the length of a transfer with its buffer. Returns the flag that applies, if any, and
/// the residual count in bytes.
fn residual(len: u64, buffer: u32, [under, over]: [u8; 2]) -> (u8, u32) {
    let count = u32::try_from(len.abs_diff(buffer.into())).unwrap_or(u32::MAX);
    match len.cmp(&buffer.into()) {
        std::cmp::Ordering::Less => (under, count),
        std::cmp::Ordering::Equal => (0, 0),
        std::cmp::Ordering::Greater => (over, count),
    }
}

impl ScsiTransport for SrpTargetSession {
    type Progress = SrpTransfer;

    #[inline]
    fn parts(&mut self) -> TransportParts<'_, SrpTransfer> {
        TransportParts { tasks: &mut self.tasks, queue: &mut self.queue, owner: OWNER, now: self.now }
    }

    #[inline]
    fn fetch(&mut self, slot: usize, len: usize) -> Option<Result<SgList, Sense>> {
        let progress = &mut self.tasks.get_mut(slot)?.progress;
        let end = progress.fetched.saturating_add(len);
        if end > progress.data_out_len as usize {
            return Some(Err(Sense::new(SenseKey::ABORTED_COMMAND, NOT_ENOUGH_DATA)));
        }
        if let DataBuffer::Immediate(data) = &progress.buffer {
            let part = data.slice(progress.fetched, len);
            progress.fetched = end;
            return Some(Ok(SgList::one(part)));
        }
        self.ask(slot, len);
        None
    }

    #[inline]
    fn is_receiving(_progress: &SrpTransfer) -> bool {
        false
    }

    fn is_fetching(&mut self, slot: usize) -> bool {
        self.tasks.get_mut(slot).is_some_and(|entry| entry.progress.reads > 0)
    }

    #[inline]
    fn complete(&mut self, slot: usize, response: &mut Response) {
        let Some(entry) = self.tasks.get_mut(slot) else { return };
        if let Some(change) = entry.task.as_ref().and_then(Task::reservation_change) {
            let is_done = response.status == ScsiStatus::GOOD;
            let unit = match entry.lun.number() {
                Some(number) => format!("LUN {number}"),
                None => format!("LUN {:#018x}", entry.lun.0),
            };
            self.events.push(AuditEvent::Reservation { unit, change, is_done });
        }
        let transfer = std::mem::take(&mut entry.progress);
        self.expected = self.expected.saturating_sub(bounded(transfer.data_in_len));
        self.drop_task(slot);
        if !self.is_ending {
            self.answer(transfer, response);
        }
    }

    #[inline]
    fn release(&mut self, slot: usize) {
        let Some(entry) = self.tasks.get_mut(slot) else { return };
        // `complete` has emptied it if the task was completed.
        self.expected = self.expected.saturating_sub(bounded(entry.progress.data_in_len));
        self.credits = self.credits.saturating_add(1);
        if !self.grants.is_empty() {
            self.grants.retain(|other| *other != slot);
        }
    }

    fn on_function_done(&mut self, done: FunctionDone) {
        self.end_function(done.tag, ResponseCode::NO_FAILURE);
    }

    fn post(&mut self, _owner: u32, _event: TaskEvent) -> bool {
        false
    }
}

fn transport_failure() -> Sense {
    Sense::new(SenseKey::ABORTED_COMMAND, NOT_ENOUGH_DATA)
}

fn out_of_memory() -> Sense {
    Sense::new(SenseKey::ABORTED_COMMAND, INSUFFICIENT_RESOURCES)
}

/// The length of data in bytes that counts against the limits, for a length given by the initiator.
fn bounded(len: u32) -> usize {
    len.min(MAX_TRANSFER) as usize
}

/// The owner of all tasks in the task set: this session.
pub(super) const OWNER: u32 = 1;
/// Additional sense code NOT ENOUGH UNSOLICITED DATA.
const NOT_ENOUGH_DATA: Asc = Asc(0x0c0d);
/// Additional sense code INSUFFICIENT RESOURCES.
const INSUFFICIENT_RESOURCES: Asc = Asc(0x5503);
