//! The traits between a session and its driver.
//!
//! ```text
//!   socket ──bytes──▶ StreamSession::on_bytes ──▶ Target::poll_io ──▶ channel
//!   socket ◀─gather── StreamSession::outbox  ◀── Target::on_io   ◀── channel
//! ```
//! A protocol on raw frames has a [`FrameSession`] in the place of the stream session; the other
//! side is the same.
//!
//! The driver's turn, over and over: while [`StreamSession::demand`] asks for bytes and there are
//! some, show them; take every I/O and submit it, and cancel what is to be cancelled; hand in what
//! completed; send what the outbox holds. A session has no clock: each call that brings something
//! in says when that is.
//!
//! A session of an initiator may have several connections, all driven on one core
//! (`docs/decisions/0011-connections-of-one-session.md`). [`StreamConnections::connection`] is the
//! stream session of one of them; [`Connections`] says when the session wants another one, and
//! hears when that is there or gone.

use crate::event::AuditEvent;
use crate::exports::VolumeId;
use crate::frames::{Frame, FrameOutbox, FramePortInfo, PortId};
use crate::outbox::Outbox;
use blockmux_volume::{Chunk, Completion, Io, SgList, Tag, Waker};
use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The peer broke the protocol, or left; the connection cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what} ({reference})")]
pub struct ProtocolError {
    /// What the peer did, as half a sentence: "sent a request with a wrong magic number".
    pub what: &'static str,
    /// The rule that it broke: document and section.
    pub reference: &'static str,
}

/// Where the next bytes of the stream should go.
#[derive(Debug)]
pub enum Demand {
    /// At least this many bytes in one piece, at most [`MAX_DEMAND`], to be shown to `on_bytes`.
    Bytes(usize),
    /// Payload: straight into this memory, all of it, then `on_placed`. It begins with what is
    /// unread, which the driver copies; asked again meanwhile, the session names the whole memory
    /// again.
    Place(SgList),
    /// A TLS handshake on this connection, then [`StreamSession::on_secured`]. The outbox is empty.
    /// Bytes that came in the clear and are unread are an error of the peer
    /// ([`BYTES_BEFORE_TLS`]).
    StartTls,
    /// Nothing now: back-pressure. The session is waiting for completions or for its outbox to
    /// drain.
    Nothing,
    /// Nothing ever: close the connection once the outbox is empty and no I/O is in flight.
    Close,
}

/// How the peer of a TLS connection has authenticated itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecuredBy<'a> {
    /// By the pre-shared key of this identity.
    Psk(&'a [u8]),
    /// By the certificate with this subject, as RFC 4514 writes it.
    Certificate(&'a str),
    /// Not at all: a client that was not asked for a certificate.
    Nothing,
}

/// Bytes that a peer, or somebody between it and us, has sent in the clear where TLS should begin.
pub const BYTES_BEFORE_TLS: ProtocolError = ProtocolError {
    what: "sent bytes in the clear where the TLS handshake should begin",
    reference: "proto.md, \"FORCEDTLS mode\"",
};

/// The most contiguous bytes that a session may ask for; a receive buffer holds at least this.
pub const MAX_DEMAND: usize = 128 << 10;

/// How long the oldest request of an initiator may wait for its answer, unless told otherwise: as
/// long as with the initiators of Linux.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// What has deadlines: keep-alive, log-in and recovery timers.
pub trait Timed {
    /// When to call [`Timed::on_timeout`], if ever.
    fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    /// The deadline has passed.
    ///
    /// # Errors
    /// If the peer was due to do something and the connection cannot go on.
    fn on_timeout(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        Ok(())
    }
}

/// A session over a byte stream: NBD, iSCSI, NVMe/TCP, and MPA under iWARP.
pub trait StreamSession: Timed {
    /// What to receive next. Asking changes nothing.
    fn demand(&self) -> Demand;

    /// Shows what is unread, at least as many bytes as `demand` asked for. Returns how many it
    /// took; the driver shows the rest again when the next demand is met. Payload may be lent on
    /// ([`Chunk::lend`]) without a copy.
    ///
    /// # Errors
    /// If the peer broke the protocol: the driver sends what the outbox holds and closes.
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError>;

    /// TLS is established, and the peer authenticated as this. It happens before any bytes are
    /// shown, or after [`Demand::StartTls`].
    ///
    /// # Errors
    /// If there is no use for such a connection.
    fn on_secured(&mut self, _by: SecuredBy<'_>, _now: Instant) -> Result<(), ProtocolError> {
        Ok(())
    }

    /// The memory of [`Demand::Place`] is full.
    ///
    /// # Errors
    /// As for `on_bytes`.
    fn on_placed(&mut self, now: Instant) -> Result<(), ProtocolError>;

    /// Whether what comes is mostly payload that has a place: then a driver does well to receive
    /// little beyond what is demanded, because whatever lies in its buffer is copied to its place.
    fn is_mostly_placed(&self) -> bool {
        false
    }

    /// The peer has closed its side. An error if that was not allowed at this point.
    ///
    /// # Errors
    /// If the peer left in the middle of something.
    fn on_end(&mut self, now: Instant) -> Result<(), ProtocolError>;

    /// What waits to be sent. The driver looks again when it has sent something: there may be room
    /// for more then.
    fn outbox(&mut self) -> &mut Outbox;
}

impl<S: Timed + ?Sized> Timed for &mut S {
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        (**self).poll_timeout()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        (**self).on_timeout(now)
    }
}

impl<S: StreamSession + ?Sized> StreamSession for &mut S {
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
/// Nothing that comes breaks such a session: whoever sends a frame may be anybody, so that a wrong
/// one is dropped.
pub trait FrameSession: Timed {
    /// Takes a frame. Payload may be lent on ([`Frame::lend`]) without a copy.
    fn on_frame(&mut self, frame: &Frame<'_>, now: Instant);

    /// A port is like this now: it is new, went up or down, or takes frames of another size.
    fn on_port(&mut self, id: PortId, port: FramePortInfo, now: Instant);

    /// What is to be sent now, what could not be sent before included.
    fn frames(&mut self, now: Instant) -> &mut FrameOutbox;
}

/// Disconnects a session's peer, from any thread: the session sees that its peer has left.
pub type HangUp = Arc<dyn Fn() + Send + Sync>;

/// The volume side of a target session.
///
/// A session bounds its I/O in flight by [`Target::depth`] and its memory by asking for nothing
/// meanwhile.
pub trait Target: Timed {
    /// The most I/O that the session ever has in flight.
    fn depth(&self) -> u32;

    /// The next I/O and the volume it is for. Tags are unique among the session's I/O in flight.
    fn poll_io(&mut self) -> Option<(VolumeId, Io)>;

    /// The next I/O in flight that nobody waits for any more: the driver asks its channel to end it
    /// early. It completes all the same.
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)>;

    /// An I/O has completed.
    fn on_io(&mut self, done: Completion, now: Instant);

    /// The driver begins to drive the session; `waker` has it take another turn.
    fn on_start(&mut self, waker: &Waker, now: Instant);

    /// A turn begins: another session of this core may have left something for this one.
    fn on_turn(&mut self, now: Instant);

    /// How far the session has come.
    fn stage(&self) -> SessionStage;

    /// The oldest data that the peer was asked for and that memory waits for, if there is any:
    /// another number for each. A driver whose buffers are short bounds how long that may take.
    fn owed(&self) -> Option<u64>;

    /// The next event that an operator may want to audit; never one per I/O.
    fn poll_event(&mut self) -> Option<AuditEvent>;

    /// Whether a peer that closes the connection between messages has logged out.
    fn is_close_a_logout(&self) -> bool {
        false
    }

    /// The target is stopping: finish what is in flight, refuse what comes, then ask to close.
    fn on_stop(&mut self, now: Instant);
}

/// How far a target's session has come with its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionStage {
    /// The peer has not come through its handshake. A driver that has as many connections as it may
    /// have can close this one for a newcomer.
    Handshake,
    /// The peer has logged in, or whatever the protocol has for that.
    Established,
    /// The connection is over and may be closed. The driver goes on with deadlines, I/O and turns,
    /// but shows no bytes.
    Lingering,
}

/// A core, as the driver knows it that hands connections over to it.
#[derive(Clone)]
pub struct Home(Arc<dyn Any + Send + Sync>);

impl Home {
    /// The core that is reached by `way`. Another call makes another home, even of the same core.
    #[must_use]
    pub fn new<T: Any + Send + Sync>(way: T) -> Home {
        Home(Arc::new(way))
    }

    /// How it is reached, if that is how.
    #[must_use]
    pub fn way<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }

    /// Whether it is the same.
    #[must_use]
    pub fn is(&self, other: &Home) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.0), Arc::as_ptr(&other.0))
    }
}

/// How well a session reaches its volume, where there are several ways to it; the better ones are
/// less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathRank {
    /// The way that the target prefers.
    Best,
    /// It costs more.
    Good,
    /// It may work in a while.
    Poor,
    /// It fails what goes by it, and is left alone for a while.
    Failing,
    /// Not now.
    Unusable,
}

/// What has to be open before an initiator's session can be, and for as long as that is: an admin
/// queue of NVMe.
pub trait Control: Timed {
    /// Whether a session may begin.
    fn is_ready(&self) -> bool;

    /// The volume's size in bytes, as [`Initiator::poll_size`] tells it.
    fn poll_size(&mut self) -> Option<u64> {
        None
    }

    /// How well the session reaches its volume, once when it is known and whenever it was looked at
    /// again.
    fn poll_path_rank(&mut self) -> Option<PathRank> {
        None
    }

    /// The session has found that it reaches its volume otherwise than was told: looks again.
    fn look_at_path(&mut self) {}

    /// The session beside it is over: ends this one softly, at once.
    fn on_stop(&mut self);
}

/// The control of protocols that have none.
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

/// The user side of an initiator session: with its connections under it, it is a channel.
pub trait Initiator {
    /// Whether log-in is done and [`Initiator::room`] means something.
    fn is_ready(&self) -> bool;

    /// How many more requests it takes now.
    fn room(&self) -> usize;

    /// Takes a request; call only while there is room. It holds on to it until it completes.
    fn submit(&mut self, io: Io);

    /// The next completion.
    fn poll_done(&mut self) -> Option<Completion>;

    /// A request that was taken, has not completed, and is to be submitted again, here or to
    /// another session: the target has aborted it, so that nothing is known of what it has done, or
    /// the path is [`PathRank::Unusable`] and the session was told of others, or the path is
    /// [`PathRank::Failing`].
    fn poll_returned(&mut self) -> Option<Io>;

    /// The connection is gone: takes back every request that has not completed, oldest first, to be
    /// replayed on another session.
    fn take_unfinished(&mut self) -> Vec<Io>;

    /// The volume's size in bytes, once when it is known and whenever it has changed; `None` also
    /// from sessions whose volume never changes.
    fn poll_size(&mut self) -> Option<u64>;

    /// Another session with the same volume has learned that it is of this size now.
    fn resize(&mut self, size: u64);

    /// How well the session reaches its volume. One that is `Unusable` takes requests all the same.
    fn path_rank(&self) -> PathRank;

    /// Ends the session softly once nothing is in flight.
    fn on_stop(&mut self);
}

/// Requests that get no answer, in sessions whose driver watches for them.
pub trait Overdue {
    /// Ages the pending requests. Returns for how many consecutive calls the oldest one has been
    /// pending, or the most of any connection. What takes long by its nature, as a flush does,
    /// counts a quarter.
    fn look(&mut self) -> u32;

    /// Asks the target to abort the requests that have been pending for at least so many looks, or
    /// takes a harsher step if it was asked before. Returns what it asks for, as it follows "the
    /// target is asked". What the target has aborted comes back by [`Initiator::poll_returned`], or
    /// the next looks find it again. `None`: there is nothing left to be asked for.
    fn abort_overdue(&mut self, looks: u32) -> Option<&'static str>;
}

/// The connections of an initiator's session. The first one, number 0, is there before the session.
pub trait Connections {
    /// A connection that the session wants, to where the first one goes, and when to connect. Each
    /// is named once until it is lost.
    fn poll_connect(&mut self) -> Option<(usize, Instant)>;

    /// A connection is there: its outbox has what it begins with.
    fn on_connected(&mut self, connection: usize, now: Instant);

    /// A connection is lost, or could not be had. Returns whether the session goes on: without it,
    /// or with another one that [`Connections::poll_connect`] asks for. If not, the driver takes
    /// the whole session back.
    fn on_lost(&mut self, connection: usize, now: Instant) -> bool;

    /// The connection that was given the latest requests. A driver that sends what the others have
    /// before this one's delivers requests in order.
    fn latest(&self) -> usize;

    /// Whether an answer is due on a connection. A driver that is awake need not receive from one
    /// without in each turn.
    fn is_awaited(&self, connection: usize) -> bool;

    /// How long to wait before another session takes this one's place, when its connection is gone.
    fn reconnects_after(&self) -> Duration;
}

/// A session whose connections are byte streams.
pub trait StreamConnections: Connections {
    /// The stream session of one connection.
    fn connection(&mut self, connection: usize) -> impl StreamSession;
}
