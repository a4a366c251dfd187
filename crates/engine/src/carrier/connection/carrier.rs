//! A byte stream as the carrier of a target's session.

use super::{
    Broken, CHUNK, CLOSED_WITHIN_MESSAGE, Connection, Feed, HEADER_CHUNK, Inflow, MAX_IN_HEADER_CHUNK,
    SENDS_PER_TURN, SHORT_CHUNK,
};
use crate::carrier::{Awaited, Carrier};
use crate::net::host::{ByteStream, Host, StreamEnd};
use blockmux_proto::driver::session::{Demand, StreamSession};
use std::io;
use std::sync::Arc;

impl<S: StreamSession, H: Host> Carrier<S> for Connection<H> {
    type Host = H;
    type Handle = H::Stream;

    /// Feeds the session what is buffered, receiving once. If the session mostly places payload,
    /// receives again while the socket is not empty, up to the size of a receive buffer: each
    /// placed payload ends a receive, and a turn for each reply would also cost the peer a turn for
    /// each.
    #[inline]
    fn receive(&mut self, session: &mut S) -> Result<Inflow, Broken> {
        let mut inflow = Inflow::Empty;
        let received_before = self.transferred_bytes;
        self.is_blocked = false;
        loop {
            // A client's first message is made by receiving: if TLS begins, that is not left to
            // another turn, for which nothing would wake an owner that sleeps.
            let mut begins_tls = false;
            let (wanted, place) = match self.feed(session)? {
                Feed::Wants(bytes) => (bytes, None),
                Feed::WantsPlaced(list) => (1, Some(list)),
                Feed::StartsTls => {
                    begins_tls = self.start_tls()?;
                    (1, None)
                }
                Feed::Blocked => {
                    self.wants_input = false;
                    self.is_blocked = true;
                    self.check_end()?;
                    return Ok(Inflow::Blocked);
                }
                Feed::Closed => {
                    // Input stays in the socket meanwhile; a wake-up for it would be useless.
                    self.wants_input = false;
                    return Ok(Inflow::Finished);
                }
            };
            self.wants_input = true;
            if self.has_ended {
                return Ok(Inflow::Finished);
            }
            let is_enough = self.transferred_bytes - received_before >= CHUNK as u64;
            let goes_on = inflow == Inflow::More && !is_enough && session.is_mostly_placed();
            if inflow != Inflow::Empty && !goes_on && !begins_tls {
                return Ok(inflow);
            }
            let len = match wanted {
                ..=MAX_IN_HEADER_CHUNK if session.is_mostly_placed() => HEADER_CHUNK,
                _ if self.pool().is_short() => SHORT_CHUNK,
                _ => CHUNK,
            };
            let received = match self.secure {
                Some(ref secure) if !secure.is_plain() => self.receive_secured(session, wanted)?,
                _ => self.receive_once(wanted, place.as_ref(), len)?,
            };
            match received {
                Some(full) => inflow = if full { Inflow::More } else { Inflow::Drained },
                None if self.has_ended => {
                    session.on_end(self.core.now())?;
                    if self.chunk.as_ref().is_some_and(|chunk| !chunk.unread().is_empty()) {
                        return Err(CLOSED_WITHIN_MESSAGE.into());
                    }
                    return Ok(Inflow::Finished);
                }
                None if inflow == Inflow::Empty => return Ok(Inflow::Empty),
                None => return Ok(Inflow::Drained),
            }
        }
    }

    /// Asks the session for more output after each call, because sending frees room.
    #[inline]
    fn send(&mut self, session: &mut S) -> Result<bool, Broken> {
        if let Some(secure) = &mut self.secure
            && !secure.hand_over(&mut self.stream)?
        {
            return self.send_secured(session);
        }
        let mut any = false;
        session.on_send(|| self.core.now());
        for _ in 0..SENDS_PER_TURN {
            let outbox = session.outbox();
            if outbox.is_empty() {
                break;
            }
            match self.send_once(outbox) {
                Ok(sent) => {
                    any = true;
                    self.transferred_bytes += sent as u64;
                }
                Err(Broken::Socket(error)) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(Broken::Socket(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(broken) => return Err(broken),
            }
        }
        self.wants_output = !session.outbox().is_empty();
        Ok(any)
    }

    #[inline]
    fn check_deadline(&mut self, session: &mut S) -> Result<(), Broken> {
        let Some(mut when) = session.poll_timeout() else { return Ok(()) };
        let now = self.core.now();
        if when <= now {
            session.on_timeout(now)?;
            match session.poll_timeout() {
                Some(next) => when = next,
                None => return Ok(()),
            }
        }
        if self.deadline.is_none_or(|armed| when < armed || armed <= now) {
            self.deadline = Some(when);
            self.core.wake_at(when, &self.waker);
        }
        Ok(())
    }

    #[inline]
    fn check_new_deadline(&mut self, session: &mut S) -> Result<(), Broken> {
        match session.poll_timeout() {
            Some(when) if self.deadline.is_none_or(|kept| when != kept) => self.check_deadline(session),
            _ => Ok(()),
        }
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
        session.on_send(|| self.core.now());
        !session.outbox().is_empty()
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
