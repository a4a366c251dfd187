//! The NVMe/TCP initiator: an admin queue, and I/O queues of one namespace (TCP Transport 1.0).
//!
//! ```text
//!   HostAdmin:  ICReq ▶ bring-up ▶ ready: Keep Alive, until it is stopped
//!         └ Controller ▶ HostQueues: for each I/O queue ICReq ▶ Connect ▶ I/O, until it is stopped
//! ```
//! Each queue is one connection, a `TcpHostLink`: PDUs as they come and go, with their digests, data
//! to its place and data that the controller asks for. [`crate::fabrics::host`] has what the
//! commands mean. An admin queue holds the association: when its connection ends, the controller
//! and all its I/O queues are gone.
//!
//! What bounds a session: 30 seconds until the bring-up is over and CAP.TO for the controller to
//! become ready; 1024 I/O of a queue, four commands each, not more commands than the queue has
//! entries; each byte of a command's data once; a Keep Alive that is not answered until the next is
//! due. Whatever goes wrong below commands ends the connection with a termination that names the
//! field, and other sessions replay.

mod link;
mod pdu;
mod receive;
mod send;

#[cfg(test)]
mod tests;

use crate::fabrics::host::{HostAdmin, HostQueue, HostQueues};
use crate::outbox::Outbox;
use crate::session::{Demand, ProtocolError, StreamSession};
use blockmux_volume::Chunk;
use link::TcpHostLink;
use std::time::Instant;

pub use crate::fabrics::host::{
    AdminConfig, Ask, ControllerInfo, FoundSubsystem, HostId, Names, NamespaceInfo, NvmeRefused, QueueConfig,
};

/// What to agree on for one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    /// CRC-32C over headers.
    pub header: bool,
    /// CRC-32C over data.
    pub data: bool,
}

/// An admin queue over NVMe/TCP.
pub type NvmeTcpAdminSession = HostAdmin<TcpHostLink>;

/// I/O queues over NVMe/TCP, each a connection of its own.
pub type NvmeTcpQueueSession = HostQueues<TcpHostLink>;

impl StreamSession for NvmeTcpAdminSession {
    fn demand(&self) -> Demand {
        if self.is_over() { Demand::Close } else { self.transport.demand() }
    }

    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        if self.is_over() {
            return Ok(input.unread().len());
        }
        self.receive(now, |link, commands| link.on_bytes(input, commands))
    }

    fn on_placed(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.receive(now, TcpHostLink::on_placed)
    }

    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        self.on_lost()
    }

    fn outbox(&mut self) -> &mut Outbox {
        &mut self.transport.outbox
    }
}

impl StreamSession for HostQueue<TcpHostLink> {
    #[inline]
    fn demand(&self) -> Demand {
        if self.is_over() { Demand::Close } else { self.transport.demand() }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        if self.is_over() {
            // What comes after the end is of no interest.
            return Ok(input.unread().len());
        }
        self.receive(now, |link, commands| link.on_bytes(input, commands))
    }

    #[inline]
    fn on_placed(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.receive(now, TcpHostLink::on_placed)
    }

    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        self.end()
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        &mut self.transport.outbox
    }
}
