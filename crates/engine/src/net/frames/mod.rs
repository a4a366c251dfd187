//! Raw frames: network interfaces as ports of a
//! [`FrameSession`](blockmux_proto::driver::session::FrameSession).
//!
//! ```text
//!   interface ────Ring────▶ FramePorts ──Frame──▶ session ──poll_io──▶ channel
//!   interface ◀─sendmmsg─── FramePorts ◀─outbox── session ◀──on_io──── channel
//! ```
//! A port is a packet socket bound to one interface and one EtherType, so it receives no other
//! traffic. A filter in the kernel drops frames for the other side of the protocol. Frames for a
//! VLAN or macvlan interface on top of the interface belong to that interface; to serve both, name
//! both. Frames are received through a ring shared with the kernel, without a system call, and sent
//! in batches by one call, with payload straight from its memory. This needs `CAP_NET_RAW`.
//!
//! Unsafe code is in `kernel` and `ring` only. [`FrameHost`] is implemented by the simulator, too,
//! as [`crate::net::host`] is for streams.

pub mod blocking;
mod kernel;
pub mod port;
mod ports;
pub mod queue_id;
mod ring;

pub use kernel::ReceivedFrame;
pub use port::{PacketPort, Share, Side};
pub(crate) use ports::FramePorts;
pub use queue_id::QueueId;

use crate::core::reactor::EngineCore;
use crate::net::host::Host;
use blockmux_proto::aoe::AoeAddress;
use blockmux_proto::driver::frames::{FrameOutbox, FramePortInfo, PortId};
use blockmux_volume::Chunk;
use std::io;

/// A core with network interfaces.
pub trait FrameHost: Host {
    /// A network interface.
    type Port: FramePort<Watch = Self::Watch>;

    /// Opens an interface by name, for one side of the protocol.
    ///
    /// # Errors
    /// If there is no such interface, or the process lacks permission.
    fn open_port(&self, interface: &str, side: Side) -> io::Result<Self::Port>;

    /// Claims a range of tags for a queue to that disk, which no other queue between the same
    /// stations uses.
    ///
    /// # Errors
    /// If all ranges are claimed.
    fn queue_id(&self, disk: AoeAddress) -> io::Result<QueueId>;
}

/// A non-blocking network interface: a call that would block fails with
/// [`io::ErrorKind::WouldBlock`].
pub trait FramePort {
    /// A handle by which a parked task is woken.
    type Watch;

    /// The interface's current state.
    ///
    /// # Errors
    /// If the interface no longer exists; it may come back.
    fn query_info(&mut self) -> io::Result<FramePortInfo>;

    /// Distance between two received frames in the chunk, in bytes.
    fn stride(&self) -> usize;

    /// Receives frames into the spare part of `chunk`, one every [`FramePort::stride`], and adds an
    /// entry to `arrivals` for each.
    ///
    /// # Errors
    /// If no frame has arrived, or the interface is down.
    fn receive(&mut self, chunk: &mut Chunk, arrivals: &mut Vec<ReceivedFrame>) -> io::Result<()>;

    /// Sends frames at the front of `outbox` that go to this port, `id`, and removes them.
    ///
    /// # Errors
    /// If there is no room, or the interface is down.
    fn send(&mut self, id: PortId, outbox: &mut FrameOutbox) -> io::Result<usize>;

    /// Wakes the task once when a frame can be received.
    fn wake_when_readable(&self, watch: &Self::Watch);

    /// Wakes the task once when a frame can be sent.
    fn wake_when_writable(&self, watch: &Self::Watch);
}

/// An interface that cannot be opened, and why.
#[derive(Debug, thiserror::Error)]
#[error("interface {interface}: {error}")]
pub struct PortError {
    /// The interface's name.
    pub interface: String,
    /// The system's error.
    pub error: io::Error,
}

impl FrameHost for EngineCore {
    type Port = PacketPort;

    fn open_port(&self, interface: &str, side: Side) -> io::Result<PacketPort> {
        PacketPort::open(interface, side)
    }

    fn queue_id(&self, disk: AoeAddress) -> io::Result<QueueId> {
        QueueId::claim(disk)
    }
}
