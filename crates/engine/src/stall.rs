//! Detects peers that hold buffers without transferring data, by a check every [`LOOK`].

use blockmux_volume::Pool;
use std::time::{Duration, Instant};

/// Progress of one peer.
pub(crate) struct StallWatch {
    next_look: Instant,
    /// Bytes that it had sent and acknowledged at the last check.
    moved_bytes: u64,
    /// Consecutive checks with next to no progress.
    still_looks: u32,
}

impl StallWatch {
    pub(crate) fn new(now: Instant, moved_bytes: u64) -> StallWatch {
        StallWatch { next_look: now + LOOK, moved_bytes, still_looks: 0 }
    }

    /// Time of the next check.
    pub(crate) fn next_check(&self) -> Instant {
        self.next_look
    }

    /// Performs a check that is due. A peer with next to no progress is stalled: at once, unless it
    /// has transferred more than it holds since it last stalled; else after [`STILL_LOOKS`] checks.
    pub(crate) fn check(&mut self, now: Instant, moved_bytes: u64, pool: &Pool) {
        let Some(account) = pool.account() else { return };
        account.set_moved(moved_bytes);
        let held = account.held_bytes();
        let moved = moved_bytes.saturating_sub(self.moved_bytes);
        (self.next_look, self.moved_bytes) = (now + LOOK, moved_bytes);
        if moved > held as u64 / SLOWEST_LOOKS {
            self.still_looks = 0;
            return account.resume();
        }
        self.still_looks += 1;
        if account.credit_bytes() < held || self.still_looks >= STILL_LOOKS {
            pool.note_stalled();
        }
    }
}

/// Interval of checks.
const LOOK: Duration = Duration::from_millis(500);
/// Checks without progress until a peer with credit counts as stalled.
const STILL_LOOKS: u32 = 4;
/// A peer that would need more checks than this to transfer what it holds makes next to no
/// progress.
const SLOWEST_LOOKS: u64 = 64;
