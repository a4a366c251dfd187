//! The UDP port that many connections share: which connection a datagram belongs to, and who may
//! request one.
//!
//! ```text
//!   datagram ──▶ ICRC, addresses ──▶ Routed::Connection   for the queue pair with that number
//!                                ├─▶ Routed::Request      a new connection: admit, then pass it on
//!                                ├─▶ Routed::Answer       to send back: nobody knows that connection
//!                                └─▶ Routed::Dropped
//! ```
//! It has no sockets and no connections: the owner of the socket has them, asks where a datagram
//! belongs, and appends the ICRC of what it sends.
//!
//! # Requests
//! A request costs the memory of a connection before its sender has shown that it receives answers
//! at its address. Such connections are limited, for each address and in all
//! ([`RocePortLimits`]). A request of an address that has as many as it may replaces the oldest of
//! that address, so that somebody who forges requests of a host has to send as many within a round
//! trip to keep it out. If there are too many in all, the oldest of the address with the most of
//! them is replaced, so that a flood displaces itself first. Numbers of queue pairs, communication
//! identifiers and first sequence numbers are unpredictable, so nobody establishes a connection for
//! another address, or reaches one, without seeing its packets.
//!
//! A connection is established, for these limits, by what only the receiver of the reply can send:
//! a packet to its queue pair with the first sequence number that was drawn for it, or a message
//! with its communication identifier, such as an RTU. A repeated request has neither.
//!
//! Each request also costs CPU time, so only so many are looked at
//! ([`RocePortLimits::requests_per_second`]), and others are ignored until their senders repeat
//! them. One whose connection is established does not count, so many honest hosts may connect at
//! once. An address with connections that wait leaves half of the burst to others. Repeated
//! requests and messages about nothing, which are answered, are limited as well
//! ([`ANSWERS_PER_SECOND`]).
//!
//! # Stale connections
//! A request of the queue pair of an established connection says that its peer has lost that one:
//! it was restarted, and draws the same numbers again. The request goes to that connection, which
//! rejects it, and asks its peer by a packet that a live one acknowledges. Linux ends the old
//! connection at once (`cm_match_req`), so a forged request with the right number ends it.
//! Here that takes as long as with any peer that does not answer, and a live peer notices nothing.
//! Connections that are not established yet do not count, or forged ones would keep a host out.

use super::cm::{RoceNumbers, put_message, put_reject};
use super::guid::guid;
use super::identification::FlowIdentification;
use super::token_bucket::TokenBucket;
use crate::regions::Seed;
use crate::unpredictable::UnpredictableNumbers;
use blockmux_wire::roce::bth::{P_KEY_DEFAULT, QP_GSI};
use blockmux_wire::roce::cm::{
    ANSWERS_REP, CmAttribute, CmDrep, CmMessage, CmRej, CmReq, RejectReason, port_of_service_id,
};
use blockmux_wire::roce::eth::Q_KEY_GSI;
use blockmux_wire::roce::icrc::{RoceAddresses, RoceFlow};
use blockmux_wire::roce::packet::RocePacket;
use core::net::IpAddr;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes, U16, U32};

/// Connections of a UDP port.
pub struct RocePort {
    limits: RocePortLimits,
    random: UnpredictableNumbers,
    share: NumberShare,
    guid: u64,
    /// By the number of the queue pair.
    connections: HashMap<u32, PortConnection>,
    /// Number of the queue pair by communication identifier.
    by_comm_id: HashMap<u32, u32>,
    /// Number of the queue pair by the requester's address and its communication identifier.
    by_request: HashMap<(IpAddr, u32), u32>,
    /// Number of the queue pair by the requester's address and its queue pair, if established.
    by_requester: HashMap<(IpAddr, u32), u32>,
    /// Numbers that were used until recently, with the time from which they may be used again.
    retired: VecDeque<(Instant, RoceNumbers)>,
    /// Queue pairs of requested connections that are not established, oldest first.
    waiting: VecDeque<u32>,
    /// How many of them each address has.
    waiting_of: HashMap<IpAddr, usize>,
    request_rate: TokenBucket,
    answer_rate: TokenBucket,
}

/// How many connections a port may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RocePortLimits {
    /// Connections in all.
    pub connections: usize,
    /// Requested connections that are not established.
    pub requests: usize,
    /// Those of one address.
    pub requests_of_address: usize,
    /// Requests that are looked at each second, beside those whose connections are established.
    pub requests_per_second: u32,
    /// As many of them may come at once.
    pub request_burst: u32,
}

impl RocePortLimits {
    /// No connections: the port only tells what a datagram is.
    pub const NONE: RocePortLimits = RocePortLimits {
        connections: 0,
        requests: 0,
        requests_of_address: 0,
        requests_per_second: 0,
        request_burst: 0,
    };
}

/// A part of the numbers of a UDP port that several ports divide among them, each with sockets of
/// its own: those with this remainder modulo `modulus`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumberShare {
    /// The remainder.
    pub remainder: u32,
    /// How many shares there are, at most 256.
    pub modulus: u32,
}

impl NumberShare {
    /// A number of the share that is next to `number`. Beyond the last one it is the first.
    fn nearest(self, number: u32) -> u32 {
        let above = number.checked_rem(self.modulus).unwrap_or_default();
        number.saturating_sub(above).checked_add(self.remainder).unwrap_or(self.remainder)
    }
}

struct PortConnection {
    peer: IpAddr,
    numbers: RoceNumbers,
    /// If the peer has requested the connection.
    request: Option<RoceRequest>,
    /// Whether it is in [`RocePort::waiting`].
    is_waiting: bool,
    identification: FlowIdentification,
}

/// Where a datagram belongs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Routed {
    /// To the connection with this number of a queue pair.
    Connection(u32),
    /// It requests a new connection.
    Request(RoceRequest),
    /// This packet is to be sent back, with its ICRC.
    Answer(Vec<u8>),
    /// Nowhere.
    Dropped(DroppedPacket),
}

/// A request for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RoceRequest {
    /// Address of the requester.
    pub peer: IpAddr,
    /// The TCP port that it asks for, if it uses the IP service.
    pub service: Option<u16>,
    /// Its communication identifier.
    pub comm_id: u32,
    /// Its queue pair.
    pub queue_pair: u32,
}

impl RoceRequest {
    fn new(peer: IpAddr, req: &CmReq) -> RoceRequest {
        RoceRequest {
            peer,
            service: port_of_service_id(req.service_id.get()),
            comm_id: req.local_comm_id.get(),
            queue_pair: req.local_qpn.get(),
        }
    }
}

/// Why a datagram was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DroppedPacket {
    /// It is no packet, or one of another partition.
    Malformed,
    /// It was damaged on the way.
    Damaged,
    /// There is no such queue pair or connection, or it is that of another address.
    Unknown,
    /// It asks for an answer, as too many others do.
    TooMany,
}

/// A new connection of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenedConnection {
    /// Numbers of this side.
    pub numbers: RoceNumbers,
    /// The number of the queue pair of a requested connection that has to give way. The owner drops
    /// it; the port has forgotten it.
    pub replaced: Option<u32>,
}

impl RocePort {
    /// A port without connections. `seed` is random and unique.
    #[must_use]
    pub fn new(limits: RocePortLimits, seed: Seed) -> RocePort {
        let mut random = UnpredictableNumbers::new(seed);
        let guid = guid(u64::from(random.next()) << 32 | u64::from(random.next()));
        RocePort {
            limits,
            random,
            share: NumberShare { remainder: 0, modulus: 1 },
            guid,
            connections: HashMap::new(),
            by_comm_id: HashMap::new(),
            by_request: HashMap::new(),
            by_requester: HashMap::new(),
            retired: VecDeque::new(),
            waiting: VecDeque::new(),
            waiting_of: HashMap::new(),
            request_rate: TokenBucket::new(limits.request_burst, limits.requests_per_second),
            answer_rate: TokenBucket::new(ANSWER_BURST, ANSWERS_PER_SECOND),
        }
    }

    /// Draws numbers of queue pairs and communication identifiers only from this share of all.
    #[must_use]
    pub fn drawing(mut self, share: NumberShare) -> RocePort {
        self.share = share;
        self
    }

    /// Number of connections.
    #[must_use]
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether there is no connection.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// Finds where a datagram belongs, from its base transport header to its ICRC, which is
    /// checked.
    pub fn route(&mut self, flow: &RoceFlow, datagram: &[u8], now: Instant) -> Routed {
        let Ok(packet) = RocePacket::parse(datagram) else {
            return Routed::Dropped(DroppedPacket::Malformed);
        };
        // Membership of the default partition may be limited.
        if packet.bth.p_key.get() | MEMBERSHIP != P_KEY_DEFAULT {
            return Routed::Dropped(DroppedPacket::Malformed);
        }
        let Some(identification) = flow.recover(datagram) else {
            return Routed::Dropped(DroppedPacket::Damaged);
        };
        let source = source(flow);
        let queue_pair = packet.bth.dest_qp.get();
        if queue_pair == QP_GSI {
            return self.route_management(source, &packet, now);
        }
        let known = self.connections.get_mut(&queue_pair).filter(|connection| connection.peer == source);
        let Some(connection) = known else { return Routed::Dropped(DroppedPacket::Unknown) };
        if !connection.identification.accepts(identification, now) {
            return Routed::Dropped(DroppedPacket::Damaged);
        }
        match packet.bth.psn.get() == connection.numbers.first_psn {
            true => self.route_established(queue_pair),
            false => Routed::Connection(queue_pair),
        }
    }

    /// A packet for this connection, whose sender has shown that it receives what is sent to its
    /// address.
    fn route_established(&mut self, queue_pair: u32) -> Routed {
        if let Some(request) = self.end_wait(queue_pair) {
            self.by_requester.insert((request.peer, request.queue_pair), queue_pair);
            self.request_rate.put_back();
        }
        Routed::Connection(queue_pair)
    }

    /// Removes a connection from those that are not established. Returns its request if it was one
    /// of them.
    fn end_wait(&mut self, queue_pair: u32) -> Option<RoceRequest> {
        let connection = self.connections.get_mut(&queue_pair)?;
        if !std::mem::take(&mut connection.is_waiting) {
            return None;
        }
        let request = connection.request?;
        self.waiting.retain(|waiting| *waiting != queue_pair);
        if let Entry::Occupied(mut count) = self.waiting_of.entry(request.peer) {
            match count.get().saturating_sub(1) {
                0 => drop(count.remove()),
                left => drop(count.insert(left)),
            }
        }
        Some(request)
    }

    fn route_management(&mut self, source: IpAddr, packet: &RocePacket<'_>, now: Instant) -> Routed {
        let is_gsi = packet.deth.is_some_and(|deth| deth.q_key.get() == Q_KEY_GSI);
        let Some((header, message)) = CmMessage::parse(packet.payload).filter(|_| is_gsi) else {
            return Routed::Dropped(DroppedPacket::Malformed);
        };
        let is_of_source = |queue_pair: &&u32| {
            self.connections.get(queue_pair).is_some_and(|connection| connection.peer == source)
        };
        if let CmMessage::Req(req) = message {
            let request = RoceRequest::new(source, req);
            let repeated = self.by_request.get(&(source, request.comm_id));
            let known = repeated.or_else(|| self.by_requester.get(&(source, request.queue_pair)));
            return match known {
                None => Routed::Request(request),
                Some(_) if !self.answer_rate.take(0, now) => Routed::Dropped(DroppedPacket::TooMany),
                Some(queue_pair) => Routed::Connection(*queue_pair),
            };
        }
        let known = message.remote_comm_id().and_then(|comm_id| self.by_comm_id.get(&comm_id));
        match known.filter(is_of_source) {
            Some(queue_pair) => self.route_established(*queue_pair),
            None => match answer_of_nobody(header.transaction_id.get(), &message) {
                None => Routed::Dropped(DroppedPacket::Unknown),
                Some(_) if !self.answer_rate.take(0, now) => Routed::Dropped(DroppedPacket::TooMany),
                Some(answer) => Routed::Answer(answer),
            },
        }
    }

    /// The packet that refuses a request which no connection was opened for. `None` if it is none,
    /// or too many others were answered: its sender repeats it.
    pub fn refuse(&mut self, request: &[u8], reason: RejectReason, now: Instant) -> Option<Vec<u8>> {
        let packet = RocePacket::parse(request).ok()?;
        let (header, CmMessage::Req(req)) = CmMessage::parse(packet.payload)? else { return None };
        let mut packet = Vec::new();
        put_reject(&mut packet, 0, header.transaction_id.get(), req.local_comm_id, reason);
        Some(packet).filter(|_| self.answer_rate.take(0, now))
    }

    /// Opens a connection to a peer.
    ///
    /// Returns `None` if the port has as many connections as it may.
    pub fn connect(&mut self, peer: IpAddr, now: Instant) -> Option<OpenedConnection> {
        self.open(peer, None, now)
    }

    /// Opens a requested connection.
    ///
    /// Returns `None` if the port has as many as it may, or was requested too many. The request is
    /// then ignored, and the requester repeats it.
    pub fn admit(&mut self, request: &RoceRequest, now: Instant) -> Option<OpenedConnection> {
        let count = self.waiting_of.get(&request.peer).copied().unwrap_or_default();
        let reserve = if count == 0 { 0 } else { self.limits.request_burst / 2 };
        if !self.request_rate.take(reserve, now) {
            return None;
        }
        let most = self.waiting_of.values().max().copied().unwrap_or_default();
        let replaced = if count >= self.limits.requests_of_address {
            self.oldest_waiting(|peer| peer == request.peer)
        } else if self.waiting.len() >= self.limits.requests {
            self.oldest_waiting(|peer| self.waiting_of.get(&peer) == Some(&most))
        } else {
            None
        };
        if let Some(queue_pair) = replaced {
            self.close(queue_pair, now);
        }
        let opened = self.open(request.peer, Some(*request), now)?;
        if let Some(connection) = self.connections.get_mut(&opened.numbers.queue_pair) {
            connection.is_waiting = true;
        }
        self.waiting.push_back(opened.numbers.queue_pair);
        let count = self.waiting_of.entry(request.peer).or_default();
        *count = count.saturating_add(1);
        Some(OpenedConnection { replaced, ..opened })
    }

    /// The queue pair of the oldest requested connection that is not established, of such a peer.
    fn oldest_waiting(&self, is_meant: impl Fn(IpAddr) -> bool) -> Option<u32> {
        let peer = |queue_pair: &u32| self.connections.get(queue_pair).map(|connection| connection.peer);
        self.waiting.iter().copied().find(|queue_pair| peer(queue_pair).is_some_and(&is_meant))
    }

    fn open(&mut self, peer: IpAddr, request: Option<RoceRequest>, now: Instant) -> Option<OpenedConnection> {
        if self.connections.len() >= self.limits.connections {
            return None;
        }
        self.retired.retain(|(until, _)| now < *until);
        let numbers = self.draw();
        let identification = FlowIdentification::default();
        let connection = PortConnection { peer, numbers, request, is_waiting: false, identification };
        self.connections.insert(numbers.queue_pair, connection);
        self.by_comm_id.insert(numbers.comm_id, numbers.queue_pair);
        if let Some(request) = request {
            self.by_request.insert((peer, request.comm_id), numbers.queue_pair);
        }
        Some(OpenedConnection { numbers, replaced: None })
    }

    /// Draws numbers that no connection has or has had recently.
    fn draw(&mut self) -> RoceNumbers {
        loop {
            let [queue_pair, first_psn] = [self.random.next(), self.random.next()].map(|number| number >> 8);
            let queue_pair = self.share.nearest(queue_pair);
            let comm_id = self.share.nearest(self.random.next());
            let is_retired = self
                .retired
                .iter()
                .any(|(_, numbers)| numbers.queue_pair == queue_pair || numbers.comm_id == comm_id);
            let is_used =
                self.connections.contains_key(&queue_pair) || self.by_comm_id.contains_key(&comm_id);
            if queue_pair > QP_GSI && queue_pair < MULTICAST_QP && comm_id != 0 && !is_retired && !is_used {
                return RoceNumbers { queue_pair, first_psn, comm_id, guid: self.guid };
            }
        }
    }

    /// Forgets a connection. Its numbers are not used again for [`RETIREMENT`], because packets may
    /// still be on their way.
    pub fn close(&mut self, queue_pair: u32, now: Instant) {
        self.end_wait(queue_pair);
        let Some(connection) = self.connections.remove(&queue_pair) else { return };
        self.by_comm_id.remove(&connection.numbers.comm_id);
        if let Some(request) = connection.request {
            self.by_request.remove(&(request.peer, request.comm_id));
            // Another connection of that queue pair may have been established since.
            if let Entry::Occupied(own) = self.by_requester.entry((request.peer, request.queue_pair))
                && *own.get() == queue_pair
            {
                own.remove();
            }
        }
        if self.retired.len() >= MAX_RETIRED {
            self.retired.pop_front();
        }
        if let Some(until) = now.checked_add(RETIREMENT) {
            self.retired.push_back((until, connection.numbers));
        }
    }
}

/// The answer to a message about a connection that does not exist, or no longer does, if there is
/// one: a release is confirmed, and a reply is rejected. It is as long as the message.
fn answer_of_nobody(transaction_id: u64, message: &CmMessage<'_>) -> Option<Vec<u8>> {
    let local_comm_id = U32::new(message.remote_comm_id().unwrap_or_default());
    let remote_comm_id = U32::new(message.local_comm_id());
    let mut packet = Vec::new();
    match message {
        CmMessage::Dreq(_) => {
            let drep = CmDrep { local_comm_id, remote_comm_id, ..CmDrep::new_zeroed() };
            put_message(&mut packet, 0, transaction_id, CmAttribute::DREP, drep.as_bytes());
        }
        CmMessage::Rep(_) => {
            let reason = U16::new(RejectReason::INVALID_COMM_ID.0);
            let message = ANSWERS_REP;
            let rej = CmRej { local_comm_id, remote_comm_id, message, reason, ..CmRej::new_zeroed() };
            put_message(&mut packet, 0, transaction_id, CmAttribute::REJ, rej.as_bytes());
        }
        _ => return None,
    }
    Some(packet)
}

fn source(flow: &RoceFlow) -> IpAddr {
    match flow.addresses {
        RoceAddresses::V4 { source, .. } => source.into(),
        RoceAddresses::V6 { source, .. } => source.into(),
    }
}

/// How long the numbers of a connection that has ended are not used again.
pub const RETIREMENT: Duration = Duration::from_secs(30);
/// Repeated requests and messages about nothing that are answered each second.
pub const ANSWERS_PER_SECOND: u32 = 1000;
/// As many of them may come at once.
pub const ANSWER_BURST: u32 = 256;
/// Most numbers that are kept from being used again.
const MAX_RETIRED: usize = 4096;
/// The bit of a partition key that says full membership.
const MEMBERSHIP: u16 = 0x8000;
/// The number of a queue pair that stands for a multicast group.
const MULTICAST_QP: u32 = 0xff_ffff;
