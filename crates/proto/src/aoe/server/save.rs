//! Requests that change a disk's settings, which are answered once the change is stored.
//!
//! The store works on another thread and must be polled, so the session polls it every
//! [`POLL_INTERVAL`] while requests wait. At most [`MAX_WAITING`] requests wait; further ones get
//! no answer, and the initiator retransmits them.

use super::AoeTargetSession;
use crate::aoe::unit::{DiskSettings, SettingsChange};
use crate::frames::Station;
use crate::volume_state::SaveTicket;
use blockmux_wire::aoe::{ConfigCommand, ErrorCode, Header, MacMaskMessage, ReserveMessage};
use std::time::{Duration, Instant};

/// The request to answer.
#[derive(Clone, Copy)]
pub(super) enum SaveRequest {
    Config(ConfigCommand),
    Masks(MacMaskMessage),
    Reserved(ReserveMessage),
}

/// Result of a request.
pub(super) enum SaveOutcome {
    /// The answer: success, or an error code.
    Answer(Option<ErrorCode>),
    /// The change is being stored.
    Wait(SaveTicket),
    /// The change cannot be started now; the request gets no answer.
    Silence,
}

/// A request that waits for its change to be stored.
pub(super) struct SaveWaiter {
    ticket: SaveTicket,
    /// Index of the disk.
    at: usize,
    answer: Header,
    from: Station,
    asked: SaveRequest,
}

impl AoeTargetSession {
    /// Changes the settings of a disk.
    pub(super) fn change(
        &mut self,
        at: usize,
        change: impl FnOnce(&mut DiskSettings) -> Result<(), ErrorCode>,
    ) -> SaveOutcome {
        let Some(disk) = self.disks.get_mut(at) else { return SaveOutcome::Silence };
        let changed = disk.unit.change(change);
        disk.refresh();
        match changed {
            SettingsChange::Done => SaveOutcome::Answer(None),
            SettingsChange::Refused(code) => SaveOutcome::Answer(Some(code)),
            SettingsChange::Saving(_) if self.waiting.len() >= MAX_WAITING => SaveOutcome::Silence,
            SettingsChange::Saving(ticket) => SaveOutcome::Wait(ticket),
            SettingsChange::Busy => SaveOutcome::Silence,
        }
    }

    /// Answers the request now, or when the change is stored.
    pub(super) fn answer_when_saved(
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

    /// Answers the requests whose changes are stored or have failed, and schedules the next poll
    /// for the others.
    pub(super) fn poll_changes(&mut self, now: Instant) {
        let mut still = Vec::new();
        for waiting in std::mem::take(&mut self.waiting) {
            let SaveWaiter { ticket, at, answer, from, asked } = waiting;
            let Some(disk) = self.disks.get_mut(at) else { continue };
            match disk.unit.is_changed(ticket) {
                None => still.push(waiting),
                Some(is_saved) => {
                    disk.refresh();
                    // A change that cannot be stored does not take effect.
                    let code = (!is_saved).then_some(ErrorCode::DEVICE_UNAVAILABLE);
                    self.answer_asked(at, answer, from, asked, code);
                }
            }
        }
        self.waiting = still;
        self.poll_at = if self.waiting.is_empty() { None } else { now.checked_add(POLL_INTERVAL) };
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

/// Interval of polling the store; about the time of a disk's flush.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// The maximum number of waiting requests.
const MAX_WAITING: usize = 64;
