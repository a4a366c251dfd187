//! Commands whose answers do not come, and that the target is made to give up.
//!
//! Nothing is known then of what such a command has done. Its I/O is handed back when no other command of it is under way
//! any more, and whoever gets it may do all of it again.

use super::queue::{Command, Queue};
use crate::slots::Key;
use blockmux_volume::IoError;

impl<T: Default> Queue<T> {
    /// The commands that the last so many looks have found too long under way, oldest first. None of them, if one is a
    /// command of the queue's own: that belongs to no I/O that could be done again.
    pub(crate) fn overdue(&mut self, looks: u32) -> Vec<Key> {
        let overdue = self.commands.overdue(looks, Command::is_long);
        let is_ours =
            |key: &Key| self.commands.get_mut(*key).is_none_or(|command| command.piece.job.is_none());
        if overdue.iter().any(is_ours) { Vec::new() } else { overdue }
    }

    /// Whether a command of the queue's own is under way.
    pub(crate) fn has_own(&self) -> bool {
        !self.commands.keys_of(|command| command.piece.job.is_none()).is_empty()
    }

    /// The target has given up a command: it sends nothing for it any more.
    pub(crate) fn abort(&mut self, key: Key) {
        let Some(Command { piece, .. }) = self.commands.remove(key) else { return };
        let Some(key) = piece.job else { return };
        if let Some(job) = self.jobs.get_mut(key) {
            job.is_aborted = true;
            job.fail(IoError::PathLost);
        }
        self.end_piece(key);
    }
}
