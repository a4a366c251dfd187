//! Counts I/O that succeeds, so that a test can tell that a target gets as far as that.

use std::cell::Cell;

thread_local! {
    static SUCCEEDED: Cell<u64> = const { Cell::new(0) };
}

/// Number of requests of initiators, and of I/O of targets, that have succeeded on this thread.
#[must_use]
pub fn succeeded_io() -> u64 {
    SUCCEEDED.get()
}

/// Counts one that has succeeded.
pub(crate) fn count_success() {
    SUCCEEDED.set(SUCCEEDED.get().wrapping_add(1));
}
