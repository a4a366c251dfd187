//! The NVMe/RDMA initiator: an admin queue, and the I/O queues of one namespace. Each queue is one
//! queue pair.
//!
//! ```text
//!   command ──▶ `commands` ──work──▶ register its memory ──▶ Send: command with the key [, short data]
//!   Received: completion ──┬─ the controller has invalidated the key ──▶ done
//!                          └─ it has not ──work──▶ invalidate ──▶ done
//! ```
//! The controller reads and writes the caller's memory directly, from the time the command is sent
//! until its completion. A command completes here only once its key has been invalidated.
//! [`crate::fabrics::host`] interprets the commands.
//!
//! Bounds of a queue: fewer commands are in flight than it has entries; each has one registration
//! and one receive buffer. The controller may have fewer receive buffers, and then that number is
//! the bound.

#[cfg(test)]
mod tests;

use super::cm;
use crate::driver::session::ProtocolError;
use crate::fabrics::host::{
    ADMIN_ENTRIES, Commands, DataTransfer, HostAdmin, HostQueue, HostQueues, HostTransport, NvmeRequest,
    QueueShape,
};
use crate::rdma::exposure::{CommandData, ExposedCommand, ExposedCommands, WrongResponse};
use crate::rdma::{Endpoint, Event, QueuePair, RdmaConnections, RdmaSession, Remote, RemoteRights, Stag};
use crate::slots::SlotKey;
use blockmux_volume::{Pool, Seg, SgList};
use blockmux_wire::nvme::{CQE_LEN, Cqe, PSDT_SGL, SglDescriptor, Sqe};
use std::time::Instant;
use zerocopy::{IntoBytes, transmute};

/// An admin queue over NVMe/RDMA.
pub type NvmeRdmaAdminSession = HostAdmin<RdmaHostLink>;

/// I/O queues over NVMe/RDMA; each has its own connection.
pub type NvmeRdmaQueueSession = HostQueues<RdmaHostLink>;

/// The transport of one queue: a queue pair with the controller.
pub struct RdmaHostLink {
    phase: HostLinkPhase,
    /// Longest data that is sent in a capsule, in bytes.
    in_capsule: u32,
    commands: ExposedCommands<Sqe, Cqe>,
    /// Number of receive buffers that the controller has for commands.
    max_sent: u32,
    /// Number of consumed receive buffers that have to be posted again.
    receives: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostLinkPhase {
    Connecting,
    Open,
    /// The connection is closing or closed.
    Over,
}

/// State of the connection after an event.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LinkStatus {
    Up,
    Lost,
}

impl RdmaHostLink {
    /// Handles an event of the queue pair. `is_over` says whether the session has ended already.
    fn on_event(
        &mut self,
        event: Event,
        is_over: bool,
        commands: &mut impl Commands,
    ) -> Result<LinkStatus, ProtocolError> {
        match event {
            Event::Connected { private_data } => {
                let receives = cm::check_accept(&private_data)?;
                self.max_sent = receives.map_or(u32::MAX, u32::from);
                self.phase = HostLinkPhase::Open;
            }
            Event::Received { message, invalidated, written } if !is_over => {
                self.on_received(&message, invalidated, written, commands)?;
            }
            Event::Registered { id, remote } => self.commands.on_registered(id, remote),
            Event::Refused { private_data } => {
                self.phase = HostLinkPhase::Over;
                return Err(cm::rejection(&private_data));
            }
            Event::Disconnected => {
                self.phase = HostLinkPhase::Over;
                return Ok(LinkStatus::Lost);
            }
            Event::Requested { .. } | Event::Received { .. } | Event::Done { .. } => {}
        }
        Ok(LinkStatus::Up)
    }

    /// Handles a message, which has to be a completion.
    #[inline]
    fn on_received(
        &mut self,
        message: &Seg,
        invalidated: Option<Stag>,
        written: Option<Seg>,
        commands: &mut impl Commands,
    ) -> Result<(), ProtocolError> {
        self.receives = self.receives.saturating_add(1);
        if message.len() < CQE_LEN {
            return Err(violation("sent a message that is shorter than a completion"));
        }
        let mut bytes = [0; CQE_LEN];
        message.copy_to(&mut bytes);
        let cqe: Cqe = transmute!(bytes);
        let Some(key) = commands.find(cqe.cid.get()) else {
            return Err(violation("completed a command that does not exist"));
        };
        match self.commands.on_response(key, invalidated) {
            Ok(None) => finish(key, written, &cqe, commands),
            Ok(Some(stag)) => self.commands.close(key, stag, Some(cqe)),
            Err(WrongResponse::OtherMemory) => {
                return Err(violation("invalidated a key of another command than the one it completed"));
            }
            Err(WrongResponse::Unsent) => return Err(violation("completed a command that was not sent")),
            Err(WrongResponse::Repeated) => return Err(violation("completed a command twice")),
        }
        Ok(())
    }

    /// Posts the work that can be posted now and returns whether there was any. If `is_over`, it
    /// then closes the connection.
    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair, is_over: bool, commands: &mut impl Commands) -> bool {
        let mut has_moved = false;
        if self.phase == HostLinkPhase::Open {
            has_moved = self.receives > 0 || self.commands.is_closing();
            queue_pair.receive(std::mem::take(&mut self.receives));
            while let Some(ended) = self.commands.invalidate_next(queue_pair) {
                if let Some(cqe) = ended.response {
                    finish(ended.key, ended.written, &cqe, commands);
                }
            }
            has_moved |= self.commands.send(queue_pair, self.max_sent, commands);
        }
        let has_sent = self.commands.has_sent_all() || self.phase == HostLinkPhase::Connecting;
        if is_over && has_sent && self.phase != HostLinkPhase::Over {
            queue_pair.disconnect();
            self.phase = HostLinkPhase::Over;
            return true;
        }
        has_moved
    }
}

/// Completes a command, whose key is invalid, with the data of a read without memory.
#[inline]
fn finish(key: SlotKey, written: Option<Seg>, cqe: &Cqe, commands: &mut impl Commands) {
    if let Some(data) = written {
        commands.attach_borrowed(key, data);
    }
    commands.finish(key, cqe);
}

impl ExposedCommand for Sqe {
    #[inline]
    fn send(
        &mut self,
        payload: &SgList,
        exposed: Option<(Remote, RemoteRights)>,
        queue_pair: &mut impl QueuePair,
    ) {
        self.dptr = match exposed {
            Some((remote, _)) => {
                let invalidates = queue_pair.is_invalidated_by_peers();
                SglDescriptor::keyed(remote.address, remote.len, remote.stag.0, invalidates)
            }
            None if payload.is_empty() => SglDescriptor::keyed(0, 0, 0, false),
            None => SglDescriptor::in_capsule(0, payload.len() as u32),
        };
        queue_pair.send(self.as_bytes(), payload, None);
    }
}

impl HostTransport for RdmaHostLink {
    type Options = ();

    const USES_KEYED_SGLS: bool = true;

    const ERROR_HANDLING: &'static str = REFERENCE;

    fn new((): (), in_capsule: Option<u32>, _pool: Pool) -> RdmaHostLink {
        RdmaHostLink {
            phase: HostLinkPhase::Connecting,
            // IOCCSZ applies to I/O queues only; Linux's target accepts no data in capsules of an
            // admin queue.
            in_capsule: in_capsule.unwrap_or(0),
            commands: ExposedCommands::default(),
            max_sent: u32::MAX,
            receives: 0,
        }
    }

    /// Does nothing: the queue pair connects by itself.
    fn begin(&mut self) {}

    #[inline]
    fn is_open(&self) -> bool {
        self.phase == HostLinkPhase::Open
    }

    #[inline]
    fn send(&mut self, request: &NvmeRequest, commands: &mut impl Commands) {
        let mut sqe = request.command;
        sqe.cid = request.key.narrow().into();
        sqe.flags |= PSDT_SGL;
        let data = CommandData::new(request.key, request.transfer, commands, self.in_capsule);
        // The controller transfers the data by RDMA; its completion says whether it has transferred
        // all of it.
        if let DataTransfer::In(len) | DataTransfer::Out(len) = request.transfer
            && len > 0
            && let Some((progress, _)) = commands.transport(request.key)
            && progress.moved.add(0, len).is_err()
        {
            debug_assert!(false, "a new command has transferred no data");
        }
        self.commands.push(request.key, sqe, data);
    }

    fn may_end(&self) -> bool {
        self.phase != HostLinkPhase::Connecting && !self.commands.is_closing()
    }

    fn discard(&mut self) {
        self.commands.drop_unsent();
    }
}

impl RdmaSession for NvmeRdmaAdminSession {
    fn endpoint(&self) -> Endpoint {
        endpoint(QueueShape { qid: 0, entries: ADMIN_ENTRIES, cntlid: 0 })
    }

    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        let is_over = self.is_over();
        match self.receive(now, |link, commands| link.on_event(event, is_over, commands))? {
            LinkStatus::Up => Ok(()),
            LinkStatus::Lost => self.on_lost(),
        }
    }

    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let is_over = self.is_over();
        self.drive(|link, commands| link.work(queue_pair, is_over, commands))
    }
}

impl RdmaSession for HostQueue<RdmaHostLink> {
    fn endpoint(&self) -> Endpoint {
        endpoint(self.shape)
    }

    #[inline]
    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        let is_over = self.is_over();
        match self.receive(now, |link, commands| link.on_event(event, is_over, commands))? {
            LinkStatus::Up => Ok(()),
            LinkStatus::Lost => self.end(),
        }
    }

    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let is_over = self.is_over();
        self.drive(|link, commands| link.work(queue_pair, is_over, commands))
    }
}

impl RdmaConnections for NvmeRdmaQueueSession {
    fn endpoint(&self) -> Endpoint {
        self.first().endpoint()
    }

    #[inline]
    fn connection(&mut self, connection: usize) -> impl RdmaSession {
        self.queue(connection)
    }
}

/// The endpoint that a queue needs: each entry may wait for a completion and have a registration.
fn endpoint(shape: QueueShape) -> Endpoint {
    let entries = shape.entries.into();
    Endpoint {
        receives: entries,
        receive_len: CQE_LEN as u32,
        sends: entries,
        reads: READS,
        regions: entries,
        private_data: cm::request(shape),
        without_invalidation: None,
    }
}

fn violation(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: REFERENCE }
}

const REFERENCE: &str = "RDMA Transport 1.0 §3.1";

/// Most RDMA Reads that the controller may have in flight (IRD).
const READS: u32 = 32;
