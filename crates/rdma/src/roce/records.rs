//! A queue pair of RoCEv2 as a session over a stream of records: each packet behind its length.
//!
//! ```text
//!   stream ──records──▶ Roce::on_packet     Roce::poll_transmit ──records──▶ stream
//! ```
//! A UDP port belongs to many connections, so its owner gives each of them the packets that it has
//! routed there, and takes packets to send, as records. To the engine's tasks that is a byte
//! stream: initiators, targets, limits and the simulator drive it as they drive iWARP. A record
//! keeps the packet whole, and neither side stores one twice.
//!
//! A record is the length of the packet in two bytes, and the packet from its base transport header
//! to its ICRC. The highest bit of the length says that the network has marked the packet as one
//! that met congestion. The sender of a record leaves the ICRC zero: only the owner of the port
//! knows the addresses that it covers.

use super::{Roce, RoceConfig, RoceNumbers};
use crate::queue_pair::{Caps, Fault, Provider};
use crate::regions::Seed;
use crate::unpredictable::UnpredictableNumbers;
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{Demand, ProtocolError, StreamSession, Timed};
use blockmux_proto::driver::transport::FlowInfo;
use blockmux_proto::rdma::{Endpoint, Event, QueuePair, Remote, RemoteRights, WorkId, WorkRequest};
use blockmux_volume::{Chunk, Pool, SgList};
use blockmux_wire::roce::icrc::ICRC_LEN;
use core::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

/// One end of a RoCEv2 connection over a stream of records.
pub struct RoceRecords {
    roce: Roce,
    outbox: Outbox,
    /// Unread bytes that are needed next.
    wanted: usize,
    now: Instant,
    /// When to notice that the connection is over, once it is.
    over_at: Option<Instant>,
    is_over: bool,
}

impl RoceRecords {
    /// The active side, at the place that `flow` names; without one, over a stream that belongs to
    /// this connection alone.
    #[must_use]
    pub fn active(endpoint: &Endpoint, flow: Option<FlowInfo>, pool: Pool, seed: Seed, now: Instant) -> Self {
        let (config, numbers) = place(flow, seed);
        RoceRecords::new(Roce::active(endpoint, config, numbers, pool, seed, now), now)
    }

    /// The passive side of [`RoceRecords::active`]. Its first record is the connection request.
    #[must_use]
    pub fn passive(
        endpoint: &Endpoint,
        flow: Option<FlowInfo>,
        pool: Pool,
        seed: Seed,
        now: Instant,
    ) -> Self {
        let (config, numbers) = place(flow, seed);
        RoceRecords::new(Roce::passive(endpoint, config, numbers, pool, seed, now), now)
    }

    fn new(roce: Roce, now: Instant) -> RoceRecords {
        RoceRecords { roce, outbox: Outbox::default(), wanted: HEAD_LEN, now, over_at: None, is_over: false }
    }

    /// Notes the end of the connection. It may come with the last packet sent, after which nothing
    /// else would make the driver ask what the session demands: a deadline does.
    #[inline]
    fn check_end(&mut self) {
        if !self.is_over && self.roce.is_drained() {
            self.is_over = true;
            self.over_at = self.now.checked_add(NOTICE);
        }
    }
}

/// Configuration and numbers of a connection.
fn place(flow: Option<FlowInfo>, seed: Seed) -> (RoceConfig, RoceNumbers) {
    let flow = flow.unwrap_or_else(|| {
        let mut random = UnpredictableNumbers::new(seed);
        let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        FlowInfo {
            local: any,
            peer: any,
            service: 0,
            source_port: 0,
            mtu: MAX_MTU,
            // Above the numbers with a meaning of their own.
            queue_pair: random.next() >> 8 | 2,
            first_psn: random.next() >> 8,
            comm_id: random.next() | 1,
            guid: random.next().into(),
        }
    });
    let FlowInfo { local, peer, service, source_port, mtu, queue_pair, first_psn, comm_id, guid } = flow;
    let config =
        RoceConfig { local, peer, service, source_port, mtu, window: WINDOW, keep_alive: Some(KEEP_ALIVE) };
    (config, RoceNumbers { queue_pair, first_psn, comm_id, guid })
}

/// Appends the record of the next packet, if there is one to send.
#[inline]
fn put_record(roce: &mut Roce, now: Instant, bytes: &mut Vec<u8>) -> bool {
    let start = bytes.len();
    bytes.extend_from_slice(&[0; HEAD_LEN]);
    if !roce.poll_transmit(now, bytes) {
        return false;
    }
    bytes.extend_from_slice(&[0; ICRC_LEN]);
    let len = bytes.len().saturating_sub(start).saturating_sub(HEAD_LEN);
    if let Some((head, _)) = bytes.get_mut(start..).and_then(<[u8]>::split_first_chunk_mut) {
        // At most 4 KiB of payload and its headers.
        *head = (len as u16).to_be_bytes();
    }
    true
}

impl Timed for RoceRecords {
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        if self.is_over { self.over_at } else { self.roce.poll_timeout() }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.now = now;
        if self.is_over {
            self.over_at = None;
            return Ok(());
        }
        let done = self.roce.on_timeout(now);
        self.check_end();
        done
    }

    #[inline]
    fn on_send(&mut self, now: impl FnOnce() -> Instant) {
        self.now = now();
    }
}

impl StreamSession for RoceRecords {
    #[inline]
    fn demand(&self) -> Demand {
        if self.is_over { Demand::Close } else { Demand::Bytes(self.wanted) }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        self.now = now;
        let unread = input.unread();
        let Some((head, _)) = unread.split_first_chunk::<HEAD_LEN>() else { return Ok(0) };
        let head = u16::from_be_bytes(*head);
        let end = HEAD_LEN.saturating_add((head & !MARKED).into());
        if unread.len() < end {
            self.wanted = end;
            return Ok(0);
        }
        self.wanted = HEAD_LEN;
        self.roce.on_packet_at(input, HEAD_LEN..end, head & MARKED != 0, now)?;
        Ok(end)
    }

    fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        Ok(())
    }

    /// This side closes the connection.
    fn on_end(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.now = now;
        self.roce.abandon();
        Ok(())
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        let RoceRecords { roce, outbox, now, .. } = self;
        while outbox.len() < MAX_UNSENT && outbox.push_built(|bytes| put_record(roce, *now, bytes)) {}
        self.check_end();
        &mut self.outbox
    }
}

impl QueuePair for RoceRecords {
    #[inline]
    fn room(&self) -> usize {
        self.roce.room()
    }

    #[inline]
    fn post(&mut self, work: WorkRequest) {
        self.roce.post(work);
    }

    #[inline]
    fn receive(&mut self, count: u32) {
        self.roce.receive(count);
    }

    #[inline]
    fn register(&mut self, id: WorkId, local: &mut SgList, access: RemoteRights) -> Option<Remote> {
        self.roce.register(id, local, access)
    }
}

impl Provider for RoceRecords {
    fn caps(&self) -> Caps {
        self.roce.caps()
    }

    #[inline]
    fn poll(&mut self) -> Option<Event> {
        self.roce.poll()
    }

    fn fault(&self) -> Option<Fault> {
        self.roce.fault()
    }
}

/// Length of a record's head, in bytes.
pub const HEAD_LEN: usize = 2;
/// In a record's head: the network has marked the packet.
pub const MARKED: u16 = 1 << 15;
/// Packets that may be in flight on one connection.
const WINDOW: u32 = 64;
/// With this many unsent bytes no further packet is made; one system call sends them.
const MAX_UNSENT: usize = 48 << 10;
const MAX_MTU: u16 = 4096;
/// How long a peer may be silent before it is asked for a sign of life.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// After the end of a connection, when its driver is woken.
const NOTICE: Duration = Duration::from_millis(1);
