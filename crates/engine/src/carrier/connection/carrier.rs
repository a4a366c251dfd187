//! A byte stream as the carrier of a target's session.

use super::{Broken, Connection, Inflow};
use crate::carrier::{Awaited, Carrier};
use crate::net::host::{ByteStream, Host, StreamEnd};
use blockmux_proto::driver::session::{Demand, StreamSession};
use std::sync::Arc;

impl<S: StreamSession, H: Host> Carrier<S> for Connection<H> {
    type Host = H;
    type Handle = H::Stream;

    #[inline]
    fn receive(&mut self, session: &mut S) -> Result<Inflow, Broken> {
        Connection::receive(self, session)
    }

    #[inline]
    fn send(&mut self, session: &mut S) -> Result<bool, Broken> {
        Connection::send(self, session)
    }

    #[inline]
    fn check_deadline(&mut self, session: &mut S) -> Result<(), Broken> {
        Connection::check_deadline(self, session)
    }

    #[inline]
    fn check_new_deadline(&mut self, session: &mut S) -> Result<(), Broken> {
        Connection::check_new_deadline(self, session)
    }

    fn park(&mut self) {
        Connection::park(self);
    }

    fn end(&mut self, session: &mut S) {
        self.end_session(session);
    }

    fn close(&mut self) {
        Connection::close(self);
    }

    fn hand_over(&mut self) -> (H::Stream, Vec<u8>) {
        let unread = self.chunk.take().map(|chunk| chunk.unread().to_vec());
        (self.stream.share(), unread.unwrap_or_default())
    }

    #[inline]
    fn awaits(&self, session: &S) -> Awaited {
        match session.demand() {
            Demand::Bytes(wanted) if wanted <= MAX_HEAD => Awaited::Message,
            Demand::Bytes(_) | Demand::Place(_) => Awaited::Rest,
            Demand::StartTls => Awaited::Message,
            Demand::Nothing => Awaited::Nothing,
            Demand::Close => Awaited::End,
        }
    }

    #[inline]
    fn has_output(&self, session: &mut S) -> bool {
        Connection::has_output(self, session)
    }

    fn drop_output(&mut self, session: &mut S) {
        session.outbox().clear();
    }

    fn end_handshake(&mut self, session: &mut S) {
        session.outbox().release();
    }

    fn peer(&self) -> Arc<str> {
        self.stream.shared_peer()
    }

    fn is_abandoned(&self) -> bool {
        self.ended != StreamEnd::Not && self.is_blocked
    }

    fn is_secured(&self) -> bool {
        self.secure.as_ref().is_some_and(|secure| secure.is_in_use())
    }

    #[inline]
    fn transferred_bytes(&self) -> u64 {
        self.transferred_bytes
    }

    fn moved_bytes(&self) -> u64 {
        self.transferred_bytes.saturating_sub(self.stream.unacknowledged() as u64)
    }
}

/// A session that waits for more bytes than this waits for the rest of a message, not for a header.
const MAX_HEAD: usize = 64;
