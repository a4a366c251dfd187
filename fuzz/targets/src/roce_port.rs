//! The UDP port that connections of RoCEv2 share, under packets of many hosts, and the records by
//! which it passes packets on.
//!
//! ```text
//!   stream = record ...   record = 0, host, fragmentation, length, bytes     a packet, intact
//!                                | 1, host, length, bytes                    any bytes
//!                                | 2, host, attribute, number, peer's number a management message
//!                                | 3, host, number                           a packet to a queue pair
//!                                | 4, host                                   this side connects
//!                                | 5, number                                 a connection is closed
//!                                | 6, milliseconds                           time passes
//! ```
//! Numbers select from the connections, or are beyond them.

use crate::choices::Choices;
use crate::queue_pair_owner;
use blockmux_proto::driver::session::{Demand, StreamSession};
use blockmux_rdma::roce::RoceNumbers;
use blockmux_rdma::roce::port::{OpenedConnection, RocePort, RocePortLimits, RoceRequest, Routed};
use blockmux_rdma::roce::record::{HEAD_LEN, RecordHead};
use blockmux_rdma::roce::records::RoceRecords;
use blockmux_volume::{Chunk, Memory, Pool};
use blockmux_wire::roce::bth::{Bth, P_KEY_DEFAULT, QP_GSI, U24};
use blockmux_wire::roce::cm::{CM_BODY_LEN, CmAttribute, CmMessage, MadHeader, RejectReason};
use blockmux_wire::roce::eth::{Deth, Q_KEY_GSI};
use blockmux_wire::roce::icrc::{Fragmentation, RoceAddresses, RoceFlow};
use blockmux_wire::roce::opcode::RoceOpcode;
use blockmux_wire::roce::packet::RocePacket;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes, U16, U32};

/// Reads `data` as choices and records.
pub(crate) fn roce_port(data: &[u8]) {
    let (choices, stream) = Choices::split(data);
    let mut run = PortRun {
        port: RocePort::new(LIMITS, [7; 32]),
        known: Vec::new(),
        choices,
        records: &stream,
        now: Instant::now(),
    };
    while run.next_record().is_some() {
        run.check();
    }
}

/// A connection that the port should know.
struct KnownConnection {
    peer: IpAddr,
    numbers: RoceNumbers,
    /// If the peer has requested it.
    request: Option<RoceRequest>,
    /// Whether the peer has shown that it receives what is sent to its address.
    is_established: bool,
}

struct PortRun<'a> {
    port: RocePort,
    known: Vec<KnownConnection>,
    choices: Choices<'a>,
    /// The rest of the stream.
    records: &'a [u8],
    now: Instant,
}

impl PortRun<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.records.split_first_chunk()?;
        self.records = rest;
        Some(*taken)
    }

    fn bytes(&mut self) -> Option<Vec<u8>> {
        let [len] = self.take()?;
        let (bytes, rest) = self.records.split_at(self.records.len().min(len.into()));
        self.records = rest;
        Some(bytes.to_vec())
    }

    fn next_record(&mut self) -> Option<()> {
        let [kind] = self.take()?;
        match kind {
            0 => {
                let [host, fragmentation] = self.take()?;
                let bytes = self.bytes()?;
                self.receive(host, fragmentation, &bytes);
            }
            1 => {
                let [host] = self.take()?;
                let datagram = self.bytes()?;
                let routed = self.port.route(&flow(host), &datagram, self.now);
                self.routed(host, &datagram, routed);
            }
            2 => {
                let [host, attribute, number, of_peer] = self.take()?;
                let packet = self.management(attribute, number, of_peer);
                self.receive(host, 0, &packet);
            }
            3 => {
                let [host, number] = self.take()?;
                let numbers = self.selected(number).map(|known| known.numbers);
                let queue_pair = numbers.map_or(number.into(), |numbers| numbers.queue_pair);
                // Only who has got the reply knows the first sequence number.
                let first_psn = numbers.filter(|_| host & 8 == 0).map_or(0, |numbers| numbers.first_psn);
                let bth = Bth {
                    opcode: RoceOpcode::RC_ACKNOWLEDGE.0,
                    p_key: U16::new(P_KEY_DEFAULT),
                    dest_qp: U24::new(queue_pair),
                    psn: U24::new(first_psn),
                    ..Bth::new_zeroed()
                };
                self.receive(host, number.rotate_left(3), &[bth.as_bytes(), &[0x1f, 0, 0, 1]].concat());
            }
            4 => {
                let [host] = self.take()?;
                let has_room = self.port.len() < LIMITS.connections;
                let opened = self.port.connect(address(host), self.now);
                assert_eq!(opened.is_some(), has_room);
                if let Some(opened) = opened {
                    assert_eq!(opened.replaced, None);
                    self.opened(address(host), &opened, None);
                }
            }
            5 => {
                let [number] = self.take()?;
                if let Some(at) = self.selected(number).map(|known| known.numbers.queue_pair) {
                    self.port.close(at, self.now);
                    self.known.retain(|known| known.numbers.queue_pair != at);
                }
            }
            _ => {
                let [milliseconds] = self.take()?;
                self.now += Duration::from_millis(milliseconds.into()) * 256;
            }
        }
        Some(())
    }

    fn selected(&self, number: u8) -> Option<&KnownConnection> {
        self.known.get(usize::from(number))
    }

    /// A message whose receiver's number is that of a connection, or of none.
    fn management(&self, attribute: u8, number: u8, of_peer: u8) -> Vec<u8> {
        let ours = self.selected(number).map_or(number.into(), |known| known.numbers.comm_id);
        let attribute = CmAttribute(u16::from(attribute));
        let mut body = [0; CM_BODY_LEN];
        // The communication identifier; of a request, also the queue pair, which several have.
        body[3] = of_peer;
        body[34] = of_peer >> 4;
        if attribute != CmAttribute::REQ {
            body[4..8].copy_from_slice(&ours.to_be_bytes());
        }
        let bth = Bth {
            opcode: RoceOpcode::UD_SEND_ONLY.0,
            p_key: U16::new(P_KEY_DEFAULT),
            dest_qp: U24::new(QP_GSI),
            ..Bth::new_zeroed()
        };
        let deth = Deth { q_key: U32::new(Q_KEY_GSI), reserved: 0, source_qp: U24::new(QP_GSI) };
        [bth.as_bytes(), deth.as_bytes(), MadHeader::new(attribute, 1).as_bytes(), &body].concat()
    }

    /// A packet arrives whole.
    fn receive(&mut self, host: u8, fragmentation: u8, packet: &[u8]) {
        let fragmentation = Fragmentation {
            identification: u16::from(fragmentation >> 1) << 9,
            dont_fragment: fragmentation & 1 == 0,
        };
        let flow = flow(host);
        let datagram = [packet, &flow.icrc(fragmentation, packet)].concat();
        let routed = self.port.route(&flow, &datagram, self.now);
        self.routed(host, &datagram, routed);
    }

    fn routed(&mut self, host: u8, datagram: &[u8], routed: Routed) {
        let peer = address(host);
        match routed {
            Routed::Connection(queue_pair) => {
                let known = self.known.iter_mut().find(|known| known.numbers.queue_pair == queue_pair);
                let known = known.expect("it is a connection of the port");
                assert_eq!(known.peer, peer, "a packet of another address reaches a connection");
                match request_of(datagram) {
                    None => known.is_established |= shows_reply(datagram, &known.numbers),
                    // A repeated request shows nothing.
                    Some((comm_id, queue_pair)) => {
                        let request = known.request.expect("its peer has requested it");
                        let is_stale = known.is_established && request.queue_pair == queue_pair;
                        assert!(request.comm_id == comm_id || is_stale, "it is another's request");
                    }
                }
            }
            Routed::Request(request) => {
                let RoceRequest { comm_id, queue_pair, .. } = request;
                assert_eq!((request.peer, Some((comm_id, queue_pair))), (peer, request_of(datagram)));
                let is_known = |known: &KnownConnection| {
                    known.peer == peer && known.request.is_some_and(|known| known.comm_id == comm_id)
                };
                assert!(!self.known.iter().any(is_known), "a repeated request is that of a connection");
                match self.choices.below(4) {
                    0 => {
                        let reason = RejectReason::INVALID_SERVICE_ID;
                        let refused = self.port.refuse(datagram, reason, self.now);
                        // None if too many were answered.
                        assert!(refused.is_none_or(|packet| packet.len() + 4 <= datagram.len()));
                    }
                    _ => self.admit(&request),
                }
            }
            Routed::Answer(packet) => {
                assert!(packet.len() + 4 <= datagram.len(), "an answer is longer than its message");
                let sealed = [&packet[..], &[0; 4]].concat();
                let payload = RocePacket::parse(&sealed).expect("an answer is a packet").payload;
                assert!(CmMessage::parse(payload).is_some());
            }
            Routed::Dropped(_) => {}
        }
    }

    fn admit(&mut self, request: &RoceRequest) {
        let before = self.port.len();
        let Some(opened) = self.port.admit(request, self.now) else {
            return assert!(self.port.len() >= LIMITS.connections || before >= LIMITS.connections);
        };
        if let Some(replaced) = opened.replaced {
            let at = self.known.iter().position(|known| known.numbers.queue_pair == replaced);
            let gone = self.known.remove(at.expect("what is replaced is a connection"));
            assert!(!gone.is_established && gone.request.is_some(), "an established one is replaced");
        }
        self.opened(request.peer, &opened, Some(*request));
    }

    fn opened(&mut self, peer: IpAddr, opened: &OpenedConnection, request: Option<RoceRequest>) {
        let numbers = opened.numbers;
        let is_used = |known: &KnownConnection| {
            known.numbers.queue_pair == numbers.queue_pair || known.numbers.comm_id == numbers.comm_id
        };
        assert!(!self.known.iter().any(is_used) && numbers.queue_pair > QP_GSI);
        self.known.push(KnownConnection { peer, numbers, request, is_established: request.is_none() });
    }

    /// The port has these connections, within its limits.
    fn check(&self) {
        assert_eq!(self.port.len(), self.known.len());
        assert!(self.known.len() <= LIMITS.connections);
        let waiting = || self.known.iter().filter(|known| !known.is_established);
        assert!(waiting().count() <= LIMITS.requests);
        for one in waiting() {
            let of_address = waiting().filter(|known| known.peer == one.peer).count();
            assert!(of_address <= LIMITS.requests_of_address);
        }
    }
}

/// Reads `data` as choices and a stream of records, which arrives in pieces.
pub(crate) fn roce_records(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let is_active = choices.byte() & 1 != 0;
    let connect = if is_active { RoceRecords::active } else { RoceRecords::passive };
    let (pool, mut now) = (Pool::new(1 << 20), Instant::now());
    let mut session = connect(&queue_pair_owner::endpoint(), None, pool.clone(), [9; 32], now);
    let mut arriving = Arriving { read: Chunk::new(Memory::from_heap(stream.len())), rest: &stream };
    while let Demand::Bytes(len) = session.demand() {
        assert!(len > 0 && len <= usize::from(u16::MAX), "{len} bytes are demanded");
        arriving.until(len - 1);
        if arriving.read.unread().len() < len {
            assert!(matches!(session.on_bytes(&arriving.read, now), Ok(0)), "less is taken");
        }
        arriving.until(len + usize::from(choices.byte()));
        if arriving.read.unread().len() < len {
            break;
        }
        match session.on_bytes(&arriving.read, now) {
            Ok(taken) => assert_eq!(taken, len),
            Err(error) => assert!(!error.reference.is_empty()),
        }
        arriving.read.take(len);
        now += Duration::from_millis(choices.byte().into());
        check_records(&session.outbox().take_bytes());
    }
    drop(session);
    assert_eq!(pool.out_bytes(), 0, "the pool has lost memory");
}

/// A stream of which a part has arrived. It has memory for all of it, because a buffer for each
/// piece is a page or more, of which AddressSanitizer keeps hundreds of thousands.
struct Arriving<'a> {
    read: Chunk,
    rest: &'a [u8],
}

impl Arriving<'_> {
    /// Lets bytes arrive until `len` are unread, as far as the stream has them.
    fn until(&mut self, len: usize) {
        let missing = len.saturating_sub(self.read.unread().len());
        let (arrived, rest) = self.rest.split_at(missing.min(self.rest.len()));
        self.read.extend(arrived);
        self.rest = rest;
    }
}

/// What is sent are whole records of whole packets.
fn check_records(mut sent: &[u8]) {
    while let Some(head) = RecordHead::parse(sent) {
        let packets = &sent[HEAD_LEN..][..head.len as usize];
        assert!(!packets.is_empty() && head.packet_len > 0 && !head.is_marked);
        for packet in packets.chunks(head.packet_len.into()) {
            assert!(RocePacket::parse(packet).is_ok());
        }
        sent = &sent[HEAD_LEN + packets.len()..];
    }
    assert!(sent.is_empty());
}

/// Whether only the receiver of the reply can send this packet, which is no request.
fn shows_reply(datagram: &[u8], numbers: &RoceNumbers) -> bool {
    let packet = RocePacket::parse(datagram).expect("the port has read it");
    packet.bth.dest_qp.get() == QP_GSI || packet.bth.psn.get() == numbers.first_psn
}

/// Communication identifier and queue pair of a packet that is a request.
fn request_of(datagram: &[u8]) -> Option<(u32, u32)> {
    let packet = RocePacket::parse(datagram).ok().filter(|packet| packet.bth.dest_qp.get() == QP_GSI)?;
    match CmMessage::parse(packet.payload)? {
        (_, CmMessage::Req(req)) => Some((req.local_comm_id.get(), req.local_qpn.get())),
        _ => None,
    }
}

/// One of a few hosts.
fn address(host: u8) -> IpAddr {
    Ipv4Addr::new(192, 0, 2, 1 + host % 8).into()
}

/// The packets of a host.
fn flow(host: u8) -> RoceFlow {
    let addresses = RoceAddresses::V4 {
        source: Ipv4Addr::new(192, 0, 2, 1 + host % 8),
        destination: Ipv4Addr::LOCALHOST,
    };
    RoceFlow { addresses, source_port: 50_000 }
}

/// The rate of requests is no limit here.
const LIMITS: RocePortLimits = RocePortLimits {
    connections: 12,
    requests: 6,
    requests_of_address: 2,
    requests_per_second: 1000,
    request_burst: 1 << 20,
};
