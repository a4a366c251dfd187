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

impl From<TlsError> for Broken {
    fn from(error: TlsError) -> Broken {
        match error {
            // The error that a socket without TLS reports if the peer has closed the connection.
            TlsError::Closed => Broken::Socket(io::ErrorKind::BrokenPipe.into()),
            error => Broken::Tls(error),
        }
    }
}
