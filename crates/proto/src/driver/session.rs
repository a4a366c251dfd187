//! The traits between a session and its driver.
//!
//! ```text
//!   socket ──bytes──▶ StreamSession::on_bytes ──▶ IoSource::poll_io ──▶ channel
//!   socket ◀─gather── StreamSession::outbox  ◀── IoSource::on_io   ◀── channel
//! ```
//! A protocol over raw frames implements [`FrameSession`] instead of [`StreamSession`]. A target
//! also has the traits of [`crate::driver::target`].
//!
//! In each turn, the driver receives bytes as [`StreamSession::demand`] requests and passes them to
//! the session; takes and submits every I/O, and cancels those that the session cancels; passes
//! completions; and sends the outbox. A session has no clock: every input call has the current
//! time.
//!
//! An initiator's session may have several connections, all on one core
//! (`docs/decisions/0011-an-initiator-session-drives-all-its-connections.md`).
//! [`StreamConnections::connection`] returns the stream session of one of them. [`Connections`]
//! returns when to open another one, and is notified when one is established or lost.

use crate::driver::frames::{Frame, FrameOutbox, FramePortInfo, PortId};
use crate::driver::outbox::Outbox;
use crate::driver::transport::TransportInfo;
use blockmux_volume::{Chunk, Completion, Io, SgList};
use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A protocol violation of the peer, or an early end of the connection; the connection must be
/// closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what} ({reference})")]
pub struct ProtocolError {
    /// The violation as a predicate of the peer: "sent a request with a wrong magic number".
    pub what: &'static str,
    /// The violated rule: document and section.
    pub reference: &'static str,
}

/// The bytes of the stream that a session needs next.
#[derive(Debug)]
pub enum Demand {
    /// At least this many contiguous bytes, at most [`MAX_DEMAND`], to pass to `on_bytes`.
    Bytes(usize),
    /// Payload: fill all of this memory, then call `on_placed`. The driver first copies its unread
    /// bytes there, then receives directly into it. Until then, `demand` returns the whole memory.
    Place(SgList),
    /// A TLS handshake on this connection, then [`StreamSession::on_secured`]. The outbox is empty.
    /// Unread bytes, which arrived before TLS, are a protocol violation ([`BYTES_BEFORE_TLS`]).
    StartTls,
    /// Nothing now (back-pressure): the session waits for completions or for its outbox to drain.
    Nothing,
    /// Nothing more: close the connection once the outbox is empty and no I/O is in flight.
    Close,
}

/// The peer's identity on a TLS connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecuredBy<'a> {
    /// The peer has the pre-shared key with this identity.
    Psk(&'a [u8]),
    /// The peer has a certificate with this subject, in the form of RFC 4514.
    Certificate(&'a str),
    /// The peer is a client that was not asked for a certificate.
    Nothing,
}

/// The error for bytes that arrived unencrypted before the TLS handshake, perhaps injected.
pub const BYTES_BEFORE_TLS: ProtocolError = ProtocolError {
    what: "sent bytes in the clear where the TLS handshake should begin",
    reference: "proto.md, \"FORCEDTLS mode\"",
};

/// The maximum of [`Demand::Bytes`]; a receive buffer holds at least this many bytes.
pub const MAX_DEMAND: usize = 128 << 10;

/// Deadlines of a session: keep-alive, login and recovery timers.
pub trait Timed {
    /// When to call [`Timed::on_timeout`]; `None`: there is no deadline.
    fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    /// Handles a deadline that has passed.
    ///
    /// # Errors
    /// If the peer has missed a deadline after which the connection must be closed.
    fn on_timeout(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        Ok(())
    }

    /// Called before output is taken, for sessions that start timers when they send: they ask for
    /// the time.
    #[inline]
    fn on_send(&mut self, _now: impl FnOnce() -> Instant)
    where
        Self: Sized,
    {
    }
}

/// A session over a byte stream: NBD, iSCSI, NVMe/TCP, and MPA under iWARP.
pub trait StreamSession: Timed {
    /// The bytes to receive next. The call has no side effect.
    fn demand(&self) -> Demand;

    /// Passes the unread bytes, at least as many as `demand` requested. Returns the number of bytes
    /// consumed; the driver passes the rest again when the next demand is met. The session may
    /// borrow payload without a copy ([`Chunk::slice`]).
    ///
    /// # Errors
    /// If the peer violated the protocol: the driver sends the outbox and closes the connection.
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError>;

    /// TLS is established; the peer authenticated as `by`. Called before any bytes are passed, or
    /// after [`Demand::StartTls`].
    ///
    /// # Errors
    /// If the session does not accept a TLS connection.
    fn on_secured(&mut self, _by: SecuredBy<'_>, _now: Instant) -> Result<(), ProtocolError> {
        Ok(())
    }

    /// Handles that the memory of [`Demand::Place`] has been filled.
    ///
    /// # Errors
    /// If the peer violated the protocol.
    fn on_placed(&mut self, now: Instant) -> Result<(), ProtocolError>;

    /// Whether most bytes are payload for [`Demand::Place`]. The driver then receives little beyond
    /// the demand, because bytes in its buffer must be copied to their destination.
    fn is_mostly_placed(&self) -> bool {
        false
    }

    /// Handles that the peer has closed its side. Over a transport that has no close, it
    /// is also called when this side closes, and the outbox is sent once more afterwards.
    ///
    /// # Errors
    /// If the peer may not close the connection at this point.
    fn on_end(&mut self, now: Instant) -> Result<(), ProtocolError>;

    /// The bytes to send. The driver calls it again after it has sent some, because the session may
    /// then have room for more.
    fn outbox(&mut self) -> &mut Outbox;
}

impl<S: Timed> Timed for &mut S {
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        (**self).poll_timeout()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        (**self).on_timeout(now)
    }

    #[inline]
    fn on_send(&mut self, now: impl FnOnce() -> Instant) {
        (**self).on_send(now);
    }
}

impl<S: StreamSession> StreamSession for &mut S {
    #[inline]
    fn demand(&self) -> Demand {
        (**self).demand()
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        (**self).on_bytes(input, now)
    }

    fn on_secured(&mut self, by: SecuredBy<'_>, now: Instant) -> Result<(), ProtocolError> {
        (**self).on_secured(by, now)
    }

    #[inline]
    fn on_placed(&mut self, now: Instant) -> Result<(), ProtocolError> {
        (**self).on_placed(now)
    }

    #[inline]
    fn is_mostly_placed(&self) -> bool {
        (**self).is_mostly_placed()
    }

    fn on_end(&mut self, now: Instant) -> Result<(), ProtocolError> {
        (**self).on_end(now)
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        (**self).outbox()
    }
}

/// A session over frames of one network interface or several, its ports: ATA over Ethernet.
///
/// No frame ends such a session: the sender is not authenticated, so invalid frames are dropped.
pub trait FrameSession: Timed {
    /// Handles a frame. The session may borrow payload without a copy ([`Frame::slice`]).
    fn on_frame(&mut self, frame: &Frame<'_>, now: Instant);

    /// Handles a new port, or a change of its link state or MTU.
    fn on_port(&mut self, id: PortId, port: FramePortInfo, now: Instant);

    /// The frames to send, including those that could not be sent before.
    fn frames(&mut self, now: Instant) -> &mut FrameOutbox;
}

/// Closes the connection of a session, from any thread; to the session, the peer has disconnected.
pub type HangUp = Arc<dyn Fn() + Send + Sync>;

/// Control of a session's connection from any thread.
pub trait ConnectionControl: Send + Sync {
    /// Closes the connection; its session sees the end of the stream.
    fn hang_up(&self);

    /// Whether the peer has closed its side. The session may not have noticed yet.
    fn has_ended(&self) -> bool;
}

/// A connection that can only be closed.
impl<F: Fn() + Send + Sync> ConnectionControl for F {
    fn hang_up(&self) {
        self();
    }

    fn has_ended(&self) -> bool {
        false
    }
}

/// A shared [`ConnectionControl`].
pub type ConnectionHandle = Arc<dyn ConnectionControl>;

/// An opaque handle of a core, by which a driver hands connections over to it. Two handles are the
/// same if one is a clone of the other.
#[derive(Clone)]
pub struct CoreHandle(Arc<dyn Any + Send + Sync>);

impl CoreHandle {
    /// Wraps the driver's own handle of a core.
    #[must_use]
    pub fn new<T: Any + Send + Sync>(handle: T) -> CoreHandle {
        CoreHandle(Arc::new(handle))
    }

    /// The driver's handle, if it is of type `T`.
    #[must_use]
    pub fn downcast<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }

    /// Whether both are clones of one handle.
    #[must_use]
    pub fn is_same(&self, other: &CoreHandle) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.0), Arc::as_ptr(&other.0))
    }
}

/// Rank of a session's path to its volume; a better path compares as less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathRank {
    /// The target prefers this path.
    Best,
    /// The path works with lower performance.
    Good,
    /// The path may work later.
    Poor,
    /// The path fails requests, and is not used for a while.
    Failing,
    /// The path cannot be used now.
    Unusable,
}

/// The control connection of an initiator's session, such as an NVMe admin queue. It must be open
/// before the session and as long as the session.
pub trait Control: Timed {
    /// Whether a session may be opened.
    fn is_ready(&self) -> bool;

    /// The volume's size in bytes, as [`Initiator::poll_size`].
    fn poll_size(&mut self) -> Option<u64> {
        None
    }

    /// The rank of the session's path; returned once when it is known, and after each new query.
    fn poll_path_rank(&mut self) -> Option<PathRank> {
        None
    }

    /// Queries the rank of the path again, because a request contradicted the known one.
    fn query_path_rank(&mut self) {}

    /// Ends the control connection regularly, because its session has ended.
    fn on_stop(&mut self);
}

/// The control connection of protocols without one.
#[derive(Debug)]
pub enum NoControl {}

impl Timed for NoControl {}

impl StreamSession for NoControl {
    fn demand(&self) -> Demand {
        match *self {}
    }

    fn on_bytes(&mut self, _input: &Chunk, _now: Instant) -> Result<usize, ProtocolError> {
        match *self {}
    }

    fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        match *self {}
    }

    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        match *self {}
    }

    fn outbox(&mut self) -> &mut Outbox {
        match *self {}
    }
}

impl Control for NoControl {
    fn is_ready(&self) -> bool {
        match *self {}
    }

    fn on_stop(&mut self) {
        match *self {}
    }
}

/// The user's side of an initiator session, which implements a channel together with its
/// connections.
pub trait Initiator {
    /// Whether the login is complete, so that [`Initiator::room`] is valid.
    fn is_ready(&self) -> bool;

    /// The number of requests that the session accepts now.
    fn room(&self) -> usize;

    /// Submits a request. Call it only while there is room.
    fn submit(&mut self, io: Io);

    /// The next completion.
    fn poll_done(&mut self) -> Option<Completion>;

    /// A request that did not complete and must be submitted again, to this or another session. The
    /// target has aborted it, so its effect is unknown; or the path is [`PathRank::Failing`]; or it
    /// is [`PathRank::Unusable`] and other paths exist.
    fn poll_returned(&mut self) -> Option<Io>;

    /// Returns all requests that have not completed, oldest first, to be replayed on another
    /// session; called when the connection is lost.
    fn take_unfinished(&mut self) -> Vec<Io>;

    /// The volume's size in bytes; returned once when it is known, and after each change.
    fn poll_size(&mut self) -> Option<u64>;

    /// Sets the size of the volume, which another session with the same volume has received.
    fn resize(&mut self, size: u64);

    /// The rank of the session's path. A session with an `Unusable` path accepts requests
    /// nevertheless.
    fn path_rank(&self) -> PathRank;

    /// Ends the session regularly once no request is in flight.
    fn on_stop(&mut self);
}

/// How an initiator retries I/O that a path cannot carry out now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryRules {
    /// Other paths to the volume exist: such I/O is returned by [`Initiator::poll_returned`].
    pub has_other_paths: bool,
    /// How long a command is retried that the target refuses for a temporary reason, such as BUSY;
    /// at least a second, because a target with a full queue refuses commands, too.
    pub busy_timeout: Duration,
}

impl Default for RetryRules {
    fn default() -> RetryRules {
        RetryRules { has_other_paths: false, busy_timeout: crate::names::uri::DEFAULT_RECONNECT }
    }
}

/// Detects and aborts requests without an answer.
pub trait Overdue {
    /// Ages pending requests; returns for how many consecutive calls the oldest has been pending,
    /// the maximum over all connections. Requests that take long, such as a flush, count a quarter.
    fn tick(&mut self) -> u32;

    /// Aborts requests that have been pending for at least `ticks` calls of [`Overdue::tick`], and
    /// escalates if they were aborted before. Returns the action, to follow "the target is asked".
    /// Aborted requests are returned by [`Initiator::poll_returned`]; the others are found again by
    /// later calls. `None`: no further action is possible.
    fn abort_overdue(&mut self, ticks: u32) -> Option<&'static str>;
}

/// The connections of an initiator's session. Connection 0 exists before the session; the defaults
/// are for sessions that have no other.
pub trait Connections {
    /// The next connection to open, to the address of the first one, and when. Each connection is
    /// returned once until it is lost.
    #[inline]
    fn poll_connect(&mut self) -> Option<(usize, Instant)> {
        None
    }

    /// A connection over `_transport` is established; its outbox contains its first bytes.
    fn on_connected(&mut self, _connection: usize, _transport: &TransportInfo, _now: Instant) {}

    /// A connection is lost or could not be established. Returns whether the session continues,
    /// without it or with another one from [`Connections::poll_connect`]. If not, the driver takes
    /// all requests back.
    fn on_lost(&mut self, _connection: usize, _now: Instant) -> bool {
        false
    }

    /// The connection with the latest requests. To deliver requests in order, the driver sends the
    /// outboxes of the other connections first.
    #[inline]
    fn latest(&self) -> usize {
        0
    }

    /// Whether an answer is pending on a connection. The driver need not receive from other
    /// connections in each turn.
    #[inline]
    fn is_awaited(&self, _connection: usize) -> bool {
        true
    }

    /// How long to wait before a new session replaces this one after its connection is lost.
    fn reconnects_after(&self) -> Duration {
        Duration::ZERO
    }
}

/// A session whose connections are byte streams.
pub trait StreamConnections: Connections {
    /// The stream session of one connection.
    fn connection(&mut self, connection: usize) -> impl StreamSession;
}
