//! The NVMe/RDMA target: one session for one queue pair, which is one queue of a controller.
//!
//! ```text
//!   Requested ──▶ accept or reject
//!   Received ──▶ ControllerQueue ──fetch──▶ `fetches` ──work──▶ RDMA Read ──Done──▶ ControllerQueue
//!                      └──────complete──▶ `answers` ──work──▶ RDMA Write, Receive, Send with Invalidate
//! ```
//! What bounds a session, beside what bounds its queue ([`crate::fabrics::controller`]): the host
//! gets as many receive buffers as the smaller of its queues has entries, and gets one back only
//! right before the answer to the command that took it. So there are never more answers than that,
//! neither here nor at the host.
//!
//! A host that lies about lengths or keys loses its own connection: its provider or ours refuses to
//! touch that memory.

#[cfg(test)]
mod tests;

use super::cm;
use crate::fabrics::controller::node::NvmeNode;
use crate::fabrics::controller::{CommandSlot, ControllerQueue, DataPlace, Descriptor, FabricsTransport};
use crate::nvme::NvmeOutcome;
use crate::rdma::{Endpoint, Event, QueuePair, RdmaSession, Remote, Stag, WorkError, WorkId};
use crate::rdma_cm::OtherProtocol;
use crate::session::ProtocolError;
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
pub type TargetSession = ControllerQueue<TargetLink>;

/// A queue pair with a host: what is to be posted to it.
pub struct TargetLink {
    phase: LinkPhase,
    /// The longest capsule, in bytes.
    receive_len: u32,
    /// Data to read from the host.
    fetches: VecDeque<Fetch>,
    /// Completions to send, oldest first.
    answers: VecDeque<Answer>,
    /// Capsules that came while a Connect waits.
    inbox: VecDeque<Seg>,
    /// RDMA Reads that are posted.
    reading: u32,
    /// Data for the host that waits here or is posted, in bytes.
    unsent: usize,
    /// What the queue pair holds beside that, in bytes.
    held: usize,
    /// What a capsule of `inbox` has broken; the next event returns it.
    broken: Option<ProtocolError>,
}

/// How far the connection has come.
enum LinkPhase {
    Listening,
    /// To be accepted, with so many receive buffers.
    Accepting(u16),
    /// To be rejected with this private data.
    Rejecting(Vec<u8>),
    Open,
    /// Its end was asked for.
    Ending,
    Over,
}

/// An RDMA Read to post.
struct Fetch {
    slot: usize,
    place: Seg,
    remote: Remote,
}

/// A completion, and the data that goes before it.
struct Answer {
    data: Option<(SgList, Remote)>,
    cqe: Cqe,
    /// Memory of the host that the completion invalidates.
    invalidate: Option<Stag>,
}

impl TargetLink {
    fn new(in_capsule: usize) -> TargetLink {
        TargetLink {
            phase: LinkPhase::Listening,
            receive_len: SQE_LEN.saturating_add(in_capsule) as u32, // at most 32 KiB and a command
            fetches: VecDeque::new(),
            answers: VecDeque::new(),
            inbox: VecDeque::new(),
            reading: 0,
            unsent: 0,
            held: 0,
            broken: None,
        }
    }

    /// Decides about a connection request.
    fn on_requested(&mut self, private_data: &[u8], is_stopping: bool) -> Result<(), ProtocolError> {
        if let Some(other @ OtherProtocol::Srp { .. }) = OtherProtocol::of(private_data) {
            self.phase = LinkPhase::Rejecting(other.rejection());
            return Err(cm::refused("asked for SRP at a port that serves NVMe/RDMA"));
        }
        let status = match cm::check_request(private_data) {
            Ok(_) if is_stopping => CmStatus::NO_RESOURCES,
            Ok(receives) => {
                self.phase = LinkPhase::Accepting(receives);
                return Ok(());
            }
            Err(status) => status,
        };
        self.phase = LinkPhase::Rejecting(cm::reject(status));
        Err(cm::refused(match status {
            CmStatus::INVALID_LENGTH => "asked for a connection with private data that is too short",
            CmStatus::INVALID_RECFMT => "asked for a connection in an unknown record format",
            CmStatus::INVALID_QID => "asked for a queue with a number that no controller has",
            CmStatus::INVALID_HSQSIZE => "asked for a queue with an impossible send queue",
            CmStatus::INVALID_HRQSIZE => "asked for a queue without a receive queue",
            _ => "asked for a connection while the target stops",
        }))
    }

    /// Posts what there is room for; whether anything was.
    #[inline]
    fn transmit(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let mut has_moved = false;
        // More would wait in the queue pair, and the answers behind them.
        while self.reading < READS
            && queue_pair.room() > 0
            && let Some(Fetch { slot, place, remote }) = self.fetches.pop_front()
        {
            has_moved = true;
            self.reading = self.reading.saturating_add(1);
            queue_pair.read(WorkId(READ << u32::BITS | slot as u64), SgList::one(place), remote);
        }
        while queue_pair.room() > 0
            && let Some(answer) = self.answers.front_mut()
        {
            has_moved = true;
            if let Some((local, remote)) = answer.data.take() {
                let id = WorkId(WRITE << u32::BITS | local.len() as u64);
                if !queue_pair.write(id, &local, remote) {
                    self.unsent = self.unsent.saturating_sub(local.len());
                }
                if queue_pair.room() == 0 {
                    break;
                }
            }
            let Some(Answer { cqe, invalidate, .. }) = self.answers.pop_front() else { break };
            // Before the answer: the host may send its next command as soon as it has this one.
            queue_pair.receive(1);
            queue_pair.send(cqe.as_bytes(), &SgList::default(), invalidate);
        }
        self.held = queue_pair.unsent();
        has_moved
    }

    /// The connection is gone: nothing that was not posted ever will be.
    fn discard(&mut self) {
        self.phase = LinkPhase::Over;
        self.fetches.clear();
        self.answers.clear();
        self.inbox.clear();
        (self.unsent, self.held) = (0, 0);
    }
}

impl FabricsTransport for TargetLink {
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

    /// An RDMA Read writes into memory of ours.
    #[inline]
    fn needs_memory(_len: usize) -> bool {
        true
    }

    fn fetch(&mut self, slot: usize, command: &mut CommandSlot<()>) {
        if let (Some(place), Some((remote, _))) = (command.memory.clone(), host_memory(&command.sqe)) {
            self.fetches.push_back(Fetch { slot, place, remote });
        }
    }

    #[inline]
    fn complete(&mut self, sqe: &Sqe, outcome: &NvmeOutcome, sqhd: Option<u16>) {
        let (cid, len) = (sqe.cid.get(), outcome.data.len());
        let memory = host_memory(sqe);
        let data = memory.filter(|(remote, _)| len > 0 && remote.len as usize >= len);
        let cqe = if len > 0 && data.is_none() {
            // The queue has compared the lengths; nothing is ever written beyond the host's memory.
            NvmeOutcome::failure(NvmeStatus::DATA_SGL_LENGTH_INVALID).cqe(cid, sqhd)
        } else {
            outcome.cqe(cid, sqhd)
        };
        self.unsent = self.unsent.saturating_add(data.map_or(0, |_| len));
        self.answers.push_back(Answer {
            data: data.map(|(remote, _)| (outcome.data.clone(), remote)),
            cqe,
            invalidate: memory.filter(|(_, invalidates)| *invalidates).map(|(remote, _)| remote.stag),
        });
    }

    #[inline]
    fn unsent(&self) -> usize {
        self.unsent.saturating_add(self.held)
    }
}

impl TargetSession {
    /// A session for a host that has just connected. `pool` is the core's, for data from the host.
    /// The host has 30 seconds from `now` on to connect a queue.
    #[must_use]
    pub fn new(node: Arc<NvmeNode>, pool: Pool, now: Instant) -> TargetSession {
        let link = TargetLink::new(node.in_capsule);
        ControllerQueue::over(link, node, pool, now)
    }

    /// A session made of one over another transport for which nothing has come yet.
    #[must_use]
    pub fn instead_of<T: FabricsTransport>(other: ControllerQueue<T>) -> TargetSession {
        other.over_instead(|node| TargetLink::new(node.in_capsule))
    }

    /// A capsule: a command, and its data behind it if that is short.
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

    /// Takes the capsules that had to wait, as far as they may be taken; whether there were any.
    fn take_inbox(&mut self) -> bool {
        let mut has_moved = false;
        while self.takes_commands()
            && !self.is_over()
            && let Some(message) = self.transport.inbox.pop_front()
        {
            has_moved = true;
            if let Err(error) = self.on_capsule(&message) {
                self.transport.broken = Some(error);
                self.end();
            }
        }
        has_moved
    }

    #[inline]
    fn on_done(&mut self, id: WorkId, result: Result<(), WorkError>) {
        let low = (id.0 & u64::from(u32::MAX)) as usize;
        match id.0 >> u32::BITS {
            WRITE => self.transport.unsent = self.transport.unsent.saturating_sub(low),
            READ => {
                self.transport.reading = self.transport.reading.saturating_sub(1);
                // Otherwise the connection ends.
                if result.is_ok() && !self.is_over() && self.fetching(low).is_some() {
                    self.on_data(low);
                }
            }
            _ => {}
        }
    }
}

impl RdmaSession for TargetSession {
    fn endpoint(&self) -> Endpoint {
        Endpoint {
            // They are posted as the host asks for them.
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
        let broken = self.transport.broken.take();
        match event {
            Event::Requested { private_data } => {
                let is_stopping = self.is_finished();
                self.transport.on_requested(&private_data, is_stopping)?;
            }
            Event::Received { message, .. } if !self.is_over() => {
                self.on_traffic(now);
                if self.takes_commands() && self.transport.inbox.is_empty() {
                    self.on_capsule(&message)?;
                } else {
                    // It may lie in a buffer that others share.
                    self.transport.inbox.push_back(Seg::from_slice(&message.to_vec()));
                }
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
        broken.map_or(Ok(()), Err)
    }

    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        match std::mem::replace(&mut self.transport.phase, LinkPhase::Ending) {
            LinkPhase::Accepting(receives) => {
                queue_pair.receive(receives.into());
                queue_pair.accept(cm::accept(receives));
                self.transport.phase = LinkPhase::Open;
                return true;
            }
            LinkPhase::Rejecting(private_data) => {
                self.end();
                queue_pair.reject(private_data);
                return true;
            }
            LinkPhase::Listening if self.is_finished() => {
                queue_pair.disconnect();
                return true;
            }
            phase @ (LinkPhase::Listening | LinkPhase::Ending | LinkPhase::Over) => {
                self.transport.phase = phase;
                return false;
            }
            LinkPhase::Open => self.transport.phase = LinkPhase::Open,
        }
        let has_moved = self.take_inbox() | self.transport.transmit(queue_pair);
        if self.is_finished() && self.transport.answers.is_empty() {
            queue_pair.disconnect();
            self.transport.phase = LinkPhase::Ending;
            return true;
        }
        has_moved
    }
}

/// The memory of the host that a command names, and whether its completion is to invalidate that.
#[inline]
fn host_memory(sqe: &Sqe) -> Option<(Remote, bool)> {
    let (len, key) = sqe.dptr.length_and_key();
    let invalidates = match (sqe.dptr.kind(), sqe.dptr.subtype()) {
        (SglType::KEYED_DATA_BLOCK, SglSubtype::ADDRESS) => false,
        (SglType::KEYED_DATA_BLOCK, SglSubtype::INVALIDATE_KEY) => true,
        _ => return None,
    };
    (len > 0).then(|| (Remote { stag: Stag(key), address: sqe.dptr.address.get(), len }, invalidates))
}

/// The high half of a number: data from the host, by the slot of its command.
const READ: u64 = 1;
/// The high half of a number: data for the host, by its length.
const WRITE: u64 = 2;
/// RDMA Reads on their way at a time.
const READS: u32 = 32;
/// Sends, reads and writes that are posted at a time.
const SENDS: u32 = 256;
