//! A queue-pair provider in memory, for tests: both ends of a connection in one thread.
//!
//! It implements the contract of [`Provider`] and nothing more, so that a session which runs on it
//! runs on any provider. Work is executed packet by packet as the ends are polled: first the next
//! packet of the polled end, then of the other end, whose session does not take part, as with
//! hardware. A test can break the connection after any number of packets.
//!
//! Each end has a [`LoopbackAdapter`], which reaches only memory that is registered with it.

use crate::queue_pair::{Caps, Fault, Provider, Violation};
use crate::regions::{Regions, Seed};
use blockmux_proto::driver::session::Timed;
use blockmux_proto::rdma::{
    Endpoint, Event, QueuePair, Remote, RemoteRights, Stag, WorkError, WorkId, WorkRequest,
};
use blockmux_volume::{LocalKey, ProtectionDomain, RegistrationError, Seg, SgList};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One end of a connection in memory. Dropping it loses the connection.
pub struct Loopback {
    own: Rc<RefCell<LoopbackEnd>>,
    peer: Rc<RefCell<LoopbackEnd>>,
    break_after: Rc<Cell<Option<u64>>>,
}

/// Creates a connection: the active end, then the passive one. `seed` is for the steering tags of
/// both ends.
#[must_use]
pub fn pair(active: &Endpoint, passive: &Endpoint, seed: Seed) -> (Loopback, Loopback) {
    pair_on(
        active,
        passive,
        seed,
        &[LoopbackAdapter::with_room(usize::MAX), LoopbackAdapter::with_room(usize::MAX)],
    )
}

/// Creates a connection whose active and passive ends use these adapters.
#[must_use]
pub fn pair_on(
    active: &Endpoint,
    passive: &Endpoint,
    seed: Seed,
    adapters: &[Arc<LoopbackAdapter>; 2],
) -> (Loopback, Loopback) {
    let reads = active.reads.min(passive.reads);
    let own = Rc::new(RefCell::new(LoopbackEnd::new(active, reads, seed, &adapters[0])));
    let peer = Rc::new(RefCell::new(LoopbackEnd::new(passive, reads, seed.map(|byte| !byte), &adapters[1])));
    peer.borrow_mut().inbound.push_back(LoopbackPacket::Request(active.private_data.clone()));
    let break_after = Rc::new(Cell::new(None));
    let passive = Loopback { own: peer.clone(), peer: own.clone(), break_after: break_after.clone() };
    (Loopback { own, peer, break_after }, passive)
}

impl Loopback {
    /// Loses the connection after `pieces` more packets in either direction, connection requests
    /// and replies included.
    pub fn break_after(&self, pieces: u64) {
        self.break_after.set(Some(pieces));
    }

    /// Handles one packet; returns whether there was one.
    fn turn(&mut self) -> bool {
        let (mut own, mut peer) = (self.own.borrow_mut(), self.peer.borrow_mut());
        if self.break_after.get() == Some(0) {
            self.break_after.set(None);
            own.end(None);
            peer.end(None);
            return true;
        }
        let has_moved = own.take_next(&mut peer) || peer.take_next(&mut own);
        if has_moved {
            self.break_after.set(self.break_after.get().map(|left| left.saturating_sub(1)));
        }
        has_moved
    }
}

impl Timed for Loopback {}

/// Every call becomes a [`WorkRequest`] here, which tests examine.
impl QueuePair for Loopback {
    fn room(&self) -> usize {
        self.own.borrow().room()
    }

    fn post(&mut self, work: WorkRequest) {
        let (mut own, mut peer) = (self.own.borrow_mut(), self.peer.borrow_mut());
        own.post(work, &mut peer);
        own.begin(&mut peer);
    }
}

impl Provider for Loopback {
    fn caps(&self) -> Caps {
        let own = self.own.borrow();
        Caps {
            private_data: PRIVATE_DATA,
            max_transfer: u32::MAX,
            reads: own.max_reads,
            peer_reads: own.max_reads,
            invalidates: true,
        }
    }

    fn poll(&mut self) -> Option<Event> {
        loop {
            let event = self.own.borrow_mut().events.pop_front();
            if event.is_some() || !self.turn() {
                return event;
            }
        }
    }

    fn fault(&self) -> Option<Fault> {
        self.own.borrow().fault
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.own.borrow_mut().end(None);
        self.peer.borrow_mut().inbound.push_back(LoopbackPacket::Lost);
    }
}

/// A simulated adapter: the blocks of memory registered with it. Work on other memory fails.
pub struct LoopbackAdapter {
    /// Most blocks that can be registered at a time.
    room: usize,
    blocks: Mutex<RegisteredBlocks>,
}

#[derive(Default)]
struct RegisteredBlocks {
    last_key: u32,
    /// Address and length in bytes.
    known: BTreeMap<LocalKey, (usize, usize)>,
}

impl LoopbackAdapter {
    /// Creates an adapter with room for `room` registered blocks.
    #[must_use]
    pub fn with_room(room: usize) -> Arc<LoopbackAdapter> {
        Arc::new(LoopbackAdapter { room, blocks: Mutex::default() })
    }

    /// Number of registered blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks().known.len()
    }

    /// Whether no block is registered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether `key` is that of a block which contains all of `seg`.
    fn covers(&self, key: LocalKey, seg: &Seg) -> bool {
        let at = seg.as_ptr().addr();
        let end = |start: usize, len| start.saturating_add(len);
        let known = self.blocks().known.get(&key).copied();
        known.is_some_and(|(start, len)| start <= at && end(at, seg.len()) <= end(start, len))
    }

    fn blocks(&self) -> MutexGuard<'_, RegisteredBlocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProtectionDomain for LoopbackAdapter {
    fn register(&self, start: NonNull<u8>, len: usize) -> Result<LocalKey, RegistrationError> {
        let mut blocks = self.blocks();
        if blocks.known.len() >= self.room {
            return Err(RegistrationError);
        }
        blocks.last_key = blocks.last_key.wrapping_add(1);
        let key = LocalKey(blocks.last_key);
        blocks.known.insert(key, (start.addr().get(), len));
        Ok(key)
    }

    fn deregister(&self, key: LocalKey) {
        self.blocks().known.remove(&key);
    }
}

struct LoopbackEnd {
    state: LoopbackState,
    adapter: Arc<LoopbackAdapter>,
    /// The adapter as the protection domain of memory.
    domain: Arc<dyn ProtectionDomain>,
    max_sends: usize,
    max_reads: u32,
    /// Number of posted receive buffers; `receive_len` is the length of each in bytes.
    receives: u32,
    receive_len: usize,
    regions: Regions,
    events: VecDeque<Event>,
    /// Work that was posted and has not begun.
    queue: VecDeque<LoopbackTransfer>,
    /// Sends, reads and writes that have not completed, in the order of posting.
    pending: VecDeque<WorkId>,
    /// RDMA Reads in flight.
    reads: VecDeque<(WorkId, SgList)>,
    /// Packets from the peer.
    inbound: VecDeque<LoopbackPacket>,
    fault: Option<Fault>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoopbackState {
    /// Waits for the peer's connection request, or for its reply.
    Connecting,
    /// The session has to accept or reject the request.
    Requested,
    Connected,
    /// The session asked to disconnect.
    Leaving,
    Over,
}

enum LoopbackTransfer {
    Send { id: WorkId, message: SgList, invalidate: Option<Stag> },
    Read { id: WorkId, local: SgList, remote: Remote },
    Write { id: WorkId, local: SgList, remote: Remote },
    Disconnect,
}

/// A packet from one end to the other.
enum LoopbackPacket {
    Request(Vec<u8>),
    Accept(Vec<u8>),
    Reject(Vec<u8>),
    Send {
        id: WorkId,
        message: SgList,
        invalidate: Option<Stag>,
    },
    Write {
        id: WorkId,
        data: SgList,
        remote: Remote,
    },
    Read(Remote),
    Response(SgList),
    /// A violation by the receiver of this packet, and whether an RDMA Read caused it.
    Terminate(Violation, bool),
    Goodbye,
    Lost,
}

impl LoopbackEnd {
    fn new(endpoint: &Endpoint, reads: u32, seed: Seed, adapter: &Arc<LoopbackAdapter>) -> LoopbackEnd {
        LoopbackEnd {
            state: LoopbackState::Connecting,
            adapter: adapter.clone(),
            domain: adapter.clone(),
            max_sends: endpoint.sends as usize,
            max_reads: reads,
            receives: endpoint.receives,
            receive_len: endpoint.receive_len as usize,
            regions: Regions::new(endpoint.regions, seed),
            events: VecDeque::new(),
            queue: VecDeque::new(),
            pending: VecDeque::new(),
            reads: VecDeque::new(),
            inbound: VecDeque::new(),
            fault: None,
        }
    }

    /// Whether the adapter reaches all of that memory with its local keys.
    fn reaches(&self, local: &SgList) -> bool {
        let mut segs = local.segs().iter();
        segs.all(|seg| seg.local_key(&self.domain).is_ok_and(|key| self.adapter.covers(key, seg)))
    }

    fn room(&self) -> usize {
        match self.state {
            LoopbackState::Connected => self.max_sends.saturating_sub(self.pending.len()),
            _ => 0,
        }
    }

    fn post(&mut self, work: WorkRequest, peer: &mut LoopbackEnd) {
        match work {
            WorkRequest::Receive => self.receives = self.receives.saturating_add(1),
            WorkRequest::Invalidate { stag } => {
                let _ = self.regions.invalidate(stag);
            }
            WorkRequest::Register { id, local, access } => self.register(id, local, access, peer),
            WorkRequest::Accept { private_data } => self.answer(LoopbackPacket::Accept(private_data), peer),
            WorkRequest::Reject { private_data } => self.answer(LoopbackPacket::Reject(private_data), peer),
            WorkRequest::Send { id, head, payload, invalidate, is_solicited: _ } => {
                let mut message = SgList::one(Seg::from_slice(&head));
                payload.segs().iter().for_each(|seg| message.push(seg.clone()));
                let is_possible = self.reaches(&message);
                self.enqueue(id, LoopbackTransfer::Send { id, message, invalidate }, is_possible, peer);
            }
            WorkRequest::Read { id, local, remote } => {
                let is_possible = self.max_reads > 0 && remote.fills(&local) && self.reaches(&local);
                self.enqueue(id, LoopbackTransfer::Read { id, local, remote }, is_possible, peer);
            }
            WorkRequest::Write { id, local, remote } => {
                let is_possible = remote.has_room_for(&local) && self.reaches(&local);
                self.enqueue(id, LoopbackTransfer::Write { id, local, remote }, is_possible, peer);
            }
            WorkRequest::Disconnect if self.state == LoopbackState::Connected => {
                self.state = LoopbackState::Leaving;
                self.queue.push_back(LoopbackTransfer::Disconnect);
            }
            WorkRequest::Disconnect => self.lose(peer),
        }
    }

    fn register(&mut self, id: WorkId, local: SgList, access: RemoteRights, peer: &mut LoopbackEnd) {
        if self.state == LoopbackState::Over {
            return self.events.push_back(Event::Done { id, result: Err(WorkError::Flushed) });
        }
        if !self.reaches(&local) {
            return self.fail(id, peer);
        }
        match self.regions.register(local, access) {
            Ok(remote) => self.events.push_back(Event::Registered { id, remote }),
            Err(_) => self.fail(id, peer),
        }
    }

    /// Accepts or rejects the connection.
    fn answer(&mut self, answer: LoopbackPacket, peer: &mut LoopbackEnd) {
        let (LoopbackPacket::Accept(data) | LoopbackPacket::Reject(data)) = &answer else { return };
        if self.state != LoopbackState::Requested || data.len() > PRIVATE_DATA {
            return self.lose(peer);
        }
        if matches!(answer, LoopbackPacket::Accept(_)) {
            self.state = LoopbackState::Connected;
            self.events.push_back(Event::Connected { private_data: Vec::new() });
        } else {
            self.end(None);
        }
        peer.inbound.push_back(answer);
    }

    fn enqueue(&mut self, id: WorkId, transfer: LoopbackTransfer, is_possible: bool, peer: &mut LoopbackEnd) {
        if matches!(self.state, LoopbackState::Leaving | LoopbackState::Over) {
            return self.events.push_back(Event::Done { id, result: Err(WorkError::Flushed) });
        }
        if !is_possible || self.room() == 0 {
            return self.fail(id, peer);
        }
        self.pending.push_back(id);
        self.queue.push_back(transfer);
    }

    /// Sends the packets of the work that can begin.
    fn begin(&mut self, peer: &mut LoopbackEnd) {
        while let Some(next) = self.queue.front() {
            let has_to_wait = match next {
                LoopbackTransfer::Read { .. } => self.reads.len() >= self.max_reads as usize,
                LoopbackTransfer::Disconnect => !self.pending.is_empty(),
                LoopbackTransfer::Send { .. } | LoopbackTransfer::Write { .. } => false,
            };
            if has_to_wait {
                return;
            }
            let packet = match self.queue.pop_front() {
                Some(LoopbackTransfer::Send { id, message, invalidate }) => {
                    LoopbackPacket::Send { id, message, invalidate }
                }
                Some(LoopbackTransfer::Write { id, local, remote }) => {
                    LoopbackPacket::Write { id, data: local, remote }
                }
                Some(LoopbackTransfer::Read { id, local, remote }) => {
                    self.reads.push_back((id, local));
                    LoopbackPacket::Read(remote)
                }
                Some(LoopbackTransfer::Disconnect) => LoopbackPacket::Goodbye,
                None => return,
            };
            peer.inbound.push_back(packet);
        }
    }

    /// Handles the next packet from the peer; returns whether there was one.
    fn take_next(&mut self, peer: &mut LoopbackEnd) -> bool {
        let Some(packet) = self.inbound.pop_front() else { return false };
        if self.state != LoopbackState::Over {
            self.take(packet, peer);
            self.begin(peer);
            peer.begin(self);
        }
        true
    }

    fn take(&mut self, packet: LoopbackPacket, peer: &mut LoopbackEnd) {
        match packet {
            LoopbackPacket::Request(private_data) => {
                self.state = LoopbackState::Requested;
                self.events.push_back(Event::Requested { private_data, reads: self.max_reads });
            }
            LoopbackPacket::Accept(private_data) => {
                self.state = LoopbackState::Connected;
                self.events.push_back(Event::Connected { private_data });
            }
            LoopbackPacket::Reject(private_data) => self.end(Some(Event::Refused { private_data })),
            LoopbackPacket::Send { id, message, invalidate } => match self.receive(&message, invalidate) {
                Ok(()) => peer.complete(id),
                Err(violation) => self.terminate(violation, false, peer),
            },
            LoopbackPacket::Write { id, data, remote } => {
                // The sender has checked that the length fits 32 bits.
                let len = data.len() as u32;
                match self.regions.place(remote.stag, remote.address, len) {
                    Ok(memory) => {
                        data.copy_to_list(&memory);
                        peer.complete(id);
                    }
                    Err(refusal) => self.terminate(refusal.into(), false, peer),
                }
            }
            LoopbackPacket::Read(Remote { stag, address, len }) => {
                match self.regions.look_up(stag, address, len) {
                    Ok(memory) => peer.inbound.push_back(LoopbackPacket::Response(memory)),
                    Err(refusal) => self.terminate(refusal.into(), true, peer),
                }
            }
            LoopbackPacket::Response(memory) => {
                if let Some((id, local)) = self.reads.pop_front() {
                    memory.copy_to_list(&local);
                    self.complete(id);
                }
            }
            LoopbackPacket::Terminate(violation, is_of_read) => {
                self.fault = Some(Fault::Ours(violation));
                if is_of_read && let Some((id, _)) = self.reads.pop_front() {
                    self.complete_with(id, Err(WorkError::RemoteAccess));
                }
                self.end(None);
            }
            LoopbackPacket::Goodbye => {
                if self.state != LoopbackState::Leaving || !self.queue.is_empty() {
                    peer.inbound.push_back(LoopbackPacket::Goodbye);
                }
                self.end(None);
            }
            LoopbackPacket::Lost => self.end(None),
        }
    }

    /// Receives a message into a receive buffer.
    fn receive(&mut self, message: &SgList, invalidate: Option<Stag>) -> Result<(), Violation> {
        self.receives = self.receives.checked_sub(1).ok_or(Violation::NoReceive)?;
        if message.len() > self.receive_len {
            return Err(Violation::TooLong);
        }
        if let Some(stag) = invalidate {
            self.regions.invalidate(stag)?;
        }
        let message = Seg::from_slice(&message.to_vec());
        self.events.push_back(Event::Received { message, invalidated: invalidate, written: None });
        Ok(())
    }

    fn complete(&mut self, id: WorkId) {
        self.complete_with(id, Ok(()));
    }

    /// Completes a work request, unless it has already completed.
    fn complete_with(&mut self, id: WorkId, result: Result<(), WorkError>) {
        if let Some(at) = self.pending.iter().position(|pending| *pending == id) {
            self.pending.remove(at);
            self.events.push_back(Event::Done { id, result });
        }
    }

    /// Ends the connection because the peer violated the protocol, and reports the violation to it.
    fn terminate(&mut self, violation: Violation, is_of_read: bool, peer: &mut LoopbackEnd) {
        self.fault = Some(Fault::Peer(violation));
        peer.inbound.push_back(LoopbackPacket::Terminate(violation, is_of_read));
        self.end(None);
    }

    /// Fails work that is not possible, and ends the connection.
    fn fail(&mut self, id: WorkId, peer: &mut LoopbackEnd) {
        self.events.push_back(Event::Done { id, result: Err(WorkError::Local) });
        self.lose(peer);
    }

    /// Loses the connection without telling the peer why.
    fn lose(&mut self, peer: &mut LoopbackEnd) {
        if self.state != LoopbackState::Over {
            peer.inbound.push_back(LoopbackPacket::Lost);
            self.end(None);
        }
    }

    /// Flushes all work and reports the end of the connection: `last` if given, or
    /// [`Event::Disconnected`].
    fn end(&mut self, last: Option<Event>) {
        if std::mem::replace(&mut self.state, LoopbackState::Over) == LoopbackState::Over {
            return;
        }
        self.regions.close_all();
        self.queue.clear();
        self.reads.clear();
        let flushed = self.pending.drain(..).map(|id| Event::Done { id, result: Err(WorkError::Flushed) });
        self.events.extend(flushed);
        self.events.push_back(last.unwrap_or(Event::Disconnected));
    }
}

/// Longest private data in bytes, as in an MPA frame.
const PRIVATE_DATA: usize = 512;
