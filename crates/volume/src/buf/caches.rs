//! Prefetching I/O memory and writing it with streaming stores.

use super::Seg;

impl Seg {
    /// Prefetches the first cache line, which starts the address translation: in a volume beyond
    /// the TLB's reach, the page walk waits for memory. Called for one segment after the other, so
    /// that their TLB misses overlap. The hardware prefetcher fetches the rest of each segment.
    #[inline]
    pub(crate) fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch has no effect on memory and cannot fault.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.as_ptr().cast()) };
        }
    }

    /// Copies this segment to the start of `target`, with streaming stores where whole cache lines
    /// are written, so that they are not fetched first. For memory that is not read soon; call
    /// [`settle_streams`] before it is read.
    ///
    /// # Panics
    /// As [`Seg::copy_to_seg`].
    #[inline]
    pub(crate) fn stream_to_seg(&self, target: &Seg) {
        #[cfg(target_arch = "x86_64")]
        if self.is_streamable_to(target) {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
            assert!(self.len <= target.len && target.is_writable() && !self.is_registered());
            let (from, to) = (self.as_ptr().cast::<__m128i>(), target.as_ptr().cast::<__m128i>());
            for at in 0..self.len() / size_of::<__m128i>() {
                // SAFETY: in bounds on both sides, which do not overlap; the target is aligned; the
                // caller calls `settle_streams`.
                unsafe { _mm_stream_si128(to.add(at), _mm_loadu_si128(from.add(at))) };
            }
            return;
        }
        self.copy_to_seg(target);
    }

    /// Whether `target` consists of whole, aligned cache lines that do not overlap this segment.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    fn is_streamable_to(&self, target: &Seg) -> bool {
        let (from, to) = (self.as_ptr().addr(), target.as_ptr().addr());
        to.is_multiple_of(CACHE_LINE)
            && self.len().is_multiple_of(CACHE_LINE)
            && from.abs_diff(to) >= self.len()
    }
}

/// Makes this thread's streaming stores visible before its later stores (SFENCE). Costs as much as
/// streaming a few kilobytes, so it is done once for a batch.
#[inline]
pub(crate) fn settle_streams() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 CPU has SFENCE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(target_arch = "x86_64")]
const CACHE_LINE: usize = 64;

#[cfg(test)]
mod tests {
    use super::super::{Memory, PAGE, Pages};
    use super::*;

    #[test]
    fn streaming_copies_data_of_every_length_and_alignment() {
        let before: Vec<u8> = (0..2 * PAGE).map(|at| (at % 251) as u8).collect();
        for (from, to) in [(1, PAGE), (PAGE, 0), (0, 64), (64, 0), (0, 1), (7, 7)] {
            for len in [0, 1, 63, 64, 512, 513, 4032] {
                let memory = Memory::from_pages(&Pages::from_heap(2 * PAGE)).seg(0, 2 * PAGE);
                memory.copy_from(&before);
                memory.slice(from, len).stream_to_seg(&memory.slice(to, PAGE));
                settle_streams();
                let mut expected = before.clone();
                expected.copy_within(from..from + len, to);
                assert!(memory.to_vec() == expected, "{len} bytes from {from} to {to}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "len")]
    fn streaming_to_a_shorter_target_panics() {
        let memory = Memory::from_pages(&Pages::from_heap(PAGE)).seg(0, PAGE);
        Seg::from_slice(&[0; 128]).stream_to_seg(&memory.slice(0, 64));
    }
}
