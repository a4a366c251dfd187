//! Changes of what is set on disks: made now, answered once they are kept.
//!
//! A store keeps them elsewhere and says so only to who asks, so that the session asks again after
//! [`ASK_AGAIN`] while anybody waits. At most [`MAX_WAITING`] do; more are not answered, and ask
//! again themselves.

use super::TargetSession;
use crate::aoe::unit::{Changed, DiskSettings};
use crate::frames::Station;
use crate::volume_state::SaveTicket;
use blockmux_wire::aoe::{ConfigCommand, ErrorCode, Header, MacMaskMessage, ReserveMessage};
use std::time::{Duration, Instant};

/// What is to be answered.
#[derive(Clone, Copy)]
pub(super) enum SaveRequest {
    Config(ConfigCommand),
    Masks(MacMaskMessage),
    Reserved(ReserveMessage),
}

/// What has become of a request.
pub(super) enum SaveOutcome {
    /// It is done, or refused.
    Answer(Option<ErrorCode>),
    /// It is being kept.
    Wait(SaveTicket),
    /// It cannot even be begun now.
    Silence,
}

/// Who waits for a change.
pub(super) struct SaveWaiter {
    ticket: SaveTicket,
    /// The disk's place.
    at: usize,
    answer: Header,
    from: Station,
    asked: SaveRequest,
}

impl TargetSession {
    /// Changes what is set on a disk.
    pub(super) fn change(
        &mut self,
        at: usize,
        change: impl FnOnce(&mut DiskSettings) -> Result<(), ErrorCode>,
    ) -> SaveOutcome {
        let Some(disk) = self.disks.get_mut(at) else { return SaveOutcome::Silence };
        let changed = disk.unit.change(change);
        disk.refresh();
        match changed {
            Changed::Done => SaveOutcome::Answer(None),
            Changed::Refused(code) => SaveOutcome::Answer(Some(code)),
            Changed::Saving(_) if self.waiting.len() >= MAX_WAITING => SaveOutcome::Silence,
            Changed::Saving(ticket) => SaveOutcome::Wait(ticket),
            Changed::Busy => SaveOutcome::Silence,
        }
    }

    /// Answers now or when what was changed is kept.
    pub(super) fn settle(
        &mut self,
        at: usize,
        answer: Header,
        from: Station,
        asked: SaveRequest,
        outcome: SaveOutcome,
    ) {
        match outcome {
            SaveOutcome::Answer(code) => self.answer_asked(at, answer, from, asked, code),
            SaveOutcome::Wait(ticket) => self.waiting.push(SaveWaiter { ticket, at, answer, from, asked }),
            SaveOutcome::Silence => {}
        }
    }

    /// Answers whose changes are kept, or cannot be, and sees to it that the others' are asked for
    /// again.
    pub(super) fn look_at_changes(&mut self, now: Instant) {
        let mut still = Vec::new();
        for waiting in std::mem::take(&mut self.waiting) {
            let SaveWaiter { ticket, at, answer, from, asked } = waiting;
            let Some(disk) = self.disks.get_mut(at) else { continue };
            match disk.unit.is_changed(ticket) {
                None => still.push(waiting),
                Some(is_kept) => {
                    disk.refresh();
                    // What cannot be kept is not set.
                    let code = (!is_kept).then_some(ErrorCode::DEVICE_UNAVAILABLE);
                    self.answer_asked(at, answer, from, asked, code);
                }
            }
        }
        self.waiting = still;
        self.ask_at = if self.waiting.is_empty() { None } else { now.checked_add(ASK_AGAIN) };
    }

    fn answer_asked(
        &mut self,
        at: usize,
        answer: Header,
        from: Station,
        asked: SaveRequest,
        code: Option<ErrorCode>,
    ) {
        match asked {
            SaveRequest::Config(command) => self.answer_config(at, answer, command, from, code),
            SaveRequest::Masks(request) => self.answer_masks(at, answer, request, from, code),
            SaveRequest::Reserved(request) => self.answer_reserved(at, answer, request, from, code),
        }
    }
}

/// A disk flushes in about as long.
const ASK_AGAIN: Duration = Duration::from_millis(2);
/// More than there are administrators.
const MAX_WAITING: usize = 64;
