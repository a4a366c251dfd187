//! Software iWARP: a queue pair for the session above it, and a stream session over TCP.
//!
//! ```text
//!   bytes ──▶ set-up ──▶ FPDU ──▶ untagged: a message, borrowed or reassembled ──▶ Event
//!                             └─▶ tagged: into registered memory, or into the buffer of our RDMA Read
//!   bytes ◀── Outbox ◀── FPDU ◀── sends, writes, read requests ◀── Work
//!                             ◀── responses to the peer's RDMA Reads, from registered memory
//! ```
//! It implements MPA (RFC 5044, and RFC 6581 for connection set-up), DDP (RFC 5041) and RDMAP (RFC
//! 5040), and interoperates with hardware adapters and with Linux's siw. Like all sessions it does
//! no I/O: it runs over any stream, and in the simulator.
//!
//! # Bounds
//! The endpoint bounds messages, work, reads and registrations. Set-up ends within
//! [`SETUP_TIMEOUT`]. Nothing is added to the outbox once it holds [`OUTBOX_FULL`] bytes. RDMA
//! Reads of the peer wait as table entries until there is room for their responses. A message of
//! several FPDUs is reassembled in one buffer, and only one such message can be in progress.
//!
//! # Copies
//! Payload is sent by reference, and its memory is free again once it is sent. Payload is copied
//! first if there are CRCs and the memory is shared (`framing.rs`).
//! The session borrows a message that lies whole in the receive buffer, and the data of a
//! registration without memory. Other tagged payload is copied from the receive buffer to its
//! place, or received directly into its place (`receive.rs`).
//! `docs/decisions/` has the reasons.
//!
//! Besides the kernel's copies into and out of the socket, payload is copied and summed as follows:
//!
//! | payload | without CRCs | with them |
//! |---|---|---|
//! | sent from shared memory (a RAM volume's reads) | no copy | copied into the outbox or the pool's memory, summed there block by block |
//! | sent from private memory (a write's data) | no copy | summed in place |
//! | received for a registration without memory | no copy | summed in the receive buffer |
//! | received with other FPDUs, or up to 4 KiB | copied to its place | summed in the receive buffer, then copied |
//! | received in its place | no copy | summed in place, once all of it has arrived |

mod framing;
mod messages;
mod pending;
mod post;
mod receive;
mod setup;
mod terminate;
mod transmit;

#[cfg(test)]
mod tests;

use crate::queue_pair::{Fault, Violation};
use crate::regions::{Regions, Seed};
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{Demand, ProtocolError, StreamSession, Timed};
use blockmux_proto::rdma::{Endpoint, Event};
use blockmux_volume::{Chunk, Pool};
use blockmux_wire::iwarp::ddp::{Control, FLAG_LAST, QUEUE_TERMINATE, UNTAGGED_LEN, Untagged};
/// The first bytes of every connection request.
pub use blockmux_wire::iwarp::mpa::KEY_REQUEST;
use blockmux_wire::iwarp::mpa::{ENHANCED_LEN, MAX_PRIVATE_DATA};
use blockmux_wire::iwarp::rdmap::RdmapOpcode;
use framing::Framer;
use pending::PendingWork;
use receive::ReceiveSide;
use setup::{MpaReply, MpaRequest, NegotiatedParameters};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use terminate::{ReceivedTerminate, TerminateReason};
use transmit::{MAX_NUDGES, NUDGE_DELAY, Transmitter};
use zerocopy::{IntoBytes, U32};

/// Configuration of one connection, in addition to its endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IwarpConfig {
    /// Whether this side asks for CRCs. They are used if either side asks.
    pub has_crc: bool,
    /// Active side: whether to connect by RFC 6581 (MPA revision 2), which negotiates ORD and IRD,
    /// or by RFC 5044 (revision 1).
    pub is_enhanced: bool,
    /// Active side with RFC 6581: whether to send an RTR message, so that the passive side may send
    /// first.
    pub is_peer_to_peer: bool,
    /// TCP's maximum segment size in bytes; it bounds the length of FPDUs.
    pub mss: usize,
}

impl Default for IwarpConfig {
    fn default() -> IwarpConfig {
        IwarpConfig { has_crc: false, is_enhanced: true, is_peer_to_peer: true, mss: 1448 }
    }
}

/// One end of an iWARP connection.
pub struct Iwarp {
    config: IwarpConfig,
    endpoint: Endpoint,
    phase: IwarpPhase,
    /// The negotiated parameters; before the negotiation, those that this side offers.
    negotiated: NegotiatedParameters,
    pool: Pool,
    regions: Regions,
    outbox: Outbox,
    receive_side: ReceiveSide,
    transmitter: Transmitter,
    pending: PendingWork,
    events: VecDeque<Event>,
    fault: Option<Fault>,
    deadline: Option<Instant>,
    /// Whether no FPDU has been received yet.
    is_first: bool,
    /// Active side: how many zero-length writes may still be sent to a peer that accepted and sent
    /// nothing since.
    nudges: u32,
    /// Active side: whether the peer's answer shows that it knows the revision of the request.
    has_answered: bool,
}

/// State of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IwarpPhase {
    /// The passive side waits for a connection request.
    Listening,
    /// The active side waits for the reply to its request.
    AwaitingReply,
    /// The session has to accept or reject the request.
    Requested(MpaRequest),
    Connected,
    /// The session asked to disconnect, and posted work is being finished.
    Disconnecting,
    Closed,
}

impl Iwarp {
    /// Creates the active side, over an established stream. Its connection request is in the
    /// outbox.
    #[must_use]
    pub fn active(endpoint: &Endpoint, config: IwarpConfig, pool: Pool, seed: Seed, now: Instant) -> Iwarp {
        let mut iwarp = Iwarp::new(endpoint, config, pool, seed, now);
        iwarp.phase = IwarpPhase::AwaitingReply;
        iwarp.nudges = MAX_NUDGES;
        let request = setup::request(&iwarp.config, endpoint.reads, &endpoint.private_data);
        iwarp.push_frame(&request);
        iwarp
    }

    /// Creates the passive side, over an established stream of which nothing was read.
    #[must_use]
    pub fn passive(endpoint: &Endpoint, config: IwarpConfig, pool: Pool, seed: Seed, now: Instant) -> Iwarp {
        Iwarp::new(endpoint, config, pool, seed, now)
    }

    fn new(endpoint: &Endpoint, config: IwarpConfig, pool: Pool, seed: Seed, now: Instant) -> Iwarp {
        let reads = endpoint.reads;
        let negotiated = NegotiatedParameters { has_crc: config.has_crc, ord: reads, ird: reads, rtr: None };
        Iwarp {
            phase: IwarpPhase::Listening,
            negotiated,
            regions: Regions::new(endpoint.regions, seed),
            outbox: Outbox::default(),
            receive_side: ReceiveSide::new(endpoint.receives),
            transmitter: Transmitter::new(Framer::new(config.has_crc, config.mss, pool.clone())),
            pool,
            pending: PendingWork::default(),
            events: VecDeque::new(),
            fault: None,
            deadline: now.checked_add(SETUP_TIMEOUT),
            is_first: true,
            nudges: 0,
            has_answered: false,
            endpoint: endpoint.clone(),
            config,
        }
    }

    /// Sets the maximum segment size in bytes, which may change while the connection is open.
    #[cfg(test)]
    pub fn set_mss(&mut self, mss: usize) {
        self.config.mss = mss;
        self.transmitter.framer.set_mss(mss);
    }

    /// Active side: whether the peer's answer to the connection request shows that it knows the
    /// revision of the request. A peer that knows only RFC 5044 closes or rejects a connection with
    /// [`IwarpConfig::is_enhanced`], and may accept one without it (RFC 6581 §10).
    #[must_use]
    pub fn has_answered(&self) -> bool {
        self.has_answered
    }

    /// Active side: [`IwarpConfig::is_enhanced`] of this connection.
    #[must_use]
    pub fn is_enhanced(&self) -> bool {
        self.config.is_enhanced
    }

    fn push_frame(&mut self, frame: &[u8]) {
        self.outbox.push_head(frame);
        self.transmitter.count(frame.len());
    }

    /// Handles an MPA request or reply; returns its length in bytes, or 0 if more bytes are needed.
    #[cold]
    fn on_setup(&mut self, unread: &[u8]) -> Result<usize, ProtocolError> {
        if let IwarpPhase::Requested(_) = self.phase {
            self.end(None);
            return Err(EARLY);
        }
        let Some(len) = setup::frame_len(unread) else {
            return Err(self.malformed_setup(terminate::BAD_REPLY));
        };
        let Some(frame) = unread.get(..len) else {
            self.receive_side.need_setup(len);
            return Ok(0);
        };
        if self.phase == IwarpPhase::Listening {
            let (request, data) = MpaRequest::read(frame).inspect_err(|_| self.end(None))?;
            if request.wants_markers() {
                let offered = request.negotiated(&self.config, self.endpoint.reads);
                self.push_frame(&request.reply(&offered, false, &[]));
                self.end(None);
                return Err(WANTS_MARKERS);
            }
            self.phase = IwarpPhase::Requested(request);
            let reads = request.negotiated(&self.config, self.endpoint.reads).ord;
            self.events.push_back(Event::Requested { private_data: data.to_vec(), reads });
            return Ok(len);
        }
        match setup::answer(frame, &self.config, self.endpoint.reads) {
            Ok(MpaReply::Accepted(negotiated, private_data)) => {
                self.has_answered = true;
                // The peer's first FPDU is due soon. The nudges count as part of the set-up time.
                let begun = self.deadline.and_then(|deadline| deadline.checked_sub(SETUP_TIMEOUT));
                self.connect(negotiated);
                self.deadline = begun.and_then(|begun| begun.checked_add(NUDGE_DELAY));
                self.transmitter.may_send = true;
                self.send_rtr(negotiated.rtr);
                self.events.push_back(Event::Connected { private_data });
                Ok(len)
            }
            Ok(MpaReply::RejectedByRevision1(private_data)) => {
                self.end(Some(Event::Refused { private_data }));
                Ok(len)
            }
            Ok(MpaReply::Rejected(private_data)) => {
                self.has_answered = true;
                self.end(Some(Event::Refused { private_data }));
                Ok(len)
            }
            Err(reason) => Err(self.malformed_setup(reason)),
        }
    }

    /// Ends a connection whose set-up frame is malformed. The passive side has no way to report it.
    #[cold]
    fn malformed_setup(&mut self, reason: TerminateReason) -> ProtocolError {
        self.has_answered = true;
        if self.phase == IwarpPhase::AwaitingReply {
            return self.terminate(reason, &[], 0);
        }
        self.end(None);
        ProtocolError {
            what: "sent a connection request with more than 512 bytes of private data",
            reference: "RFC 5044 §7.1.1",
        }
    }

    fn connect(&mut self, negotiated: NegotiatedParameters) {
        self.negotiated = negotiated;
        self.phase = IwarpPhase::Connected;
        if negotiated.rtr.is_none() {
            self.deadline = None;
        }
        self.transmitter.framer = Framer::new(negotiated.has_crc, self.config.mss, self.pool.clone());
        self.receive_side.begin(negotiated.has_crc);
    }

    /// Sends the session's reply to a connection request.
    #[cold]
    fn answer(&mut self, is_taken: bool, private_data: &[u8]) {
        let IwarpPhase::Requested(request) = self.phase else { return self.end(None) };
        if private_data.len() > PRIVATE_DATA {
            return self.end(None);
        }
        let negotiated = request.negotiated(&self.config, self.endpoint.reads);
        let reply = request.reply(&negotiated, is_taken, private_data);
        self.push_frame(&reply);
        if is_taken {
            self.connect(negotiated);
            self.events.push_back(Event::Connected { private_data: Vec::new() });
        } else {
            self.end(None);
        }
    }

    /// Sends a Terminate message and ends the connection. `ulpdu` is as much as was received of the
    /// offending segment, and `len` its whole length in bytes.
    #[cold]
    fn terminate(&mut self, reason: TerminateReason, ulpdu: &[u8], len: usize) -> ProtocolError {
        if self.phase != IwarpPhase::Closed {
            self.fault = Some(Fault::Peer(reason.violation));
            self.end(None);
            let control = Control::new(FLAG_LAST, RdmapOpcode::TERMINATE);
            let (invalidate_stag, qn) = (U32::new(0), U32::new(QUEUE_TERMINATE));
            let header = Untagged { control, invalidate_stag, qn, msn: U32::new(1), mo: U32::new(0) };
            let body = reason.message(ulpdu, len);
            let (framer, outbox) = (&mut self.transmitter.framer, &mut self.outbox);
            let len = UNTAGGED_LEN.saturating_add(body.len());
            framer.begin(outbox, len, header.as_bytes());
            framer.put(outbox, &body);
            framer.finish(outbox, len);
        }
        reason.error
    }

    /// Handles a Terminate message of the peer.
    #[cold]
    fn on_terminate(&mut self, body: &[u8]) -> ProtocolError {
        let received = ReceivedTerminate::read(body);
        self.fault = Some(Fault::Ours(received.violation));
        if matches!(received.violation, Violation::Refused(_)) {
            self.pending.refuse(received.read_msn);
        }
        self.end(None);
        self.outbox.clear();
        ProtocolError { what: "ended the connection with a Terminate message", reference: "RFC 5040 §5.4" }
    }

    /// Flushes all work and reports the end of the connection: `last` if given, or
    /// [`Event::Disconnected`].
    #[cold]
    fn end(&mut self, last: Option<Event>) {
        if std::mem::replace(&mut self.phase, IwarpPhase::Closed) == IwarpPhase::Closed {
            return;
        }
        self.deadline = None;
        self.regions.close_all();
        self.transmitter.stop();
        self.receive_side.stop();
        // Copies unsent payload, which must not change after its memory was reported as free.
        let rest = self.outbox.take_bytes();
        self.outbox.push_head(&rest);
        self.pending.flush(&mut self.events);
        self.events.push_back(last.unwrap_or(Event::Disconnected));
    }
}

impl Timed for Iwarp {
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        self.deadline
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return Ok(());
        }
        if self.nudges > 0 && matches!(self.phase, IwarpPhase::Connected | IwarpPhase::Disconnecting) {
            self.nudge(now);
            return Ok(());
        }
        let what = match self.phase {
            IwarpPhase::AwaitingReply => "did not answer the connection request within 20 seconds",
            _ => "took too long to connect",
        };
        self.end(None);
        Err(ProtocolError { what, reference: "limit of this provider" })
    }
}

impl StreamSession for Iwarp {
    #[inline]
    fn demand(&self) -> Demand {
        match self.phase {
            IwarpPhase::Connected | IwarpPhase::Disconnecting => self.receive_side.demand(),
            IwarpPhase::Listening | IwarpPhase::AwaitingReply => Demand::Bytes(self.receive_side.setup_len()),
            // Only to learn that the peer has closed the stream.
            IwarpPhase::Requested(_) => Demand::Bytes(1),
            IwarpPhase::Closed => Demand::Close,
        }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, _now: Instant) -> Result<usize, ProtocolError> {
        match self.phase {
            IwarpPhase::Connected | IwarpPhase::Disconnecting => self.on_fpdus(input),
            IwarpPhase::Closed => Ok(input.unread().len()),
            IwarpPhase::Listening | IwarpPhase::AwaitingReply | IwarpPhase::Requested(_) => {
                self.on_setup(input.unread())
            }
        }
    }

    #[inline]
    fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        self.place_is_full()
    }

    #[inline]
    fn is_mostly_placed(&self) -> bool {
        self.receive_side.is_mostly_placed()
    }

    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        let is_within = self.receive_side.is_within() && self.phase != IwarpPhase::Closed;
        self.end(None);
        self.outbox.clear();
        if is_within {
            return Err(ProtocolError {
                what: "closed the stream in the middle of a frame",
                reference: "RFC 5044 §7.2",
            });
        }
        Ok(())
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }
}

/// Time limit for the peer's request, its reply, and its first FPDU.
pub const SETUP_TIMEOUT: Duration = Duration::from_secs(20);

/// Nothing is added to an outbox that holds this many bytes. Most of them are payload by reference.
pub const OUTBOX_FULL: usize = 2 << 20;

/// Nothing is added to an outbox that holds this many bytes, if payload is copied into it.
pub const OUTBOX_FULL_OF_COPIES: usize = 256 << 10;

/// Private data that MPA leaves to the session, in bytes.
const PRIVATE_DATA: usize = MAX_PRIVATE_DATA - ENHANCED_LEN;

const WANTS_MARKERS: ProtocolError =
    ProtocolError { what: "asked for MPA markers, which are not supported", reference: "RFC 5044 §7.1.1" };
const EARLY: ProtocolError = ProtocolError {
    what: "sent data before the reply to its connection request",
    reference: "RFC 5044 §7.1.2",
};
