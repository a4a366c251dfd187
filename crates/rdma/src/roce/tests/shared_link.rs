//! Connections that share a link, which has a queue and marks packets of a long one.

use super::PairSettings;
use crate::queue_pair::Provider;
use crate::roce::Roce;
use crate::roce::guid::guid;
use blockmux_proto::driver::session::Timed;
use blockmux_proto::rdma::{Endpoint, Event, QueuePair, Remote, RemoteRights, WorkId, WorkRequest};
use blockmux_volume::random::SplitMix;
use blockmux_volume::{Chunk, Memory, SgList};
use blockmux_wire::roce::bth::Bth;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// The link from side 0 of every connection to its side 1. The way back has neither a queue nor
/// losses.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkSettings {
    /// In bytes per second.
    pub(super) rate: f64,
    /// Delay of each direction.
    pub(super) delay: Duration,
    /// Bytes in the queue above which packets are marked.
    pub(super) marks_above: f64,
    /// Bytes in the queue above which packets are dropped.
    pub(super) drops_above: f64,
    /// Lost packets in 10,000.
    pub(super) lost_per_myriad: u64,
}

/// How the data gets from side 0 to side 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// Side 0 writes.
    Writes,
    /// Side 1 reads.
    Reads,
}

pub(super) struct SharedLink {
    pub(super) connections: Vec<LinkConnection>,
    pub(super) settings: LinkSettings,
    pub(super) now: Instant,
    /// When the link will have sent all of its queue.
    free_at: Instant,
    /// By the time of arrival and a number.
    in_transit: BTreeMap<(Instant, u64), PacketInTransit>,
    random: SplitMix,
    pub(super) observed: ObservedLink,
}

struct PacketInTransit {
    connection: usize,
    receiver: usize,
    packet: Vec<u8>,
    is_marked: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ObservedLink {
    pub(super) packets: u64,
    pub(super) marked: u64,
    pub(super) dropped: u64,
    /// Most bytes in the queue.
    pub(super) longest_queue: f64,
}

pub(super) struct LinkConnection {
    pub(super) ends: [Roce; 2],
    direction: Direction,
    remote: Remote,
    local: SgList,
    /// Bytes of completed work.
    pub(super) completed: u64,
    pub(super) is_over: bool,
}

impl LinkConnection {
    fn post(&mut self) {
        let (id, local, remote) = (WorkId(1), self.local.clone(), self.remote);
        match self.direction {
            Direction::Writes => self.ends[0].post(WorkRequest::Write { id, local, remote }),
            Direction::Reads => self.ends[1].post(WorkRequest::Read { id, local, remote }),
        }
    }
}

impl SharedLink {
    pub(super) fn new(settings: LinkSettings) -> SharedLink {
        let now = Instant::now();
        SharedLink {
            connections: Vec::new(),
            settings,
            now,
            free_at: now,
            in_transit: BTreeMap::new(),
            random: SplitMix::new(1),
            observed: ObservedLink::default(),
        }
    }

    /// Connects two ends, which begin to transfer data: `DEPTH` transfers at any time.
    pub(super) fn connect(&mut self, mtu: u16, window: u32, direction: Direction) {
        let endpoint = Endpoint {
            receives: 4,
            receive_len: 100,
            sends: DEPTH,
            reads: DEPTH,
            regions: 4,
            private_data: Vec::new(),
            without_invalidation: None,
        };
        let guids = [guid(1), guid(2)];
        let settings = PairSettings { mtu, window, keep_alive: None, guids };
        let mut ends = settings.ends([&endpoint, &endpoint], 7, self.now);
        let list = || SgList::one(Memory::from_heap(TRANSFER).seg(0, TRANSFER));
        let (side, access) = match direction {
            Direction::Writes => (1, RemoteRights::RemoteWrite),
            Direction::Reads => (0, RemoteRights::RemoteRead),
        };
        let remote = ends[side].register(WorkId(9), &mut list(), access).unwrap();
        let local = list();
        self.connections.push(LinkConnection {
            ends,
            direction,
            remote,
            local,
            completed: 0,
            is_over: false,
        });
    }

    /// Runs for a while; returns the bytes that each connection has transferred.
    pub(super) fn run(&mut self, time: Duration) -> Vec<u64> {
        let end = self.now + time;
        self.connections.iter_mut().for_each(|connection| connection.completed = 0);
        self.observed = ObservedLink::default();
        while self.now < end {
            self.turn(end);
        }
        self.connections.iter().map(|connection| connection.completed).collect()
    }

    /// Has all ends send, then delivers one packet or lets time pass until a timer.
    fn turn(&mut self, end: Instant) {
        for at in 0..self.connections.len() {
            self.poll_events(at);
            for side in 0..2 {
                self.send(at, side);
            }
        }
        let arrival = self.in_transit.first_key_value().map(|((arrival, _), _)| *arrival);
        let ends = self.connections.iter().flat_map(|connection| &connection.ends);
        let timeout = ends.filter_map(Roce::poll_timeout).min();
        let next = arrival.into_iter().chain(timeout).min().unwrap_or(end).min(end);
        self.now = self.now.max(next);
        if next == end {
            return;
        }
        if arrival == Some(next) {
            let Some((_, transit)) = self.in_transit.pop_first() else { return };
            let datagram = Chunk::from_slice(&transit.packet);
            let end = &mut self.connections[transit.connection].ends[transit.receiver];
            // The end of a connection is an event, too.
            end.on_packet(&datagram, transit.is_marked, self.now).ok();
        } else {
            for connection in &mut self.connections {
                for end in &mut connection.ends {
                    connection.is_over |= end.on_timeout(self.now).is_err();
                }
            }
        }
    }

    fn poll_events(&mut self, at: usize) {
        let connection = &mut self.connections[at];
        for side in 0..2 {
            while let Some(event) = connection.ends[side].poll() {
                match event {
                    Event::Requested { .. } => connection.ends[1].accept(Vec::new()),
                    Event::Connected { .. } => {
                        let is_first = (side == 0) == (connection.direction == Direction::Writes);
                        (0..if is_first { DEPTH } else { 0 }).for_each(|_| connection.post());
                    }
                    Event::Done { result: Ok(()), .. } => {
                        connection.completed += TRANSFER as u64;
                        connection.post();
                    }
                    _ => connection.is_over = true,
                }
            }
        }
    }

    fn send(&mut self, at: usize, side: usize) {
        let mut packet = Vec::new();
        while self.connections[at].ends[side].poll_transmit(self.now, &mut packet) {
            packet.extend([0; 4]);
            let packet = std::mem::take(&mut packet);
            let settings = self.settings;
            let mut is_marked = false;
            let mut sent_at = self.now;
            if side == 0 {
                let queue = self.free_at.saturating_duration_since(self.now).as_secs_f64() * settings.rate;
                self.observed.longest_queue = self.observed.longest_queue.max(queue);
                is_marked = queue > settings.marks_above;
                self.observed.packets += 1;
                self.observed.marked += u64::from(is_marked);
                let is_lost = self.random.below(10_000) < settings.lost_per_myriad;
                if queue > settings.drops_above || is_lost {
                    self.observed.dropped += 1;
                    continue;
                }
                let time = (packet.len() + LOWER_HEADERS) as f64 / settings.rate;
                self.free_at = self.free_at.max(self.now) + Duration::from_secs_f64(time);
                sent_at = self.free_at;
            }
            let key = (sent_at + settings.delay, self.random.next());
            let transit = PacketInTransit { connection: at, receiver: 1 - side, packet, is_marked };
            self.in_transit.insert(key, transit);
        }
    }

    /// Delivers a notification that nobody sent to side 0 of a connection.
    pub(super) fn forge_notification(&mut self, at: usize) {
        let mut packet = Bth::notification(0).as_bytes().to_vec();
        packet.resize(32, 0);
        let end = &mut self.connections[at].ends[0];
        end.on_packet(&Chunk::from_slice(&packet), false, self.now).unwrap();
    }
}

pub(super) const TRANSFER: usize = 64 << 10;
const DEPTH: u32 = 8;
/// Headers of Ethernet, IPv4 and UDP, and what Ethernet has around a frame.
const LOWER_HEADERS: usize = 24 + 14 + 20 + 8;
