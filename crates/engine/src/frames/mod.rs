//! Raw frames: network interfaces as ports of a
//! [`FrameSession`](blockmux_proto::session::FrameSession).
//!
//! ```text
//!   interface ────Ring────▶ Wire ──Frame──▶ session ──poll_io──▶ channel
//!   interface ◀─sendmmsg── Wire ◀─outbox── session ◀──on_io──── channel
//! ```
//! A port is a packet socket that is bound to one interface and one EtherType, so that other
//! traffic never reaches it, with a filter in the kernel for what is not meant for this side. What
//! comes for a VLAN or a macvlan upon the interface is theirs: who serves both names both. Frames
//! come by way of memory that is shared with the kernel, without a call; a batch of them goes with
//! one call, payload straight from where it is. It needs `CAP_NET_RAW` and nothing else.
//!
//! Unsafe code is in `kernel` and `ring` alone. [`FrameHost`] is the seam to the simulator, as
//! [`crate::host`] is for streams.

pub mod blocking;
mod kernel;
pub mod port;
pub mod queue_id;
mod ring;
pub mod target;
pub mod volume;
mod wire;

pub use kernel::ReceivedFrame;
pub use port::{PacketPort, Share, Side};
pub use queue_id::QueueId;
pub(crate) use wire::Wire;

use crate::host::{Host, SocketWatch};
use crate::reactor::EngineCore;
use blockmux_proto::aoe::AoeAddress;
use blockmux_proto::frames::{FrameOutbox, FramePortInfo, PortId};
use blockmux_volume::Chunk;
use std::io;

/// A core that frames come to.
pub trait FrameHost: Host {
    /// A network interface.
    type Port: FramePort<Watch = Self::Watch>;

    /// Opens the interface of that name for one side of a protocol.
    ///
    /// # Errors
    /// If there is none, or it is not allowed.
    fn open_port(&self, interface: &str, side: Side) -> io::Result<Self::Port>;

    /// What tags of a queue to that disk are made of, so that no other queue at the same stations
    /// has them.
    ///
    /// # Errors
    /// If too many have some.
    fn queue_id(&self, disk: AoeAddress) -> io::Result<QueueId>;
}

/// A network interface that never blocks: what cannot be done now fails with
/// [`io::ErrorKind::WouldBlock`].
pub trait FramePort {
    /// Tells a parked task that frames can move again.
    type Watch;

    /// What it is like now.
    ///
    /// # Errors
    /// If it is not there any more; it may come back.
    fn query_info(&mut self) -> io::Result<FramePortInfo>;

    /// Bytes from one received frame to the next.
    fn stride(&self) -> usize;

    /// Receives frames into the spare part of `chunk`, one every [`FramePort::stride`], and tells
    /// of each.
    ///
    /// # Errors
    /// If none is there, or the interface is down.
    fn receive(&mut self, chunk: &mut Chunk, arrivals: &mut Vec<ReceivedFrame>) -> io::Result<()>;

    /// Sends frames at the front of `outbox` that go to this port, `id`, and removes them.
    ///
    /// # Errors
    /// If there is no room, or the interface is down.
    fn send(&mut self, id: PortId, outbox: &mut FrameOutbox) -> io::Result<usize>;

    /// Has the task woken once when there is something to receive.
    fn wake_when_readable(&self, watch: &Self::Watch);

    /// Has the task woken once when something can be sent.
    fn wake_when_writable(&self, watch: &Self::Watch);
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

impl FramePort for PacketPort {
    type Watch = SocketWatch;

    fn query_info(&mut self) -> io::Result<FramePortInfo> {
        PacketPort::query_info(self)
    }

    #[inline]
    fn stride(&self) -> usize {
        PacketPort::stride(self)
    }

    #[inline]
    fn receive(&mut self, chunk: &mut Chunk, arrivals: &mut Vec<ReceivedFrame>) -> io::Result<()> {
        PacketPort::receive(self, chunk, arrivals)
    }

    #[inline]
    fn send(&mut self, id: PortId, outbox: &mut FrameOutbox) -> io::Result<usize> {
        PacketPort::send(self, id, outbox)
    }

    fn wake_when_readable(&self, watch: &SocketWatch) {
        self.park();
        watch.wake_when(self, libc::POLLIN);
    }

    fn wake_when_writable(&self, watch: &SocketWatch) {
        watch.wake_when(self, libc::POLLOUT);
    }
}
