//! Blocking byte streams, for logins on ordinary threads.

use super::socket::Address;
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::transport::TransportInfo;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io;
use std::net::TcpStream;
use std::time::Duration;

/// A connected byte stream whose calls block.
pub trait LoginStream: io::Read + io::Write {
    /// Sets how long a read may take; it then fails with `WouldBlock` or `TimedOut`.
    ///
    /// # Errors
    /// As `setsockopt(2)`.
    fn set_read_timeout(&self, timeout: Duration) -> io::Result<()>;

    /// Sends all of an outbox.
    ///
    /// # Errors
    /// As for a write.
    fn send(&mut self, outbox: &mut Outbox) -> io::Result<()> {
        self.write_all(&outbox.take_bytes())
    }

    /// Whether the peer learns of the end of a stream that is dropped, as with TCP.
    fn tells_end(&self) -> bool {
        true
    }

    /// What is known of a peer from which nothing has arrived, and what the reason may be.
    fn silence(&self) -> (&'static str, &'static str) {
        ("accepted the connection but sends nothing", "it may serve another protocol")
    }

    /// Properties of the connection.
    fn transport(&self) -> TransportInfo {
        TransportInfo::default()
    }
}

impl LoginStream for Socket {
    fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        Socket::set_read_timeout(self, Some(timeout))
    }
}

/// Connects over TCP or to a Unix socket; reads and writes take at most `timeout`.
pub(super) fn connect(address: &Address, timeout: Duration) -> io::Result<Box<dyn LoginStream>> {
    let socket = match address {
        Address::Tcp(address) => {
            let socket = TcpStream::connect_timeout(address, timeout)?;
            socket.set_nodelay(true)?;
            Socket::from(socket)
        }
        Address::Unix(_) => Socket::new(Domain::UNIX, Type::STREAM.cloexec(), None)?,
    };
    socket.set_read_timeout(Some(timeout))?;
    socket.set_write_timeout(Some(timeout))?;
    if let Address::Unix(path) = address {
        // Connecting blocks, up to the send timeout, while the server's backlog is full.
        socket.connect(&SockAddr::unix(path)?)?;
    }
    Ok(Box::new(socket))
}
