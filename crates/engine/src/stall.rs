//! Whether a peer that holds buffers moves data: it is looked at every [`LOOK`] as long as it holds
//! some.

use blockmux_volume::Pool;
use std::time::{Duration, Instant};

/// The looks at one peer.
pub(crate) struct StallWatch {
    next_look: Instant,
    /// What it had sent and acknowledged at the last one.
    moved_bytes: u64,
    /// Looks in a row at which it had moved next to nothing.
    still_looks: u32,
}

impl StallWatch {
    pub(crate) fn new(now: Instant, moved_bytes: u64) -> StallWatch {
        StallWatch { next_look: now + LOOK, moved_bytes, still_looks: 0 }
    }

    /// When to look next.
    pub(crate) fn next_look(&self) -> Instant {
        self.next_look
    }

    /// Takes a look that is due. A peer that has moved next to nothing since the last one is
    /// stalled: at once if it has not moved as much as it holds since it last was, after a while if
    /// it has.
    pub(crate) fn look(&mut self, now: Instant, moved_bytes: u64, pool: &Pool) {
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

/// How often a peer that holds buffers is looked at.
const LOOK: Duration = Duration::from_millis(500);
/// A peer that has proved to move data is stalled after so many looks at which it does not.
const STILL_LOOKS: u32 = 4;
/// A peer that would take longer than so many looks for what it holds moves next to nothing.
const SLOWEST_LOOKS: u64 = 64;
