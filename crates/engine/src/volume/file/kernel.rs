//! Ring entries and the system calls on files that no safe crate offers.
//!
//! [`FileRing`] keeps memory and file alive while the kernel uses them. A slot has at most one
//! entry in the ring, which owns the entry's memory from the push to the completion; then the
//! memory passes to the [`EntryOwner`]. The ring owns its completers, so dropping a channel does
//! not free memory that the kernel may still access.
#![expect(unsafe_code, reason = "the one module of file volumes that gives addresses to the kernel")]

use crate::core::reactor::EngineCore;
use crate::core::ring::{Completer, Registration};
use blockmux_volume::{Seg, SgList};
use io_uring::{opcode, squeue, types};
use rustix::fs::{
    AtFlags, FallocateFlags, FlockOperation, OFlags, SeekFrom, StatxFlags, fallocate, fcntl_getfl,
    fcntl_setfl, flock, ioctl_blkpbszget, ioctl_blksszget, seek, statx,
};
use rustix::io::Errno;
use std::cell::{OnceCell, RefCell};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::without_provenance_mut;
use std::rc::{Rc, Weak};
use std::sync::Arc;

/// Receives completions of ring entries, with the memory that they used.
pub(super) trait EntryOwner: Sized {
    /// Handles the completion of the entry of slot `token`. `result` is the system call's, negative
    /// for an error. The slot may take another entry.
    fn on_entry_done(&self, ring: &FileRing<Self>, token: u32, memory: SgList, result: i32);
}

/// A file with its entries in the ring, and the memory that they use.
pub(super) struct FileRing<L> {
    /// The file that all entries use.
    pub(super) file: Arc<File>,
    /// The volume's own open file. For a block device it is the exclusive handle, the only one
    /// through which ranges with dirty pages can be zeroed.
    exclusive: Arc<File>,
    /// One for each slot up to the highest ever used; the capacity is for all slots.
    holds: RefCell<Vec<HeldMemory>>,
    /// Weak, because the core's ring owns this object and the registration owns the core's ring.
    registration: OnceCell<Weak<Registration>>,
    pub(super) owner: L,
}

/// The memory that the kernel may access now.
#[derive(Default)]
struct HeldMemory {
    in_flight: bool,
    memory: SgList,
    iovecs: Vec<libc::iovec>,
}

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransferDirection {
    Read,
    Write,
}

/// Options of a ring entry.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EntryOptions {
    /// A completed write is on stable storage (`RWF_DSYNC`).
    pub(super) durable: bool,
    /// Runs on a kernel worker thread from the start (`IOSQE_ASYNC`), because it would block.
    pub(super) in_background: bool,
    /// Maximum number of bytes to transfer; 0: no limit.
    pub(super) max_bytes: usize,
}

impl<L: EntryOwner + 'static> FileRing<L> {
    /// Registers `slots` empty slots with the core's ring. Nothing completes after the registration
    /// is dropped.
    pub(super) fn launch(
        core: &EngineCore,
        file: Arc<File>,
        exclusive: Arc<File>,
        slots: u32,
        owner: L,
    ) -> (Rc<FileRing<L>>, Rc<Registration>) {
        let holds = RefCell::new(Vec::with_capacity(slots as usize));
        let ring = Rc::new(FileRing { file, exclusive, holds, registration: OnceCell::new(), owner });
        let registration = Rc::new(core.register(ring.clone()));
        ring.registration.get_or_init(|| Rc::downgrade(&registration));
        (ring, registration)
    }

    /// Transfers between `memory`, from byte `skip` on, and the file. The transfer may be short, in
    /// particular if there are more segments than one entry can name.
    ///
    /// # Panics
    /// If the slot has an entry in flight, `skip` leaves nothing, or a read goes to memory borrowed
    /// from a `Chunk`.
    pub(super) fn transfer(
        &self,
        token: u32,
        direction: TransferDirection,
        memory: SgList,
        skip: usize,
        offset: u64,
        options: EntryOptions,
    ) {
        let takes_reads = |seg: &Seg| seg.is_writable() || seg.is_registered();
        assert!(
            direction == TransferDirection::Write || memory.segs().iter().all(takes_reads),
            "a read into borrowed memory"
        );
        let entry = TransferEntry {
            fd: types::Fd(self.file.as_raw_fd()),
            direction,
            offset,
            rw_flags: if options.durable { libc::RWF_DSYNC } else { 0 },
            // The parts of a request are all in its own buffer.
            buffer: memory.segs().first().and_then(Seg::registered_part).map(|part| part.index),
        };
        self.push(token, |hold| {
            let built = if let [seg] = memory.segs() {
                assert!(skip < seg.len());
                let most = if options.max_bytes == 0 { usize::MAX } else { options.max_bytes };
                entry.of_one(position(seg).wrapping_add(skip), (seg.len() - skip).min(most) as u32)
            } else {
                gather(&memory, skip, &mut hold.iovecs);
                entry.of_many(&hold.iovecs)
            };
            hold.memory = memory;
            built.flags(flags_of(options))
        });
    }

    /// `fallocate(2)`, which the kernel always runs on a worker thread.
    pub(super) fn fallocate(&self, token: u32, mode: i32, offset: u64, len: u64) {
        let fd = types::Fd(self.exclusive.as_raw_fd());
        self.push(token, |_| opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build());
    }

    /// `fdatasync(2)` on a kernel worker thread.
    pub(super) fn sync(&self, token: u32) {
        let fd = types::Fd(self.file.as_raw_fd());
        self.push(token, |_| opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build());
    }

    /// Reads ahead into the page cache.
    pub(super) fn will_need(&self, token: u32, offset: u64, len: u32) {
        let fd = types::Fd(self.file.as_raw_fd());
        self.push(token, |_| {
            let advise = opcode::Fadvise::new(fd, len.into(), libc::POSIX_FADV_WILLNEED).offset(offset);
            // Kernels before 6.1 would read ahead on this thread.
            advise.build().flags(squeue::Flags::ASYNC)
        });
    }

    /// Cancels the slot's entry in flight.
    pub(super) fn cancel(&self, token: u32) {
        if let Some(registration) = self.registration.get().and_then(Weak::upgrade) {
            registration.cancel(token);
        }
    }

    fn push(&self, token: u32, build: impl FnOnce(&mut HeldMemory) -> squeue::Entry) {
        // After the registration is dropped, no user waits for the completion.
        let Some(registration) = self.registration.get().and_then(Weak::upgrade) else { return };
        let mut holds = self.holds.borrow_mut();
        if holds.len() <= token as usize {
            holds.resize_with(token as usize + 1, HeldMemory::default);
        }
        let hold = &mut holds[token as usize];
        assert!(!hold.in_flight, "one entry a slot");
        let entry = build(hold);
        hold.in_flight = true;
        // SAFETY: `entry` names one of the files, and the hold's memory and iovecs. This object
        // owns them and is the completer that `registration` was made for; while `in_flight` is
        // set, nothing touches them, and only `complete` clears it. Neither address depends on
        // where the hold itself is.
        unsafe { registration.push(entry, token) }
    }
}

impl<L: EntryOwner + 'static> Completer for FileRing<L> {
    fn complete(&self, token: u32, result: i32) {
        let memory = match self.holds.borrow_mut().get_mut(token as usize) {
            Some(hold) => {
                hold.in_flight = false;
                std::mem::take(&mut hold.memory)
            }
            // The completion of a cancellation itself.
            None => return,
        };
        self.owner.on_entry_done(self, token, memory, result);
    }
}

fn flags_of(options: EntryOptions) -> squeue::Flags {
    if options.in_background { squeue::Flags::ASYNC } else { squeue::Flags::empty() }
}

/// A transfer as an entry of the ring.
struct TransferEntry {
    fd: types::Fd,
    direction: TransferDirection,
    /// Position in the file.
    offset: u64,
    /// `RWF_*`, of a write.
    rw_flags: i32,
    /// The registered buffer of the data, if it is in one.
    buffer: Option<u16>,
}

impl TransferEntry {
    fn of_one(&self, start: *mut u8, len: u32) -> squeue::Entry {
        let TransferEntry { fd, direction, offset, rw_flags, buffer } = *self;
        match (direction, buffer) {
            (TransferDirection::Read, None) => opcode::Read::new(fd, start, len).offset(offset).build(),
            (TransferDirection::Read, Some(buffer)) => {
                opcode::ReadFixed::new(fd, start, len, buffer).offset(offset).build()
            }
            (TransferDirection::Write, None) => {
                opcode::Write::new(fd, start, len).offset(offset).rw_flags(rw_flags).build()
            }
            (TransferDirection::Write, Some(buffer)) => {
                opcode::WriteFixed::new(fd, start, len, buffer).offset(offset).rw_flags(rw_flags).build()
            }
        }
    }

    fn of_many(&self, iovecs: &[libc::iovec]) -> squeue::Entry {
        let TransferEntry { fd, direction, offset, rw_flags, buffer } = *self;
        let (start, count) = (iovecs.as_ptr(), iovecs.len() as u32);
        match (direction, buffer) {
            (TransferDirection::Read, None) => opcode::Readv::new(fd, start, count).offset(offset).build(),
            (TransferDirection::Read, Some(buffer)) => {
                opcode::ReadvFixed::new(fd, start, count, buffer).offset(offset).build()
            }
            (TransferDirection::Write, None) => {
                opcode::Writev::new(fd, start, count).offset(offset).rw_flags(rw_flags).build()
            }
            (TransferDirection::Write, Some(buffer)) => {
                opcode::WritevFixed::new(fd, start, count, buffer).offset(offset).rw_flags(rw_flags).build()
            }
        }
    }
}

/// Where the kernel finds a segment: its address, or its position in a registered buffer.
fn position(seg: &Seg) -> *mut u8 {
    seg.registered_part().map_or_else(|| seg.as_ptr(), |part| without_provenance_mut(part.offset))
}

/// Collects the segments from byte `skip` on, as many as one system call takes.
fn gather(memory: &SgList, mut skip: usize, iovecs: &mut Vec<libc::iovec>) {
    iovecs.clear();
    for seg in memory.segs() {
        if skip < seg.len() && iovecs.len() < MAX_IOVECS {
            let start = position(seg).wrapping_add(skip);
            iovecs.push(libc::iovec { iov_base: start.cast(), iov_len: seg.len() - skip });
        }
        skip = skip.saturating_sub(seg.len());
    }
    assert!(!iovecs.is_empty());
}

/// The kernel's alignment for direct I/O (`STATX_DIOALIGN`), in bytes: of memory addresses, and of
/// file offsets and lengths; 0 for both: not supported. `None` before Linux 6.1 and where a file
/// system does not support the query.
pub(super) fn direct_alignment(file: &File) -> Option<(u32, u32)> {
    let stat =
        statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::from_bits_retain(libc::STATX_DIOALIGN)).ok()?;
    let is_known = stat.stx_mask & libc::STATX_DIOALIGN != 0;
    is_known.then_some((stat.stx_dio_mem_align, stat.stx_dio_offset_align))
}

/// The file's length in bytes, as cached: without a request to the server of a network file system.
pub(super) fn cached_len(file: &File) -> Option<u64> {
    let stat = statx(file, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::SIZE).ok()?;
    (stat.stx_mask & StatxFlags::SIZE.bits() != 0).then_some(stat.stx_size)
}

/// Sets `O_DIRECT` on this open file.
pub(super) fn set_direct(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)? | OFlags::DIRECT)?)
}

/// Takes an exclusive `flock`; `WouldBlock` if another open file has it.
pub(crate) fn lock_exclusive(file: &File) -> io::Result<()> {
    Ok(flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

/// Takes a shared open file description lock (`fcntl(2)`) on one byte.
pub(super) fn lock_byte(file: &File, offset: i64) -> io::Result<()> {
    let lock = byte_lock(libc::F_RDLCK, offset);
    // SAFETY: `lock` lives during the call.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) })
}

/// Whether another open file has a lock on that byte.
pub(super) fn is_byte_locked(file: &File, offset: i64) -> io::Result<bool> {
    let mut lock = byte_lock(libc::F_WRLCK, offset);
    // SAFETY: `lock` lives during the call.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) })?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

fn byte_lock(kind: i32, offset: i64) -> libc::flock {
    // SAFETY: all fields may be zero, and open file description locks require a process id of 0.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    (lock.l_start, lock.l_len) = (offset, 1);
    lock
}

/// A block device's logical and physical block size, in bytes.
pub(super) fn block_sizes(device: &File) -> io::Result<(u32, u32)> {
    Ok((ioctl_blksszget(device)?, ioctl_blkpbszget(device)?))
}

/// `fallocate(2)` on the calling thread.
pub(super) fn fallocate_now(file: &File, mode: i32, offset: u64, len: u64) -> io::Result<()> {
    Ok(fallocate(file, FallocateFlags::from_bits_retain(mode as u32), offset, len)?)
}

/// Offset of the first data at or after `offset`; `None`: a hole up to the end.
pub(super) fn seek_data(file: &File, offset: u64) -> io::Result<Option<u64>> {
    found(seek(file, SeekFrom::Data(offset)))
}

/// Offset of the first hole at or after `offset`; `None`: the file ends before it.
pub(super) fn seek_hole(file: &File, offset: u64) -> io::Result<Option<u64>> {
    found(seek(file, SeekFrom::Hole(offset)))
}

fn found(offset: rustix::io::Result<u64>) -> io::Result<Option<u64>> {
    match offset {
        Err(Errno::NXIO) => Ok(None),
        offset => Ok(Some(offset?)),
    }
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Linux's `UIO_MAXIOV`.
const MAX_IOVECS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Memory;

    #[test]
    fn gathering_starts_within_a_segment() {
        let memory = Memory::from_heap(100);
        let mut list = SgList::one(memory.seg(0, 10));
        list.push(memory.seg(20, 10));
        list.push(memory.seg(40, 10));
        let mut iovecs = Vec::new();
        gather(&list, 15, &mut iovecs);
        let start = memory.seg(0, 1).as_ptr();
        let named: Vec<(usize, usize)> =
            iovecs.iter().map(|iovec| (iovec.iov_base as usize - start as usize, iovec.iov_len)).collect();
        assert_eq!(named, [(25, 5), (40, 10)]);
    }

    #[test]
    fn gathering_stops_at_the_limit_of_one_call() {
        let memory = Memory::from_heap(1);
        let mut list = SgList::default();
        (0..=MAX_IOVECS).for_each(|_| list.push(memory.seg(0, 1)));
        let mut iovecs = Vec::new();
        gather(&list, 0, &mut iovecs);
        assert_eq!(iovecs.len(), MAX_IOVECS);
    }
}
