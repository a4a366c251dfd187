//! Counters of a core for monitoring: the core writes them, other threads read them.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one core, aligned so that no other core's counters share a cache line (false
/// sharing).
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct CoreStats {
    turns: AtomicU64,
    idle_turns: AtomicU64,
    sleeps: AtomicU64,
    buffer_bytes: AtomicU64,
    buffer_limit_bytes: AtomicU64,
}

impl CoreStats {
    /// Rounds of the core's loop in which something happened.
    #[must_use]
    pub fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Rounds in which the core polled and found nothing.
    #[must_use]
    pub fn spins(&self) -> u64 {
        self.idle_turns.load(Ordering::Relaxed)
    }

    /// Number of times that the core slept.
    #[must_use]
    pub fn sleeps(&self) -> u64 {
        self.sleeps.load(Ordering::Relaxed)
    }

    /// Bytes of the core's buffers in use, as of its last sleep. A core that does not sleep updates
    /// this every few thousand rounds.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        self.buffer_bytes.load(Ordering::Relaxed)
    }

    /// Limit of the core's buffers, in bytes.
    #[must_use]
    pub fn buffer_limit_bytes(&self) -> u64 {
        self.buffer_limit_bytes.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn count_turn(&self, active: bool) {
        add_one(if active { &self.turns } else { &self.idle_turns });
    }

    pub(super) fn count_sleep(&self) {
        add_one(&self.sleeps);
    }

    pub(super) fn set_buffers(&self, bytes: usize, limit_bytes: usize) {
        self.buffer_bytes.store(bytes as u64, Ordering::Relaxed);
        self.buffer_limit_bytes.store(limit_bytes as u64, Ordering::Relaxed);
    }
}

/// Without a locked instruction: only one core writes the counter.
#[inline]
fn add_one(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}
