//! Task management, for commands whose responses do not come (SRP_TSK_MGMT, SRP r16a §6.6).
//!
//! ```text
//!   ABORT TASK ──▶ LOGICAL UNIT RESET ──▶ another session
//! ```
//! Such commands are aborted one after the other, oldest first, each on its channel. Until the
//! target has answered, a command keeps its tag and its memory, and its response is taken: it may
//! still end by itself. With the answer the target has done with it; its memory is closed, and its
//! I/O is handed back. A target that refuses, or does not answer this either, is asked to reset the
//! logical unit. A reset ends whatever it finds, also what others have under way (SAM-5 §6.3.3): no
//! command is sent until it is answered, and all that were under way come back then. After that the
//! driver gives the session up.

use super::channel::{AfterClose, Channel, Exposure};
use super::response::function_code;
use super::{Ending, InitiatorSession, Mode, violation};
use crate::session::ProtocolError;
use crate::slots::SlotKey;
use blockmux_volume::Seg;
use blockmux_wire::srp::{
    ResponseCode, SrpOpcode, SrpResponse, TaskManagementFunction, TaskManagementRequest,
};
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// What the target is asked to give up.
#[derive(Default)]
pub(super) struct Aborts {
    /// Commands to be aborted, oldest first; not more than there are commands.
    tasks: VecDeque<SlotKey>,
    /// What the target was asked for last.
    asked: Option<PendingFunction>,
    /// Channels and tags of functions that were given up on; at most [`MAX_GIVEN_UP`].
    given_up: VecDeque<(usize, u64)>,
    /// How many functions there were.
    count: u64,
    /// The channel by which a reset was answered: all commands are to come back.
    reset_by: Option<usize>,
    /// How the only function of a session was answered.
    answer: Option<ResponseCode>,
}

/// A function under way.
struct PendingFunction {
    function: TaskManagementFunction,
    /// The command to be aborted.
    task: Option<SlotKey>,
    tag: u64,
    /// The number of its channel.
    channel: usize,
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

    /// How the only function of a session was answered, once it is.
    pub(super) fn answer(&self) -> Option<ResponseCode> {
        self.answer
    }
}

impl InitiatorSession {
    /// As [`Overdue::tick`](crate::session::Overdue::tick). A function that a second look finds
    /// unanswered is overdue beyond doubt.
    pub(super) fn look_for_overdue(&mut self) -> u32 {
        let seen = self.queue.tick();
        let Some(asked) = &mut self.aborts.asked else { return seen };
        let was_seen = std::mem::replace(&mut asked.is_seen, true);
        if was_seen || asked.is_refused { u32::MAX } else { seen }
    }

    /// As [`Overdue::abort_overdue`](crate::session::Overdue::abort_overdue), just after a look.
    pub(super) fn ask_to_abort(&mut self, looks: u32) -> Option<&'static str> {
        if self.ending == Ending::Over {
            return None;
        }
        match self.aborts.asked.take() {
            None => {
                self.aborts.tasks = self.queue.overdue(looks).into();
                self.abort_next();
            }
            Some(unanswered) => self.escalate(&unanswered),
        }
        let asked = self.aborts.asked.as_mut()?;
        asked.is_seen = true;
        Some(match asked.function {
            TaskManagementFunction::ABORT_TASK => "to abort what it owes",
            _ => "to reset the logical unit",
        })
    }

    /// Takes the next step after a function that was refused or not answered. A command of the
    /// queue's own belongs to no I/O that could be done again, so that none of those may be under
    /// way.
    fn escalate(&mut self, unanswered: &PendingFunction) {
        self.aborts.tasks.clear();
        if !unanswered.is_refused {
            if self.aborts.given_up.len() == MAX_GIVEN_UP {
                self.aborts.given_up.pop_front();
            }
            self.aborts.given_up.push_back((unanswered.channel, unanswered.tag));
        }
        if unanswered.task.is_some() && !self.queue.has_internal() {
            self.manage(TaskManagementFunction::LOGICAL_UNIT_RESET);
        }
    }

    /// Asks for a function that is about no single task.
    pub(super) fn manage(&mut self, function: TaskManagementFunction) {
        if let Some(index) = self.channels.iter().position(Channel::has_credit) {
            self.ask(index, function, None);
        }
    }

    fn ask(&mut self, index: usize, function: TaskManagementFunction, task: Option<SlotKey>) {
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
        let asked =
            PendingFunction { function, task, tag, channel: index, is_seen: false, is_refused: false };
        self.aborts.asked = Some(asked);
    }

    /// Goes on with a reset that was answered, and with commands that are to be aborted.
    #[inline]
    pub(super) fn advance_aborts(&mut self) {
        if let Some(by) = self.aborts.reset_by.take() {
            for key in self.queue.keys_of(|_| true) {
                self.end_aborted(key, by);
            }
        }
        if self.aborts.asked.is_none() && !self.aborts.tasks.is_empty() && self.ending != Ending::Over {
            self.abort_next();
        }
    }

    /// Has the next command aborted that was sent and has not ended by itself.
    #[cold]
    fn abort_next(&mut self) {
        while let Some(key) = self.aborts.tasks.pop_front() {
            let Some((state, _)) = self.queue.transport(key) else { continue };
            let (index, is_sent) = (state.channel, matches!(state.exposure, Exposure::Sent(_)));
            if is_sent && self.channels.get(index).is_some_and(Channel::has_credit) {
                return self.ask(index, TaskManagementFunction::ABORT_TASK, Some(key));
            }
        }
    }

    /// The target has answered a function.
    pub(super) fn on_managed(
        &mut self,
        index: usize,
        response: &SrpResponse,
        message: &Seg,
    ) -> Result<(), ProtocolError> {
        let (tag, code) = (response.tag.get(), function_code(response, message)?);
        let Some(asked) =
            self.aborts.asked.as_mut().filter(|asked| (asked.channel, asked.tag) == (index, tag))
        else {
            let place = self.aborts.given_up.iter().position(|given_up| *given_up == (index, tag));
            let found = place.and_then(|place| self.aborts.given_up.remove(place));
            let error = violation("answered a task management function that is not there");
            return found.map(|_| ()).ok_or(error);
        };
        if matches!(self.config.mode, Mode::Manage(_)) {
            self.aborts.answer = Some(code);
            self.aborts.asked = None;
            return Ok(());
        }
        // Linux's target answers that it has failed where a task has ended by itself.
        let has_ended = asked.task.is_some_and(|task| self.queue.transport(task).is_none());
        if code != ResponseCode::NO_FAILURE && !has_ended {
            asked.is_refused = true;
            return Ok(());
        }
        match asked.task {
            Some(task) => self.end_aborted(task, index),
            None => self.aborts.reset_by = Some(index),
        }
        self.aborts.asked = None;
        Ok(())
    }

    /// The target has given up a command, as it said on channel `by`: its I/O is handed back once
    /// the target cannot reach its memory any more.
    fn end_aborted(&mut self, key: SlotKey, by: usize) {
        let Some((state, _)) = self.queue.transport(key) else { return };
        let Some(channel) = self.channels.get_mut(state.channel) else { return };
        let Exposure::Sent(stag) = state.exposure else {
            // It was not sent and goes its way, or its response has come and ends it.
            return;
        };
        if state.channel != by {
            // Its response may be on its way by its own channel.
            channel.stale = channel.stale.saturating_add(1);
        }
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

/// Whether this is the tag of a function.
#[inline]
pub(super) fn is_function(tag: u64) -> bool {
    tag & FUNCTION_TAG != 0
}

/// In the tag of each function; those of commands are below.
const FUNCTION_TAG: u64 = 1 << 32;

/// The most functions that were given up on and may still be answered.
const MAX_GIVEN_UP: usize = 16;
