//! What a core does, for monitoring: written by the core alone, read by other threads.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one core. Nobody else's are in the same line of a CPU's cache.
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
    /// Rounds of its loop in which something happened.
    #[must_use]
    pub fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Rounds in which it polled in vain.
    #[must_use]
    pub fn spins(&self) -> u64 {
        self.idle_turns.load(Ordering::Relaxed)
    }

    /// How often it slept.
    #[must_use]
    pub fn sleeps(&self) -> u64 {
        self.sleeps.load(Ordering::Relaxed)
    }

    /// Bytes of its buffers that are in use, as of its last sleep or of some thousand rounds ago.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        self.buffer_bytes.load(Ordering::Relaxed)
    }

    /// Most bytes of buffers.
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

/// Without a locked instruction: one core alone writes it.
#[inline]
fn add_one(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}
