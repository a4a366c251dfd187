//! The order in which an initiator's session ends commands without a response.
//!
//! ```text
//!   overdue commands ─▶ ABORT TASK for each ─▶ a reset ─▶ ... ─▶ the driver ends the session
//! ```
//! One task management function is outstanding at a time. Each tick of the driver without an
//! answer, or after a refusal, is one step further; which reset comes next is up to the transport.
//! A late answer to an abandoned function is recognized and ignored. The transport sends functions
//! and returns the I/O of aborted commands; this module knows their order.

use crate::slots::SlotKey;
use std::collections::VecDeque;

/// The commands to abort, and the task management function in progress. `F` is the transport's type
/// of a function, `R` that of a response.
pub(crate) struct AbortLadder<F, R> {
    /// Commands to abort, oldest first; at most as many as there are commands.
    pub(crate) tasks: VecDeque<SlotKey>,
    /// The function that was sent last and is unanswered or refused.
    pending: Option<PendingFunction<F>>,
    /// Abandoned functions, which may still be answered; at most [`MAX_ABANDONED`].
    abandoned: VecDeque<FunctionTag>,
    /// A reset was answered, and all commands have to be returned.
    is_reset: bool,
    /// The response to the latest function. A session that sends only one function ends with it.
    pub(crate) response: Option<R>,
}

/// Identifies a function of a session: the connection or channel that it was sent on, and its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FunctionTag {
    pub(crate) connection: usize,
    pub(crate) tag: u64,
}

struct PendingFunction<F> {
    function: F,
    /// The command to abort; `None` for functions that name no task.
    task: Option<SlotKey>,
    tag: FunctionTag,
    /// A tick has passed since it was sent.
    has_ticked: bool,
    is_refused: bool,
}

/// The next step after a tick with overdue commands.
pub(crate) enum AbortStep<F> {
    /// Abort the commands of [`AbortLadder::tasks`].
    AbortTasks,
    /// This function was refused, or not answered in time.
    Escalate(F),
}

/// Effect of a response.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FunctionEnd {
    /// The command was aborted.
    Aborted(SlotKey),
    /// All commands are returned by [`AbortLadder::take_reset`].
    Reset,
    /// The next tick escalates.
    Refused,
    /// The function was abandoned before.
    Late,
}

impl<F: Copy, R: Copy> AbortLadder<F, R> {
    /// Whether no commands may be sent, because an unanswered reset may or may not end them.
    #[inline]
    pub(crate) fn holds_commands(&self) -> bool {
        self.pending.as_ref().is_some_and(|pending| pending.task.is_none())
    }

    /// Implements [`Overdue::tick`](crate::driver::session::Overdue::tick), for commands that the
    /// queue has
    /// `seen` in that many ticks. A function that is unanswered at its second tick is overdue
    /// regardless of the limit.
    pub(crate) fn tick(&mut self, seen: u32) -> u32 {
        let Some(pending) = &mut self.pending else { return seen };
        let was_seen = std::mem::replace(&mut pending.has_ticked, true);
        if was_seen || pending.is_refused { u32::MAX } else { seen }
    }

    /// Begins the next step. `overdue` returns the overdue commands, oldest first.
    pub(crate) fn step(&mut self, overdue: impl FnOnce() -> Vec<SlotKey>) -> AbortStep<F> {
        let Some(unanswered) = self.pending.take() else {
            self.tasks = overdue().into();
            return AbortStep::AbortTasks;
        };
        self.tasks.clear();
        if !unanswered.is_refused {
            if self.abandoned.len() == MAX_ABANDONED {
                self.abandoned.pop_front();
            }
            self.abandoned.push_back(unanswered.tag);
        }
        AbortStep::Escalate(unanswered.function)
    }

    /// The function that this tick has sent, if it has sent one.
    pub(crate) fn sent_in_tick(&mut self) -> Option<F> {
        let pending = self.pending.as_mut()?;
        pending.has_ticked = true;
        Some(pending.function)
    }

    /// Whether an abandoned function with this tag may still be answered.
    pub(crate) fn is_abandoned(&self, tag: u64) -> bool {
        self.abandoned.iter().any(|abandoned| abandoned.tag == tag)
    }

    /// Whether the next command can be aborted now.
    #[inline]
    pub(crate) fn has_next_task(&self) -> bool {
        self.pending.is_none() && !self.tasks.is_empty()
    }

    /// A function was sent, which aborts `task` or names no task.
    pub(crate) fn on_sent(&mut self, function: F, task: Option<SlotKey>, tag: FunctionTag) {
        self.pending = Some(PendingFunction { function, task, tag, has_ticked: false, is_refused: false });
    }

    /// Handles a response; `None` if it answers no function. `is_done` is asked whether the
    /// response means that the task has ended, or the reset has.
    pub(crate) fn on_response(
        &mut self,
        tag: FunctionTag,
        response: R,
        is_done: impl FnOnce(Option<SlotKey>) -> bool,
    ) -> Option<FunctionEnd> {
        let Some(pending) = self.pending.as_mut().filter(|pending| pending.tag == tag) else {
            let place = self.abandoned.iter().position(|abandoned| *abandoned == tag)?;
            return self.abandoned.remove(place).map(|_| FunctionEnd::Late);
        };
        self.response = Some(response);
        if !is_done(pending.task) {
            pending.is_refused = true;
            return Some(FunctionEnd::Refused);
        }
        let task = pending.task;
        self.pending = None;
        self.is_reset |= task.is_none();
        Some(task.map_or(FunctionEnd::Reset, FunctionEnd::Aborted))
    }

    /// Whether a reset was answered since the last call.
    #[inline]
    pub(crate) fn take_reset(&mut self) -> bool {
        std::mem::take(&mut self.is_reset)
    }

    /// Drops the functions of a connection that has ended.
    pub(crate) fn forget(&mut self, connection: usize) {
        self.pending = self.pending.take().filter(|pending| pending.tag.connection != connection);
        self.abandoned.retain(|abandoned| abandoned.connection != connection);
    }
}

impl<F, R> Default for AbortLadder<F, R> {
    fn default() -> AbortLadder<F, R> {
        AbortLadder {
            tasks: VecDeque::new(),
            pending: None,
            abandoned: VecDeque::new(),
            is_reset: false,
            response: None,
        }
    }
}

/// Maximum number of abandoned functions that may still be answered.
const MAX_ABANDONED: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slots::Slots;

    fn tag(tag: u64) -> FunctionTag {
        FunctionTag { connection: 0, tag }
    }

    fn keys(count: usize) -> Vec<SlotKey> {
        let mut slots = Slots::default();
        (0..count).map(|_| slots.insert(())).collect()
    }

    #[test]
    fn each_unanswered_function_is_abandoned_and_its_late_answer_ignored_once() {
        let mut ladder: AbortLadder<&str, u8> = AbortLadder::default();
        let all = keys(2);
        assert!(matches!(ladder.step(|| all.clone()), AbortStep::AbortTasks));
        ladder.on_sent("abort", ladder.tasks.front().copied(), tag(1));
        assert_eq!(ladder.sent_in_tick(), Some("abort"));
        assert!(!ladder.holds_commands());
        assert_eq!(ladder.tick(0), u32::MAX, "the second tick");
        assert!(matches!(ladder.step(Vec::new), AbortStep::Escalate("abort")));
        assert_eq!((ladder.tasks.pop_front(), ladder.is_abandoned(1)), (None, true));
        ladder.on_sent("reset", None, tag(2));
        assert!(ladder.holds_commands());
        assert_eq!(ladder.on_response(tag(1), 0, |_| true), Some(FunctionEnd::Late));
        assert_eq!(ladder.on_response(tag(1), 0, |_| true), None);
        assert_eq!(ladder.on_response(tag(2), 0, |_| true), Some(FunctionEnd::Reset));
        assert_eq!((ladder.take_reset(), ladder.take_reset()), (true, false));
    }

    #[test]
    fn a_refusal_escalates_at_the_next_tick_and_is_not_awaited() {
        let mut ladder: AbortLadder<&str, u8> = AbortLadder::default();
        let task = keys(1).first().copied();
        ladder.on_sent("abort", task, tag(1));
        assert_eq!(ladder.on_response(tag(1), 5, |_| false), Some(FunctionEnd::Refused));
        assert_eq!((ladder.response, ladder.tick(0)), (Some(5), u32::MAX));
        assert!(matches!(ladder.step(Vec::new), AbortStep::Escalate("abort")));
        assert!(!ladder.is_abandoned(1));
    }

    #[test]
    fn functions_of_an_ended_connection_are_dropped() {
        let mut ladder: AbortLadder<&str, u8> = AbortLadder::default();
        ladder.on_sent("abort", None, tag(1));
        let AbortStep::Escalate(_) = ladder.step(Vec::new) else { panic!("nothing was pending") };
        ladder.on_sent("reset", None, FunctionTag { connection: 1, tag: 2 });
        ladder.forget(0);
        assert!(ladder.holds_commands() && !ladder.is_abandoned(1));
        ladder.forget(1);
        assert!(!ladder.holds_commands());
    }
}
