//! Whether a target that owes an answer says anything at all.
//!
//! Silence alone ends nothing here: a flush of a slow disk's whole cache takes minutes. `overdue`
//! ends what takes too long, where there is a bound; whoever waits for longer than a minute should
//! know why.

use std::time::{Duration, Instant};

/// What a link knows of the traffic on its connection.
#[derive(Default)]
pub(super) struct Silence {
    /// Turns in which something came or went, in all.
    moved: u64,
    /// When to look again, and what had moved when that was decided.
    watched: Option<(Instant, u64)>,
    /// What had moved when silence was last told.
    told_at: Option<u64>,
}

impl Silence {
    /// Something came or went.
    #[inline]
    pub(super) fn on_move(&mut self) {
        self.moved += 1;
    }

    /// The connection is gone.
    pub(super) fn on_loss(&mut self) {
        self.watched = None;
    }

    /// The target owes an answer: when to ask [`Silence::is_to_tell`], if that is not known
    /// already. What has been told is not told again until something moves.
    #[inline]
    pub(super) fn watch(&mut self, now: impl FnOnce() -> Instant) -> Option<Instant> {
        if self.watched.is_some() || self.told_at == Some(self.moved) {
            return None;
        }
        let until = now() + PATIENCE;
        self.watched = Some((until, self.moved));
        Some(until)
    }

    /// Whether an answer has been owed for [`PATIENCE`] and nothing has moved.
    #[inline]
    pub(super) fn is_to_tell(&mut self, now: impl FnOnce() -> Instant, owes: bool) -> bool {
        let Some((until, moved)) = self.watched else { return false };
        if now() < until {
            return false;
        }
        self.watched = None;
        let is_silent = owes && moved == self.moved;
        if is_silent {
            self.told_at = Some(moved);
        }
        is_silent
    }
}

/// How long a target may owe an answer before that is told.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
