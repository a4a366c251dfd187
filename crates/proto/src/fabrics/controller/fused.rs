//! Fused operations: two consecutive commands that are executed as one (Base 2.0 §3.4.2).
//!
//! The first command waits for the second, and the one whose data arrives first waits for the
//! other's. A half without its partner ends with a status that says so, and has no effect.

use super::ControllerQueue;
use super::commands::{CommandState, CommandWork};
use super::transport::FabricsTransport;
use crate::nvme::NvmeOutcome;
use blockmux_volume::SgList;
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{Fuse, Sqe};

/// State of a fused operation after the last command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FusedState {
    /// No fused operation is in progress.
    None,
    /// The last command was a first half, in this slot; the next command has to be the second.
    First(usize),
    /// The last command was a first half that has ended already.
    Failed,
}

/// Half of a fused operation.
pub(super) struct FusedHalf {
    /// Slot of the other half.
    partner: Option<usize>,
    /// The command's data, once it is complete.
    data: Option<SgList>,
}

impl<T: FabricsTransport> ControllerQueue<T> {
    /// Returns the slot of the first half if this command is the second one. If it is not, ends a
    /// pending first half.
    ///
    /// # Errors
    /// If this is a second half without a first, or its first has failed.
    pub(super) fn first_half(&mut self, sqe: &Sqe) -> Result<Option<usize>, NvmeStatus> {
        let before = std::mem::replace(&mut self.fusing, FusedState::None);
        match (sqe.fuse(), before) {
            (Fuse::SECOND, FusedState::First(first)) => Ok(Some(first)),
            (Fuse::SECOND, FusedState::Failed) => {
                Err(NvmeStatus::COMMAND_ABORTED_DUE_TO_FAILED_FUSED_COMMAND)
            }
            (Fuse::SECOND, FusedState::None) => Err(NvmeStatus::COMMAND_ABORTED_DUE_TO_MISSING_FUSED_COMMAND),
            (Fuse::NORMAL | Fuse::FIRST, FusedState::First(first)) => {
                self.end_half(first, NvmeStatus::COMMAND_ABORTED_DUE_TO_MISSING_FUSED_COMMAND);
                Ok(None)
            }
            (Fuse::NORMAL | Fuse::FIRST, _) => Ok(None),
            _ => Err(NvmeStatus::INVALID_FIELD_IN_COMMAND),
        }
    }

    /// Ends the other half of a command that was not accepted.
    pub(super) fn half_refused(&mut self, sqe: &Sqe, first: Option<usize>) {
        if sqe.fuse() == Fuse::FIRST {
            self.fusing = FusedState::Failed;
        }
        if let Some(first) = first {
            self.end_half(first, NvmeStatus::COMMAND_ABORTED_DUE_TO_FAILED_FUSED_COMMAND);
        }
    }

    /// Links an accepted command with its first half, or marks it as a first half.
    pub(super) fn half_accepted(&mut self, slot: usize, first: Option<usize>) {
        let half = |partner| Some(Box::new(FusedHalf { partner, data: None }));
        if let Some(entry) = self.commands.get_mut(slot) {
            entry.half = half(first);
        }
        match first {
            None => self.fusing = FusedState::First(slot),
            Some(first) => {
                if let Some(half) = self.commands.get_mut(first).and_then(|entry| entry.half.as_mut()) {
                    half.partner = Some(slot);
                }
            }
        }
    }

    /// Ends a pending first half, because no second half will follow.
    pub(super) fn end_fusing(&mut self) {
        if let FusedState::First(first) = std::mem::replace(&mut self.fusing, FusedState::None) {
            self.end_half(first, NvmeStatus::COMMAND_ABORTED_DUE_TO_MISSING_FUSED_COMMAND);
        }
    }

    /// Ends a half: immediately, or once its data has arrived.
    pub(super) fn end_half(&mut self, slot: usize, status: NvmeStatus) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        entry.half = None;
        if entry.state == CommandState::Data {
            entry.abort(status, None);
        } else {
            self.finish(slot, NvmeOutcome::failure(status));
        }
    }

    /// The slot that has the I/O of a command: of both halves of a fused operation the second, once
    /// it has begun.
    pub(super) fn slot_of_io(&mut self, slot: usize) -> Option<usize> {
        let entry = self.commands.get_mut(slot)?;
        let Some(half) = &entry.half else { return Some(slot) };
        let second = if entry.sqe.fuse() == Fuse::SECOND { slot } else { half.partner? };
        let state = self.commands.get_mut(second)?.state;
        matches!(state, CommandState::Io | CommandState::Other).then_some(second)
    }

    /// Stores the data of one half, and begins the operation once both halves have theirs.
    pub(super) fn on_half(&mut self, slot: usize, data: SgList) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        entry.state = CommandState::Fused;
        let is_first = entry.sqe.fuse() == Fuse::FIRST;
        let Some(half) = &mut entry.half else { return };
        half.data = Some(data);
        let Some(partner) = half.partner else { return };
        let (first, second) = if is_first { (slot, partner) } else { (partner, slot) };
        let has_data = |queue: &mut ControllerQueue<T>, slot| {
            let entry = queue.commands.get_mut(slot);
            entry.and_then(|entry| entry.half.as_ref()).is_some_and(|half| half.data.is_some())
        };
        if !has_data(self, first) || !has_data(self, second) {
            return;
        }
        let (expected, data) = (self.take_data(first), self.take_data(second));
        let Some(entry) = self.commands.get_mut(second) else { return };
        if let CommandWork::Io(command) = &mut entry.work {
            let step = command.begin_fused(expected, data);
            self.go_on(second, step);
        }
    }

    fn take_data(&mut self, slot: usize) -> SgList {
        let half = self.commands.get_mut(slot).and_then(|entry| entry.half.as_mut());
        half.and_then(|half| half.data.take()).unwrap_or_default()
    }

    /// Ends a half. If it is the second and was begun, both halves end.
    pub(super) fn half_finished(&mut self, slot: usize, half: &FusedHalf, outcome: NvmeOutcome) {
        let Some(partner) = half.partner else {
            if self.fusing == FusedState::First(slot) {
                self.fusing = FusedState::Failed;
            }
            return self.finish(slot, outcome);
        };
        let begun = self.commands.get_mut(slot).filter(|entry| entry.state != CommandState::Data);
        let both = begun.and_then(|entry| match &entry.work {
            CommandWork::Io(command) if entry.sqe.fuse() == Fuse::SECOND => Some(command),
            _ => None,
        });
        let Some(command) = both else {
            self.finish(slot, outcome);
            return self.end_half(partner, NvmeStatus::COMMAND_ABORTED_DUE_TO_FAILED_FUSED_COMMAND);
        };
        let (first, second) = command.fused_outcomes(&outcome);
        if let Some(entry) = self.commands.get_mut(partner) {
            entry.half = None;
        }
        self.finish(partner, first);
        self.finish(slot, second);
    }
}
