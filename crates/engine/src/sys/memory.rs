//! Memory mapped from the system: pages of RAM volumes, in huge pages where available, and trimming
//! of the heap.
#![expect(unsafe_code, reason = "maps and unmaps memory")]

use blockmux_volume::Pages;
use blockmux_volume::buf::Backing;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// Maps `len` bytes of zeroes, in huge pages where available. Pages are allocated at first use.
///
/// # Errors
/// If the address space has no free range of this length.
pub fn map_pages(len: usize) -> io::Result<Arc<Pages>> {
    let reserved = len.max(1).checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: an anonymous private mapping at an address of the kernel's choice touches nothing
    // that exists.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            reserved,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let map = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
    let mapping = Mapping { start: map, len: reserved, skip: map.align_offset(HUGE_PAGE) };
    // SAFETY: `skip` is below HUGE_PAGE, and that much more than `len` was mapped.
    let first = unsafe { map.add(mapping.skip) };
    // A hint: without huge pages the volume works the same.
    // SAFETY: the range lies within the mapping.
    unsafe { libc::madvise(first.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
    // SAFETY: valid and zero until `mapping` is dropped.
    Ok(unsafe { Pages::from_raw(first, len, Box::new(mapping)) })
}

/// Returns free heap memory to the system, wherever it lies: after a burst of short buffers, glibc
/// would keep all of it because of the few buffers in between that are still in use.
pub(crate) fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it changes nothing that is allocated.
    unsafe {
        libc::malloc_trim(0);
    }
}

struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// Offset of the volume's first byte in the mapping.
    skip: usize,
}
// SAFETY: `Mapping` is only an address and a length.
unsafe impl Send for Mapping {}
// SAFETY: `Mapping` is only an address and a length.
unsafe impl Sync for Mapping {}

impl Backing for Mapping {
    fn release(&self, offset: usize, len: usize) -> bool {
        // Clearing less than this is cheaper than faulting it in again.
        if len < RELEASE_MIN || !(offset | len).is_multiple_of(4096) {
            return false;
        }
        // SAFETY: the volume's range lies within the mapping, which `Pages` has checked.
        unsafe {
            let first = self.start.add(self.skip + offset);
            libc::madvise(first.as_ptr().cast(), len, libc::MADV_DONTNEED) == 0
        }
    }

    /// Touches each page. MADV_POPULATE_WRITE could hold the lock of the address space for a
    /// second, because a thread of idle priority may not get the CPU for that long.
    fn populate(&self, offset: usize, len: usize) {
        for at in (offset..offset + len).step_by(SMALL_PAGE) {
            // SAFETY: the volume's range lies within the mapping, which `Pages` has checked; an
            // atomic write of the zero that is there loses nothing that another core writes.
            let byte = unsafe { AtomicU8::from_ptr(self.start.add(self.skip + at).as_ptr()) };
            // An OR of 0 would be compiled to a plain read, which only maps the shared zero page.
            let _ = byte.compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    fn use_small_pages(&self) {
        // SAFETY: the mapping's own range; a hint that changes no byte.
        unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_NOHUGEPAGE) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `map_pages`, and nothing refers to it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

const HUGE_PAGE: usize = 2 << 20;
/// The smallest page size of any machine, in bytes.
const SMALL_PAGE: usize = 4096;
const RELEASE_MIN: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Memory;

    #[test]
    fn released_pages_read_as_zeroes() {
        let pages = map_pages(1 << 20).unwrap();
        let seg = Memory::from_pages(&pages).seg(0, 1 << 20);
        seg.copy_from(&vec![1; 1 << 20]);
        pages.zero(1000, 500_000);
        let bytes = seg.to_vec();
        assert_eq!(bytes.iter().filter(|&&byte| byte == 0).count(), 500_000);
        assert_eq!((bytes[999], bytes[1000], bytes[500_999], bytes[501_000]), (1, 0, 0, 1));
    }
}
