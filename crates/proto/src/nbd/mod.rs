//! NBD: the sessions of the target and of the initiator, and NBD URIs. The protocol's document is
//! `proto.md` of the NBD project.

pub mod client;
mod errno;
pub mod server;
pub mod uri;

pub use blockmux_wire::netlink;

/// Format of the messages of the transmission phase, which the handshake negotiates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeaderFormat {
    /// Compact requests, simple replies: the default.
    #[default]
    Simple,
    /// Compact requests; reads, block status and errors are answered in structured chunks.
    Structured,
    /// Extended requests and extended replies, and nothing else.
    Extended,
}
