//! The NVMe/TCP target: one session for one connection, which is one queue of a controller.
//!
//! ```text
//!   IcReq ──▶ Head ──capsule──▶ ControllerQueue ──complete──▶ link.rs ──▶ outbox
//!              ▲ │                   │    ▲           fetch ──▶ R2T
//!              │ └─H2CData─▶ Data, Place, Tail
//!              └──────────────── receive.rs
//! ```
//! The first PDU initializes the connection. Data in a capsule is lent from the receive buffer to
//! the volume; else the host is asked for all of a command's data by one R2T. Up to 64 KiB are
//! lent, too, if they come in one PDU; for longer data memory is taken before it is asked for, so
//! that it never waits, and it is received straight there. What commands mean, and what bounds a
//! queue, is in [`crate::fabrics::controller`].
//!
//! A host may leave 1 MiB of answers unread: until it reads them, it is not listened to. A host
//! that breaks the transport's rules gets a C2HTermReq with the fatal error that the specification
//! names, and the connection ends.

mod link;
mod receive;

#[cfg(test)]
mod tests;

use crate::fabrics::controller::ControllerQueue;
use crate::fabrics::controller::node::NvmeNode;
use crate::outbox::Outbox;
use crate::session::{Demand, ProtocolError, SecuredBy, StreamSession};
use blockmux_volume::{Chunk, Pool};
use link::TargetLink;
use std::sync::Arc;
use std::time::Instant;

/// A host's connection to an NVMe/TCP target.
pub type TargetSession = ControllerQueue<TargetLink>;

impl TargetSession {
    /// A session for a host that has just connected. `pool` is the core's, for data from the host.
    /// The host has 30 seconds from `now` on to connect a queue.
    #[must_use]
    pub fn new(node: Arc<NvmeNode>, pool: Pool, now: Instant) -> TargetSession {
        let link = TargetLink::new(node.in_capsule, pool.clone());
        ControllerQueue::over(link, node, pool, now)
    }
}

impl StreamSession for TargetSession {
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
            what: "left in the middle of a PDU's data", reference: "TCP Transport 1.0 §3.6"
        })
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        &mut self.transport.outbox
    }
}
