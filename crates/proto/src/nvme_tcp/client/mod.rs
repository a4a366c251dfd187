//! The NVMe/TCP initiator: an admin queue, and I/O queues of one namespace (TCP Transport 1.0).
//!
//! ```text
//!   HostAdmin:  ICReq ▶ bring-up ▶ ready: Keep Alive, until it is stopped
//!         └ Controller ▶ HostQueues: for each I/O queue ICReq ▶ Connect ▶ I/O, until it is stopped
//! ```
//! Each queue is one connection, a `TcpHostLink`, which encodes and decodes PDUs with their digests
//! and transfers data. [`crate::fabrics::host`] interprets the commands. An admin queue holds the
//! association: when its connection ends, the controller and all its I/O queues are gone.
//!
//! Bounds of a session: 30 seconds for the initialization and CAP.TO until the controller is ready;
//! 1024 I/O of a queue with at most four commands each, and not more commands than the queue has
//! entries; each byte of a command's data is transferred once; a Keep Alive has to complete before
//! the next is due. A protocol violation below commands ends the connection with a H2CTermReq that
//! names the field; another session replays the I/O.

mod link;
mod pdu;
mod receive;
mod send;

#[cfg(test)]
mod tests;

use crate::driver::outbox::Outbox;
use crate::driver::session::{Demand, ProtocolError, StreamSession};
use crate::fabrics::host::{HostAdmin, HostQueue, HostQueues};
use blockmux_volume::Chunk;
use link::TcpHostLink;
use std::time::Instant;

pub use crate::fabrics::host::{
    AdminConfig, ControllerInfo, ControllerQuery, FoundSubsystem, HostId, Names, NamespaceInfo, NvmeRefused,
    QueueConfig,
};

/// The digests to negotiate for a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    /// Whether headers have a CRC-32C digest.
    pub header: bool,
    /// Whether data has a CRC-32C digest.
    pub data: bool,
}

/// An admin queue over NVMe/TCP.
pub type NvmeTcpAdminSession = HostAdmin<TcpHostLink>;

/// I/O queues over NVMe/TCP; each has its own connection.
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
            // Bytes after the end are ignored.
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
