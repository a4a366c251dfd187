//! Connections of initiators that were lost and are not back, in the whole process: for whoever
//! wants to know whether all were there all the time.

use std::sync::atomic::{AtomicU64, Ordering};

/// How many there are now. Those of a volume that is dropped without them stay among them.
#[must_use]
pub fn missing_connections() -> u64 {
    MISSING.load(Ordering::Relaxed)
}

/// So many are lost.
pub(super) fn add(connections: u32) {
    MISSING.fetch_add(connections.into(), Ordering::Relaxed);
}

/// So many are there again.
pub(super) fn take(connections: u32) {
    MISSING.fetch_sub(connections.into(), Ordering::Relaxed);
}

static MISSING: AtomicU64 = AtomicU64::new(0);
