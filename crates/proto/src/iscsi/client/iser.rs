//! The initiator over a queue pair: iSER (RFC 7145).
//!
//! [`InitiatorSession::over_rdma`] makes a session whose connections are queue pairs: login,
//! commands, their numbers, pings and the end are the same; what a command moves, the target
//! fetches and brings by itself (`full`, `datamover`). [`IscsiDiscoverySession::over_rdma`] asks
//! for targets in messages.
//!
//! There are as many receive buffers as commands may be under way on a connection, and
//! [`UNEXPECTED`] for what a target may say without being asked.

use super::datamover::MAX_COMMANDS;
use super::{Config, InitiatorSession, IscsiDiscoverySession, SessionConnection};
use crate::iscsi::iser::{HEADERS_LEN, MAX_AHS, Message};
use crate::iscsi::login::chap::SEED_LEN;
use crate::iscsi::login::operational::{DEFAULT_DATA_SEGMENT_LENGTH, OperationalKey};
use crate::iscsi::name::Name;
use crate::iscsi::node::Chap;
use crate::rdma::{Endpoint, Event, QueuePair, RdmaConnections, RdmaSession, Stag};
use crate::session::{Demand, ProtocolError, StreamSession};
use blockmux_volume::{Chunk, Pool, Seg};
use blockmux_wire::iser::{CmHeader, HEADER_LEN, NO_ZERO_BASED_ADDRESSES};
use std::time::Instant;
use zerocopy::IntoBytes;

impl InitiatorSession {
    /// As [`InitiatorSession::new`], on a queue pair: it is driven by [`RdmaConnections`] alone.
    #[must_use]
    pub fn over_rdma(config: Config, pool: Pool, seed: [u8; SEED_LEN], now: Instant) -> InitiatorSession {
        let mut session = InitiatorSession::build(config, pool, seed, now, true);
        session.set_connected(0, true);
        session
    }

    /// Whether a connection over RDMA has a queue pair, and its end was not asked for.
    pub(super) fn set_connected(&mut self, index: usize, is_connected: bool) {
        if let Some(mover) = self.connections.get_mut(index).and_then(|connection| connection.mover.as_mut())
        {
            mover.is_connected = is_connected;
        }
    }
}

impl RdmaConnections for InitiatorSession {
    fn endpoint(&self) -> Endpoint {
        endpoint(MAX_COMMANDS)
    }

    #[inline]
    fn connection(&mut self, index: usize) -> impl RdmaSession {
        SessionConnection { session: self, index }
    }
}

impl SessionConnection<'_> {
    #[inline]
    fn on_received(
        &mut self,
        message: &Seg,
        invalidated: Option<Stag>,
        now: Instant,
    ) -> Result<(), ProtocolError> {
        let SessionConnection { session, index } = self;
        let Some(connection) = session.connections.get_mut(*index) else { return Ok(()) };
        let parsed = Message::parse(message)?;
        if let Some(mover) = &mut connection.mover {
            mover.receives = mover.receives.saturating_add(1);
            mover.unexpected.on_pdu(&parsed.bhs);
        }
        match &mut session.full {
            Some(full) if connection.is_connected() => {
                if full.is_over() {
                    return Ok(());
                }
                full.on_message(connection, &parsed, invalidated)?;
            }
            _ => {
                session.on_login_bytes(*index, &pdu_of(message), now)?;
            }
        }
        self.go_on();
        Ok(())
    }

    /// Does what has become possible.
    #[inline]
    fn go_on(&mut self) {
        if let Some(full) = &mut self.session.full {
            full.advance(&mut self.session.connections);
        }
        self.session.look_at_unit();
    }

    /// Ends commands whose memory the queue pair has closed since. What a response has broken that
    /// had to wait for that, the next call tells that can.
    #[inline]
    fn end_closed(&mut self) {
        let SessionConnection { session, index } = self;
        let (Some(full), Some(connection)) = (&mut session.full, session.connections.get_mut(*index)) else {
            return;
        };
        match full.end_closed(connection) {
            Ok(false) => {}
            Ok(true) => self.go_on(),
            Err(error) => {
                connection.ticks.next = full.now();
                if let Some(mover) = &mut connection.mover {
                    mover.broken.get_or_insert(error);
                }
            }
        }
    }

    /// What is broken and was not told.
    #[inline]
    pub(super) fn take_broken(&mut self) -> Result<(), ProtocolError> {
        let mover =
            self.session.connections.get_mut(self.index).and_then(|connection| connection.mover.as_mut());
        mover.and_then(|mover| mover.broken.take()).map_or(Ok(()), Err)
    }
}

impl RdmaSession for SessionConnection<'_> {
    fn endpoint(&self) -> Endpoint {
        endpoint(MAX_COMMANDS)
    }

    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        if let Some(full) = &mut self.session.full {
            full.set_now(now);
        }
        self.take_broken()?;
        match event {
            Event::Received { message, invalidated } => self.on_received(&message, invalidated, now),
            Event::Registered { id, remote } => {
                let SessionConnection { session, index } = self;
                let connection = session.connections.get_mut(*index);
                if let (Some(full), Some(connection)) = (&mut session.full, connection) {
                    full.on_registered(connection, id, remote);
                }
                Ok(())
            }
            Event::Refused { .. } => {
                self.session.set_connected(self.index, false);
                Err(REFUSED)
            }
            Event::Disconnected => {
                self.session.set_connected(self.index, false);
                self.on_end(now)
            }
            // Work that fails ends the connection, which is told by itself.
            Event::Requested { .. } | Event::Connected { .. } | Event::Done { .. } => Ok(()),
        }
    }

    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        self.end_closed();
        let is_closing = matches!(self.demand(), Demand::Close);
        let disconnects =
            is_closing && !self.session.full.as_ref().is_some_and(|full| full.awaits_disconnect());
        let InitiatorSession { full, connections, parameters, .. } = &mut *self.session;
        let limit = parameters.as_ref().map_or(0, |agreed| agreed.get(LIMIT));
        let Some(connection) = connections.get_mut(self.index) else { return false };
        let is_flooded = connection.is_flooded();
        let Some(mover) = connection.mover.as_mut().filter(|mover| mover.is_connected) else { return false };
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
            has_moved |=
                connection.sender.send_all(queue_pair, |bhs| unexpected.admits(bhs, limit) || is_closing);
        }
        if connection.sender.is_empty() && disconnects {
            queue_pair.disconnect();
            mover.is_connected = false;
            has_moved = true;
        }
        has_moved
    }
}

impl IscsiDiscoverySession {
    /// As [`IscsiDiscoverySession::new`], on a queue pair: it is driven as an [`RdmaSession`]
    /// alone.
    #[must_use]
    pub fn over_rdma(
        initiator: Name,
        chap: Option<Chap>,
        isid: [u8; 6],
        seed: [u8; SEED_LEN],
        now: Instant,
    ) -> IscsiDiscoverySession {
        IscsiDiscoverySession::build(initiator, chap, isid, seed, now, true)
    }
}

impl RdmaSession for IscsiDiscoverySession {
    fn endpoint(&self) -> Endpoint {
        endpoint(1)
    }

    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        match event {
            Event::Received { message, .. } => {
                Message::parse(&message)?;
                self.receives = self.receives.saturating_add(1);
                self.on_bytes(&Chunk::from_slice(&pdu_of(&message)), now).map(|_| ())
            }
            Event::Refused { .. } => {
                self.is_connected = false;
                Err(REFUSED)
            }
            Event::Disconnected => {
                self.is_connected = false;
                self.on_end(now)
            }
            _ => Ok(()),
        }
    }

    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        if !self.is_connected {
            return false;
        }
        let mut has_moved = self.receives > 0;
        queue_pair.receive(std::mem::take(&mut self.receives));
        has_moved |= self.sender.send_all(queue_pair, |_| true);
        if self.sender.is_empty() && matches!(self.demand(), Demand::Close) {
            queue_pair.disconnect();
            self.is_connected = false;
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

const LIMIT: OperationalKey = OperationalKey::MaxOutstandingUnexpectedPDUs;

/// What a target may send beside responses: pings, events, rejects.
const UNEXPECTED: u32 = 32;

/// RDMA Reads that the target may have on their way.
const READS: u32 = 32;

const RECEIVE_LEN: u32 = (HEADERS_LEN + MAX_AHS) as u32 + DEFAULT_DATA_SEGMENT_LENGTH;
