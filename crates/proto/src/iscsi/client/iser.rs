//! The initiator over a queue pair: iSER (RFC 7145).
//!
//! In an [`IscsiInitiatorSession::over_rdma`] the only connection is a queue pair. Login, commands,
//! numbering, pings and logout are the same as over TCP; the target transfers the data of commands
//! by RDMA (`full`, `datamover`). [`IscsiDiscoverySession::over_rdma`] sends its requests as
//! messages.
//!
//! Receive buffers are posted for the maximum number of commands in flight, and [`MAX_UNEXPECTED`]
//! for unexpected PDUs of the target.

use super::datamover::{InitiatorDatamover, MAX_COMMANDS};
use super::{IscsiDiscoverySession, IscsiInitiatorConfig, IscsiInitiatorSession, SessionConnection};
use crate::driver::session::{Demand, ProtocolError, StreamSession};
use crate::iscsi::iser::{HEADERS_LEN, IserMessage, MAX_AHS};
use crate::iscsi::login::chap::SEED_LEN;
use crate::iscsi::login::operational::{DEFAULT_DATA_SEGMENT_LENGTH, OperationalKey};
use crate::iscsi::name::Name;
use crate::iscsi::node::Chap;
use crate::rdma::{Endpoint, Event, QueuePair, RdmaConnections, RdmaSession, Stag};
use blockmux_volume::{Chunk, Pool, Seg};
use blockmux_wire::iser::{CmHeader, HEADER_LEN, NO_REMOTE_INVALIDATION, NO_ZERO_BASED_ADDRESSES};
use std::time::Instant;
use zerocopy::IntoBytes;

impl IscsiInitiatorSession {
    /// A session on a queue pair, driven through [`RdmaConnections`] only: see
    /// [`IscsiInitiatorSession::new`].
    #[must_use]
    pub fn over_rdma(
        config: IscsiInitiatorConfig,
        pool: Pool,
        seed: [u8; SEED_LEN],
        now: Instant,
    ) -> IscsiInitiatorSession {
        let mut session = IscsiInitiatorSession::build(config, pool, seed, now, true);
        session.set_connected(0, true);
        session
    }

    /// Sets whether the queue pair of a connection is connected and no disconnect was requested.
    pub(super) fn set_connected(&mut self, index: usize, is_connected: bool) {
        if let Some(mover) = self.connections.get_mut(index).and_then(|connection| connection.mover.as_mut())
        {
            mover.is_connected = is_connected;
        }
    }
}

impl RdmaConnections for IscsiInitiatorSession {
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
        written: Option<Seg>,
        now: Instant,
    ) -> Result<(), ProtocolError> {
        let SessionConnection { session, index } = self;
        let Some(connection) = session.connections.get_mut(*index) else { return Ok(()) };
        let parsed = IserMessage::parse(message)?;
        if let Some(mover) = &mut connection.mover {
            mover.receives = mover.receives.saturating_add(1);
            mover.unexpected.on_pdu(&parsed.bhs);
        }
        match &mut session.full {
            Some(full) if connection.is_connected() => {
                if full.is_over() {
                    return Ok(());
                }
                full.on_message(connection, &parsed, invalidated, written)?;
            }
            _ => {
                session.on_login_bytes(*index, &pdu_of(message), now)?;
            }
        }
        self.after_event();
        Ok(())
    }

    /// Continues after an event.
    #[inline]
    fn after_event(&mut self) {
        if let Some(full) = &mut self.session.full {
            full.advance(&mut self.session.connections);
        }
        self.session.check_bring_up();
    }

    /// Ends commands whose memory was invalidated. The next call returns an error of a delayed
    /// response.
    #[inline]
    fn end_invalidated(&mut self) {
        let SessionConnection { session, index } = self;
        let (Some(full), Some(connection)) = (&mut session.full, session.connections.get_mut(*index)) else {
            return;
        };
        match full.end_invalidated(connection) {
            Ok(false) => {}
            Ok(true) => self.after_event(),
            Err(error) => {
                connection.keep_alive.next = full.now();
                if let Some(mover) = &mut connection.mover {
                    mover.pending_error.get_or_insert(error);
                }
            }
        }
    }

    /// Returns the pending error of a delayed response, if any.
    #[inline]
    pub(super) fn take_pending_error(&mut self) -> Result<(), ProtocolError> {
        self.mover().and_then(|mover| mover.pending_error.take()).map_or(Ok(()), Err)
    }

    #[inline]
    fn mover(&mut self) -> Option<&mut InitiatorDatamover> {
        self.session.connections.get_mut(self.index)?.mover.as_deref_mut()
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
        self.take_pending_error()?;
        match event {
            Event::Received { message, invalidated, written } => {
                self.on_received(&message, invalidated, written, now)
            }
            Event::Registered { id, remote } => {
                if let Some(mover) = self.mover() {
                    mover.commands.on_registered(id, remote);
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
            // Failed work requests end the connection, which is reported separately.
            Event::Requested { .. } | Event::Connected { .. } | Event::Done { .. } => Ok(()),
        }
    }

    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        self.end_invalidated();
        let is_closing = matches!(self.demand(), Demand::Close);
        let disconnects =
            is_closing && !self.session.full.as_ref().is_some_and(|full| full.awaits_disconnect());
        let IscsiInitiatorSession { connections, parameters, full, .. } = &mut *self.session;
        let limit = parameters.as_ref().map_or(0, |agreed| agreed.get(LIMIT));
        let Some(connection) = connections.get_mut(self.index) else { return false };
        let has_unsent_replies = connection.has_unsent_replies();
        let Some(mover) = connection.mover.as_mut().filter(|mover| mover.is_connected) else { return false };
        let mut has_progress = mover.receives > 0 && !has_unsent_replies;
        if has_progress {
            queue_pair.receive(std::mem::take(&mut mover.receives));
        }
        while let Some(ended) = mover.commands.invalidate_next(queue_pair) {
            mover.invalidated.push_back(ended);
            has_progress = true;
        }
        // There are no commands before the login.
        if let Some(full) = full {
            has_progress |= mover.commands.send(queue_pair, u32::MAX, full.memory());
        }
        // Other PDUs may refer to commands, so they follow them.
        if mover.commands.has_sent_all() || is_closing {
            let unexpected = &mut mover.unexpected;
            has_progress |=
                connection.sender.send_all(queue_pair, |bhs| unexpected.admits(bhs, limit) || is_closing);
        }
        if connection.sender.is_empty() && disconnects {
            queue_pair.disconnect();
            mover.is_connected = false;
            has_progress = true;
        }
        has_progress
    }
}

impl IscsiDiscoverySession {
    /// A discovery session on a queue pair, driven as an [`RdmaSession`] only: see
    /// [`IscsiDiscoverySession::new`].
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
                IserMessage::parse(&message)?;
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
        let mut has_progress = self.receives > 0;
        queue_pair.receive(std::mem::take(&mut self.receives));
        has_progress |= self.sender.send_all(queue_pair, |_| true);
        if self.sender.is_empty() && matches!(self.demand(), Demand::Close) {
            queue_pair.disconnect();
            self.is_connected = false;
            has_progress = true;
        }
        has_progress
    }
}

/// Queue pair parameters for this many commands in flight.
fn endpoint(commands: u32) -> Endpoint {
    let header = |flags| CmHeader { flags, reserved: [0; 3] }.as_bytes().to_vec();
    Endpoint {
        receives: commands.saturating_add(MAX_UNEXPECTED),
        receive_len: RECEIVE_LEN,
        sends: commands.saturating_add(MAX_UNEXPECTED),
        reads: READS,
        regions: commands,
        private_data: header(NO_ZERO_BASED_ADDRESSES),
        without_invalidation: Some(header(NO_ZERO_BASED_ADDRESSES | NO_REMOTE_INVALIDATION)),
    }
}

/// The PDU of a message, padded as in a stream.
fn pdu_of(message: &Seg) -> Vec<u8> {
    let mut pdu = message.to_vec();
    pdu.drain(..HEADER_LEN.min(pdu.len()));
    pdu.resize(pdu.len().next_multiple_of(4), 0);
    pdu
}

const REFUSED: ProtocolError = ProtocolError {
    what: "refused the RDMA connection: no iSER target listens there",
    reference: "RFC 7145 §5.1",
};

const LIMIT: OperationalKey = OperationalKey::MaxOutstandingUnexpectedPDUs;

/// Unexpected PDUs of a target: pings, asynchronous messages, rejects.
const MAX_UNEXPECTED: u32 = 32;

/// Maximum number of RDMA Reads by the target.
const READS: u32 = 32;

const RECEIVE_LEN: u32 = (HEADERS_LEN + MAX_AHS) as u32 + DEFAULT_DATA_SEGMENT_LENGTH;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_learns_whether_it_should_invalidate_keys() {
        let endpoint = endpoint(1);
        let invalidates = |data: &[u8]| CmHeader::of(data).map(|header| header.invalidates());
        assert_eq!(invalidates(&endpoint.private_data), Some(true));
        assert_eq!(endpoint.without_invalidation.as_deref().and_then(invalidates), Some(false));
    }
}
