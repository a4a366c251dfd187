//! Task management, for commands whose responses do not come (SRP_TSK_MGMT, SRP r16a §6.6).
//!
//! ```text
//!   ABORT TASK ──▶ LOGICAL UNIT RESET ──▶ another session
//! ```
//! The session aborts overdue commands one after the other, oldest first, each on its own channel.
//! Until the target answers the abort, a command keeps its tag and its memory, and its response is
//! accepted, because it may still complete. After the answer the session invalidates the key of the
//! memory and returns the I/O to the driver. If the target refuses or does not answer, a session
//! with one channel sends LOGICAL UNIT RESET. A reset ends all commands of the unit, including
//! those of other initiators (SAM-5 §6.3.3), so the session sends no command until the reset is
//! answered, and then returns all I/O that was in flight. If the reset fails as well, the driver
//! ends the session.
//!
//! A session with several channels sends no reset, because channels are not ordered: a command that
//! still waits in the socket of another channel could arrive after the reset, and its immediate
//! data would overwrite what the replayed command and its successors have written. The login of the
//! next session closes all channels instead.

use super::channel::RdmaChannel;
use super::response::function_code;
use super::{Ending, SrpInitiatorSession, SrpSessionMode, violation};
use crate::driver::session::{Overdue, ProtocolError};
use crate::scsi::initiator::{AbortLadder, AbortStep, FunctionEnd, FunctionTag};
use crate::slots::SlotKey;
use blockmux_volume::Seg;
use blockmux_wire::srp::{
    ResponseCode, SrpOpcode, SrpResponse, TaskManagementFunction, TaskManagementRequest,
};
use zerocopy::IntoBytes;

/// Task management of an SRP session; channels are named by their index.
pub(super) type SrpAbortLadder = AbortLadder<TaskManagementFunction, ResponseCode>;

impl Overdue for SrpInitiatorSession {
    fn tick(&mut self) -> u32 {
        let seen = self.queue.tick();
        self.aborts.tick(seen)
    }

    fn abort_overdue(&mut self, ticks: u32) -> Option<&'static str> {
        if self.ending == Ending::Over {
            return None;
        }
        match self.aborts.step(|| self.queue.overdue(ticks)) {
            AbortStep::AbortTasks => self.abort_next(),
            AbortStep::Escalate(unanswered) => self.escalate(unanswered),
        }
        Some(match self.aborts.sent_in_tick()? {
            TaskManagementFunction::ABORT_TASK => "to abort pending commands",
            _ => "to reset the logical unit",
        })
    }
}

impl SrpInitiatorSession {
    /// Escalates from ABORT TASK to LOGICAL UNIT RESET, after a function that was refused or not
    /// answered. There is no reset while the queue's own commands are in flight, because they
    /// belong to no I/O that could be repeated, and none of a session with several channels.
    fn escalate(&mut self, unanswered: TaskManagementFunction) {
        let is_ordered = self.channels.iter().filter(|channel| channel.was_open()).count() == 1;
        let was_abort = unanswered == TaskManagementFunction::ABORT_TASK;
        if was_abort && is_ordered && !self.queue.has_internal() {
            self.manage(TaskManagementFunction::LOGICAL_UNIT_RESET);
        }
    }

    /// Sends a function that names no single task.
    pub(super) fn manage(&mut self, function: TaskManagementFunction) {
        if let Some(index) = self.channels.iter().position(RdmaChannel::has_credit) {
            self.send_function(index, function, None);
        }
    }

    fn send_function(&mut self, index: usize, function: TaskManagementFunction, task: Option<SlotKey>) {
        let Some(channel) = self.channels.get_mut(index) else { return };
        self.functions = self.functions.wrapping_add(1);
        let tag = FUNCTION_TAG | u64::from(self.functions);
        let request = TaskManagementRequest {
            opcode: SrpOpcode::TASK_MANAGEMENT.0,
            tag: tag.into(),
            lun: self.config.lun.0.to_be_bytes(),
            tsk_mgmt_func: function.0,
            task_tag: task.map_or(0, |task| u64::from(task.short())).into(),
            ..TaskManagementRequest::default()
        };
        channel.push_request(request.as_bytes());
        self.aborts.on_sent(function, task, FunctionTag { connection: index, tag });
    }

    /// Continues with an answered reset, and with the commands that still have to be aborted.
    #[inline]
    pub(super) fn advance_aborts(&mut self) {
        if self.aborts.take_reset() {
            for key in self.queue.keys_of(|_| true) {
                self.end_aborted(key);
            }
        }
        if self.aborts.has_next_task() && self.ending != Ending::Over {
            self.abort_next();
        }
    }

    /// Sends ABORT TASK for the next command that was sent and has not completed meanwhile.
    #[cold]
    fn abort_next(&mut self) {
        while let Some(key) = self.aborts.tasks.pop_front() {
            let Some((state, _)) = self.queue.transport(key) else { continue };
            let index = state.channel;
            let Some(channel) = self.channels.get_mut(index) else { continue };
            if channel.has_credit() && channel.commands.is_sent(key) {
                return self.send_function(index, TaskManagementFunction::ABORT_TASK, Some(key));
            }
        }
    }

    /// Handles the target's answer to a function.
    pub(super) fn on_managed(
        &mut self,
        index: usize,
        response: &SrpResponse,
        message: &Seg,
    ) -> Result<(), ProtocolError> {
        let (tag, code) = (response.tag.get(), function_code(response, message)?);
        let is_managing = matches!(self.config.mode, SrpSessionMode::Manage(_));
        let end = self.aborts.on_response(FunctionTag { connection: index, tag }, code, |task| {
            is_managing
                || code == ResponseCode::NO_FAILURE
                // Linux's target answers FUNCTION FAILED if the task has already completed.
                || task.is_some_and(|task| self.queue.transport(task).is_none())
        });
        match end {
            Some(FunctionEnd::Aborted(task)) => self.end_aborted(task),
            Some(FunctionEnd::Reset | FunctionEnd::Refused | FunctionEnd::Late) => {}
            None => return Err(violation("answered a task management function that does not exist")),
        }
        Ok(())
    }

    /// Ends a command that the target has aborted. Its I/O is returned once the key of its memory
    /// has been invalidated.
    fn end_aborted(&mut self, key: SlotKey) {
        let Some((state, _)) = self.queue.transport(key) else { return };
        let Some(channel) = self.channels.get_mut(state.channel) else { return };
        if channel.commands.on_abort(key) {
            self.queue.abort(key);
        }
    }
}

/// Whether this is the tag of a task management function.
#[inline]
pub(super) fn is_function(tag: u64) -> bool {
    tag & FUNCTION_TAG != 0
}

/// Bit in the tag of each task management function. Tags of commands are below it.
const FUNCTION_TAG: u64 = 1 << 32;
