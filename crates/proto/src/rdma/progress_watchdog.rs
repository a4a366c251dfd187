//! A time limit for a peer whose transfers block other work.

use crate::driver::session::ProtocolError;
use std::time::{Duration, Instant};

/// Detects a peer that makes no progress within a minute.
#[derive(Default)]
pub(crate) struct ProgressWatchdog {
    /// Time of the next check, and the progress at the previous one.
    next: Option<(Instant, u64)>,
    progress: u64,
}

impl ProgressWatchdog {
    /// Counts a transfer that the peer has made possible.
    #[inline]
    pub(crate) fn on_progress(&mut self) {
        self.progress = self.progress.wrapping_add(1);
    }

    /// Time of the next check, while transfers are pending; `now` before the first check.
    pub(crate) fn check_at(&self, now: Instant) -> Instant {
        self.next.map_or(now, |(next, _)| next)
    }

    /// If a check is due: returns whether there was no progress since the previous one. Called only
    /// while transfers are pending.
    pub(crate) fn is_stuck(&mut self, now: Instant) -> bool {
        let previous = self.next;
        if previous.is_some_and(|(next, _)| now < next) {
            return false;
        }
        self.next = now.checked_add(PROGRESS_TIMEOUT).map(|next| (next, self.progress));
        previous.is_some_and(|(_, progress)| progress == self.progress)
    }
}

/// The error of a peer that blocks the end of its tasks.
pub(crate) const READ_STALLED: ProtocolError = ProtocolError {
    what: "did not complete an RDMA Read within a minute while its tasks were ending",
    reference: "this server's limit",
};

/// Time limit of a transfer that other work waits for.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(60);
