//! Errors that end connections.

use blockmux_proto::session::ProtocolError;
use blockmux_tls::TlsError;
use std::io;

/// Why a connection cannot go on.
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
    /// The session may not go on for this reason, and did not end by itself.
    #[error("{0}")]
    Withdrawn(&'static str),
}

impl From<TlsError> for Broken {
    fn from(error: TlsError) -> Broken {
        match error {
            // A socket without TLS reports a peer that has closed the connection this way.
            TlsError::Closed => Broken::Socket(io::ErrorKind::BrokenPipe.into()),
            error => Broken::Tls(error),
        }
    }
}
