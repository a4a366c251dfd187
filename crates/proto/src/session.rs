//! The traits between a session and its driver.
//!
//! ```text
//!   socket ──bytes──▶ StreamSession::on_bytes ──▶ Target::poll_io ──▶ channel
//!   socket ◀─gather── StreamSession::outbox  ◀── Target::on_io   ◀── channel
//! ```
//! A protocol on raw frames has a [`FrameSession`] in the place of the stream session; the other side is the same.
//!
//! The driver's turn, over and over: while [`StreamSession::demand`] asks for bytes and there are some, show them;
//! take every I/O and submit it, and cancel what is to be cancelled; hand in what completed; send what the outbox holds.
//!
//! A session of an initiator may have several connections, its lanes, all driven on one core
//! (`docs/decisions/0011-connections-of-one-session.md`). It says when it wants one more ([`Initiator::poll_dial`]), and
//! hears when that is there or gone. The calls of [`StreamSession`] and [`Timed`] are about one lane: the first, until
//! [`Initiator::select`] names another. A session that knows nothing of lanes has one, and all of that is the default.

use crate::event::AuditEvent;
use crate::exports::VolumeId;
use crate::frames::{Frame, FrameOutbox, Port, PortId};
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
    /// Payload: straight into this memory, all of it, then `on_placed`. It begins with what is unread, which the
    /// driver copies; asked again meanwhile, the session names the whole memory again.
    Place(SgList),
    /// Nothing now: back-pressure. The session is waiting for completions or for its outbox to drain.
    Nothing,
    /// Nothing ever: close the connection once the outbox is empty and no I/O is in flight.
    Close,
}

/// The most contiguous bytes that a session may ask for; a receive buffer holds at least this.
pub const MAX_DEMAND: usize = 128 << 10;

/// How long the oldest request of an initiator may wait for its answer, unless told otherwise: as long as with the
/// initiators of Linux.
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

    /// Shows what is unread, at least as many bytes as `demand` asked for. Returns how many it took; the driver
    /// shows the rest again when the next demand is met. Payload may be lent on ([`Chunk::lend`]) without a copy.
    ///
    /// # Errors
    /// If the peer broke the protocol: the driver sends what the outbox holds and closes.
    fn on_bytes(&mut self, input: &Chunk) -> Result<usize, ProtocolError>;

    /// The connection is secured from now on, with the key of that identity: whatever is shown later is the peer's who
    /// has it. Nothing has been shown before.
    ///
    /// # Errors
    /// If there is no use for such a connection.
    fn on_secured(&mut self, _identity: &[u8]) -> Result<(), ProtocolError> {
        Ok(())
    }

    /// The memory of [`Demand::Place`] is full.
    ///
    /// # Errors
    /// As for `on_bytes`.
    fn on_placed(&mut self) -> Result<(), ProtocolError>;

    /// Whether what comes is mostly payload that has a place: then a driver does well to receive little beyond what is
    /// demanded, because whatever lies in its buffer is copied to its place.
    fn is_mostly_placed(&self) -> bool {
        false
    }

    /// The peer has closed its side. An error if that was not allowed at this point.
    ///
    /// # Errors
    /// If the peer left in the middle of something.
    fn on_end(&mut self) -> Result<(), ProtocolError>;

    /// What waits to be sent. The driver looks again when it has sent something: there may be room for more then.
    fn outbox(&mut self) -> &mut Outbox;
}

/// A session over frames of one network interface or several, its ports: ATA over Ethernet.
///
/// Nothing that comes breaks such a session: whoever sends a frame may be anybody, so that a wrong one is dropped.
pub trait FrameSession: Timed {
    /// Takes a frame. Payload may be lent on ([`Frame::lend`]) without a copy.
    fn on_frame(&mut self, frame: &Frame<'_>, now: Instant);

    /// A port is like this now: it is new, went up or down, or takes frames of another size.
    fn on_port(&mut self, id: PortId, port: Port, now: Instant);

    /// What is to be sent now, what could not be sent before included.
    fn frames(&mut self, now: Instant) -> &mut FrameOutbox;
}

/// The volume side of a target session.
///
/// A session bounds its I/O in flight by [`Target::depth`] and its memory by asking for nothing meanwhile.
pub trait Target: Timed {
    /// The most I/O that the session ever has in flight.
    fn depth(&self) -> u32;

    /// The next I/O and the volume it is for. Tags are unique among the session's I/O in flight.
    fn poll_io(&mut self) -> Option<(VolumeId, Io)>;

    /// The next I/O in flight that nobody waits for any more: the driver asks its channel to end it early. It completes
    /// all the same.
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        None
    }

    /// An I/O has completed.
    fn on_io(&mut self, done: Completion);

    /// The session begins to be driven; `waker` has the driver take another turn.
    fn on_start(&mut self, _waker: &Waker) {}

    /// A turn begins: another session of this core may have left something for this one.
    fn on_turn(&mut self) {}

    /// The core that this connection belongs on, if it is not this one. Then the session has taken nothing and wants
    /// nothing, and the driver hands the stream over with what is unread.
    fn moves_to(&self) -> Option<Home> {
        None
    }

    /// Whether the session is to be driven on although its connection is over and may be closed: deadlines, I/O and
    /// turns, but no bytes any more.
    fn lingers(&self) -> bool {
        false
    }

    /// For [`Target::moves_to`]: what was taken of the stream that the session there has to be shown again, before what is
    /// unread; and how many bytes that one will say which this one has sent already.
    fn begun(&mut self) -> (Vec<u8>, u64) {
        (Vec::new(), 0)
    }

    /// Whether the peer has come through its handshake. Until then a driver that has as many connections as it may have
    /// can let it go for a newcomer.
    fn is_established(&self) -> bool;

    /// The oldest data that the peer was asked for and that memory waits for, if there is any: another number for each.
    /// A driver whose buffers are short bounds how long that may take.
    fn owed(&self) -> Option<u64> {
        None
    }

    /// The next event that an operator may want to audit; never one per I/O.
    fn poll_event(&mut self) -> Option<AuditEvent> {
        None
    }

    /// The target is stopping: finish what is in flight, refuse what comes, then ask to close.
    fn on_stop(&mut self);
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

/// How well a session reaches its volume, where there are several ways to it; the better ones are less.
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

/// What has to be open before an initiator's session can be, and for as long as that is: an admin queue of NVMe.
pub trait Control: StreamSession {
    /// Whether a session may begin.
    fn is_ready(&self) -> bool;

    /// The volume's size in bytes, as [`Initiator::poll_size`] tells it.
    fn poll_size(&mut self) -> Option<u64> {
        None
    }

    /// How well the session reaches its volume, once when it is known and whenever it was looked at again.
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

    fn on_bytes(&mut self, _input: &Chunk) -> Result<usize, ProtocolError> {
        match *self {}
    }

    fn on_placed(&mut self) -> Result<(), ProtocolError> {
        match *self {}
    }

    fn on_end(&mut self) -> Result<(), ProtocolError> {
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

/// The user side of an initiator session: with a connection under it, it is a channel.
pub trait Initiator: Timed {
    /// Whether log-in is done and [`Initiator::room`] means something.
    fn is_ready(&self) -> bool;

    /// How many more requests it takes now.
    fn room(&self) -> usize;

    /// Takes a request; call only while there is room. It holds on to it until it completes.
    fn submit(&mut self, io: Io);

    /// The next completion.
    fn poll_done(&mut self) -> Option<Completion>;

    /// The volume's size in bytes, once when it is known and whenever it has changed; `None` also from sessions whose
    /// volume never changes.
    fn poll_size(&mut self) -> Option<u64> {
        None
    }

    /// Another session with the same volume has learned that it is of this size now.
    fn resize(&mut self, _size: u64) {}

    /// Looks which request has waited the longest for its answer: how many of these looks in a row have found the same one
    /// again, or the most of any connection. What takes long by its nature, as a flush does, counts a quarter. Always 0 from
    /// sessions that give up requests themselves.
    fn look(&mut self) -> u32 {
        0
    }

    /// Asks the target to give up what the last so many looks have found too long under way, or takes a harsher step if it
    /// was asked before. What it asks for, as it follows "the target is asked"; then what the target has given up comes back
    /// ([`Initiator::poll_aborted`]), or the next looks find it again. `None`: there is nothing left to be asked for.
    fn abort_overdue(&mut self, _looks: u32) -> Option<&'static str> {
        None
    }

    /// A request that the target has given up; nothing is known of what it has done.
    fn poll_aborted(&mut self) -> Option<Io> {
        None
    }

    /// How long to wait before another session takes this one's place, when its connection is gone.
    fn redials_after(&self) -> Duration {
        Duration::ZERO
    }

    /// The connection is gone: takes back every request that has not completed, oldest first, to be replayed on
    /// another session.
    fn take_unfinished(&mut self) -> Vec<Io>;

    /// How well it reaches its volume. A session that is `Unusable` takes requests all the same.
    fn path_rank(&self) -> PathRank {
        PathRank::Best
    }

    /// Its control has learned how well it reaches its volume.
    fn set_path_rank(&mut self, _rank: PathRank) {}

    /// A request that was taken and that another session may be able to do, but not this one now: where the session was
    /// told that there are others, and on a path that is [`PathRank::Failing`].
    fn poll_misplaced(&mut self) -> Option<Io> {
        None
    }

    /// From now on bytes, outbox and deadlines are those of this lane.
    fn select(&mut self, _lane: usize) {}

    /// The lane that was given the latest requests. A driver that sends what the others have before this one's delivers
    /// requests in order.
    fn latest_lane(&self) -> usize {
        0
    }

    /// Whether an answer is due on a lane. A driver that is awake need not look at one without in each turn.
    fn is_awaited(&self, _lane: usize) -> bool {
        true
    }

    /// A lane that the session wants a connection for, to where the first one goes, and when to dial. Each is named once
    /// until it is lost.
    fn poll_dial(&mut self) -> Option<(usize, Instant)> {
        None
    }

    /// The connection of a lane is there: the lane's outbox has what it begins with.
    fn on_connected(&mut self, _lane: usize, _now: Instant) {}

    /// The connection of a lane is gone, or could not be had. Whether the session goes on: without it, or with another
    /// one that [`Initiator::poll_dial`] asks for. If not, it is to be taken back whole.
    fn on_lost(&mut self, _lane: usize, _now: Instant) -> bool {
        false
    }

    /// Ends the session softly once nothing is in flight.
    fn on_stop(&mut self);
}
