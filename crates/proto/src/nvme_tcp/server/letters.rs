//! What a queue is told by others: news for the host, and commands that are to end early.

use super::TargetSession;
use super::commands::{State, Work};
use crate::exports::VolumeId;
use crate::fabrics::controller::connect::Queue;
use crate::nvme::Outcome;
use crate::nvme::letters::{AbortOrder, Letter};
use blockmux_volume::Tag;
use blockmux_wire::nvme::status::Status;

impl TargetSession {
    /// Reads what others have left.
    #[inline]
    pub(super) fn read_letters(&mut self) {
        let Some(letters) = &self.letters else { return };
        let Some(letter) = letters.read() else { return };
        self.on_letter(letter);
        while let Some(letter) = self.letters.as_ref().and_then(|letters| letters.read()) {
            self.on_letter(letter);
        }
        self.tell_events();
    }

    #[cold]
    fn on_letter(&mut self, letter: Letter) {
        match letter {
            Letter::Abort(order) => self.abort(order),
            Letter::Preempted(volume) => self.preempted(volume),
            Letter::NamespaceChanged(_)
            | Letter::NamespaceShown(_)
            | Letter::Reservation { .. }
            | Letter::AnaChanged { .. }
            | Letter::DiscoveryChanged => {
                if let Some(Queue::Admin(admin)) = &mut self.queue {
                    admin.hear(&letter);
                }
            }
        }
    }

    /// Answers requests for events as long as there is something to tell.
    pub(super) fn tell_events(&mut self) {
        while let Some(Queue::Admin(admin)) = &mut self.queue
            && let Some((slot, result)) = admin.next_event()
        {
            self.finish(slot, &Outcome::success(result.into()));
        }
    }

    /// Ends a command early if it can be.
    fn abort(&mut self, order: AbortOrder) {
        if let Some(slot) = self.commands.find(order.cid) {
            self.end_early(slot, Status::COMMAND_ABORT_REQUESTED, Some(order));
        }
    }

    /// What the host has under way on that volume ends.
    fn preempted(&mut self, volume: VolumeId) {
        for slot in self.commands.slots() {
            let entry = self.commands.get_mut(slot);
            let is_there = entry.is_some_and(|entry| match &entry.work {
                Work::Io(command) => entry.state == State::Io && command.is_for(volume),
                _ => false,
            });
            if is_there {
                self.end_early(slot, Status::COMMAND_ABORTED_DUE_TO_PREEMPT_AND_ABORT, None);
            }
        }
    }

    /// Ends a command: at once if nothing of it is under way, else with its data or its I/O.
    fn end_early(&mut self, slot: usize, status: Status, order: Option<AbortOrder>) {
        let held = self.held.iter().position(|(held, _)| *held == slot);
        let Some(entry) = self.commands.get_mut(slot).filter(|entry| entry.half.is_none()) else { return };
        let Work::Io(command) = &entry.work else { return };
        match (entry.state, held) {
            (State::Io, Some(held)) => {
                self.held.remove(held);
                entry.doom(status, order);
                self.finish_doomed(slot);
            }
            (State::Io, None) => {
                self.cancels.push_back((command.volume(), Tag(slot as u64)));
                entry.doom(status, order);
            }
            (State::Data, _) => entry.doom(status, order),
            _ => {}
        }
    }

    /// A command ends as it was told to.
    pub(super) fn finish_doomed(&mut self, slot: usize) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        let Some(doom) = entry.doom.take() else { return };
        let outcome = match doom.status {
            // The host knows best whether to try again.
            Status::COMMAND_ABORT_REQUESTED => Outcome::retry(doom.status),
            status => Outcome::failure(status),
        };
        let outcome = match &entry.work {
            Work::Io(command) => command.unfinished(outcome),
            _ => outcome,
        };
        self.finish(slot, &outcome);
        if let Some(order) = doom.order {
            order.aborted();
        }
    }
}
