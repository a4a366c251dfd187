//! The SRP target: one session for one RDMA channel of an initiator port.
//!
//! ```text
//!   Requested ──▶ reject, or wait for other channels to end ──▶ accept
//!   Received ──▶ task set ──fetch──▶ `reads` ──work──▶ RDMA Read ──Done──▶ task set
//!                   └──────complete──▶ `answers` ──work──▶ RDMA Write, Receive, Send
//! ```
//! *Credits.* The initiator has [`REQUEST_LIMIT`] of them. Each request takes one, and a response
//! gives it back, with those of requests that ended without a response. If there is none to come,
//! SRP_CRED_REQ gives them back. An initiator that sends more than it was granted finds no receive
//! buffer, and its queue pair ends.
//!
//! *Bounds.* Beside the credits: [`PAYLOAD_IN_FLIGHT`] of data-in, beyond which commands wait in
//! `inbox`; memory for data-out from the core's pool; 16 task management functions; 64 channels of
//! an I_T nexus.
//!
//! An initiator that lies about lengths or keys loses its own connection: its provider or ours
//! refuses to touch that memory.

#[cfg(test)]
mod tests;

use super::information_unit::{CheckedCommand, CommandError, DataBuffer, ranges, slices};
use super::login::{self, CheckedLogin, LoginRefusal, MAX_IU_LEN, REQUEST_LIMIT};
use super::node::{ChannelMembership, SrpNode};
use crate::event::{AuditEvent, AuditEvents, Login};
use crate::exports::VolumeId;
use crate::rdma::{Endpoint, Event, QueuePair, RdmaSession, Remote, WorkError, WorkId};
use crate::rdma_cm::OtherProtocol;
use crate::scsi::task_set::{
    FunctionDone, Parts, ScsiTransport, TaskEntry, TaskEvent, TaskQueue, TaskRouter, TaskSet, TaskState,
};
use crate::scsi::{
    Command, DeviceServer, Lun, ManagementResponse, Nexus, Response, ScsiStatus, Sense, Task, TaskManagement,
};
use crate::session::{HangUp, ProtocolError, SessionStage, Target, Timed};
use blockmux_volume::{Completion, Io, MAX_TRANSFER, Pool, Seg, SgList, Tag, Waker};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use blockmux_wire::srp::{
    LogoutReason, ResponseCode, ResponseFlags, SrpOpcode, SrpResponse, TargetNotice, TaskManagementFunction,
    TaskManagementRequest, TaskManagementResponseData,
};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// One RDMA channel of an initiator port to an SRP target port.
pub struct TargetSession {
    node: Arc<SrpNode>,
    pool: Pool,
    hang_up: HangUp,
    phase: ChannelPhase,
    /// Until when a login, or a wait for other channels, may take.
    deadline: Instant,
    now: Instant,
    tasks: TaskSet<SrpTransfer>,
    queue: TaskQueue,
    /// Where immediate data begins in an information unit, if the login allows such.
    immediate_offset: Option<usize>,
    membership: Option<ChannelMembership>,
    /// The task set's tag of the latest request; SRP's own have 64 bits.
    last_tag: u32,
    /// SRP's tags of task management functions under way, by the task set's.
    functions: Vec<(u32, u64)>,
    /// Requests that wait for room.
    inbox: VecDeque<Seg>,
    /// Tasks that wait for memory, oldest first.
    grants: VecDeque<usize>,
    /// RDMA Reads to post.
    reads: VecDeque<RemoteRead>,
    /// RDMA Reads that are posted.
    reading: u32,
    /// Responses to send, oldest first.
    answers: VecDeque<Answer>,
    /// Data-in that commands under way may bring, in bytes.
    expected: usize,
    /// Data-in that waits here or is posted, in bytes.
    unsent: usize,
    /// What the queue pair holds beside that, in bytes.
    held: usize,
    /// Receive buffers to post.
    receives: u32,
    /// Requests that have ended, and that the initiator has not been told of.
    credits: u32,
    /// An SRP_CRED_REQ has no answer yet.
    is_credit_sent: bool,
    /// What a request of `inbox` has violated; the next event returns it.
    violation: Option<ProtocolError>,
    /// No request is taken any more; the connection ends when everything is over.
    is_ending: bool,
    events: AuditEvents,
}

/// How far the channel has come.
enum ChannelPhase {
    Listening,
    /// Channels of the same nexus are to end first.
    Waiting(Box<CheckedLogin>),
    /// To be accepted with this private data.
    Accepting(Vec<u8>),
    /// To be rejected with this private data.
    Rejecting(Vec<u8>),
    Open,
    /// Its end was asked for.
    Ending,
    Over,
}

/// The transport's part of a command under way.
#[derive(Default)]
pub(crate) struct SrpTransfer {
    tag: u64,
    buffer: DataBuffer,
    /// In bytes.
    data_out_len: u32,
    /// In bytes.
    data_in_len: u32,
    /// Data-out that was fetched, in bytes.
    fetched: usize,
    /// What the current round of data-out, or a descriptor table, is read into.
    memory: Option<Seg>,
    /// How many bytes the task waits for.
    round: usize,
    /// RDMA Reads of the round that are not done.
    reads: u32,
    /// One of them has failed.
    has_failed: bool,
    /// To be started when its descriptor table is here.
    pending: Option<Box<Command>>,
}

/// An RDMA Read to post.
struct RemoteRead {
    slot: usize,
    place: Seg,
    remote: Remote,
}

/// A message for the initiator, and the data-in that goes before it.
struct Answer {
    data: VecDeque<(SgList, Remote)>,
    message: SmallVec<[u8; 128]>,
}

impl TargetSession {
    /// A session for an initiator that has just connected; `hang_up` disconnects it. `pool` is the
    /// core's, for data-out. The initiator has 30 seconds from `now` on to log in.
    #[must_use]
    pub fn new(node: Arc<SrpNode>, pool: Pool, hang_up: HangUp, now: Instant) -> TargetSession {
        TargetSession {
            node,
            pool,
            hang_up,
            phase: ChannelPhase::Listening,
            deadline: now.checked_add(LOGIN_TIMEOUT).unwrap_or(now),
            now,
            tasks: TaskSet::new(None),
            queue: TaskQueue::default(),
            immediate_offset: None,
            membership: None,
            last_tag: 0,
            functions: Vec::new(),
            inbox: VecDeque::new(),
            grants: VecDeque::new(),
            reads: VecDeque::new(),
            reading: 0,
            answers: VecDeque::new(),
            expected: 0,
            unsent: 0,
            held: 0,
            receives: 0,
            credits: 0,
            is_credit_sent: false,
            violation: None,
            is_ending: false,
            events: AuditEvents::default(),
        }
    }

    /// Decides about a connection request.
    fn on_requested(&mut self, private_data: &[u8]) -> Result<(), ProtocolError> {
        if let Some(other @ OtherProtocol::NvmeRdma) = OtherProtocol::of(private_data) {
            self.phase = ChannelPhase::Rejecting(other.rejection());
            return Err(login_error("asked for NVMe/RDMA at a port that serves SRP"));
        }
        let checked = match CheckedLogin::read(private_data, &self.node) {
            Ok(checked) if self.is_ending => Err(checked.refuse("asked to log in while the target stops")),
            other => other,
        };
        match checked {
            Ok(login) => {
                self.wait_or_accept(login, false);
                Ok(())
            }
            Err(refusal) => Err(self.refuse(&refusal, private_data)),
        }
    }

    fn refuse(&mut self, refusal: &LoginRefusal, private_data: &[u8]) -> ProtocolError {
        self.phase = ChannelPhase::Rejecting(refusal.reject());
        let error = login_error(refusal.what);
        let (initiator, target) = match login::named(private_data) {
            Some((initiator, target)) => (initiator.to_string(), target.to_string()),
            None => Default::default(),
        };
        self.events.push(AuditEvent::refused_by(&error, Login { protocol: NAME, initiator, target }));
        error
    }

    /// Accepts a login, once channels that it ends are gone.
    fn wait_or_accept(&mut self, login: CheckedLogin, has_ended_others: bool) {
        let channels = self.node.channels();
        let has_others = channels.count(login.nexus) > 0;
        if has_others && login.is_single_channel {
            channels.end_all(login.nexus);
            if !has_ended_others {
                self.deadline = self.now.checked_add(LOGIN_TIMEOUT).unwrap_or(self.now);
            }
            self.phase = ChannelPhase::Waiting(Box::new(login));
            return;
        }
        self.membership = Some(channels.join(login.nexus, self.hang_up.clone()));
        self.immediate_offset = login.immediate_offset;
        let (initiator, target) = login.nexus;
        let nexus = Nexus::srp(&initiator.0, login.target.port.clone());
        self.tasks = TaskSet::new(Some(DeviceServer::new(login.units.clone(), nexus)));
        let event = Login { protocol: NAME, initiator: initiator.to_string(), target: target.to_string() };
        self.events.push(AuditEvent::Login(event));
        self.phase = ChannelPhase::Accepting(login.response(has_ended_others, has_others));
    }

    /// A message from the initiator.
    #[inline]
    fn on_message(&mut self, message: &Seg) -> Result<(), ProtocolError> {
        self.receives = self.receives.saturating_add(1);
        let mut opcode = [0];
        if message.is_empty() {
            return Err(violation("sent an empty message"));
        }
        message.slice(0, 1).copy_to(&mut opcode);
        match SrpOpcode(opcode[0]) {
            SrpOpcode::COMMAND => self.on_command(message)?,
            SrpOpcode::TASK_MANAGEMENT => {
                let bytes = message.to_vec();
                let (request, _) = TaskManagementRequest::read_from_prefix(&bytes)
                    .map_err(|_| violation("sent a task management request that is too short"))?;
                self.on_management(&request);
            }
            SrpOpcode::INITIATOR_LOGOUT => {
                self.events.push(AuditEvent::Logout { reason: "the initiator logged out" });
                self.end(None);
            }
            SrpOpcode::CREDIT_RESPONSE => self.is_credit_sent = false,
            SrpOpcode::AER_RESPONSE => {}
            _ => {
                self.end(Some(LogoutReason::INVALID_OPCODE));
                return Err(violation("sent an information unit of an unknown kind"));
            }
        }
        Ok(())
    }

    #[inline]
    fn on_command(&mut self, message: &Seg) -> Result<(), ProtocolError> {
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
        self.tasks.insert(TaskEntry::new(OWNER, tag, lun, transfer))
    }

    fn refuse_task(&mut self, slot: usize, sense: Sense) {
        TaskRouter::refuse(self, slot, Response::failed(sense));
    }

    /// Another tag for the task set, and never its reserved one.
    fn next_tag(&mut self) -> u32 {
        self.last_tag = self.last_tag.wrapping_add(1) & (u32::MAX >> 1);
        self.last_tag
    }

    /// A task management function (SRP r16a §6.6).
    fn on_management(&mut self, request: &TaskManagementRequest) {
        let (tag, lun) = (request.tag.get(), Lun(u64::from_be_bytes(request.lun)));
        if !self.tasks.has_room_for_function() {
            return self.answer_function(tag, ResponseCode::FUNCTION_FAILED);
        }
        let own = self.next_tag();
        self.functions.push((own, tag));
        let function = match TaskManagementFunction(request.tsk_mgmt_func) {
            TaskManagementFunction::ABORT_TASK => {
                let referenced = request.task_tag.get();
                let is_it = |entry: &TaskEntry<SrpTransfer>| {
                    entry.progress.tag == referenced && entry.lun.names_same_unit(lun)
                };
                let found = self.tasks.select(is_it).first().copied();
                let task = found.and_then(|slot| self.tasks.get_mut(slot)).map(|entry| entry.tag);
                return match task {
                    Some(task) => self.abort_task(own, task),
                    // It has ended (SAM-5 §7.2).
                    None => self.end_function(own, ResponseCode::NO_FAILURE),
                };
            }
            TaskManagementFunction::ABORT_TASK_SET => TaskManagement::AbortTaskSet,
            TaskManagementFunction::CLEAR_TASK_SET => TaskManagement::ClearTaskSet,
            TaskManagementFunction::LOGICAL_UNIT_RESET => TaskManagement::LogicalUnitReset,
            _ => return self.end_function(own, ResponseCode::FUNCTION_NOT_SUPPORTED),
        };
        if self.manage_unit(own, function, lun) == ManagementResponse::IncorrectLogicalUnitNumber {
            self.end_function(own, ResponseCode::REQUEST_FIELDS_INVALID);
        }
    }

    /// Answers the function that the task set knows by `own`.
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
        self.send(&[response.as_bytes(), data.as_bytes()], VecDeque::new());
    }

    /// A response with the credits that are due.
    fn response(&mut self, tag: u64) -> SrpResponse {
        SrpResponse {
            opcode: SrpOpcode::RESPONSE.0,
            req_lim_delta: std::mem::take(&mut self.credits).into(),
            tag: tag.into(),
            ..SrpResponse::new_zeroed()
        }
    }

    fn send(&mut self, parts: &[&[u8]], data: VecDeque<(SgList, Remote)>) {
        let message = parts.iter().flat_map(|part| part.iter().copied()).collect();
        self.answers.push_back(Answer { data, message });
    }

    /// Has `len` bytes read into memory: of a task's data-out, or its descriptor table.
    fn ask(&mut self, slot: usize, len: usize) {
        let Some(entry) = self.tasks.get_mut(slot) else { return };
        entry.progress.round = len;
        // Whoever came first gets memory first.
        if !self.grants.is_empty() || !self.give_memory(slot) {
            self.grants.push_back(slot);
        }
    }

    /// Takes memory for a task, and queues its reads; whether there was memory.
    fn give_memory(&mut self, slot: usize) -> bool {
        let Some(entry) = self.tasks.get_mut(slot) else { return true };
        let SrpTransfer { buffer, fetched, round, memory, reads, .. } = &mut entry.progress;
        let Some(taken) = self.pool.take_payload_or_wait(*round) else { return false };
        let place = taken.seg(0, *round);
        let mut at = 0_usize;
        let mut queue = |remote: Remote| {
            let part = place.slice(at, remote.len as usize);
            at = at.saturating_add(remote.len as usize);
            *reads = reads.saturating_add(1);
            self.reads.push_back(RemoteRead { slot, place: part, remote });
        };
        match buffer {
            DataBuffer::Table(table) => queue(*table),
            DataBuffer::Remote(ranges) => slices(ranges, *fetched, *round).for_each(queue),
            DataBuffer::None | DataBuffer::Immediate(_) => {}
        }
        *memory = Some(place);
        true
    }

    /// Gives memory to tasks that wait for it.
    fn resume_grants(&mut self) {
        while let Some(&slot) = self.grants.front() {
            let round = self.tasks.get_mut(slot).map_or(0, |entry| entry.progress.round);
            if !self.pool.could_hold(round) {
                self.grants.pop_front();
                self.deliver_data(slot, Err(out_of_memory()));
            } else if self.give_memory(slot) {
                self.grants.pop_front();
            } else {
                return;
            }
        }
    }

    /// An RDMA Read of the task in this slot is done, or will never be.
    fn on_read(&mut self, slot: usize, is_good: bool) {
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
            return self.deliver_or_refuse(slot);
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

    /// The data of a task was not read: the connection is over, and nobody hears of its end.
    fn deliver_or_refuse(&mut self, slot: usize) {
        let is_pending = self.tasks.get_mut(slot).is_some_and(|entry| entry.progress.pending.is_some());
        if is_pending {
            self.refuse_task(slot, transport_failure());
        } else {
            self.deliver_data(slot, Err(transport_failure()));
        }
    }

    /// Ends the channel: requests are taken no more, and tasks are aborted.
    fn end(&mut self, reason: Option<LogoutReason>) {
        if std::mem::replace(&mut self.is_ending, true) {
            return;
        }
        if let Some(reason) = reason {
            let logout = TargetNotice {
                opcode: SrpOpcode::TARGET_LOGOUT.0,
                value: reason.0.into(),
                ..TargetNotice::new_zeroed()
            };
            self.send(&[logout.as_bytes()], VecDeque::new());
        }
        self.abort_all();
    }

    fn abort_all(&mut self) {
        self.inbox.clear();
        self.functions.clear();
        self.forget_functions();
        let waiting = std::mem::take(&mut self.grants);
        self.abort_tasks(|_| true, None);
        drop(waiting);
    }

    /// The connection is gone: nothing that was not posted ever will be.
    fn on_disconnected(&mut self) {
        self.phase = ChannelPhase::Over;
        self.answers.clear();
        (self.unsent, self.held) = (0, 0);
        self.end(None);
        for read in std::mem::take(&mut self.reads) {
            self.on_read(read.slot, false);
        }
        self.answers.clear();
        self.leave_if_idle();
    }

    /// Whether nothing of any task is under way.
    fn is_idle(&self) -> bool {
        self.queue.is_idle() && self.reading == 0 && self.reads.is_empty()
    }

    /// Leaves the nexus once nothing of this channel reaches the volume any more.
    fn leave_if_idle(&mut self) {
        if matches!(self.phase, ChannelPhase::Over) && self.is_idle() {
            self.membership = None;
        }
    }

    /// Whether a request may be taken.
    fn has_room(&self) -> bool {
        let bytes = self.expected.saturating_add(self.unsent).saturating_add(self.held);
        !self.is_ending && bytes < PAYLOAD_IN_FLIGHT
    }

    /// Takes requests that had to wait, as far as there is room; whether there were any.
    fn take_inbox(&mut self) -> bool {
        let mut has_moved = false;
        while self.has_room()
            && let Some(message) = self.inbox.pop_front()
        {
            has_moved = true;
            if let Err(error) = self.on_message(&message) {
                self.violation = Some(error);
                self.end(None);
            }
        }
        has_moved
    }

    /// Posts what there is room for; whether anything was.
    #[inline]
    fn transmit(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let mut has_moved = false;
        // More would wait in the queue pair, and the responses behind them.
        while self.reading < READS
            && queue_pair.room() > 0
            && let Some(RemoteRead { slot, place, remote }) = self.reads.pop_front()
        {
            has_moved = true;
            self.reading = self.reading.saturating_add(1);
            queue_pair.read(WorkId(READ << u32::BITS | slot as u64), SgList::one(place), remote);
        }
        if self.credits > 0 && self.answers.is_empty() && !self.is_credit_sent && !self.is_ending {
            self.is_credit_sent = true;
            let notice = TargetNotice {
                opcode: SrpOpcode::CREDIT_REQUEST.0,
                value: std::mem::take(&mut self.credits).into(),
                ..TargetNotice::new_zeroed()
            };
            self.send(&[notice.as_bytes()], VecDeque::new());
        }
        while queue_pair.room() > 0
            && let Some(answer) = self.answers.front_mut()
        {
            has_moved = true;
            if let Some((local, remote)) = answer.data.pop_front() {
                let id = WorkId(WRITE << u32::BITS | local.len() as u64);
                if !queue_pair.write(id, &local, remote) {
                    self.unsent = self.unsent.saturating_sub(local.len());
                }
                continue;
            }
            let Some(Answer { message, .. }) = self.answers.pop_front() else { break };
            // Before the response: the initiator may send its next request as soon as it has this.
            let receives = std::mem::take(&mut self.receives);
            if receives > 0 {
                queue_pair.receive(receives);
            }
            queue_pair.send(&message, &SgList::default(), None);
        }
        self.held = queue_pair.unsent();
        has_moved
    }

    /// SRP_RSP to a command, with its data-in.
    #[inline]
    fn answer(&mut self, transfer: SrpTransfer, response: &mut Response) {
        let len = response.data_in.len().min(transfer.data_in_len as usize);
        let mut data = VecDeque::new();
        if let DataBuffer::Remote(ranges) = &transfer.buffer
            && len > 0
        {
            let mut at = 0_usize;
            for remote in slices(ranges, 0, len) {
                data.push_back((response.data_in.slice(at, remote.len as usize), remote));
                at = at.saturating_add(remote.len as usize);
            }
            self.unsent = self.unsent.saturating_add(at);
        }
        let (mut flags, [out_residual, in_residual]) = residuals(&transfer, response);
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

/// What a command moved less or more than its buffer has: flags, and the counts of data-out and
/// data-in.
fn residuals(transfer: &SrpTransfer, response: &Response) -> (u8, [u32; 2]) {
    let count = |len: u32| u32::try_from(response.transfer_len.abs_diff(len.into())).unwrap_or(u32::MAX);
    let (out, len) = (transfer.data_out_len, transfer.data_in_len);
    if out > 0 {
        let flags = match response.transfer_len.cmp(&out.into()) {
            std::cmp::Ordering::Less => ResponseFlags::DOUNDER,
            std::cmp::Ordering::Equal => 0,
            std::cmp::Ordering::Greater => ResponseFlags::DOOVER,
        };
        return (flags, [count(out), 0]);
    }
    let flags = match response.transfer_len.cmp(&len.into()) {
        std::cmp::Ordering::Less => ResponseFlags::DIUNDER,
        std::cmp::Ordering::Equal => 0,
        std::cmp::Ordering::Greater => ResponseFlags::DIOVER,
    };
    (flags, [0, count(len)])
}

impl ScsiTransport for TargetSession {
    type Progress = SrpTransfer;

    #[inline]
    fn parts(&mut self) -> Parts<'_, SrpTransfer> {
        Parts { tasks: &mut self.tasks, queue: &mut self.queue, owner: OWNER, now: self.now }
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
        // It is empty if the task was completed.
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

impl RdmaSession for TargetSession {
    fn endpoint(&self) -> Endpoint {
        Endpoint {
            receives: REQUEST_LIMIT.saturating_add(UNCREDITED),
            receive_len: MAX_IU_LEN,
            sends: SENDS,
            reads: READS,
            regions: 0,
            private_data: Vec::new(),
        }
    }

    #[inline]
    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        self.now = now;
        match event {
            Event::Requested { private_data } => self.on_requested(&private_data)?,
            Event::Received { .. } if self.is_ending => {}
            Event::Received { message, .. } => {
                if self.inbox.is_empty() && self.has_room() {
                    self.on_message(&message)?;
                } else {
                    // It may lie in a buffer that others share.
                    self.inbox.push_back(Seg::from_slice(&message.to_vec()));
                }
            }
            Event::Done { id, result } => self.on_done(id, result),
            Event::Disconnected | Event::Refused { .. } => self.on_disconnected(),
            Event::Connected { .. } | Event::Registered { .. } => {}
        }
        self.violation.take().map_or(Ok(()), Err)
    }

    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        match std::mem::replace(&mut self.phase, ChannelPhase::Ending) {
            ChannelPhase::Accepting(private_data) => {
                queue_pair.accept(private_data);
                self.phase = ChannelPhase::Open;
                return true;
            }
            ChannelPhase::Rejecting(private_data) => {
                self.is_ending = true;
                queue_pair.reject(private_data);
                return true;
            }
            ChannelPhase::Listening | ChannelPhase::Waiting(_) if self.is_ending => {
                queue_pair.disconnect();
                return true;
            }
            ChannelPhase::Open => self.phase = ChannelPhase::Open,
            phase => {
                self.phase = phase;
                return false;
            }
        }
        let has_moved = self.take_inbox() | self.transmit(queue_pair);
        if self.is_ending && self.answers.is_empty() && self.is_idle() {
            queue_pair.disconnect();
            self.phase = ChannelPhase::Ending;
            return true;
        }
        has_moved
    }
}

impl TargetSession {
    #[inline]
    fn on_done(&mut self, id: WorkId, result: Result<(), WorkError>) {
        let low = (id.0 & u64::from(u32::MAX)) as usize;
        match id.0 >> u32::BITS {
            WRITE => self.unsent = self.unsent.saturating_sub(low),
            READ => {
                self.reading = self.reading.saturating_sub(1);
                self.on_read(low, result.is_ok());
                self.leave_if_idle();
            }
            _ => {}
        }
    }
}

impl Timed for TargetSession {
    fn poll_timeout(&self) -> Option<Instant> {
        let again = |pause: Duration| self.now.checked_add(pause);
        match &self.phase {
            ChannelPhase::Listening => Some(self.deadline),
            ChannelPhase::Waiting(_) => again(CHANNEL_POLL),
            _ if self.violation.is_some() || self.queue.has_io() => Some(self.now),
            _ => {
                let retry = if self.queue.is_waiting() { again(TASK_RETRY) } else { None };
                retry.into_iter().chain(self.queue.pause_ends()).min()
            }
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.now = now;
        if matches!(self.phase, ChannelPhase::Listening) && now >= self.deadline {
            return Err(login_error("did not log in within 30 seconds"));
        }
        if let ChannelPhase::Waiting(_) = self.phase
            && let ChannelPhase::Waiting(login) = std::mem::replace(&mut self.phase, ChannelPhase::Listening)
        {
            if now >= self.deadline {
                let what = "logged in while I/O of its other channels did not end within 30 seconds";
                self.phase = ChannelPhase::Rejecting(login.refuse(what).reject());
                return Err(login_error(what));
            }
            self.wait_or_accept(*login, true);
        }
        self.resume();
        self.violation.take().map_or(Ok(()), Err)
    }
}

impl TargetSession {
    /// Goes on with whatever waits for I/O, memory or time.
    fn resume(&mut self) {
        if self.queue.is_waiting() {
            self.resume_waiting();
        }
        if self.queue.pause_ends().is_some() {
            self.resume_paused();
        }
        self.resume_grants();
    }
}

impl Target for TargetSession {
    fn depth(&self) -> u32 {
        REQUEST_LIMIT
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        self.queue.poll_io()
    }

    #[inline]
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        self.queue.poll_cancel()
    }

    #[inline]
    fn on_io(&mut self, done: Completion, now: Instant) {
        self.now = now;
        self.on_volume_io(done);
        self.resume();
        self.leave_if_idle();
    }

    fn on_start(&mut self, _waker: &Waker, now: Instant) {
        self.now = now;
    }

    #[inline]
    fn on_turn(&mut self, now: Instant) {
        self.now = now;
        self.resume();
    }

    #[inline]
    fn stage(&self) -> SessionStage {
        match self.phase {
            ChannelPhase::Listening
            | ChannelPhase::Waiting(_)
            | ChannelPhase::Accepting(_)
            | ChannelPhase::Rejecting(_) => SessionStage::Handshake,
            ChannelPhase::Open | ChannelPhase::Ending | ChannelPhase::Over => SessionStage::Established,
        }
    }

    fn owed(&self) -> Option<u64> {
        None
    }

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        self.events.pop()
    }

    fn on_stop(&mut self, now: Instant) {
        self.now = now;
        match self.phase {
            ChannelPhase::Open => self.end(Some(LogoutReason::UNSPECIFIED)),
            _ => self.is_ending = true,
        }
    }
}

/// An error of the login.
fn login_error(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "SRP r16a §6.2" }
}

fn violation(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "SRP r16a §6" }
}

fn transport_failure() -> Sense {
    Sense::new(SenseKey::ABORTED_COMMAND, NOT_ENOUGH_DATA)
}

fn out_of_memory() -> Sense {
    Sense::new(SenseKey::ABORTED_COMMAND, INSUFFICIENT_RESOURCES)
}

/// What a length that an initiator names may make us hold, in bytes.
fn bounded(len: u32) -> usize {
    len.min(MAX_TRANSFER) as usize
}

const NAME: &str = "srp";
/// The task set has one driver.
const OWNER: u32 = 1;
/// The high half of a number: data-out or a descriptor table, by the slot of its command.
const READ: u64 = 1;
/// The high half of a number: data-in, by its length.
const WRITE: u64 = 2;
/// RDMA Reads on their way at a time.
const READS: u32 = 32;
/// Sends, reads and writes that are posted at a time.
const SENDS: u32 = 256;
/// Receive buffers for what takes no credit: SRP_CRED_RSP and SRP_I_LOGOUT.
const UNCREDITED: u32 = 8;
/// The most data-in of one channel, in bytes, what waits to be sent included.
const PAYLOAD_IN_FLIGHT: usize = 64 << 20;
/// How long a login may take.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(30);
/// How often to look whether other channels have ended.
const CHANNEL_POLL: Duration = Duration::from_millis(10);
/// How long a task waits for others before it is asked again.
const TASK_RETRY: Duration = Duration::from_millis(1);
/// NOT ENOUGH UNSOLICITED DATA.
const NOT_ENOUGH_DATA: Asc = Asc(0x0c0d);
/// INSUFFICIENT RESOURCES.
const INSUFFICIENT_RESOURCES: Asc = Asc(0x5503);
