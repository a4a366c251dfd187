//! Words of I/O memory that another process reads and writes at the same time: rings, records.
//!
//! They are little-endian. Each call is one access, so a value that has been checked does not
//! change afterwards. A load is ordered before all later accesses of this thread, and a store after
//! all earlier ones.

use super::Seg;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use zerocopy::FromBytes;

impl Seg {
    /// The 16-bit word at `offset`.
    ///
    /// # Panics
    /// If it is out of bounds or misaligned.
    #[inline]
    #[must_use]
    pub fn load_u16(&self, offset: usize) -> u16 {
        let word = self.word::<AtomicU16>(offset);
        // SAFETY: `word` is valid and aligned as long as this segment lives.
        u16::from_le(unsafe { &*word }.load(Ordering::Acquire))
    }

    /// Changes the 16-bit word at `offset`.
    ///
    /// # Panics
    /// If it is out of bounds or misaligned.
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16) {
        let word = self.word::<AtomicU16>(offset);
        // SAFETY: `word` is valid and aligned as long as this segment lives.
        unsafe { &*word }.store(value.to_le(), Ordering::Release);
    }

    /// The 32-bit word at `offset`.
    ///
    /// # Panics
    /// If it is out of bounds or misaligned.
    #[inline]
    #[must_use]
    pub fn load_u32(&self, offset: usize) -> u32 {
        let word = self.word::<AtomicU32>(offset);
        // SAFETY: `word` is valid and aligned as long as this segment lives.
        u32::from_le(unsafe { &*word }.load(Ordering::Acquire))
    }

    /// Changes the 32-bit word at `offset`.
    ///
    /// # Panics
    /// If it is out of bounds or misaligned.
    #[inline]
    pub fn store_u32(&self, offset: usize, value: u32) {
        let word = self.word::<AtomicU32>(offset);
        // SAFETY: `word` is valid and aligned as long as this segment lives.
        unsafe { &*word }.store(value.to_le(), Ordering::Release);
    }

    /// The 64-bit word at `offset`.
    ///
    /// # Panics
    /// If it is out of bounds or misaligned.
    #[inline]
    #[must_use]
    pub fn load_u64(&self, offset: usize) -> u64 {
        let word = self.word::<AtomicU64>(offset);
        // SAFETY: `word` is valid and aligned as long as this segment lives.
        u64::from_le(unsafe { &*word }.load(Ordering::Acquire))
    }

    /// Changes the 64-bit word at `offset`.
    ///
    /// # Panics
    /// If it is out of bounds or misaligned.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) {
        let word = self.word::<AtomicU64>(offset);
        // SAFETY: `word` is valid and aligned as long as this segment lives.
        unsafe { &*word }.store(value.to_le(), Ordering::Release);
    }

    /// A copy of the structure at `offset`, which may be misaligned.
    ///
    /// # Panics
    /// If it is out of bounds.
    #[inline]
    #[must_use]
    pub fn read_at<T: FromBytes>(&self, offset: usize) -> T {
        assert!(!self.is_registered());
        assert!(offset.checked_add(size_of::<T>()).is_some_and(|end| end <= self.len()));
        let at = self.as_ptr().wrapping_add(offset).cast_const().cast::<T>();
        // SAFETY: in bounds, and any bytes are a valid `T`.
        unsafe { at.read_unaligned() }
    }

    /// Whether the first byte is at a multiple of `align`.
    #[inline]
    #[must_use]
    pub fn is_aligned_to(&self, align: usize) -> bool {
        self.as_ptr().addr().is_multiple_of(align)
    }

    /// The address of a word, within the segment and aligned.
    #[inline]
    fn word<T>(&self, offset: usize) -> *const T {
        assert!(self.is_writable());
        assert!(offset.checked_add(size_of::<T>()).is_some_and(|end| end <= self.len()));
        let word = self.as_ptr().wrapping_add(offset).cast_const().cast::<T>();
        assert!(word.is_aligned());
        word
    }
}

#[cfg(test)]
mod tests {
    use crate::buf::Memory;

    #[test]
    fn words_are_little_endian() {
        let seg = Memory::from_heap(16).seg(0, 16);
        seg.store_u16(0, 0x1122);
        seg.store_u32(4, 0x3344_5566);
        seg.store_u64(8, 0x0102_0304_0506_0708);
        assert_eq!(seg.to_vec(), [0x22, 0x11, 0, 0, 0x66, 0x55, 0x44, 0x33, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(
            (seg.load_u16(2), seg.load_u32(4), seg.load_u64(8)),
            (0, 0x3344_5566, 0x0102_0304_0506_0708)
        );
    }

    #[test]
    #[should_panic(expected = "offset.checked_add")]
    fn a_word_beyond_the_end_is_refused() {
        let _ = Memory::from_heap(16).seg(0, 6).load_u32(4);
    }

    #[test]
    #[should_panic(expected = "is_aligned")]
    fn a_misaligned_word_is_refused() {
        let _ = Memory::from_heap(16).seg(1, 8).load_u16(0);
    }
}
