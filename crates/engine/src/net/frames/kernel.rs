//! Packet sockets (`packet(7)`): system calls that no safe crate offers.
#![expect(unsafe_code, reason = "system calls over addresses of shared I/O memory")]

use crate::sys;
use blockmux_proto::driver::frames::{EtherType, Mac};
use blockmux_proto::driver::frames::{FrameOutbox, OutFrame, PortId};
use rustix::net::sockopt::{set_socket_send_buffer_size, set_socket_send_buffer_size_force, socket_error};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Length and sender of a received frame. Frames are `stride` bytes apart in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedFrame {
    /// Sender's address.
    pub mac: Mac,
    /// Length in bytes; 0 if the frame was not for this port or did not fit.
    pub len: usize,
}

/// Properties of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Interface {
    pub(super) index: i32,
    pub(super) mac: Mac,
    pub(super) mtu: u32,
    pub(super) is_up: bool,
}

pub(super) use sys::Instruction;

/// Opens a packet socket, which receives nothing until it is bound. Frames exclude the Ethernet
/// header.
pub(super) fn open() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socket_with(AddressFamily::PACKET, SocketType::DGRAM, flags, None)?)
}

/// Binds the socket: from now on it receives frames of that EtherType on that interface.
pub(super) fn bind(fd: &OwnedFd, index: i32, ether_type: EtherType) -> io::Result<()> {
    let address = address(index, ether_type, Mac::default());
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address lives during the call, and `len` is its length.
    check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) } as isize)?;
    Ok(())
}

/// Attaches a filter: the kernel drops frames for which the program returns 0.
pub(super) fn filter(fd: &OwnedFd, program: &[Instruction]) -> io::Result<()> {
    sys::attach_filter(fd.as_raw_fd(), libc::SO_ATTACH_FILTER, program)
}

/// Sets the size of the send buffer, beyond the system's limit if permitted.
pub(super) fn set_send_buffer(fd: &OwnedFd, bytes: usize) {
    if set_socket_send_buffer_size_force(fd, bytes).is_err() {
        // Without permission the system's limit applies, which is only slower.
        let _ = set_socket_send_buffer_size(fd, bytes);
    }
}

/// Returns the socket's pending error, such as that its interface went down.
///
/// # Errors
/// The pending error.
pub(super) fn take_error(fd: &OwnedFd) -> io::Result<()> {
    Ok(socket_error(fd)??)
}

pub(super) fn set_int(
    fd: &OwnedFd,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the value lives during the call.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    check(result as isize)?;
    Ok(())
}

/// Queries an interface by name.
pub(super) fn interface(fd: &OwnedFd, name: &str) -> io::Result<Interface> {
    // SAFETY: all fields may be zero.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte must stay zero.
    if name.is_empty() || name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::NotFound.into());
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = byte as libc::c_char;
    }
    let mut ask = |what: libc::c_ulong| {
        // SAFETY: the request lives during the call; each of these fills one member of its union.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), what as _, &raw mut request) } as isize)?;
        Ok::<_, io::Error>(request.ifr_ifru)
    };
    let (index, mtu) = (ask(libc::SIOCGIFINDEX)?, ask(libc::SIOCGIFMTU)?);
    let (flags, hardware) = (ask(libc::SIOCGIFFLAGS)?, ask(libc::SIOCGIFHWADDR)?);
    // SAFETY: each is the member that its call has filled.
    let (index, mtu, flags, hardware) =
        unsafe { (index.ifru_ifindex, mtu.ifru_mtu, flags.ifru_flags, hardware.ifru_hwaddr) };
    let mut mac = Mac::default();
    for (place, byte) in mac.0.iter_mut().zip(hardware.sa_data) {
        *place = byte as u8;
    }
    let up = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    Ok(Interface { index, mac, mtu: u32::try_from(mtu).unwrap_or(0), is_up: flags & up == up })
}

/// Sends the frames at the front of the outbox that go to that port, in one call, and removes those
/// that were sent.
///
/// # Errors
/// As `sendmmsg(2)` for the first frame; `WouldBlock` if there is no room.
#[inline]
pub(super) fn send(
    fd: RawFd,
    index: i32,
    ether_type: EtherType,
    port: PortId,
    outbox: &mut FrameOutbox,
) -> io::Result<usize> {
    let mut iovecs = [const { MaybeUninit::<libc::iovec>::uninit() }; MAX_IOVECS];
    let mut receivers = [const { MaybeUninit::<libc::sockaddr_ll>::uninit() }; BATCH];
    let mut messages = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; BATCH];
    let (mut count, mut used) = (0, 0);
    for frame in outbox.iter().take_while(|frame| frame.to.port == port).take(BATCH) {
        let pieces = 1 + frame.payload.segs().len();
        if used + pieces > MAX_IOVECS {
            break;
        }
        gather(frame, &mut iovecs[used..used + pieces]);
        receivers[count].write(address(index, ether_type, frame.to.mac));
        // SAFETY: all fields may be zero.
        let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
        message.msg_hdr.msg_name = receivers[count].as_mut_ptr().cast();
        message.msg_hdr.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        message.msg_hdr.msg_iov = iovecs[used].as_mut_ptr();
        message.msg_hdr.msg_iovlen = pieces as _;
        messages[count].write(message);
        (count, used) = (count + 1, used + pieces);
    }
    // SAFETY: the first `count` messages are written, and what they name lives during the call:
    // heads and payload in the outbox.
    let sent = unsafe {
        libc::sendmmsg(fd, messages.as_mut_ptr().cast(), count as libc::c_uint, libc::MSG_DONTWAIT as _)
    };
    let sent = check(sent as isize)?;
    drop(outbox.drain(..sent));
    Ok(sent)
}

fn gather(frame: &OutFrame, iovecs: &mut [MaybeUninit<libc::iovec>]) {
    let head = frame.head();
    let pieces = frame.payload.segs().iter().map(|seg| (seg.as_ptr(), seg.len()));
    for (slot, (base, len)) in
        iovecs.iter_mut().zip(std::iter::once((head.as_ptr().cast_mut(), head.len())).chain(pieces))
    {
        slot.write(libc::iovec { iov_base: base.cast(), iov_len: len });
    }
}

/// Waits until one of the sockets is readable, or for `time`.
pub(super) fn wait_readable(fds: &[RawFd], time: Duration) -> io::Result<()> {
    let mut polls: Vec<libc::pollfd> =
        fds.iter().map(|&fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    let milliseconds = i32::try_from(time.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
    // SAFETY: the list lives during the call, and the length is that of the list.
    let result = unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, milliseconds) };
    match check(result as isize) {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(()),
    }
}

fn address(index: i32, ether_type: EtherType, mac: Mac) -> libc::sockaddr_ll {
    let mut sll_addr = [0; 8];
    sll_addr[..6].copy_from_slice(&mac.0);
    libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: ether_type.0.to_be(),
        sll_ifindex: index,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 6,
        sll_addr,
    }
}

#[inline]
pub(super) fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Maximum number of frames sent by one call.
pub(super) const BATCH: usize = 64;
/// Maximum number of segments of one call: a frame is a header and usually one segment of payload.
const MAX_IOVECS: usize = 4 * BATCH;
