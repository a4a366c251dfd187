//! Aborts of a queue's commands: by an Abort command, and by the preemption of a reservation.

use super::ControllerQueue;
use super::commands::{CommandState, CommandWork};
use super::transport::FabricsTransport;
use crate::exports::VolumeId;
use crate::nvme::NvmeOutcome;
use crate::nvme::event_queue::AbortOrder;
use blockmux_volume::Tag;
use blockmux_wire::nvme::status::NvmeStatus;

impl<T: FabricsTransport> ControllerQueue<T> {
    /// Aborts the host's I/O on a volume whose reservation was preempted.
    pub(super) fn preempted(&mut self, volume: VolumeId) {
        for slot in self.commands.slots() {
            let entry = self.commands.get_mut(slot);
            let is_there = entry.is_some_and(|entry| match &entry.work {
                CommandWork::Io(command) => entry.does_io() && command.is_for(volume),
                _ => false,
            });
            if is_there {
                self.end_early(slot, NvmeStatus::COMMAND_ABORTED_DUE_TO_PREEMPT_AND_ABORT, None);
            }
        }
    }

    /// Aborts a command: immediately if it has no data transfer and no I/O in flight, otherwise
    /// together with those. Both halves of a fused operation end together.
    pub(super) fn end_early(&mut self, slot: usize, status: NvmeStatus, order: Option<AbortOrder>) {
        let Some(slot) = self.slot_of_io(slot) else { return };
        let Some(entry) = self.commands.get_mut(slot) else { return };
        let CommandWork::Io(command) = &entry.work else { return };
        match entry.state {
            CommandState::Io => {
                self.cancels.push_back((command.volume(), Tag(slot as u64)));
                entry.abort(status, order);
            }
            CommandState::Data => entry.abort(status, order),
            CommandState::Other if entry.half.is_some() => {
                entry.abort(status, order);
                self.waiting.retain(|waiting| *waiting != slot);
                self.finish_aborted(slot);
            }
            _ => {}
        }
    }

    /// Completes an aborted command.
    pub(super) fn finish_aborted(&mut self, slot: usize) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        let Some(abort) = entry.abort.take() else { return };
        let outcome = match abort.status {
            // Without DNR: the host decides whether to retry.
            NvmeStatus::COMMAND_ABORT_REQUESTED => NvmeOutcome::retry(abort.status),
            status => NvmeOutcome::failure(status),
        };
        let outcome = match &entry.work {
            CommandWork::Io(command) => command.unfinished(outcome),
            _ => outcome,
        };
        self.finish(slot, outcome);
        if let Some(order) = abort.order {
            order.aborted();
        }
    }
}
