//! The sockets of a disk: made in pairs, one end for a session on a core, the other for the kernel.
//!
//! The kernel closes a connection if a request has taken too long, and sends its requests again
//! when it gets another one. So the process waits for the end of its sessions, and replaces their
//! connections.

use crate::core::cores::Cores;
use crate::core::reactor::Inbox;
use crate::net::socket::Stream;
use crate::protocol::nbd::target::serve_negotiated;
use crate::serve::listener::ConnectionLimit;
use crate::sys::become_io_flusher;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::volume_state::Origin;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc;
use std::time::Duration;
use tracing::debug;

/// Makes connections between the kernel and sessions of a volume.
pub(super) struct ConnectionMaker {
    cores: Vec<Inbox>,
    exports: Exports,
    volume: VolumeId,
    limit: ConnectionLimit,
}

/// A connection that is not handed over to the kernel yet.
pub(super) struct NewConnection {
    pub(super) ends: Ends,
    pub(super) session: OpenSession,
}

/// Both ends of a connection.
pub(super) struct Ends {
    kernel: OwnedFd,
    /// A second descriptor of the session's end. While it is open the kernel sees no end of a
    /// session that has closed its own.
    own: OwnedFd,
}

/// A session with the kernel: a pipe that is closed when it ends.
pub(super) struct OpenSession(OwnedFd);

impl ConnectionMaker {
    pub(super) fn new(cores: &Cores, exports: &Exports, volume: VolumeId) -> ConnectionMaker {
        let limit = ConnectionLimit::new(usize::MAX).for_protocol(PROTOCOL).for_listener(KERNEL);
        ConnectionMaker { cores: cores.inboxes(), exports: exports.clone(), volume, limit }
    }

    /// Makes the `nth` connection of a disk; its session is on core `nth`.
    pub(super) fn connect(&self, nth: usize) -> io::Result<NewConnection> {
        let ends = Ends::new()?;
        let stream = Stream::handed_over(ends.own.try_clone()?)?;
        let (session, closed_at_end) = io::pipe()?;
        let permit = self.limit.permit().ok_or(io::ErrorKind::QuotaExceeded)?.closing(closed_at_end.into());
        let core = self.cores.get(nth % self.cores.len().max(1)).ok_or(io::ErrorKind::NotFound)?;
        let (exports, volume, (sender, served)) = (self.exports.clone(), self.volume, mpsc::channel());
        core.send(move |core| {
            if let Err(error) = become_io_flusher() {
                debug!("memory of a core may wait for the disk: {error}");
            }
            // The receiver is gone if this thread has given up.
            let _ = sender.send(serve_negotiated(core, &exports, volume, stream, permit));
        });
        match served.recv() {
            Ok(true) => Ok(NewConnection { ends, session: OpenSession(session.into()) }),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl Ends {
    pub(super) fn new() -> io::Result<Ends> {
        let (own, kernel) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        Ok(Ends { kernel, own })
    }

    /// The end for the kernel.
    pub(super) fn of_kernel(&self) -> BorrowedFd<'_> {
        self.kernel.as_fd()
    }

    /// Leaves its end to the kernel, which got it; returns whether it has kept the end open.
    pub(super) fn leave(self) -> bool {
        drop(self.kernel);
        first_closed(&[&self.own], Some(Duration::ZERO)).is_none()
    }
}

/// Where the I/O of all connections of a disk is counted among the users of its volume.
pub(super) fn origin() -> Origin {
    Origin { protocol: PROTOCOL, listener: KERNEL.into() }
}

/// Waits until a session has ended; returns which. `None` if sessions cannot be waited for.
pub(super) fn wait_for_end(sessions: &[OpenSession]) -> Option<usize> {
    let pipes: Vec<_> = sessions.iter().map(|session| &session.0).collect();
    first_closed(&pipes, None)
}

/// Waits until the other end of a socket or pipe is closed, at most for `time`; returns of which.
fn first_closed(ends: &[&OwnedFd], time: Option<Duration>) -> Option<usize> {
    let mut polled: Vec<PollFd<'_>> = ends.iter().map(|end| PollFd::new(end, PollFlags::RDHUP)).collect();
    let time = time.and_then(|time| Timespec::try_from(time).ok());
    while let Err(error) = poll(&mut polled, time.as_ref()) {
        if error != rustix::io::Errno::INTR {
            debug!("the connections of a disk cannot be watched: {error}");
            return None;
        }
    }
    polled.iter().position(|polled| !polled.revents().is_empty())
}

const PROTOCOL: &str = "nbd";
/// In place of a listener's address.
const KERNEL: &str = "the kernel";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::cores::CoresConfig;
    use blockmux_proto::exports::Export;
    use blockmux_volume::MemVolume;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    #[test]
    fn the_kernel_reads_a_volume_without_a_handshake_and_its_close_is_seen() {
        let cores = Cores::start(&CoresConfig::default()).unwrap();
        let volume = Arc::new(MemVolume::new(1 << 20));
        let export = Export { name: "a".to_owned(), description: String::new(), read_only: false, volume };
        let exports = Exports::new(vec![export]);
        let maker = ConnectionMaker::new(&cores, &exports, VolumeId(0));
        let (mut kernel, session) = handed_over(maker.connect(0).unwrap());
        // A read of 512 bytes at 0 with the cookie 7.
        let mut request = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];
        request.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0]);
        kernel.write_all(&request).unwrap();
        let mut reply = [0xff; 16 + 512];
        kernel.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..16], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7]);
        assert_eq!(reply[16..], [0; 512]);
        let counted = exports.volume_state(VolumeId(0)).unwrap().traffic_by_origin();
        let own = counted.iter().find(|one| one.origin == origin()).unwrap();
        assert_eq!(own.traffic.reads, 1);
        drop(kernel);
        assert_eq!(wait_for_end(&[session]), Some(0));

        let (mut kernel, session) = handed_over(maker.connect(0).unwrap());
        let mut disconnect = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, 2];
        disconnect.extend([0; 20]);
        kernel.write_all(&disconnect).unwrap();
        assert_eq!(kernel.read(&mut reply).unwrap(), 0, "nothing keeps a session open that was told to end");
        assert_eq!(wait_for_end(&[session]), Some(0));
    }

    #[test]
    fn an_end_that_the_kernel_has_not_kept_is_closed() {
        let ends = Ends::new().unwrap();
        let kernel = ends.of_kernel().try_clone_to_owned().unwrap();
        assert!(ends.leave());
        drop(kernel);
        assert!(!Ends::new().unwrap().leave());
    }

    /// The kernel's end, and the session.
    fn handed_over(connection: NewConnection) -> (UnixStream, OpenSession) {
        let kernel = connection.ends.of_kernel().try_clone_to_owned().unwrap();
        assert!(connection.ends.leave());
        (UnixStream::from(kernel), connection.session)
    }
}
