//! Software iWARP: a queue pair above, a stream session below.
//!
//! ```text
//!   bytes ──▶ set-up ──▶ FPDU ──▶ untagged: a message, lent or gathered ──▶ Event
//!                             └─▶ tagged: into registered memory, or into that of our read
//!   bytes ◀── Outbox ◀── FPDU ◀── sends, writes, read requests ◀── Work
//!                             ◀── answers to the peer's reads, from registered memory
//! ```
//! It speaks MPA (RFC 5044, and RFC 6581 for how connections begin), DDP (RFC 5041) and RDMAP (RFC
//! 5040), as an adapter does in hardware and Linux's siw in the kernel, and either of them is a
//! peer. Like all sessions it does no I/O: it runs over any stream, and under the simulator.
//!
//! # What bounds it
//! The endpoint bounds messages, work, reads and registrations; a set-up ends within
//! [`SETUP_TIMEOUT`]; the outbox takes no more once [`OUTBOX_FULL`] bytes are in it. Reads of the
//! peer wait as table entries until there is room to answer. A message that comes in several FPDUs
//! is gathered in one buffer, and only one can be on its way.
//!
//! # What is copied
//! Payload goes out by reference and its memory is free again once it is sent; with markers, or
//! with CRCs if it is shared, it is copied first (`framing.rs`). A message that lies whole in the
//! receive buffer is lent to the session. Tagged payload is copied from there to its place, or
//! received there directly (`receive.rs`). `docs/decisions/` has the reasons.
//!
//! Not counting the system's copies, one into the socket and one out of it, payload is touched so
//! often:
//!
//! | payload | without CRCs | with them |
//! |---|---|---|
//! | sent from shared memory (a RAM volume's reads) | not at all | copied into the outbox or the pool's memory, summed there block by block |
//! | sent from private memory (a write's data) | not at all | summed where it lies |
//! | received with other FPDUs, or up to 4 KiB | copied to its place | summed in the receive buffer, then copied |
//! | received in its place | not at all | summed there, once all of it is there |

mod framing;
mod messages;
mod pending;
mod post;
mod receive;
mod setup;
mod transmit;
mod unframe;
mod wrong;

#[cfg(test)]
mod tests;

use crate::queue_pair::{Fault, Violation};
use crate::regions::{Regions, Seed};
use blockmux_proto::outbox::Outbox;
use blockmux_proto::rdma::{Endpoint, Event};
use blockmux_proto::session::{Demand, ProtocolError, StreamSession, Timed};
use blockmux_volume::{Chunk, Pool};
use blockmux_wire::iwarp::ddp::{Control, FLAG_LAST, QUEUE_TERMINATE, UNTAGGED_LEN, Untagged};
/// What the stream of every connection request begins with.
pub use blockmux_wire::iwarp::mpa::KEY_REQUEST;
use blockmux_wire::iwarp::mpa::{ENHANCED_LEN, MAX_PRIVATE_DATA};
use blockmux_wire::iwarp::rdmap::RdmapOpcode;
use framing::Framer;
use pending::Pending;
use receive::Arrival;
use setup::{Agreement, Answer, Request};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use transmit::{NUDGE, NUDGES, Transmitter};
use wrong::{Accusation, Wrong};
use zerocopy::{IntoBytes, U32};

/// What is chosen for one connection, beside what the session needs of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Whether we want CRCs; the peer may want them too.
    pub has_crc: bool,
    /// Whether we want markers in what we receive. They help hardware only.
    pub wants_markers: bool,
    /// Connecting: whether by RFC 6581, where both sides tell how many reads they have, or by RFC
    /// 5044 alone.
    pub is_enhanced: bool,
    /// Connecting by RFC 6581: whether we send an RTR message, so that the peer may send first.
    pub is_peer_to_peer: bool,
    /// How many bytes a segment of the stream holds: TCP's maximum segment size.
    pub mss: usize,
}

impl Default for Config {
    fn default() -> Config {
        Config { has_crc: false, wants_markers: false, is_enhanced: true, is_peer_to_peer: true, mss: 1448 }
    }
}

/// One end of an iWARP connection.
pub struct Iwarp {
    config: Config,
    endpoint: Endpoint,
    phase: Phase,
    /// What both sides have agreed on; before, what we would.
    agreement: Agreement,
    pool: Pool,
    regions: Regions,
    outbox: Outbox,
    arrival: Arrival,
    transmitter: Transmitter,
    pending: Pending,
    events: VecDeque<Event>,
    fault: Option<Fault>,
    deadline: Option<Instant>,
    /// No FPDU has come yet.
    is_first: bool,
    /// Connecting: how often the peer may still be nudged.
    nudges: u32,
    /// Connecting by RFC 6581: no answer has come that knows of it.
    is_misunderstood: bool,
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The passive side waits for a request.
    Listening,
    /// The active side waits for a reply.
    Asking,
    /// The session is to take it or not.
    Requested(Request),
    Connected,
    /// The session leaves once all is done.
    Leaving,
    Over,
}

impl Iwarp {
    /// The side that connects, over a stream that is there. Its request is in the outbox.
    #[must_use]
    pub fn active(endpoint: &Endpoint, config: Config, pool: Pool, seed: Seed, now: Instant) -> Iwarp {
        let mut iwarp = Iwarp::new(endpoint, config, pool, seed, now);
        iwarp.phase = Phase::Asking;
        iwarp.nudges = NUDGES;
        iwarp.is_misunderstood = iwarp.config.is_enhanced;
        let request = setup::request(&iwarp.config, endpoint.reads, &endpoint.private_data);
        iwarp.push_frame(&request);
        iwarp
    }

    /// The side that is connected to, over a stream of which nothing was read.
    #[must_use]
    pub fn passive(endpoint: &Endpoint, config: Config, pool: Pool, seed: Seed, now: Instant) -> Iwarp {
        Iwarp::new(endpoint, config, pool, seed, now)
    }

    fn new(endpoint: &Endpoint, config: Config, pool: Pool, seed: Seed, now: Instant) -> Iwarp {
        let reads = endpoint.reads;
        let agreement =
            Agreement { has_crc: config.has_crc, sends_markers: false, ord: reads, ird: reads, rtr: None };
        Iwarp {
            phase: Phase::Listening,
            agreement,
            regions: Regions::new(endpoint.regions, seed),
            outbox: Outbox::default(),
            arrival: Arrival::new(endpoint.receives),
            transmitter: Transmitter::new(Framer::new(config.has_crc, false, config.mss, pool.clone())),
            pool,
            pending: Pending::default(),
            events: VecDeque::new(),
            fault: None,
            deadline: now.checked_add(SETUP_TIMEOUT),
            is_first: true,
            nudges: 0,
            is_misunderstood: false,
            endpoint: endpoint.clone(),
            config,
        }
    }

    /// Segments of the stream hold so many bytes from now on, as those of some peers do.
    #[cfg(test)]
    pub fn set_mss(&mut self, mss: usize) {
        self.config.mss = mss;
        self.transmitter.framer.set_mss(mss);
    }

    /// How many bytes segments of the stream hold.
    #[must_use]
    pub fn mss(&self) -> usize {
        self.config.mss
    }

    /// Asked once the stream is lost or the connection refused: whether that may be because we
    /// began by RFC 6581. Then the peer may well take a connection by RFC 5044 alone, without
    /// [`Config::is_enhanced`] (RFC 6581 §10).
    #[must_use]
    pub fn is_misunderstood(&self) -> bool {
        self.is_misunderstood
    }

    /// How many bytes have left the outbox, in all.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.transmitter.sent(&self.outbox)
    }

    fn push_frame(&mut self, frame: &[u8]) {
        self.outbox.push_head(frame);
        self.transmitter.count(frame.len());
    }

    /// Takes a request or a reply; returns how many bytes it had.
    #[cold]
    fn on_setup(&mut self, unread: &[u8]) -> Result<usize, ProtocolError> {
        if let Phase::Requested(_) = self.phase {
            self.end(None);
            return Err(EARLY);
        }
        let Some(len) = setup::frame_len(unread) else { return Err(self.misbegun(wrong::BAD_REPLY)) };
        let Some(frame) = unread.get(..len) else {
            self.arrival.need_setup(len);
            return Ok(0);
        };
        if self.phase == Phase::Listening {
            let (request, data) = Request::read(frame).inspect_err(|_| self.end(None))?;
            self.phase = Phase::Requested(request);
            self.events.push_back(Event::Requested { private_data: data.to_vec() });
            return Ok(len);
        }
        match setup::answer(frame, &self.config, self.endpoint.reads) {
            Ok(Answer::Taken(agreement, private_data)) => {
                self.is_misunderstood = false;
                // What comes next is due at once, or it is as if the time for it were over.
                let begun = self.deadline.and_then(|deadline| deadline.checked_sub(SETUP_TIMEOUT));
                self.connect(agreement);
                self.deadline = begun.and_then(|begun| begun.checked_add(NUDGE));
                self.transmitter.may_send = true;
                self.send_rtr(agreement.rtr);
                self.events.push_back(Event::Connected { private_data });
                Ok(len)
            }
            Ok(Answer::Misunderstood(private_data)) => {
                self.end(Some(Event::Refused { private_data }));
                Ok(len)
            }
            Ok(Answer::Refused(private_data)) => {
                self.is_misunderstood = false;
                self.end(Some(Event::Refused { private_data }));
                Ok(len)
            }
            Err(wrong) => Err(self.misbegun(wrong)),
        }
    }

    /// What came is no frame to begin with. The passive side has no way to say so.
    #[cold]
    fn misbegun(&mut self, wrong: Wrong) -> ProtocolError {
        self.is_misunderstood = false;
        if self.phase == Phase::Asking {
            return self.terminate(wrong, &[], 0);
        }
        self.end(None);
        ProtocolError {
            what: "asked with more private data than there may be", reference: "RFC 5044 §7.1.1"
        }
    }

    fn connect(&mut self, agreement: Agreement) {
        self.agreement = agreement;
        self.phase = Phase::Connected;
        if agreement.rtr.is_none() {
            self.deadline = None;
        }
        self.transmitter.framer =
            Framer::new(agreement.has_crc, agreement.sends_markers, self.config.mss, self.pool.clone());
        self.arrival.begin(agreement.has_crc, self.config.wants_markers);
    }

    /// The session's answer to a request.
    #[cold]
    fn answer(&mut self, is_taken: bool, private_data: &[u8]) {
        let Phase::Requested(request) = self.phase else { return self.end(None) };
        if private_data.len() > PRIVATE_DATA {
            return self.end(None);
        }
        let agreement = request.agreement(&self.config, self.endpoint.reads);
        let reply = request.reply(&self.config, &agreement, is_taken, private_data);
        self.push_frame(&reply);
        if is_taken {
            self.connect(agreement);
            self.events.push_back(Event::Connected { private_data: Vec::new() });
        } else {
            self.end(None);
        }
    }

    /// Tells the peer what it did wrong, and ends the connection. `ulpdu` is the segment, as far as
    /// it is there, and `len` how long it was.
    #[cold]
    fn terminate(&mut self, wrong: Wrong, ulpdu: &[u8], len: usize) -> ProtocolError {
        if self.phase != Phase::Over {
            self.fault = Some(Fault::Peer(wrong.violation));
            self.end(None);
            let control = Control::new(FLAG_LAST, RdmapOpcode::TERMINATE);
            let (invalidate_stag, qn) = (U32::new(0), U32::new(QUEUE_TERMINATE));
            let header = Untagged { control, invalidate_stag, qn, msn: U32::new(1), mo: U32::new(0) };
            let body = wrong.terminate(ulpdu, len);
            let (framer, outbox) = (&mut self.transmitter.framer, &mut self.outbox);
            let len = UNTAGGED_LEN.saturating_add(body.len());
            framer.begin(outbox, len, header.as_bytes());
            framer.put(outbox, &body);
            framer.finish(outbox, len);
        }
        wrong.error
    }

    /// The peer says that we did something wrong.
    #[cold]
    fn on_terminate(&mut self, body: &[u8]) -> ProtocolError {
        let accusation = Accusation::read(body);
        self.fault = Some(Fault::Ours(accusation.violation));
        if matches!(accusation.violation, Violation::Refused(_)) {
            self.pending.refuse(accusation.read_msn);
        }
        self.end(None);
        self.outbox.clear();
        ProtocolError { what: "ended the connection with a Terminate message", reference: "RFC 5040 §5.4" }
    }

    /// Flushes everything, and tells that the connection is over, in the words of `last` if there
    /// are some.
    #[cold]
    fn end(&mut self, last: Option<Event>) {
        if std::mem::replace(&mut self.phase, Phase::Over) == Phase::Over {
            return;
        }
        self.deadline = None;
        self.regions.close_all();
        self.transmitter.stop();
        self.arrival.stop();
        // What is still to be sent must not change once its memory is said to be free.
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
        if self.nudges > 0 && matches!(self.phase, Phase::Connected | Phase::Leaving) {
            self.nudge(now);
            return Ok(());
        }
        self.end(None);
        Err(ProtocolError { what: "took too long to connect", reference: "the provider's own bound" })
    }
}

impl StreamSession for Iwarp {
    #[inline]
    fn demand(&self) -> Demand {
        match self.phase {
            Phase::Connected | Phase::Leaving => self.arrival.demand(),
            Phase::Listening | Phase::Asking => Demand::Bytes(self.arrival.setup_len()),
            // Only to hear that the peer goes away.
            Phase::Requested(_) => Demand::Bytes(1),
            Phase::Over => Demand::Close,
        }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, _now: Instant) -> Result<usize, ProtocolError> {
        match self.phase {
            Phase::Connected | Phase::Leaving => self.on_fpdus(input),
            Phase::Over => Ok(input.unread().len()),
            Phase::Listening | Phase::Asking | Phase::Requested(_) => self.on_setup(input.unread()),
        }
    }

    #[inline]
    fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        self.place_is_full()
    }

    #[inline]
    fn is_mostly_placed(&self) -> bool {
        self.arrival.is_mostly_placed()
    }

    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        let is_within = self.arrival.is_within() && self.phase != Phase::Over;
        self.end(None);
        self.outbox.clear();
        if is_within {
            return Err(ProtocolError { what: "left in the middle of a frame", reference: "RFC 5044 §7.2" });
        }
        Ok(())
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }
}

/// How long a peer may take to ask, to answer, and to send its RTR message.
pub const SETUP_TIMEOUT: Duration = Duration::from_secs(20);

/// In bytes: with so many in the outbox nothing more is put there. Most of them are payload that is
/// referred to.
pub const OUTBOX_FULL: usize = 2 << 20;

/// In bytes: with so many in the outbox nothing more is put there, where payload is copied.
pub const OUTBOX_FULL_OF_COPIES: usize = 256 << 10;

/// What is left for a session of MPA's private data, in bytes.
const PRIVATE_DATA: usize = MAX_PRIVATE_DATA - ENHANCED_LEN;

const EARLY: ProtocolError =
    ProtocolError { what: "sent something before its request was answered", reference: "RFC 5044 §7.1.2" };
