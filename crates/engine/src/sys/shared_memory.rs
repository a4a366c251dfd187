//! Memory that is shared with another process, by a descriptor of a file.
#![expect(unsafe_code, reason = "maps files of another process")]

use super::lost_memory::{MappingOwner, WatchedMapping, watch};
use blockmux_volume::Pages;
use blockmux_volume::buf::Backing;
use rustix::fs::{FileType, MemfdFlags, SealFlags, fcntl_add_seals, fstat, fstatfs, ftruncate, memfd_create};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Maps `len` bytes of a file at `offset`, shared with others that have it open. `owner` is told if
/// they are lost, as when another process makes the file shorter; without it, that ends this
/// process.
///
/// # Errors
/// If they are not within the file, or cannot be mapped, or the owner has too many mappings.
pub(crate) fn map_shared(
    file: BorrowedFd<'_>,
    offset: u64,
    len: u64,
    owner: Option<MappingOwner<'_>>,
) -> io::Result<Arc<Pages>> {
    let refused = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why);
    let found = fstat(file)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile || !is_memory(file)? {
        return Err(refused(
            "it is no file of tmpfs or hugetlbfs; give the guest shared memory of these, as a memfd",
        ));
    }
    let end =
        offset.checked_add(len).filter(|end| u64::try_from(found.st_size).is_ok_and(|size| *end <= size));
    let end = end.filter(|_| len > 0).ok_or_else(|| refused("the region is not within its file"))?;
    // A page of the file, which may be a huge one.
    let page = u64::try_from(found.st_blksize).ok().filter(|page| page.is_power_of_two());
    let page = page.ok_or_else(|| refused("the file has no page size"))?;
    let first = offset & !(page - 1);
    let mapped = end.checked_next_multiple_of(page).ok_or_else(|| refused("the region is too long"))? - first;
    let mapped = usize::try_from(mapped).map_err(|_| refused("the region is too long"))?;
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE);
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let start = unsafe {
        libc::mmap(std::ptr::null_mut(), mapped, access, kind, file.as_raw_fd(), first as libc::off_t)
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
    // The memory of others does not belong into a core dump.
    // SAFETY: the range was mapped above.
    unsafe { libc::madvise(start.as_ptr().cast(), mapped, libc::MADV_DONTDUMP) };
    let mut mapping = FileMapping { start, len: mapped, watched: None };
    let watched = owner.map(|owner| watch(start.as_ptr().expose_provenance(), mapped, owner));
    mapping.watched = watched.transpose()?;
    // SAFETY: `offset` is in the first page, and the region ends within the mapping.
    let region = unsafe { start.add((offset - first) as usize) };
    // SAFETY: mapped until `mapping` is dropped, and initialized, as any file is.
    Ok(unsafe { Pages::from_raw(region, len as usize, Box::new(mapping)) })
}

/// Whether a file's pages are memory. Those of another file system come from a disk or a server,
/// which may be the very process that shares the file: an access would wait for it, and no signal
/// ends that.
fn is_memory(file: BorrowedFd<'_>) -> io::Result<bool> {
    Ok([TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&fstatfs(file)?.f_type.cast_unsigned()))
}

/// New zeroed memory that can be handed to another process, which cannot make it shorter.
///
/// # Errors
/// If there is not enough memory.
pub(crate) fn new_shared(name: &str, len: usize) -> io::Result<(OwnedFd, Arc<Pages>)> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, len as u64)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let pages = map_shared(file.as_fd(), 0, len as u64, None)?;
    Ok((file, pages))
}

/// A mapping of a file.
struct FileMapping {
    start: NonNull<u8>,
    len: usize,
    watched: Option<WatchedMapping>,
}
// SAFETY: an address, a length, and what any thread may use.
unsafe impl Send for FileMapping {}
// SAFETY: an address, a length, and what any thread may use.
unsafe impl Sync for FileMapping {}

impl Backing for FileMapping {}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // Another mapping may soon be at this address.
        self.watched = None;
        // SAFETY: mapped by `map_shared`, and nothing refers to it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Of `linux/magic.h`.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Memory;

    #[test]
    fn both_sides_see_the_same_bytes_at_any_offset() {
        let (file, pages) = new_shared("test", 3 * 4096).unwrap();
        let mapped = map_shared(file.as_fd(), 4104, 5000, None).unwrap();
        Memory::from_pages(&pages).seg(4104, 4).copy_from(b"abcd");
        assert_eq!(mapped.len(), 5000);
        assert_eq!(Memory::from_pages(&mapped).seg(0, 4).to_vec(), b"abcd");
    }

    #[test]
    fn a_file_of_another_file_system_is_refused() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let refused = map_shared(file.as_fd(), 0, 4096, None).err().unwrap();
        assert!(refused.to_string().contains("tmpfs"), "{refused}");
    }

    #[test]
    fn a_region_beyond_its_file_is_refused() {
        let (file, _pages) = new_shared("test", 4096).unwrap();
        for (len, offset) in [(4097, 0), (1, 4096), (u64::MAX, 1), (0, 0), (u64::MAX, 4096)] {
            assert!(map_shared(file.as_fd(), offset, len, None).is_err(), "{len} bytes at {offset}");
        }
        let (pipe, _writer) = std::io::pipe().unwrap();
        assert!(map_shared(pipe.as_fd(), 0, 1, None).is_err());
    }
}
