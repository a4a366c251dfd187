//! The order in which waiting commands begin or have their data fetched.

use super::commands::CommandTable;
use std::collections::VecDeque;

/// Slots of waiting commands, oldest first; commands without data pass those that wait for data of
/// others.
pub(super) struct UnstartedCommands {
    waiting: VecDeque<usize>,
    /// Commands whose data is not fetched before data of earlier commands has arrived.
    unfetched: VecDeque<usize>,
    /// Most data that is fetched at a time, in bytes; [`MIN_FETCHES`] commands are fetched in any
    /// case.
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

    /// Whether a new command without data would be the next to begin.
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

    /// The slot of the next command to begin or to fetch; `None` if all wait for data that is being
    /// fetched.
    #[inline]
    pub(super) fn next<T>(&mut self, commands: &mut CommandTable<T>) -> Option<usize> {
        if let Some(&slot) = self.unfetched.front()
            && self.may_fetch(slot, commands)
        {
            return Some(slot);
        }
        loop {
            let &slot = self.waiting.front()?;
            // The second half of a begun operation does not wait.
            let has_data = commands.get_mut(slot).is_some_and(|it| it.data_out > 0 && it.half.is_none());
            if !has_data || self.unfetched.is_empty() && self.may_fetch(slot, commands) {
                return Some(slot);
            }
            self.waiting.pop_front();
            self.unfetched.push_back(slot);
        }
    }

    /// Removes the slot that [`UnstartedCommands::next`] returned.
    #[inline]
    pub(super) fn remove(&mut self, slot: usize) {
        let queue =
            if self.unfetched.front() == Some(&slot) { &mut self.unfetched } else { &mut self.waiting };
        queue.pop_front();
    }

    /// Whether so little data is being fetched that this command's may be fetched too.
    fn may_fetch<T>(&self, slot: usize, commands: &mut CommandTable<T>) -> bool {
        let asked = commands.fetching;
        let Some(entry) = commands.get_mut(slot) else { return true };
        asked.saturating_add(entry.data_out) <= self.max_fetching
            || asked < entry.data_out.saturating_mul(MIN_FETCHES)
    }
}

/// Number of commands whose data is fetched at a time regardless of its length, so that one arrives
/// while the next is in transit.
const MIN_FETCHES: usize = 3;
