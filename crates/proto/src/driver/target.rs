//! The traits between a target and its driver: one for its I/O, one for everything else.
//!
//! [`IoSource`] is all that moving I/O needs, so a source without a peer is driven like a session:
//! a disk that is attached to a virtual machine has queues, but no login, logout or connection.
//! [`TargetLifecycle`] is what the session of a peer has in addition.
//!
//! An adapter around a session (a queue pair joined with it) returns that session as its
//! [`TargetLifecycle::source`] instead of forwarding every call.

use crate::driver::audit_event::AuditEvent;
use crate::driver::frames::Mac;
use crate::driver::session::Timed;
use crate::exports::VolumeId;
use crate::volume_state::NotAdmitted;
use blockmux_volume::{Completion, Cost, Io, IoError, Tag, Waker};
use std::time::Instant;

/// Requests I/O of volumes, and takes its completions.
///
/// A request goes through these calls, in this order: [`IoSource::poll_io`] hands it out,
/// [`IoSource::charge`] says what limits charge for it, [`IoSource::begin`] admits it when it is
/// submitted, and [`IoSource::on_io`] gets its completion. [`IoSource::poll_cancel`] may name it at
/// any time. A source limits its I/O in flight to [`IoSource::depth`].
pub trait IoSource {
    /// The maximum number of I/O in flight.
    fn depth(&self) -> u32;

    /// The next I/O and its volume. Tags are unique among the source's I/O. It is not admitted yet:
    /// the driver throttles it, calls [`IoSource::begin`], and submits it.
    fn poll_io(&mut self) -> Option<(VolumeId, Io)>;

    /// What limits charge for an I/O that has not begun, and whom.
    fn charge(&mut self, io: &Io) -> Charge {
        Charge { cost: Cost::of(io), station: None }
    }

    /// Admits an I/O, which the driver submits at once. `is_late`: it was throttled or has waited
    /// for its range, so what was checked when it was requested may have changed.
    ///
    /// # Errors
    /// If it may not begin. [`NotAdmitted::Denied`]: the source has ended the request, and the
    /// driver drops the I/O; the error is counted for the volume. Else the driver calls again.
    fn begin(&mut self, volume: VolumeId, io: &Io, is_late: bool) -> Result<(), NotAdmitted<IoError>>;

    /// The next I/O whose result is no longer needed. If it has begun, the driver asks the channel
    /// to cancel it; it completes nevertheless.
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)>;

    /// Handles the completion of an I/O, or its failure before it has begun.
    fn on_io(&mut self, done: Completion, now: Instant);
}

/// What limits charge for an I/O, and whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// `None`: it is free and is not throttled.
    pub cost: Option<Cost>,
    /// The station that requested it, over a protocol without connections: limits of each client
    /// apply to each station.
    pub station: Option<Mac>,
}

/// The session of a target with a peer: how it starts and ends, and what it reports.
///
/// A session limits its memory by demanding no bytes.
pub trait TargetLifecycle: Timed {
    /// What requests the session's I/O: the session itself, or the one that an adapter wraps.
    type Source: IoSource;

    /// The source of the session's I/O. The driver moves I/O in every turn, after all other calls
    /// and before it sends, so an adapter can take this call as a change of its session.
    fn source(&mut self) -> &mut Self::Source;

    /// The protocol of the session, if its listener serves several; `None`: that of the listener.
    fn protocol(&self) -> Option<&'static str> {
        None
    }

    /// Called when the driver starts to drive the session; `waker` schedules another turn.
    fn on_start(&mut self, waker: &Waker, now: Instant);

    /// Called at the start of each turn: another session of this core may have released resources.
    fn on_turn(&mut self, now: Instant);

    /// The stage of the session.
    fn stage(&self) -> SessionStage;

    /// Identifies the oldest requested data of the peer for which the session holds memory; `None`
    /// if there is none. When buffers are short, the driver limits the time for which one may be
    /// outstanding.
    fn owed(&self) -> Option<u64>;

    /// The next event for the audit log; never one per I/O.
    fn poll_event(&mut self) -> Option<AuditEvent>;

    /// Whether closing the connection between messages counts as a logout.
    fn is_close_a_logout(&self) -> bool {
        false
    }

    /// The target is stopping: complete the requests in flight, refuse new ones, then demand the
    /// close.
    fn on_stop(&mut self, now: Instant);
}

/// Stage of a target session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionStage {
    /// The handshake is not complete. A driver at its connection limit may close this connection in
    /// favor of a new one.
    Handshake,
    /// The peer has logged in for discovery without proving who it is. A driver at its connection
    /// limit may close this connection in favor of a new one.
    Discovery,
    /// The login, or the protocol's equivalent, is complete.
    Established,
    /// The connection may be closed. The driver continues with deadlines, I/O and turns, but passes
    /// no bytes.
    Lingering,
}
