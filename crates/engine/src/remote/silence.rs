//! Reports a target that owes a reply and sends nothing.
//!
//! This only logs: a flush of a slow disk's cache can take minutes. `overdue` closes connections
//! where a timeout is set; the log tells users why they wait.

use std::time::{Duration, Instant};

/// Traffic on a link's connection.
#[derive(Default)]
pub(super) struct Silence {
    /// Number of turns in which something was sent or received.
    moved: u64,
    /// When to check again, and the counter when that was armed.
    watched: Option<(Instant, u64)>,
    /// The counter when silence was last reported.
    reported_at: Option<u64>,
}

impl Silence {
    /// Records that something was sent or received.
    #[inline]
    pub(super) fn on_move(&mut self) {
        self.moved += 1;
    }

    /// Ends the observation, because the connection was lost.
    pub(super) fn on_loss(&mut self) {
        self.watched = None;
    }

    /// Arms a check, because the target owes a reply: returns when to call
    /// [`Silence::is_report_due`], unless it is armed already. Silence is not reported again until
    /// something was transferred.
    #[inline]
    pub(super) fn watch(&mut self, now: impl FnOnce() -> Instant) -> Option<Instant> {
        if self.watched.is_some() || self.reported_at == Some(self.moved) {
            return None;
        }
        let until = now() + REPORT_AFTER;
        self.watched = Some((until, self.moved));
        Some(until)
    }

    /// Whether a reply has been owed for [`REPORT_AFTER`] without any transfer.
    #[inline]
    pub(super) fn is_report_due(&mut self, now: impl FnOnce() -> Instant, owes: bool) -> bool {
        let Some((until, moved)) = self.watched else { return false };
        if now() < until {
            return false;
        }
        self.watched = None;
        let is_silent = owes && moved == self.moved;
        if is_silent {
            self.reported_at = Some(moved);
        }
        is_silent
    }
}

/// How long a target may owe a reply before that is logged.
pub(super) const REPORT_AFTER: Duration = Duration::from_secs(60);
