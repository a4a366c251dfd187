//! How connections end that should not.

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
    /// There is no secure connection with the peer.
    #[error("peer {0}")]
    Tls(#[from] TlsError),
    /// The keys of a secure connection cannot go on, which is nobody's fault: another connection
    /// has others.
    #[error("{0}")]
    Keys(&'static str),
    /// The peer holds buffers that others need.
    #[error("peer holds {} KiB of buffers and moves no data while others wait for memory", .0 >> 10)]
    Evicted(usize),
}
