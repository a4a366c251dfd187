//! SCSI commands: from the PDU to the device server and back, recovery of lost data, and task
//! management (RFC 7143 §11.3 to §11.8, §11.16; RFC 7144 §4.2).
//!
//! *Lost data* is recovered from error recovery level 1 on (§7.1.3, §7.2.1, §7.8, §7.9). The
//! initiator requests data-in and R2Ts again by SNACK; `replies` has retained them. The target
//! requests data-out again with R2Ts from the first lost byte on: after a wrong data digest, after
//! a gap in DataSN, and when nothing arrived for a while.
//!
//! *Task management*: the task set aborts tasks and waits for their I/O
//! ([`crate::scsi::task_set`]). This module has the function and response codes of iSCSI, and
//! aborts early commands. While the I/O of an aborted task hangs, the function is not answered, as
//! in Linux's target: "Function complete" would be wrong while I/O can reach the volume, and after
//! "Function rejected" the initiator would wait for tasks that are gone. If the initiator
//! reinstates the session instead, its login waits for the same I/O and fails after 30 seconds
//! ([`crate::iscsi::sessions`]): a late write must not overwrite data of the new session.
//!
//! RFC 7143 §4.2.3.3 lets a target wait for solicited data after an abort. This one does not,
//! because Linux's initiator by default does not send it (FastAbort). If it arrives, it is dropped.

use super::answer::ExpectedTransfer;
use super::full::ConnectionTurn;
use super::receive::SegmentPurpose;
use super::request::ValidatedCommand;
use super::shared::ConnectionEvent;
use super::tasks::{TaskState, TaskTransfer, Tasks};
use super::transfer::{DataOutMismatch, DataOutTransfer};
use crate::driver::audit_event::AuditEvent;
use crate::iscsi::login::operational::OperationalKey;
use crate::scsi::task_set::{FunctionDone, ScsiTransport, TaskEvent, TaskRouter, TransportParts};
use crate::scsi::{Lun, ManagementResponse, Response, ScsiStatus, Sense, Task, TaskManagement};
use blockmux_volume::{MAX_TRANSFER, Seg, SgList};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::session::RejectReason;
use blockmux_wire::iscsi::{Bhs, FLAG_FINAL, IscsiOpcode, RESERVED_TAG};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use zerocopy::transmute_ref;

impl ConnectionTurn<'_> {
    /// Starts a command that is next in order.
    #[inline]
    pub(super) fn on_command(&mut self, pdu: &ScsiCommand, bhs: &Bhs, ahs: &[u8]) -> SegmentPurpose {
        let request = match ValidatedCommand::read(self.session, self.connection, pdu, bhs, ahs) {
            Ok(request) => request,
            Err(reason) => {
                self.reject(reason, bhs);
                return SegmentPurpose::Discard;
            }
        };
        // An initiator that reuses a task tag has no use for the old response.
        self.session.forget_answer(pdu.initiator_task_tag.get());
        let immediate = pdu.data_segment_length.get();
        let is_final = pdu.flags & FLAG_FINAL != 0;
        let first_burst = self.connection.parameters.get(OperationalKey::FirstBurstLength);
        let max_unsolicited = request.data_out.unwrap_or(0).min(first_burst);
        let refusal = if self.connection.logout.has_begun() {
            Some(Response::bare(ScsiStatus::BUSY))
        } else {
            self.connection
                .mismatch(immediate, is_final, max_unsolicited)
                .map(|mismatch| Response::failed(data_sense(mismatch.into())))
        };
        let ValidatedCommand { data_in, data_out, .. } = request;
        let is_immediate = bhs.is_immediate();
        let progress = || TaskTransfer {
            data_in,
            data_out,
            is_immediate,
            transfer: DataOutTransfer::new(immediate, !is_final, max_unsolicited),
            memory: 0,
        };
        let (owner, lun) = (self.connection.key, request.command.lun);
        let slot = self.session.tasks.insert(owner, pdu.initiator_task_tag.get(), lun, progress);
        self.connection.data_in_expected =
            self.connection.data_in_expected.saturating_add(bounded(data_in.unwrap_or(0)));
        self.connection.task_count = self.connection.task_count.saturating_add(1);
        if is_immediate {
            self.session.immediate = self.session.immediate.saturating_add(1);
        } else {
            self.session.window.occupy();
        }
        if let Some(mover) = &mut self.connection.replies.mover {
            mover.assign(slot);
        }
        match refusal {
            None => self.start(slot, &request.command),
            Some(refusal) => self.refuse(slot, refusal),
        }
        if immediate == 0 {
            return SegmentPurpose::Discard;
        }
        SegmentPurpose::Data { slot, offset: 0, is_final, is_immediate: true }
    }

    /// Processes a Data-Out header. Data of a task that has ended, by an abort for example, is
    /// dropped.
    #[inline]
    pub(super) fn on_data_out(&mut self, bhs: &Bhs) -> SegmentPurpose {
        let pdu: &DataOut = transmute_ref!(bhs);
        let (itt, ttt) = (pdu.initiator_task_tag.get(), pdu.target_transfer_tag.get());
        let slot = if ttt == RESERVED_TAG { self.session.tasks.find(itt) } else { Some(Tasks::slot_of(ttt)) };
        let Some(slot) = slot else { return SegmentPurpose::Discard };
        let key = self.connection.key;
        let current =
            self.session.tasks.get_mut(slot).map_or(0, |entry| entry.progress.transfer.current_r2t());
        let is_current = ttt == RESERVED_TAG || self.session.tasks.transfer_tag(slot, current) == ttt;
        let Some(entry) = self
            .session
            .tasks
            .get_mut(slot)
            .filter(|entry| is_current && entry.tag == itt && entry.owner == key)
        else {
            return SegmentPurpose::Discard;
        };
        if matches!(entry.state, TaskState::Aborted(_)) {
            return SegmentPurpose::Discard;
        }
        let (offset, len) = (pdu.buffer_offset.get(), pdu.data_segment_length.get());
        let checked = entry.progress.transfer.check(ttt, pdu.data_sn.get(), offset, len);
        if entry.state == TaskState::Data
            && !entry.progress.transfer.is_lost()
            && let Err(mismatch) = checked
        {
            if self.connection.level > 0 && entry.progress.transfer.is_gap(pdu.data_sn.get(), offset) {
                entry.progress.transfer.lose();
                return SegmentPurpose::Data {
                    slot,
                    offset,
                    is_final: pdu.flags & FLAG_FINAL != 0,
                    is_immediate: false,
                };
            }
            if ttt == RESERVED_TAG && entry.progress.transfer.has_lost() {
                // Unsolicited data that was lost and is already requested by R2T.
                return SegmentPurpose::Discard;
            }
            let is_open = entry.progress.transfer.is_open();
            self.session.tasks.fail(slot, Response::failed(data_sense(mismatch.into())));
            if !is_open {
                self.end_if_closed(slot);
                return SegmentPurpose::Discard;
            }
        }
        SegmentPurpose::Data { slot, offset, is_final: pdu.flags & FLAG_FINAL != 0, is_immediate: false }
    }

    /// Processes received data of a task; `borrowed` is the data if it is still in the receive
    /// buffer.
    #[inline]
    pub(super) fn on_data(
        &mut self,
        slot: usize,
        offset: u32,
        len: usize,
        borrowed: Option<Seg>,
        (is_final, is_immediate): (bool, bool),
    ) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        if entry.state != TaskState::Data {
            entry.progress.transfer.discard(is_final);
            return self.end_if_closed(slot);
        }
        if entry.progress.transfer.is_lost() {
            return self.skip(slot, is_final);
        }
        if let Some(borrowed) = borrowed
            && !entry.progress.transfer.put(offset, &borrowed)
        {
            if !self.give_memory(slot) {
                self.session.tasks.fail(slot, Response::bare(ScsiStatus::BUSY));
                return self.on_data(slot, offset, len, None, (is_final, is_immediate));
            }
            if let Some(entry) = self.session.tasks.get_mut(slot) {
                entry.progress.transfer.put(offset, &borrowed);
            }
        }
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let advanced = if is_immediate {
            entry.progress.transfer.advance_immediate(len as u32, is_final);
            Ok(())
        } else {
            entry.progress.transfer.advance(len as u32, is_final)
        };
        if let Err(mismatch) = advanced {
            self.session.tasks.fail(slot, Response::failed(data_sense(mismatch.into())));
            return self.end_if_closed(slot);
        }
        self.continue_data_out(slot);
    }

    /// Sends R2Ts for writes that waited for memory, in order, while there is memory.
    pub(super) fn resume_memory_waiters(&mut self) {
        while let Some(&slot) = self.connection.memory_waiters.front() {
            let wants = self.session.tasks.get_mut(slot).is_some_and(|entry| {
                entry.state == TaskState::Data
                    && entry.progress.transfer.needs_r2t()
                    && !entry.progress.transfer.has_memory()
            });
            if wants && !self.give_memory(slot) {
                return;
            }
            self.connection.memory_waiters.pop_front();
            if wants {
                self.request_data_out(slot);
            }
        }
    }

    /// Allocates memory for a task's round of data-out; returns whether it has memory.
    pub(super) fn give_memory(&mut self, slot: usize) -> bool {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return false };
        if entry.progress.transfer.has_memory() {
            return true;
        }
        let len = entry.progress.transfer.round_len();
        if self.connection.exceeds_share(len) {
            return false;
        }
        let Some(memory) = self.connection.pool.take_payload_or_wait(len) else { return false };
        self.connection.allocation_order = self.connection.allocation_order.wrapping_add(1);
        entry.progress.transfer.allocation_order = self.connection.allocation_order;
        entry.progress.transfer.set_memory(memory.seg(0, len));
        entry.progress.memory = entry.progress.memory.saturating_add(len);
        self.connection.data_out_memory = self.connection.data_out_memory.saturating_add(len);
        true
    }

    /// Continues a task that receives data-out.
    #[inline]
    pub(super) fn continue_data_out(&mut self, slot: usize) {
        match self.take_round(slot) {
            Some(data) => self.deliver_data(slot, data),
            None => self.request_data_out(slot),
        }
    }

    /// The data of a round, if complete.
    #[inline]
    fn take_round(&mut self, slot: usize) -> Option<Result<SgList, Sense>> {
        let entry = self.session.tasks.get_mut(slot)?;
        let transfer = Some(&mut entry.progress.transfer).filter(|transfer| transfer.is_complete())?;
        // Data of a second round that arrived with the first was dropped.
        Some(transfer.take_data().ok_or_else(|| data_sense(NOT_ENOUGH_DATA)))
    }

    /// Sends the permitted R2Ts, or queues the task for memory.
    fn request_data_out(&mut self, slot: usize) {
        let is_failed = self.connection.is_failed;
        let Some(entry) = self.session.tasks.get_mut(slot).filter(|_| !is_failed) else { return };
        if !entry.progress.transfer.has_memory() {
            if !entry.progress.transfer.needs_r2t() {
                return;
            }
            // Memory is allocated in the order of requests.
            if !self.connection.memory_waiters.is_empty() || !self.give_memory(slot) {
                return self.connection.memory_waiters.push_back(slot);
            }
        }
        if self.connection.replies.mover.is_some() {
            return self.fetch(slot);
        }
        let max_burst = self.connection.parameters.get(OperationalKey::MaxBurstLength);
        // Lost data can be requested again in order only if no other R2T is outstanding (RFC 7143
        // §13.19).
        let max_outstanding = match self.connection.level {
            0 => self.connection.parameters.get(OperationalKey::MaxOutstandingR2T),
            _ => 1,
        };
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let to = (entry.lun.0.to_be_bytes(), entry.tag);
        while let Some(grant) = self
            .session
            .tasks
            .get_mut(slot)
            .and_then(|entry| entry.progress.transfer.next_r2t(max_burst, max_outstanding))
        {
            let ttt = self.session.tasks.transfer_tag(slot, grant.r2t_sn);
            self.connection.replies.r2t(self.session.window, to, ttt, grant);
        }
    }

    /// Reads the missing data of a task's round from the initiator's memory with one RDMA Read.
    pub(super) fn fetch(&mut self, slot: usize) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let Some(grant) = entry.progress.transfer.next_r2t(u32::MAX, 1) else { return };
        let Some(place) = entry.progress.transfer.place(grant.offset, grant.len as usize) else { return };
        let tag = self.session.tasks.transfer_tag(slot, grant.r2t_sn);
        if let Some(mover) = &mut self.connection.replies.mover {
            mover.get(slot, tag, place, grant.offset);
        }
    }

    /// Ends the RDMA Read with this tag: its data has arrived, or the connection is over.
    pub(super) fn on_fetched(&mut self, tag: u32) {
        let slot = Tasks::slot_of(tag);
        let key = self.connection.key;
        let Some(entry) = self.session.tasks.get_mut(slot).filter(|entry| entry.owner == key) else { return };
        let (r2t_sn, state) = (entry.progress.transfer.current_r2t(), entry.state);
        let asked = entry.progress.transfer.outstanding(r2t_sn);
        if self.session.tasks.transfer_tag(slot, r2t_sn) != tag {
            return;
        }
        if let TaskState::Aborted(_) = state {
            return self.drop_aborted(slot);
        }
        if let Some(grant) = asked {
            self.on_data(slot, grant.offset, grant.len as usize, None, (true, false));
        }
    }

    pub(super) fn on_snack(&mut self, bhs: &Bhs) {
        let request: &SnackRequest = transmute_ref!(bhs);
        let (itt, ttt) = (request.initiator_task_tag.get(), request.target_transfer_tag.get());
        let run = (request.beg_run.get(), request.run_length.get());
        let (window, replies) = (self.session.window, &mut self.connection.replies);
        let result = match SnackType(request.snack_type & FUNCTION_MASK) {
            SnackType::DATA_R2T => match replies.retransmit_data(window, itt, run) {
                Some(result) => result,
                None => self.retransmit_r2t(itt, run),
            },
            SnackType::STATUS => replies.retransmit_status(window, run.0, run.1),
            SnackType::DATA_ACK if run.1 == 0 => replies.acknowledge_data(ttt, run.0),
            SnackType::R_DATA if run.1 == 0 && ttt != 0 && ttt != RESERVED_TAG => {
                replies.resegment(window, itt, run.0, ttt)
            }
            _ => Err(RejectReason::INVALID_PDU_FIELD),
        };
        if let Err(reason) = result {
            self.reject(reason, bhs);
        }
    }

    /// Sends the outstanding R2T again. Received data acknowledges its R2T, and only one is
    /// outstanding.
    fn retransmit_r2t(&mut self, itt: u32, (first, count): (u32, u32)) -> Result<(), RejectReason> {
        let slot = self.session.tasks.find(itt).ok_or(RejectReason::PROTOCOL_ERROR)?;
        let key = self.connection.key;
        let entry = self.session.tasks.get_mut(slot).filter(|entry| count <= 1 && entry.owner == key);
        let asked = entry.and_then(|entry| {
            let to = (entry.lun.0.to_be_bytes(), entry.tag);
            Some((to, entry.progress.transfer.outstanding(first)?))
        });
        let (to, grant) = asked.ok_or(RejectReason::PROTOCOL_ERROR)?;
        let ttt = self.session.tasks.transfer_tag(slot, grant.r2t_sn);
        self.connection.replies.r2t(self.session.window, to, ttt, grant);
        Ok(())
    }

    /// Marks a task's current data sequence as lost; `false` if the task no longer receives data.
    pub(super) fn lose(&mut self, slot: usize) -> bool {
        let entry = self.session.tasks.get_mut(slot).filter(|entry| entry.state == TaskState::Data);
        entry.is_some_and(|entry| {
            entry.progress.transfer.lose();
            true
        })
    }

    /// Skips a PDU of a lost sequence. After the last one, the missing data is requested again.
    pub(super) fn skip(&mut self, slot: usize, is_final: bool) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        if !entry.progress.transfer.skip(is_final) {
            self.session.tasks.fail(slot, Response::failed(data_sense(CRC_ERROR)));
            return self.end_if_closed(slot);
        }
        if is_final {
            self.continue_data_out(slot);
        }
    }

    /// Requests data again that does not arrive.
    pub(super) fn recover_stalled(&mut self) {
        let current = self.connection.awaiting.slot();
        let key = self.connection.key;
        let slots =
            self.session.tasks.select(|entry| entry.owner == key && entry.progress.transfer.is_open());
        for slot in slots {
            let Some(entry) = self.session.tasks.get_mut(slot).filter(|_| current != Some(slot)) else {
                continue;
            };
            if !entry.progress.transfer.is_stalled() {
                continue;
            }
            let continues = entry.progress.transfer.skip(true);
            if !continues {
                self.session.tasks.fail(slot, Response::failed(data_sense(NOT_ENOUGH_DATA)));
            }
            match self.session.tasks.get_mut(slot).map(|entry| entry.state) {
                Some(TaskState::Data) => self.continue_data_out(slot),
                _ => self.end_if_closed(slot),
            }
        }
    }

    pub(super) fn on_task_management(&mut self, bhs: &Bhs) {
        let request: &TaskManagementFunctionRequest = transmute_ref!(bhs);
        let lun = Lun(u64::from_be_bytes(request.lun));
        let itt = request.initiator_task_tag.get();
        if self.session.tasks.server.is_none() {
            return self.reject(RejectReason::PROTOCOL_ERROR, bhs);
        }
        if !self.session.tasks.has_room_for_function() {
            return self.reject(RejectReason::IMMEDIATE_COMMAND_REJECT, bhs);
        }
        let function = Function(request.function & FUNCTION_MASK);
        let knows_queries = self.connection.parameters.get(OperationalKey::iSCSIProtocolLevel) >= RFC_7144;
        match function {
            Function::ABORT_TASK => self.abort_single(request),
            Function::ABORT_TASK_SET => self.manage_unit(request, TaskManagement::AbortTaskSet),
            Function::CLEAR_TASK_SET => self.manage_unit(request, TaskManagement::ClearTaskSet),
            Function::LOGICAL_UNIT_RESET => self.manage_unit(request, TaskManagement::LogicalUnitReset),
            // It would end the sessions of initiators whose units this one cannot reset.
            Function::TARGET_COLD_RESET if !self.session.sees_all_units() => {
                self.respond(itt, FunctionResponse::FUNCTION_AUTHORIZATION_FAILED);
            }
            Function::TARGET_WARM_RESET | Function::TARGET_COLD_RESET => {
                self.cancel_early(request, |_| true);
                self.reset_target(itt, function == Function::TARGET_COLD_RESET);
            }
            Function::TASK_REASSIGN if self.connection.level > 1 => self.reassign(request),
            Function::TASK_REASSIGN => {
                let response = FunctionResponse::TASK_ALLEGIANCE_REASSIGNMENT_NOT_SUPPORTED;
                self.respond(itt, response);
            }
            Function::QUERY_TASK if knows_queries => {
                let is_there = self.session.tasks.has_task(request.referenced_task_tag.get(), lun);
                self.respond(itt, query_response(is_there));
            }
            Function::QUERY_TASK_SET if knows_queries => {
                let has_unit = self.session.tasks.server.as_ref().is_some_and(|server| server.has_unit(lun));
                let is_there = !self.session.tasks.select(|entry| entry.lun.names_same_unit(lun)).is_empty();
                let answer = query_response(is_there);
                self.respond(itt, if has_unit { answer } else { FunctionResponse::LUN_DOES_NOT_EXIST });
            }
            Function::I_T_NEXUS_RESET if knows_queries => {
                self.cancel_early(request, |_| true);
                self.reset_nexus(itt);
            }
            _ => self.respond(itt, FunctionResponse::TASK_MANAGEMENT_FUNCTION_NOT_SUPPORTED),
        }
    }

    /// Aborts a single task. RFC 7143 §11.6.1: a missing task may have its response in flight, or
    /// may not have arrived. In the latter case its CmdSN counts as received, so that it never
    /// executes.
    fn abort_single(&mut self, request: &TaskManagementFunctionRequest) {
        let (itt, referenced) = (request.initiator_task_tag.get(), request.referenced_task_tag.get());
        if self.session.tasks.has_task(referenced, Lun(u64::from_be_bytes(request.lun))) {
            return self.abort_task(itt, referenced);
        }
        let ref_cmd_sn = request.ref_cmd_sn.get();
        let response = if self.session.window.is_ahead(ref_cmd_sn) {
            if self.may_fill_gaps() && is_before(ref_cmd_sn, request.cmd_sn.get()) {
                self.session.early.cancel(ref_cmd_sn);
            }
            FunctionResponse::FUNCTION_COMPLETE
        } else {
            FunctionResponse::TASK_DOES_NOT_EXIST
        };
        self.respond(itt, response);
    }

    fn manage_unit(&mut self, request: &TaskManagementFunctionRequest, function: TaskManagement) {
        let (itt, lun) = (request.initiator_task_tag.get(), Lun(u64::from_be_bytes(request.lun)));
        match TaskRouter::manage_unit(self, itt, function, lun) {
            ManagementResponse::IncorrectLogicalUnitNumber => {
                self.respond(itt, FunctionResponse::LUN_DOES_NOT_EXIST);
            }
            ManagementResponse::FunctionComplete => {
                self.cancel_early(request, |other| other.names_same_unit(lun));
            }
        }
    }

    /// Cancels early commands that were sent before the task management function.
    fn cancel_early(&mut self, request: &TaskManagementFunctionRequest, predicate: impl Fn(Lun) -> bool) {
        let selected = self.session.early.select(|bhs, cmd_sn| {
            bhs.opcode() == IscsiOpcode::SCSI_COMMAND
                && is_before(cmd_sn, request.cmd_sn.get())
                && predicate(Lun(u64::from_be_bytes(bhs.lun)))
        });
        selected.into_iter().for_each(|cmd_sn| self.session.early.cancel(cmd_sn));
    }
}

impl ScsiTransport for ConnectionTurn<'_> {
    type Progress = TaskTransfer;

    #[inline]
    fn parts(&mut self) -> TransportParts<'_, TaskTransfer> {
        let (tasks, connection) = (&mut self.session.tasks, &mut *self.connection);
        let (owner, now) = (connection.key, connection.now);
        TransportParts { tasks, queue: &mut connection.queue, owner, now }
    }

    #[inline]
    fn fetch(&mut self, slot: usize, len: usize) -> Option<Result<SgList, Sense>> {
        let entry = self.session.tasks.get_mut(slot)?;
        entry.progress.transfer.begin_round(u32::try_from(len).unwrap_or(u32::MAX));
        let data = self.take_round(slot);
        if data.is_none() {
            self.request_data_out(slot);
        }
        data
    }

    #[inline]
    fn is_receiving(progress: &TaskTransfer) -> bool {
        progress.transfer.is_open()
    }

    fn is_fetching(&mut self, slot: usize) -> bool {
        // An RDMA Read may still access the initiator's memory, which the initiator invalidates
        // when it receives the response.
        let is_read = self.connection.replies.mover.is_some();
        is_read
            && self
                .session
                .tasks
                .get_mut(slot)
                .is_some_and(|entry| entry.progress.transfer.has_outstanding_r2t())
    }

    #[inline]
    fn complete(&mut self, slot: usize, response: &mut Response) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let expected = ExpectedTransfer {
            itt: entry.tag,
            lun: entry.lun.0.to_be_bytes(),
            data_in: entry.progress.data_in,
            data_out: entry.progress.data_out,
            r2ts: entry.progress.transfer.r2t_sent,
        };
        if let Some(change) = entry.task.as_ref().and_then(Task::reservation_change) {
            let is_done = response.status == ScsiStatus::GOOD;
            let unit = match entry.lun.number() {
                Some(number) => format!("LUN {number}"),
                None => format!("LUN {:#018x}", entry.lun.0),
            };
            self.connection.events.push(AuditEvent::Reservation { unit, change, is_done });
        }
        self.drop_task(slot);
        if self.connection.is_failed {
            let sent = self.connection.replies.record(expected, response);
            return self.session.park(self.connection.key, sent);
        }
        if self.connection.replies.mover.is_some() {
            return self.connection.replies.command_over_rdma(self.session.window, slot, expected, response);
        }
        self.connection.replies.command(self.session.window, expected, response);
    }

    #[inline]
    fn release(&mut self, slot: usize) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let connection = &mut *self.connection;
        if !connection.memory_waiters.is_empty() {
            connection.memory_waiters.retain(|other| *other != slot);
        }
        let TaskTransfer { data_in, memory, is_immediate, .. } = entry.progress;
        if entry.owner == connection.key {
            connection.data_in_expected =
                connection.data_in_expected.saturating_sub(bounded(data_in.unwrap_or(0)));
            connection.data_out_memory = connection.data_out_memory.saturating_sub(memory);
            connection.task_count = connection.task_count.saturating_sub(1);
        }
        if is_immediate {
            self.session.immediate = self.session.immediate.saturating_sub(1);
        } else {
            self.session.window.release();
        }
    }

    fn on_function_done(&mut self, done: FunctionDone) {
        if self.connection.is_over {
            return;
        }
        self.respond(done.tag, FunctionResponse::FUNCTION_COMPLETE);
        if done.ends_session {
            // RFC 7143 §11.5.1: closes the connections of all initiators, and this one after its
            // response.
            if let Some(registration) = &self.session.registration {
                registration.end_others();
            }
            self.end_session();
        }
    }

    fn post(&mut self, owner: u32, event: TaskEvent) -> bool {
        let is_there = self.session.has_connection(owner);
        self.session.post(owner, ConnectionEvent::Task(event));
        is_there
    }
}

impl From<DataOutMismatch> for Asc {
    fn from(mismatch: DataOutMismatch) -> Asc {
        match mismatch {
            DataOutMismatch::Unexpected => UNEXPECTED_UNSOLICITED_DATA,
            DataOutMismatch::WrongAmount => NOT_ENOUGH_DATA,
        }
    }
}

/// Whether `cmd_sn` precedes `other` in serial number arithmetic.
fn is_before(cmd_sn: u32, other: u32) -> bool {
    other.wrapping_sub(cmd_sn).wrapping_sub(1) < (1 << 31) - 1
}

fn query_response(is_there: bool) -> FunctionResponse {
    if is_there { FunctionResponse::FUNCTION_SUCCEEDED } else { FunctionResponse::FUNCTION_COMPLETE }
}

/// ABORTED COMMAND for a failed delivery of data (RFC 7143 §11.4.7.2).
pub(super) fn data_sense(asc: Asc) -> Sense {
    Sense::new(SenseKey::ABORTED_COMMAND, asc)
}

/// An expected transfer length, limited to the longest transfer, in bytes.
#[inline]
pub(super) fn bounded(len: u32) -> usize {
    len.min(MAX_TRANSFER) as usize
}

/// UNEXPECTED UNSOLICITED DATA.
const UNEXPECTED_UNSOLICITED_DATA: Asc = Asc(0x0c0c);
/// NOT ENOUGH UNSOLICITED DATA; RFC 7143 says "incorrect amount of data".
pub(super) const NOT_ENOUGH_DATA: Asc = Asc(0x0c0d);
/// PROTOCOL SERVICE CRC ERROR.
pub(super) const CRC_ERROR: Asc = Asc(0x4705);

/// Value of `iSCSIProtocolLevel` that includes RFC 7144.
const RFC_7144: u32 = 2;
