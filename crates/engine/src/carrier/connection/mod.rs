//! A socket joined with the session that parses and produces its bytes.
//!
//! A poll parses what is buffered, receives, parses that, and later sends everything queued with
//! one gathering call. Data is received into a large [`Chunk`], from which sessions borrow
//! payload without a copy; larger payload is received straight to where the session wants it. An
//! idle connection holds no buffer.
//!
//! A connection may use TLS ([`Secure`]), from its beginning or from when the session demands it;
//! the session is notified when TLS is established and sees plaintext.

mod carrier;
mod secured;
#[cfg(test)]
mod tests;

use crate::carrier::Carrier;
pub use crate::carrier::broken::{Broken, LocalObstacle};
use crate::carrier::tls::Secure;
use crate::core::reactor::EngineCore;
use crate::net::host::{ByteStream, Host, StreamEnd};
use blockmux_proto::driver::session::{Demand, MAX_DEMAND, ProtocolError, StreamSession};
use blockmux_volume::{Chunk, Memory, Pool, SgList, Waker};
use std::io;
use std::rc::Rc;
use std::time::Instant;

/// A stream socket and its receive buffer; the owner holds the session.
pub struct Connection<H: Host = EngineCore> {
    // Declared first, so that it is dropped before the stream is closed.
    watch: H::Watch,
    stream: H::Stream,
    core: Rc<H>,
    waker: Waker,
    /// TLS, if the listener requires or permits it.
    secure: Option<Box<Secure>>,
    chunk: Option<Chunk>,
    /// Bytes received so far of the payload that is placed.
    placed: usize,
    /// Whether [`Connection::park`] must wait for input.
    wants_input: bool,
    wants_output: bool,
    /// The session accepts no input for now.
    is_blocked: bool,
    /// A wait for the end of the stream is armed.
    watches_end: bool,
    /// The end of stream that the ring has reported.
    ended: StreamEnd,
    /// The peer has closed its side.
    has_ended: bool,
    deadline: Option<Instant>,
    /// Bytes that the socket has received and sent.
    transferred_bytes: u64,
    /// Maximum bytes of one receive on a core that sleeps when idle.
    at_once: usize,
}

/// Result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inflow {
    /// Bytes were received, and the socket may hold more.
    More,
    /// Bytes were received, and the socket is empty.
    Drained,
    /// Nothing was received.
    Empty,
    /// The session accepts no input now.
    Blocked,
    /// The session is over, or the peer has closed its side.
    Finished,
}

impl<H: Host> Connection<H> {
    /// A connection that wakes `waker` when it is parked and the socket becomes ready.
    #[must_use]
    pub fn new(stream: H::Stream, core: &Rc<H>, waker: &Waker) -> Connection<H> {
        Connection {
            watch: core.watch(waker),
            stream,
            core: core.clone(),
            waker: waker.clone(),
            secure: None,
            chunk: None,
            placed: 0,
            wants_input: true,
            wants_output: false,
            is_blocked: false,
            watches_end: false,
            ended: StreamEnd::Not,
            has_ended: false,
            deadline: None,
            transferred_bytes: 0,
            at_once: AT_ONCE_AFTER_SLEEP,
        }
    }

    /// A connection over a stream from which `unread` was received earlier.
    #[must_use]
    pub fn resumed(stream: H::Stream, unread: &[u8], core: &Rc<H>, waker: &Waker) -> Connection<H> {
        let mut connection = Connection::new(stream, core, waker);
        if !unread.is_empty() {
            let memory = core.pool().take(CHUNK.max(unread.len()));
            let memory = memory.unwrap_or_else(|| Memory::from_heap(unread.len() + SMALL_CHUNK));
            let mut chunk = Chunk::new(memory);
            chunk.extend(unread);
            connection.chunk = Some(chunk);
        }
        connection
    }

    /// Adds TLS below the session, if `secure` is given.
    #[must_use]
    pub fn secured(mut self, secure: Option<Secure>) -> Connection<H> {
        self.secure = secure.map(Box::new);
        self
    }

    /// The underlying stream.
    #[must_use]
    pub fn stream(&self) -> &H::Stream {
        &self.stream
    }

    /// Has the session tell the peer that this side closes the connection, if the stream does not.
    pub fn say_goodbye<S: StreamSession>(&mut self, session: &mut S) {
        if !H::Stream::TELLS_END {
            self.end_session(session);
        }
    }

    /// Tells the session that the connection has ended. The owner knows why.
    pub(super) fn end_session<S: StreamSession>(&mut self, session: &mut S) {
        let _ = session.on_end(self.core.now());
        if !H::Stream::TELLS_END {
            let _ = self.send(session);
        }
    }

    /// Arms the wake-ups that the connection needs, and frees its buffer if it is empty.
    pub fn park(&mut self) {
        if self.wants_input && !self.has_ended {
            self.stream.wake_when_readable(&self.watch);
        } else if self.is_blocked {
            // Nothing is received meanwhile, so the end of the stream needs its own wake-up.
            self.watches_end = true;
            self.stream.wake_when_ended(self.ended, &self.watch);
        }
        if self.wants_output {
            self.stream.wake_when_writable(&self.watch);
        }
        self.at_once = AT_ONCE_AFTER_SLEEP;
        self.shrink();
    }

    /// Arms the wake-up for the result of connecting.
    pub fn park_connecting(&mut self) {
        self.stream.wake_when_writable(&self.watch);
    }

    /// Checks whether the last wake-up was for the end of the stream.
    fn check_end(&mut self) -> Result<(), Broken> {
        if std::mem::take(&mut self.watches_end) {
            self.ended = self.stream.ended();
            if self.ended == StreamEnd::Both {
                return Err(io::Error::from(io::ErrorKind::ConnectionReset).into());
            }
        }
        Ok(())
    }

    /// Feeds the session from the chunk until it needs more bytes or accepts none.
    #[inline]
    fn feed<S: StreamSession>(&mut self, session: &mut S) -> Result<Feed, Broken> {
        let now = self.core.now();
        loop {
            match session.demand() {
                Demand::Bytes(wanted) => {
                    let Some(chunk) = &mut self.chunk else { return Ok(Feed::Wants(wanted)) };
                    if chunk.unread().len() < wanted {
                        return Ok(Feed::Wants(wanted));
                    }
                    let parsed = session.on_bytes(chunk, now)?;
                    chunk.take(parsed);
                }
                Demand::Place(list) => {
                    let missing = list.len() - self.placed;
                    if let Some(chunk) = &mut self.chunk {
                        let part_len = chunk.unread().len().min(missing);
                        list.slice(self.placed, part_len).copy_from(&chunk.unread()[..part_len]);
                        chunk.take(part_len);
                        self.placed += part_len;
                    }
                    if self.placed < list.len() {
                        return Ok(Feed::WantsPlaced(list));
                    }
                    self.placed = 0;
                    session.on_placed(now)?;
                }
                Demand::StartTls => return Ok(Feed::StartsTls),
                Demand::Nothing => return Ok(Feed::Blocked),
                Demand::Close => return Ok(Feed::Closed),
            }
        }
    }

    /// Receives once. Returns whether the buffer was filled, or `None` if nothing was received.
    #[inline]
    fn receive_once(
        &mut self,
        wanted: usize,
        place: Option<&SgList>,
        len: usize,
    ) -> Result<Option<bool>, Broken> {
        self.make_room(wanted, len);
        let most = if self.core.spins() { usize::MAX } else { self.at_once };
        let Some(chunk) = &mut self.chunk else { return Ok(None) };
        let (result, asked) = match place {
            None => {
                let asked = chunk.room().min(most);
                (self.stream.receive(chunk, asked), asked)
            }
            Some(list) => {
                let missing = list.len() - self.placed;
                let asked = missing + chunk.room();
                let result = self.stream.receive_placed(list, self.placed, chunk);
                if let Ok(received) = &result {
                    self.placed += (*received).min(missing);
                }
                (result, asked)
            }
        };
        match result {
            Ok(0) => {
                self.has_ended = true;
                Ok(None)
            }
            Ok(received) => {
                self.transferred_bytes += received as u64;
                if received == most {
                    self.at_once = AT_ONCE_AFTER_SLEEP.max(self.stream.waiting() / 2);
                }
                Ok(Some(received == asked))
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(None)
            }
            Err(error) => self.on_receive_error(error),
        }
    }

    /// Makes room for `needed` contiguous bytes in a chunk of `len` bytes that is mostly free. If
    /// the pool is exhausted, the chunk is allocated from the heap and just large enough: a
    /// connection that cannot receive could neither complete the requests that hold buffers nor see
    /// its peer disconnect.
    #[inline]
    fn make_room(&mut self, needed: usize, len: usize) {
        let mut unread = 0;
        let mut is_enough = false;
        if let Some(chunk) = &mut self.chunk {
            chunk.recycle();
            unread = chunk.unread().len();
            let missing = needed.saturating_sub(unread);
            // A chunk that is larger than it should be is freed once it is empty.
            let is_too_long = chunk.capacity() > len && unread == 0;
            if !is_too_long && chunk.room() >= missing.max(len / ROOM) {
                return;
            }
            if chunk.capacity() == len && chunk.compact() && chunk.room() >= missing {
                return;
            }
            is_enough = chunk.room() >= missing.max(1);
        }
        let memory = match self.pool().take(len.max(unread + needed)) {
            Some(memory) => memory,
            None if is_enough => return,
            None => Memory::from_heap(needed.max(unread) + SMALL_CHUNK),
        };
        let mut fresh = Chunk::new(memory);
        if let Some(old) = &self.chunk {
            fresh.extend(old.unread());
        }
        self.chunk = Some(fresh);
    }

    /// Shrinks the buffer to the bytes of a message received in part.
    fn shrink(&mut self) {
        if let Some(secure) = &mut self.secure {
            secure.shrink();
        }
        let Some(chunk) = &self.chunk else { return };
        if chunk.is_idle() {
            self.chunk = None;
            return;
        }
        let fits = chunk.unread().len().next_power_of_two().max(SMALL_CHUNK);
        if fits <= SHORT_CHUNK
            && fits < chunk.capacity() / 2
            && let Some(memory) = self.pool().take(fits)
        {
            let mut small = Chunk::new(memory);
            small.extend(chunk.unread());
            self.chunk = Some(small);
        }
    }

    fn pool(&self) -> &Pool {
        self.core.pool()
    }
}

enum Feed {
    Wants(usize),
    WantsPlaced(SgList),
    StartsTls,
    Blocked,
    Closed,
}

const CLOSED_WITHIN_MESSAGE: ProtocolError = ProtocolError {
    what: "closed the connection in the middle of a message",
    reference: "a message is sent whole",
};
/// Size of a receive buffer, in bytes: deep write queues need 128 KiB, and no parser needs half of
/// it at once.
const CHUNK: usize = 256 << 10;
const _: () = assert!(CHUNK >= 2 * MAX_DEMAND);
/// Maximum bytes received at once by a core that sleeps when idle. A whole deep queue has arrived
/// when such a core wakes up. If it replied to all of it in one batch, the two sides would sleep
/// alternately; replies to the first part wake the peer early. Measured with 4 KiB writes: 1.3 to
/// 1.4 times the IOPS at depth 32. At depth 128 a core that spins would be slower with this limit.
const AT_ONCE_AFTER_SLEEP: usize = 64 << 10;
/// A chunk with less than 1/`ROOM` free is replaced: short receives cost more than copying the
/// rest.
const ROOM: usize = 4;
/// Size of the receive buffer of a session that receives most payload in place: only headers pass
/// through the buffer.
const HEADER_CHUNK: usize = SMALL_CHUNK;
/// A session that needs more contiguous bytes than this gets a chunk of full size.
const MAX_IN_HEADER_CHUNK: usize = HEADER_CHUNK / 2;
const SMALL_CHUNK: usize = 4096;
/// Receive buffer while the pool is short of memory.
const SHORT_CHUNK: usize = 16 << 10;
/// Gathering send calls of one poll.
const SENDS_PER_TURN: usize = 16;
