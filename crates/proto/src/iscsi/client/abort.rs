//! Task management for commands without a response (RFC 7143 §11.5, §11.6).
//!
//! ```text
//!   ABORT TASK ──▶ LOGICAL UNIT RESET ──▶ TARGET WARM RESET ──▶ another connection
//! ```
//! Overdue commands are aborted one after the other, oldest first, each on its own connection.
//! Until the target answers, a command keeps its tag and memory, and may still complete normally.
//! With the answer its I/O is returned. If the target refuses or does not answer, the next step is
//! a logical unit reset, then a target reset, as in Linux's initiators; each tick without an answer
//! escalates by one step, and the last step ends the connection. A reset ends all commands, also of
//! other initiators (SAM-5 §6.3.3): no command is sent until it is answered, then all commands in
//! flight are returned.
//!
//! A late answer to an abandoned request is ignored.
//!
//! Over RDMA a command's memory stays registered until one of these answers; it is invalidated
//! before the I/O is returned.

use super::connection::InitiatorConnection;
use super::datamover::DelayedResponse;
use super::full::FullFeatureSession;
use super::immediate::{ABORT_TAG, FUNCTION_TAG};
use crate::driver::session::ProtocolError;
use crate::initiator::command_memory::CommandMemory;
use crate::rdma::exposure::EndedCommand;
use crate::scsi::initiator::{AbortLadder, AbortStep, FunctionEnd, FunctionTag};
use crate::slots::SlotKey;
use blockmux_wire::iscsi::RESERVED_TAG;
use blockmux_wire::iscsi::scsi::{
    Function, FunctionResponse, ScsiResponse, TaskManagementFunctionRequest, TaskManagementFunctionResponse,
};
use zerocopy::transmute_ref;

/// Task management of an iSCSI session; connections are named by their CID.
pub(super) type IscsiAbortLadder = AbortLadder<Function, FunctionResponse>;

impl FullFeatureSession {
    /// Implements [`Overdue::tick`](crate::driver::session::Overdue::tick). A function that is
    /// unanswered at the second tick is overdue regardless of the limit.
    pub(super) fn tick(&mut self) -> u32 {
        let seen = self.queue.tick();
        self.aborts.tick(seen)
    }

    /// Implements [`Overdue::abort_overdue`](crate::driver::session::Overdue::abort_overdue),
    /// directly after a tick.
    pub(super) fn abort_overdue(
        &mut self,
        ticks: u32,
        connections: &mut [InitiatorConnection],
    ) -> Option<&'static str> {
        if !self.may_send() {
            return None;
        }
        match self.aborts.step(|| self.queue.overdue(ticks)) {
            AbortStep::AbortTasks => self.abort_next(connections),
            AbortStep::Escalate(unanswered) => self.escalate(unanswered, connections),
        }
        Some(match self.aborts.sent_in_tick()? {
            Function::ABORT_TASK => "to abort pending commands",
            Function::LOGICAL_UNIT_RESET => "to reset the logical unit",
            _ => "to reset itself",
        })
    }

    /// Escalates after a function that was refused or not answered. A reset must not abort internal
    /// commands, because they belong to no I/O that could be repeated.
    #[cold]
    fn escalate(&mut self, unanswered: Function, connections: &mut [InitiatorConnection]) {
        let function = match unanswered {
            Function::ABORT_TASK => Function::LOGICAL_UNIT_RESET,
            Function::LOGICAL_UNIT_RESET => Function::TARGET_WARM_RESET,
            _ => return,
        };
        if !self.aborts.is_abandoned(tag_of(function).into()) && !self.queue.has_internal() {
            self.manage(function, connections);
        }
    }

    /// Sends a task management function other than an abort.
    pub(super) fn manage(&mut self, function: Function, connections: &mut [InitiatorConnection]) {
        let Some(connection) = connections.iter_mut().find(|connection| connection.is_open()) else { return };
        let tag = tag_of(function);
        let request = TaskManagementFunctionRequest {
            initiator_task_tag: tag.into(),
            referenced_task_tag: RESERVED_TAG.into(),
            ..self.numbers(connection).task_management(function, self.lun)
        };
        self.send_function(connection, function, None, &request);
    }

    fn send_function(
        &mut self,
        connection: &mut InitiatorConnection,
        function: Function,
        task: Option<SlotKey>,
        request: &TaskManagementFunctionRequest,
    ) {
        connection.sender.push(transmute_ref!(request), &[]);
        let tag = tag_on(connection, request.initiator_task_tag.get());
        self.aborts.on_sent(function, task, tag);
    }

    /// Finishes an answered reset, and continues with queued aborts.
    #[inline]
    pub(super) fn advance_aborts(&mut self, connections: &mut [InitiatorConnection]) {
        if self.aborts.take_reset() {
            self.end_reset(connections);
        }
        if self.aborts.has_next_task() && self.may_send() {
            self.abort_next(connections);
        }
    }

    /// Aborts the next queued command that is still in flight on an open connection.
    #[cold]
    fn abort_next(&mut self, connections: &mut [InitiatorConnection]) {
        while let Some(key) = self.aborts.tasks.pop_front() {
            let Some((progress, _)) = self.queue.transport(key) else { continue };
            let (cid, ref_cmd_sn) = (progress.cid, progress.cmd_sn);
            let Some(connection) =
                connections.iter_mut().find(|connection| connection.cid == cid && connection.is_open())
            else {
                continue;
            };
            let (function, tag) = (Function::ABORT_TASK, key.short() | ABORT_TAG);
            let request = TaskManagementFunctionRequest {
                initiator_task_tag: tag.into(),
                referenced_task_tag: key.short().into(),
                ref_cmd_sn: ref_cmd_sn.into(),
                ..self.numbers(connection).task_management(function, self.lun)
            };
            return self.send_function(connection, function, Some(key), &request);
        }
    }

    /// Processes a task management response; returns whether it belongs to this queue. A task that
    /// the target does not know was answered before or never arrived.
    pub(super) fn on_function_response(
        &mut self,
        connection: &mut InitiatorConnection,
        response: &TaskManagementFunctionResponse,
    ) -> bool {
        let tag = tag_on(connection, response.initiator_task_tag.get());
        let response = FunctionResponse(response.response);
        // A session that only manages knows no unit, and ends with any response.
        let is_managing = self.queue.unit().is_none();
        let end = self.aborts.on_response(tag, response, |task| {
            is_managing
                || response == FunctionResponse::FUNCTION_COMPLETE
                || task.is_some() && response == FunctionResponse::TASK_DOES_NOT_EXIST
        });
        if let Some(FunctionEnd::Aborted(key)) = end {
            self.end_aborted(connection, key);
        }
        end.is_some()
    }

    /// Returns all commands in flight after a reset.
    #[cold]
    fn end_reset(&mut self, connections: &mut [InitiatorConnection]) {
        for connection in connections {
            for key in self.queue.keys_of(|progress| progress.cid == connection.cid) {
                self.end_aborted(connection, key);
            }
        }
    }

    /// Ends an aborted command: returns its I/O, over RDMA after its memory was invalidated.
    fn end_aborted(&mut self, connection: &mut InitiatorConnection, key: SlotKey) {
        if self.queue.transport(key).is_some()
            && connection.mover.as_mut().is_none_or(|mover| mover.commands.on_abort(key))
        {
            self.return_command(connection, key);
        }
    }

    fn return_command(&mut self, connection: &mut InitiatorConnection, key: SlotKey) {
        connection.in_flight = connection.in_flight.saturating_sub(1);
        self.queue.abort(key);
    }

    /// Ends commands whose memory was invalidated.
    #[inline]
    pub(super) fn end_invalidated(
        &mut self,
        connection: &mut InitiatorConnection,
    ) -> Result<bool, ProtocolError> {
        let mut has_any = false;
        while let Some(EndedCommand { key, response, written }) =
            connection.mover.as_mut().and_then(|mover| mover.invalidated.pop_front())
        {
            has_any = true;
            match response {
                Some(DelayedResponse { bhs, data }) => {
                    if let Some(written) = written {
                        self.queue.attach_borrowed(key, written);
                    }
                    let response: &ScsiResponse = transmute_ref!(&bhs);
                    self.on_response(connection, response, &data)?;
                }
                None => self.return_command(connection, key),
            }
        }
        Ok(has_any)
    }
}

fn tag_on(connection: &InitiatorConnection, tag: u32) -> FunctionTag {
    FunctionTag { connection: connection.cid.into(), tag: tag.into() }
}

/// Task tag of a function that concerns no single task.
fn tag_of(function: Function) -> u32 {
    FUNCTION_TAG | u32::from(function.0)
}
