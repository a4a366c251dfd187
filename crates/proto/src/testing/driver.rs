//! Test driver of an initiator session, which delivers the peer's bytes in pieces of any size.

use crate::driver::session::{
    Demand, Initiator, MAX_DEMAND, ProtocolError, StreamConnections, StreamSession,
};
use crate::fabrics::host::{HostAdmin, HostQueues, HostTransport};
use crate::{iscsi, nbd};
use blockmux_volume::{Chunk, Completion, Io, IoError, Op, Output, SgList, Tag};
use std::time::Instant;

/// A session and its driver, which asserts that every demand can be met and makes progress.
pub(crate) struct Driver<S> {
    pub(crate) session: S,
    /// The connection in use.
    pub(crate) connection: usize,
    /// Number of bytes delivered at a time.
    pub(crate) step: usize,
    /// Bytes that are received but not consumed.
    pub(crate) unread: Vec<u8>,
    /// Number of payloads that were received directly into their memory.
    pub(crate) placed: usize,
    /// The current time.
    pub(crate) now: Instant,
}

/// A session over one or several connections.
pub(crate) trait Streams {
    /// The stream session of a connection.
    fn stream(&mut self, connection: usize) -> impl StreamSession;
}

impl Streams for iscsi::client::IscsiDiscoverySession {
    fn stream(&mut self, _connection: usize) -> impl StreamSession {
        self
    }
}

impl Streams for iscsi::client::IscsiInitiatorSession {
    fn stream(&mut self, connection: usize) -> impl StreamSession {
        self.connection(connection)
    }
}

impl Streams for nbd::client::NbdInitiatorSession {
    fn stream(&mut self, connection: usize) -> impl StreamSession {
        self.connection(connection)
    }
}

impl<T: HostTransport> Streams for HostAdmin<T>
where
    HostAdmin<T>: StreamSession,
{
    fn stream(&mut self, _connection: usize) -> impl StreamSession {
        self
    }
}

impl<T: HostTransport> Streams for HostQueues<T>
where
    HostQueues<T>: StreamConnections,
{
    fn stream(&mut self, connection: usize) -> impl StreamSession {
        self.connection(connection)
    }
}

impl<S: Streams> Driver<S> {
    pub(crate) fn of(session: S, step: usize) -> Driver<S> {
        Driver { session, connection: 0, step, unread: Vec::new(), placed: 0, now: Instant::now() }
    }

    /// The stream session of the connection in use.
    pub(crate) fn stream(&mut self) -> impl StreamSession {
        self.session.stream(self.connection)
    }

    /// Delivers bytes from the peer.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        for piece in bytes.chunks(self.step) {
            self.unread.extend(piece);
            while self.turn()? {}
        }
        Ok(())
    }

    /// Runs one turn; returns whether anything was done.
    fn turn(&mut self) -> Result<bool, ProtocolError> {
        let mut stream = self.session.stream(self.connection);
        match stream.demand() {
            Demand::Bytes(least) => {
                assert!(0 < least && least <= MAX_DEMAND, "demands {least}");
                if self.unread.len() < least {
                    return Ok(false);
                }
                let took = stream.on_bytes(&Chunk::from_slice(&self.unread), self.now)?;
                self.unread.drain(..took);
                let is_progress = took > 0 || !matches!(stream.demand(), Demand::Bytes(n) if n <= least);
                assert!(is_progress, "took nothing of {} bytes and demands no more", self.unread.len());
                Ok(true)
            }
            Demand::Place(list) if self.unread.len() >= list.len() => {
                let rest = self.unread.split_off(list.len());
                list.copy_from(&self.unread);
                self.unread = rest;
                self.placed = self.placed.saturating_add(1);
                stream.on_placed(self.now)?;
                Ok(true)
            }
            Demand::Place(_) | Demand::StartTls | Demand::Nothing | Demand::Close => Ok(false),
        }
    }

    /// Takes the bytes of the outbox.
    pub(crate) fn sent(&mut self) -> Vec<u8> {
        self.stream().outbox().take_bytes()
    }

    pub(crate) fn is_closing(&mut self) -> bool {
        matches!(self.stream().demand(), Demand::Close)
    }
}

impl<S: Initiator> Driver<S> {
    pub(crate) fn submit(&mut self, tag: u64, op: Op, offset: u64, len: u64, data: Option<SgList>) {
        assert!(self.session.room() > 0);
        self.session.submit(Io { tag: Tag(tag), op, offset, len, data });
    }

    /// Submits a read without a buffer.
    pub(crate) fn read(&mut self, tag: u64, offset: u64, len: u64) {
        self.submit(tag, Op::Read, offset, len, None);
    }

    /// Takes the only completion.
    pub(crate) fn done(&mut self) -> (u64, Result<Output, IoError>) {
        let Completion { tag, result } = self.session.poll_done().expect("a completion");
        assert!(self.session.poll_done().is_none(), "more than one completion");
        (tag.0, result)
    }

    /// Takes the only completion, and returns its data.
    pub(crate) fn done_data(&mut self) -> Vec<u8> {
        self.done().1.unwrap().into_data().to_vec()
    }

    /// Takes the only completion, and returns its error.
    pub(crate) fn done_error(&mut self) -> IoError {
        self.done().1.unwrap_err()
    }

    pub(crate) fn assert_nothing_done(&mut self) {
        assert!(self.session.poll_done().is_none());
    }
}
