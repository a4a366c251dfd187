//! A queue pair of RoCEv2 as a session over a stream of records: joined packets behind a head.
//!
//! ```text
//!   stream ──records──▶ Roce::on_packet     Roce::poll_transmit ──records──▶ stream
//! ```
//! A UDP port belongs to many connections, so its owner gives each of them the packets that it has
//! routed there, and takes packets to send, as records. To the engine's tasks that is a byte
//! stream: initiators, targets, limits and the simulator drive it as they drive iWARP. A record
//! keeps the packet whole, and neither side stores one twice.
//!
//! [`super::record`] has the form of a record. The sender of one leaves the ICRCs zero: only the
//! owner of the port knows the addresses that they cover.

use super::record::{HEAD_LEN, RecordHead, RecordWriter};
use super::{Roce, RoceConfig, RoceNumbers};
use crate::queue_pair::{Caps, Fault, Provider};
use crate::regions::Seed;
use crate::unpredictable::UnpredictableNumbers;
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{Demand, ProtocolError, StreamSession, Timed};
use blockmux_proto::driver::transport::FlowInfo;
use blockmux_proto::rdma::{Endpoint, Event, QueuePair, Remote, RemoteRights, WorkId, WorkRequest};
use blockmux_volume::{Chunk, Pool, SgList};
use core::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

/// One end of a RoCEv2 connection over a stream of records.
pub struct RoceRecords {
    roce: Roce,
    outbox: Outbox,
    /// What has not arrived of the record that arrives.
    incoming: RecordHead,
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
        RoceRecords {
            roce,
            outbox: Outbox::default(),
            incoming: RecordHead::default(),
            now,
            over_at: None,
            is_over: false,
        }
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

/// Appends the records of the next packets, until they have about `most` bytes; returns whether
/// there are any.
#[inline]
fn put_records(roce: &mut Roce, now: Instant, most: usize, bytes: &mut Vec<u8>) -> bool {
    let begin = bytes.len();
    let mut records = RecordWriter::new(bytes);
    while records.len().saturating_sub(begin) < most && records.put(|packet| roce.poll_transmit(now, packet))
    {
    }
    records.len() > begin
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
        let wanted = || match self.incoming.first_len() {
            0 => HEAD_LEN,
            len => len,
        };
        if self.is_over { Demand::Close } else { Demand::Bytes(wanted()) }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        self.now = now;
        let unread = input.unread();
        let len = self.incoming.first_len();
        if len == 0 {
            let Some(head) = RecordHead::parse(unread) else { return Ok(0) };
            self.incoming = head;
            return Ok(HEAD_LEN);
        }
        if unread.len() < len {
            return Ok(0);
        }
        let is_marked = self.incoming.is_marked;
        self.incoming = self.incoming.without_first();
        self.roce.on_packet_at(input, 0..len, is_marked, now)?;
        Ok(len)
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
        let room = MAX_UNSENT.saturating_sub(outbox.len());
        if room > 0 {
            outbox.push_built(|bytes| put_records(roce, *now, room, bytes));
        }
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

/// Packets that may be in flight on one connection.
const WINDOW: u32 = 128;
/// With this many unsent bytes no further packet is made.
const MAX_UNSENT: usize = 64 << 10;
const MAX_MTU: u16 = 4096;
/// How long a peer may be silent before it is asked for a sign of life.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// After the end of a connection, when its driver is woken.
const NOTICE: Duration = Duration::from_millis(1);
