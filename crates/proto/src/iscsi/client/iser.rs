//! The initiator over a queue pair: iSER (RFC 7145).
//!
//! [`IserInitiatorSession`] is [`InitiatorSession`] whose connections are queue pairs: login, commands, their numbers, pings
//! and the end are the same; what a command moves, the target fetches and brings by itself (`full`, `datamover`).
//! [`IserDiscoverySession`] is [`DiscoverySession`] in messages.
//!
//! There are as many receive buffers as commands may be under way on a connection, and [`UNEXPECTED`] for what a target may
//! say without being asked.

use super::datamover::MAX_COMMANDS;
use super::{Config, DiscoverySession, InitiatorSession, SessionConnection};
use crate::iscsi::iser::{HEADERS_LEN, MAX_AHS, Message};
use crate::iscsi::login::chap::SEED_LEN;
use crate::iscsi::login::operational::{DEFAULT_DATA_SEGMENT_LENGTH, Key};
use crate::iscsi::name::Name;
use crate::iscsi::node::Chap;
use crate::rdma::{Endpoint, Event, QueuePair, RdmaConnections, RdmaSession, Stag};
use crate::session::{
    Connections, Demand, Initiator, Overdue, PathRank, ProtocolError, StreamSession, Timed,
};
use blockmux_volume::{Chunk, Completion, Io, Pool, Seg};
use blockmux_wire::iser::{CmHeader, HEADER_LEN, NO_ZERO_BASED_ADDRESSES};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// One session with a target over RDMA, over one connection or several.
pub struct IserInitiatorSession {
    session: InitiatorSession,
    /// Of each lane: whether it has a connection, and its end was not asked for.
    is_open: Vec<bool>,
    /// What a response has broken whose command had to wait; the next call that can say so does.
    broken: Option<ProtocolError>,
    /// When the latest call came.
    now: Instant,
}

impl IserInitiatorSession {
    /// A session as [`InitiatorSession::new`] makes it, on a queue pair.
    #[must_use]
    pub fn new(config: Config, pool: Pool, seed: [u8; SEED_LEN], now: Instant) -> IserInitiatorSession {
        let session = InitiatorSession::build(config, pool, seed, now, true);
        IserInitiatorSession { session, is_open: vec![true], broken: None, now }
    }

    /// As [`InitiatorSession::with_other_paths`].
    #[must_use]
    pub fn with_other_paths(mut self) -> IserInitiatorSession {
        self.session = self.session.with_other_paths();
        self
    }

    /// What it is over TCP, to be asked about the unit and the login.
    #[must_use]
    pub fn session(&self) -> &InitiatorSession {
        &self.session
    }
}

/// One connection of a session, as its driver has it.
struct IserConnection<'a> {
    session: SessionConnection<'a>,
    is_open: Option<&'a mut bool>,
    broken: &'a mut Option<ProtocolError>,
    now: &'a mut Instant,
}

impl RdmaConnections for IserInitiatorSession {
    fn endpoint(&self) -> Endpoint {
        endpoint(MAX_COMMANDS)
    }

    #[inline]
    fn connection(&mut self, connection: usize) -> impl RdmaSession {
        let IserInitiatorSession { session, is_open, broken, now } = self;
        let session = SessionConnection { session, connection };
        IserConnection { session, is_open: is_open.get_mut(connection), broken, now }
    }
}

impl IserConnection<'_> {
    fn set_open(&mut self, is_open: bool) {
        if let Some(place) = &mut self.is_open {
            **place = is_open;
        }
    }

    #[inline]
    fn on_received(&mut self, message: &Seg, invalidated: Option<Stag>) -> Result<(), ProtocolError> {
        let SessionConnection { session, connection } = &mut self.session;
        let Some(lane) = session.lanes.get_mut(*connection) else { return Ok(()) };
        let parsed = Message::parse(message)?;
        if let Some(mover) = &mut lane.mover {
            mover.receives = mover.receives.saturating_add(1);
            mover.unexpected.on_pdu(&parsed.bhs);
        }
        match &mut session.full {
            Some(full) if lane.is_connected() => {
                if full.is_over() {
                    return Ok(());
                }
                full.on_message(lane, &parsed, invalidated)?;
            }
            _ => {
                session.on_login_bytes(*connection, &pdu_of(message), *self.now)?;
            }
        }
        self.go_on();
        Ok(())
    }

    /// Does what has become possible.
    #[inline]
    fn go_on(&mut self) {
        let session = &mut *self.session.session;
        if let Some(full) = &mut session.full {
            full.advance(&mut session.lanes);
        }
        session.look_at_unit();
    }

    /// Ends commands whose memory the queue pair has closed since.
    #[inline]
    fn end_closed(&mut self) {
        let SessionConnection { session, connection } = &mut self.session;
        let (Some(full), Some(lane)) = (&mut session.full, session.lanes.get_mut(*connection)) else {
            return;
        };
        match full.end_closed(lane) {
            Ok(false) => {}
            Ok(true) => self.go_on(),
            Err(error) => {
                self.broken.get_or_insert(error);
            }
        }
    }
}

impl RdmaSession for IserConnection<'_> {
    fn endpoint(&self) -> Endpoint {
        endpoint(MAX_COMMANDS)
    }

    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        *self.now = now;
        if let Some(full) = &mut self.session.session.full {
            full.set_now(now);
        }
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        match event {
            Event::Received { message, invalidated } => self.on_received(&message, invalidated),
            Event::Registered { id, remote } => {
                let SessionConnection { session, connection } = &mut self.session;
                let lane = session.lanes.get_mut(*connection);
                if let (Some(full), Some(lane)) = (&mut session.full, lane) {
                    full.on_registered(lane, id, remote);
                }
                Ok(())
            }
            Event::Refused { .. } => {
                self.set_open(false);
                Err(REFUSED)
            }
            Event::Disconnected => {
                self.set_open(false);
                self.session.on_end(now)
            }
            // Work that fails ends the connection, which is told by itself.
            Event::Requested { .. } | Event::Connected { .. } | Event::Done { .. } => Ok(()),
        }
    }

    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        self.end_closed();
        if !self.is_open.as_deref().is_some_and(|is_open| *is_open) {
            return false;
        }
        let is_closing = matches!(self.session.demand(), Demand::Close);
        let limit = self.session.session.parameters.as_ref().map_or(0, |agreed| agreed.get(LIMIT));
        let SessionConnection { session, connection } = &mut self.session;
        let InitiatorSession { full, lanes, .. } = &mut **session;
        let Some(lane) = lanes.get_mut(*connection) else { return false };
        let is_flooded = lane.is_flooded();
        let Some(mover) = &mut lane.mover else { return false };
        let mut has_moved = mover.receives > 0 && !is_flooded;
        if has_moved {
            queue_pair.receive(std::mem::take(&mut mover.receives));
        }
        has_moved |= mover.close_memory(queue_pair);
        while let Some((key, opened)) = mover.open_memory(queue_pair) {
            has_moved = true;
            if let (Some(full), Some(stag)) = (full.as_mut(), opened) {
                full.on_opened(key, stag);
            }
        }
        has_moved |= mover.send_commands(queue_pair);
        // What is asked of a command, or of all of them, follows it.
        if mover.has_sent_commands() || is_closing {
            let unexpected = &mut mover.unexpected;
            has_moved |= lane.sender.send_all(queue_pair, |bhs| unexpected.admits(bhs, limit) || is_closing);
        }
        if lane.sender.is_empty() && is_closing {
            queue_pair.disconnect();
            self.set_open(false);
            has_moved = true;
        }
        has_moved
    }
}

impl Timed for IserConnection<'_> {
    fn poll_timeout(&self) -> Option<Instant> {
        self.broken.map(|_| *self.now).or_else(|| self.session.poll_timeout())
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        *self.now = now;
        match self.broken.take() {
            Some(error) => Err(error),
            None => self.session.on_timeout(now),
        }
    }
}

impl Initiator for IserInitiatorSession {
    fn is_ready(&self) -> bool {
        self.session.is_ready()
    }

    #[inline]
    fn room(&self) -> usize {
        self.session.room()
    }

    #[inline]
    fn submit(&mut self, io: Io) {
        self.session.submit(io);
    }

    #[inline]
    fn poll_done(&mut self) -> Option<Completion> {
        self.session.poll_done()
    }

    #[inline]
    fn poll_returned(&mut self) -> Option<Io> {
        self.session.poll_returned()
    }

    /// The queue pairs are gone, and with them every way that a target had to what is handed back.
    fn take_unfinished(&mut self) -> Vec<Io> {
        self.session.lanes.iter_mut().for_each(|lane| lane.mover = Some(Box::default()));
        self.is_open.fill(false);
        self.session.take_unfinished()
    }

    fn poll_size(&mut self) -> Option<u64> {
        self.session.poll_size()
    }

    fn resize(&mut self, size: u64) {
        self.session.resize(size);
    }

    #[inline]
    fn path_rank(&self) -> PathRank {
        self.session.path_rank()
    }

    fn on_stop(&mut self) {
        self.session.on_stop();
    }
}

impl Overdue for IserInitiatorSession {
    fn look(&mut self) -> u32 {
        self.session.look()
    }

    fn abort_overdue(&mut self, looks: u32) -> Option<&'static str> {
        self.session.abort_overdue(looks)
    }
}

impl Connections for IserInitiatorSession {
    #[inline]
    fn poll_connect(&mut self) -> Option<(usize, Instant)> {
        self.session.poll_connect()
    }

    fn on_connected(&mut self, connection: usize, now: Instant) {
        self.is_open.resize(self.is_open.len().max(connection.saturating_add(1)), false);
        self.is_open.get_mut(connection).into_iter().for_each(|place| *place = true);
        self.session.on_connected(connection, now);
    }

    fn on_lost(&mut self, connection: usize, now: Instant) -> bool {
        self.is_open.get_mut(connection).into_iter().for_each(|place| *place = false);
        self.session.on_lost(connection, now)
    }

    #[inline]
    fn latest(&self) -> usize {
        self.session.latest()
    }

    #[inline]
    fn is_awaited(&self, connection: usize) -> bool {
        self.session.is_awaited(connection)
    }

    fn reconnects_after(&self) -> Duration {
        self.session.reconnects_after()
    }
}

/// Asks a portal for all its targets over RDMA, and leaves.
pub struct IserDiscoverySession {
    session: DiscoverySession,
    /// Receive buffers to give back.
    receives: u32,
    is_open: bool,
}

impl IserDiscoverySession {
    /// A session as [`DiscoverySession::new`] makes it, on a queue pair.
    #[must_use]
    pub fn new(
        initiator: Name,
        chap: Option<Chap>,
        isid: [u8; 6],
        seed: [u8; SEED_LEN],
        now: Instant,
    ) -> IserDiscoverySession {
        let session = DiscoverySession::build(initiator, chap, isid, seed, now, true);
        IserDiscoverySession { session, receives: 0, is_open: true }
    }

    /// What it is over TCP, to be asked for what it has found.
    #[must_use]
    pub fn session(&self) -> &DiscoverySession {
        &self.session
    }
}

impl Timed for IserDiscoverySession {
    fn poll_timeout(&self) -> Option<Instant> {
        self.session.poll_timeout()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.session.on_timeout(now)
    }
}

impl RdmaSession for IserDiscoverySession {
    fn endpoint(&self) -> Endpoint {
        endpoint(1)
    }

    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        match event {
            Event::Received { message, .. } => {
                Message::parse(&message)?;
                self.receives = self.receives.saturating_add(1);
                self.session.on_bytes(&Chunk::from_slice(&pdu_of(&message)), now).map(|_| ())
            }
            Event::Refused { .. } => {
                self.is_open = false;
                Err(REFUSED)
            }
            Event::Disconnected => {
                self.is_open = false;
                self.session.on_end(now)
            }
            _ => Ok(()),
        }
    }

    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        if !self.is_open {
            return false;
        }
        let mut has_moved = self.receives > 0;
        queue_pair.receive(std::mem::take(&mut self.receives));
        has_moved |= self.session.sender().send_all(queue_pair, |_| true);
        if self.session.sender().is_empty() && matches!(self.session.demand(), Demand::Close) {
            queue_pair.disconnect();
            self.is_open = false;
            has_moved = true;
        }
        has_moved
    }
}

/// A connection with so many commands under way.
fn endpoint(commands: u32) -> Endpoint {
    let header = CmHeader { flags: NO_ZERO_BASED_ADDRESSES, reserved: [0; 3] };
    Endpoint {
        receives: commands.saturating_add(UNEXPECTED),
        receive_len: RECEIVE_LEN,
        sends: commands.saturating_add(UNEXPECTED),
        reads: READS,
        regions: commands,
        private_data: header.as_bytes().to_vec(),
    }
}

/// The PDU in a message, padded as it would be in a stream.
fn pdu_of(message: &Seg) -> Vec<u8> {
    let mut pdu = message.to_vec();
    pdu.drain(..HEADER_LEN.min(pdu.len()));
    pdu.resize(pdu.len().next_multiple_of(4), 0);
    pdu
}

const REFUSED: ProtocolError = ProtocolError {
    what: "refused the RDMA connection: nobody serves iSER there",
    reference: "RFC 7145 §5.1",
};

const LIMIT: Key = Key::MaxOutstandingUnexpectedPDUs;

/// What a target may send beside responses: pings, events, rejects.
const UNEXPECTED: u32 = 32;

/// RDMA Reads that the target may have on their way.
const READS: u32 = 32;

const RECEIVE_LEN: u32 = (HEADERS_LEN + MAX_AHS) as u32 + DEFAULT_DATA_SEGMENT_LENGTH;
