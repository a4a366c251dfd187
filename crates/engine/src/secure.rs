//! TLS under a connection: records on the socket's side, plain bytes on the session's.
//!
//! ```text
//!   socket ──▶ incoming ──Tls──▶ the connection's chunk ──▶ session
//!   socket ◀── outgoing ◀─Tls─── scratch ◀───────────────── the session's outbox
//! ```
//! A connection without it has nothing of this, and takes the same way as ever. With it, a
//! session's bytes stay in its outbox until the records that they are in are sent: whoever waits
//! for an empty outbox waits for the socket. Memory that a session lends is copied before it is
//! encrypted, because it may change meanwhile.
//!
//! Whether a peer comes by TLS its first byte tells, where both may be: a record of a handshake
//! begins with 16h, and no protocol that is served so begins with that. NVMe/TCP's begins with 00h,
//! the type of ICReq.
//!
//! Where the system's kernel can make and open records (kTLS), it is given the keys as soon as the
//! handshake is done and both directions are at a border between records (`kernel`). From then on
//! plain bytes go to the socket and come from it as without TLS, and nothing here is in their way.
//! For that, no more than the rest of one record is received at a time until then (`border`). Where
//! the kernel cannot, the library goes on.
//!
//! Time is the session's to bound: until the handshake is done it hears nothing, and its own
//! patience runs.

mod border;
mod kernel;

use crate::broken::Broken;
use crate::host::ByteStream;
use blockmux_proto::outbox::{Outbox, OutboxPiece};
use blockmux_tls::{Lookup, Psk, Tls, TlsError};
use blockmux_volume::{Chunk, Memory, Pool};
use border::Border;
use kernel::{ByKernel, HandedOver};
use std::io;
use tracing::debug;

/// What secures one connection.
pub struct Secure {
    stage: Stage,
    /// Records that have come, while there are any.
    incoming: Option<Chunk>,
    /// Records to be sent.
    outgoing: Outbox,
    /// Bytes at the front of the session's outbox that are in `outgoing`.
    covered: usize,
    /// Where they are copied to.
    scratch: Vec<u8>,
    /// The session has been told.
    is_told: bool,
    /// The kernel is to be given the keys, if it takes them.
    wants_kernel: bool,
    /// The kernel has TLS for this socket, and no keys yet.
    is_attached: bool,
    /// Where the records that have come end, while the kernel is to go on after one of them.
    border: Border,
}

enum Stage {
    /// The peer's first byte has not come.
    Unknown {
        lookup: Lookup,
        may_be_plain: bool,
    },
    Tls(Box<Tls>),
    /// The records are the kernel's.
    Kernel(Box<ByKernel>),
}

/// What came of receiving.
pub(crate) enum Received {
    /// So many plain bytes; 0 at the end of the stream.
    Bytes(usize),
    /// The peer comes without TLS, and may: what it has sent is in the chunk, and nothing is
    /// secured.
    Plain,
}

impl Secure {
    /// For a connection to a server, with the keys that it may know, the best first.
    ///
    /// # Errors
    /// If the keys cannot be used.
    pub fn client(keys: &[Psk]) -> Result<Secure, TlsError> {
        Ok(Secure::new(Stage::Tls(Box::new(Tls::client(keys)?))))
    }

    /// For a client's connection, which has to be secured.
    #[must_use]
    pub fn server(lookup: Lookup) -> Secure {
        Secure::new(Stage::Unknown { lookup, may_be_plain: false })
    }

    /// For a client's connection, which may be secured.
    #[must_use]
    pub fn if_asked(lookup: Lookup) -> Secure {
        Secure::new(Stage::Unknown { lookup, may_be_plain: true })
    }

    fn new(stage: Stage) -> Secure {
        let outgoing = Outbox::default();
        Secure {
            stage,
            incoming: None,
            outgoing,
            covered: 0,
            scratch: Vec::new(),
            is_told: false,
            wants_kernel: true,
            is_attached: false,
            border: Border::default(),
        }
    }

    /// Whether the kernel makes the records where it can; else the library makes all of them.
    #[must_use]
    pub fn by_kernel(self, is_wanted: bool) -> Secure {
        Secure { wants_kernel: is_wanted, ..self }
    }

    /// The identity of the key, once: when the handshake is done.
    pub(crate) fn take_identity(&mut self) -> Option<&[u8]> {
        match &self.stage {
            Stage::Tls(tls) if tls.is_open() && !self.is_told => {
                self.is_told = true;
                Some(tls.identity())
            }
            _ => None,
        }
    }

    /// Gives plain bytes to the chunk's spare part, which has room, receiving at most once; during
    /// the handshake, a few records.
    pub(crate) fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        chunk: &mut Chunk,
        pool: &Pool,
    ) -> Result<Received, Broken> {
        if let Stage::Unknown { may_be_plain, .. } = &self.stage {
            let received = stream.receive(chunk, usize::MAX)?;
            if received == 0 {
                return Ok(Received::Bytes(0));
            }
            if chunk.unread().first() != Some(&HANDSHAKE) {
                return if *may_be_plain { Ok(Received::Plain) } else { Err(TlsError::Plain.into()) };
            }
            self.begin(chunk)?;
        }
        let given = self.advance(chunk)?;
        if given > 0 || self.has_ended() {
            return Ok(Received::Bytes(given));
        }
        let parts = if self.wants_kernel { PARTS_PER_TURN } else { 1 };
        for _ in 0..parts {
            let was_open = self.is_open();
            if self.receive_records(stream, pool)? == 0 {
                return if was_open { Ok(Received::Bytes(0)) } else { Err(TlsError::Left.into()) };
            }
            let given = self.advance(chunk)?;
            if given > 0 || self.has_ended() {
                return Ok(Received::Bytes(given));
            }
            // What there is to be sent may be all that keeps the kernel from going on.
            if self.is_open() && !was_open {
                break;
            }
        }
        Err(io::Error::from(io::ErrorKind::WouldBlock).into())
    }

    /// Receives once; while the kernel is to go on, no more than to the next border.
    fn receive_records<S: ByteStream>(&mut self, stream: &mut S, pool: &Pool) -> io::Result<usize> {
        let most = if self.wants_kernel { self.border.missing() } else { usize::MAX };
        let incoming = self.room_for_records(pool);
        let before = incoming.unread().len();
        let received = stream.receive(incoming, most)?;
        if self.wants_kernel
            && let Some(incoming) = &self.incoming
        {
            self.border.pass(&incoming.unread()[before..]);
        }
        Ok(received)
    }

    /// Gives the kernel the keys, if that can be now and it takes them; whether the records are the
    /// kernel's.
    ///
    /// # Errors
    /// If it has taken only one of the two.
    pub(crate) fn hand_over<S: ByteStream>(&mut self, stream: &mut S) -> Result<bool, Broken> {
        let Stage::Tls(tls) = &mut self.stage else { return Ok(self.is_by_kernel()) };
        let is_unread = self.incoming.as_ref().is_some_and(|chunk| !chunk.unread().is_empty());
        let is_between = self.outgoing.is_empty() && self.border.is_between() && !is_unread;
        if !self.wants_kernel || !self.is_told || !is_between || !tls.is_open() || tls.has_ended() {
            return Ok(false);
        }
        if !self.is_attached {
            if let Err(error) = stream.attach_tls() {
                debug!(peer = stream.peer(), "TLS: records are made here; the kernel has none: {error}");
                self.wants_kernel = false;
                return Ok(false);
            }
            self.is_attached = true;
        }
        match kernel::hand_over(tls, stream)? {
            HandedOver::NotYet => Ok(false),
            HandedOver::Refused(error) => {
                debug!(peer = stream.peer(), "TLS: records are made here; the kernel took no key: {error}");
                self.wants_kernel = false;
                Ok(false)
            }
            HandedOver::Done(kernel) => {
                debug!(peer = stream.peer(), "TLS: records are made by the kernel");
                self.stage = Stage::Kernel(kernel);
                (self.incoming, self.scratch) = (None, Vec::new());
                Ok(true)
            }
        }
    }

    /// Whether the records are the kernel's: data goes to the socket and comes from it as it is.
    #[inline]
    pub(crate) fn is_by_kernel(&self) -> bool {
        matches!(self.stage, Stage::Kernel(_))
    }

    /// Before data is sent by the kernel: sends what is due before.
    ///
    /// # Errors
    /// If there is no room, or the connection cannot go on.
    #[inline]
    pub(crate) fn before_sending<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), Broken> {
        match &mut self.stage {
            Stage::Kernel(kernel) => kernel.before_sending(stream),
            _ => Ok(()),
        }
    }

    /// So many bytes of data were sent by the kernel.
    #[inline]
    pub(crate) fn on_sent(&mut self, bytes: usize) {
        if let Stage::Kernel(kernel) = &mut self.stage {
            kernel.on_sent(bytes);
        }
    }

    /// Receiving data has failed: it may be that the next record has none. Whether the peer sends
    /// nothing any more.
    ///
    /// # Errors
    /// If it has failed.
    #[cold]
    pub(crate) fn on_receive_error<S: ByteStream>(
        &mut self,
        stream: &mut S,
        error: io::Error,
    ) -> Result<bool, Broken> {
        match &mut self.stage {
            Stage::Kernel(kernel) => kernel.on_receive_error(stream, error),
            _ => Err(error.into()),
        }
    }

    /// Says that nothing more will be sent, as far as that goes (RFC 8446 §6.1).
    pub(crate) fn close<S: ByteStream>(&mut self, stream: &mut S) {
        match &mut self.stage {
            Stage::Unknown { .. } => {}
            Stage::Tls(tls) => {
                tls.close();
                self.outgoing.push_head(tls.output());
                tls.output().clear();
                if !self.outgoing.is_empty() {
                    let _ = stream.send(&mut self.outgoing);
                }
            }
            Stage::Kernel(kernel) => kernel.close(stream),
        }
    }

    /// Takes bytes that somebody else has received; none: a client begins so.
    pub(crate) fn take(&mut self, bytes: &[u8], chunk: &mut Chunk) -> Result<usize, TlsError> {
        let Stage::Tls(tls) = &mut self.stage else { return Ok(0) };
        let result = tls.receive(bytes, chunk.spare());
        self.outgoing.push_head(tls.output());
        tls.output().clear();
        let moved = result?;
        chunk.fill(moved.given);
        Ok(moved.taken)
    }

    /// Encrypts what it can of the session's outbox, if nothing is on its way.
    pub(crate) fn cover(&mut self, outbox: &Outbox) -> Result<(), TlsError> {
        let Stage::Tls(tls) = &mut self.stage else { return Ok(()) };
        if !tls.is_open() || !self.outgoing.is_empty() || self.covered > 0 || outbox.is_empty() {
            return Ok(());
        }
        self.scratch.clear();
        for piece in outbox.pieces() {
            let room = MOST_AT_ONCE - self.scratch.len();
            match piece {
                OutboxPiece::Head(head) => self.scratch.extend_from_slice(&head[..head.len().min(room)]),
                OutboxPiece::Payload(seg) => {
                    let (start, len) = (self.scratch.len(), seg.len().min(room));
                    self.scratch.resize(start + len, 0);
                    seg.slice(0, len).copy_to(&mut self.scratch[start..]);
                }
            }
            if self.scratch.len() == MOST_AT_ONCE {
                break;
            }
        }
        tls.send(&self.scratch)?;
        self.covered = self.scratch.len();
        self.outgoing.push_head(tls.output());
        tls.output().clear();
        Ok(())
    }

    /// Records to be sent. When they are, [`Secure::sent`] has to be told.
    pub(crate) fn outgoing(&mut self) -> &mut Outbox {
        &mut self.outgoing
    }

    /// Takes out of the session's outbox what is sent whole.
    pub(crate) fn sent(&mut self, outbox: &mut Outbox) {
        if self.outgoing.is_empty() {
            outbox.consume(std::mem::take(&mut self.covered));
        }
    }

    /// Whether something is to be sent that can be.
    pub(crate) fn wants_output(&self, outbox: &Outbox) -> bool {
        !self.outgoing.is_empty() || (self.is_open() && !outbox.is_empty())
    }

    /// Gives back what an idle connection does not need.
    pub(crate) fn shrink(&mut self) {
        if self.incoming.as_ref().is_some_and(Chunk::is_idle) {
            self.incoming = None;
        }
        if self.outgoing.is_empty() {
            self.scratch = Vec::new();
            if let Stage::Tls(tls) = &mut self.stage {
                *tls.output() = Vec::new();
                tls.shrink();
            }
        }
    }

    /// Whether the handshake is done.
    pub(crate) fn is_open(&self) -> bool {
        matches!(&self.stage, Stage::Tls(tls) if tls.is_open())
    }

    /// Whether the peer has said that it sends nothing any more.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(&self.stage, Stage::Tls(tls) if tls.has_ended())
    }

    /// The peer has begun a handshake: what it has sent are records.
    fn begin(&mut self, chunk: &mut Chunk) -> Result<(), TlsError> {
        let Stage::Unknown { lookup, .. } = &self.stage else { return Ok(()) };
        let tls = Tls::server(lookup)?;
        self.border.pass(chunk.unread());
        self.incoming = Some(Chunk::from_slice(chunk.unread()));
        chunk.take(chunk.unread().len());
        self.stage = Stage::Tls(Box::new(tls));
        Ok(())
    }

    /// Goes on with the records that are here; how many plain bytes the chunk got.
    fn advance(&mut self, chunk: &mut Chunk) -> Result<usize, TlsError> {
        let room = chunk.room();
        let incoming = self.incoming.take();
        let result = self.take(incoming.as_ref().map_or(&[], Chunk::unread), chunk);
        self.incoming = incoming;
        if let (Some(incoming), Ok(taken)) = (&mut self.incoming, &result) {
            incoming.take(*taken);
        }
        result.map(|_| room - chunk.room())
    }

    /// A chunk for more records, in which there are none: all that had come is taken.
    fn room_for_records(&mut self, pool: &Pool) -> &mut Chunk {
        self.incoming.take_if(|chunk| chunk.room() < SMALL);
        self.incoming.get_or_insert_with(|| {
            let len = if pool.is_short() { SHORT_RECORDS } else { RECORDS };
            Chunk::new(pool.take(len).unwrap_or_else(|| Memory::from_heap(SMALL)))
        })
    }
}

/// The content type of a handshake's records (RFC 8446 §5.1).
const HANDSHAKE: u8 = 0x16;
/// Plain bytes that are encrypted at a time: four of the longest records.
const MOST_AT_ONCE: usize = 64 << 10;
/// Parts of records that are received in one turn while no more than one is at a time: those of a
/// handshake.
const PARTS_PER_TURN: usize = 16;
/// How much is received at a time.
const RECORDS: usize = 128 << 10;
/// How much where buffers are short.
const SHORT_RECORDS: usize = 16 << 10;
/// Where there are none left: no less than some small records.
const SMALL: usize = 4096;

#[cfg(test)]
mod kernel_tests;
#[cfg(test)]
mod tests;
