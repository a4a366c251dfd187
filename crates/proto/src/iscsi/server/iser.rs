//! The target over a queue pair: iSER (RFC 7145).
//!
//! ```text
//!   Requested ──▶ Accept   │ Received ──▶ `inbox` ──room──▶ login or full feature phase
//!                          │ Write, Read ◀── datamover     Send ◀── sender
//! ```
//! During connection setup both sides declare whether a response may invalidate the buffer that its
//! command advertised. Hello messages are not supported
//! (`docs/decisions/0039-rarely-used-features-and-their-cost.md`). After the login, each PDU of the
//! sender is one message, preceded by the RDMA Write of its data-in.
//!
//! # Receive buffers
//! Posted buffers: one for each command of the window and one for its unsolicited data, one for
//! each immediate command, and [`MAX_UNEXPECTED`] for unexpected PDUs. A consumed message returns
//! its buffer. A message that waits for room keeps its buffer, so an initiator never sends more
//! than it has credits for.

use super::datamover::RdmaPeer;
use super::full::{MAX_IMMEDIATE, WINDOW};
use super::replies::ResponseSender;
use super::{IscsiPhase, IscsiTargetSession};
use crate::driver::audit_event::AuditEvent;
use crate::driver::session::{Demand, ProtocolError, StreamSession, Timed};
use crate::driver::target::{Charge, IoSource, SessionStage, TargetLifecycle};
use crate::exports::VolumeId;
use crate::iscsi::iser::{HEADERS_LEN, IserMessage, MAX_AHS};
use crate::iscsi::login::operational::{DEFAULT_DATA_SEGMENT_LENGTH, OperationalKey};
use crate::iscsi::sender::Sender;
use crate::iscsi::unexpected::TargetUnexpectedPdus;
use crate::rdma::cm::OtherProtocol;
use crate::rdma::progress_watchdog::READ_STALLED;
use crate::rdma::target_mover::{READS, TargetMover, endpoint};
use crate::rdma::target_phase::TargetPhase;
use crate::rdma::{Endpoint, Event, QueuePair, RdmaSession, WorkError, WorkId};
use crate::volume_state::NotAdmitted;
use blockmux_volume::{Completion, Io, IoError, Seg, Tag, Waker};
use blockmux_wire::iser::{CmHeader, HEADER_LEN, NO_REMOTE_INVALIDATION, NO_ZERO_BASED_ADDRESSES};
use std::collections::VecDeque;
use std::time::Instant;
use zerocopy::IntoBytes;

/// One connection of an initiator's session with an iSCSI target, over RDMA.
pub struct IserTargetSession {
    session: IscsiTargetSession,
    phase: TargetPhase,
    /// Messages that wait for room; not more than there are receive buffers.
    inbox: VecDeque<Seg>,
    /// Number of receive buffers to post again.
    receives: u32,
    /// Receive buffers for all unsolicited data are posted.
    has_unsolicited_buffers: bool,
    /// Counts unexpected PDUs (RFC 7145 §6.7.2).
    unexpected: TargetUnexpectedPdus,
    /// Error of a message that was processed late; returned by the next call.
    broken: Option<ProtocolError>,
}

impl IserTargetSession {
    /// Converts an unused TCP session to RDMA.
    #[must_use]
    pub fn new(mut session: IscsiTargetSession) -> IserTargetSession {
        session.over_rdma = Some(RdmaPeer { invalidates: false, reads: READS });
        session.sender = Sender::new(true);
        if let IscsiPhase::Login(login) = &mut session.phase {
            login.login.set_over_rdma();
        }
        IserTargetSession {
            session,
            phase: TargetPhase::Listening,
            inbox: VecDeque::new(),
            receives: 0,
            has_unsolicited_buffers: false,
            unexpected: TargetUnexpectedPdus::default(),
            broken: None,
        }
    }

    /// Whether the connection is over. Its volume I/O may still be in flight.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.phase, TargetPhase::Over)
    }

    fn on_requested(&mut self, private_data: &[u8], reads: u32) -> Result<(), ProtocolError> {
        if let Some(other) = OtherProtocol::of(private_data) {
            // An accepted peer of another protocol would wait a minute for responses.
            self.phase = TargetPhase::Rejecting(other.rejection());
            return Err(ProtocolError { what: other.what(), reference: "RFC 7145 §5.1" });
        }
        let invalidates = CmHeader::of(private_data).is_some_and(|header| header.invalidates());
        // If the initiator supports none, the queue pair delays the first.
        self.session.over_rdma = Some(RdmaPeer { invalidates, reads: reads.clamp(1, READS) });
        let refusal = if invalidates { 0 } else { NO_REMOTE_INVALIDATION };
        let header = CmHeader { flags: NO_ZERO_BASED_ADDRESSES | refusal, reserved: [0; 3] };
        self.phase = TargetPhase::Accepting { receives: 0, private_data: header.as_bytes().to_vec() };
        Ok(())
    }

    /// Processes waiting messages while there is room.
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

    /// Processes a message if there is room for it, and frees its buffer.
    #[inline]
    fn take(&mut self, message: &Seg) -> Result<bool, ProtocolError> {
        let is_taken = match &mut self.session.phase {
            IscsiPhase::Full(full) if !full.connection.is_closed() => {
                let message = IserMessage::parse(message)?;
                self.unexpected.on_pdu(&message.bhs);
                full.turn(|turn| turn.on_message(&message))?
            }
            IscsiPhase::Login(login) if login.is_waiting() => false,
            IscsiPhase::Login(_) => {
                self.on_login(message)?;
                true
            }
            // Messages after the end of the connection are dropped.
            IscsiPhase::Full(_) | IscsiPhase::Closing => true,
        };
        self.receives = self.receives.saturating_add(is_taken.into());
        Ok(is_taken)
    }

    /// Processes a login request.
    fn on_login(&mut self, message: &Seg) -> Result<(), ProtocolError> {
        let IscsiPhase::Login(login) = &mut self.session.phase else { return Ok(()) };
        IserMessage::parse(message)?;
        // An iSER message need not be padded, but the login phase parses padded PDUs.
        let mut pdu = message.to_vec();
        pdu.drain(..HEADER_LEN);
        pdu.resize(pdu.len().next_multiple_of(4), 0);
        let (_, established) = login.on_bytes(&pdu, self.session.now, &mut self.session.sender)?;
        if let Some(established) = established {
            self.session.enter_full_feature(*established);
            self.post_unsolicited_buffers()?;
        }
        Ok(())
    }

    /// Posts the receive buffers for unsolicited data at the end of the login.
    fn post_unsolicited_buffers(&mut self) -> Result<(), ProtocolError> {
        let IscsiPhase::Full(full) = &self.session.phase else { return Ok(()) };
        let parameters = &full.connection.parameters;
        if std::mem::replace(&mut self.has_unsolicited_buffers, true) {
            return Ok(());
        }
        if parameters.is_on(OperationalKey::iSERHelloRequired) {
            return Err(HELLO_REQUIRED);
        }
        if parameters.is_on(OperationalKey::InitialR2T) {
            return Ok(());
        }
        // At most 128 messages: the default FirstBurstLength in the smallest segments.
        let longest = parameters.get(OperationalKey::MaxRecvDataSegmentLength).max(1);
        let messages = parameters.get(OperationalKey::FirstBurstLength).div_ceil(longest);
        let more = messages.saturating_sub(1).saturating_mul(WINDOW);
        self.receives = self.receives.saturating_add(more);
        Ok(())
    }

    /// Processes waiting messages; there may be room now.
    #[inline]
    fn resume(&mut self) {
        if !self.inbox.is_empty()
            && let Err(error) = self.take_messages()
        {
            self.inbox.clear();
            self.broken.get_or_insert(error);
        }
    }

    /// Handles a completed work request.
    fn on_done(&mut self, id: WorkId, result: Result<(), WorkError>) {
        let IscsiPhase::Full(full) = &mut self.session.phase else { return };
        if result.is_err() {
            full.turn(|turn| turn.lose_connection());
        }
        if let Some(tag) = full.transfers().and_then(|transfers| transfers.on_done(id)) {
            full.turn(|turn| turn.on_fetched(tag));
        }
    }

    /// Handles the end of the connection: queued work requests will not be posted.
    fn on_disconnected(&mut self) -> Result<(), ProtocolError> {
        self.phase = TargetPhase::Over;
        self.inbox.clear();
        let result = self.session.on_end(self.session.now);
        self.session.sender().clear();
        while let IscsiPhase::Full(full) = &mut self.session.phase
            && let Some(tag) = full.transfers().and_then(TargetMover::abandon_read)
        {
            full.turn(|turn| turn.on_fetched(tag));
        }
        result
    }

    /// Posts RDMA Reads and sends queued messages; returns whether anything was posted.
    #[inline]
    fn transmit(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let is_closing = matches!(self.session.demand(), Demand::Close);
        let full = match &mut self.session.phase {
            IscsiPhase::Full(full) => full,
            IscsiPhase::Login(_) | IscsiPhase::Closing => {
                return self.session.sender.send_all(queue_pair, |_| true);
            }
        };
        let limit = full.connection.parameters.get(OperationalKey::MaxOutstandingUnexpectedPDUs);
        let ResponseSender { sender, mover: Some(datamover), .. } = &mut full.connection.replies else {
            return false;
        };
        let Some(messages) = sender.messages() else { return false };
        datamover.transfers.transmit(queue_pair, messages, |message| {
            // At the end there is nothing to wait for.
            self.unexpected.admits(&message.bhs, limit) || is_closing
        })
    }

    /// Fails the connection if no RDMA Read completes for a minute while an abort, a logout or the
    /// end of the connection waits for one.
    fn check_reads(&mut self, now: Instant) -> Result<(), ProtocolError> {
        let IscsiPhase::Full(full) = &mut self.session.phase else { return Ok(()) };
        let is_stuck = full.transfers().is_some_and(|transfers| transfers.is_stuck(now));
        if is_stuck && full.waits_for_reads() { Err(READ_STALLED) } else { Ok(()) }
    }
}

impl RdmaSession for IserTargetSession {
    fn endpoint(&self) -> Endpoint {
        endpoint(RECEIVES, RECEIVE_LEN, SENDS)
    }

    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        self.session.now = now;
        if let IscsiPhase::Full(full) = &mut self.session.phase {
            full.set_now(now);
        }
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        match event {
            Event::Requested { private_data, reads } => self.on_requested(&private_data, reads)?,
            Event::Received { message, .. } => {
                self.take_messages()?;
                if !self.inbox.is_empty() || !self.take(&message)? {
                    // The message is in a shared buffer, so it is copied.
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
        if !self.phase.is_open() {
            let is_stopping = matches!(self.session.demand(), Demand::Close);
            return self.phase.answer(queue_pair, is_stopping);
        }
        let receives = std::mem::take(&mut self.receives);
        if receives > 0 {
            queue_pair.receive(receives);
        }
        let has_sent = self.transmit(queue_pair);
        let waits = self.inbox.len();
        self.resume();
        if self.session.sender().is_empty() && matches!(self.session.demand(), Demand::Close) {
            self.phase.disconnect(queue_pair);
            return true;
        }
        receives > 0 || has_sent || self.inbox.len() < waits
    }
}

impl Timed for IserTargetSession {
    fn poll_timeout(&self) -> Option<Instant> {
        // Messages processed during `work` may have queued I/O, so the driver must call again.
        let has_io = matches!(&self.session.phase, IscsiPhase::Full(full) if full.connection.queue.has_io());
        if self.broken.is_some() || has_io {
            return Some(self.session.now);
        }
        let watched = match &self.session.phase {
            IscsiPhase::Full(full) => full.connection.replies.mover.as_ref(),
            IscsiPhase::Login(_) | IscsiPhase::Closing => None,
        };
        let watched = watched.and_then(|datamover| datamover.transfers.check_at(self.session.now));
        watched.into_iter().chain(self.session.poll_timeout()).min()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        self.session.on_timeout(now)?;
        self.check_reads(now)?;
        self.post_unsolicited_buffers()?;
        self.take_messages()
    }
}

impl IoSource for IserTargetSession {
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

    fn charge(&mut self, io: &Io) -> Charge {
        self.session.charge(io)
    }

    #[inline]
    fn begin(&mut self, volume: VolumeId, io: &Io, is_late: bool) -> Result<(), NotAdmitted<IoError>> {
        let admitted = self.session.begin(volume, io, is_late);
        if matches!(admitted, Err(NotAdmitted::Denied(_))) {
            self.resume();
        }
        admitted
    }
}

impl TargetLifecycle for IserTargetSession {
    type Source = Self;

    #[inline]
    fn source(&mut self) -> &mut Self {
        self
    }

    fn protocol(&self) -> Option<&'static str> {
        Some("iser")
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

/// Unexpected PDUs that an initiator may send in addition to commands and data: task management,
/// NOP-Out, text, logout.
const MAX_UNEXPECTED: u32 = 32;

const RECEIVES: u32 = 2 * WINDOW + MAX_IMMEDIATE as u32 + MAX_UNEXPECTED;

const RECEIVE_LEN: u32 = (HEADERS_LEN + MAX_AHS) as u32 + DEFAULT_DATA_SEGMENT_LENGTH;

/// Depth of the send queue: a write and a response for each command, and as many other PDUs.
const SENDS: u32 = 4 * WINDOW;

const HELLO_REQUIRED: ProtocolError = ProtocolError {
    what: "declared iSERHelloRequired=Yes; Hello messages are not supported",
    reference: "RFC 7145 §6.7",
};
