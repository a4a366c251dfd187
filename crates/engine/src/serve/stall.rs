//! Detects peers that hold buffers without transferring data, by a check every [`CHECK_INTERVAL`].

use blockmux_volume::Pool;
use std::time::{Duration, Instant};

/// Progress of one peer.
pub(crate) struct StallWatch {
    /// Time of the next check.
    pub(crate) next_check: Instant,
    /// Bytes that the peer had sent and acknowledged at the last check.
    moved_bytes: u64,
    /// Bytes that the connection had transferred at the last check.
    transferred_bytes: u64,
    /// Consecutive checks with next to no progress.
    idle_checks: u32,
}

impl StallWatch {
    pub(crate) fn new(now: Instant, moved_bytes: u64) -> StallWatch {
        StallWatch { next_check: now + CHECK_INTERVAL, moved_bytes, transferred_bytes: 0, idle_checks: 0 }
    }

    /// Whether the connection has transferred anything since the last check.
    pub(crate) fn has_transferred(&self, transferred_bytes: u64) -> bool {
        transferred_bytes != self.transferred_bytes
    }

    /// Performs a check that is due. A peer with next to no progress is stalled, unless it has
    /// credit: since it last stalled, it has transferred at least as much as it holds now. Then it
    /// is stalled only after [`MAX_IDLE_CHECKS`] such checks.
    pub(crate) fn check(&mut self, now: Instant, moved_bytes: u64, transferred_bytes: u64, pool: &Pool) {
        let Some(account) = pool.account() else { return };
        self.transferred_bytes = transferred_bytes;
        account.set_moved(moved_bytes);
        let held = account.caused_bytes();
        let moved = moved_bytes.saturating_sub(self.moved_bytes);
        (self.next_check, self.moved_bytes) = (now + CHECK_INTERVAL, moved_bytes);
        if moved > held as u64 / SLOWEST_CHECKS {
            self.idle_checks = 0;
            return account.resume();
        }
        self.idle_checks += 1;
        if account.credit_bytes() < held || self.idle_checks >= MAX_IDLE_CHECKS {
            pool.note_stalled();
        }
    }
}

/// Interval of checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Checks without progress until a peer with credit counts as stalled.
const MAX_IDLE_CHECKS: u32 = 4;
/// A peer that would need more checks than this to transfer what it holds makes next to no
/// progress.
const SLOWEST_CHECKS: u64 = 64;
