//! Changes of what is set on disks: made now, answered once they are kept.
//!
//! A store keeps them elsewhere and says so only to who asks, so that the session asks again after [`ASK_AGAIN`] while
//! anybody waits. At most [`MAX_WAITING`] do; more are not answered, and ask again themselves.

use super::TargetSession;
use crate::aoe::unit::{Changed, Kept};
use crate::frames::Station;
use crate::served::SaveTicket;
use blockmux_wire::aoe::{ConfigCommand, ErrorCode, Header, MacMaskMessage, ReserveMessage};
use std::time::{Duration, Instant};

/// What is to be answered.
#[derive(Clone, Copy)]
pub(super) enum Asked {
    Config(ConfigCommand),
    Masks(MacMaskMessage),
    Reserved(ReserveMessage),
}

/// What has become of a request.
pub(super) enum Outcome {
    /// It is done, or refused.
    Answer(Option<ErrorCode>),
    /// It is being kept.
    Wait(SaveTicket),
    /// It cannot even be begun now.
    Silence,
}

/// Who waits for a change.
pub(super) struct Waiting {
    ticket: SaveTicket,
    /// The disk's place.
    at: usize,
    answer: Header,
    from: Station,
    asked: Asked,
}

impl TargetSession {
    /// Changes what is set on a disk.
    pub(super) fn change(
        &mut self,
        at: usize,
        change: impl FnOnce(&mut Kept) -> Result<(), ErrorCode>,
    ) -> Outcome {
        let Some(disk) = self.disks.get_mut(at) else { return Outcome::Silence };
        let changed = disk.unit.change(change);
        disk.refresh();
        match changed {
            Changed::Done => Outcome::Answer(None),
            Changed::Refused(code) => Outcome::Answer(Some(code)),
            Changed::Saving(_) if self.waiting.len() >= MAX_WAITING => Outcome::Silence,
            Changed::Saving(ticket) => Outcome::Wait(ticket),
            Changed::Busy => Outcome::Silence,
        }
    }

    /// Answers now or when what was changed is kept.
    pub(super) fn settle(
        &mut self,
        at: usize,
        answer: Header,
        from: Station,
        asked: Asked,
        outcome: Outcome,
    ) {
        match outcome {
            Outcome::Answer(code) => self.answer_asked(at, answer, from, asked, code),
            Outcome::Wait(ticket) => self.waiting.push(Waiting { ticket, at, answer, from, asked }),
            Outcome::Silence => {}
        }
    }

    /// Answers whose changes are kept, or cannot be, and sees to it that the others' are asked for again.
    pub(super) fn look_at_changes(&mut self, now: Instant) {
        let mut still = Vec::new();
        for waiting in std::mem::take(&mut self.waiting) {
            let Waiting { ticket, at, answer, from, asked } = waiting;
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
        asked: Asked,
        code: Option<ErrorCode>,
    ) {
        match asked {
            Asked::Config(command) => self.answer_config(at, answer, command, from, code),
            Asked::Masks(request) => self.answer_masks(at, answer, request, from, code),
            Asked::Reserved(request) => self.answer_reserved(at, answer, request, from, code),
        }
    }
}

/// A disk flushes in about as long.
const ASK_AGAIN: Duration = Duration::from_millis(2);
/// More than there are administrators.
const MAX_WAITING: usize = 64;
