//! The target over a queue pair: iSER (RFC 7145).
//!
//! ```text
//!   Requested ──▶ Accept   │ Received ──▶ `inbox` ──room──▶ login, or a turn (`rdma`)
//!                          │ Write, Read ◀── datamover     Send ◀── sender
//! ```
//! Both sides say when they connect whether a response may close the memory that its command named.
//! Hello messages are not supported (`docs/decisions/0039-features-that-few-use.md`). After the
//! login the session is that of iSCSI: each PDU of its sender is a message, behind the data-in that
//! goes with it.
//!
//! # Receive buffers
//! There is one for each command of the window and one for the data that may follow it unasked, one
//! for each immediate command, and [`UNEXPECTED`] for everything else that an initiator may send
//! without being asked. A message gives its buffer back when it was taken; one that waits for room
//! keeps it, so that nothing is taken from an initiator that it was not granted.

use super::datamover::{Moved, TargetDatamover};
use super::full::{MAX_IMMEDIATE, WINDOW};
use super::replies::ResponseSender;
use super::{Phase, TargetSession};
use crate::event::AuditEvent;
use crate::exports::VolumeId;
use crate::iscsi::iser::{HEADERS_LEN, MAX_AHS, Message};
use crate::iscsi::login::operational::{DEFAULT_DATA_SEGMENT_LENGTH, OperationalKey};
use crate::iscsi::sender::Sender;
use crate::iscsi::unexpected::OfTarget;
use crate::rdma::{Endpoint, Event, QueuePair, RdmaSession, WorkError, WorkId};
use crate::rdma_cm::OtherProtocol;
use crate::session::{Demand, Home, ProtocolError, SessionStage, StreamSession, Target, Timed};
use blockmux_volume::{Completion, Io, Seg, Tag, Waker};
use blockmux_wire::iser::{CmHeader, HEADER_LEN, NO_REMOTE_INVALIDATION, NO_ZERO_BASED_ADDRESSES};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// One connection of an initiator's session with an iSCSI target, over RDMA.
pub struct IserTargetSession {
    session: TargetSession,
    link: IserPhase,
    /// Messages that were not taken; there are no more than receive buffers.
    inbox: VecDeque<Seg>,
    /// Receive buffers to give back.
    receives: u32,
    /// Whether there are buffers for all data that may come unasked.
    is_granted: bool,
    /// When to look whether reads come to an end, and how many had by then.
    watch: Option<(Instant, u64)>,
    reads_done: u64,
    /// What was said unasked.
    unexpected: OfTarget,
    /// What a message that had to wait has broken; the next call that can say so does.
    broken: Option<ProtocolError>,
}

/// How far the connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IserPhase {
    /// Nobody has asked for it.
    Listening,
    /// It is to be accepted with these flags.
    Requested(u8),
    /// It is to be rejected: the peer speaks that protocol.
    Foreign(OtherProtocol),
    Open,
    /// Its end was asked for.
    Ending,
    Over,
}

impl IserTargetSession {
    /// A session over RDMA made of one for TCP that nothing has come for yet.
    #[must_use]
    pub fn new(mut session: TargetSession) -> IserTargetSession {
        session.over_rdma = Some(false);
        session.sender = Sender::new(true);
        if let Phase::Login(entrance) = &mut session.phase {
            entrance.set_over_rdma();
        }
        IserTargetSession {
            session,
            link: IserPhase::Listening,
            inbox: VecDeque::new(),
            receives: 0,
            is_granted: false,
            watch: None,
            reads_done: 0,
            unexpected: OfTarget::default(),
            broken: None,
        }
    }

    /// Whether the connection is over; its I/O in flight may not be.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.link == IserPhase::Over
    }

    /// As [`TargetSession::moves_to`], where everything is to be shown again: a queue pair cannot
    /// be handed over.
    #[must_use]
    pub fn moves_to(&self) -> Option<Home> {
        self.session.moves_to()
    }

    fn on_requested(&mut self, private_data: &[u8]) -> Result<(), ProtocolError> {
        if let Some(other) = OtherProtocol::of(private_data) {
            // Accepted, its user would wait a minute for answers that never come.
            self.link = IserPhase::Foreign(other);
            return Err(ProtocolError { what: other.what(), reference: "RFC 7145 §5.1" });
        }
        let invalidates = CmHeader::of(private_data).is_some_and(|header| header.invalidates());
        self.session.over_rdma = Some(invalidates);
        let refusal = if invalidates { 0 } else { NO_REMOTE_INVALIDATION };
        self.link = IserPhase::Requested(NO_ZERO_BASED_ADDRESSES | refusal);
        Ok(())
    }

    /// Takes what had to wait, as far as there is room now.
    #[inline]
    fn take_messages(&mut self) -> Result<(), ProtocolError> {
        while let Some(message) = self.inbox.pop_front() {
            if !self.take(&message)? {
                self.inbox.push_front(message);
                return Ok(());
            }
        }
        Ok(())
    }

    /// Takes a message and gives its buffer back, if there is room for it.
    #[inline]
    fn take(&mut self, message: &Seg) -> Result<bool, ProtocolError> {
        let is_taken = match &mut self.session.phase {
            Phase::Full(full) if !full.connection.is_closed() => {
                let message = Message::parse(message)?;
                self.unexpected.on_pdu(&message.bhs);
                full.turn(|turn| turn.on_message(&message))?
            }
            Phase::Login(entrance) if entrance.is_waiting() => false,
            Phase::Login(_) => {
                self.on_login(message)?;
                true
            }
            // What comes after the end is of no interest.
            Phase::Full(_) | Phase::Closing => true,
        };
        self.receives = self.receives.saturating_add(is_taken.into());
        Ok(is_taken)
    }

    /// A login request as a message.
    fn on_login(&mut self, message: &Seg) -> Result<(), ProtocolError> {
        let Phase::Login(entrance) = &mut self.session.phase else { return Ok(()) };
        Message::parse(message)?;
        // A message need not be padded; the stream that login knows is.
        let mut pdu = message.to_vec();
        pdu.drain(..HEADER_LEN);
        pdu.resize(pdu.len().next_multiple_of(4), 0);
        let (_, established) = entrance.on_bytes(&pdu, self.session.now, &mut self.session.sender)?;
        if let Some(established) = established {
            self.session.enter(*established);
            self.grant_unasked()?;
        }
        Ok(())
    }

    /// The login is over. Unasked-for data of more than a message takes more receive buffers than
    /// were there at first.
    fn grant_unasked(&mut self) -> Result<(), ProtocolError> {
        let Phase::Full(full) = &self.session.phase else { return Ok(()) };
        let parameters = &full.connection.parameters;
        if std::mem::replace(&mut self.is_granted, true) {
            return Ok(());
        }
        if parameters.is_on(OperationalKey::iSERHelloRequired) {
            return Err(HELLO_REQUIRED);
        }
        if parameters.is_on(OperationalKey::InitialR2T) {
            return Ok(());
        }
        // At most 128: the default of the one in the least of the other.
        let longest = parameters.get(OperationalKey::MaxRecvDataSegmentLength).max(1);
        let messages = parameters.get(OperationalKey::FirstBurstLength).div_ceil(longest);
        let more = messages.saturating_sub(1).saturating_mul(WINDOW);
        self.receives = self.receives.saturating_add(more);
        Ok(())
    }

    /// There may be room for what had to wait.
    #[inline]
    fn resume(&mut self) {
        if !self.inbox.is_empty()
            && let Err(error) = self.take_messages()
        {
            self.inbox.clear();
            self.broken.get_or_insert(error);
        }
    }

    /// A piece of work is done.
    fn on_done(&mut self, id: WorkId, result: Result<(), WorkError>) {
        let Phase::Full(full) = &mut self.session.phase else { return };
        if result.is_err() {
            full.turn(|turn| turn.lose_connection());
        }
        match Moved::from(id) {
            Moved::Message => {}
            Moved::Put(len) => full.mover().into_iter().for_each(|mover| mover.sent(len)),
            Moved::Got(tag) => {
                full.mover().into_iter().for_each(TargetDatamover::has_read);
                self.reads_done = self.reads_done.wrapping_add(1);
                full.turn(|turn| turn.on_fetched(tag));
            }
        }
    }

    /// The connection is gone: what was not given to the queue pair never will be.
    fn on_disconnected(&mut self) -> Result<(), ProtocolError> {
        self.link = IserPhase::Over;
        self.inbox.clear();
        let result = self.session.on_end(self.session.now);
        self.session.sender().clear();
        while let Phase::Full(full) = &mut self.session.phase
            && let Some(tag) = full.mover().and_then(TargetDatamover::abandon)
        {
            full.turn(|turn| turn.on_fetched(tag));
        }
        result
    }

    /// Has data read that commands wait for, and sends what there is to send; whether any of it was
    /// possible.
    #[inline]
    fn transmit(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let is_closing = matches!(self.session.demand(), Demand::Close);
        let full = match &mut self.session.phase {
            Phase::Full(full) => full,
            Phase::Login(_) | Phase::Closing => {
                return self.session.sender.send_all(queue_pair, |_| true);
            }
        };
        let limit = full.connection.parameters.get(OperationalKey::MaxOutstandingUnexpectedPDUs);
        let ResponseSender { sender, mover: Some(mover), .. } = &mut full.connection.replies else {
            return false;
        };
        let mut has_moved = mover.read_data(queue_pair);
        while queue_pair.room() > 0
            && let Some(message) = sender.front()
            // Before the end there is nothing to wait for.
            && (self.unexpected.admits(&message.bhs, limit) || is_closing)
        {
            has_moved = true;
            if let Some((local, remote)) = message.data_in.take() {
                mover.write_data(queue_pair, &local, remote);
                if queue_pair.room() == 0 {
                    break;
                }
            }
            sender.send(queue_pair);
        }
        mover.wait_for(queue_pair.unsent());
        has_moved
    }

    /// Whether a read of the initiator's memory is on its way.
    fn is_reading(&self) -> bool {
        let Phase::Full(full) = &self.session.phase else { return false };
        full.connection.replies.mover.as_ref().is_some_and(TargetDatamover::is_reading)
    }

    /// An initiator that does not answer a read holds up whatever waits for that to be over: an
    /// abort, a logout, its own end. It has a minute for the next of them, and then at most
    /// another.
    fn check_reads(&mut self, now: Instant) -> Result<(), ProtocolError> {
        let Phase::Full(full) = &self.session.phase else { return Ok(()) };
        let (until, done) = self.watch.unwrap_or((now, self.reads_done.wrapping_sub(1)));
        if now < until {
            return Ok(());
        }
        self.watch = now.checked_add(READ_TIMEOUT).map(|until| (until, self.reads_done));
        if self.is_reading() && done == self.reads_done && full.wants_reads_over() {
            return Err(ProtocolError {
                what: "did not answer an RDMA Read for a minute that its tasks' end waits for",
                reference: "the server's own bound",
            });
        }
        Ok(())
    }
}

impl RdmaSession for IserTargetSession {
    fn endpoint(&self) -> Endpoint {
        Endpoint {
            receives: RECEIVES,
            receive_len: RECEIVE_LEN,
            sends: SENDS,
            reads: READS,
            regions: 0,
            private_data: Vec::new(),
        }
    }

    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        self.session.now = now;
        if let Phase::Full(full) = &mut self.session.phase {
            full.set_now(now);
        }
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        match event {
            Event::Requested { private_data } => self.on_requested(&private_data)?,
            Event::Received { message, .. } => {
                self.take_messages()?;
                if !self.inbox.is_empty() || !self.take(&message)? {
                    // What cannot be taken now lies in a buffer that others share.
                    self.inbox.push_back(Seg::from_slice(&message.to_vec()));
                }
            }
            Event::Done { id, result } => {
                self.on_done(id, result);
                self.take_messages()?;
            }
            Event::Disconnected | Event::Refused { .. } => self.on_disconnected()?,
            Event::Connected { .. } | Event::Registered { .. } => {}
        }
        Ok(())
    }

    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let before = self.link;
        match self.link {
            IserPhase::Requested(flags) => {
                let header = CmHeader { flags, reserved: [0; 3] };
                queue_pair.accept(header.as_bytes().to_vec());
                self.link = IserPhase::Open;
            }
            IserPhase::Foreign(other) => {
                queue_pair.reject(other.rejection());
                self.link = IserPhase::Ending;
            }
            IserPhase::Listening if matches!(self.session.demand(), Demand::Close) => {
                // It is to stop, and nobody has asked for the connection yet.
                queue_pair.disconnect();
                self.link = IserPhase::Ending;
            }
            IserPhase::Listening | IserPhase::Open | IserPhase::Ending | IserPhase::Over => {}
        }
        if self.link != IserPhase::Open {
            return self.link != before;
        }
        let receives = std::mem::take(&mut self.receives);
        if receives > 0 {
            queue_pair.receive(receives);
        }
        let has_sent = self.transmit(queue_pair);
        let waits = self.inbox.len();
        self.resume();
        if self.session.sender().is_empty() && matches!(self.session.demand(), Demand::Close) {
            queue_pair.disconnect();
            self.link = IserPhase::Ending;
        }
        receives > 0 || has_sent || self.inbox.len() < waits || self.link != before
    }
}

impl Timed for IserTargetSession {
    fn poll_timeout(&self) -> Option<Instant> {
        // What sending makes room for is taken while the driver sends: it has to come back for the
        // I/O of that.
        let has_io = matches!(&self.session.phase, Phase::Full(full) if full.connection.queue.has_io());
        if self.broken.is_some() || has_io {
            return Some(self.session.now);
        }
        let watched = self.is_reading().then(|| self.watch.map_or(self.session.now, |(until, _)| until));
        watched.into_iter().chain(self.session.poll_timeout()).min()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        self.session.on_timeout(now)?;
        if self.is_reading() {
            self.check_reads(now)?;
        }
        self.grant_unasked()?;
        self.take_messages()
    }
}

impl Target for IserTargetSession {
    fn depth(&self) -> u32 {
        self.session.depth()
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        self.session.poll_io()
    }

    #[inline]
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        self.session.poll_cancel()
    }

    #[inline]
    fn on_io(&mut self, done: Completion, now: Instant) {
        self.session.on_io(done, now);
        self.resume();
    }

    fn on_start(&mut self, waker: &Waker, now: Instant) {
        self.session.on_start(waker, now);
    }

    #[inline]
    fn on_turn(&mut self, now: Instant) {
        self.session.on_turn(now);
        self.resume();
    }

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        self.session.poll_event()
    }

    fn owed(&self) -> Option<u64> {
        self.session.owed()
    }

    #[inline]
    fn stage(&self) -> SessionStage {
        self.session.stage()
    }

    fn on_stop(&mut self, now: Instant) {
        self.session.on_stop(now);
    }
}

/// What an initiator may send beside commands and their data: task management, pings, text, a
/// logout.
const UNEXPECTED: u32 = 32;

const RECEIVES: u32 = 2 * WINDOW + MAX_IMMEDIATE as u32 + UNEXPECTED;

const RECEIVE_LEN: u32 = (HEADERS_LEN + MAX_AHS) as u32 + DEFAULT_DATA_SEGMENT_LENGTH;

/// Of each command its data and its response, and as many answers of other kinds.
const SENDS: u32 = 4 * WINDOW;

/// How long a read may take that is waited for.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Reads of the initiator's memory at a time.
const READS: u32 = 32;

const HELLO_REQUIRED: ProtocolError = ProtocolError {
    what: "declared iSERHelloRequired=Yes; Hello messages are not supported",
    reference: "RFC 7145 §6.7",
};
