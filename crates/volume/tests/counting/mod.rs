//! An allocator that counts, for tests of this crate and of others: who has the module has the
//! allocator.
#![expect(unsafe_code, reason = "an allocator that counts is an allocator")]
#![expect(dead_code, reason = "a test counts either its own thread or all of them")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// How often the calling thread has asked for memory; tests that run beside each other do not count
/// each other.
pub(crate) fn of_this_thread() -> u64 {
    THREADS_OWN.get()
}

/// How often all threads of the process have.
pub(crate) fn of_all_threads() -> u64 {
    EVERYBODYS.load(Ordering::SeqCst)
}

/// How many allocations of all threads are live.
pub(crate) fn live() -> i64 {
    LIVE.load(Ordering::SeqCst)
}

struct Counting;

thread_local! {
    static THREADS_OWN: Cell<u64> = const { Cell::new(0) };
}

static EVERYBODYS: AtomicU64 = AtomicU64::new(0);
static LIVE: AtomicI64 = AtomicI64::new(0);

// SAFETY: the system's allocator does everything. `realloc` and `alloc_zeroed` come through
// `alloc`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        THREADS_OWN.set(THREADS_OWN.get() + 1);
        EVERYBODYS.fetch_add(1, Ordering::SeqCst);
        LIVE.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        LIVE.fetch_sub(1, Ordering::SeqCst);
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;
