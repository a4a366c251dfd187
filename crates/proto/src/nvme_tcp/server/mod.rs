//! The NVMe/TCP target: one session for one connection, which is one queue of a controller.
//!
//! ```text
//!   IcReq ──▶ Head ──capsule──▶ ControllerQueue ──complete──▶ link.rs ──▶ outbox
//!              ▲ │                   │    ▲           fetch ──▶ R2T
//!              │ └─H2CData─▶ Data, Place, Tail
//!              └──────────────── receive.rs
//! ```
//! The first PDU initializes the connection. The volume borrows in-capsule data from the receive
//! buffer. Other data is requested by one R2T for each command. Up to 64 KiB in one PDU are
//! borrowed too; for longer data, memory is allocated before the R2T, so that the data never waits
//! and is received directly there. [`crate::fabrics::controller`] interprets the commands and
//! bounds the queue.
//!
//! A host may leave 1 MiB of completions unread; beyond that the session receives nothing from it.
//! A host that violates the protocol gets a C2HTermReq with the specified fatal error, and the
//! connection ends.

mod link;
mod receive;

#[cfg(test)]
mod tests;

use crate::driver::outbox::Outbox;
use crate::driver::session::{Demand, ProtocolError, SecuredBy, StreamSession};
use crate::fabrics::controller::ControllerQueue;
use crate::fabrics::controller::node::NvmeNode;
use blockmux_volume::{Chunk, Pool};
use link::TcpTargetLink;
use std::sync::Arc;
use std::time::Instant;

/// A host's connection to an NVMe/TCP target.
pub type NvmeTcpTargetSession = ControllerQueue<TcpTargetLink>;

impl NvmeTcpTargetSession {
    /// Creates a session for a host that has just connected. `pool` is the core's pool, for data
    /// from the host. The host has 30 seconds from `now` to connect a queue.
    #[must_use]
    pub fn new(node: Arc<NvmeNode>, pool: Pool, now: Instant) -> NvmeTcpTargetSession {
        let link = TcpTargetLink::new(node.in_capsule, pool.clone());
        ControllerQueue::with_transport(link, node, pool, now)
    }
}

impl StreamSession for NvmeTcpTargetSession {
    fn demand(&self) -> Demand {
        if self.is_finished() { Demand::Close } else { self.wants() }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        self.on_traffic(now);
        let mut at: usize = 0;
        while !self.is_over()
            && let Some(taken) = self.step(input, at)?
        {
            at = at.saturating_add(taken);
        }
        Ok(at)
    }

    fn on_secured(&mut self, by: SecuredBy<'_>, _now: Instant) -> Result<(), ProtocolError> {
        match by {
            SecuredBy::Psk(identity) => self.on_secured_by(identity),
            SecuredBy::Certificate(_) | SecuredBy::Nothing => Err(ProtocolError {
                what: "used TLS without a pre-shared key",
                reference: "TCP Transport 1.1 §3.6.1",
            }),
        }
    }

    fn on_placed(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.on_traffic(now);
        self.placed();
        Ok(())
    }

    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        if self.end() || self.transport.is_between_pdus() {
            return Ok(());
        }
        Err(ProtocolError {
            what: "closed the connection in the middle of a PDU's data",
            reference: "TCP Transport 1.0 §3.6",
        })
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        &mut self.transport.outbox
    }
}
