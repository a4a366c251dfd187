//! I/O memory: pool buffers, pages of RAM volumes, receive buffers.
//!
//! The kernel, a network card or another core may write such memory at any time, so it is handled
//! by address and length: bytes are copied in or out, or passed on. The exception is [`Chunk`],
//! which owns its unfilled part and whose filled part is never written, so that parsers may read it
//! as a slice.
//!
//! Two cores that write the same blocks concurrently leave a mix of both, as on any disk. In Rust's
//! terms that is a data race; as with guest memory in a hypervisor, the bytes are only ever treated
//! as bytes.
#![expect(unsafe_code, reason = "the one module that reads and writes shared I/O memory")]

mod caches;
mod words;

pub(crate) use caches::settle_streams;

use crate::account::PeerAccount;
use crate::crc32c::Crc32c;
use crate::pool::PoolHandle;
use crate::registration::{LocalKey, ProtectionDomain, Registration, RegistrationError, Registrations};
use crate::volume::Populated;
use memmap2::MmapMut;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::{Cell, RefCell};
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Owner of the memory of [`Pages`].
///
/// Dropping it frees the memory; by then no [`Seg`] refers to it.
pub trait Backing: Send + Sync {
    /// Returns the range to the system such that it reads as zeroes afterwards, or returns `false`
    /// and does nothing. Offset and length are in bytes and arbitrary; an implementation may
    /// decline unaligned ranges.
    fn release(&self, _offset: usize, _len: usize) -> bool {
        false
    }

    /// Faults in every page of the range without changing its content, despite concurrent writes.
    fn populate(&self, _offset: usize, _len: usize) {}

    /// Makes later page faults use small pages; existing huge pages stay.
    fn use_small_pages(&self) {}
}

/// The memory of a RAM volume: zeroed when new, shared by all cores.
pub struct Pages {
    start: NonNull<u8>,
    len: usize,
    // Declared before `backing`, so that it is dropped first.
    registrations: Mutex<Registrations>,
    backing: Box<dyn Backing>,
    /// Number of bytes to populate.
    to_populate: AtomicUsize,
    /// Number of bytes populated so far.
    populated: AtomicUsize,
}
// SAFETY: `Pages` gives out no references, only addresses and copies; the module doc covers races.
unsafe impl Send for Pages {}
// SAFETY: `Pages` gives out no references, only addresses and copies; the module doc covers races.
unsafe impl Sync for Pages {}

impl Pages {
    /// Allocates zeroed memory from the heap. Pages are allocated at first use.
    #[must_use]
    pub fn from_heap(len: usize) -> Arc<Pages> {
        let heap = Heap::aligned(len);
        Pages::over(heap.start, len, Box::new(heap))
    }

    /// Wraps memory that `backing` owns.
    ///
    /// # Safety
    /// `start` must be valid for reads and writes of `len` bytes, initialized, until `backing` is
    /// dropped.
    #[must_use]
    pub unsafe fn from_raw(start: NonNull<u8>, len: usize, backing: Box<dyn Backing>) -> Arc<Pages> {
        Pages::over(start, len, backing)
    }

    fn over(start: NonNull<u8>, len: usize, backing: Box<dyn Backing>) -> Arc<Pages> {
        let none = || AtomicUsize::new(0);
        let registrations = Mutex::default();
        Arc::new(Pages { start, len, registrations, backing, to_populate: none(), populated: none() })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes the range read as zeroes. Returns whole pages to the system if possible. Memory
    /// registered with a device is cleared instead, because the device would continue to use the
    /// old pages.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn zero(&self, offset: usize, len: usize) {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        let first = offset.next_multiple_of(PAGE);
        let last = (offset + len) / PAGE * PAGE;
        // Locked while pages are released, so that none is registered meanwhile.
        let registrations = self.registrations();
        if first < last && registrations.is_empty() && self.backing.release(first, last - first) {
            self.fill_zero(offset, first - offset);
            self.fill_zero(last, offset + len - last);
        } else {
            self.fill_zero(offset, len);
        }
    }

    /// Sets the number of bytes that will be populated, for [`Pages::populated`].
    pub fn expect_populated(&self, len: usize) {
        self.to_populate.store(len, Ordering::Release);
    }

    /// Faults in the range without changing its content, despite concurrent writes. May block for
    /// milliseconds, so cores do not call it.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn populate(&self, offset: usize, len: usize) {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        self.backing.populate(offset, len);
        self.populated.fetch_add(len, Ordering::AcqRel);
    }

    /// Progress of populating; `None` if nothing is to be populated.
    #[must_use]
    pub fn populated(&self) -> Option<Populated> {
        let of = self.to_populate.load(Ordering::Acquire) as u64;
        (of > 0).then(|| Populated { bytes: self.populated.load(Ordering::Acquire) as u64, of })
    }

    /// Makes later page faults use small pages; existing huge pages stay.
    pub fn use_small_pages(&self) {
        self.backing.use_small_pages();
    }

    fn register(&self, domain: &Arc<dyn ProtectionDomain>) -> Result<Arc<Registration>, RegistrationError> {
        let register = || Registration::new(domain, self.start, self.len);
        self.registrations().get_or_insert(domain, register).cloned()
    }

    fn registrations(&self) -> MutexGuard<'_, Registrations> {
        self.registrations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fill_zero(&self, offset: usize, len: usize) {
        // SAFETY: in bounds, which `zero` checked.
        unsafe { self.start.add(offset).write_bytes(0, len) }
    }
}

/// One core's handle to bytes with a stable address; a clone is another handle to the same bytes.
///
/// Not `Send`, so that reference counts need no atomics: cores that share [`Pages`] have a handle
/// each.
pub struct Memory(Rc<Block>);

struct Block {
    start: NonNull<u8>,
    len: usize,
    // Declared before `source`, so that it is dropped first.
    registrations: RefCell<Registrations>,
    source: Source,
}

enum Source {
    Heap {
        _heap: Heap,
    },
    /// `account` is charged until the memory is returned.
    Pool {
        pool: PoolHandle,
        account: Cell<Option<Rc<PeerAccount>>>,
        _heap: Heap,
    },
    Shared {
        pages: Arc<Pages>,
    },
    /// The bytes are not this process's: only entries of the core's ring can name them.
    Registered {
        index: u16,
    },
}

impl Memory {
    /// Allocates zeroed, page-aligned memory from the heap.
    #[must_use]
    pub fn from_heap(len: usize) -> Memory {
        let heap = Heap::aligned(len);
        Memory::over(heap.start, len, Source::Heap { _heap: heap })
    }

    /// This core's handle to shared pages.
    #[must_use]
    pub fn from_pages(pages: &Arc<Pages>) -> Memory {
        let source = Source::Shared { pages: pages.clone() };
        Memory::over(pages.start, pages.len, source)
    }

    /// A buffer of `len` bytes that the kernel has registered with this core's ring, such as the
    /// pages of a request to a disk. The process has no address of its bytes: only entries of the
    /// ring move them, by the buffer's `index`. The owner keeps it registered until the I/O
    /// with it completes.
    #[must_use]
    pub fn registered(index: u16, len: usize) -> Memory {
        let start = NonNull::without_provenance(REGISTERED_START);
        Memory::over(start, len, Source::Registered { index })
    }

    /// Memory that returns to its pool when the last handle is dropped; `None` if out of memory.
    pub(crate) fn for_pool(len: usize, pool: PoolHandle) -> Option<Memory> {
        let heap = Heap::try_aligned(len).ok()?;
        let start = heap.start;
        let source = Source::Pool { pool, account: Cell::new(None), _heap: heap };
        Some(Memory::over(start, len, source))
    }

    fn over(start: NonNull<u8>, len: usize, source: Source) -> Memory {
        Memory(Rc::new(Block { start, len, registrations: RefCell::default(), source }))
    }

    /// Charges pool memory to another account; returns the previous one.
    #[inline]
    pub(crate) fn charge(&self, to: Option<Rc<PeerAccount>>) -> Option<Rc<PeerAccount>> {
        match &self.0.source {
            Source::Pool { account, .. } => account.replace(to),
            Source::Heap { .. } | Source::Shared { .. } | Source::Registered { .. } => None,
        }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// The segment of `len` bytes at `offset`.
    ///
    /// # Panics
    /// If it is out of bounds.
    #[must_use]
    pub fn seg(&self, offset: usize, len: usize) -> Seg {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.0.len));
        let access = match self.0.source {
            Source::Registered { .. } => SegAccess::ByRing,
            Source::Heap { .. } | Source::Pool { .. } | Source::Shared { .. } => SegAccess::ReadWrite,
        };
        Seg { memory: self.clone(), start: beyond(self.0.start, offset), len: len as u32, access }
    }

    /// Frees pool memory instead of returning it to the pool.
    pub(crate) fn leave_pool(self) {
        // Moving the block out of its handle leaves nothing for `drop` to return.
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is never used or dropped again, so the count is taken over exactly once.
        drop(unsafe { std::ptr::read(&raw const this.0) });
    }

    #[inline]
    fn is_only_handle(&self) -> bool {
        Rc::strong_count(&self.0) == 1
    }
}

impl Clone for Memory {
    #[inline]
    fn clone(&self) -> Memory {
        Memory(Rc::clone(&self.0))
    }
}

impl Drop for Memory {
    #[inline]
    fn drop(&mut self) {
        if let Source::Pool { pool, .. } = &self.0.source
            && self.is_only_handle()
            && let Some(pool) = pool.upgrade()
        {
            pool.put(Memory(Rc::clone(&self.0)));
        }
    }
}

/// A segment of [`Memory`] of at most 4 GiB; a clone shares the bytes.
#[derive(Clone)]
pub struct Seg {
    memory: Memory,
    start: NonNull<u8>,
    len: u32,
    access: SegAccess,
}

/// What this process may do with the bytes of a segment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SegAccess {
    ReadWrite,
    /// They are borrowed from a [`Chunk`], and may be read as a slice.
    Read,
    /// Nothing: see [`Memory::registered`].
    ByRing,
}

/// A part of a buffer that is registered with the core's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisteredPart {
    /// Index of the buffer in the ring's table.
    pub index: u16,
    /// Offset of the part in the buffer, in bytes.
    pub offset: usize,
}

impl Seg {
    /// A segment of new heap memory with a copy of `bytes`.
    #[must_use]
    pub fn from_slice(bytes: &[u8]) -> Seg {
        let seg = Memory::from_heap(bytes.len()).seg(0, bytes.len());
        seg.copy_from(bytes);
        seg
    }

    /// Length in bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether this process may change the bytes: not those borrowed from a [`Chunk`], and not
    /// those of a registered buffer.
    #[inline]
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.access == SegAccess::ReadWrite
    }

    /// Whether the bytes are in a registered buffer ([`Memory::registered`]): they can be neither
    /// read nor changed here, and [`Seg::as_ptr`] is not their address.
    #[inline]
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.access == SegAccess::ByRing
    }

    /// Which part of a registered buffer this is; `None` if it is memory of this process.
    #[inline]
    #[must_use]
    pub fn registered_part(&self) -> Option<RegisteredPart> {
        match self.memory.0.source {
            Source::Registered { index } => {
                let offset = self.start.addr().get() - self.memory.0.start.addr().get();
                Some(RegisteredPart { index, offset })
            }
            Source::Heap { .. } | Source::Pool { .. } | Source::Shared { .. } => None,
        }
    }

    /// Whether only this thread writes the bytes: they are not in [`Pages`], which cores may share.
    /// A buffer being filled by the kernel is private once that has completed.
    #[inline]
    #[must_use]
    pub fn is_private(&self) -> bool {
        matches!(self.memory.0.source, Source::Heap { .. } | Source::Pool { .. })
    }

    /// Adds private bytes to a checksum without a copy; returns whether they are private.
    #[inline]
    pub(crate) fn add_private(&self, crc: &mut Crc32c) -> bool {
        if self.is_private() {
            // SAFETY: in bounds and initialized; such memory never leaves this thread, which does
            // not write to it during the sum.
            crc.add(unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) });
        }
        self.is_private()
    }

    /// The address, for a system call or a queue of a device; nothing is there if the segment is
    /// registered.
    #[inline]
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The local key of the block that contains this segment, for work requests to a device. The
    /// first call registers the block.
    ///
    /// # Errors
    /// If the device cannot register the block, or the bytes have no address.
    #[inline]
    pub fn local_key(&self, domain: &Arc<dyn ProtectionDomain>) -> Result<LocalKey, RegistrationError> {
        let block = &*self.memory.0;
        let register = || match &block.source {
            // One registration for all cores.
            Source::Shared { pages } => pages.register(domain),
            Source::Registered { .. } => Err(RegistrationError),
            Source::Heap { .. } | Source::Pool { .. } => Registration::new(domain, block.start, block.len),
        };
        let mut registrations = block.registrations.borrow_mut();
        registrations.get_or_insert(domain, register).map(|registration| registration.key)
    }

    /// The subsegment of `len` bytes at `offset`.
    ///
    /// # Panics
    /// If it is out of bounds.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Seg {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len()));
        let start = beyond(self.start, offset);
        Seg { memory: self.memory.clone(), start, len: len as u32, access: self.access }
    }

    /// Copies `source` to the start of this segment.
    ///
    /// # Panics
    /// If `source` is longer, or the segment is not writable.
    #[inline]
    pub fn copy_from(&self, source: &[u8]) {
        assert!(source.len() <= self.len() && self.is_writable());
        // SAFETY: in bounds; a Rust slice never overlaps writable I/O memory.
        unsafe { self.as_ptr().copy_from_nonoverlapping(source.as_ptr(), source.len()) }
    }

    /// Fills `target` from the start of this segment.
    ///
    /// # Panics
    /// If `target` is longer, or the segment is registered.
    #[inline]
    pub fn copy_to(&self, target: &mut [u8]) {
        assert!(target.len() <= self.len() && !self.is_registered());
        // SAFETY: in bounds; `target` is exclusive, so it does not overlap.
        unsafe { target.as_mut_ptr().copy_from_nonoverlapping(self.as_ptr(), target.len()) }
    }

    /// Appends `len` bytes at `offset` to `target`.
    ///
    /// # Panics
    /// If they are out of bounds, or the segment is registered.
    #[inline]
    pub fn append_to(&self, offset: usize, len: usize, target: &mut Vec<u8>) {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len()) && !self.is_registered());
        target.reserve(len);
        // SAFETY: in bounds on both sides; `target` is exclusive, so it does not overlap, and what
        // is added to its length was written.
        unsafe {
            let end = target.as_mut_ptr().add(target.len());
            end.copy_from_nonoverlapping(self.as_ptr().add(offset), len);
            target.set_len(target.len() + len);
        }
    }

    /// Copies this segment to the start of `target`, which may overlap it.
    ///
    /// # Panics
    /// If `target` is shorter or not writable, or this segment is registered.
    #[inline]
    pub fn copy_to_seg(&self, target: &Seg) {
        assert!(self.len <= target.len && target.is_writable() && !self.is_registered());
        // SAFETY: in bounds on both sides; `copy_from` allows overlap.
        unsafe { target.as_ptr().copy_from(self.as_ptr(), self.len()) }
    }

    /// Fills this segment with zeroes.
    ///
    /// # Panics
    /// If the segment is not writable.
    pub fn fill_zero(&self) {
        assert!(self.is_writable());
        // SAFETY: in bounds.
        unsafe { self.as_ptr().write_bytes(0, self.len()) }
    }

    /// A copy of the bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.append_to(0, self.len(), &mut bytes);
        bytes
    }
}

impl std::fmt::Debug for Seg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Seg({} bytes)", self.len)
    }
}

/// A receive buffer: `[ taken | unread | spare ]`.
///
/// Only the receiver writes the spare part. Filled bytes are not overwritten while any handle can
/// read them, so parsers read them as a slice and borrow segments of them without a copy.
pub struct Chunk {
    memory: Memory,
    /// End of the taken part, start of the unread part.
    taken: usize,
    /// End of the unread part, start of the spare part.
    filled: usize,
}

impl Chunk {
    /// An empty buffer over memory without other handles.
    ///
    /// # Panics
    /// If `memory` has another handle.
    #[must_use]
    pub fn new(memory: Memory) -> Chunk {
        let is_private = matches!(memory.0.source, Source::Heap { .. } | Source::Pool { .. });
        assert!(memory.is_only_handle() && is_private);
        Chunk { memory, taken: 0, filled: 0 }
    }

    /// A buffer with a copy of `bytes`, unread.
    #[must_use]
    pub fn from_slice(bytes: &[u8]) -> Chunk {
        let mut chunk = Chunk::new(Memory::from_heap(bytes.len()));
        chunk.extend(bytes);
        chunk
    }

    /// The unread bytes.
    #[inline]
    #[must_use]
    pub fn unread(&self) -> &[u8] {
        // SAFETY: in bounds and initialized; segments borrowed from here are read-only, and `spare`
        // begins after.
        unsafe {
            std::slice::from_raw_parts(self.memory.0.start.add(self.taken).as_ptr(), self.filled - self.taken)
        }
    }

    /// Borrows `len` unread bytes at `offset`; they stay valid after [`Chunk::take`].
    ///
    /// # Panics
    /// If fewer bytes are unread.
    #[inline]
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Seg {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.filled - self.taken));
        let mut seg = self.memory.seg(self.taken + offset, len);
        seg.access = SegAccess::Read;
        seg
    }

    /// Marks the first `len` unread bytes as taken.
    ///
    /// # Panics
    /// If fewer bytes are unread.
    #[inline]
    pub fn take(&mut self, len: usize) {
        assert!(len <= self.filled - self.taken);
        self.taken += len;
        if self.taken == self.filled {
            self.recycle();
        }
    }

    /// The spare part, to receive into; call [`Chunk::fill`] with the number of bytes received.
    #[inline]
    pub fn spare(&mut self) -> &mut [u8] {
        // SAFETY: in bounds and initialized; no other handle reaches beyond `filled` (see
        // `recycle`).
        unsafe {
            std::slice::from_raw_parts_mut(
                self.memory.0.start.add(self.filled).as_ptr(),
                self.memory.len() - self.filled,
            )
        }
    }

    /// Marks the first `len` spare bytes as unread.
    ///
    /// # Panics
    /// If fewer bytes are spare.
    #[inline]
    pub fn fill(&mut self, len: usize) {
        assert!(len <= self.memory.len() - self.filled);
        self.filled += len;
    }

    /// Length of the spare part in bytes.
    #[inline]
    #[must_use]
    pub fn room(&self) -> usize {
        self.memory.len() - self.filled
    }

    /// Length of the whole buffer in bytes.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.memory.len()
    }

    /// Whether no byte is unread or borrowed, so that another connection could use the buffer.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.taken == self.filled && self.memory.is_only_handle()
    }

    /// Copies `bytes` into the spare part.
    ///
    /// # Panics
    /// If there is less room.
    pub fn extend(&mut self, bytes: &[u8]) {
        self.spare()[..bytes.len()].copy_from_slice(bytes);
        self.fill(bytes.len());
    }

    /// Moves unread bytes to the front, unless a segment is borrowed; returns whether it did.
    pub fn compact(&mut self) -> bool {
        if !self.memory.is_only_handle() {
            return false;
        }
        let len = self.filled - self.taken;
        // SAFETY: in bounds; there is no other handle, and `copy_from` allows overlap.
        unsafe {
            let start = self.memory.0.start.as_ptr();
            start.copy_from(start.add(self.taken), len);
        }
        (self.taken, self.filled) = (0, len);
        true
    }

    /// Starts over at the front if everything is taken and no segment is borrowed.
    #[inline]
    pub fn recycle(&mut self) {
        if self.is_idle() {
            (self.taken, self.filled) = (0, 0);
        }
    }
}

/// Memory from the allocator or, if long, from the system; freed on drop.
struct Heap {
    start: NonNull<u8>,
    _memory: Allocated,
}
// SAFETY: `Heap` holds only an address and the means to free it.
unsafe impl Send for Heap {}
// SAFETY: `Heap` holds only an address and the means to free it.
unsafe impl Sync for Heap {}
impl Backing for Heap {}

enum Allocated {
    Here { _block: Allocation },
    Mapped { _pages: MmapMut },
}

/// A block of the allocator.
struct Allocation {
    start: NonNull<u8>,
    layout: Layout,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `try_aligned`.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

impl Heap {
    /// A page-aligned buffer of `len` bytes; pages of long buffers are allocated at first use.
    fn aligned(len: usize) -> Heap {
        Heap::try_aligned(len).unwrap_or_else(|layout| handle_alloc_error(layout))
    }

    /// A page-aligned buffer of `len` bytes, or the layout that could not be allocated.
    fn try_aligned(len: usize) -> Result<Heap, Layout> {
        let layout = Layout::from_size_align(len.max(1), PAGE).expect("a buffer fits the address space");
        if len >= MAPPED_MIN {
            let mut pages = MmapMut::map_anon(len).map_err(|_| layout)?;
            let start = NonNull::new(pages.as_mut_ptr()).ok_or(layout)?;
            return Ok(Heap { start, _memory: Allocated::Mapped { _pages: pages } });
        }
        // SAFETY: the layout has a size above zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(layout)?;
        Ok(Heap { start, _memory: Allocated::Here { _block: Allocation { start, layout } } })
    }
}

/// The address `offset` bytes after `start`, which is within the same block.
#[inline]
fn beyond(start: NonNull<u8>, offset: usize) -> NonNull<u8> {
    // SAFETY: a block does not reach the end of the address space. `wrapping_add`, because nothing
    // is at the addresses of a registered buffer.
    unsafe { NonNull::new_unchecked(start.as_ptr().wrapping_add(offset)) }
}

/// Where a registered buffer would begin if it had an address: never mapped, and aligned as every
/// block.
const REGISTERED_START: NonZeroUsize = NonZeroUsize::MIN.saturating_add(PAGE - 1);
/// Alignment that direct I/O and page-wise release need on supported platforms.
const PAGE: usize = 4096;
/// Blocks of at least this many bytes are mapped from the system, so that unused pages cost
/// nothing. glibc maps them, too, but only until one is freed: then it caches blocks of this size,
/// and clears the whole block at the next allocation.
const MAPPED_MIN: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_recycled_only_when_nothing_is_borrowed() {
        let mut chunk = Chunk::new(Memory::from_heap(8));
        chunk.extend(b"abcdef");
        let lent = chunk.slice(1, 2);
        chunk.take(6);
        assert_eq!((chunk.room(), lent.to_vec()), (2, b"bc".to_vec()));
        drop(lent);
        chunk.recycle();
        assert_eq!(chunk.room(), 8);
    }

    #[test]
    #[should_panic(expected = "writable")]
    fn memory_borrowed_from_a_chunk_is_read_only() {
        let chunk = Chunk::from_slice(b"abc");
        chunk.slice(0, 3).copy_from(b"x");
    }

    #[test]
    fn a_registered_buffer_has_parts_and_no_bytes() {
        let seg = Memory::registered(7, 1 << 20).seg(4096, 8192);
        let part = seg.slice(512, 1024);
        assert_eq!(part.registered_part(), Some(RegisteredPart { index: 7, offset: 4608 }));
        assert!(part.is_registered() && !part.is_writable() && !part.is_private());
        assert_eq!(Seg::from_slice(b"abc").registered_part(), None);
    }

    #[test]
    #[should_panic(expected = "is_registered")]
    fn a_registered_buffer_cannot_be_read() {
        let _ = Memory::registered(0, 4096).seg(0, 512).to_vec();
    }

    #[test]
    #[should_panic(expected = "is_writable")]
    fn a_registered_buffer_cannot_be_written() {
        Seg::from_slice(b"abc").copy_to_seg(&Memory::registered(0, 4096).seg(0, 512));
    }

    #[test]
    fn zeroing_a_range_of_pages_keeps_the_bytes_around_it() {
        let pages = Pages::from_heap(3 * PAGE);
        let seg = Memory::from_pages(&pages).seg(0, 3 * PAGE);
        seg.copy_from(&vec![7; 3 * PAGE]);
        pages.zero(100, 2 * PAGE);
        let bytes = seg.to_vec();
        assert!(bytes[..100].iter().chain(&bytes[100 + 2 * PAGE..]).all(|&b| b == 7));
        assert!(bytes[100..100 + 2 * PAGE].iter().all(|&b| b == 0));
    }
    #[test]
    fn pages_registered_with_a_device_are_not_released() {
        struct Counting {
            _heap: Heap,
            releases: Arc<AtomicUsize>,
        }
        impl Backing for Counting {
            fn release(&self, _offset: usize, _len: usize) -> bool {
                self.releases.fetch_add(1, Ordering::Relaxed);
                false
            }
        }
        struct AnyDevice;
        impl ProtectionDomain for AnyDevice {
            fn register(&self, _start: NonNull<u8>, _len: usize) -> Result<LocalKey, RegistrationError> {
                Ok(LocalKey(1))
            }
            fn deregister(&self, _key: LocalKey) {}
        }
        let (heap, releases) = (Heap::aligned(2 * PAGE), Arc::new(AtomicUsize::new(0)));
        let pages =
            Pages::over(heap.start, 2 * PAGE, Box::new(Counting { _heap: heap, releases: releases.clone() }));
        let seg = Memory::from_pages(&pages).seg(0, 2 * PAGE);
        pages.zero(0, PAGE);
        let domain: Arc<dyn ProtectionDomain> = Arc::new(AnyDevice);
        seg.local_key(&domain).unwrap();
        seg.copy_from(&[7; 2 * PAGE]);
        pages.zero(0, PAGE);
        assert_eq!(releases.load(Ordering::Relaxed), 1);
        assert!(seg.to_vec()[..PAGE].iter().all(|&byte| byte == 0));
    }
}
