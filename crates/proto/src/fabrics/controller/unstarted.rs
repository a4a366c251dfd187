//! Commands that have not begun: in which order they begin, or have their data fetched.

use super::commands::CommandTable;
use std::collections::VecDeque;

/// Slots of commands, oldest first, but that commands without data do not wait for others' data.
pub(super) struct UnstartedCommands {
    waiting: VecDeque<usize>,
    /// Their data is not asked for until that of others is here.
    unfetched: VecDeque<usize>,
    /// The most data that is asked for at a time, in bytes, beside that of [`MIN_FETCHES`].
    pub(super) max_fetching: usize,
}

impl Default for UnstartedCommands {
    fn default() -> UnstartedCommands {
        UnstartedCommands { waiting: VecDeque::new(), unfetched: VecDeque::new(), max_fetching: usize::MAX }
    }
}

impl UnstartedCommands {
    #[inline]
    pub(super) fn push(&mut self, slot: usize) {
        self.waiting.push_back(slot);
    }

    /// Whether a command without data that comes now is the next to begin.
    #[inline]
    pub(super) fn is_empty_of_waiting(&self) -> bool {
        self.waiting.is_empty()
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.unfetched.is_empty()
    }

    #[inline]
    pub(super) fn has_unfetched(&self) -> bool {
        !self.unfetched.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.unfetched.clear();
    }

    /// Whose turn it is; `None` if all wait for data that was asked for.
    #[inline]
    pub(super) fn next<P>(&mut self, commands: &mut CommandTable<P>) -> Option<usize> {
        if let Some(&slot) = self.unfetched.front()
            && self.may_fetch(slot, commands)
        {
            return Some(slot);
        }
        loop {
            let &slot = self.waiting.front()?;
            // The second half of what is begun waits for no others.
            let has_data = commands.get_mut(slot).is_some_and(|it| it.data_out > 0 && it.half.is_none());
            if !has_data || self.unfetched.is_empty() && self.may_fetch(slot, commands) {
                return Some(slot);
            }
            self.waiting.pop_front();
            self.unfetched.push_back(slot);
        }
    }

    /// Takes out that slot, whose turn it was.
    #[inline]
    pub(super) fn remove(&mut self, slot: usize) {
        let queue =
            if self.unfetched.front() == Some(&slot) { &mut self.unfetched } else { &mut self.waiting };
        queue.pop_front();
    }

    /// Whether enough of what was asked for is here that a command's data may be asked for.
    fn may_fetch<P>(&self, slot: usize, commands: &mut CommandTable<P>) -> bool {
        let asked = commands.fetching;
        let Some(entry) = commands.get_mut(slot) else { return true };
        asked.saturating_add(entry.data_out) <= self.max_fetching
            || asked < entry.data_out.saturating_mul(MIN_FETCHES)
    }
}

/// So many commands' data is asked for whatever its length: one's is received while the next one's
/// is on its way.
const MIN_FETCHES: usize = 3;
