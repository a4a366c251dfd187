//! The process's count of initiator connections that are lost. It tells a report whether all
//! connections were up all the time.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of lost connections. Those of a volume that is dropped meanwhile stay in the count.
#[must_use]
pub fn missing_connections() -> u64 {
    MISSING.load(Ordering::Relaxed)
}

/// Counts connections as lost.
pub(super) fn add(connections: u32) {
    MISSING.fetch_add(connections.into(), Ordering::Relaxed);
}

/// Counts connections as restored.
pub(super) fn take(connections: u32) {
    MISSING.fetch_sub(connections.into(), Ordering::Relaxed);
}

static MISSING: AtomicU64 = AtomicU64::new(0);
