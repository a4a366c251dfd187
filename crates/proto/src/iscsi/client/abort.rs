//! Task management, for commands whose answers do not come (RFC 7143 §11.5, §11.6).
//!
//! ```text
//!   ABORT TASK ──▶ LOGICAL UNIT RESET ──▶ TARGET WARM RESET ──▶ another connection
//! ```
//! Such commands are aborted one after the other, oldest first, each on the connection that it
//! belongs to. Until the target has answered, a command keeps its tag and its memory, and what
//! comes for it is taken: it may still end by itself. With the answer the target has done with it,
//! and its I/O is handed back. A target that refuses, or owes this answer, too, is asked to reset
//! the logical unit, then itself, as Linux's initiators do; what one look finds unanswered the next
//! one takes a step further. A reset ends whatever it finds, also what others have under way (SAM-5
//! §6.3.3): no command is sent until it is answered, and all that were under way come back then.
//! What the driver learns from the look behind the last step is that the connection is to be given
//! up.
//!
//! An answer that was given up on may still come, and says nothing any more.
//!
//! Over RDMA a command's memory stays open to the target until one of these answers has come; then
//! it is closed, and only then is the I/O handed back.

use super::connection::InitiatorConnection;
use super::datamover::{AfterClose, Exposure};
use super::full::FullFeatureSession;
use super::immediate::{ABORT_TAG, MANAGE_TAG};
use crate::session::ProtocolError;
use crate::slots::SlotKey;
use blockmux_wire::iscsi::RESERVED_TAG;
use blockmux_wire::iscsi::scsi::{
    Function, FunctionResponse, ScsiResponse, TaskManagementRequest, TaskManagementResponse,
};
use std::collections::VecDeque;
use zerocopy::transmute_ref;
/// What the target is asked to give up.
#[derive(Default)]
pub(super) struct Aborts {
    /// Commands to be aborted, oldest first; not more than there are commands.
    tasks: VecDeque<SlotKey>,
    /// What the target was asked for last.
    asked: Option<PendingFunction>,
    /// Tags of requests that were given up on, and their connections; at most [`MAX_GIVEN_UP`].
    given_up: VecDeque<(u16, u32)>,
    /// A reset was answered: all commands are to come back.
    is_reset: bool,
    /// How the only request of a session was answered.
    answer: Option<FunctionResponse>,
}

/// A request under way.
struct PendingFunction {
    function: Function,
    /// The command to be aborted.
    task: Option<SlotKey>,
    tag: u32,
    /// The number of its connection.
    cid: u16,
    /// A look has found it under way.
    is_seen: bool,
    is_refused: bool,
}

impl Aborts {
    /// No command is sent that a reset might find or not.
    #[inline]
    pub(super) fn holds_commands(&self) -> bool {
        self.asked.as_ref().is_some_and(|asked| asked.task.is_none())
    }

    /// How the only request of a session was answered, once it is.
    pub(super) fn answer(&self) -> Option<FunctionResponse> {
        self.answer
    }
}

impl FullFeatureSession {
    /// As [`Initiator::look`](crate::session::Overdue::look). A request that a second look finds
    /// unanswered is overdue beyond doubt.
    pub(super) fn look(&mut self) -> u32 {
        let seen = self.queue.look();
        let Some(asked) = &mut self.aborts.asked else { return seen };
        let was_seen = std::mem::replace(&mut asked.is_seen, true);
        if was_seen || asked.is_refused { u32::MAX } else { seen }
    }

    /// As [`Initiator::abort_overdue`](crate::session::Overdue::abort_overdue), just after a look.
    pub(super) fn abort_overdue(
        &mut self,
        looks: u32,
        connections: &mut [InitiatorConnection],
    ) -> Option<&'static str> {
        if !self.may_send() {
            return None;
        }
        match self.aborts.asked.take() {
            None => {
                self.aborts.tasks = self.queue.overdue(looks).into();
                self.abort_next(connections);
            }
            Some(unanswered) => self.escalate(&unanswered, connections),
        }
        let asked = self.aborts.asked.as_mut()?;
        asked.is_seen = true;
        Some(match asked.function {
            Function::ABORT_TASK => "to give up what it owes",
            Function::LOGICAL_UNIT_RESET => "to reset the logical unit",
            _ => "to reset itself",
        })
    }

    /// Takes the next step after a request that was refused or not answered. A command of the
    /// queue's own belongs to no I/O that could be done again, so that none of those may be under
    /// way.
    #[cold]
    fn escalate(&mut self, unanswered: &PendingFunction, connections: &mut [InitiatorConnection]) {
        self.aborts.tasks.clear();
        if !unanswered.is_refused {
            if self.aborts.given_up.len() == MAX_GIVEN_UP {
                self.aborts.given_up.pop_front();
            }
            self.aborts.given_up.push_back((unanswered.cid, unanswered.tag));
        }
        let function = match unanswered.function {
            Function::ABORT_TASK => Function::LOGICAL_UNIT_RESET,
            Function::LOGICAL_UNIT_RESET => Function::TARGET_WARM_RESET,
            _ => return,
        };
        let is_free = !self.aborts.given_up.iter().any(|(_, tag)| *tag == tag_of(function));
        if is_free && !self.queue.has_own() {
            self.manage(function, connections);
        }
    }

    /// Asks for a function that is about no single task.
    pub(super) fn manage(&mut self, function: Function, connections: &mut [InitiatorConnection]) {
        let Some(connection) = connections.iter_mut().find(|connection| connection.is_open()) else { return };
        let tag = tag_of(function);
        let request = TaskManagementRequest {
            initiator_task_tag: tag.into(),
            referenced_task_tag: RESERVED_TAG.into(),
            ..self.numbers(connection).task_management(function, self.lun)
        };
        self.ask(
            connection,
            PendingFunction { function, task: None, tag, cid: connection.cid, ..PendingFunction::NONE },
            &request,
        );
    }

    fn ask(
        &mut self,
        connection: &mut InitiatorConnection,
        asked: PendingFunction,
        request: &TaskManagementRequest,
    ) {
        connection.sender.push(transmute_ref!(request), &[]);
        self.aborts.asked = Some(asked);
    }

    /// Goes on with a reset that was answered, and with commands that are to be aborted.
    #[inline]
    pub(super) fn advance_aborts(&mut self, connections: &mut [InitiatorConnection]) {
        if self.aborts.is_reset {
            self.end_reset(connections);
        }
        if self.aborts.asked.is_none() && !self.aborts.tasks.is_empty() && self.may_send() {
            self.abort_next(connections);
        }
    }

    /// Has the next command aborted that has not ended by itself, and whose connection is there.
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
            let request = TaskManagementRequest {
                initiator_task_tag: tag.into(),
                referenced_task_tag: key.short().into(),
                ref_cmd_sn: ref_cmd_sn.into(),
                ..self.numbers(connection).task_management(function, self.lun)
            };
            return self.ask(
                connection,
                PendingFunction { function, task: Some(key), tag, cid, ..PendingFunction::NONE },
                &request,
            );
        }
    }

    /// The target has answered a task management request; whether it was one of these. A task that
    /// it does not know has been answered before, or never came.
    pub(super) fn on_managed(
        &mut self,
        connection: &mut InitiatorConnection,
        response: &TaskManagementResponse,
    ) -> bool {
        let (cid, tag) = (connection.cid, response.initiator_task_tag.get());
        let response = FunctionResponse(response.response);
        let Some(asked) = self.aborts.asked.as_mut().filter(|asked| (asked.cid, asked.tag) == (cid, tag))
        else {
            let place = self.aborts.given_up.iter().position(|given_up| *given_up == (cid, tag));
            return place.and_then(|place| self.aborts.given_up.remove(place)).is_some();
        };
        let is_done = match asked.task {
            Some(_) => matches!(
                response,
                FunctionResponse::FUNCTION_COMPLETE | FunctionResponse::TASK_DOES_NOT_EXIST
            ),
            None => response == FunctionResponse::FUNCTION_COMPLETE,
        };
        if self.queue.unit().is_none() {
            self.aborts.answer = Some(response);
        } else if !is_done {
            asked.is_refused = true;
            return true;
        }
        match asked.task {
            Some(key) => self.end_aborted(connection, key),
            None => self.aborts.is_reset = true,
        }
        self.aborts.asked = None;
        true
    }

    /// Hands back what was under way.
    #[cold]
    fn end_reset(&mut self, connections: &mut [InitiatorConnection]) {
        self.aborts.is_reset = false;
        for connection in connections {
            for key in self.queue.keys_of(|progress| progress.cid == connection.cid) {
                self.end_aborted(connection, key);
            }
        }
    }

    /// A connection is gone, and with it what was asked for there.
    pub(super) fn forget_aborts(&mut self, connection: &InitiatorConnection) {
        if self.aborts.asked.as_ref().is_some_and(|asked| asked.cid == connection.cid) {
            self.aborts.asked = None;
        }
        self.aborts.given_up.retain(|(cid, _)| *cid != connection.cid);
    }

    /// The target has given up a command: its I/O is handed back, over RDMA once the target cannot
    /// reach its memory any more.
    fn end_aborted(&mut self, connection: &mut InitiatorConnection, key: SlotKey) {
        let Some((progress, _)) = self.queue.transport(key) else { return };
        match (progress.exposure, &mut connection.mover) {
            // Its response has come, and ends it.
            (Exposure::Closing, _) => {}
            // The target says so of a command that it was not sent, which goes its way.
            (_, Some(mover)) if mover.is_unsent(key) => {}
            (Exposure::Open(stag), Some(mover)) => {
                progress.exposure = Exposure::Closing;
                mover.close(stag, AfterClose::Abort(key));
            }
            _ => {
                connection.in_flight = connection.in_flight.saturating_sub(1);
                self.queue.abort(key);
            }
        }
    }

    /// Ends commands whose memory has been closed since.
    #[inline]
    pub(super) fn end_closed(&mut self, connection: &mut InitiatorConnection) -> Result<bool, ProtocolError> {
        let mut has_any = false;
        while let Some(then) = connection.mover.as_mut().and_then(|mover| mover.next_closed()) {
            has_any = true;
            match then {
                AfterClose::Respond { bhs, data } => {
                    let response: &ScsiResponse = transmute_ref!(&bhs);
                    self.on_response(connection, response, &data)?;
                }
                AfterClose::Abort(key) => {
                    if let Some((progress, _)) = self.queue.transport(key) {
                        progress.exposure = Exposure::None;
                        self.end_aborted(connection, key);
                    }
                }
            }
        }
        Ok(has_any)
    }
}

impl PendingFunction {
    const NONE: PendingFunction = PendingFunction {
        function: Function::ABORT_TASK,
        task: None,
        tag: RESERVED_TAG,
        cid: 0,
        is_seen: false,
        is_refused: false,
    };
}

/// Of the request for a function that is about no single task.
fn tag_of(function: Function) -> u32 {
    MANAGE_TAG | u32::from(function.0)
}

/// The most requests that were given up on and may still be answered.
const MAX_GIVEN_UP: usize = 16;
