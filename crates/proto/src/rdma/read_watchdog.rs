//! A time limit for RDMA Reads that block other work.

use crate::session::ProtocolError;
use std::time::{Duration, Instant};

/// Detects a peer that completes no RDMA Read within a minute.
#[derive(Default)]
pub(crate) struct ReadWatchdog {
    /// Time of the next check, and the number of completed reads at the previous one.
    next: Option<(Instant, u64)>,
    completed: u64,
}

impl ReadWatchdog {
    /// Counts a completed RDMA Read.
    #[inline]
    pub(crate) fn on_read(&mut self) {
        self.completed = self.completed.wrapping_add(1);
    }

    /// Time of the next check, while RDMA Reads are in flight; `now` before the first check.
    pub(crate) fn check_at(&self, now: Instant) -> Instant {
        self.next.map_or(now, |(next, _)| next)
    }

    /// If a check is due: returns whether no read has completed since the previous one. Called
    /// only while RDMA Reads are in flight.
    pub(crate) fn is_stuck(&mut self, now: Instant) -> bool {
        let previous = self.next;
        if previous.is_some_and(|(next, _)| now < next) {
            return false;
        }
        self.next = now.checked_add(READ_TIMEOUT).map(|next| (next, self.completed));
        previous.is_some_and(|(_, completed)| completed == self.completed)
    }
}

/// The error of a peer that blocks the end of its tasks.
pub(crate) const READ_STALLED: ProtocolError = ProtocolError {
    what: "did not complete an RDMA Read within a minute while its tasks were ending",
    reference: "this server's limit",
};

/// Time limit of an RDMA Read that other work waits for.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
