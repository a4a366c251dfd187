//! Fused operations: two commands that come one after the other and are done as one (Base 2.0
//! §3.4.2).
//!
//! The first waits for the second, and whoever has its data first waits for the other's. A half
//! without the other ends with a status that says so, and nothing of it was done.

use super::ControllerQueue;
use super::commands::{CommandState, CommandWork};
use super::transport::FabricsTransport;
use crate::nvme::NvmeOutcome;
use blockmux_volume::SgList;
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{Fuse, Sqe};

/// What the last command has said of a fused operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FusedState {
    /// Nothing.
    None,
    /// It was the first, in this slot, and the next command has to be the second.
    First(usize),
    /// It was the first, and is over.
    Failed,
}

/// Half of a fused operation.
pub(super) struct FusedHalf {
    /// The slot of the other.
    partner: Option<usize>,
    /// Once all of it is here.
    data: Option<SgList>,
}

impl<T: FabricsTransport> ControllerQueue<T> {
    /// The slot of the first half that this command is the second of, if it is one; ends the first
    /// if it is not.
    ///
    /// # Errors
    /// If there is no first, or none any more.
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

    /// The command was not accepted: nor is its other half.
    pub(super) fn half_refused(&mut self, sqe: &Sqe, first: Option<usize>) {
        if sqe.fuse() == Fuse::FIRST {
            self.fusing = FusedState::Failed;
        }
        if let Some(first) = first {
            self.end_half(first, NvmeStatus::COMMAND_ABORTED_DUE_TO_FAILED_FUSED_COMMAND);
        }
    }

    /// The command was accepted: finds its other half, or waits for it.
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

    /// No second half will come any more.
    pub(super) fn end_fusing(&mut self) {
        if let FusedState::First(first) = std::mem::replace(&mut self.fusing, FusedState::None) {
            self.end_half(first, NvmeStatus::COMMAND_ABORTED_DUE_TO_MISSING_FUSED_COMMAND);
        }
    }

    /// Ends a half, at once or when its data has come.
    pub(super) fn end_half(&mut self, slot: usize, status: NvmeStatus) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        entry.half = None;
        if entry.state == CommandState::Data {
            entry.abort(status, None);
        } else {
            self.finish(slot, &NvmeOutcome::failure(status));
        }
    }

    /// The data of one half is here: begins if that of the other is, too.
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

    /// A command that is half of something is over. If it is the second, and was begun, both are.
    pub(super) fn half_finished(&mut self, slot: usize, half: &FusedHalf, outcome: &NvmeOutcome) {
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
        let (first, second) = command.fused_outcomes(outcome);
        if let Some(entry) = self.commands.get_mut(partner) {
            entry.half = None;
        }
        self.finish(partner, &first);
        self.finish(slot, &second);
    }
}
