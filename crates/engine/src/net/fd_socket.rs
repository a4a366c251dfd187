//! Bytes and descriptors over Unix sockets. A message has one deadline for all of it, so a peer
//! that sends or takes a byte now and then holds nobody for longer.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Sends bytes, and descriptors with the first of them.
///
/// # Errors
/// As sendmsg(2); `TimedOut` if the peer has not made room for all of it by `deadline`.
pub(crate) fn send_with_fds(
    socket: &impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    deadline: Instant,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let mut rest = bytes;
    while !rest.is_empty() {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(socket, &[IoSlice::new(rest)], &mut control, flags) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, deadline)?,
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
/// As [`receive_some`]; `ConnectionAborted` if the peer has closed the connection before the first
/// byte, `UnexpectedEof` after it; `TimedOut` if it has not sent all by `deadline`.
pub(crate) fn receive_exactly(
    socket: &impl AsFd,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    deadline: Instant,
) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        match receive_some(socket, bytes.get_mut(at..).unwrap_or_default(), fds) {
            Ok(0) if at == 0 => return Err(io::ErrorKind::ConnectionAborted.into()),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => at += received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(socket, PollFlags::IN, deadline)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Receives bytes that have come, at most as many as `bytes` holds; adds descriptors that come with
/// them to `fds`, up to [`MAX_FDS`]. Returns the number of bytes, 0 if the peer has closed the
/// connection.
///
/// # Errors
/// As recvmsg(2); `WouldBlock` if nothing has come; `InvalidData` if the peer sends too many
/// descriptors.
pub(crate) fn receive_some(
    socket: &impl AsFd,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    if fds.len() > MAX_FDS {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message has too many descriptors"));
    }
    Ok(received.bytes)
}

/// Waits until a message begins, or the peer has closed the connection.
///
/// # Errors
/// As poll(2).
pub(crate) fn wait_for_message(socket: &impl AsFd) -> io::Result<()> {
    wait_until(socket, PollFlags::IN, None)
}

fn wait(socket: &impl AsFd, ready: PollFlags, deadline: Instant) -> io::Result<()> {
    wait_until(socket, ready, Some(deadline))
}

/// Waits until the socket is ready, or its peer has closed it.
///
/// # Errors
/// `TimedOut` if it is not by `deadline`.
fn wait_until(socket: &impl AsFd, ready: PollFlags, deadline: Option<Instant>) -> io::Result<()> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::new(socket, ready)], left.as_ref()) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Timeout of a message that has begun.
pub(crate) const MESSAGE_TIME: Duration = Duration::from_secs(5);
/// Largest number of descriptors of a message.
pub(crate) const MAX_FDS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn bytes_that_have_come_are_received_also_after_the_deadline_and_no_others() {
        let (mut peer, own) = UnixStream::pair().unwrap();
        let (deadline, mut bytes) = (Instant::now(), [0; 4]);
        let receive = |bytes: &mut [u8]| receive_exactly(&own, bytes, &mut Vec::new(), deadline);
        peer.write_all(b"abcdef").unwrap();
        receive(&mut bytes).unwrap();
        assert_eq!(&bytes, b"abcd");
        assert_eq!(receive(&mut bytes).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(peer);
        assert_eq!(receive(&mut bytes).unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }

    #[test]
    fn a_byte_that_comes_later_wakes_whoever_waits_for_it_and_a_peer_that_takes_nothing_does_not() {
        let (mut peer, own) = UnixStream::pair().unwrap();
        let receiver = std::thread::spawn(move || {
            let (mut bytes, mut fds) = ([0; 2], Vec::new());
            receive_exactly(&own, &mut bytes, &mut fds, Instant::now() + Duration::from_secs(600)).unwrap();
            (own, bytes, fds)
        });
        let deadline = Instant::now() + Duration::from_secs(600);
        send_with_fds(&peer, b"a", &[peer.as_fd()], deadline).unwrap();
        send_with_fds(&peer, b"b", &[], deadline).unwrap();
        let (own, bytes, fds) = receiver.join().unwrap();
        assert_eq!((&bytes, fds.len()), (b"ab", 1));
        let many = vec![7; 64 << 20];
        let sent = send_with_fds(&own, &many, &[], Instant::now());
        assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::TimedOut);
        peer.read_exact(&mut [0; 4096]).unwrap();
    }
}
