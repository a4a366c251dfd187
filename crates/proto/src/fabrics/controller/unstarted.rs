//! Commands that have not begun: in which order they begin, or have their data fetched.

use super::commands::CommandTable;
use std::collections::VecDeque;

/// Slots of commands, oldest first, but that commands without data do not wait for others' data.
pub(super) struct Unstarted {
    waiting: VecDeque<usize>,
    /// Their data is not asked for until that of others is here.
    unasked: VecDeque<usize>,
    /// The most data that is asked for at a time, in bytes, beside that of [`ASKED_COMMANDS`].
    pub(super) most_asked: usize,
}

impl Default for Unstarted {
    fn default() -> Unstarted {
        Unstarted { waiting: VecDeque::new(), unasked: VecDeque::new(), most_asked: usize::MAX }
    }
}

impl Unstarted {
    #[inline]
    pub(super) fn push(&mut self, slot: usize) {
        self.waiting.push_back(slot);
    }

    /// Whether a command without data that comes now is the next to begin.
    #[inline]
    pub(super) fn holds_nobody_up(&self) -> bool {
        self.waiting.is_empty()
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.unasked.is_empty()
    }

    #[inline]
    pub(super) fn has_unasked(&self) -> bool {
        !self.unasked.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.unasked.clear();
    }

    /// Whose turn it is; `None` if all wait for data that was asked for.
    #[inline]
    pub(super) fn next<P>(&mut self, commands: &mut CommandTable<P>) -> Option<usize> {
        if let Some(&slot) = self.unasked.front()
            && self.may_ask(slot, commands)
        {
            return Some(slot);
        }
        loop {
            let &slot = self.waiting.front()?;
            // The second half of what is begun waits for no others.
            let has_data = commands.get_mut(slot).is_some_and(|it| it.data_out > 0 && it.half.is_none());
            if !has_data || self.unasked.is_empty() && self.may_ask(slot, commands) {
                return Some(slot);
            }
            self.waiting.pop_front();
            self.unasked.push_back(slot);
        }
    }

    /// Takes out that slot, whose turn it was.
    #[inline]
    pub(super) fn remove(&mut self, slot: usize) {
        let queue = if self.unasked.front() == Some(&slot) { &mut self.unasked } else { &mut self.waiting };
        queue.pop_front();
    }

    /// Whether enough of what was asked for is here that a command's data may be asked for.
    fn may_ask<P>(&self, slot: usize, commands: &mut CommandTable<P>) -> bool {
        let asked = commands.asked;
        let Some(entry) = commands.get_mut(slot) else { return true };
        asked.saturating_add(entry.data_out) <= self.most_asked
            || asked < entry.data_out.saturating_mul(ASKED_COMMANDS)
    }
}

/// So many commands' data is asked for whatever its length: one's is received while the next one's
/// is on its way.
const ASKED_COMMANDS: usize = 3;
