//! Bytes and descriptors over Unix sockets, blocking up to the sockets' timeouts.

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Sends bytes, and descriptors with the first of them.
///
/// # Errors
/// As sendmsg(2); `TimedOut` if the peer does not receive in time.
pub(crate) fn send_with_fds(socket: &impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let mut rest = bytes;
    while !rest.is_empty() {
        match sendmsg(socket, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error.into()),
            Ok(sent) => {
                rest = rest.get(sent..).unwrap_or_default();
                control.clear();
            }
        }
    }
    Ok(())
}

/// Fills `bytes`; adds descriptors that come with them to `fds`, up to [`MAX_FDS`].
///
/// # Errors
/// As recvmsg(2); `ConnectionAborted` if the peer has closed the connection before the first byte,
/// `UnexpectedEof` after it; `TimedOut` if it sends nothing in time; `InvalidData` if it sends too
/// many descriptors.
pub(crate) fn receive_exactly(
    socket: &impl AsFd,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(bytes.get_mut(at..).unwrap_or_default())];
        let received = match recvmsg(socket, slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            received => received?,
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        if received.bytes == 0 {
            let kind = if at == 0 { io::ErrorKind::ConnectionAborted } else { io::ErrorKind::UnexpectedEof };
            return Err(kind.into());
        }
        if fds.len() > MAX_FDS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message has too many descriptors"));
        }
        at += received.bytes;
    }
    Ok(())
}

/// Largest number of descriptors of a message.
pub(crate) const MAX_FDS: usize = 8;
