//! The NVMe/RDMA initiator: an admin queue, and the I/O queues of one namespace. Each queue is one
//! queue pair.
//!
//! ```text
//!   command ──▶ `unsent` ──work──▶ register its memory ──▶ Send: command with the key [, short data]
//!   Received: completion ──┬─ the controller has invalidated the key ──▶ done
//!                          └─ it has not ──▶ `invalidating` ──work──▶ invalidate ──▶ done
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
use crate::rdma::{
    Endpoint, Event, QueuePair, RdmaConnections, RdmaSession, Remote, RemoteRights, Stag, WorkId,
};
use crate::slots::SlotKey;
use blockmux_volume::{Pool, Seg, SgList};
use blockmux_wire::nvme::{CQE_LEN, Cqe, PSDT_SGL, SglDescriptor, Sqe};
use std::collections::VecDeque;
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
    /// Commands that have not been sent yet, oldest first.
    unsent: VecDeque<UnsentCommand>,
    /// State of each command, by its slot in the command table.
    states: Vec<HostCommandState>,
    /// Completions that wait until the key of their command has been invalidated.
    invalidating: VecDeque<(Stag, Cqe)>,
    /// Number of commands that the controller has and has not completed.
    sent: u32,
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

/// A command to send.
struct UnsentCommand {
    sqe: Sqe,
    /// Data sent in the capsule.
    payload: SgList,
    memory: DataMemory,
}

/// Registration of a command's data buffer, which the controller accesses by RDMA.
enum DataMemory {
    None,
    /// Still to be registered, with these access rights.
    Unregistered(SgList, RemoteRights),
    /// The registration was posted and has not completed.
    Registering,
    Registered(Stag),
}

/// Progress of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum HostCommandState {
    /// The command has not been sent.
    #[default]
    Unsent,
    /// The controller has the command, and the key of its data buffer if it has one.
    Sent(Option<Stag>),
    /// The controller has completed the command; its key has not been invalidated yet.
    Invalidating,
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
            Event::Received { message, invalidated } if !is_over => {
                self.on_received(&message, invalidated, commands)?;
            }
            Event::Registered { id, remote } => {
                let asked = self.unsent.front_mut().filter(|next| u64::from(next.sqe.cid.get()) == id.0);
                asked.into_iter().for_each(|next| next.on_registered(remote));
            }
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
        commands: &mut impl Commands,
    ) -> Result<(), ProtocolError> {
        self.receives = self.receives.saturating_add(1);
        if message.len() < CQE_LEN {
            return Err(violation("sent a message that is shorter than a completion"));
        }
        let mut bytes = [0; CQE_LEN];
        message.copy_to(&mut bytes);
        let cqe: Cqe = transmute!(bytes);
        let cid = cqe.cid.get();
        let Some(key) = commands.find(cid) else {
            return Err(violation("completed a command that does not exist"));
        };
        let state = self.state(cid);
        match (*state, invalidated) {
            (HostCommandState::Sent(open), Some(_)) if open == invalidated => {}
            (HostCommandState::Sent(None), None) => {}
            (HostCommandState::Sent(Some(stag)), None) => {
                *state = HostCommandState::Invalidating;
                self.invalidating.push_back((stag, cqe));
                return Ok(());
            }
            (HostCommandState::Sent(_), Some(_)) => {
                return Err(violation("invalidated a key of another command than the one it completed"));
            }
            (HostCommandState::Unsent, _) => return Err(violation("completed a command that was not sent")),
            (HostCommandState::Invalidating, _) => return Err(violation("completed a command twice")),
        }
        self.finish(key, &cqe, commands);
        Ok(())
    }

    #[inline]
    fn finish(&mut self, key: SlotKey, cqe: &Cqe, commands: &mut impl Commands) {
        *self.state(cqe.cid.get()) = HostCommandState::Unsent;
        self.sent = self.sent.saturating_sub(1);
        commands.finish(key, cqe);
    }

    /// State of the command with this CID. The table has at most 1,024 slots.
    #[inline]
    fn state(&mut self, cid: u16) -> &mut HostCommandState {
        let at = SlotKey::index_of_narrow(cid);
        if self.states.len() <= at {
            self.states.resize(at.saturating_add(1), HostCommandState::Unsent);
        }
        #[allow(clippy::indexing_slicing, reason = "it was made long enough above")]
        &mut self.states[at]
    }

    /// Posts the work that can be posted now and returns whether there was any. If `is_over`, it
    /// then closes the connection.
    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair, is_over: bool, commands: &mut impl Commands) -> bool {
        let mut has_moved = false;
        if self.phase == HostLinkPhase::Open {
            has_moved = self.receives > 0 || !self.invalidating.is_empty();
            queue_pair.receive(std::mem::take(&mut self.receives));
            while let Some((stag, cqe)) = self.invalidating.pop_front() {
                queue_pair.invalidate(stag);
                if let Some(key) = commands.find(cqe.cid.get()) {
                    self.finish(key, &cqe, commands);
                }
            }
            while self.sent < self.max_sent && queue_pair.room() > 0 && self.send_next(queue_pair) {
                has_moved = true;
            }
        }
        let has_sent = self.unsent.is_empty() || self.phase == HostLinkPhase::Connecting;
        if is_over && has_sent && self.phase != HostLinkPhase::Over {
            queue_pair.disconnect();
            self.phase = HostLinkPhase::Over;
            return true;
        }
        has_moved
    }

    /// Sends the oldest unsent command, or posts the registration of its buffer. Returns whether it
    /// could do either.
    #[inline]
    fn send_next(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let Some(next) = self.unsent.front_mut() else { return false };
        if let DataMemory::Unregistered(list, access) = &mut next.memory {
            let id = WorkId(next.sqe.cid.get().into());
            match queue_pair.register(id, list, *access) {
                Some(remote) => next.on_registered(remote),
                None => {
                    next.memory = DataMemory::Registering;
                    return true;
                }
            }
        }
        let stag = match next.memory {
            DataMemory::Unregistered(..) | DataMemory::Registering => return false,
            DataMemory::None => None,
            DataMemory::Registered(stag) => Some(stag),
        };
        queue_pair.send(next.sqe.as_bytes(), &next.payload, None);
        let cid = next.sqe.cid.get();
        self.unsent.pop_front();
        *self.state(cid) = HostCommandState::Sent(stag);
        self.sent = self.sent.saturating_add(1);
        true
    }
}

impl UnsentCommand {
    /// Completes the registration of the command's data buffer.
    #[inline]
    fn on_registered(&mut self, remote: Remote) {
        self.memory = DataMemory::Registered(remote.stag);
        self.sqe.dptr = SglDescriptor::keyed(remote.address, remote.len, remote.stag.0, true);
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
            unsent: VecDeque::new(),
            states: Vec::new(),
            invalidating: VecDeque::new(),
            sent: 0,
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
        sqe.dptr = SglDescriptor::keyed(0, 0, 0, false);
        let (mut payload, mut memory) = (SgList::default(), DataMemory::None);
        let len = match request.transfer {
            DataTransfer::Nothing => 0,
            DataTransfer::In(len) | DataTransfer::Out(len) => len,
        };
        if len > 0 {
            let is_out = matches!(request.transfer, DataTransfer::Out(_));
            let data = if is_out { commands.data_out(request.key) } else { commands.data_in(request.key) };
            let list = data.map_or_else(SgList::default, |(list, base)| part(list, base, len as usize));
            if is_out && len <= self.in_capsule {
                sqe.dptr = SglDescriptor::in_capsule(0, len);
                payload = list;
            } else {
                let access = if is_out { RemoteRights::RemoteRead } else { RemoteRights::RemoteWrite };
                memory = DataMemory::Unregistered(list, access);
            }
            // The controller transfers the data by RDMA; its completion says whether it has
            // transferred all of it.
            if let Some((progress, _)) = commands.transport(request.key)
                && progress.moved.add(0, len).is_err()
            {
                debug_assert!(false, "a new command has transferred no data");
            }
        }
        *self.state(request.key.narrow()) = HostCommandState::Unsent;
        self.unsent.push_back(UnsentCommand { sqe, payload, memory });
    }

    fn may_end(&self) -> bool {
        self.phase != HostLinkPhase::Connecting && self.invalidating.is_empty()
    }

    fn discard(&mut self) {
        self.unsent.clear();
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
    }
}

/// The `len` bytes of `list` from `base` on.
#[inline]
fn part(list: &SgList, base: usize, len: usize) -> SgList {
    if base == 0 && list.len() == len { list.clone() } else { list.slice(base, len) }
}

fn violation(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: REFERENCE }
}

const REFERENCE: &str = "RDMA Transport 1.0 §3.1";

/// Most RDMA Reads that the controller may have in flight (IRD).
const READS: u32 = 32;
