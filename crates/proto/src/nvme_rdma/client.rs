//! The NVMe/RDMA initiator: an admin queue, and I/O queues of one namespace, each a queue pair.
//!
//! ```text
//!   command ──▶ `outgoing` ──work──▶ register its memory ──▶ Send: command with the key [, short data]
//!   Received: completion ──┬─ the controller has invalidated the key ──▶ done
//!                          └─ it has not ──▶ `closing` ──work──▶ invalidate ──▶ done
//! ```
//! Data goes straight from and into the caller's memory, which the controller reaches from before
//! the command is sent until its completion, and no longer: a command completes here only once its
//! key is closed. What the commands mean is in [`crate::fabrics::host`].
//!
//! What bounds a queue: commands under way are fewer than its entries, each has one registration
//! and one receive buffer, and the controller may have fewer receive buffers than that.

#[cfg(test)]
mod tests;

use super::cm;
use crate::fabrics::host::{
    ADMIN_ENTRIES, Commands, DataTransfer, HostAdmin, HostQueue, HostQueues, HostTransport, NvmeRequest,
    QueueShape,
};
use crate::rdma::{
    Endpoint, Event, QueuePair, RdmaConnections, RdmaSession, Remote, RemoteRights, Stag, WorkId,
};
use crate::session::ProtocolError;
use crate::slots::SlotKey;
use blockmux_volume::{Pool, Seg, SgList};
use blockmux_wire::nvme::{CQE_LEN, Cqe, PSDT_SGL, SglDescriptor, Sqe};
use std::collections::VecDeque;
use std::time::Instant;
use zerocopy::{IntoBytes, transmute};

/// An admin queue over NVMe/RDMA.
pub type AdminSession = HostAdmin<HostLink>;

/// I/O queues over NVMe/RDMA, each a connection of its own.
pub type QueueSession = HostQueues<HostLink>;

/// A queue pair with one queue of a controller.
pub struct HostLink {
    phase: HostPhase,
    /// The most data that goes with a command, in bytes.
    in_capsule: u32,
    /// Commands that were not sent, oldest first.
    outgoing: VecDeque<Outgoing>,
    /// By the place of each command in its table: whether the controller has it.
    exposures: Vec<Exposure>,
    /// Completions whose commands have memory to close first.
    closing: VecDeque<(Stag, Cqe)>,
    /// Commands that the controller has.
    sent: u32,
    /// How many it has receive buffers for.
    most_sent: u32,
    /// Receive buffers to give back.
    receives: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostPhase {
    Connecting,
    Open,
    /// Its end was asked for, or it is over.
    Over,
}

/// A command to send.
struct Outgoing {
    sqe: Sqe,
    /// Data that goes with it.
    payload: SgList,
    memory: DataMemory,
}

/// The memory of a command that the controller is to reach.
enum DataMemory {
    None,
    /// To be registered.
    Closed(SgList, RemoteRights),
    /// The queue pair is at it.
    Asked,
    Open(Stag),
}

/// Whether the controller has a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Exposure {
    /// It has not.
    #[default]
    No,
    /// It has, with this key if it is to reach memory.
    Sent(Option<Stag>),
    /// It has completed it, and the key is still to be invalidated.
    Closing,
}

/// Whether there is still a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Connection {
    There,
    Lost,
}

impl HostLink {
    /// Something has happened; `is_over`: the session has ended already.
    fn on_event(
        &mut self,
        event: Event,
        is_over: bool,
        commands: &mut impl Commands,
    ) -> Result<Connection, ProtocolError> {
        match event {
            Event::Connected { private_data } => {
                let receives = cm::check_accept(&private_data)?;
                self.most_sent = receives.map_or(u32::MAX, u32::from);
                self.phase = HostPhase::Open;
            }
            Event::Received { message, invalidated } if !is_over => {
                self.on_received(&message, invalidated, commands)?;
            }
            Event::Registered { id, remote } => {
                let asked = self.outgoing.front_mut().filter(|next| u64::from(next.sqe.cid.get()) == id.0);
                asked.into_iter().for_each(|next| next.on_registered(remote));
            }
            Event::Refused { private_data } => {
                self.phase = HostPhase::Over;
                return Err(cm::rejection(&private_data));
            }
            Event::Disconnected => {
                self.phase = HostPhase::Over;
                return Ok(Connection::Lost);
            }
            Event::Requested { .. } | Event::Received { .. } | Event::Done { .. } => {}
        }
        Ok(Connection::There)
    }

    /// A completion.
    #[inline]
    fn on_received(
        &mut self,
        message: &Seg,
        invalidated: Option<Stag>,
        commands: &mut impl Commands,
    ) -> Result<(), ProtocolError> {
        self.receives = self.receives.saturating_add(1);
        if message.len() < CQE_LEN {
            return Err(wrong("sent a message that is shorter than a completion"));
        }
        let mut bytes = [0; CQE_LEN];
        message.copy_to(&mut bytes);
        let cqe: Cqe = transmute!(bytes);
        let cid = cqe.cid.get();
        let Some(key) = commands.find(cid) else {
            return Err(wrong("completed a command that is not there"));
        };
        let exposure = self.exposure(cid);
        match (*exposure, invalidated) {
            (Exposure::Sent(open), Some(_)) if open == invalidated => {}
            (Exposure::Sent(None), None) => {}
            (Exposure::Sent(Some(stag)), None) => {
                *exposure = Exposure::Closing;
                self.closing.push_back((stag, cqe));
                return Ok(());
            }
            (Exposure::Sent(_), Some(_)) => {
                return Err(wrong("invalidated a key that is not of the command that it completed"));
            }
            (Exposure::No, _) => return Err(wrong("completed a command that was not sent")),
            (Exposure::Closing, _) => return Err(wrong("completed a command twice")),
        }
        self.finish(key, &cqe, commands);
        Ok(())
    }

    #[inline]
    fn finish(&mut self, key: SlotKey, cqe: &Cqe, commands: &mut impl Commands) {
        *self.exposure(cqe.cid.get()) = Exposure::No;
        self.sent = self.sent.saturating_sub(1);
        commands.finish(key, cqe);
    }

    /// The command in the place that this CID names. There are at most 1,024 of them.
    #[inline]
    fn exposure(&mut self, cid: u16) -> &mut Exposure {
        let at = SlotKey::index_of_narrow(cid);
        if self.exposures.len() <= at {
            self.exposures.resize(at.saturating_add(1), Exposure::No);
        }
        // It is as long as that now.
        #[allow(clippy::indexing_slicing, reason = "it was made long enough above")]
        &mut self.exposures[at]
    }

    /// Asks the queue pair for what may be done; `is_over`: after that the connection ends. Whether
    /// anything has moved.
    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair, is_over: bool, commands: &mut impl Commands) -> bool {
        let mut has_moved = false;
        if self.phase == HostPhase::Open {
            has_moved = self.receives > 0 || !self.closing.is_empty();
            queue_pair.receive(std::mem::take(&mut self.receives));
            while let Some((stag, cqe)) = self.closing.pop_front() {
                queue_pair.invalidate(stag);
                if let Some(key) = commands.find(cqe.cid.get()) {
                    self.finish(key, &cqe, commands);
                }
            }
            while self.sent < self.most_sent && queue_pair.room() > 0 && self.send_next(queue_pair) {
                has_moved = true;
            }
        }
        let has_sent = self.outgoing.is_empty() || self.phase == HostPhase::Connecting;
        if is_over && has_sent && self.phase != HostPhase::Over {
            queue_pair.disconnect();
            self.phase = HostPhase::Over;
            return true;
        }
        has_moved
    }

    /// Sends the oldest command that was not sent, or has its memory registered; whether it
    /// could do either.
    #[inline]
    fn send_next(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let Some(next) = self.outgoing.front_mut() else { return false };
        if let DataMemory::Closed(list, access) = &mut next.memory {
            let id = WorkId(next.sqe.cid.get().into());
            match queue_pair.register(id, list, *access) {
                Some(remote) => next.on_registered(remote),
                None => {
                    next.memory = DataMemory::Asked;
                    return true;
                }
            }
        }
        let stag = match next.memory {
            DataMemory::Closed(..) | DataMemory::Asked => return false,
            DataMemory::None => None,
            DataMemory::Open(stag) => Some(stag),
        };
        queue_pair.send(next.sqe.as_bytes(), &next.payload, None);
        let cid = next.sqe.cid.get();
        self.outgoing.pop_front();
        *self.exposure(cid) = Exposure::Sent(stag);
        self.sent = self.sent.saturating_add(1);
        true
    }
}

impl Outgoing {
    /// The controller can reach the command's memory.
    #[inline]
    fn on_registered(&mut self, remote: Remote) {
        self.memory = DataMemory::Open(remote.stag);
        self.sqe.dptr = SglDescriptor::keyed(remote.address, remote.len, remote.stag.0, true);
    }
}

impl HostTransport for HostLink {
    type Options = ();

    fn new((): (), in_capsule: Option<u32>, _pool: Pool) -> HostLink {
        HostLink {
            phase: HostPhase::Connecting,
            // IOCCSZ is of I/O queues; Linux's target takes no data in a capsule of an admin queue.
            in_capsule: in_capsule.unwrap_or(0),
            outgoing: VecDeque::new(),
            exposures: Vec::new(),
            closing: VecDeque::new(),
            sent: 0,
            most_sent: u32::MAX,
            receives: 0,
        }
    }

    /// The queue pair connects by itself.
    fn begin(&mut self) {}

    #[inline]
    fn is_open(&self) -> bool {
        self.phase == HostPhase::Open
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
                memory = DataMemory::Closed(list, access);
            }
            // The controller moves it by itself, and says by its completion whether it has.
            if let Some((progress, _)) = commands.transport(request.key)
                && progress.moved.add(0, len).is_err()
            {
                debug_assert!(false, "a fresh command has moved nothing");
            }
        }
        *self.exposure(request.key.narrow()) = Exposure::No;
        self.outgoing.push_back(Outgoing { sqe, payload, memory });
    }

    fn may_end(&self) -> bool {
        self.phase != HostPhase::Connecting && self.closing.is_empty()
    }

    fn discard(&mut self) {
        self.outgoing.clear();
    }
}

impl RdmaSession for AdminSession {
    fn endpoint(&self) -> Endpoint {
        endpoint(QueueShape { qid: 0, entries: ADMIN_ENTRIES, cntlid: 0 })
    }

    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        let is_over = self.is_over();
        match self.receive(now, |link, commands| link.on_event(event, is_over, commands))? {
            Connection::There => Ok(()),
            Connection::Lost => self.on_lost(),
        }
    }

    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let is_over = self.is_over();
        self.drive(|link, commands| link.work(queue_pair, is_over, commands))
    }
}

impl RdmaSession for HostQueue<HostLink> {
    fn endpoint(&self) -> Endpoint {
        endpoint(self.shape)
    }

    #[inline]
    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        let is_over = self.is_over();
        match self.receive(now, |link, commands| link.on_event(event, is_over, commands))? {
            Connection::There => Ok(()),
            Connection::Lost => self.end(),
        }
    }

    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let is_over = self.is_over();
        self.drive(|link, commands| link.work(queue_pair, is_over, commands))
    }
}

impl RdmaConnections for QueueSession {
    fn endpoint(&self) -> Endpoint {
        self.first().endpoint()
    }

    #[inline]
    fn connection(&mut self, connection: usize) -> impl RdmaSession {
        self.queue(connection)
    }
}

/// What a queue needs: each of its entries may wait for a completion and have memory registered.
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

/// The part of a list that a command's data is.
#[inline]
fn part(list: &SgList, base: usize, len: usize) -> SgList {
    if base == 0 && list.len() == len { list.clone() } else { list.slice(base, len) }
}

fn wrong(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "RDMA Transport 1.0 §3.1" }
}

/// RDMA Reads that the controller may have on their way.
const READS: u32 = 32;
