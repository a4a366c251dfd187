//! A core's buffers: taken by size, given back by dropping.
//!
//! Sizes are powers of two from 4 KiB to [`MAX_TRANSFER`], page-aligned, so that direct I/O can use them. What is
//! given back is kept for the next taker, up to a limit; what is out is counted against the pool's limit,
//! which bounds the memory that all peers of a core can make it hold.
//!
//! How long payload stays out is up to peers: one may send the rest of a write, or take the data that it asked for,
//! as late as it likes. So payload never gets all of the pool, and long payload less than short:
//!
//! ```text
//!   0                       1/2          3/4            limit
//!   │ any payload            │ up to      │ receive buffers │
//!   │                        │ 256 KiB    │                 │
//! ```
//! With the last quarter, connections can always receive, and so notice that their peer has gone; with the one
//! before, short requests go on while long ones wait.

use crate::buf::Memory;
use crate::volume::MAX_TRANSFER;
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

/// A core's buffers; a clone is another handle to the same pool.
#[derive(Clone)]
pub struct Pool(Rc<Inner>);

pub(crate) type Home = Weak<Inner>;

pub(crate) struct Inner {
    free: [RefCell<Vec<Memory>>; CLASSES],
    out_bytes: Cell<usize>,
    /// Given back and kept for the next taker.
    kept_bytes: Cell<usize>,
    /// Given back to the heap since the heap was last trimmed.
    shed_bytes: Cell<usize>,
    limit_bytes: usize,
}

impl Pool {
    /// A pool that has at most `limit_bytes` out at a time.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Pool {
        Pool(Rc::new(Inner {
            free: std::array::from_fn(|_| RefCell::new(Vec::new())),
            out_bytes: Cell::new(0),
            kept_bytes: Cell::new(0),
            shed_bytes: Cell::new(0),
            limit_bytes,
        }))
    }

    /// A buffer of at least `len` bytes with any content, or `None` when the pool's limit is reached: wait for
    /// I/O to complete and try again. For data of requests there is [`Pool::take_payload`].
    ///
    /// # Panics
    /// If `len` is above [`MAX_TRANSFER`].
    #[inline]
    #[must_use]
    pub fn take(&self, len: usize) -> Option<Memory> {
        self.take_below(len, self.0.limit_bytes)
    }

    /// A buffer for the data of a request, as [`Pool::take`], but `None` already when payload has its share.
    ///
    /// # Panics
    /// If `len` is above [`MAX_TRANSFER`].
    #[inline]
    #[must_use]
    pub fn take_payload(&self, len: usize) -> Option<Memory> {
        self.take_below(len, self.payload_limit(len))
    }

    /// Whether [`Pool::take_payload`] of `len` bytes can succeed, now or later.
    ///
    /// # Panics
    /// If `len` is above [`MAX_TRANSFER`].
    #[must_use]
    pub fn could_hold(&self, len: usize) -> bool {
        size_of_class(class_of(len)) <= self.payload_limit(len)
    }

    /// How much payload one peer should have in flight beside a request that is its only one, in bytes: it takes several
    /// that keep theirs to leave nothing to the others.
    #[inline]
    #[must_use]
    pub fn peer_share(&self) -> usize {
        self.0.limit_bytes / 8
    }

    /// Whether the next long payload may have to wait, so that nobody should keep more than a little.
    #[inline]
    #[must_use]
    pub fn is_short(&self) -> bool {
        let limit = self.0.limit_bytes;
        self.0.out_bytes.get() >= limit / 2 - (limit / 4).min(MAX_TRANSFER as usize)
    }

    fn payload_limit(&self, len: usize) -> usize {
        let limit = self.0.limit_bytes;
        if len > SHORT_PAYLOAD { limit / 2 } else { limit - limit / 4 }
    }

    #[inline]
    fn take_below(&self, len: usize, limit_bytes: usize) -> Option<Memory> {
        let class = class_of(len);
        let size = size_of_class(class);
        // The limit may be all there is.
        let out = self.0.out_bytes.get().checked_add(size)?;
        if out > limit_bytes {
            return None;
        }
        let free = self.0.free[class].borrow_mut().pop();
        let memory = match free {
            Some(memory) => {
                self.0.kept_bytes.set(self.0.kept_bytes.get() - size);
                memory
            }
            // The system may have less than the limit: that is no end of anything, others give theirs back.
            None => Memory::for_pool(size, Rc::downgrade(&self.0))?,
        };
        self.0.out_bytes.set(out);
        Some(memory)
    }

    /// Bytes that are out now.
    #[must_use]
    pub fn out_bytes(&self) -> usize {
        self.0.out_bytes.get()
    }

    /// Whether so much has gone back to the heap since [`Pool::note_trimmed`] that it should give some to the system.
    #[inline]
    #[must_use]
    pub fn has_shed_much(&self) -> bool {
        self.0.shed_bytes.get() >= MUCH_BYTES
    }

    /// The heap has given to the system what it does not need.
    pub fn note_trimmed(&self) {
        self.0.shed_bytes.set(0);
    }

    /// The most bytes that can be out.
    #[must_use]
    pub fn limit_bytes(&self) -> usize {
        self.0.limit_bytes
    }
}

impl Inner {
    /// Called by the last handle of a buffer on drop.
    pub(crate) fn put(&self, memory: Memory) {
        let size = memory.len();
        let class = class_of(size);
        self.out_bytes.set(self.out_bytes.get() - size);
        let kept = self.kept_bytes.get() + size;
        if kept <= KEEP_BYTES {
            self.kept_bytes.set(kept);
            self.free[class].borrow_mut().push(memory);
        } else {
            self.shed_bytes.set(self.shed_bytes.get().saturating_add(size));
            memory.leave_pool();
        }
    }
}

fn class_of(len: usize) -> usize {
    assert!(len <= MAX_TRANSFER as usize, "a buffer of {len} bytes");
    let bits = len.max(SMALLEST).next_power_of_two().trailing_zeros();
    (bits - SMALLEST.trailing_zeros()) as usize
}

fn size_of_class(class: usize) -> usize {
    SMALLEST << class
}

/// Payload up to this many bytes may take what is kept from longer payload, and a peer may have so much in flight
/// when buffers are short.
pub const SHORT_PAYLOAD: usize = 256 << 10;

const SMALLEST: usize = 4096;
const CLASSES: usize = (MAX_TRANSFER.trailing_zeros() - SMALLEST.trailing_zeros() + 1) as usize;
/// Enough for 128 buffers of 256 KiB; what a burst took beyond goes back to the heap.
const KEEP_BYTES: usize = 32 << 20;
/// What a heap may keep without being asked for it.
const MUCH_BYTES: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_buffer_is_taken_again() {
        let pool = Pool::new(1 << 20);
        let first = pool.take(5000).unwrap();
        let address = first.seg(0, 1).as_ptr();
        assert_eq!((first.len(), pool.out_bytes()), (8192, 8192));
        drop(first);
        assert_eq!(pool.out_bytes(), 0);
        assert_eq!(pool.take(8192).unwrap().seg(0, 1).as_ptr(), address);
    }

    #[test]
    fn the_limit_holds() {
        let pool = Pool::new(8192);
        let first = pool.take(4096).unwrap();
        let _second = pool.take(1).unwrap();
        assert!(pool.take(1).is_none());
        drop(first);
        assert!(pool.take(1).is_some());
    }

    #[test]
    fn payload_leaves_room_for_receiving_and_long_payload_for_short() {
        let pool = Pool::new(8 << 20);
        let take_all = |len| std::iter::from_fn(|| pool.take_payload(len)).collect::<Vec<_>>();
        assert!(!pool.is_short());
        let first = pool.take_payload(2 << 20);
        assert!(pool.is_short(), "one of 4 MiB does not fit any more");
        drop(first);
        let long = take_all(SHORT_PAYLOAD + 1);
        assert_eq!((pool.out_bytes(), pool.is_short()), (4 << 20, true));
        let short = take_all(SHORT_PAYLOAD);
        assert_eq!(pool.out_bytes(), 6 << 20);
        assert!(pool.take(SHORT_PAYLOAD).is_some(), "a receive buffer");
        drop((long, short));
        assert!(pool.could_hold(4 << 20) && !pool.could_hold((4 << 20) + 1));
        assert_eq!(pool.peer_share(), 1 << 20);
        assert!(Pool::new(usize::MAX).take_payload(1 << 20).is_some());
    }

    #[test]
    fn a_buffer_outlives_its_pool() {
        let pool = Pool::new(8192);
        let seg = pool.take(4096).unwrap().seg(0, 4);
        drop(pool);
        seg.copy_from(b"late");
        assert_eq!(seg.to_vec(), b"late");
    }

    #[test]
    fn what_the_system_does_not_have_is_not_there() {
        assert!(Memory::for_pool(1 << 60, Weak::new()).is_none());
        assert!(Memory::for_pool(4096, Weak::new()).is_some());
    }

    #[test]
    fn only_so_much_is_kept() {
        let pool = Pool::new(usize::MAX);
        let all: Vec<_> = (0..3).map(|_| pool.take(MAX_TRANSFER as usize).unwrap()).collect();
        drop(all);
        assert_eq!(pool.0.free[CLASSES - 1].borrow().len(), 1);
        assert_eq!(pool.out_bytes(), 0);
        assert!(pool.has_shed_much());
        pool.note_trimmed();
        drop(pool.take(4096));
        assert!(!pool.has_shed_much());
        assert_eq!(pool.0.free[0].borrow().len(), 0, "of all sizes together");
        drop((pool.take(MAX_TRANSFER as usize), pool.take(4096)));
        assert_eq!(pool.0.kept_bytes.get(), MAX_TRANSFER as usize);
    }
}
