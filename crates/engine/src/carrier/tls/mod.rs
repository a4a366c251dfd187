//! TLS under a connection: records on the socket's side, plain bytes on the session's.
//!
//! ```text
//!   socket ──▶ incoming ──Tls──▶ the connection's chunk ──▶ session
//!   socket ◀── outgoing ◀─Tls─── scratch ◀───────────────── the session's outbox
//! ```
//! A plaintext connection has no such state. With TLS, a session's bytes stay in its outbox until
//! their records are sent, so an empty outbox means that the socket has taken everything. Memory
//! borrowed from a session is copied before it is encrypted, because it may change meanwhile.
//!
//! If TLS is optional, the peer's first byte decides: a handshake record begins with 16h. No
//! protocol that is served this way begins with that byte (NVMe/TCP begins with 00h, the type of
//! ICReq).
//!
//! NBD upgrades an established connection ([`Secure::on_demand`]): bytes pass in the clear until
//! the session demands TLS.
//!
//! If the kernel supports kTLS, it gets the keys as soon as the handshake is complete and both
//! directions are at a record boundary (`kernel`). From then on plaintext is sent to and received
//! from the socket directly. Until then, at most the rest of one record is received at a time
//! (`boundary`). If the kernel cannot do that, the library continues.
//!
//! At a target, the handshake is computed by [`Helpers`]: `Tls` moves there with the bytes
//! received, and back with the result. Nothing else is received meanwhile.
//!
//! There are no timeouts here: the session receives nothing until the handshake is complete, so its
//! own timeout also limits the handshake.

mod boundary;
mod kernel;

use crate::carrier::broken::Broken;
use crate::net::host::ByteStream;
use blockmux_proto::driver::computation::{Computation, Helpers};
use blockmux_proto::driver::outbox::{Outbox, OutboxPiece};
use blockmux_proto::driver::session::SecuredBy;
use blockmux_tls::ReceivedBytes;
pub use blockmux_tls::{
    CertifiedKey, ClientCertificates, ClientCredentials, Psk, PskFile, ServerCertificates, ServerCredentials,
    Tls, TlsError, TlsPeer, Trust, canonical_subject,
};
use blockmux_volume::{Chunk, Memory, Pool};
use boundary::RecordBoundary;
use kernel::{HandedOver, KernelTls};
use std::io;
use tracing::debug;

/// TLS state of one connection.
pub struct Secure {
    stage: TlsStage,
    /// Received records, while there are any.
    incoming: Option<Chunk>,
    /// Records to be sent.
    outgoing: Outbox,
    /// Bytes at the front of the session's outbox that are encrypted in `outgoing`.
    encrypted: usize,
    /// Plaintext copied from the outbox, to be encrypted.
    scratch: Vec<u8>,
    /// The session was notified that TLS is established.
    is_reported: bool,
    /// The session has not demanded TLS yet, and bytes pass in the clear.
    is_dormant: bool,
    /// Pass the keys to the kernel, if it accepts them.
    wants_kernel: bool,
    /// kTLS is attached to the socket, without keys yet.
    is_attached: bool,
    /// Where the handshake is computed, if not here.
    helpers: Option<Helpers>,
    /// Record boundaries of the input, tracked while the kernel is to take over at one.
    boundary: RecordBoundary,
}

/// How the connections to a server use TLS; a clone is another handle.
#[derive(Clone, Debug)]
pub struct ClientTls {
    /// What both sides authenticate with.
    pub credentials: ClientCredentials,
    /// Whether the kernel processes the records (kTLS) where possible.
    pub ktls: bool,
    /// Whether TLS begins when the session demands it, and not with the connection.
    pub is_on_demand: bool,
}

impl ClientTls {
    /// TLS state of a new connection.
    ///
    /// # Errors
    /// If the credentials cannot be used.
    pub fn secure(&self) -> Result<Secure, TlsError> {
        let secure = Secure::client(&self.credentials)?.by_kernel(self.ktls);
        Ok(if self.is_on_demand { secure.on_demand() } else { secure })
    }
}

enum TlsStage {
    /// The peer's first byte has not arrived.
    Unknown {
        credentials: ServerCredentials,
        may_be_plain: bool,
    },
    Tls(Box<Tls>),
    /// A helper processes bytes of the handshake.
    Handshake(Computation<HandshakeStep>),
    /// The kernel encrypts and decrypts the records.
    Kernel(Box<KernelTls>),
}

/// The bytes of the handshake received so far are processed.
struct HandshakeStep {
    tls: Box<Tls>,
    result: Result<ReceivedBytes, TlsError>,
}

/// Result of receiving.
pub(crate) enum Received {
    /// Number of plaintext bytes; 0 at the end of the stream.
    Bytes(usize),
    /// The peer does not use TLS, which is permitted: its bytes are in the chunk.
    Plain,
}

impl Secure {
    /// TLS state of a connection to a server.
    ///
    /// # Errors
    /// If the credentials cannot be used.
    pub fn client(credentials: &ClientCredentials) -> Result<Secure, TlsError> {
        Ok(Secure::new(TlsStage::Tls(Box::new(Tls::client(credentials)?))))
    }

    /// TLS state of a client's connection, which must use TLS.
    #[must_use]
    pub fn server(credentials: ServerCredentials) -> Secure {
        Secure::new(TlsStage::Unknown { credentials, may_be_plain: false })
    }

    /// TLS state of a client's connection, which may use TLS.
    #[must_use]
    pub fn if_asked(credentials: ServerCredentials) -> Secure {
        Secure::new(TlsStage::Unknown { credentials, may_be_plain: true })
    }

    fn new(stage: TlsStage) -> Secure {
        let outgoing = Outbox::default();
        Secure {
            stage,
            incoming: None,
            outgoing,
            encrypted: 0,
            scratch: Vec::new(),
            is_reported: false,
            is_dormant: false,
            wants_kernel: true,
            is_attached: false,
            helpers: None,
            boundary: RecordBoundary::default(),
        }
    }

    /// Lets the kernel process the records where possible if `is_wanted`; otherwise the library
    /// does.
    #[must_use]
    pub fn by_kernel(self, is_wanted: bool) -> Secure {
        Secure { wants_kernel: is_wanted, ..self }
    }

    /// Computes the handshake by helpers, if there are any: its public-key operations take
    /// milliseconds.
    #[must_use]
    pub(crate) fn by_helpers(self, helpers: Option<Helpers>) -> Secure {
        Secure { helpers, ..self }
    }

    /// Delays TLS until the session demands it
    /// ([`blockmux_proto::driver::session::Demand::StartTls`]).
    #[must_use]
    pub fn on_demand(self) -> Secure {
        Secure { is_dormant: true, ..self }
    }

    /// Starts TLS because the session demands it; returns whether this is the first time.
    pub(crate) fn start(&mut self) -> bool {
        std::mem::replace(&mut self.is_dormant, false)
    }

    /// Whether the handshake is complete and [`Secure::take_peer`] was not called.
    pub(crate) fn is_unreported(&self) -> bool {
        self.is_open() && !self.is_reported
    }

    /// The version and the cipher suite of the handshake, for logs.
    pub(crate) fn negotiated(&mut self) -> String {
        match &mut self.stage {
            TlsStage::Tls(tls) => tls.negotiated(),
            TlsStage::Unknown { .. } | TlsStage::Handshake(_) | TlsStage::Kernel(_) => String::new(),
        }
    }

    /// Returns once, after the handshake, how the peer has authenticated itself.
    pub(crate) fn take_peer(&mut self) -> Option<SecuredBy<'_>> {
        match &self.stage {
            TlsStage::Tls(tls) if tls.is_open() && !self.is_reported => {
                self.is_reported = true;
                Some(match tls.peer() {
                    TlsPeer::Psk(identity) => SecuredBy::Psk(identity),
                    TlsPeer::Certificate(subject) => SecuredBy::Certificate(subject),
                    TlsPeer::Anonymous => SecuredBy::Nothing,
                })
            }
            _ => None,
        }
    }

    /// Receives once, during the handshake up to [`PARTS_PER_TURN`] times, and adds the plaintext
    /// to the chunk's spare part, which must have room.
    pub(crate) fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        chunk: &mut Chunk,
        pool: &Pool,
    ) -> Result<Received, Broken> {
        if let TlsStage::Unknown { may_be_plain, .. } = &self.stage {
            let received = stream.receive(chunk, usize::MAX)?;
            if received == 0 {
                return Ok(Received::Bytes(0));
            }
            if chunk.unread().first() != Some(&HANDSHAKE) {
                return if *may_be_plain { Ok(Received::Plain) } else { Err(TlsError::NotTls.into()) };
            }
            self.begin(chunk)?;
        }
        let was_open = self.is_open();
        let plain_bytes = self.advance(chunk)?;
        if plain_bytes > 0 || self.has_ended() {
            return Ok(Received::Bytes(plain_bytes));
        }
        if self.is_computing() || self.is_open() != was_open {
            return Err(io::Error::from(io::ErrorKind::WouldBlock).into());
        }
        let parts = if self.wants_kernel { PARTS_PER_TURN } else { 1 };
        for _ in 0..parts {
            let was_open = self.is_open();
            if self.receive_records(stream, pool)? == 0 {
                return if was_open { Ok(Received::Bytes(0)) } else { Err(TlsError::Disconnected.into()) };
            }
            let plain_bytes = self.advance(chunk)?;
            if plain_bytes > 0 || self.has_ended() {
                return Ok(Received::Bytes(plain_bytes));
            }
            // The kernel may be able to take over as soon as the output is sent.
            if self.is_computing() || self.is_open() && !was_open {
                break;
            }
        }
        Err(io::Error::from(io::ErrorKind::WouldBlock).into())
    }

    /// Receives once; while the kernel is to take over, at most up to the next record boundary.
    fn receive_records<S: ByteStream>(&mut self, stream: &mut S, pool: &Pool) -> io::Result<usize> {
        let most = if self.wants_kernel { self.boundary.missing() } else { usize::MAX };
        let incoming = self.room_for_records(pool);
        let before = incoming.unread().len();
        let received = stream.receive(incoming, most)?;
        if self.wants_kernel
            && let Some(incoming) = &self.incoming
        {
            self.boundary.pass(&incoming.unread()[before..]);
        }
        Ok(received)
    }

    /// Passes the keys to the kernel, if possible now; returns whether plain bytes pass the socket,
    /// because the kernel processes the records or the session has not demanded TLS.
    ///
    /// # Errors
    /// If the kernel accepted the key of only one direction.
    pub(crate) fn hand_over<S: ByteStream>(&mut self, stream: &mut S) -> Result<bool, Broken> {
        let TlsStage::Tls(tls) = &mut self.stage else { return Ok(self.is_plain()) };
        if self.is_dormant {
            return Ok(true);
        }
        let is_unread = self.incoming.as_ref().is_some_and(|chunk| !chunk.unread().is_empty());
        let is_between = self.outgoing.is_empty() && self.boundary.is_between() && !is_unread;
        if !self.wants_kernel || !self.is_reported || !is_between || !tls.is_open() || tls.has_ended() {
            return Ok(false);
        }
        if !tls.can_export() {
            self.wants_kernel = false;
            return Ok(false);
        }
        if !self.is_attached {
            if let Err(error) = stream.attach_tls() {
                debug!(
                    peer = stream.peer(),
                    "TLS: records are processed in user space; the kernel does not support kTLS: {error}"
                );
                self.wants_kernel = false;
                return Ok(false);
            }
            self.is_attached = true;
        }
        match kernel::hand_over(tls, stream)? {
            HandedOver::NotYet => Ok(false),
            HandedOver::Refused(error) => {
                debug!(
                    peer = stream.peer(),
                    "TLS: records are processed in user space; the kernel rejected the keys: {error}"
                );
                self.wants_kernel = false;
                Ok(false)
            }
            HandedOver::Done(kernel) => {
                debug!(peer = stream.peer(), "TLS: records are processed by the kernel");
                self.stage = TlsStage::Kernel(kernel);
                (self.incoming, self.scratch) = (None, Vec::new());
                Ok(true)
            }
        }
    }

    /// Whether plain bytes pass the socket: the kernel processes the records, or the session has
    /// not demanded TLS.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.is_dormant || matches!(self.stage, TlsStage::Kernel(_))
    }

    /// Whether TLS is in use: the session has demanded it, or it began with the connection.
    pub(crate) fn is_in_use(&self) -> bool {
        !self.is_dormant
    }

    /// Whether the kernel processes the records.
    #[cfg(test)]
    pub(crate) fn is_by_kernel(&self) -> bool {
        matches!(self.stage, TlsStage::Kernel(_))
    }

    /// Sends what must precede data that is sent through kTLS, such as a KeyUpdate.
    ///
    /// # Errors
    /// If there is no room, or the connection cannot go on.
    #[inline]
    pub(crate) fn before_sending<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), Broken> {
        match &mut self.stage {
            TlsStage::Kernel(kernel) => kernel.before_sending(stream),
            _ => Ok(()),
        }
    }

    /// Counts bytes of data sent through kTLS.
    #[inline]
    pub(crate) fn on_sent(&mut self, bytes: usize) {
        if let TlsStage::Kernel(kernel) = &mut self.stage {
            kernel.on_sent(bytes);
        }
    }

    /// Handles a failed receive, which may mean that the next record is not data. Returns whether
    /// the peer has ended its output.
    ///
    /// # Errors
    /// If receiving has really failed.
    #[cold]
    pub(crate) fn on_receive_error<S: ByteStream>(
        &mut self,
        stream: &mut S,
        error: io::Error,
    ) -> Result<bool, Broken> {
        match &mut self.stage {
            TlsStage::Kernel(kernel) => kernel.on_receive_error(stream, error),
            _ => Err(error.into()),
        }
    }

    /// Sends close_notify, best effort (RFC 8446 §6.1).
    pub(crate) fn close<S: ByteStream>(&mut self, stream: &mut S) {
        match &mut self.stage {
            _ if self.is_dormant => {}
            TlsStage::Unknown { .. } | TlsStage::Handshake(_) => {}
            TlsStage::Tls(tls) => {
                tls.close();
                self.outgoing.push_head(tls.output());
                tls.output().clear();
                if !self.outgoing.is_empty() {
                    let _ = stream.send(&mut self.outgoing);
                }
            }
            TlsStage::Kernel(kernel) => kernel.close(stream),
        }
    }

    /// Processes received bytes; called with none to start a client's handshake.
    pub(crate) fn take(&mut self, bytes: &[u8], chunk: &mut Chunk) -> Result<usize, TlsError> {
        let TlsStage::Tls(tls) = &mut self.stage else { return Ok(0) };
        let result = tls.receive(bytes, chunk.spare());
        self.outgoing.push_head(tls.output());
        tls.output().clear();
        let moved = result?;
        chunk.fill(moved.given);
        Ok(moved.taken)
    }

    /// Encrypts as much of the session's outbox as possible, if no records wait to be sent.
    pub(crate) fn encrypt_front(&mut self, outbox: &Outbox) -> Result<(), TlsError> {
        let TlsStage::Tls(tls) = &mut self.stage else { return Ok(()) };
        if !tls.is_open() || !self.outgoing.is_empty() || self.encrypted > 0 || outbox.is_empty() {
            return Ok(());
        }
        self.scratch.clear();
        for piece in outbox.pieces() {
            let room = MAX_AT_ONCE - self.scratch.len();
            match piece {
                OutboxPiece::Head(head) => self.scratch.extend_from_slice(&head[..head.len().min(room)]),
                OutboxPiece::Payload(seg) => {
                    let (start, len) = (self.scratch.len(), seg.len().min(room));
                    self.scratch.resize(start + len, 0);
                    seg.slice(0, len).copy_to(&mut self.scratch[start..]);
                }
            }
            if self.scratch.len() == MAX_AT_ONCE {
                break;
            }
        }
        tls.send(&self.scratch)?;
        self.encrypted = self.scratch.len();
        self.outgoing.push_head(tls.output());
        tls.output().clear();
        Ok(())
    }

    /// Records to be sent. Call [`Secure::sent`] after sending.
    pub(crate) fn outgoing(&mut self) -> &mut Outbox {
        &mut self.outgoing
    }

    /// Removes from the session's outbox what was sent completely.
    pub(crate) fn sent(&mut self, outbox: &mut Outbox) {
        if self.outgoing.is_empty() {
            outbox.consume(std::mem::take(&mut self.encrypted));
        }
    }

    /// Whether there is output that can be sent.
    pub(crate) fn wants_output(&self, outbox: &Outbox) -> bool {
        !self.outgoing.is_empty() || (self.is_open() && !outbox.is_empty())
    }

    /// Frees buffers that an idle connection does not need.
    pub(crate) fn shrink(&mut self) {
        if self.incoming.as_ref().is_some_and(Chunk::is_idle) {
            self.incoming = None;
        }
        if self.outgoing.is_empty() {
            self.scratch = Vec::new();
            if let TlsStage::Tls(tls) = &mut self.stage {
                *tls.output() = Vec::new();
                tls.shrink();
            }
        }
    }

    /// Whether the handshake is complete.
    pub(crate) fn is_open(&self) -> bool {
        matches!(&self.stage, TlsStage::Tls(tls) if tls.is_open())
    }

    /// Whether a helper computes the handshake: nothing is received meanwhile.
    pub(crate) fn is_computing(&self) -> bool {
        matches!(&self.stage, TlsStage::Handshake(_))
    }

    /// Whether the peer has sent close_notify.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(&self.stage, TlsStage::Tls(tls) if tls.has_ended())
    }

    /// Starts TLS with the bytes received so far, which are records of the peer's handshake.
    fn begin(&mut self, chunk: &mut Chunk) -> Result<(), TlsError> {
        let TlsStage::Unknown { credentials, .. } = &self.stage else { return Ok(()) };
        let tls = Tls::server(credentials)?;
        self.boundary.pass(chunk.unread());
        self.incoming = Some(Chunk::from_slice(chunk.unread()));
        chunk.take(chunk.unread().len());
        self.stage = TlsStage::Tls(Box::new(tls));
        Ok(())
    }

    /// Takes the result of a helper, and passes it the bytes of the handshake that were received.
    ///
    /// # Errors
    /// If the handshake failed.
    fn compute_handshake(&mut self) -> Result<(), TlsError> {
        if let TlsStage::Handshake(step) = &mut self.stage {
            let Some(HandshakeStep { mut tls, result }) = step.take() else { return Ok(()) };
            self.outgoing.push_head(tls.output());
            tls.output().clear();
            self.stage = TlsStage::Tls(tls);
            let taken = result?.taken;
            self.incoming.iter_mut().for_each(|incoming| incoming.take(taken));
        }
        if self.is_open() {
            self.helpers = None;
        }
        let input = self.incoming.as_ref().map_or(&[][..], Chunk::unread);
        if let (Some(helpers), TlsStage::Tls(_), false) = (&self.helpers, &self.stage, input.is_empty()) {
            let (input, stage) = (input.to_vec(), TlsStage::Handshake(Computation::default()));
            if let TlsStage::Tls(mut tls) = std::mem::replace(&mut self.stage, stage) {
                self.stage = TlsStage::Handshake(Computation::start(Some(helpers), move || {
                    let result = tls.receive(&input, &mut []);
                    HandshakeStep { tls, result }
                }));
            }
        }
        Ok(())
    }

    /// Processes received records; returns the number of plaintext bytes added to the chunk.
    fn advance(&mut self, chunk: &mut Chunk) -> Result<usize, TlsError> {
        if self.helpers.is_some() {
            self.compute_handshake()?;
        }
        if self.is_computing() {
            return Ok(0);
        }
        let room = chunk.room();
        let incoming = self.incoming.take();
        let result = self.take(incoming.as_ref().map_or(&[], Chunk::unread), chunk);
        self.incoming = incoming;
        if let (Some(incoming), Ok(taken)) = (&mut self.incoming, &result) {
            incoming.take(*taken);
        }
        result.map(|_| room - chunk.room())
    }

    /// An empty chunk for more records, once all received ones are processed.
    fn room_for_records(&mut self, pool: &Pool) -> &mut Chunk {
        self.incoming.take_if(|chunk| chunk.room() < SMALL);
        self.incoming.get_or_insert_with(|| {
            let len = if pool.is_short() { SHORT_RECORDS } else { RECORDS };
            Chunk::new(pool.take(len).unwrap_or_else(|| Memory::from_heap(SMALL)))
        })
    }
}

/// Content type of handshake records (RFC 8446 §5.1).
const HANDSHAKE: u8 = 0x16;
/// Plaintext encrypted at a time: four records of maximum length.
const MAX_AT_ONCE: usize = 64 << 10;
/// Partial records received in one turn while at most one record is received at a time (handshake).
const PARTS_PER_TURN: usize = 16;
/// Bytes received at a time.
const RECORDS: usize = 128 << 10;
/// Bytes received at a time when buffers are short.
const SHORT_RECORDS: usize = 16 << 10;
/// Bytes received at a time when the pool is empty: some small records.
const SMALL: usize = 4096;

#[cfg(test)]
mod kernel_tests;
#[cfg(test)]
mod tests;
