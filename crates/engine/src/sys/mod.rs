//! System calls of the data path that no safe crate offers in the needed form.
#![expect(unsafe_code, reason = "system calls over addresses of shared I/O memory")]

pub mod acl;
pub mod congestion;
pub(crate) mod lost_memory;
pub mod memory;
pub mod safe_path;
pub(crate) mod shared_event;
pub(crate) mod shared_memory;
pub mod syscall_filter;

use blockmux_proto::driver::outbox::{Outbox, OutboxPiece};
use blockmux_volume::{Chunk, SgList};
use rustix::io::ioctl_fionread;
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::param::page_size;
use rustix::process::{Resource, getrlimit, setpriority_process};
use rustix::rand::{GetRandomFlags, getrandom};
use rustix::thread::{
    CpuSet, LinkNameSpaceType, move_into_link_name_space, sched_getaffinity, sched_setaffinity,
};
use std::io;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd, RawFd};

/// Sends the front of `outbox` with one gathering call and removes what was sent.
///
/// # Errors
/// As `sendmsg(2)`; `WouldBlock` if the socket's buffer is full.
#[inline]
pub fn send_outbox(fd: RawFd, outbox: &mut Outbox) -> io::Result<usize> {
    let mut iovecs = [const { MaybeUninit::<libc::iovec>::uninit() }; MAX_IOVECS];
    let mut count = 0;
    for (slot, piece) in iovecs.iter_mut().zip(outbox.pieces()) {
        let (base, len) = match piece {
            OutboxPiece::Head(head) => (head.as_ptr().cast_mut(), head.len()),
            OutboxPiece::Payload(seg) => (seg.as_ptr(), seg.len()),
        };
        slot.write(libc::iovec { iov_base: base.cast(), iov_len: len });
        count += 1;
    }
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    let sent = if count == 1 {
        // For one piece, `send` costs the kernel less. Most requests, and replies without data, are
        // one piece. SAFETY: the first iovec is written, and what it names lives in `outbox` during
        // the call.
        unsafe {
            let only = iovecs[0].assume_init_ref();
            libc::send(fd, only.iov_base, only.iov_len, flags)
        }
    } else {
        // SAFETY: all fields may be zero.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = iovecs.as_mut_ptr().cast();
        message.msg_iovlen = count as _;
        // SAFETY: the first `count` iovecs are written, and what they name lives in `outbox` during
        // the call.
        unsafe { libc::sendmsg(fd, &raw const message, flags) }
    };
    let sent = check(sent)?;
    outbox.consume(sent);
    Ok(sent)
}

/// Receives once into the chunk's spare part; 0: the peer has closed its side.
///
/// # Errors
/// As `recv(2)`; `WouldBlock` if there is nothing to receive.
#[inline]
pub fn recv_chunk(fd: RawFd, chunk: &mut Chunk, most: usize) -> io::Result<usize> {
    let spare = chunk.spare();
    let len = spare.len().min(most);
    let spare = &mut spare[..len];
    // SAFETY: `spare` is exclusive during the call.
    let received = unsafe { libc::recv(fd, spare.as_mut_ptr().cast(), spare.len(), libc::MSG_DONTWAIT) };
    let received = check(received)?;
    chunk.fill(received);
    Ok(received)
}

/// Receives once into `list` from byte `at` on, then into the chunk, which is advanced by its
/// share. Returns the total number of bytes.
///
/// # Errors
/// As `recvmsg(2)`; `WouldBlock` if there is nothing to receive.
pub fn recv_placed(fd: RawFd, list: &SgList, at: usize, chunk: &mut Chunk) -> io::Result<usize> {
    let mut iovecs = [const { MaybeUninit::<libc::iovec>::uninit() }; MAX_IOVECS];
    let (mut count, mut skip, mut placed) = (0, at, 0);
    for seg in list.segs() {
        let part_len = seg.len().saturating_sub(skip);
        if part_len > 0 && count < MAX_IOVECS - 1 {
            let part = seg.slice(skip, part_len);
            iovecs[count].write(libc::iovec { iov_base: part.as_ptr().cast(), iov_len: part_len });
            count += 1;
            placed += part_len;
        }
        skip = skip.saturating_sub(seg.len());
    }
    let whole = at + placed == list.len();
    let spare = chunk.spare();
    if whole && !spare.is_empty() {
        iovecs[count].write(libc::iovec { iov_base: spare.as_mut_ptr().cast(), iov_len: spare.len() });
        count += 1;
    }
    // SAFETY: all fields may be zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iovecs.as_mut_ptr().cast();
    message.msg_iovlen = count as _;
    // SAFETY: the first `count` iovecs are written; `list` and the chunk's spare part live during
    // the call.
    let received = check(unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT) })?;
    chunk.fill(received.saturating_sub(placed));
    Ok(received)
}

/// Reads once, into `head` and then into `list`.
///
/// # Errors
/// As `readv(2)`.
pub fn read_message(fd: RawFd, head: &mut [u8], list: &SgList) -> io::Result<usize> {
    let mut iovecs = [const { MaybeUninit::<libc::iovec>::uninit() }; MAX_IOVECS];
    let count = fill_iovecs(&mut iovecs, (head.as_mut_ptr(), head.len()), list);
    // SAFETY: the first `count` iovecs are written; `head` is exclusive, and `list` lives during
    // the call.
    check(unsafe { libc::readv(fd, iovecs.as_ptr().cast(), count as libc::c_int) })
}

/// Writes `head` and `list` at once.
///
/// # Errors
/// As `writev(2)`.
pub fn write_message(fd: RawFd, head: &[u8], list: &SgList) -> io::Result<usize> {
    if list.segs().len() >= MAX_IOVECS {
        return write_message(fd, &[head, &list.to_vec()].concat(), &SgList::default());
    }
    let mut iovecs = [const { MaybeUninit::<libc::iovec>::uninit() }; MAX_IOVECS];
    let count = fill_iovecs(&mut iovecs, (head.as_ptr().cast_mut(), head.len()), list);
    // SAFETY: the first `count` iovecs are written, and what they name lives during the call, which
    // only reads it.
    check(unsafe { libc::writev(fd, iovecs.as_ptr().cast(), count as libc::c_int) })
}

/// Writes the iovecs of a head and of what follows it, as far as there is room; returns their
/// number.
#[inline]
fn fill_iovecs(iovecs: &mut [MaybeUninit<libc::iovec>], head: (*mut u8, usize), list: &SgList) -> usize {
    let segs = list.segs().iter().map(|seg| (seg.as_ptr(), seg.len()));
    let mut count = 0;
    for (slot, (base, len)) in iovecs.iter_mut().zip(std::iter::once(head).chain(segs)) {
        slot.write(libc::iovec { iov_base: base.cast(), iov_len: len });
        count += 1;
    }
    count
}

/// Sets a socket option to these bytes.
///
/// # Errors
/// As `setsockopt(2)`.
pub fn set_option(fd: RawFd, level: libc::c_int, option: libc::c_int, value: &[u8]) -> io::Result<()> {
    let len = value.len() as libc::socklen_t;
    // SAFETY: the value lives during the call, and the length is that of the value.
    check(unsafe { libc::setsockopt(fd, level, option, value.as_ptr().cast(), len) } as isize).map(drop)
}

/// A classic BPF instruction: code, jump if true, jump if false, operand.
pub(crate) type Instruction = (u16, u8, u8, u32);

/// Attaches a program by a socket option that takes one.
///
/// # Errors
/// As `setsockopt(2)`.
pub(crate) fn attach_filter(fd: RawFd, option: libc::c_int, program: &[Instruction]) -> io::Result<()> {
    let mut filter: Vec<libc::sock_filter> =
        program.iter().map(|&(code, jt, jf, k)| libc::sock_filter { code, jt, jf, k }).collect();
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    let len = size_of::<libc::sock_fprog>() as libc::socklen_t;
    // SAFETY: the program and its instructions live during the call.
    let result = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, option, (&raw const program).cast(), len) };
    check(result as isize).map(drop)
}

/// Sends one TLS record of a content type through kTLS.
///
/// # Errors
/// As `sendmsg(2)`; `WouldBlock` if the socket's buffer is full.
pub fn send_record(fd: RawFd, content_type: u8, bytes: &[u8]) -> io::Result<()> {
    let mut iovec = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control([0; CONTROL_WORDS]);
    let mut message = control.message(&mut iovec);
    // SAFETY: the control buffer has room for a header with one byte, which is what is written
    // there.
    unsafe {
        message.msg_controllen = libc::CMSG_LEN(1) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_TLS;
        (*header).cmsg_type = libc::TLS_SET_RECORD_TYPE;
        (*header).cmsg_len = libc::CMSG_LEN(1) as _;
        *libc::CMSG_DATA(header) = content_type;
    }
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: what the message names lives during the call.
    let sent = check(unsafe { libc::sendmsg(fd, &raw const message, flags) })?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives from the next TLS record through kTLS. Returns its content type and the number of
/// bytes; 0: the peer has closed its side.
///
/// # Errors
/// As `recvmsg(2)`; `WouldBlock` if there is nothing to receive, `InvalidData` if the kernel does
/// not report the content type.
pub fn recv_record(fd: RawFd, bytes: &mut [u8]) -> io::Result<(u8, usize)> {
    let mut iovec = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; CONTROL_WORDS]);
    let mut message = control.message(&mut iovec);
    // SAFETY: what the message names is exclusive during the call.
    let received = check(unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT) })?;
    // SAFETY: the kernel has written whole headers, as many as it reports, and the first one is
    // read only if there is one.
    let content_type = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (!header.is_null()
            && (*header).cmsg_level == libc::SOL_TLS
            && (*header).cmsg_type == libc::TLS_GET_RECORD_TYPE)
            .then(|| *libc::CMSG_DATA(header))
    };
    match content_type {
        Some(content_type) => Ok((content_type, received)),
        None if received == 0 => Ok((0, 0)),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Ancillary data of a message, with room for one header and one byte.
struct Control([u64; CONTROL_WORDS]);

impl Control {
    /// A message of one segment with this ancillary data.
    fn message(&mut self, iovec: &mut libc::iovec) -> libc::msghdr {
        // SAFETY: all fields may be zero.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = iovec;
        message.msg_iovlen = 1;
        message.msg_control = self.0.as_mut_ptr().cast();
        message.msg_controllen = size_of::<Control>() as _;
        message
    }
}

/// Pins the calling thread to one of the CPUs that the process may use, counted from 0 and wrapping
/// around. Returns the CPU's number.
///
/// # Errors
/// As `sched_setaffinity(2)`.
pub fn pin_thread(nth: usize) -> io::Result<usize> {
    let allowed = allowed_cpus()?;
    let cpu = allowed[nth % allowed.len()];
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)?;
    Ok(cpu)
}

/// Lets the calling thread run only on idle CPUs: by SCHED_IDLE, or nice 19 where that is refused.
///
/// # Errors
/// As `setpriority(2)`.
pub fn use_idle_priority() -> io::Result<()> {
    // SAFETY: all fields may be zero, and it lives during the call; 0 is the calling thread.
    let result = unsafe {
        let parameters: libc::sched_param = std::mem::zeroed();
        libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters)
    };
    // On Linux each thread has its own nice value.
    if result == 0 { Ok(()) } else { Ok(setpriority_process(None, 19)?) }
}

/// Gives the calling thread less CPU time than others on busy CPUs (nice 10), and lets it run on
/// these CPUs, or on the present ones if there are none.
///
/// # Errors
/// As `sched_setaffinity(2)` and `setpriority(2)`.
pub fn use_low_priority(cpus: &[usize]) -> io::Result<()> {
    if !cpus.is_empty() {
        let mut set = CpuSet::new();
        cpus.iter().for_each(|&cpu| set.set(cpu));
        sched_setaffinity(None, &set)?;
    }
    // On Linux each thread has its own nice value.
    Ok(setpriority_process(None, 10)?)
}

/// The CPUs that the calling thread may use; never empty.
///
/// # Errors
/// As `sched_getaffinity(2)`.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    if cpus.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(cpus) }
}

/// The process at the other end of a Unix socket; `None` if unknown.
#[must_use]
pub fn peer_process(fd: RawFd) -> Option<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` and `len` live during the call, and `len` is the size of `peer`.
    let result = unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut len)
    };
    // The number is 0 for a process of another PID namespace.
    if result == 0 && peer.pid > 0 { u32::try_from(peer.pid).ok() } else { None }
}

/// The index of the interface with this address.
pub(crate) fn interface_with(ip: IpAddr) -> Option<u32> {
    let mut first = std::ptr::null_mut();
    // SAFETY: the call writes a list, which is freed below.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return None;
    }
    let (mut next, mut index) = (first, 0);
    // SAFETY: the list ends with a null pointer, and its entries live until it is freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        // SAFETY: an entry's address is null or as long as its family requires.
        if unsafe { ip_of(entry.ifa_addr) } == Some(ip) {
            // SAFETY: the name is terminated.
            index = unsafe { libc::if_nametoindex(entry.ifa_name) };
            break;
        }
        next = entry.ifa_next;
    }
    // SAFETY: no reference to the list is left.
    unsafe { libc::freeifaddrs(first) };
    (index != 0).then_some(index)
}

/// # Safety
/// The pointer is null, or points to an address that is as long as its family requires.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: as the caller guarantees.
    match i32::from(unsafe { address.as_ref() }?.sa_family) {
        libc::AF_INET => {
            // SAFETY: it has this type.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(IpAddr::from(v4.sin_addr.s_addr.to_ne_bytes()))
        }
        libc::AF_INET6 => {
            // SAFETY: it has this type.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(IpAddr::from(v6.sin6_addr.s6_addr))
        }
        _ => None,
    }
}

/// Moves the calling thread to a new network namespace, with only a loopback interface that is
/// down.
///
/// # Errors
/// As `unshare(2)`: `PermissionDenied` without `CAP_SYS_ADMIN`.
pub fn unshare_network() -> io::Result<()> {
    // SAFETY: the call changes neither memory nor descriptors that other threads use.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) } as isize).map(drop)
}

/// Moves the calling thread to a mount namespace of its own: a copy of the old one, whose mounts
/// do not spread to others. New threads and programs inherit it. What is mounted there is unmounted
/// when the last of them ends, however that ends.
///
/// # Errors
/// As `unshare(2)`: `PermissionDenied` without `CAP_SYS_ADMIN`.
pub fn unshare_mounts() -> io::Result<()> {
    // SAFETY: the call changes neither memory nor descriptors that other threads use. The thread
    // no longer shares its working directory.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) } as isize)?;
    Ok(mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?)
}

/// Moves the calling thread to the network namespace of a descriptor.
///
/// # Errors
/// As `setns(2)`.
pub fn enter_network(fd: &OwnedFd) -> io::Result<()> {
    Ok(move_into_link_name_space(fd.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// Number of bytes that can be received from a stream socket; 0 if unknown.
#[must_use]
pub fn waiting(socket: &impl AsFd) -> usize {
    ioctl_fionread(socket).map_or(0, |bytes| bytes as usize)
}

/// Number of bytes sent on a stream socket that the peer has not acknowledged; 0 if unknown.
#[must_use]
pub fn unacknowledged(fd: RawFd) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one integer, which lives during the call.
    let result = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
}

/// Address space that this process may still use, in bytes: unmapped, and free in the heap. `None`
/// without a limit (RLIMIT_AS).
#[must_use]
pub fn address_space_left() -> Option<u64> {
    let limit = getrlimit(Resource::As).current?;
    let page = page_size() as u64;
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let mapped = statm.split(' ').next().and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0);
    let mapped = mapped.saturating_mul(page).saturating_sub(free_in_heap());
    Some(limit.saturating_sub(mapped))
}

/// Free bytes in the heap's mappings.
fn free_in_heap() -> u64 {
    #[cfg(target_env = "gnu")]
    // SAFETY: it counts, and changes nothing.
    return unsafe { libc::mallinfo2() }.fordblks as u64;
    #[cfg(not(target_env = "gnu"))]
    0
}

/// Switches the whole process, with all its threads, to this user and these groups. It loses its
/// capabilities, unless the thread was told to keep them.
///
/// # Errors
/// If the process lacks permission.
pub fn become_user(user: u32, group: u32, groups: &[u32]) -> io::Result<()> {
    // SAFETY: `groups` is a slice of that many elements, and `gid_t` is `u32`.
    check(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) } as isize)?;
    // SAFETY: the call takes numbers alone. The C library makes it in every thread.
    check(unsafe { libc::setresgid(group, group, group) } as isize)?;
    // SAFETY: the call takes numbers alone. The C library makes it in every thread.
    check(unsafe { libc::setresuid(user, user, user) } as isize).map(|_| ())
}

/// Filters the system calls of all threads by this program, for ever. The process must be unable to
/// gain privileges.
///
/// # Errors
/// If the kernel has no such filters, or the process may gain privileges.
pub fn filter_system_calls(program: &[libc::sock_filter]) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // Older kernels otherwise slow down all threads as if they ran untrusted code.
    let flags = libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: the kernel reads the program, which lives during the call, and does not write it.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    match check(result as isize)? {
        0 => Ok(()),
        // A thread with another filter.
        thread => Err(io::Error::other(format!("thread {thread} has filters of its own"))),
    }
}

/// Tells the kernel that this thread, and those that it starts, write the pages of a disk back:
/// memory that they allocate never waits for that.
///
/// # Errors
/// If the process lacks `CAP_SYS_RESOURCE`.
pub fn become_io_flusher() -> io::Result<()> {
    set_io_flusher(true)
}

/// Undoes [`become_io_flusher`] for this thread.
///
/// # Errors
/// If the process lacks `CAP_SYS_RESOURCE`.
pub fn end_io_flushing() -> io::Result<()> {
    set_io_flusher(false)
}

fn set_io_flusher(is_flusher: bool) -> io::Result<()> {
    // SAFETY: the call takes numbers alone.
    check(unsafe { libc::prctl(PR_SET_IO_FLUSHER, libc::c_ulong::from(is_flusher), 0, 0, 0) } as isize)
        .map(drop)
}

/// Makes all threads share one heap. glibc reserves 64 MiB of addresses for each thread's heap,
/// which under RLIMIT_AS are missing for buffers. Call it before threads are started.
pub fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it sets a number that later allocations read.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Unpredictable bytes.
///
/// # Errors
/// If the system has none, which happens only early at boot.
pub fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let got = getrandom(&mut bytes, GetRandomFlags::empty())?;
    if got == N { Ok(bytes) } else { Err(io::ErrorKind::Interrupted.into()) }
}

#[inline]
fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Of `linux/prctl.h`.
const PR_SET_IO_FLUSHER: libc::c_int = 57;
/// Room for one header and its data, in words of 8 bytes.
const CONTROL_WORDS: usize = 4;
/// Maximum number of segments of one gathering call: enough for 128 read replies.
const MAX_IOVECS: usize = 256;
