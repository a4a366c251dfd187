//! Software RoCEv2: the reliable connection of InfiniBand over UDP, as a state machine of one queue
//! pair.
//!
//! ```text
//!   datagram ──▶ QP 1 ──▶ cm: set-up and release ──▶ Event
//!            ├─▶ request ──▶ responder: a message, memory, a read ──▶ Event
//!            ├─▶ answer  ──▶ requester: work is acknowledged      ──▶ Event
//!            └─▶ mark, notification ──▶ congestion: a notification, a rate
//!   datagram ◀── cm, notification, then responder (answers, data of reads) and requester (work)
//!                by turns, at that rate
//! ```
//! It implements the transport of reliable connections and its connection manager (InfiniBand
//! Architecture volume 1, §9 and §12, with annexes A11 and A17), and interoperates with what
//! `rdma_cm` connects. Like all sessions it does no I/O: its owner passes each datagram of the
//! connection to [`Roce::on_packet`] and sends what [`Roce::poll_transmit`] appends.
//!
//! # The port
//! Many connections share a UDP port. Its owner finds the connection of a datagram, checks the ICRC
//! ([`blockmux_wire::roce::icrc`]), and appends it to what is sent: only the owner knows addresses
//! and IP headers. So a packet here ends with its pad when it is sent, and has an unchecked ICRC
//! when it is received.
//!
//! # Bounds
//! The endpoint bounds messages, work, reads and registrations. Set-up ends within
//! [`SETUP_TIMEOUT`]. Packets in flight are bounded by [`RoceConfig::window`]. There is one
//! acknowledgement to send at most, and one message in reassembly. Nothing is stored of packets
//! that arrive out of order.
//!
//! # An idle connection
//! A side that waits for nothing would not notice that its peer is gone. With
//! [`RoceConfig::keep_alive`] it asks by an empty RDMA Write, which every peer acknowledges and no
//! session sees.
//!
//! # Copies
//! Payload is copied into the datagram that is sent, where its checksum is computed while it is in
//! the cache; so memory that others change does no harm. A message of one packet is borrowed from
//! the receive buffer, and all other payload is copied to its place.

mod ack_delay;
mod cm;
mod congestion;
mod encode;
mod guid;
mod identification;
pub mod port;
mod post;
mod psn;
pub mod record;
pub mod records;
mod requester;
mod responder;
mod round_trip;
mod token_bucket;
mod turn;

#[cfg(test)]
mod tests;

use crate::queue_pair::{Fault, Violation};
use crate::regions::{Regions, Seed};
use ack_delay::AckDelay;
use blockmux_proto::driver::session::{ProtocolError, Timed};
use blockmux_proto::rdma::{Endpoint, Event};
use blockmux_volume::{Chunk, Pool};
use blockmux_wire::roce::bth::QP_GSI;
use blockmux_wire::roce::cm::RejectReason;
use blockmux_wire::roce::eth::Q_KEY_GSI;
use blockmux_wire::roce::opcode::RoceOpcode;
use blockmux_wire::roce::packet::RocePacket;
pub use cm::RoceNumbers;
use cm::{CmConnection, CmOutcome, RoceTerms};
use congestion::CongestionControl;
use core::net::IpAddr;
use psn::Psn;
use requester::{Requester, RequesterEnd};
use responder::{RefusedRequest, Responder, ResponderContext};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};
use turn::SendTurn;

/// What the owner of a UDP port needs to know of the bytes of its packets.
pub mod bytes {
    pub use blockmux_wire::roce::UDP_PORT;
    pub use blockmux_wire::roce::bth::{BTH_LEN, QP_GSI};
    pub use blockmux_wire::roce::cm::RejectReason;
    pub use blockmux_wire::roce::icrc::{Fragmentation, ICRC_LEN, RoceAddresses, RoceFlow};
}

/// Configuration of one connection, in addition to its endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoceConfig {
    /// Address of this side.
    pub local: IpAddr,
    /// Address of the peer.
    pub peer: IpAddr,
    /// Active side: the port to connect to, a TCP port by the name that `rdma_cm` uses.
    pub service: u16,
    /// Active side: the port that this side calls its own.
    pub source_port: u16,
    /// Most payload of a packet on this path, in bytes. It is rounded down to 256, 512, 1024, 2048
    /// or 4096; the passive side accepts this or less. Two ends of this implementation use up to
    /// 8192.
    pub mtu: u16,
    /// Packets that may be in flight, if they are short: of data, 256 KiB may be.
    pub window: u32,
    /// Keep-alive: after so long without a packet of the peer, an empty write asks whether it is
    /// still there. `None` leaves that to the session; a side that waits for nothing then does not
    /// notice that its peer is gone.
    pub keep_alive: Option<Duration>,
}

/// One end of a RoCEv2 connection.
pub struct Roce {
    config: RoceConfig,
    endpoint: Endpoint,
    phase: RocePhase,
    cm: CmConnection,
    pool: Pool,
    regions: Regions,
    requester: Requester,
    responder: Responder,
    congestion: CongestionControl,
    ack_delay: AckDelay,
    /// When the last packet of the peer arrived.
    heard_at: Instant,
    events: VecDeque<Event>,
    fault: Option<Fault>,
    /// Why the peer has refused the connection.
    rejection: Option<RejectReason>,
    /// End of set-up; later, when to release a connection whose peer was refused something.
    deadline: Option<Instant>,
    turn: SendTurn,
}

/// State of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RocePhase {
    /// The passive side waits for a connection request.
    Listening,
    /// The active side waits for the reply to its request.
    AwaitingReply,
    /// The session has to accept or reject the request.
    Requested(RoceTerms),
    Connected,
    /// The session asked to disconnect, and posted work is being finished.
    Disconnecting,
    Closed,
}

impl Roce {
    /// Creates the active side. Its connection request is the first datagram to send.
    #[must_use]
    pub fn active(
        endpoint: &Endpoint,
        config: RoceConfig,
        numbers: RoceNumbers,
        pool: Pool,
        seed: Seed,
        now: Instant,
    ) -> Roce {
        let cm = CmConnection::active(numbers, endpoint.reads, &config, &endpoint.private_data);
        let mut roce = Roce::new(endpoint, config, cm, numbers, pool, seed, now);
        roce.phase = RocePhase::AwaitingReply;
        roce
    }

    /// Creates the passive side, for a connection request that is passed to [`Roce::on_packet`]
    /// next.
    #[must_use]
    pub fn passive(
        endpoint: &Endpoint,
        config: RoceConfig,
        numbers: RoceNumbers,
        pool: Pool,
        seed: Seed,
        now: Instant,
    ) -> Roce {
        let cm = CmConnection::passive(numbers, endpoint.reads);
        Roce::new(endpoint, config, cm, numbers, pool, seed, now)
    }

    fn new(
        endpoint: &Endpoint,
        config: RoceConfig,
        cm: CmConnection,
        numbers: RoceNumbers,
        pool: Pool,
        seed: Seed,
        now: Instant,
    ) -> Roce {
        Roce {
            phase: RocePhase::Listening,
            cm,
            pool,
            regions: Regions::new(endpoint.regions, seed),
            requester: Requester::new(config.window),
            responder: Responder::new(endpoint.receives, endpoint.receive_len, Psn::new(numbers.first_psn)),
            congestion: CongestionControl::new(now),
            ack_delay: AckDelay::default(),
            heard_at: now,
            events: VecDeque::new(),
            fault: None,
            rejection: None,
            deadline: now.checked_add(SETUP_TIMEOUT),
            turn: SendTurn::default(),
            endpoint: endpoint.clone(),
            config,
        }
    }

    /// Why the peer has refused the connection, if it has.
    #[must_use]
    pub fn rejection(&self) -> Option<RejectReason> {
        self.rejection
    }

    /// Whether the connection has ended and nothing is left to send, to repeat or to report. It is
    /// then dropped, and its numbers may be used again after a while.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.phase == RocePhase::Closed
            && self.events.is_empty()
            && self.deadline.is_none()
            && self.cm.is_drained()
            && self.responder.is_idle()
    }

    /// Handles a datagram of this connection, whose ICRC is right: `datagram` is one packet, from
    /// its base transport header to its ICRC. `is_marked` says whether its ECN codepoint is
    /// [`ECN_MARKED`](blockmux_wire::roce::ECN_MARKED).
    ///
    /// # Errors
    /// If the peer has broken the protocol, or reports that this side has. The connection has ended
    /// then.
    pub fn on_packet(
        &mut self,
        datagram: &Chunk,
        is_marked: bool,
        now: Instant,
    ) -> Result<(), ProtocolError> {
        self.on_packet_at(datagram, 0..datagram.unread().len(), is_marked, now)
    }

    /// [`Roce::on_packet`] for a datagram that is part of the unread bytes of `input`.
    fn on_packet_at(
        &mut self,
        input: &Chunk,
        datagram: Range<usize>,
        is_marked: bool,
        now: Instant,
    ) -> Result<(), ProtocolError> {
        let at = datagram.start;
        let bytes = input.unread().get(datagram).unwrap_or_default();
        let Ok(packet) = RocePacket::parse(bytes) else { return Ok(()) };
        if packet.bth.dest_qp.get() == QP_GSI {
            let is_gsi = packet.deth.is_some_and(|deth| deth.q_key.get() == Q_KEY_GSI);
            return if is_gsi { self.on_management(packet.payload, now) } else { Ok(()) };
        }
        self.heard_at = now;
        let opcode = packet.bth.opcode();
        if self.is_open() {
            match opcode {
                // Notifications are not answered, or two of them would be answered for ever.
                RoceOpcode::CONGESTION_NOTIFICATION => self.congestion.on_notification(now),
                _ if is_marked => self.congestion.on_mark(now),
                _ => {}
            }
        }
        match opcode {
            RoceOpcode::RC_ACKNOWLEDGE => {
                let Some(aeth) = packet.aeth.filter(|_| self.is_open()) else { return Ok(()) };
                let psn = Psn::from(packet.bth.psn);
                let done = self.requester.on_acknowledge(psn, aeth, now, &mut self.events);
                done.map_err(|end| self.on_requester_end(end))
            }
            opcode if opcode.read_response_place().is_some() => {
                if !self.is_open() {
                    return Ok(());
                }
                let done = self.requester.on_read_response(&packet, now, &mut self.events);
                done.map_err(|end| self.on_requester_end(end))
            }
            opcode if opcode.headers().is_some() && !is_datagram(opcode) => {
                let payload_at = packet.payload_at.saturating_add(at);
                self.on_request(&packet, (input, payload_at), now)
            }
            _ => Ok(()),
        }
    }

    /// How often the peer has had no receive buffer since the last progress.
    #[cfg(test)]
    fn not_ready(&self) -> u8 {
        self.requester.not_ready()
    }

    fn on_request(
        &mut self,
        packet: &RocePacket<'_>,
        (input, payload_at): (&Chunk, usize),
        now: Instant,
    ) -> Result<(), ProtocolError> {
        if !self.is_open() {
            self.responder.repeat_refusal();
            return Ok(());
        }
        // Nobody else knows with which number the peer begins, or that of this queue pair.
        let shows_reply = self.responder.is_expected(packet.bth.psn.into());
        if shows_reply && self.cm.establish() == CmOutcome::Established {
            self.on_established();
        }
        let context =
            ResponderContext { regions: &mut self.regions, pool: &self.pool, events: &mut self.events };
        let borrow = || input.slice(payload_at, packet.payload.len());
        match self.responder.on_request(packet, context, borrow) {
            Ok(()) => Ok(()),
            Err(refused) => {
                self.responder.refuse(refused);
                Err(self.on_refused(refused, now))
            }
        }
    }

    fn on_management(&mut self, mad: &[u8], now: Instant) -> Result<(), ProtocolError> {
        match self.cm.on_datagram(mad, &self.config, now) {
            CmOutcome::Nothing => {}
            CmOutcome::Requested(terms, private_data) => {
                self.phase = RocePhase::Requested(terms);
                self.events.push_back(Event::Requested { private_data, reads: terms.reads });
            }
            CmOutcome::Accepted(terms, private_data) => {
                self.connect(&terms);
                self.deadline = None;
                self.events.push_back(Event::Connected { private_data });
            }
            CmOutcome::Rejected(reason, private_data) => {
                self.rejection = Some(reason);
                self.end(Some(Event::Refused { private_data }));
            }
            CmOutcome::Established => self.on_established(),
            // A live peer acknowledges that. Without an acknowledgement the connection ends.
            CmOutcome::Stale if self.may_request() => self.requester.probe(),
            CmOutcome::Stale => {}
            CmOutcome::Released => {
                if self.responder.is_out_of_receives() && self.is_open() {
                    self.fault = Some(Fault::Peer(Violation::NoReceive));
                }
                self.deadline = None;
                self.end(None);
            }
        }
        Ok(())
    }

    /// Whether packets of the connection are handled.
    #[inline]
    fn is_open(&self) -> bool {
        matches!(self.phase, RocePhase::Connected | RocePhase::Disconnecting)
    }

    /// Passive side: the peer has the reply, so it receives what is sent to its address.
    fn on_established(&mut self) {
        self.deadline = None;
        self.events.push_back(Event::Connected { private_data: Vec::new() });
    }

    fn connect(&mut self, terms: &RoceTerms) {
        self.phase = RocePhase::Connected;
        self.requester.connect(terms);
        self.responder.connect(terms);
        self.congestion.connect(terms);
        self.ack_delay.connect(terms);
    }

    /// Sends the session's reply to a connection request.
    #[cold]
    fn answer(&mut self, is_taken: bool, private_data: &[u8]) {
        let RocePhase::Requested(terms) = self.phase else { return self.disconnect_now() };
        if private_data.len() > cm::PRIVATE_DATA {
            return self.disconnect_now();
        }
        if is_taken {
            self.cm.accept(&terms, private_data);
            self.connect(&terms);
        } else {
            self.cm.reject(RejectReason::CONSUMER, private_data);
            self.end(None);
        }
    }

    /// Ends the connection at once. The peer is told.
    fn disconnect_now(&mut self) {
        if let RocePhase::Requested(_) = self.phase {
            self.cm.reject(RejectReason::NO_RESOURCES, &[]);
        }
        self.cm.release();
        self.deadline = None;
        self.end(None);
    }

    /// Ends the connection at once, because its owner closes it. The peer is told, as far as what
    /// [`Roce::poll_transmit`] returns is still sent.
    pub fn abandon(&mut self) {
        self.disconnect_now();
    }

    /// Ends the connection as if its time-outs had passed; for tests.
    pub fn on_unreachable(&mut self) {
        self.cm.stop();
        self.deadline = None;
        self.end(None);
    }

    /// Appends the next packet to send to `packet`, without its ICRC. Returns whether there is one;
    /// its destination is the port of RoCEv2 at [`RoceConfig::peer`], and its ECN codepoint
    /// [`ECN_CAPABLE`](blockmux_wire::roce::ECN_CAPABLE).
    ///
    /// Timers start when this call returns a packet, so the caller has to send it at once.
    pub fn poll_transmit(&mut self, now: Instant, packet: &mut Vec<u8>) -> bool {
        if self.cm.transmit(now, packet) {
            return true;
        }
        if !self.is_open() {
            // The last answer, to a refused request.
            return self.phase == RocePhase::Closed && self.transmit_answer(now, packet);
        }
        if self.congestion.transmit(packet) {
            return true;
        }
        let len = packet.len();
        if self.transmit_by_turns(now, packet) {
            self.congestion.on_sent(packet.len().saturating_sub(len), now);
            return true;
        }
        if self.phase == RocePhase::Disconnecting
            && self.may_request()
            && self.requester.is_idle()
            && self.responder.is_idle()
        {
            self.cm.release();
            return self.cm.transmit(now, packet);
        }
        false
    }

    fn has_delayed_ack(&self) -> bool {
        self.is_open() && self.responder.acknowledgement_only().is_some()
    }

    fn may_request(&self) -> bool {
        self.cm.is_established() && !self.cm.is_releasing()
    }

    /// Appends the next answer or request. Acknowledgements do not wait for the rate limit.
    fn transmit_by_turns(&mut self, now: Instant, packet: &mut Vec<u8>) -> bool {
        let may_send = self.congestion.may_send(now);
        for _ in 0..2 {
            let is_sent = if self.turn.is_requesters {
                may_send && self.may_request() && self.transmit_request(now, packet)
            } else {
                self.may_answer(may_send, now) && self.transmit_answer(now, packet)
            };
            if is_sent {
                if !self.turn.is_requesters {
                    self.ack_delay.on_answered();
                }
                self.turn.count();
                return true;
            }
            self.turn.pass();
        }
        false
    }

    fn may_answer(&mut self, may_send: bool, now: Instant) -> bool {
        match self.responder.acknowledgement_only() {
            Some(unanswered) => !self.ack_delay.waits(unanswered, now),
            None => may_send || !self.responder.has_data(),
        }
    }

    fn transmit_request(&mut self, now: Instant, packet: &mut Vec<u8>) -> bool {
        let pause_follows = self.congestion.pauses_after(self.requester.mtu(), now);
        self.requester.transmit(now, pause_follows, packet)
    }

    fn transmit_answer(&mut self, now: Instant, packet: &mut Vec<u8>) -> bool {
        match self.responder.transmit(&self.regions, packet) {
            Ok(has_answer) => has_answer,
            Err(refused) => {
                self.on_refused(refused, now);
                self.responder.transmit(&self.regions, packet).unwrap_or(false)
            }
        }
    }

    /// Ends the connection because of a request of the peer. The peer ends it, too, once it has the
    /// answer, which may have to be repeated; if it does not, this side releases the connection.
    #[cold]
    fn on_refused(&mut self, refused: RefusedRequest, now: Instant) -> ProtocolError {
        self.fault = Some(Fault::Peer(refused.violation));
        self.end(None);
        self.deadline = now.checked_add(REFUSAL_TIMEOUT);
        let what = match refused.violation {
            Violation::Refused(_) => "accessed memory that was not granted",
            Violation::TooLong => "sent a message longer than its receive buffer",
            Violation::TooManyReads => "has more RDMA Reads in flight than agreed",
            Violation::Access | Violation::NoReceive | Violation::Other => "sent an invalid request",
        };
        ProtocolError { what, reference: "InfiniBand volume 1 §9.7.4" }
    }

    /// Ends the connection because the requester cannot go on.
    #[cold]
    fn on_requester_end(&mut self, end: RequesterEnd) -> ProtocolError {
        let (fault, what, reference) = match end {
            RequesterEnd::Lost => (None, "no longer acknowledges packets", "limit of this provider"),
            RequesterEnd::Refused(violation) => {
                (Some(Fault::Ours(violation)), "refused a request", "InfiniBand volume 1 §9.7.5.2")
            }
            RequesterEnd::PeerViolation => (
                Some(Fault::Peer(Violation::Other)),
                "sent an invalid response",
                "InfiniBand volume 1 §9.7.5.1",
            ),
        };
        self.fault = fault;
        self.cm.release();
        self.end(None);
        ProtocolError { what, reference }
    }

    /// When to ask whether the peer is still there. While this side waits for an answer, the
    /// timeouts of the requester do.
    #[inline]
    fn probe_at(&self) -> Option<Instant> {
        let idle = self.config.keep_alive?;
        let is_quiet = self.phase == RocePhase::Connected && self.may_request() && self.requester.is_idle();
        if is_quiet { self.heard_at.checked_add(idle) } else { None }
    }

    /// Flushes all work and reports the end of the connection: `last` if given, or
    /// [`Event::Disconnected`].
    #[cold]
    fn end(&mut self, last: Option<Event>) {
        if std::mem::replace(&mut self.phase, RocePhase::Closed) == RocePhase::Closed {
            return;
        }
        self.deadline = None;
        self.regions.close_all();
        self.requester.flush(&mut self.events);
        self.responder.stop();
        self.congestion.stop();
        self.events.push_back(last.unwrap_or(Event::Disconnected));
    }
}

impl Timed for Roce {
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        let timeouts = [
            self.deadline,
            self.requester.poll_timeout(),
            self.cm.poll_timeout(),
            self.congestion.poll_timeout(),
            self.ack_delay.poll_timeout().filter(|_| self.has_delayed_ack()),
            self.probe_at(),
        ];
        timeouts.into_iter().flatten().min()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if !self.cm.on_timeout(now) && self.phase != RocePhase::Closed {
            let is_released = self.phase == RocePhase::Disconnecting;
            self.end(None);
            return if is_released { Ok(()) } else { Err(UNANSWERED) };
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            let was_open = self.phase != RocePhase::Closed;
            self.disconnect_now();
            return if was_open { Err(UNANSWERED) } else { Ok(()) };
        }
        if self.probe_at().is_some_and(|at| at <= now) {
            self.requester.probe();
        }
        self.requester.on_timeout(now).map_err(|end| self.on_requester_end(end))
    }
}

/// Whether packets with this opcode belong to no connection.
fn is_datagram(opcode: RoceOpcode) -> bool {
    matches!(opcode, RoceOpcode::UD_SEND_ONLY | RoceOpcode::CONGESTION_NOTIFICATION)
}

/// Time limit for the set-up of a connection.
pub const SETUP_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a peer has to end a connection after a request was refused.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);

const UNANSWERED: ProtocolError =
    ProtocolError { what: "took too long to connect", reference: "limit of this provider" };
