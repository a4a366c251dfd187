//! The NVMe/RDMA target: one session for one queue pair, which is one queue of a controller.
//!
//! ```text
//!   Requested ──▶ accept or reject
//!   Received ──▶ ControllerQueue ──fetch──▶ `fetches` ──work──▶ RDMA Read ──Done──▶ ControllerQueue
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
    phase: TargetLinkPhase,
    /// Longest capsule, in bytes.
    receive_len: u32,
    /// RDMA Reads to post.
    fetches: VecDeque<PostableRead>,
    /// Completions to post, oldest first.
    completions: VecDeque<PostableCompletion>,
    /// Number of posted RDMA Reads.
    reading: u32,
    /// Most RDMA Reads that may be posted: [`READS`], or fewer if the host supports fewer.
    max_reads: u32,
    /// Data for the host that is queued here or posted, in bytes.
    unsent: usize,
    /// Further data that the queue pair has not sent yet, in bytes.
    queue_pair_unsent: usize,
}

/// State of the connection.
enum TargetLinkPhase {
    Listening,
    /// The connection has to be accepted, with this number of receive buffers.
    Accepting(u16),
    /// The connection has to be rejected with this private data.
    Rejecting(Vec<u8>),
    Open,
    /// The session asked the queue pair to disconnect.
    Ending,
    Over,
}

/// An RDMA Read to post.
struct PostableRead {
    slot: usize,
    local: Seg,
    remote: Remote,
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
            phase: TargetLinkPhase::Listening,
            receive_len: SQE_LEN.saturating_add(in_capsule) as u32, // at most 32 KiB and a command
            fetches: VecDeque::new(),
            completions: VecDeque::new(),
            reading: 0,
            max_reads: READS,
            unsent: 0,
            queue_pair_unsent: 0,
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
            self.phase = TargetLinkPhase::Rejecting(other.rejection());
            return Err(cm::refused("asked for SRP at a port that serves NVMe/RDMA"));
        }
        self.max_reads = reads.min(READS);
        let status = match cm::check_request(private_data) {
            Ok(_) if self.max_reads == 0 => CmStatus::INVALID_IRD,
            Ok(_) if is_stopping => CmStatus::NO_RESOURCES,
            Ok(receives) => {
                self.phase = TargetLinkPhase::Accepting(receives);
                return Ok(());
            }
            Err(status) => status,
        };
        self.phase = TargetLinkPhase::Rejecting(cm::reject(status));
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

    /// Posts as much as the queue pair has room for; returns whether it posted anything.
    #[inline]
    fn transmit(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let mut has_moved = false;
        // The queue pair would hold back further reads, and the completions posted behind them.
        while self.reading < self.max_reads
            && queue_pair.room() > 0
            && let Some(PostableRead { slot, local, remote }) = self.fetches.pop_front()
        {
            has_moved = true;
            self.reading = self.reading.saturating_add(1);
            queue_pair.read(WorkId(READ << u32::BITS | slot as u64), SgList::one(local), remote);
        }
        while queue_pair.room() > 0
            && let Some(completion) = self.completions.front_mut()
        {
            has_moved = true;
            if let Some((local, remote)) = completion.data.take() {
                let id = WorkId(WRITE << u32::BITS | local.len() as u64);
                if !queue_pair.write(id, &local, remote) {
                    self.unsent = self.unsent.saturating_sub(local.len());
                }
                if queue_pair.room() == 0 {
                    break;
                }
            }
            let Some(PostableCompletion { cqe, invalidate, .. }) = self.completions.pop_front() else {
                break;
            };
            // The buffer is posted first: the host may send its next command as soon as it has this
            // completion.
            queue_pair.receive(1);
            queue_pair.send(cqe.as_bytes(), &SgList::default(), invalidate);
        }
        self.queue_pair_unsent = queue_pair.unsent();
        has_moved
    }

    /// Drops everything that was not posted, because the connection is lost.
    fn discard(&mut self) {
        self.phase = TargetLinkPhase::Over;
        self.fetches.clear();
        self.completions.clear();
        (self.unsent, self.queue_pair_unsent) = (0, 0);
    }
}

impl FabricsTransport for RdmaTargetLink {
    const NAME: &'static str = "nvme-rdma";
    const TRTYPE: TransportType = TransportType::RDMA;
    const SGLS: u32 = SGLS_KEYED;

    type Progress = ();

    #[inline]
    fn descriptor(sqe: &Sqe) -> Descriptor {
        let dptr = &sqe.dptr;
        let place = match (dptr.kind(), dptr.subtype()) {
            (SglType::KEYED_DATA_BLOCK, SglSubtype::ADDRESS | SglSubtype::INVALIDATE_KEY) => {
                Ok(DataPlace::Host)
            }
            (SglType::DATA_BLOCK, SglSubtype::OFFSET) => Ok(DataPlace::Capsule(dptr.address.get())),
            _ => Err(NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID),
        };
        let is_keyed = dptr.kind() == SglType::KEYED_DATA_BLOCK;
        let len = if is_keyed { dptr.length_and_key().0 } else { dptr.length.get() };
        Descriptor { len: len as usize, place }
    }

    /// Always true: an RDMA Read needs memory to write to.
    #[inline]
    fn needs_memory(_len: usize) -> bool {
        true
    }

    fn fetch(&mut self, slot: usize, command: &mut CommandSlot<()>) {
        if let (Some(local), Some((remote, _))) = (command.memory.clone(), host_buffer(&command.sqe)) {
            self.fetches.push_back(PostableRead { slot, local, remote });
        }
    }

    #[inline]
    fn complete(&mut self, sqe: &Sqe, outcome: &NvmeOutcome, sqhd: Option<u16>) {
        let (cid, len) = (sqe.cid.get(), outcome.data.len());
        let memory = host_buffer(sqe);
        let data = memory.filter(|(remote, _)| len > 0 && remote.len as usize >= len);
        let cqe = if len > 0 && data.is_none() {
            // The queue has checked the lengths already; this check guards the host's memory once
            // more.
            NvmeOutcome::failure(NvmeStatus::DATA_SGL_LENGTH_INVALID).cqe(cid, sqhd)
        } else {
            outcome.cqe(cid, sqhd)
        };
        self.unsent = self.unsent.saturating_add(data.map_or(0, |_| len));
        self.completions.push_back(PostableCompletion {
            data: data.map(|(remote, _)| (outcome.data.clone(), remote)),
            cqe,
            invalidate: memory.filter(|(_, invalidates)| *invalidates).map(|(remote, _)| remote.stag),
        });
    }

    #[inline]
    fn unsent(&self) -> usize {
        self.unsent.saturating_add(self.queue_pair_unsent)
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

    /// Converts a session of another transport that has received nothing yet.
    #[must_use]
    pub fn from_other_transport<T: FabricsTransport>(other: ControllerQueue<T>) -> NvmeRdmaTargetSession {
        other.change_transport(|node| RdmaTargetLink::new(node.in_capsule))
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
        let low = (id.0 & u64::from(u32::MAX)) as usize;
        match id.0 >> u32::BITS {
            WRITE => self.transport.unsent = self.transport.unsent.saturating_sub(low),
            READ => {
                self.transport.reading = self.transport.reading.saturating_sub(1);
                // A failed read ends the connection, so nothing else has to be done for it.
                if result.is_ok() && !self.is_over() && self.fetching(low).is_some() {
                    self.on_data(low);
                }
            }
            _ => {}
        }
    }
}

impl RdmaSession for NvmeRdmaTargetSession {
    fn endpoint(&self) -> Endpoint {
        Endpoint {
            // Their number depends on the connection request; `work` posts them.
            receives: 0,
            receive_len: self.transport.receive_len,
            sends: SENDS,
            reads: READS,
            regions: 0,
            private_data: Vec::new(),
        }
    }

    #[inline]
    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        match event {
            Event::Requested { private_data, reads } => {
                let is_stopping = self.is_finished();
                self.transport.on_requested(&private_data, reads, is_stopping)?;
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
        match std::mem::replace(&mut self.transport.phase, TargetLinkPhase::Ending) {
            TargetLinkPhase::Accepting(receives) => {
                queue_pair.receive(receives.into());
                queue_pair.accept(cm::accept(receives));
                self.transport.phase = TargetLinkPhase::Open;
                return true;
            }
            TargetLinkPhase::Rejecting(private_data) => {
                self.end();
                queue_pair.reject(private_data);
                return true;
            }
            TargetLinkPhase::Listening if self.is_finished() => {
                queue_pair.disconnect();
                return true;
            }
            phase @ (TargetLinkPhase::Listening | TargetLinkPhase::Ending | TargetLinkPhase::Over) => {
                self.transport.phase = phase;
                return false;
            }
            TargetLinkPhase::Open => self.transport.phase = TargetLinkPhase::Open,
        }
        let has_moved = self.transport.transmit(queue_pair);
        if self.is_finished() && self.transport.completions.is_empty() {
            queue_pair.disconnect();
            self.transport.phase = TargetLinkPhase::Ending;
            return true;
        }
        has_moved
    }
}

/// The host's data buffer, and whether the completion has to invalidate its key.
#[inline]
fn host_buffer(sqe: &Sqe) -> Option<(Remote, bool)> {
    let (len, key) = sqe.dptr.length_and_key();
    let invalidates = match (sqe.dptr.kind(), sqe.dptr.subtype()) {
        (SglType::KEYED_DATA_BLOCK, SglSubtype::ADDRESS) => false,
        (SglType::KEYED_DATA_BLOCK, SglSubtype::INVALIDATE_KEY) => true,
        _ => return None,
    };
    (len > 0).then(|| (Remote { stag: Stag(key), address: sqe.dptr.address.get(), len }, invalidates))
}

/// High half of the `WorkId` of an RDMA Read; the low half is the slot of its command.
const READ: u64 = 1;
/// High half of the `WorkId` of an RDMA Write; the low half is its length in bytes.
const WRITE: u64 = 2;
/// Most RDMA Reads in flight.
const READS: u32 = 32;
/// Most sends, reads and writes that are posted at a time.
const SENDS: u32 = 256;
