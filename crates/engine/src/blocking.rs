//! A session driven from an ordinary thread: for the one exchange of a log-in, where nothing else runs.

use crate::connection::Broken;
use crate::socket::Address;
use blockmux_proto::session::{Demand, MAX_DEMAND, StreamSession};
use blockmux_volume::{Chunk, Memory};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

/// Why a volume cannot be reached; `R` is how a target of the protocol says no.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError<R> {
    /// No connection, or one that broke.
    #[error("{address}: {broken}")]
    Broken {
        /// Where.
        address: Address,
        /// Why.
        broken: Broken,
    },
    /// The server said no.
    #[error("{address}: {refused}")]
    Refused {
        /// Where.
        address: Address,
        /// Its words.
        refused: R,
    },
    /// The server was silent about what it has to tell.
    #[error("{address}: server closed the connection before it described the export")]
    Silent {
        /// Where.
        address: Address,
    },
}

/// Connects and runs `session` until `done` says so or the session is over.
///
/// # Errors
/// If the target cannot be reached, leaves, is silent for longer than `timeout`, or breaks the protocol.
pub fn run_session<S: StreamSession>(
    address: &Address,
    session: &mut S,
    timeout: Duration,
    mut done: impl FnMut(&S) -> bool,
) -> Result<(), Broken> {
    let mut socket = connect(address, timeout)?;
    let deadline = Instant::now() + timeout;
    let mut chunk = Chunk::new(Memory::from_heap(2 * MAX_DEMAND));
    loop {
        let sent = socket.write_all(&session.outbox().take_bytes());
        // A target that has told all may be gone before it hears the good-bye.
        if done(session) {
            return Ok(());
        }
        sent?;
        match session.demand() {
            Demand::Bytes(wanted) if chunk.unread().len() >= wanted => {
                let taken = session.on_bytes(&chunk)?;
                chunk.take(taken);
            }
            Demand::Bytes(_) => {
                if chunk.room() < MAX_DEMAND {
                    chunk.compact();
                }
                match socket.read(chunk.spare()) {
                    Ok(0) => return session.on_end().map_err(Broken::from),
                    Ok(received) => chunk.fill(received),
                    // What is left of an io_uring that this thread had may do that.
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Demand::Close => return Ok(()),
            Demand::Place(_) | Demand::Nothing => {
                return Err(io::Error::other("a log-in has no payload to wait for").into());
            }
        }
        if Instant::now() >= deadline {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
    }
}

fn connect(address: &Address, timeout: Duration) -> io::Result<Box<dyn ReadWrite>> {
    match address {
        Address::Tcp(address) => {
            let socket = TcpStream::connect_timeout(address, timeout)?;
            socket.set_read_timeout(Some(timeout))?;
            socket.set_write_timeout(Some(timeout))?;
            Ok(Box::new(socket))
        }
        Address::Unix(path) => {
            let socket = unix(path)?;
            socket.set_read_timeout(Some(timeout))?;
            socket.set_write_timeout(Some(timeout))?;
            Ok(Box::new(socket))
        }
    }
}

fn unix(path: &Path) -> io::Result<UnixStream> {
    match path.as_os_str().as_bytes().strip_prefix(b"\0") {
        Some(name) => UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?),
        None => UnixStream::connect(path),
    }
}

trait ReadWrite: Read + Write {}
impl<T: Read + Write> ReadWrite for T {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::{ConnectError, describe};
    use blockmux_proto::nbd::initiator::Refused;
    use std::net::Shutdown;
    use std::os::unix::net::UnixListener;

    #[test]
    fn the_words_of_a_server_that_hangs_up_at_once_are_heard() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            socket.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
            // Client flags, and an option without data.
            let mut option = [0; 20];
            socket.read_exact(&mut option).unwrap();
            // From now on writing to it fails.
            socket.shutdown(Shutdown::Read).unwrap();
            let tls_required = [b"\0\x03\xe8\x89\x04\x55\x65\xa9", &option[12..16], b"\x80\0\0\x05\0\0\0\0"];
            socket.write_all(&tls_required.concat()).unwrap();
        });
        let error = describe(&Address::Unix(path), "").unwrap_err();
        assert!(
            matches!(&error, ConnectError::Refused { refused: Refused::TlsRequired { .. }, .. }),
            "{error}"
        );
        server.join().unwrap();
    }
}
