//! A provider in memory: both ends of a connection in one thread, for tests.
//!
//! It does all that [`Provider`] says and nothing else, so that whatever runs on it runs on any
//! provider that does as much. What the ends post is carried out piece by piece as they are polled,
//! first what the polled end has to take; the other end's part is done without its session, as by
//! hardware. A connection can be made to break after any number of pieces.
//!
//! Each end has an [`Adapter`], which reaches only memory that is registered with it.

use crate::queue_pair::{Caps, Fault, Provider, Violation};
use crate::regions::{Regions, Seed};
use blockmux_proto::rdma::{
    Endpoint, Event, QueuePair, Remote, RemoteRights, Stag, WorkError, WorkId, WorkRequest,
};
use blockmux_proto::session::Timed;
use blockmux_volume::{LocalKey, ProtectionDomain, RegistrationError, Seg, SgList};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One end of a connection in memory. Dropping it is to lose the connection.
pub struct Loopback {
    own: Rc<RefCell<End>>,
    peer: Rc<RefCell<End>>,
    cut: Rc<Cell<Option<u64>>>,
}

/// The two ends of a connection: the one that connects, and the one that is connected to. `seed` is
/// for the names of both ends' memory.
#[must_use]
pub fn pair(active: &Endpoint, passive: &Endpoint, seed: Seed) -> (Loopback, Loopback) {
    pair_on(active, passive, seed, &[Adapter::with_room(usize::MAX), Adapter::with_room(usize::MAX)])
}

/// The two ends of a connection over the adapters of the active and of the passive end.
#[must_use]
pub fn pair_on(
    active: &Endpoint,
    passive: &Endpoint,
    seed: Seed,
    adapters: &[Arc<Adapter>; 2],
) -> (Loopback, Loopback) {
    let reads = active.reads.min(passive.reads);
    let own = Rc::new(RefCell::new(End::new(active, reads, seed, &adapters[0])));
    let peer = Rc::new(RefCell::new(End::new(passive, reads, seed.map(|byte| !byte), &adapters[1])));
    peer.borrow_mut().inbound.push_back(Packet::Request(active.private_data.clone()));
    let cut = Rc::new(Cell::new(None));
    let passive = Loopback { own: peer.clone(), peer: own.clone(), cut: cut.clone() };
    (Loopback { own, peer, cut }, passive)
}

impl Loopback {
    /// Loses the connection once so many more pieces have gone either way, requests to connect and
    /// answers included.
    pub fn cut_after(&self, pieces: u64) {
        self.cut.set(Some(pieces));
    }

    /// Carries out one piece; whether there was one.
    fn turn(&mut self) -> bool {
        let (mut own, mut peer) = (self.own.borrow_mut(), self.peer.borrow_mut());
        if self.cut.get() == Some(0) {
            self.cut.set(None);
            own.end(None);
            peer.end(None);
            return true;
        }
        let has_moved = own.take_next(&mut peer) || peer.take_next(&mut own);
        if has_moved {
            self.cut.set(self.cut.get().map(|left| left.saturating_sub(1)));
        }
        has_moved
    }
}

impl Timed for Loopback {}

/// Everything is work here, which tests look at.
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
        self.peer.borrow_mut().inbound.push_back(Packet::Lost);
    }
}

/// The blocks of memory that an end reads and writes: work on any other fails.
pub struct Adapter {
    /// How many blocks it can know at a time.
    room: usize,
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    last_key: u32,
    /// Address and length in bytes.
    known: BTreeMap<LocalKey, (usize, usize)>,
}

impl Adapter {
    /// An adapter that can know so many blocks at a time.
    #[must_use]
    pub fn with_room(room: usize) -> Arc<Adapter> {
        Arc::new(Adapter { room, blocks: Mutex::default() })
    }

    /// How many blocks are registered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks().known.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether that is a key of a block in which all of `seg` lies.
    fn covers(&self, key: LocalKey, seg: &Seg) -> bool {
        let at = seg.as_ptr().addr();
        let end = |start: usize, len| start.saturating_add(len);
        let known = self.blocks().known.get(&key).copied();
        known.is_some_and(|(start, len)| start <= at && end(at, seg.len()) <= end(start, len))
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProtectionDomain for Adapter {
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

struct End {
    state: State,
    adapter: Arc<Adapter>,
    /// The adapter, as memory knows it.
    domain: Arc<dyn ProtectionDomain>,
    max_sends: usize,
    max_reads: u32,
    /// Receive buffers that are posted, and how long each is.
    receives: u32,
    receive_len: usize,
    regions: Regions,
    events: VecDeque<Event>,
    /// Posted, and not begun.
    queue: VecDeque<Transfer>,
    /// Sends, reads and writes that have not come back, in the order in which they were posted.
    pending: VecDeque<WorkId>,
    /// Reads on their way.
    reads: VecDeque<(WorkId, SgList)>,
    /// What the peer has sent.
    inbound: VecDeque<Packet>,
    fault: Option<Fault>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waits for the peer's request, or for its answer.
    Connecting,
    /// Waits for our answer.
    Requested,
    Connected,
    /// We have said that we leave.
    Leaving,
    Over,
}

enum Transfer {
    Send { id: WorkId, message: SgList, invalidate: Option<Stag> },
    Read { id: WorkId, local: SgList, remote: Remote },
    Write { id: WorkId, local: SgList, remote: Remote },
    Disconnect,
}

/// What one end has for the other.
enum Packet {
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
    /// We did wrong, and whether by a read.
    Terminate(Violation, bool),
    Goodbye,
    Lost,
}

impl End {
    fn new(endpoint: &Endpoint, reads: u32, seed: Seed, adapter: &Arc<Adapter>) -> End {
        End {
            state: State::Connecting,
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

    /// Whether the adapter reaches all of that memory by its local keys.
    fn reaches(&self, local: &SgList) -> bool {
        let mut segs = local.segs().iter();
        segs.all(|seg| seg.local_key(&self.domain).is_ok_and(|key| self.adapter.covers(key, seg)))
    }

    fn room(&self) -> usize {
        match self.state {
            State::Connected => self.max_sends.saturating_sub(self.pending.len()),
            _ => 0,
        }
    }

    fn post(&mut self, work: WorkRequest, peer: &mut End) {
        match work {
            WorkRequest::Receive => self.receives = self.receives.saturating_add(1),
            WorkRequest::Invalidate { stag } => {
                self.regions.close(stag);
            }
            WorkRequest::Register { id, local, access } => self.register(id, local, access, peer),
            WorkRequest::Accept { private_data } => self.answer(Packet::Accept(private_data), peer),
            WorkRequest::Reject { private_data } => self.answer(Packet::Reject(private_data), peer),
            WorkRequest::Send { id, head, payload, invalidate, is_solicited: _ } => {
                let mut message = SgList::one(Seg::from_slice(&head));
                payload.segs().iter().for_each(|seg| message.push(seg.clone()));
                let is_possible = self.reaches(&message);
                self.enqueue(id, Transfer::Send { id, message, invalidate }, is_possible, peer);
            }
            WorkRequest::Read { id, local, remote } => {
                let is_possible = self.max_reads > 0
                    && local.len() == remote.len as usize
                    && local.segs().iter().all(Seg::is_writable)
                    && self.reaches(&local);
                self.enqueue(id, Transfer::Read { id, local, remote }, is_possible, peer);
            }
            WorkRequest::Write { id, local, remote } => {
                let is_possible = local.len() <= remote.len as usize && self.reaches(&local);
                self.enqueue(id, Transfer::Write { id, local, remote }, is_possible, peer);
            }
            WorkRequest::Disconnect if self.state == State::Connected => {
                self.state = State::Leaving;
                self.queue.push_back(Transfer::Disconnect);
            }
            WorkRequest::Disconnect => self.lose(peer),
        }
    }

    fn register(&mut self, id: WorkId, local: SgList, access: RemoteRights, peer: &mut End) {
        if self.state == State::Over {
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

    /// Takes the connection, or does not.
    fn answer(&mut self, answer: Packet, peer: &mut End) {
        let (Packet::Accept(data) | Packet::Reject(data)) = &answer else { return };
        if self.state != State::Requested || data.len() > PRIVATE_DATA {
            return self.lose(peer);
        }
        if matches!(answer, Packet::Accept(_)) {
            self.state = State::Connected;
            self.events.push_back(Event::Connected { private_data: Vec::new() });
        } else {
            self.end(None);
        }
        peer.inbound.push_back(answer);
    }

    fn enqueue(&mut self, id: WorkId, transfer: Transfer, is_possible: bool, peer: &mut End) {
        if matches!(self.state, State::Leaving | State::Over) {
            return self.events.push_back(Event::Done { id, result: Err(WorkError::Flushed) });
        }
        if !is_possible || self.room() == 0 {
            return self.fail(id, peer);
        }
        self.pending.push_back(id);
        self.queue.push_back(transfer);
    }

    /// Begins what can be begun.
    fn begin(&mut self, peer: &mut End) {
        while let Some(next) = self.queue.front() {
            let has_to_wait = match next {
                Transfer::Read { .. } => self.reads.len() >= self.max_reads as usize,
                Transfer::Disconnect => !self.pending.is_empty(),
                Transfer::Send { .. } | Transfer::Write { .. } => false,
            };
            if has_to_wait {
                return;
            }
            let packet = match self.queue.pop_front() {
                Some(Transfer::Send { id, message, invalidate }) => Packet::Send { id, message, invalidate },
                Some(Transfer::Write { id, local, remote }) => Packet::Write { id, data: local, remote },
                Some(Transfer::Read { id, local, remote }) => {
                    self.reads.push_back((id, local));
                    Packet::Read(remote)
                }
                Some(Transfer::Disconnect) => Packet::Goodbye,
                None => return,
            };
            peer.inbound.push_back(packet);
        }
    }

    /// Takes what the peer has sent next; whether there was something.
    fn take_next(&mut self, peer: &mut End) -> bool {
        let Some(packet) = self.inbound.pop_front() else { return false };
        if self.state != State::Over {
            self.take(packet, peer);
            self.begin(peer);
            peer.begin(self);
        }
        true
    }

    fn take(&mut self, packet: Packet, peer: &mut End) {
        match packet {
            Packet::Request(private_data) => {
                self.state = State::Requested;
                self.events.push_back(Event::Requested { private_data });
            }
            Packet::Accept(private_data) => {
                self.state = State::Connected;
                self.events.push_back(Event::Connected { private_data });
            }
            Packet::Reject(private_data) => self.end(Some(Event::Refused { private_data })),
            Packet::Send { id, message, invalidate } => match self.receive(&message, invalidate) {
                Ok(()) => peer.complete(id),
                Err(violation) => self.terminate(violation, false, peer),
            },
            Packet::Write { id, data, remote } => {
                // No longer than a length of 32 bits, as the sender has checked.
                let len = data.len() as u32;
                match self.regions.look_up(remote.stag, remote.address, len, RemoteRights::RemoteWrite) {
                    Ok(memory) => {
                        data.copy_to_list(&memory);
                        peer.complete(id);
                    }
                    Err(refusal) => self.terminate(refusal.into(), false, peer),
                }
            }
            Packet::Read(Remote { stag, address, len }) => {
                match self.regions.look_up(stag, address, len, RemoteRights::RemoteRead) {
                    Ok(memory) => peer.inbound.push_back(Packet::Response(memory)),
                    Err(refusal) => self.terminate(refusal.into(), true, peer),
                }
            }
            Packet::Response(memory) => {
                if let Some((id, local)) = self.reads.pop_front() {
                    memory.copy_to_list(&local);
                    self.complete(id);
                }
            }
            Packet::Terminate(violation, is_of_read) => {
                self.fault = Some(Fault::Ours(violation));
                if is_of_read && let Some((id, _)) = self.reads.pop_front() {
                    self.come_back(id, Err(WorkError::RemoteAccess));
                }
                self.end(None);
            }
            Packet::Goodbye => {
                if self.state != State::Leaving || !self.queue.is_empty() {
                    peer.inbound.push_back(Packet::Goodbye);
                }
                self.end(None);
            }
            Packet::Lost => self.end(None),
        }
    }

    /// Puts a message into a receive buffer.
    fn receive(&mut self, message: &SgList, invalidate: Option<Stag>) -> Result<(), Violation> {
        self.receives = self.receives.checked_sub(1).ok_or(Violation::NoReceive)?;
        if message.len() > self.receive_len {
            return Err(Violation::TooLong);
        }
        if let Some(stag) = invalidate {
            self.regions.invalidate(stag)?;
        }
        let message = Seg::from_slice(&message.to_vec());
        self.events.push_back(Event::Received { message, invalidated: invalidate });
        Ok(())
    }

    fn complete(&mut self, id: WorkId) {
        self.come_back(id, Ok(()));
    }

    /// Tells how work went, unless it has come back already.
    fn come_back(&mut self, id: WorkId, result: Result<(), WorkError>) {
        if let Some(at) = self.pending.iter().position(|pending| *pending == id) {
            self.pending.remove(at);
            self.events.push_back(Event::Done { id, result });
        }
    }

    /// Breaks with a peer that did wrong, and tells it.
    fn terminate(&mut self, violation: Violation, is_of_read: bool, peer: &mut End) {
        self.fault = Some(Fault::Peer(violation));
        peer.inbound.push_back(Packet::Terminate(violation, is_of_read));
        self.end(None);
    }

    /// Fails work that cannot be done.
    fn fail(&mut self, id: WorkId, peer: &mut End) {
        self.events.push_back(Event::Done { id, result: Err(WorkError::Local) });
        self.lose(peer);
    }

    /// Breaks off without a word.
    fn lose(&mut self, peer: &mut End) {
        if self.state != State::Over {
            peer.inbound.push_back(Packet::Lost);
            self.end(None);
        }
    }

    /// Flushes everything, and tells that the connection is over, in the words of `last` if there
    /// are some.
    fn end(&mut self, last: Option<Event>) {
        if std::mem::replace(&mut self.state, State::Over) == State::Over {
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

/// As much as an MPA frame carries.
const PRIVATE_DATA: usize = 512;
