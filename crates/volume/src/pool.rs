//! A core's buffers: taken by size, given back by dropping.
//!
//! Sizes are powers of two from 4 KiB to [`MAX_TRANSFER`], page-aligned, so that direct I/O can use them. What is
//! given back is kept for the next taker, up to a limit a size; what is out is counted against the pool's limit,
//! which bounds the memory that all peers of a core can make it hold.

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
    limit_bytes: usize,
}

impl Pool {
    /// A pool that has at most `limit_bytes` out at a time.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Pool {
        Pool(Rc::new(Inner {
            free: std::array::from_fn(|_| RefCell::new(Vec::new())),
            out_bytes: Cell::new(0),
            limit_bytes,
        }))
    }

    /// A buffer of at least `len` bytes with any content, or `None` when the pool's limit is reached: wait for
    /// I/O to complete and try again.
    ///
    /// # Panics
    /// If `len` is above [`MAX_TRANSFER`].
    #[inline]
    #[must_use]
    pub fn take(&self, len: usize) -> Option<Memory> {
        let class = class_of(len);
        let size = size_of_class(class);
        let out = self.0.out_bytes.get() + size;
        if out > self.0.limit_bytes {
            return None;
        }
        self.0.out_bytes.set(out);
        let free = self.0.free[class].borrow_mut().pop();
        Some(free.unwrap_or_else(|| Memory::for_pool(size, Rc::downgrade(&self.0))))
    }

    /// Bytes that are out now.
    #[must_use]
    pub fn out_bytes(&self) -> usize {
        self.0.out_bytes.get()
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
        let mut free = self.free[class].borrow_mut();
        if (free.len() + 1) * size <= KEEP_BYTES_PER_CLASS {
            free.push(memory);
        } else {
            drop(free);
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

const SMALLEST: usize = 4096;
const CLASSES: usize = (MAX_TRANSFER.trailing_zeros() - SMALLEST.trailing_zeros() + 1) as usize;
/// Enough for 128 buffers of 256 KiB; what a burst took beyond goes back to the heap.
const KEEP_BYTES_PER_CLASS: usize = 32 << 20;

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
    fn a_buffer_outlives_its_pool() {
        let pool = Pool::new(8192);
        let seg = pool.take(4096).unwrap().seg(0, 4);
        drop(pool);
        seg.copy_from(b"late");
        assert_eq!(seg.to_vec(), b"late");
    }

    #[test]
    fn only_so_much_is_kept() {
        let pool = Pool::new(usize::MAX);
        let all: Vec<_> = (0..3).map(|_| pool.take(MAX_TRANSFER as usize).unwrap()).collect();
        drop(all);
        assert_eq!(pool.0.free[CLASSES - 1].borrow().len(), 1);
        assert_eq!(pool.out_bytes(), 0);
    }
}
