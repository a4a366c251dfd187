//! Errors that end connections.

use blockmux_proto::driver::session::ProtocolError;
use blockmux_tls::TlsError;
use std::io;

/// Why a connection cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The socket failed.
    #[error("connection failed: {0}")]
    Socket(#[from] io::Error),
    /// The peer broke the protocol.
    #[error("peer {0}")]
    Protocol(#[from] ProtocolError),
    /// TLS with the peer could not be established, or failed.
    #[error("peer {0}")]
    Tls(TlsError),
    /// The TLS keys must be replaced, and kTLS accepts no others. The peer did nothing wrong: a new
    /// connection has new keys.
    #[error("{0}")]
    Keys(&'static str),
    /// The peer held this many bytes of buffers that others need.
    #[error("peer holds {} KiB of buffers and moves no data while others wait for memory", .0 >> 10)]
    Evicted(usize),
    /// The target ends the session for this reason.
    #[error("{0}")]
    SessionEnded(&'static str),
}

impl Broken {
    /// Whether the cause is on this machine and says what to do: [`LocalObstacle`].
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Broken::Socket(error) if error.get_ref().is_some_and(|inner| inner.is::<LocalObstacle>()))
    }
}

/// What on this machine keeps a connection from being made, and what to do; inside an
/// [`io::Error`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct LocalObstacle(String);

impl LocalObstacle {
    /// An error of this kind; `text` names the cause and what to do.
    pub(crate) fn error(kind: io::ErrorKind, text: impl Into<String>) -> io::Error {
        io::Error::new(kind, LocalObstacle(text.into()))
    }
}

impl From<TlsError> for Broken {
    fn from(error: TlsError) -> Broken {
        match error {
            // The error that a socket without TLS reports if the peer has closed the connection.
            TlsError::Closed => Broken::Socket(io::ErrorKind::BrokenPipe.into()),
            error => Broken::Tls(error),
        }
    }
}
