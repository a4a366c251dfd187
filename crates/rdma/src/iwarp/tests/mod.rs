//! Two ends of a connection, or one end and a scripted peer, with a driver like the engine's
//! between them.
#![allow(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::unwrap_used, reason = "tests")]

mod captures;
mod connecting;
mod hostile;
mod immediate;
mod provider_conformance;
mod splits;

use super::{Iwarp, IwarpConfig};
use crate::queue_pair::Provider;
use blockmux_proto::driver::session::{Demand, MAX_DEMAND, ProtocolError, StreamSession};
use blockmux_proto::rdma::{Endpoint, Event, QueuePair, WorkRequest};
use blockmux_volume::{Chunk, Crc32c, Memory, Pool, SgList};
use std::time::Instant;

/// An end and its driver, which asserts that every demand can be met and that meeting it makes
/// progress.
pub(super) struct TestDriver {
    pub(super) iwarp: Iwarp,
    /// Most bytes received at a time.
    step: usize,
    /// Bytes sent by the peer, and how many of them were received.
    inbound: Vec<u8>,
    received: usize,
    chunk: Chunk,
    placing: Option<SgList>,
    placed: usize,
    /// Number of times that payload was placed.
    pub(super) places: usize,
    pub(super) peer_has_closed: bool,
    is_closed: bool,
    pub(super) error: Option<ProtocolError>,
}

impl TestDriver {
    pub(super) fn new(iwarp: Iwarp, step: usize) -> TestDriver {
        let chunk = Chunk::new(Memory::from_heap(BUFFER));
        TestDriver {
            iwarp,
            step,
            inbound: Vec::new(),
            received: 0,
            chunk,
            placing: None,
            placed: 0,
            places: 0,
            peer_has_closed: false,
            is_closed: false,
            error: None,
        }
    }

    /// Adds bytes sent by the peer.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.inbound.drain(..std::mem::take(&mut self.received));
        self.inbound.extend(bytes);
    }

    /// Receives once and passes the bytes on; returns whether there was progress.
    pub(super) fn receive(&mut self) -> bool {
        if self.is_closed {
            return false;
        }
        match self.receive_once() {
            Ok(has_moved) => has_moved,
            Err(error) => {
                self.error = Some(error);
                true
            }
        }
    }

    fn receive_once(&mut self) -> Result<bool, ProtocolError> {
        let left = self.inbound.len() - self.received;
        match self.iwarp.demand() {
            Demand::Bytes(least) => {
                assert!(0 < least && least <= MAX_DEMAND, "demands {least}");
                self.placing = None;
                let mut came = 0;
                if self.chunk.unread().len() < least {
                    self.make_room(least);
                    came = left.min(self.step).min(self.chunk.room());
                    self.chunk.extend(&self.inbound[self.received..self.received + came]);
                    self.received += came;
                    if self.chunk.unread().len() < least {
                        return if came == 0 { self.receive_end() } else { Ok(true) };
                    }
                }
                let taken = self.iwarp.on_bytes(&self.chunk, Instant::now())?;
                self.chunk.take(taken);
                let demands_the_same =
                    matches!(self.iwarp.demand(), Demand::Bytes(least) if least <= self.chunk.unread().len());
                assert!(taken > 0 || !demands_the_same, "a satisfied demand consumes bytes");
                Ok(taken + came > 0 || !demands_the_same)
            }
            Demand::Place(list) => {
                if self.placing.is_none() {
                    let here = self.chunk.unread().len().min(list.len());
                    list.slice(0, here).copy_from(&self.chunk.unread()[..here]);
                    self.chunk.take(here);
                    self.placed = here;
                    self.places += 1;
                }
                let came = left.min(self.step).min(list.len() - self.placed);
                list.slice(self.placed, came).copy_from(&self.inbound[self.received..self.received + came]);
                self.received += came;
                self.placed += came;
                if self.placed == list.len() {
                    self.placing = None;
                    self.iwarp.on_placed(Instant::now())?;
                    return Ok(true);
                }
                self.placing = Some(list);
                if came == 0 { self.receive_end() } else { Ok(true) }
            }
            Demand::Nothing => Ok(false),
            Demand::StartTls => panic!("iWARP never starts TLS"),
            Demand::Close => {
                self.is_closed = true;
                Ok(true)
            }
        }
    }

    fn receive_end(&mut self) -> Result<bool, ProtocolError> {
        if !self.peer_has_closed {
            return Ok(false);
        }
        self.is_closed = true;
        self.iwarp.on_end(Instant::now()).map(|()| true)
    }

    fn make_room(&mut self, least: usize) {
        self.chunk.recycle();
        if self.chunk.unread().len() + self.chunk.room() < least || self.chunk.room() == 0 {
            let mut fresh = Chunk::new(Memory::from_heap(BUFFER));
            fresh.extend(self.chunk.unread());
            self.chunk = fresh;
        }
    }

    /// Takes up to `most` bytes of the outbox.
    pub(super) fn sent(&mut self, most: usize) -> Vec<u8> {
        use blockmux_proto::driver::outbox::OutboxPiece;
        let outbox = self.iwarp.outbox();
        let mut bytes = Vec::new();
        for piece in outbox.pieces() {
            let left = most - bytes.len();
            match piece {
                _ if left == 0 => break,
                OutboxPiece::Head(head) => bytes.extend(&head[..head.len().min(left)]),
                OutboxPiece::Payload(seg) => bytes.extend(seg.slice(0, seg.len().min(left)).to_vec()),
            }
        }
        outbox.consume(bytes.len());
        if self.error.is_some() && outbox.is_empty() && !self.is_closed {
            self.is_closed = true;
            let _ = self.iwarp.on_end(Instant::now());
        }
        bytes
    }

    /// Whether this side has closed the stream and sent everything.
    pub(super) fn has_left(&mut self) -> bool {
        let is_over = self.is_closed || matches!(self.iwarp.demand(), Demand::Close);
        is_over && self.iwarp.outbox().is_empty()
    }

    /// Ends the stream without the bytes that were not received.
    pub(super) fn lose(&mut self) {
        self.inbound.truncate(self.received);
        self.is_closed = true;
        let _ = self.iwarp.on_end(Instant::now());
        self.iwarp.outbox().clear();
    }

    pub(super) fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.iwarp.poll()).collect()
    }

    pub(super) fn post(&mut self, work: WorkRequest) {
        self.iwarp.post(work);
    }
}

/// Both ends, and a stream between them.
pub(super) struct StreamPair {
    pub(super) ends: [TestDriver; 2],
    /// Number of bytes transported in each direction.
    pub(super) crossed: [usize; 2],
    /// Records all transported bytes.
    pub(super) log: Option<Vec<(usize, Vec<u8>)>>,
    step: usize,
}

impl StreamPair {
    /// Creates both ends; `configs` are those of the active and the passive side, and `step` bounds
    /// the bytes transported at a time.
    pub(super) fn new(endpoints: [&Endpoint; 2], configs: [&IwarpConfig; 2], step: usize) -> StreamPair {
        let seed = |side: u8| {
            let mut seed = [side; 32];
            seed[..8].copy_from_slice(&next_seed().to_le_bytes());
            seed
        };
        let pool = Pool::new(16 << 20);
        let now = Instant::now();
        let active = Iwarp::active(endpoints[0], configs[0].clone(), pool.clone(), seed(0), now);
        let passive = Iwarp::passive(endpoints[1], configs[1].clone(), pool, seed(1), now);
        let ends = [TestDriver::new(active, step), TestDriver::new(passive, step)];
        StreamPair { ends, crossed: [0; 2], log: None, step }
    }

    /// Transports up to `step` bytes in each direction; returns whether there was progress.
    pub(super) fn turn(&mut self) -> bool {
        let mut has_moved = false;
        for from in 0..2 {
            let bytes = self.ends[from].sent(self.step);
            let has_left = self.ends[from].has_left();
            self.crossed[from] += bytes.len();
            let to = &mut self.ends[1 - from];
            to.push(&bytes);
            has_moved |= !bytes.is_empty() || (has_left && !to.peer_has_closed);
            to.peer_has_closed |= has_left;
            has_moved |= to.receive();
            if let Some(log) = &mut self.log
                && !bytes.is_empty()
            {
                log.push((from, bytes));
            }
        }
        has_moved
    }

    /// Runs turns until there is no progress; returns the events of each side.
    pub(super) fn settle(&mut self) -> [Vec<Event>; 2] {
        let mut events_of = [Vec::new(), Vec::new()];
        loop {
            let mut has_moved = self.turn();
            for (end, events_of) in self.ends.iter_mut().zip(&mut events_of) {
                let events = end.events();
                has_moved |= !events.is_empty();
                events_of.extend(events);
            }
            if !has_moved {
                return events_of;
            }
        }
    }

    /// Establishes the connection.
    pub(super) fn connect(&mut self) {
        let events_of = self.settle();
        assert!(matches!(&events_of[1][..], [Event::Requested { .. }]), "{events_of:?}");
        self.ends[1].post(WorkRequest::Accept { private_data: b"welcome".to_vec() });
        let events_of = self.settle();
        for events in events_of {
            assert!(matches!(&events[..], [Event::Connected { .. }]), "{events:?}");
        }
    }
}

/// A different number for each call.
fn next_seed() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// An endpoint with more resources than the tests use.
pub(super) fn ample() -> Endpoint {
    Endpoint {
        receives: 64,
        receive_len: 16 << 10,
        sends: 64,
        reads: 8,
        regions: 16,
        private_data: Vec::new(),
        without_invalidation: None,
    }
}

/// An end that is connected to a scripted peer, with or without CRCs.
pub(super) fn connected(is_active: bool, endpoint: &Endpoint, has_crc: bool) -> TestDriver {
    let pool = Pool::new(16 << 20);
    let config = IwarpConfig { has_crc, is_peer_to_peer: false, ..IwarpConfig::default() };
    let flags = if has_crc { 0x50 } else { 0x10 };
    let mut driver = if is_active {
        TestDriver::new(Iwarp::active(endpoint, config, pool, [7; 32], Instant::now()), usize::MAX)
    } else {
        TestDriver::new(Iwarp::passive(endpoint, config, pool, [7; 32], Instant::now()), usize::MAX)
    };
    let reads = endpoint.reads as u8;
    driver.push(&setup_frame(if is_active { b"p" } else { b"q" }, flags, 2, &[0, reads, 0, reads]));
    while driver.receive() {}
    if !is_active {
        assert!(matches!(&driver.events()[..], [Event::Requested { .. }]));
        driver.post(WorkRequest::Accept { private_data: Vec::new() });
    }
    assert!(matches!(&driver.events()[..], [Event::Connected { .. }]));
    drop(driver.sent(usize::MAX));
    driver
}

/// An MPA request (`q`) or reply (`p`).
pub(super) fn setup_frame(kind: &[u8; 1], flags: u8, rev: u8, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"MPA ID Re".to_vec();
    bytes.extend(kind);
    bytes.extend(b" Frame");
    bytes.extend([flags, rev]);
    bytes.extend((data.len() as u16).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// An FPDU with this segment.
pub(super) fn fpdu(ulpdu: &[u8], has_crc: bool) -> Vec<u8> {
    let mut bytes = (ulpdu.len() as u16).to_be_bytes().to_vec();
    bytes.extend(ulpdu);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let crc = if has_crc { Crc32c::of(&bytes).value() } else { 0 };
    bytes.extend(crc.to_le_bytes());
    bytes
}

/// A tagged segment, with the encoded control fields.
pub(super) fn tagged(control: [u8; 2], stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = control.to_vec();
    bytes.extend(stag.to_be_bytes());
    bytes.extend(to.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// An untagged segment; `place` is queue number, MSN and message offset.
pub(super) fn untagged(control: [u8; 2], invalidate: u32, place: [u32; 3], body: &[u8]) -> Vec<u8> {
    let mut bytes = control.to_vec();
    bytes.extend(invalidate.to_be_bytes());
    place.iter().for_each(|number| bytes.extend(number.to_be_bytes()));
    bytes.extend(body);
    bytes
}

/// The body of a Read Request.
pub(super) fn read_request(sink: (u32, u64), len: u32, source: (u32, u64)) -> Vec<u8> {
    let mut bytes = sink.0.to_be_bytes().to_vec();
    bytes.extend(sink.1.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes.extend(source.0.to_be_bytes());
    bytes.extend(source.1.to_be_bytes());
    bytes
}

/// The segments in the sent bytes.
pub(super) fn ulpdus(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut segments = Vec::new();
    while let [high, low, rest @ ..] = bytes {
        let len = usize::from(u16::from_be_bytes([*high, *low]));
        segments.push(rest[..len].to_vec());
        bytes = &bytes[blockmux_wire::iwarp::mpa::fpdu_len(len as u16)..];
    }
    segments
}

const SEND: [u8; 2] = [0x41, 0x43];
const WRITE: [u8; 2] = [0xc1, 0x40];
const READ: [u8; 2] = [0x41, 0x41];
const RESPONSE: [u8; 2] = [0xc1, 0x42];
const BUFFER: usize = 256 << 10;
