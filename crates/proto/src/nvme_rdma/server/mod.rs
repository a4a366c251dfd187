//! The NVMe/RDMA target: one session for one queue pair, which is one queue of a controller.
//!
//! ```text
//!   Requested ──▶ accept or reject
//!   Received ──▶ ControllerQueue ──fetch──▶ `mover` ──work──▶ RDMA Read ──Done──▶ ControllerQueue
//!                      └──────complete──▶ `completions` ──work──▶ RDMA Write, Receive, Send with Invalidate
//! ```
//! Bounds of a session, in addition to those of its queue ([`crate::fabrics::controller`]): the
//! host gets as many receive buffers as the smaller of its queues has entries. The session posts a
//! receive buffer again only right before it posts the completion of the command that consumed it.
//! So neither side ever has more completions outstanding than that.
//!
//! A host that gives wrong lengths or keys loses its own connection: the provider on either side
//! refuses the access.

#[cfg(test)]
mod tests;

use super::cm;
use crate::driver::session::ProtocolError;
use crate::fabrics::controller::node::NvmeNode;
use crate::fabrics::controller::{CommandSlot, ControllerQueue, DataPlace, Descriptor, FabricsTransport};
use crate::nvme::NvmeOutcome;
use crate::rdma::cm::OtherProtocol;
use crate::rdma::target_mover::{READS, TargetMessage, TargetMover, endpoint};
use crate::rdma::target_phase::TargetPhase;
use crate::rdma::{Endpoint, Event, QueuePair, RdmaSession, Remote, Stag, WorkError, WorkId};
use blockmux_volume::{Pool, Seg, SgList};
use blockmux_wire::nvme::identify::SGLS_KEYED;
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{Cqe, SQE_LEN, SglSubtype, SglType, Sqe};
use blockmux_wire::nvmeof::fabrics::TransportType;
use blockmux_wire::nvmeof::rdma::CmStatus;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use zerocopy::{IntoBytes, transmute};

/// A host's connection to an NVMe/RDMA target.
pub type NvmeRdmaTargetSession = ControllerQueue<RdmaTargetLink>;

/// The transport of one queue: a queue pair with the host, and the work to post to it.
pub struct RdmaTargetLink {
    phase: TargetPhase,
    mover: TargetMover,
    /// Longest capsule, in bytes.
    receive_len: u32,
    /// Completions to post, oldest first.
    completions: VecDeque<PostableCompletion>,
}

/// A completion to post, and the RDMA Write to post before it.
struct PostableCompletion {
    data: Option<(SgList, Remote)>,
    cqe: Cqe,
    /// The key that the completion invalidates (Send with Invalidate).
    invalidate: Option<Stag>,
}

impl RdmaTargetLink {
    fn new(in_capsule: usize) -> RdmaTargetLink {
        RdmaTargetLink {
            phase: TargetPhase::Listening,
            mover: TargetMover::default(),
            receive_len: SQE_LEN.saturating_add(in_capsule) as u32, // at most 32 KiB and a command
            completions: VecDeque::new(),
        }
    }

    /// Decides whether to accept a connection request. The host supports `reads` RDMA Reads of its
    /// memory at a time.
    fn on_requested(
        &mut self,
        private_data: &[u8],
        reads: u32,
        is_stopping: bool,
    ) -> Result<(), ProtocolError> {
        if let Some(other @ OtherProtocol::Srp { .. }) = OtherProtocol::of(private_data) {
            self.phase = TargetPhase::Rejecting(other.rejection());
            return Err(cm::refused("asked for SRP at a port that serves NVMe/RDMA"));
        }
        self.mover.max_reads = reads.min(READS);
        let status = match cm::check_request(private_data) {
            Ok(_) if self.mover.max_reads == 0 => CmStatus::INVALID_IRD,
            Ok(_) if is_stopping => CmStatus::NO_RESOURCES,
            Ok(receives) => {
                let private_data = cm::accept(receives);
                self.phase = TargetPhase::Accepting { receives: receives.into(), private_data };
                return Ok(());
            }
            Err(status) => status,
        };
        self.phase = TargetPhase::Rejecting(cm::reject(status));
        Err(cm::refused(match status {
            CmStatus::INVALID_LENGTH => "asked for a connection with private data that is too short",
            CmStatus::INVALID_RECFMT => "asked for a connection in an unknown record format",
            CmStatus::INVALID_QID => "asked for a queue identifier above the controller's limit",
            CmStatus::INVALID_HSQSIZE => "asked for a queue with a send queue size out of range",
            CmStatus::INVALID_HRQSIZE => "asked for a queue without a receive queue",
            CmStatus::INVALID_IRD => "does not support RDMA Reads, which transfer data to the controller",
            _ => "asked for a connection while the target is stopping",
        }))
    }

    /// Drops everything that was not posted, because the connection is lost.
    fn discard(&mut self) {
        self.phase = TargetPhase::Over;
        self.mover = TargetMover::default();
        self.completions.clear();
    }
}

impl TargetMessage for PostableCompletion {
    #[inline]
    fn next_write(&mut self) -> Option<(SgList, Remote)> {
        self.data.take()
    }

    #[inline]
    fn send(&self, queue_pair: &mut impl QueuePair) {
        // The buffer is posted first: the host may send its next command as soon as it has this
        // completion.
        queue_pair.receive(1);
        queue_pair.send(self.cqe.as_bytes(), &SgList::default(), self.invalidate);
    }
}

impl FabricsTransport for RdmaTargetLink {
    const NAME: &'static str = "nvme-rdma";
    const TRTYPE: TransportType = TransportType::RDMA;
    const SGLS: u32 = SGLS_KEYED;

    type Transfer = Option<HostBuffer>;

    #[inline]
    fn descriptor(sqe: &Sqe) -> Descriptor<Option<HostBuffer>> {
        let dptr = &sqe.dptr;
        let is_keyed = dptr.kind() == SglType::KEYED_DATA_BLOCK;
        let (len, key) = if is_keyed { dptr.length_and_key() } else { (dptr.length.get(), 0) };
        let (place, invalidates) = match (dptr.kind(), dptr.subtype()) {
            (SglType::KEYED_DATA_BLOCK, SglSubtype::ADDRESS) => (Ok(DataPlace::Host), false),
            (SglType::KEYED_DATA_BLOCK, SglSubtype::INVALIDATE_KEY) => (Ok(DataPlace::Host), true),
            (SglType::DATA_BLOCK, SglSubtype::OFFSET) => (Ok(DataPlace::Capsule(dptr.address.get())), false),
            _ => (Err(NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID), false),
        };
        let remote = Remote { stag: Stag(key), address: dptr.address.get(), len };
        let is_at_host = len > 0 && matches!(place, Ok(DataPlace::Host));
        let transfer = is_at_host.then_some(HostBuffer { remote, invalidates });
        Descriptor { len: len as usize, place, transfer }
    }

    /// Always true: an RDMA Read needs memory to write to.
    #[inline]
    fn needs_memory(_len: usize) -> bool {
        true
    }

    fn fetch(&mut self, slot: usize, command: &mut CommandSlot<Option<HostBuffer>>) {
        if let (Some(local), Some(host)) = (command.memory.clone(), command.transfer) {
            self.mover.read(slot as u32, local, host.remote); // at most as many slots as entries
        }
    }

    #[inline]
    fn complete(&mut self, cid: u16, host: Option<HostBuffer>, outcome: NvmeOutcome, sqhd: Option<u16>) {
        let len = outcome.data.len();
        let data = host.filter(|host| len > 0 && host.remote.len as usize >= len);
        let cqe = if len > 0 && data.is_none() {
            // The queue has checked the lengths already; this check guards the host's memory once
            // more.
            NvmeOutcome::failure(NvmeStatus::DATA_SGL_LENGTH_INVALID).cqe(cid, sqhd)
        } else {
            outcome.cqe(cid, sqhd)
        };
        self.mover.add_unsent(data.map_or(0, |_| len));
        self.completions.push_back(PostableCompletion {
            data: data.map(|host| (outcome.data, host.remote)),
            cqe,
            invalidate: host.filter(|host| host.invalidates).map(|host| host.remote.stag),
        });
    }

    #[inline]
    fn unsent(&self) -> usize {
        self.mover.unsent()
    }
}

impl NvmeRdmaTargetSession {
    /// Creates a session for a host that has just connected. `pool` is the core's pool, for data
    /// from the host. The host has 30 seconds from `now` to connect a queue.
    #[must_use]
    pub fn new(node: Arc<NvmeNode>, pool: Pool, now: Instant) -> NvmeRdmaTargetSession {
        let link = RdmaTargetLink::new(node.in_capsule);
        ControllerQueue::with_transport(link, node, pool, now)
    }

    /// Handles a capsule: a command, followed by its data if that is short.
    #[inline]
    fn on_capsule(&mut self, message: &Seg) -> Result<(), ProtocolError> {
        let Some(data_len) = message.len().checked_sub(SQE_LEN) else {
            return Err(ProtocolError {
                what: "sent a message that is shorter than a command",
                reference: "RDMA Transport 1.0 §3.1",
            });
        };
        let mut bytes = [0; SQE_LEN];
        message.copy_to(&mut bytes);
        let sqe: Sqe = transmute!(bytes);
        self.on_command(&sqe, data_len, || message.slice(SQE_LEN, data_len), true)
    }

    #[inline]
    fn on_done(&mut self, id: WorkId, result: Result<(), WorkError>) {
        // A failed read ends the connection, so nothing else has to be done for it.
        if let Some(slot) = self.transport.mover.on_done(id).map(|slot| slot as usize)
            && result.is_ok()
            && !self.is_over()
            && self.fetching(slot).is_some()
        {
            self.on_data(slot);
        }
    }
}

impl RdmaSession for NvmeRdmaTargetSession {
    fn endpoint(&self) -> Endpoint {
        // The number of receive buffers depends on the connection request.
        endpoint(0, self.transport.receive_len, SENDS)
    }

    #[inline]
    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        match event {
            Event::Requested { private_data, reads } => {
                let is_stopping = self.is_finished();
                if let Err(error) = self.transport.on_requested(&private_data, reads, is_stopping) {
                    self.end();
                    return Err(error);
                }
            }
            Event::Received { message, .. } if !self.is_over() => {
                self.on_traffic(now);
                // A host sends no other command before Connect has completed: until then the queue
                // has a depth of 1.
                self.on_capsule(&message)?;
            }
            Event::Done { id, result } => {
                self.on_traffic(now);
                self.on_done(id, result);
            }
            Event::Disconnected | Event::Refused { .. } => {
                self.end();
                self.transport.discard();
            }
            Event::Received { .. } | Event::Connected { .. } | Event::Registered { .. } => {}
        }
        Ok(())
    }

    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        if !self.transport.phase.is_open() {
            let is_stopping = self.is_finished();
            return self.transport.phase.answer(queue_pair, is_stopping);
        }
        let RdmaTargetLink { mover, completions, .. } = &mut self.transport;
        let has_moved = mover.transmit(queue_pair, completions, |_| true);
        if self.is_finished() && self.transport.completions.is_empty() {
            self.transport.phase.disconnect(queue_pair);
            return true;
        }
        has_moved
    }
}

/// The host's data buffer.
#[derive(Clone, Copy)]
pub struct HostBuffer {
    remote: Remote,
    /// Whether the completion has to invalidate its key.
    invalidates: bool,
}

/// Most sends, reads and writes that are posted at a time.
const SENDS: u32 = 256;
