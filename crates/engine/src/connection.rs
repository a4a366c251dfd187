//! A socket on one side, a session on the other.
//!
//! A turn is: parse what is there, receive once, parse that, and later send all that has queued up
//! with one gathering call. Receiving goes into a large [`Chunk`], from which sessions lend payload
//! on; payload too large for that goes straight to where the session wants it. An idle connection
//! holds no buffer at all.
//!
//! A connection may be secured ([`Secure`]); the session is told when it is, and sees plain bytes.

mod secured;

pub use crate::broken::Broken;
use crate::host::{ByteStream, Host, StreamEnd};
use crate::reactor::EngineCore;
use crate::secure::Secure;
use blockmux_proto::session::{Demand, MAX_DEMAND, ProtocolError, StreamSession};
use blockmux_volume::{Chunk, Memory, Pool, SgList, Waker};
use std::io;
use std::rc::Rc;
use std::time::Instant;

/// A stream socket and its buffer; the session is the owner's.
pub struct Connection<H: Host = EngineCore> {
    // Withdrawn before the stream is closed.
    watch: H::Watch,
    stream: H::Stream,
    core: Rc<H>,
    waker: Waker,
    /// TLS, if the peer comes by it or may.
    secure: Option<Box<Secure>>,
    chunk: Option<Chunk>,
    /// Bytes that have arrived of the payload being placed.
    placed: usize,
    /// What [`Connection::park`] must ask the ring for.
    wants_input: bool,
    wants_output: bool,
    /// The session wants nothing for now.
    is_blocked: bool,
    /// The ring was asked for the end of the stream meanwhile.
    watches_end: bool,
    /// What the ring has told of that.
    ended: StreamEnd,
    /// The peer has closed its side.
    has_ended: bool,
    deadline: Option<Instant>,
    /// Bytes that the socket has given and taken.
    transferred_bytes: u64,
    /// How much is received at once, if the core sleeps when it is idle.
    at_once: usize,
}

/// How receiving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inflow {
    /// Bytes came and the socket may hold more.
    More,
    /// Bytes came, and all there were.
    Drained,
    /// Nothing came.
    Empty,
    /// The session wants nothing now.
    Blocked,
    /// The session is over, or the peer has closed its side.
    Finished,
}

impl<H: Host> Connection<H> {
    /// A connection that wakes `waker` when it was parked and something can move again.
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

    /// A connection over a stream of which `unread` was received before.
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

    /// Puts TLS under the session, if there is any.
    #[must_use]
    pub fn secured(mut self, secure: Option<Secure>) -> Connection<H> {
        self.secure = secure.map(Box::new);
        self
    }

    /// The stream and what was received and is unread, for another owner.
    pub fn hand_over(&mut self) -> (H::Stream, Vec<u8>) {
        let unread = self.chunk.take().map(|chunk| chunk.unread().to_vec());
        (self.stream.share(), unread.unwrap_or_default())
    }

    /// The peer's address, for messages.
    #[must_use]
    pub fn peer(&self) -> &str {
        self.stream.peer()
    }

    /// How many bytes the peer has sent and acknowledged; asks the system.
    #[must_use]
    pub fn moved_bytes(&self) -> u64 {
        self.transferred_bytes.saturating_sub(self.stream.unacknowledged() as u64)
    }

    /// How many bytes the socket has given and taken, which costs nothing to know.
    #[must_use]
    pub fn transferred_bytes(&self) -> u64 {
        self.transferred_bytes
    }

    /// The socket below.
    #[must_use]
    pub fn stream(&self) -> &H::Stream {
        &self.stream
    }

    /// Feeds the session what is there, receiving at most once.
    ///
    /// # Errors
    /// If the socket failed or the peer broke the protocol; what the session's outbox holds is
    /// worth sending still.
    #[inline]
    pub fn receive<S: StreamSession>(&mut self, session: &mut S) -> Result<Inflow, Broken> {
        let mut inflow = Inflow::Empty;
        self.is_blocked = false;
        loop {
            let (wanted, place) = match self.feed(session)? {
                Feed::Wants(bytes) => (bytes, None),
                Feed::WantsPlaced(list) => (1, Some(list)),
                Feed::Blocked => {
                    self.wants_input = false;
                    self.is_blocked = true;
                    self.look_for_end()?;
                    return Ok(Inflow::Blocked);
                }
                Feed::Closed => {
                    // What still comes is left where it is: to be told of it would be a turn for
                    // nothing.
                    self.wants_input = false;
                    return Ok(Inflow::Finished);
                }
            };
            self.wants_input = true;
            if self.has_ended {
                return Ok(Inflow::Finished);
            }
            if inflow != Inflow::Empty {
                return Ok(inflow);
            }
            let len = match wanted {
                ..=WANTED_BESIDE_PLACES if session.is_mostly_placed() => CHUNK_BESIDE_PLACES,
                _ if self.pool().is_short() => SHORT_CHUNK,
                _ => CHUNK,
            };
            let received = match self.secure {
                Some(ref secure) if !secure.is_by_kernel() => self.receive_secured(session, wanted)?,
                _ => self.receive_once(wanted, place.as_ref(), len)?,
            };
            match received {
                Some(full) => inflow = if full { Inflow::More } else { Inflow::Drained },
                None if self.has_ended => {
                    session.on_end(self.core.now())?;
                    if self.chunk.as_ref().is_some_and(|chunk| !chunk.unread().is_empty()) {
                        return Err(CUT.into());
                    }
                    return Ok(Inflow::Finished);
                }
                None => return Ok(Inflow::Empty),
            }
        }
    }

    /// Sends what it can of what the session has to send; answers whether any went. What has been
    /// sent may make room for more, so the session is asked again each time.
    ///
    /// # Errors
    /// If the peer is gone.
    #[inline]
    pub fn send<S: StreamSession>(&mut self, session: &mut S) -> Result<bool, Broken> {
        if let Some(secure) = &mut self.secure
            && !secure.hand_over(&mut self.stream)?
        {
            return self.send_secured(session);
        }
        let mut any = false;
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

    /// Asks the ring for whatever the connection is waiting for, and gives its buffer back if it is
    /// empty.
    pub fn park(&mut self) {
        if self.wants_input && !self.has_ended {
            self.stream.wake_when_readable(&self.watch);
        } else if self.is_blocked {
            // Nobody receives, and so nobody would see the end.
            self.watches_end = true;
            self.stream.wake_when_ended(self.ended, &self.watch);
        }
        if self.wants_output {
            self.stream.wake_when_writable(&self.watch);
        }
        self.at_once = AT_ONCE_AFTER_SLEEP;
        self.shrink();
    }

    /// Whether the peer sends nothing any more, and the session takes nothing of what it has sent.
    #[must_use]
    pub fn is_left(&self) -> bool {
        self.ended != StreamEnd::Not && self.is_blocked
    }

    /// Asks the ring to tell when a connecting socket has an answer.
    pub fn park_connecting(&mut self) {
        self.stream.wake_when_writable(&self.watch);
    }

    /// Calls the session's deadline when it has passed and has the next one kept.
    ///
    /// # Errors
    /// If the peer missed it.
    #[inline]
    pub fn check_deadline<S: StreamSession>(&mut self, session: &mut S) -> Result<(), Broken> {
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

    /// Checks the session's deadline if it is another than the one that is kept, which in most
    /// turns it is not.
    ///
    /// # Errors
    /// If the peer missed it.
    #[inline]
    pub fn check_new_deadline<S: StreamSession>(&mut self, session: &mut S) -> Result<(), Broken> {
        match session.poll_timeout() {
            Some(when) if self.deadline.is_none_or(|kept| when != kept) => self.check_deadline(session),
            _ => Ok(()),
        }
    }

    /// Looks whether it was the end of the stream that has ended the last sleep.
    fn look_for_end(&mut self) -> Result<(), Broken> {
        if std::mem::take(&mut self.watches_end) {
            self.ended = self.stream.ended();
            if self.ended == StreamEnd::Both {
                return Err(io::Error::from(io::ErrorKind::ConnectionReset).into());
            }
        }
        Ok(())
    }

    /// Shows the session what is in the chunk until it wants more or nothing.
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
                    let taken = session.on_bytes(chunk, now)?;
                    chunk.take(taken);
                }
                Demand::Place(list) => {
                    let missing = list.len() - self.placed;
                    if let Some(chunk) = &mut self.chunk {
                        let here = chunk.unread().len().min(missing);
                        list.slice(self.placed, here).copy_from(&chunk.unread()[..here]);
                        chunk.take(here);
                        self.placed += here;
                    }
                    if self.placed < list.len() {
                        return Ok(Feed::WantsPlaced(list));
                    }
                    self.placed = 0;
                    session.on_placed(now)?;
                }
                Demand::Nothing => return Ok(Feed::Blocked),
                Demand::Close => return Ok(Feed::Closed),
            }
        }
    }

    /// Receives once. Some(whether the buffer came back full), or `None` if nothing came.
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

    /// Sees to a chunk of `len` bytes in which `wanted` bytes in one piece fit, and not much less
    /// than a whole one is spare. When the pool has no whole one, the heap gives just enough: a
    /// connection that cannot receive would neither finish what holds the buffers nor notice that
    /// its peer has gone.
    #[inline]
    fn make_room(&mut self, wanted: usize, len: usize) {
        let mut unread = 0;
        let mut is_enough = false;
        if let Some(chunk) = &mut self.chunk {
            chunk.recycle();
            unread = chunk.unread().len();
            let missing = wanted.saturating_sub(unread);
            // A longer one than it should be goes as soon as it is empty, which before a place it
            // is.
            let is_too_long = chunk.capacity() > len && unread == 0;
            if !is_too_long && chunk.room() >= missing.max(len / ROOM) {
                return;
            }
            if chunk.capacity() == len && chunk.compact() && chunk.room() >= missing {
                return;
            }
            is_enough = chunk.room() >= missing.max(1);
        }
        let memory = match self.pool().take(len.max(unread + wanted)) {
            Some(memory) => memory,
            None if is_enough => return,
            None => Memory::from_heap(wanted.max(unread) + SMALL_CHUNK),
        };
        let mut fresh = Chunk::new(memory);
        if let Some(old) = &self.chunk {
            fresh.extend(old.unread());
        }
        self.chunk = Some(fresh);
    }

    /// Holds no more memory than the bytes of a half-received message need.
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
    Blocked,
    Closed,
}

const CUT: ProtocolError =
    ProtocolError { what: "left in the middle of a message", reference: "a message is sent whole" };
/// A receive buffer: deep writes want 128 KiB or more, and a parser never needs half of it in one
/// piece.
const CHUNK: usize = 256 << 10;
const _: () = assert!(CHUNK >= 2 * MAX_DEMAND);
/// What is received at once by a core that sleeps when it is idle. By the time it is awake, all of
/// a deep queue has come; were it answered as one, its peer would sleep meanwhile, and both would
/// take turns. Answers to the first part wake it. Measured with 4 KiB writes at depth 32: 1.3 to
/// 1.4 times the IOPS; a core that spins would lose at depth 128. Of a queue that is deeper, half
/// of what still waits comes next, since each part costs a wake-up: at depth 128 1.03 to 1.12 times
/// the writes.
const AT_ONCE_AFTER_SLEEP: usize = 64 << 10;
/// Receiving into less than this part of it costs more calls than moving a rest costs.
const ROOM: usize = 4;
/// Where a session has most of what comes placed: what lies in the buffer is copied, and the rest
/// is not.
const CHUNK_BESIDE_PLACES: usize = SMALL_CHUNK;
/// A session that wants more than this in one piece gets a whole chunk all the same.
const WANTED_BESIDE_PLACES: usize = CHUNK_BESIDE_PLACES / 2;
const SMALL_CHUNK: usize = 4096;
/// A receive buffer where the pool is short: what a peer has sent and the session does not take
/// stays in it.
const SHORT_CHUNK: usize = 16 << 10;
/// Others get their turn after so many gathering calls.
const SENDS_PER_TURN: usize = 16;
