//! A counting allocator, for tests of this crate and of others. A test that includes this module
//! uses the allocator.
#![expect(unsafe_code, reason = "an allocator that counts is an allocator")]
#![expect(dead_code, reason = "a test counts either its own thread or all of them")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// Number of allocations by the calling thread; tests that run concurrently do not count each
/// other's.
pub(crate) fn of_this_thread() -> u64 {
    THIS_THREAD.get()
}

/// Number of allocations by all threads of the process.
pub(crate) fn of_all_threads() -> u64 {
    ALL_THREADS.load(Ordering::SeqCst)
}

/// Number of live allocations of all threads.
pub(crate) fn live() -> i64 {
    LIVE.load(Ordering::SeqCst)
}

/// Bytes that the calling thread has allocated, including those that it has freed.
pub(crate) fn bytes_of_this_thread() -> u64 {
    BYTES.get()
}

struct Counting;

thread_local! {
    static THIS_THREAD: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<u64> = const { Cell::new(0) };
}

static ALL_THREADS: AtomicU64 = AtomicU64::new(0);
static LIVE: AtomicI64 = AtomicI64::new(0);

// SAFETY: the system's allocator does all the work. `realloc` and `alloc_zeroed` call `alloc`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        THIS_THREAD.set(THIS_THREAD.get() + 1);
        BYTES.set(BYTES.get() + layout.size() as u64);
        ALL_THREADS.fetch_add(1, Ordering::SeqCst);
        LIVE.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller makes the same promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        LIVE.fetch_sub(1, Ordering::SeqCst);
        // SAFETY: the caller makes the same promises.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;
