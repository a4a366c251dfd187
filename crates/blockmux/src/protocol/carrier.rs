//! What carries a protocol.

/// The lower layer that carries a protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    /// Connections over stream sockets.
    Stream,
    /// Ethernet frames of network interfaces. They are served only at configured interfaces, and
    /// require CAP_NET_RAW.
    Frames,
}
