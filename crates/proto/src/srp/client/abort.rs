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

use super::channel::{AfterClose, Channel, Exposure};
use super::response::function_code;
use super::{Ending, SrpInitiatorSession, SrpSessionMode, violation};
use crate::session::{Overdue, ProtocolError};
use crate::slots::SlotKey;
use blockmux_volume::Seg;
use blockmux_wire::srp::{
    ResponseCode, SrpOpcode, SrpResponse, TaskManagementFunction, TaskManagementRequest,
};
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// Task management of a session: the commands to abort, and the function in progress.
#[derive(Default)]
pub(super) struct SrpAbortQueue {
    /// Commands to abort, oldest first; at most as many as there are commands.
    tasks: VecDeque<SlotKey>,
    /// The function that was sent last and has no answer yet.
    pending: Option<SrpPendingFunction>,
    /// Channels and tags of abandoned functions, whose answers may still come; at most
    /// [`MAX_ABANDONED`].
    abandoned: VecDeque<(usize, u64)>,
    /// Number of functions sent so far; the tags of functions derive from it.
    count: u64,
    /// Whether a reset was answered, and all commands have to be returned.
    is_reset: bool,
    /// The answer to the only function of a
    /// [`SrpSessionMode::Manage`](super::SrpSessionMode::Manage) session.
    answer: Option<ResponseCode>,
}

/// A task management function without an answer yet.
struct SrpPendingFunction {
    function: TaskManagementFunction,
    /// The command to abort; `None` for functions that name no task.
    task: Option<SlotKey>,
    tag: u64,
    /// Index of the channel that it was sent on.
    channel: usize,
    /// Whether a tick has passed since it was sent.
    has_ticked: bool,
    is_refused: bool,
}

impl SrpAbortQueue {
    /// Whether no commands may be sent, because a reset is pending and may or may not end them.
    #[inline]
    pub(super) fn holds_commands(&self) -> bool {
        self.pending.as_ref().is_some_and(|pending| pending.task.is_none())
    }

    /// The answer to the only function of a session; `None` until it arrives.
    pub(super) fn answer(&self) -> Option<ResponseCode> {
        self.answer
    }
}

impl Overdue for SrpInitiatorSession {
    /// A task management function that is still unanswered at its second tick is overdue.
    fn tick(&mut self) -> u32 {
        let seen = self.queue.tick();
        let Some(pending) = &mut self.aborts.pending else { return seen };
        let was_seen = std::mem::replace(&mut pending.has_ticked, true);
        if was_seen || pending.is_refused { u32::MAX } else { seen }
    }

    fn abort_overdue(&mut self, ticks: u32) -> Option<&'static str> {
        if self.ending == Ending::Over {
            return None;
        }
        match self.aborts.pending.take() {
            None => {
                self.aborts.tasks = self.queue.overdue(ticks).into();
                self.abort_next();
            }
            Some(unanswered) => self.escalate(&unanswered),
        }
        let pending = self.aborts.pending.as_mut()?;
        pending.has_ticked = true;
        Some(match pending.function {
            TaskManagementFunction::ABORT_TASK => "to abort pending commands",
            _ => "to reset the logical unit",
        })
    }
}

impl SrpInitiatorSession {
    /// Escalates from ABORT TASK to LOGICAL UNIT RESET, after a function that was refused or not
    /// answered. There is no reset while the queue's own commands are in flight, because they
    /// belong to no I/O that could be repeated, and none of a session with several channels.
    fn escalate(&mut self, unanswered: &SrpPendingFunction) {
        self.aborts.tasks.clear();
        if !unanswered.is_refused {
            if self.aborts.abandoned.len() == MAX_ABANDONED {
                self.aborts.abandoned.pop_front();
            }
            self.aborts.abandoned.push_back((unanswered.channel, unanswered.tag));
        }
        let is_ordered = self.channels.iter().filter(|channel| channel.was_open()).count() == 1;
        if unanswered.task.is_some() && is_ordered && !self.queue.has_internal() {
            self.manage(TaskManagementFunction::LOGICAL_UNIT_RESET);
        }
    }

    /// Sends a function that names no single task.
    pub(super) fn manage(&mut self, function: TaskManagementFunction) {
        if let Some(index) = self.channels.iter().position(Channel::has_credit) {
            self.send_function(index, function, None);
        }
    }

    fn send_function(&mut self, index: usize, function: TaskManagementFunction, task: Option<SlotKey>) {
        let Some(channel) = self.channels.get_mut(index) else { return };
        self.aborts.count = self.aborts.count.wrapping_add(1);
        let tag = FUNCTION_TAG | self.aborts.count & u64::from(u16::MAX);
        let request = TaskManagementRequest {
            opcode: SrpOpcode::TASK_MANAGEMENT.0,
            tag: tag.into(),
            lun: self.config.lun.0.to_be_bytes(),
            tsk_mgmt_func: function.0,
            task_tag: task.map_or(0, |task| u64::from(task.short())).into(),
            ..TaskManagementRequest::default()
        };
        channel.push_request(request.as_bytes());
        let pending =
            SrpPendingFunction { function, task, tag, channel: index, has_ticked: false, is_refused: false };
        self.aborts.pending = Some(pending);
    }

    /// Continues with an answered reset, and with the commands that still have to be aborted.
    #[inline]
    pub(super) fn advance_aborts(&mut self) {
        if std::mem::take(&mut self.aborts.is_reset) {
            for key in self.queue.keys_of(|_| true) {
                self.end_aborted(key);
            }
        }
        if self.aborts.pending.is_none() && !self.aborts.tasks.is_empty() && self.ending != Ending::Over {
            self.abort_next();
        }
    }

    /// Sends ABORT TASK for the next command that was sent and has not completed meanwhile.
    #[cold]
    fn abort_next(&mut self) {
        while let Some(key) = self.aborts.tasks.pop_front() {
            let Some((state, _)) = self.queue.transport(key) else { continue };
            let (index, is_sent) = (state.channel, matches!(state.exposure, Exposure::Sent(_)));
            if is_sent && self.channels.get(index).is_some_and(Channel::has_credit) {
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
        let Some(pending) =
            self.aborts.pending.as_mut().filter(|pending| (pending.channel, pending.tag) == (index, tag))
        else {
            let place = self.aborts.abandoned.iter().position(|abandoned| *abandoned == (index, tag));
            let found = place.and_then(|place| self.aborts.abandoned.remove(place));
            let error = violation("answered a task management function that does not exist");
            return found.map(|_| ()).ok_or(error);
        };
        if matches!(self.config.mode, SrpSessionMode::Manage(_)) {
            self.aborts.answer = Some(code);
            self.aborts.pending = None;
            return Ok(());
        }
        // Linux's target answers FUNCTION FAILED if the task has already completed.
        let has_ended = pending.task.is_some_and(|task| self.queue.transport(task).is_none());
        if code != ResponseCode::NO_FAILURE && !has_ended {
            pending.is_refused = true;
            return Ok(());
        }
        match pending.task {
            Some(task) => self.end_aborted(task),
            None => self.aborts.is_reset = true,
        }
        self.aborts.pending = None;
        Ok(())
    }

    /// Ends a command that the target has aborted. Its I/O is returned once the key of its memory
    /// has been invalidated.
    fn end_aborted(&mut self, key: SlotKey) {
        let Some((state, _)) = self.queue.transport(key) else { return };
        let Some(channel) = self.channels.get_mut(state.channel) else { return };
        let Exposure::Sent(stag) = state.exposure else {
            // The command was not sent yet, or its response has arrived and completes it.
            return;
        };
        match stag {
            Some(stag) => {
                state.exposure = Exposure::Closing;
                channel.close(stag, AfterClose::Abort(key));
            }
            None => {
                channel.end_command();
                self.queue.abort(key);
            }
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

/// Most abandoned functions whose answers are still accepted.
const MAX_ABANDONED: usize = 16;
