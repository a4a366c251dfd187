//! The sockets of a disk: made in pairs, one end for a session on a core, the other for the kernel.
//!
//! The kernel closes a connection if a request has taken too long, and sends its requests again
//! when it gets another one. So the process watches its connections, and replaces those that were
//! closed.

use crate::core::cores::Cores;
use crate::core::reactor::Inbox;
use crate::net::socket::Stream;
use crate::protocol::nbd::target::serve_negotiated;
use crate::serve::listener::ConnectionLimit;
use crate::sys::become_io_flusher;
use blockmux_proto::exports::{Exports, VolumeId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::os::fd::OwnedFd;
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

/// A connection.
pub(super) struct DiskConnection {
    /// The end of the kernel, until it was handed over.
    pub(super) kernel: Option<OwnedFd>,
    /// A second descriptor of the session's end, to see when the kernel closes the other.
    watched: OwnedFd,
}

impl ConnectionMaker {
    pub(super) fn new(cores: &Cores, exports: &Exports, volume: VolumeId) -> ConnectionMaker {
        let limit = ConnectionLimit::new(usize::MAX).for_protocol("nbd").for_listener("the kernel");
        ConnectionMaker { cores: cores.inboxes(), exports: exports.clone(), volume, limit }
    }

    /// Makes the `nth` connection of a disk; its session is on core `nth`.
    pub(super) fn connect(&self, nth: usize) -> io::Result<DiskConnection> {
        let (own, kernel) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let watched = own.try_clone()?;
        let stream = Stream::handed_over(own)?;
        let permit = self.limit.permit().ok_or(io::ErrorKind::QuotaExceeded)?;
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
            Ok(true) => Ok(DiskConnection { kernel: Some(kernel), watched }),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl DiskConnection {
    /// A connection without a session.
    pub(super) fn unserved() -> io::Result<DiskConnection> {
        let (watched, kernel) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        Ok(DiskConnection { kernel: Some(kernel), watched })
    }

    /// Whether the kernel has closed its end.
    pub(super) fn is_closed(&self) -> bool {
        wait_for_close(&[self], Some(Duration::ZERO)).is_some()
    }
}

/// Waits until the kernel has closed one of its ends, at most for `time`; returns which.
pub(super) fn wait_for_close(connections: &[&DiskConnection], time: Option<Duration>) -> Option<usize> {
    let watched = connections.iter().map(|connection| &connection.watched);
    let mut polled: Vec<PollFd<'_>> = watched.map(|watched| PollFd::new(watched, PollFlags::RDHUP)).collect();
    let time = time.and_then(|time| Timespec::try_from(time).ok());
    while let Err(error) = poll(&mut polled, time.as_ref()) {
        if error != rustix::io::Errno::INTR {
            debug!("the connections of a disk cannot be watched: {error}");
            return None;
        }
    }
    polled.iter().position(|polled| !polled.revents().is_empty())
}

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
        let maker = ConnectionMaker::new(&cores, &Exports::new(vec![export]), VolumeId(0));
        let mut connection = maker.connect(0).unwrap();
        assert!(!connection.is_closed());
        let mut kernel = UnixStream::from(connection.kernel.take().unwrap());
        // A read of 512 bytes at 0 with the cookie 7.
        let mut request = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];
        request.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0]);
        kernel.write_all(&request).unwrap();
        let mut reply = [0xff; 16 + 512];
        kernel.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..16], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7]);
        assert_eq!(reply[16..], [0; 512]);
        drop(kernel);
        assert_eq!(wait_for_close(&[&connection], None), Some(0));
        assert!(connection.is_closed());
    }
}
