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
use super::datamover::{AfterInvalidation, RegistrationState};
use super::full::FullFeatureSession;
use super::immediate::{ABORT_TAG, FUNCTION_TAG};
use crate::session::ProtocolError;
use crate::slots::SlotKey;
use blockmux_wire::iscsi::RESERVED_TAG;
use blockmux_wire::iscsi::scsi::{
    Function, FunctionResponse, ScsiResponse, TaskManagementFunctionRequest, TaskManagementFunctionResponse,
};
use std::collections::VecDeque;
use zerocopy::transmute_ref;
/// Queue of aborts and the state of the current task management function.
#[derive(Default)]
pub(super) struct IscsiAbortQueue {
    /// Commands to abort, oldest first; bounded by the number of commands.
    tasks: VecDeque<SlotKey>,
    /// The current function, if one is outstanding or refused.
    pending: Option<IscsiPendingFunction>,
    /// CID and task tag of abandoned requests; at most [`MAX_ABANDONED`].
    abandoned: VecDeque<(u16, u32)>,
    /// A reset was answered: all commands are to be returned.
    is_reset: bool,
    /// The response to the function of a [`SessionPurpose::Manage`](super::SessionPurpose) session.
    answer: Option<FunctionResponse>,
}

/// A task management function in progress.
struct IscsiPendingFunction {
    function: Function,
    /// The command to abort; `None` for a reset.
    task: Option<SlotKey>,
    tag: u32,
    /// CID of its connection.
    cid: u16,
    /// A tick has passed since it was sent.
    has_ticked: bool,
    is_refused: bool,
}

impl IscsiAbortQueue {
    /// Whether commands are held back because a reset is outstanding.
    #[inline]
    pub(super) fn holds_commands(&self) -> bool {
        self.pending.as_ref().is_some_and(|pending| pending.task.is_none())
    }

    /// The response to the function of a management session, once it has arrived.
    pub(super) fn answer(&self) -> Option<FunctionResponse> {
        self.answer
    }
}

impl FullFeatureSession {
    /// Implements [`Overdue::tick`](crate::session::Overdue::tick). A function that is unanswered
    /// at the second tick is overdue regardless of the limit.
    pub(super) fn tick(&mut self) -> u32 {
        let seen = self.queue.tick();
        let Some(pending) = &mut self.aborts.pending else { return seen };
        let was_seen = std::mem::replace(&mut pending.has_ticked, true);
        if was_seen || pending.is_refused { u32::MAX } else { seen }
    }

    /// Implements [`Overdue::abort_overdue`](crate::session::Overdue::abort_overdue), directly
    /// after a tick.
    pub(super) fn abort_overdue(
        &mut self,
        ticks: u32,
        connections: &mut [InitiatorConnection],
    ) -> Option<&'static str> {
        if !self.may_send() {
            return None;
        }
        match self.aborts.pending.take() {
            None => {
                self.aborts.tasks = self.queue.overdue(ticks).into();
                self.abort_next(connections);
            }
            Some(unanswered) => self.escalate(&unanswered, connections),
        }
        let pending = self.aborts.pending.as_mut()?;
        pending.has_ticked = true;
        Some(match pending.function {
            Function::ABORT_TASK => "to abort pending commands",
            Function::LOGICAL_UNIT_RESET => "to reset the logical unit",
            _ => "to reset itself",
        })
    }

    /// Escalates after a function that was refused or not answered. A reset must not abort internal
    /// commands, because they belong to no I/O that could be repeated.
    #[cold]
    fn escalate(&mut self, unanswered: &IscsiPendingFunction, connections: &mut [InitiatorConnection]) {
        self.aborts.tasks.clear();
        if !unanswered.is_refused {
            if self.aborts.abandoned.len() == MAX_ABANDONED {
                self.aborts.abandoned.pop_front();
            }
            self.aborts.abandoned.push_back((unanswered.cid, unanswered.tag));
        }
        let function = match unanswered.function {
            Function::ABORT_TASK => Function::LOGICAL_UNIT_RESET,
            Function::LOGICAL_UNIT_RESET => Function::TARGET_WARM_RESET,
            _ => return,
        };
        let is_free = !self.aborts.abandoned.iter().any(|(_, tag)| *tag == tag_of(function));
        if is_free && !self.queue.has_internal() {
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
        self.send_function(
            connection,
            IscsiPendingFunction {
                function,
                task: None,
                tag,
                cid: connection.cid,
                ..IscsiPendingFunction::NONE
            },
            &request,
        );
    }

    fn send_function(
        &mut self,
        connection: &mut InitiatorConnection,
        pending: IscsiPendingFunction,
        request: &TaskManagementFunctionRequest,
    ) {
        connection.sender.push(transmute_ref!(request), &[]);
        self.aborts.pending = Some(pending);
    }

    /// Finishes an answered reset, and continues with queued aborts.
    #[inline]
    pub(super) fn advance_aborts(&mut self, connections: &mut [InitiatorConnection]) {
        if self.aborts.is_reset {
            self.end_reset(connections);
        }
        if self.aborts.pending.is_none() && !self.aborts.tasks.is_empty() && self.may_send() {
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
            return self.send_function(
                connection,
                IscsiPendingFunction { function, task: Some(key), tag, cid, ..IscsiPendingFunction::NONE },
                &request,
            );
        }
    }

    /// Processes a task management response; returns whether it belongs to this queue. A task that
    /// the target does not know was answered before or never arrived.
    pub(super) fn on_function_response(
        &mut self,
        connection: &mut InitiatorConnection,
        response: &TaskManagementFunctionResponse,
    ) -> bool {
        let (cid, tag) = (connection.cid, response.initiator_task_tag.get());
        let response = FunctionResponse(response.response);
        let Some(pending) =
            self.aborts.pending.as_mut().filter(|pending| (pending.cid, pending.tag) == (cid, tag))
        else {
            let place = self.aborts.abandoned.iter().position(|abandoned| *abandoned == (cid, tag));
            return place.and_then(|place| self.aborts.abandoned.remove(place)).is_some();
        };
        let is_done = match pending.task {
            Some(_) => matches!(
                response,
                FunctionResponse::FUNCTION_COMPLETE | FunctionResponse::TASK_DOES_NOT_EXIST
            ),
            None => response == FunctionResponse::FUNCTION_COMPLETE,
        };
        if self.queue.unit().is_none() {
            self.aborts.answer = Some(response);
        } else if !is_done {
            pending.is_refused = true;
            return true;
        }
        match pending.task {
            Some(key) => self.end_aborted(connection, key),
            None => self.aborts.is_reset = true,
        }
        self.aborts.pending = None;
        true
    }

    /// Returns all commands in flight after a reset.
    #[cold]
    fn end_reset(&mut self, connections: &mut [InitiatorConnection]) {
        self.aborts.is_reset = false;
        for connection in connections {
            for key in self.queue.keys_of(|progress| progress.cid == connection.cid) {
                self.end_aborted(connection, key);
            }
        }
    }

    /// Drops the functions of a connection that has ended.
    pub(super) fn forget_aborts(&mut self, connection: &InitiatorConnection) {
        if self.aborts.pending.as_ref().is_some_and(|pending| pending.cid == connection.cid) {
            self.aborts.pending = None;
        }
        self.aborts.abandoned.retain(|(cid, _)| *cid != connection.cid);
    }

    /// Ends an aborted command: returns its I/O, over RDMA after its memory was invalidated.
    fn end_aborted(&mut self, connection: &mut InitiatorConnection, key: SlotKey) {
        let Some((progress, _)) = self.queue.transport(key) else { return };
        match (progress.registration, &mut connection.mover) {
            // Its response has arrived and will end it.
            (RegistrationState::Closing, _) => {}
            // The target answered for a command that was not sent yet; the command proceeds.
            (_, Some(mover)) if mover.is_unsent(key) => {}
            (RegistrationState::Open(stag), Some(mover)) => {
                progress.registration = RegistrationState::Closing;
                mover.close(stag, AfterInvalidation::Abort(key));
            }
            _ => {
                connection.in_flight = connection.in_flight.saturating_sub(1);
                self.queue.abort(key);
            }
        }
    }

    /// Ends commands whose memory was invalidated.
    #[inline]
    pub(super) fn end_invalidated(
        &mut self,
        connection: &mut InitiatorConnection,
    ) -> Result<bool, ProtocolError> {
        let mut has_any = false;
        while let Some(then) = connection.mover.as_mut().and_then(|mover| mover.next_invalidated()) {
            has_any = true;
            match then {
                AfterInvalidation::Respond { bhs, data } => {
                    let response: &ScsiResponse = transmute_ref!(&bhs);
                    self.on_response(connection, response, &data)?;
                }
                AfterInvalidation::Abort(key) => {
                    if let Some((progress, _)) = self.queue.transport(key) {
                        progress.registration = RegistrationState::None;
                        self.end_aborted(connection, key);
                    }
                }
            }
        }
        Ok(has_any)
    }
}

impl IscsiPendingFunction {
    const NONE: IscsiPendingFunction = IscsiPendingFunction {
        function: Function::ABORT_TASK,
        task: None,
        tag: RESERVED_TAG,
        cid: 0,
        has_ticked: false,
        is_refused: false,
    };
}

/// Task tag of a function that concerns no single task.
fn tag_of(function: Function) -> u32 {
    FUNCTION_TAG | u32::from(function.0)
}

/// Maximum number of abandoned requests that may still be answered.
const MAX_ABANDONED: usize = 16;
