//! Memory of another process that is lost while it is mapped.
//!
//! A process that shares a file may make it shorter, and huge pages may run out. The next access is
//! a SIGBUS, which would end this process with everything else that it serves. The handler maps
//! zeroed memory in place of what is lost, so that the access goes on, and tells the owner, who
//! ends what depends on that memory.
#![expect(unsafe_code, reason = "handles SIGBUS, and maps memory there")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Whether memory of a peer is lost.
pub(crate) struct MemoryLoss {
    is_lost: AtomicBool,
    /// An event descriptor, which is signalled when that happens.
    wake: Arc<OwnedFd>,
}

impl MemoryLoss {
    /// Nothing is lost yet.
    pub(crate) fn new(wake: Arc<OwnedFd>) -> Arc<MemoryLoss> {
        Arc::new(MemoryLoss { is_lost: AtomicBool::new(false), wake })
    }

    /// Whether any of the memory is lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }
}

/// Counts the mappings that the process has for one owner, which may have a limited number: those
/// of the process are limited, too, and one owner must not leave the others without.
pub(crate) struct MappingQuota {
    most: usize,
    used: AtomicUsize,
}

impl MappingQuota {
    /// At most `most` mappings at a time.
    pub(crate) fn new(most: usize) -> Arc<MappingQuota> {
        Arc::new(MappingQuota { most, used: AtomicUsize::new(0) })
    }

    fn claim(self: &Arc<Self>) -> Option<MappingClaim> {
        let more = |used| (used < self.most).then_some(used + 1);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(MappingClaim(self.clone()))
    }
}

/// A mapping that counts against a quota until this is dropped.
struct MappingClaim(Arc<MappingQuota>);

impl Drop for MappingClaim {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The owner of a mapping.
#[derive(Clone, Copy)]
pub(crate) struct MappingOwner<'a> {
    /// Is told if the memory is lost.
    pub(crate) loss: &'a Arc<MemoryLoss>,
    pub(crate) quota: &'a Arc<MappingQuota>,
}

/// A mapping that is replaced if it is lost. Must be dropped before it is unmapped, when nobody
/// accesses it any longer.
pub(super) struct WatchedMapping {
    entry: &'static MappingEntry,
    _loss: Arc<MemoryLoss>,
    _quota: MappingClaim,
}

/// Watches the mapping of `len` bytes at `start`.
///
/// # Errors
/// If the owner or the process has too many mappings, or the system refuses the handler.
pub(super) fn watch(start: usize, len: usize, owner: MappingOwner<'_>) -> io::Result<WatchedMapping> {
    static CLAIMS: Mutex<()> = Mutex::new(());
    let MappingOwner { loss, quota } = owner;
    install()?;
    let too_many = || {
        let most = quota.most;
        io::Error::other(format!("it has {most} regions already, with earlier ones that its I/O still uses"))
    };
    let of_quota = quota.claim().ok_or_else(too_many)?;
    let _claim = CLAIMS.lock().unwrap_or_else(PoisonError::into_inner);
    let free = MAPPINGS.iter().find(|entry| entry.start.load(Ordering::Acquire) == 0);
    let entry = free.ok_or_else(|| io::Error::other("this process has too many regions of shared memory"))?;
    entry.len.store(len, Ordering::Relaxed);
    entry.loss.store(Arc::as_ptr(loss).cast_mut(), Ordering::Relaxed);
    entry.start.store(start, Ordering::Release);
    Ok(WatchedMapping { entry, _loss: loss.clone(), _quota: of_quota })
}

impl Drop for WatchedMapping {
    fn drop(&mut self) {
        self.entry.start.store(0, Ordering::Release);
    }
}

/// A mapping, for the handler, which takes no lock.
struct MappingEntry {
    /// Its address; 0: the entry is free.
    start: AtomicUsize,
    len: AtomicUsize,
    loss: AtomicPtr<MemoryLoss>,
}

impl MappingEntry {
    const fn free() -> MappingEntry {
        let loss = AtomicPtr::new(ptr::null_mut());
        MappingEntry { start: AtomicUsize::new(0), len: AtomicUsize::new(0), loss }
    }

    fn has(&self, address: usize) -> bool {
        let start = self.start.load(Ordering::Acquire);
        start != 0 && address.wrapping_sub(start) < self.len.load(Ordering::Relaxed)
    }

    /// Maps zeroed memory in place of the mapping, and tells its owner; returns whether that was
    /// possible.
    ///
    /// # Safety
    /// The caller was accessing the mapping, so that it and its owner are there.
    unsafe fn replace(&self) -> bool {
        let (start, len) = (self.start.load(Ordering::Acquire), self.len.load(Ordering::Relaxed));
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let start: *mut libc::c_void = ptr::with_exposed_provenance_mut(start);
        // SAFETY: the mapping is that of `map_shared`, whose users expect that others change it.
        if unsafe { libc::mmap(start, len, access, kind, -1, 0) } == libc::MAP_FAILED {
            return false;
        }
        // SAFETY: `WatchedMapping` keeps it as long as the entry has an address.
        let loss = unsafe { &*self.loss.load(Ordering::Relaxed) };
        loss.is_lost.store(true, Ordering::Release);
        let one = 1_u64.to_ne_bytes();
        // SAFETY: `one` has that many bytes. It fails only if the event is signalled already.
        unsafe { libc::write(loss.wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        true
    }
}

/// Installs the handler, once.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Option<i32>> = OnceLock::new();
    let failed = INSTALLED.get_or_init(|| {
        let errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
        // SAFETY: all-zero bytes are a `sigaction` with the default action.
        let (mut before, mut own): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
        // SAFETY: only reads the current action.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) } != 0 {
            return Some(errno());
        }
        // The handler needs it from its first call.
        BEFORE.get_or_init(|| before);
        own.sa_sigaction = on_sigbus as *const () as usize;
        own.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler only makes calls that a signal handler may make.
        let installed = unsafe { libc::sigaction(libc::SIGBUS, &raw const own, ptr::null_mut()) };
        (installed != 0).then(errno)
    });
    failed.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the address of this thread's `errno`.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: the kernel has passed the information, and `errno` is this thread's.
    let (code, address, before) = unsafe { ((*info).si_code, (*info).si_addr().addr(), *errno) };
    // Others than the kernel send no address.
    let lost = MAPPINGS.iter().find(|entry| code > 0 && entry.has(address));
    // SAFETY: this thread was accessing an address of the mapping.
    let is_replaced = lost.is_some_and(|entry| unsafe { entry.replace() });
    // SAFETY: as above.
    unsafe { *errno = before };
    if !is_replaced {
        // SAFETY: the arguments are those of the kernel.
        unsafe { act_as_before(signal, info, context) };
    }
}

/// Does what was done before this handler was installed.
///
/// # Safety
/// The arguments are those of a signal handler.
unsafe fn act_as_before(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let handler = BEFORE.get().filter(|own| own.sa_flags & libc::SA_SIGINFO != 0);
    let handler = handler.map(|own| own.sa_sigaction);
    match handler.filter(|handler| ![libc::SIG_DFL, libc::SIG_IGN].contains(handler)) {
        Some(handler) => {
            type Handler = unsafe extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: SA_SIGINFO says that it is such a function.
            let handler: Handler = unsafe { std::mem::transmute(handler) };
            // SAFETY: as promised by the caller.
            unsafe { handler(signal, info, context) };
        }
        // The access that failed fails again, and ends the process.
        // SAFETY: it only changes the action of the signal.
        None => drop(unsafe { libc::signal(signal, libc::SIG_DFL) }),
    }
}

/// The action before this handler was installed: that of the standard library.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
static MAPPINGS: [MappingEntry; MAX_MAPPINGS] = [const { MappingEntry::free() }; MAX_MAPPINGS];
/// Largest number of mappings of a process: 64 disks with as many as one may have.
const MAX_MAPPINGS: usize = 64 * 128;

#[cfg(test)]
mod tests {
    use super::super::shared_memory::map_shared;
    use super::*;
    use blockmux_volume::Memory;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::io::read;
    use std::os::fd::AsFd;

    fn loss() -> Arc<MemoryLoss> {
        MemoryLoss::new(Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()))
    }

    #[test]
    fn memory_whose_file_has_become_shorter_is_zeroed_and_its_owner_is_told() {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 4 * 4096).unwrap();
        let [lost, kept] = [loss(), loss()];
        let quota = MappingQuota::new(2);
        let map = |offset, len, loss| {
            let owner = MappingOwner { loss, quota: &quota };
            map_shared(file.as_fd(), offset, len, Some(owner)).unwrap()
        };
        let beyond = map(4096, 2 * 4096, &lost);
        let first = map(0, 4096, &kept);
        let [first, beyond] = [first, beyond].map(|pages| Memory::from_pages(&pages));
        beyond.seg(4096, 4).copy_from(b"abcd");
        ftruncate(&file, 4096).unwrap();
        assert!(!lost.is_lost());
        beyond.seg(4096, 4).copy_from(b"efgh");
        assert_eq!(beyond.seg(4094, 8).to_vec(), b"\0\0efgh\0\0");
        assert!(lost.is_lost() && read(&*lost.wake, &mut [0; 8]) == Ok(8));
        first.seg(0, 1).copy_from(b"a");
        assert!(!kept.is_lost(), "the other mapping is still there");
    }
    #[test]
    fn an_owner_has_as_many_mappings_as_its_quota_and_leaves_the_rest_to_others() {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 4096).unwrap();
        let loss = loss();
        let [quota, of_other] = [MappingQuota::new(2), MappingQuota::new(2)];
        let map = |quota| map_shared(file.as_fd(), 0, 4096, Some(MappingOwner { loss: &loss, quota }));
        let [first, _second] = [map(&quota).unwrap(), map(&quota).unwrap()];
        assert!(map(&quota).err().unwrap().to_string().contains("2 regions"));
        map(&of_other).unwrap();
        // It counts for as long as I/O uses it.
        let in_flight = Memory::from_pages(&first).seg(0, 512);
        drop(first);
        assert!(map(&quota).is_err());
        drop(in_flight);
        map(&quota).unwrap();
    }
}
