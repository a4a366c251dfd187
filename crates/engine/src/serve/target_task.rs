//! The target's side of one connection: socket, session, and a channel for each volume in use.
//!
//! A slow peer is tolerated, unless it holds receive buffers without sending the rest of its data,
//! or does not read its replies: if the pool is short, such a peer is disconnected after
//! [`HELD_BUFFERS_TIMEOUT`]. So is a peer that has closed its side while the session cannot accept
//! its remaining input, unless I/O for it is in flight.
//!
//! The session outlives its connection until its I/O has ended, because the volume may still write
//! to its memory. Such a session does not count against the connection limit: see
//! [`Permit::orphan`] and [`blockmux_proto::volume_state::OrphanedUser`].

use crate::carrier::connection::{Broken, Connection, Inflow};
use crate::carrier::tls::Secure;
use crate::core::reactor::{EngineCore, Progress, Task};
use crate::net::host::{ByteStream, Host};
use crate::serve::audit::Audit;
use crate::serve::channels::Channels;
use crate::serve::handover::{HANDSHAKE_TIME, HandedOverConnection, SecuredConnection, SessionHandover};
use crate::serve::listener::Permit;
use crate::serve::peer_core::PeerCore;
use crate::serve::sessions::NOT_IN_CONFIG;
use crate::serve::stall::StallWatch;
use blockmux_proto::driver::audit_event::AuditEvent;
use blockmux_proto::driver::session::{CoreHandle, Demand, ProtocolError, StreamSession};
use blockmux_proto::driver::target::{SessionStage, TargetLifecycle};
use blockmux_proto::exports::Exports;
use blockmux_volume::{PeerAccount, Pool, Waker};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tracing::{debug, info};

/// Serves one connection until either side closes it.
pub struct TargetTask<S: StreamSession + TargetLifecycle, H: Host = EngineCore> {
    connection: Connection<H>,
    session: S,
    channels: Channels,
    core: Rc<H>,
    /// The core's pool, with the peer's account.
    pool: Pool,
    waker: Waker,
    /// Number of times that the outbox was sent completely.
    sent_outboxes: u64,
    /// Set while the peer holds buffers.
    held_buffers: Option<HeldBuffers>,
    /// Set while the peer holds payload buffers: observes whether it transfers data.
    stall: Option<StallWatch>,
    /// Bytes that the socket had transferred when the peer stalled.
    stalled_at_bytes: u64,
    /// Why nothing is received any more. The connection ends when no I/O is in flight and all
    /// output is sent.
    ending: Option<Ending>,
    /// The peer has logged out, so that it knows that the rest of its requests will be executed.
    has_logged_out: bool,
    is_stop_sent: bool,
    /// The handshake is complete, and the permit was notified.
    is_established: bool,
    /// Configured deadline of the handshake, in addition to the session's own.
    login_by: Option<Instant>,
    is_lingering: bool,
    /// Moves the connection to its session's core.
    relocate: Option<Relocate<S, H>>,
    /// Moves the connection to another process.
    process_handover: Option<ProcessHandover<S, H>>,
    /// While connections move to another process: when an unfinished handshake is given up.
    handshake_until: Option<Instant>,
    /// Set while the connection should move to another process and cannot, because it uses TLS.
    secured: Option<SecuredConnection>,
    /// Released when the connection ends, here or on the core that it moved to.
    permit: Option<Permit>,
    audit: Audit,
}

/// A connection handed to a core.
pub struct ArrivedConnection<S> {
    /// The socket.
    pub stream: S,
    /// Bytes received on another core and not parsed.
    pub unread: Vec<u8>,
    /// Reply bytes that another core has sent, which this session must not send again.
    pub sent: u64,
    /// The connection's share of the process's connection limit.
    pub permit: Permit,
}

impl<S> ArrivedConnection<S> {
    /// A connection that was just accepted.
    pub fn new(stream: S, permit: Permit) -> ArrivedConnection<S> {
        ArrivedConnection { stream, unread: Vec::new(), sent: 0, permit }
    }
}

/// How a connection moves to another core, for protocols that need it.
pub struct Relocate<S, H: Host> {
    /// The core that the session belongs to, if not this one. Called until the session is
    /// established.
    pub moves_to: fn(&mut S) -> Option<Relocation>,
    /// Hands the connection over.
    pub hand_over: Box<HandOver<H>>,
}

/// The destination of a connection that moves.
pub struct Relocation {
    /// The owner core.
    pub owner_core: CoreHandle,
    /// Bytes that the session there must parse before the unread ones.
    pub replayed: Vec<u8>,
    /// Reply bytes already sent, which that session must not send again.
    pub sent: u64,
}

/// How a connection moves to the process that takes over from this one, for sessions whose peers
/// would not reconnect; see [`crate::serve::handover`].
pub struct ProcessHandover<S, H: Host> {
    /// Makes the session accept no further request; returns its state once nothing is in flight.
    pub hand_over: fn(&mut S) -> Option<Vec<u8>>,
    /// Stores the connection for the other process.
    pub store: fn(&SessionHandover, HandedOverConnection<H::Stream>),
}

type HandOver<H> = dyn Fn(&CoreHandle, ArrivedConnection<<H as Host>::Stream>);

/// Observation of a peer that holds buffers.
#[derive(Clone, Copy)]
struct HeldBuffers {
    /// When the peer is checked again.
    until: Instant,
    /// Progress counter at the last check.
    moved: u64,
    /// Data that the peer was asked for and has not sent.
    owed: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// The remaining output is sent first.
    AfterOutput,
    /// The socket is lost.
    Closed,
}

/// How a connection may move: to another core, or to another process.
struct ConnectionMoves<S, H: Host> {
    relocate: Option<Relocate<S, H>>,
    process_handover: Option<ProcessHandover<S, H>>,
}

impl<S: StreamSession + TargetLifecycle + 'static, H: Host> TargetTask<S, H> {
    /// Serves `stream` on `core` with `session`, whose volume ids are indices of `exports`. `pool`
    /// must be the handle that the session uses: it charges memory to this peer's account.
    pub fn spawn(core: &Rc<H>, stream: H::Stream, session: (S, Pool), exports: Exports, permit: Permit) {
        TargetTask::receive(core, (ArrivedConnection::new(stream, permit), None), session, exports, None);
    }

    /// Serves a connection that may use TLS (`secure`), may have been handed over by another core,
    /// and may move to another core (`relocate`).
    pub fn receive(
        core: &Rc<H>,
        (arrival, secure): (ArrivedConnection<H::Stream>, Option<Secure>),
        (session, pool): (S, Pool),
        exports: Exports,
        relocate: Option<Relocate<S, H>>,
    ) {
        TargetTask::start(
            core,
            (arrival, secure),
            (session, pool),
            exports,
            ConnectionMoves { relocate, process_handover: None },
        );
    }

    /// Serves a connection that may use TLS, and that may move to another process
    /// (`process_handover`).
    pub fn receive_movable(
        core: &Rc<H>,
        arrival: (ArrivedConnection<H::Stream>, Option<Secure>),
        session: (S, Pool),
        exports: Exports,
        process_handover: ProcessHandover<S, H>,
    ) {
        let moves = ConnectionMoves { relocate: None, process_handover: Some(process_handover) };
        TargetTask::start(core, arrival, session, exports, moves);
    }

    fn start(
        core: &Rc<H>,
        (arrival, secure): (ArrivedConnection<H::Stream>, Option<Secure>),
        (mut session, pool): (S, Pool),
        exports: Exports,
        ConnectionMoves { relocate, process_handover }: ConnectionMoves<S, H>,
    ) {
        let ArrivedConnection { stream, unread, mut permit, .. } = arrival;
        let login_by = permit.login_by(core.now());
        let channels_core = Rc::new(PeerCore { core: core.clone(), pool: pool.clone() });
        let audit = Audit::new(stream.shared_peer(), permit.sessions().clone());
        let origin = permit.origin();
        core.spawn(|waker| TargetTask {
            audit,
            connection: {
                let helpers = |secure: Secure| secure.by_helpers(H::helpers(core, permit.peer(), waker));
                Connection::resumed(stream, &unread, core, waker).secured(secure.map(helpers))
            },
            session: {
                session.on_start(waker, core.now());
                session
            },
            channels: {
                pool.account().into_iter().for_each(|account| account.set_waker(waker));
                Channels::new(exports, channels_core, waker.clone(), origin)
            },
            core: core.clone(),
            pool,
            waker: waker.clone(),
            sent_outboxes: 0,
            held_buffers: None,
            stall: None,
            stalled_at_bytes: 0,
            ending: None,
            has_logged_out: false,
            is_stop_sent: false,
            is_established: false,
            login_by: {
                login_by.into_iter().for_each(|login_by| core.wake_at(login_by, waker));
                login_by
            },
            is_lingering: false,
            relocate,
            process_handover,
            handshake_until: None,
            secured: None,
            permit: Some(permit),
        });
    }
}

impl<S: StreamSession + TargetLifecycle, H: Host> TargetTask<S, H> {
    /// The protocol of the connection, as its listener or its first bytes tell.
    fn protocol(&self) -> &'static str {
        let of_listener = || self.permit.as_ref().map_or("", Permit::protocol);
        self.session.protocol().unwrap_or_else(of_listener)
    }

    /// Progress counter: requests received and outboxes sent.
    fn moved(&self) -> u64 {
        self.channels.submitted() + self.sent_outboxes
    }

    #[inline]
    fn turn(&mut self, now: Instant) -> Result<Progress, Broken> {
        let mut progress = Progress::Idle;
        let (is_draining, must_close) = self
            .audit
            .session()
            .map_or((false, false), |session| (session.is_draining(), session.must_close()));
        if (is_draining || self.core.is_stopping()) && !self.is_stop_sent && !self.is_moving_to_process(now) {
            self.is_stop_sent = true;
            self.session.on_stop(now);
            self.channels.lift_limits();
        }
        if must_close {
            let session = self.audit.session();
            return Err(Broken::SessionEnded(session.map_or(NOT_IN_CONFIG, |session| session.end_reason())));
        }
        if !self.is_established && self.login_by.is_some_and(|login_by| now >= login_by) {
            return Err(LATE_LOGIN.into());
        }
        self.connection.check_deadline(&mut self.session)?;
        self.check_held_buffers()?;
        self.check_stall()?;
        loop {
            let inflow = match self.ending {
                None => self.connection.receive(&mut self.session)?,
                Some(_) => Inflow::Finished,
            };
            match inflow {
                Inflow::More => progress = Progress::More,
                Inflow::Drained if progress == Progress::Idle => progress = Progress::Drained,
                Inflow::Finished if self.ending.is_none() => self.ending = Some(Ending::AfterOutput),
                _ => {}
            }
            if self.audit.session().is_none() {
                // The limits of each client need the client before its first request.
                self.log_events();
            }
            let moved = self.channels.move_io(self.session.source(), now);
            let sent = self.connection.send(&mut self.session)?;
            if sent && self.session.outbox().is_empty() {
                self.sent_outboxes += 1;
            }
            if moved == Progress::More {
                progress = Progress::More;
            } else if (sent || moved == Progress::Drained) && progress != Progress::More {
                progress = Progress::Drained;
            }
            // The session may have set a new deadline, which must be armed before the task parks.
            self.connection.check_new_deadline(&mut self.session)?;
            if inflow != Inflow::Blocked || moved == Progress::More {
                return Ok(progress);
            }
            // Input that was blocked by I/O in flight or a full outbox may be accepted now.
            if matches!(self.session.demand(), Demand::Nothing) {
                return Ok(progress);
            }
        }
    }

    /// Whether the session outlives its connection.
    #[inline]
    fn lingers(&self) -> bool {
        self.session.stage() == SessionStage::Lingering
    }

    /// Whether the permit was given to a new connection.
    fn is_replaced(&self) -> bool {
        self.permit.as_ref().is_some_and(Permit::is_replaced)
    }

    /// Runs a session without a connection: its timers and its I/O.
    fn linger(&mut self, now: Instant) -> Progress {
        if !std::mem::replace(&mut self.is_lingering, true) {
            self.log_end();
            debug!(peer = self.connection.peer(), "connection closed; its session lingers");
            self.connection.close();
            self.ending = Some(Ending::Closed);
            self.permit.iter_mut().for_each(Permit::linger);
        }
        let progress = self.channels.move_io(self.session.source(), now);
        // There is no peer for its output, and a missed deadline has no connection to close.
        let _ = self.connection.check_deadline(&mut self.session);
        self.session.outbox().clear();
        match self.channels.move_io(self.session.source(), now) {
            Progress::Idle => progress,
            moved => moved,
        }
    }

    /// Releases the permit of a peer that has disconnected, whose I/O in flight continues. What
    /// limits hold back is aborted if the peer has not logged out: it may have died.
    #[cold]
    fn orphan(&mut self) {
        self.log_end();
        self.channels.orphan(!self.has_logged_out);
        if let Some(permit) = &mut self.permit {
            permit.orphan();
        }
        if self.ending == Some(Ending::Closed) {
            self.connection.close();
        }
    }

    /// Logs the session's events.
    #[inline]
    fn log_events(&mut self) {
        while let Some(event) = self.session.poll_event() {
            self.has_logged_out |= matches!(event, AuditEvent::Logout { .. });
            self.audit.on_event(event, |volume| self.channels.name(volume));
            if let Some(session) = self.audit.session() {
                self.channels.count_for(session);
            }
        }
    }

    /// Logs an orderly end of the connection, unless the session has logged it.
    fn log_end(&mut self) {
        match (self.is_stop_sent, self.session.is_close_a_logout()) {
            (true, _) if !self.core.is_stopping() => {
                let session = self.audit.session();
                let reason = session.map_or(NOT_IN_CONFIG, |session| session.end_reason());
                self.audit.on_end(true, reason);
            }
            (true, _) => self.audit.on_end(true, "the target stops"),
            (false, true) => self.audit.on_end(true, "the client closed the connection"),
            (false, false) => self.audit.on_end(false, "the peer closed it without logging out"),
        }
    }

    /// Hands the connection over if it belongs to another core; returns whether it did.
    fn move_to_owner_core(&mut self) -> bool {
        let Some(relocate) = self.relocate.as_ref().filter(|_| !self.is_established) else { return false };
        let Some(relocation) = (relocate.moves_to)(&mut self.session) else { return false };
        let Some(permit) = self.permit.take() else { return false };
        let Relocation { owner_core, replayed: mut unread, sent } = relocation;
        let (stream, rest) = self.connection.hand_over();
        unread.extend(rest);
        (relocate.hand_over)(&owner_core, ArrivedConnection { stream, unread, sent, permit });
        true
    }

    /// Whether the connection should move to another process instead of ending.
    #[cold]
    fn is_moving_to_process(&mut self, now: Instant) -> bool {
        let is_requested =
            self.permit.as_ref().is_some_and(|permit| permit.session_handover().is_requested());
        if self.process_handover.is_none() || !is_requested || self.connection.is_secured() {
            return false;
        }
        if self.session.stage() != SessionStage::Handshake {
            return true;
        }
        let until = *self.handshake_until.get_or_insert_with(|| {
            self.core.wake_at(now + HANDSHAKE_TIME, &self.waker);
            now + HANDSHAKE_TIME
        });
        now < until
    }

    /// Hands the connection to another process if it should move and nothing is in flight; returns
    /// whether it did.
    fn move_to_process(&mut self, now: Instant) -> bool {
        let is_over = self.is_stop_sent || self.ending.is_some();
        if self.process_handover.is_none()
            || is_over
            || !self.core.is_stopping()
            || !self.is_moving_to_process(now)
        {
            return false;
        }
        let Some((process_handover, permit)) = self.process_handover.as_ref().zip(self.permit.as_ref())
        else {
            return false;
        };
        let Some(state) = (process_handover.hand_over)(&mut self.session) else {
            self.channels.lift_limits();
            return false;
        };
        let (stream, unread) = self.connection.hand_over();
        let handed_over = HandedOverConnection {
            protocol: permit.protocol(),
            listener: permit.origin().listener.to_string(),
            peer: self.connection.peer().to_owned(),
            stream,
            unread,
            state,
        };
        (process_handover.store)(permit.session_handover(), handed_over);
        self.audit.on_end(true, TAKEN_OVER);
        true
    }

    /// Whether the peer causes buffers to be held: by unread replies, by data that it owes, or by
    /// an incomplete message.
    fn peer_holds_buffers(&mut self) -> bool {
        !self.session.outbox().is_empty()
            || self.session.owed().is_some()
            || match self.session.demand() {
                Demand::Place(_) => true,
                Demand::Bytes(wanted) => wanted > MAX_HEAD,
                Demand::StartTls | Demand::Nothing | Demand::Close => false,
            }
    }

    /// Whether the peer has closed its side while none of its requests is in flight.
    fn is_abandoned(&self) -> bool {
        self.connection.is_abandoned() && self.channels.is_idle()
    }

    /// Disconnects a peer that has held buffers without progress since the last check, if others
    /// need them.
    fn check_held_buffers(&mut self) -> Result<(), ProtocolError> {
        let Some(held) = self.held_buffers else { return Ok(()) };
        if self.core.now() < held.until {
            return Ok(());
        }
        self.held_buffers = None;
        let is_still = held.moved == self.moved();
        if is_still && self.is_abandoned() {
            return Err(ProtocolError {
                what: "closed its side, and its unread input could not be processed for a minute",
                reference: "this server's limit",
            });
        }
        // Other traffic does not excuse the missing data.
        let owes = held.owed.is_some() && held.owed == self.session.owed();
        if self.core.pool().is_short() && (owes || is_still && self.peer_holds_buffers()) {
            return Err(ProtocolError {
                what: "held buffers for a minute without progress while others need them",
                reference: "this server's limit",
            });
        }
        Ok(())
    }

    /// Checks whether a peer that holds buffers transfers data, and ends the connection if it was
    /// evicted.
    #[inline]
    fn check_stall(&mut self) -> Result<(), Broken> {
        let Some(account) = self.pool.account() else { return Ok(()) };
        if account.is_waiting() || self.pool.is_short() {
            account.set_moved(self.connection.moved_bytes());
        }
        if self.stall.is_none() { Ok(()) } else { self.check_for_stall() }
    }

    #[cold]
    fn check_for_stall(&mut self) -> Result<(), Broken> {
        let holds_buffers = self.peer_holds_buffers();
        let Some(account) = self.pool.account() else { return Ok(()) };
        if account.is_evicted() {
            return Err(Broken::Evicted(account.held_bytes()));
        }
        let is_moving = account.is_stalled() && self.connection.transferred_bytes() != self.stalled_at_bytes;
        if is_moving || !holds_buffers || account.caused_bytes() == 0 {
            account.resume();
            self.stall = None;
            return Ok(());
        }
        let now = self.core.now();
        let Some(stall) = self.stall.as_mut().filter(|stall| stall.next_check() <= now) else {
            return Ok(());
        };
        stall.check(now, self.connection.moved_bytes(), &self.pool);
        if account.is_evicted() {
            return Err(Broken::Evicted(account.held_bytes()));
        }
        self.stalled_at_bytes = self.connection.transferred_bytes();
        self.core.wake_at(stall.next_check(), &self.waker);
        Ok(())
    }

    /// Handles a failed connection: I/O in flight completes, and its replies are dropped.
    fn on_broken(&mut self, broken: &Broken) {
        self.log_events();
        let reason = match broken {
            Broken::Protocol(error) => format!("peer {error}"),
            Broken::Tls(error) => format!("peer {error}"),
            Broken::Keys(_) | Broken::Evicted(_) | Broken::SessionEnded(_) => broken.to_string(),
            Broken::Socket(error) => error.to_string(),
        };
        match broken {
            _ if self.audit.is_logged_in() => {}
            Broken::Socket(_) => debug!(peer = self.connection.peer(), "connection lost: {reason}"),
            _ => self.audit.on_refused(self.protocol(), &reason),
        }
        if matches!(broken, Broken::Protocol(_) | Broken::Tls(_)) {
            // The session or TLS may have an error message for the peer.
            let _ = self.connection.send(&mut self.session);
        }
        // The error was logged; I/O in flight for the peer may be aborted.
        let _ = self.session.on_end(self.core.now());
        // The session may have a more precise reason.
        self.log_events();
        self.audit.on_end(false, &reason);
        self.session.outbox().clear();
        self.ending = Some(Ending::Closed);
    }

    #[inline]
    fn take_turn(&mut self) -> Progress {
        let mut progress = Progress::Idle;
        let now = self.core.now();
        self.session.on_turn(now);
        if self.ending != Some(Ending::Closed) {
            match self.turn(now) {
                Ok(made) => progress = made,
                Err(broken) => self.on_broken(&broken),
            }
        }
        let is_new = !self.is_established && self.session.stage() != SessionStage::Handshake;
        if is_new {
            self.is_established = true;
            self.session.outbox().release();
            self.permit.iter_mut().for_each(Permit::establish);
            if self.process_handover.is_some() && self.connection.is_secured() {
                self.secured = self.permit.as_ref().map(|permit| permit.session_handover().count_secured());
            }
        }
        self.log_events();
        // Checked after the session was listed: a concurrent change of the allowed networks then
        // finds the session in the list, or is seen here.
        if is_new && self.permit.as_ref().is_some_and(|permit| !permit.is_admitted()) {
            self.on_broken(&Broken::SessionEnded(NOT_ALLOWED));
        }
        if self.move_to_owner_core() || self.move_to_process(now) {
            return Progress::Done;
        }
        if self.ending == Some(Ending::Closed) {
            if self.core.is_stopping() {
                self.channels.lift_limits();
            }
            if !self.lingers() {
                self.pool.account().into_iter().for_each(PeerAccount::close);
            }
            if self.channels.move_io(self.session.source(), now) == Progress::More {
                progress = Progress::More;
            }
            self.session.outbox().clear();
        }
        let is_sent = self.session.outbox().is_empty();
        if self.ending.is_some() && is_sent && self.lingers() {
            if self.is_replaced() {
                info!(
                    peer = self.connection.peer(),
                    "session dropped: a new connection needs its share of --max-connections"
                );
            }
            if self.core.is_stopping() || self.is_replaced() {
                self.session.on_stop(now);
                self.channels.lift_limits();
            }
            progress = self.linger(now);
        }
        if self.ending.is_some() && !self.is_stop_sent && !self.channels.is_idle() && !self.lingers() {
            self.orphan();
        }
        if self.ending.is_some() && self.channels.is_idle() && is_sent && !self.lingers() {
            self.log_end();
            debug!(peer = self.connection.peer(), "connection closed");
            return Progress::Done;
        }
        progress
    }
}

impl<S: StreamSession + TargetLifecycle, H: Host> Task for TargetTask<S, H> {
    #[inline]
    fn run(&mut self) -> Progress {
        let progress = self.take_turn();
        self.pool.end_turn();
        progress
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn park(&mut self) {
        if self.ending == Some(Ending::Closed) {
            return;
        }
        if self.held_buffers.is_none() && (self.peer_holds_buffers() || self.is_abandoned()) {
            let until = self.core.now() + HELD_BUFFERS_TIMEOUT;
            self.held_buffers = Some(HeldBuffers { until, moved: self.moved(), owed: self.session.owed() });
            self.core.wake_at(until, &self.waker);
        }
        if self.stall.is_none()
            && self.pool.account().is_some_and(|account| account.held_bytes() > 0)
            && self.peer_holds_buffers()
        {
            let stall = StallWatch::new(self.core.now(), self.connection.moved_bytes());
            self.core.wake_at(stall.next_check(), &self.waker);
            self.stall = Some(stall);
        }
        self.connection.park();
    }
}

/// The logged reason when another process continues the session.
const TAKEN_OVER: &str = "another process continues the session";
/// The logged reason when the listener no longer accepts the peer's address.
const NOT_ALLOWED: &str = "the listener's `allow` list does not have its address any more";
const LATE_LOGIN: ProtocolError =
    ProtocolError { what: "did not log in within `login_timeout`", reference: "this server's limit" };
/// How long a peer may hold buffers that others need.
pub const HELD_BUFFERS_TIMEOUT: Duration = Duration::from_secs(60);
/// A session that waits for more bytes than this waits for the rest of a message, not for a header.
const MAX_HEAD: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::reactor::{PollPolicy, Reactor};
    use crate::net::socket::Address;
    use crate::net::socket::{Listener, Stream};
    use crate::serve::listener::ConnectionLimit;
    use crate::sim::{NetworkConditions, SimCore, SimNet, SimStream, World};

    use blockmux_proto::driver::outbox::Outbox;
    use blockmux_proto::driver::session::Timed;
    use blockmux_proto::driver::target::IoSource;
    use blockmux_proto::exports::{Export, VolumeId};
    use blockmux_proto::nbd::server::NbdTargetSession;
    use blockmux_proto::volume_state::NotAdmitted;
    use blockmux_volume::{
        Chunk, Completion, Core, DelayVolume, Delays, Io, IoError, MemVolume, Memory, Tag, Volume,
    };
    use std::cell::{Cell, RefCell};
    use std::io;
    use std::sync::Arc;

    /// A target with 16 MiB of buffers; long payload may use half of them.
    struct BufferTest {
        world: World,
        clients: Rc<SimCore>,
        target: Rc<SimCore>,
        limit: ConnectionLimit,
    }

    /// A client that sends only given bytes.
    struct Peer(SimStream);

    impl BufferTest {
        fn new() -> BufferTest {
            let mut world =
                World::new(SimNet::new(1, NetworkConditions { window: 64 << 10, ..NetworkConditions::FAIR }));
            let (clients, target) = (world.add_core(0), world.add_core(16 << 20));
            let volume = Arc::new(MemVolume::new(8 << 20));
            let export =
                Export { name: "disk0".to_owned(), description: String::new(), read_only: false, volume };
            let (exports, limit) = (Exports::new(vec![export]), ConnectionLimit::new(usize::MAX));
            let permits = limit.clone();
            world.net().listen(&target, &address(), move |core, stream| {
                let pool = core.pool().for_peer();
                let session = NbdTargetSession::new(exports.clone(), pool.clone(), core.now());
                let permit = permits.permit().unwrap();
                TargetTask::spawn(core, stream, (session, pool), exports.clone(), permit);
            });
            BufferTest { world, clients, target, limit }
        }

        /// A client in the transmission phase with simple replies, with a request of `len_mib` MiB
        /// in flight.
        fn client(&self, command: u8, len_mib: u8, payload: &[u8]) -> Peer {
            let mut peer = Peer(self.clients.connect(&address()).unwrap());
            peer.send(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0");
            let mut request = [0; 28];
            request[..4].copy_from_slice(b"\x25\x60\x95\x13");
            (request[7], request[25]) = (command, len_mib << 4);
            peer.send(&request);
            peer.send(payload);
            self.pass(Duration::from_secs(1));
            peer
        }

        fn pass(&self, time: Duration) {
            self.world.run_for(time).unwrap();
        }
    }

    impl Peer {
        fn send(&mut self, bytes: &[u8]) {
            let mut outbox = Outbox::default();
            outbox.push_head(bytes);
            while !outbox.is_empty() {
                self.0.send(&mut outbox).expect("it fits the window");
            }
        }

        fn is_closed(&mut self) -> bool {
            let mut chunk = Chunk::new(Memory::from_heap(256 << 10));
            loop {
                match self.0.receive(&mut chunk, usize::MAX) {
                    Ok(0) => return true,
                    Ok(_) => {}
                    Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
                }
            }
        }
    }

    fn address() -> Address {
        Address::Unix("/target".into())
    }

    const READ: u8 = 0;
    const WRITE: u8 = 1;
    const DISCONNECT: u8 = 2;

    #[test]
    fn a_peer_that_holds_buffers_is_closed_if_others_wait_and_after_a_minute_if_they_are_short() {
        let test = BufferTest::new();
        let mut writers = [0; 2].map(|_| test.client(WRITE, 4, &[7; 4000]));
        let mut reader = test.client(READ, 1, b"");
        let mut idle = test.client(READ, 0, b"");
        assert!(test.target.pool().is_short());
        test.pass(Duration::from_secs(5));
        // The second writer waited for the buffers of the first one; nobody waits for its buffers
        // now.
        assert_eq!(writers.each_mut().map(Peer::is_closed), [true, false]);
        assert!(![&mut reader, &mut idle].into_iter().any(Peer::is_closed));
        // Sending a little now and then is not enough.
        writers[1].send(&[7; 4000]);
        test.pass(HELD_BUFFERS_TIMEOUT * 2);
        assert!(writers.iter_mut().all(Peer::is_closed));
        assert!(!idle.is_closed(), "it holds no buffers");
        assert_eq!(test.target.pool().out_bytes(), 0);
    }

    #[test]
    fn a_peer_that_sends_none_of_its_announced_data_is_closed() {
        let test = BufferTest::new();
        let mut writers = [0; 2].map(|_| test.client(WRITE, 4, b""));
        assert!(test.target.pool().is_short());
        test.pass(HELD_BUFFERS_TIMEOUT * 3);
        assert!(writers.iter_mut().all(Peer::is_closed));
        assert_eq!(test.target.pool().out_bytes(), 0);
    }

    #[test]
    fn a_peer_that_exceeds_the_login_timeout_is_disconnected_and_others_are_not() {
        let setting = BufferTest::new();
        let mut before = Peer(setting.clients.connect(&address()).unwrap());
        setting.pass(Duration::from_secs(1));
        setting.limit.set_login_timeout(Some(Duration::from_secs(5)));
        let mut late = Peer(setting.clients.connect(&address()).unwrap());
        late.send(b"\0\0\0\x03");
        let mut idle = setting.client(READ, 0, b"");
        setting.pass(Duration::from_secs(3));
        assert!(!late.is_closed());
        setting.pass(Duration::from_secs(3));
        assert!(late.is_closed() && !idle.is_closed());
        assert!(!before.is_closed(), "only the protocol's own timeout applies to it");
        setting.pass(Duration::from_secs(30));
        assert!(before.is_closed() && !idle.is_closed());
    }

    /// A session that accepts no input; or, if the peer owes it data, answers every byte with one
    /// byte.
    #[derive(Default)]
    struct BlockedSession {
        outbox: Outbox,
        owed: Option<u64>,
        /// Every byte is a violation; how many calls brought some.
        violations: Option<Rc<Cell<u32>>>,
        /// Held until the data arrives.
        _memory: Vec<Memory>,
    }

    impl Timed for BlockedSession {}

    impl StreamSession for BlockedSession {
        fn demand(&self) -> Demand {
            let takes_bytes = self.owed.is_some() || self.violations.is_some();
            if takes_bytes { Demand::Bytes(1) } else { Demand::Nothing }
        }

        fn on_bytes(&mut self, input: &Chunk, _now: Instant) -> Result<usize, ProtocolError> {
            if let Some(violations) = &self.violations {
                violations.set(violations.get() + 1);
                return Err(ProtocolError { what: "sent gibberish", reference: "the test" });
            }
            self.outbox.push_head(input.unread());
            Ok(input.unread().len())
        }

        fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
            Ok(())
        }

        fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
            Ok(())
        }

        fn outbox(&mut self) -> &mut Outbox {
            &mut self.outbox
        }
    }

    impl IoSource for BlockedSession {
        fn depth(&self) -> u32 {
            1
        }

        fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
            None
        }

        fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
            None
        }

        fn on_io(&mut self, _done: Completion, _now: Instant) {}

        fn begin(&mut self, _: VolumeId, _: &Io, _: bool) -> Result<(), NotAdmitted<IoError>> {
            Ok(())
        }
    }

    impl TargetLifecycle for BlockedSession {
        type Source = Self;

        fn source(&mut self) -> &mut Self {
            self
        }

        fn on_start(&mut self, _waker: &Waker, _now: Instant) {}

        fn on_turn(&mut self, _now: Instant) {}

        fn stage(&self) -> SessionStage {
            SessionStage::Established
        }

        fn poll_event(&mut self) -> Option<AuditEvent> {
            None
        }

        fn owed(&self) -> Option<u64> {
            self.owed
        }

        fn on_stop(&mut self, _now: Instant) {}
    }

    /// A world with a connection whose session accepts no input, with its stream and its limit.
    fn blocked_connection() -> (World, Peer, SimStream, ConnectionLimit) {
        let mut world = World::new(SimNet::new(1, NetworkConditions::FAIR));
        let (clients, target) = (world.add_core(0), world.add_core(16 << 20));
        let (limit, accepted) = (ConnectionLimit::new(1), Rc::new(RefCell::new(None)));
        let (permits, stream_of) = (limit.clone(), accepted.clone());
        world.net().listen(&target, &address(), move |core, stream| {
            *stream_of.borrow_mut() = Some(stream.share());
            let exports = Exports::new(Vec::new());
            let session = (BlockedSession::default(), core.pool().for_peer());
            TargetTask::spawn(core, stream, session, exports, permits.permit().unwrap());
        });
        let mut peer = Peer(clients.connect(&address()).unwrap());
        peer.send(b"unread");
        world.run_for(HELD_BUFFERS_TIMEOUT).unwrap();
        assert_eq!(limit.open(), 1);
        let stream = accepted.borrow_mut().take().unwrap();
        (world, peer, stream, limit)
    }

    #[test]
    fn lost_connections_with_endless_io_do_not_count_against_the_limit() {
        let mut world = World::new(SimNet::new(1, NetworkConditions::FAIR));
        let (clients, target) = (world.add_core(0), world.add_core(16 << 20));
        let for_ever = Delays { read: Duration::from_secs(1 << 30), ..Delays::default() };
        let hangs = Arc::new(DelayVolume::new(Arc::new(MemVolume::new(8 << 20)), for_ever));
        let volumes: [(&str, Arc<dyn Volume>); 2] = [("a", hangs), ("b", Arc::new(MemVolume::new(8 << 20)))];
        let export = |(name, volume): (&str, Arc<dyn Volume>)| Export {
            name: name.to_owned(),
            description: String::new(),
            read_only: false,
            volume,
        };
        let exports = Exports::new(volumes.map(export).into());
        let (limit, volume_state) = (ConnectionLimit::new(2), exports.volume_state(VolumeId(0)).unwrap());
        let permits = limit.clone();
        world.net().listen(&target, &address(), move |core, stream| {
            let pool = core.pool().for_peer();
            let session = NbdTargetSession::new(exports.clone(), pool.clone(), core.now());
            let permit = permits.permit().expect("there is room for one more");
            TargetTask::spawn(core, stream, (session, pool), exports.clone(), permit);
        });
        let client = |name: &str, last: &[u8]| {
            let mut peer = Peer(clients.connect(&address()).unwrap());
            peer.send(&[b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x01", name.as_bytes()].concat());
            for command in [&[READ][..], last].concat() {
                let mut request = [0; 28];
                request[..4].copy_from_slice(b"\x25\x60\x95\x13");
                (request[7], request[26]) = (command, 2);
                peer.send(&request);
            }
            world.run_for(Duration::from_secs(1)).unwrap();
            peer
        };
        let mut stays = client("b", &[]);
        let mut disconnected = Vec::new();
        for left in 1..=20 {
            // Every second client logs out and keeps the socket open.
            let peer = client("a", if left % 2 == 0 { &[DISCONNECT] } else { &[] });
            if left % 2 != 0 {
                assert_eq!(limit.open(), 2, "the connection is open");
                peer.0.close();
                world.run_for(Duration::from_secs(1)).unwrap();
            }
            disconnected.push(peer);
            assert_eq!((limit.open(), limit.orphaned(), volume_state.orphans()), (1, left, left));
        }
        assert!(!stays.is_closed());
    }

    #[test]
    fn a_peer_that_never_sends_requested_data_is_closed_despite_other_traffic() {
        for is_short in [false, true] {
            let mut world = World::new(SimNet::new(1, NetworkConditions::FAIR));
            let (clients, target) = (world.add_core(0), world.add_core(16 << 20));
            let limit = ConnectionLimit::new(1);
            let permits = limit.clone();
            world.net().listen(&target, &address(), move |core, stream| {
                let len = if is_short { 4 << 20 } else { 4 << 10 };
                let _memory = core.pool().take_payload(len).into_iter().collect();
                let session = BlockedSession { owed: Some(1), _memory, ..BlockedSession::default() };
                let exports = Exports::new(Vec::new());
                TargetTask::spawn(
                    core,
                    stream,
                    (session, core.pool().for_peer()),
                    exports,
                    permits.permit().unwrap(),
                );
            });
            let mut peer = Peer(clients.connect(&address()).unwrap());
            for _ in 0..3 {
                world.run_for(HELD_BUFFERS_TIMEOUT / 4).unwrap();
                assert_eq!(limit.open(), 1);
                peer.send(b"ping");
            }
            world.run_for(HELD_BUFFERS_TIMEOUT * 2).unwrap();
            assert_eq!((limit.open(), target.pool().is_short()), (usize::from(!is_short), false));
        }
    }

    /// NVMe/TCP in Linux received on after a fatal error (CVE-2026-52989).
    #[test]
    fn after_a_violation_no_further_byte_of_the_peer_is_taken() {
        let mut world = World::new(SimNet::new(1, NetworkConditions::FAIR));
        let (clients, target) = (world.add_core(0), world.add_core(16 << 20));
        let (limit, violations) = (ConnectionLimit::new(1), Rc::new(Cell::new(0)));
        let (permits, counted) = (limit.clone(), violations.clone());
        world.net().listen(&target, &address(), move |core, stream| {
            let violations = Some(counted.clone());
            let session = BlockedSession { violations, ..BlockedSession::default() };
            let (pool, exports) = (core.pool().for_peer(), Exports::new(Vec::new()));
            TargetTask::spawn(core, stream, (session, pool), exports, permits.permit().unwrap());
        });
        let mut peer = Peer(clients.connect(&address()).unwrap());
        (0..3).for_each(|_| peer.send(&[7; 4000]));
        world.run_for(Duration::from_secs(1)).unwrap();
        assert_eq!((violations.get(), limit.open()), (1, 0));
        assert!(peer.is_closed());
    }

    #[test]
    fn a_connection_that_was_shut_down_ends_although_its_session_takes_no_input() {
        let (world, _peer, stream, limit) = blocked_connection();
        stream.close();
        world.run_for(Duration::from_secs(1)).unwrap();
        assert_eq!(limit.open(), 0);
    }

    #[test]
    fn a_peer_that_closes_while_its_session_takes_no_input_is_dropped_after_a_minute() {
        let (world, peer, _stream, limit) = blocked_connection();
        peer.0.close();
        world.run_for(HELD_BUFFERS_TIMEOUT / 2).unwrap();
        assert_eq!(limit.open(), 1);
        world.run_for(HELD_BUFFERS_TIMEOUT).unwrap();
        assert_eq!(limit.open(), 0);
    }

    #[test]
    fn the_ring_reports_the_end_of_a_socket_that_is_not_read() {
        let (mut reactor, _inbox) = Reactor::new(PollPolicy::Never, 1 << 20).unwrap();
        let listener = Listener::bind(&Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
        let _peer = Stream::connect(listener.address()).unwrap();
        // The listener does not block.
        let stream = std::iter::repeat_with(|| listener.accept()).find_map(Result::ok).unwrap();
        let (hang_up, limit) = (stream.hang_up(), ConnectionLimit::new(1));
        let core = reactor.core().clone();
        let session = (BlockedSession::default(), core.pool().for_peer());
        TargetTask::spawn(&core, stream, session, Exports::new(Vec::new()), limit.permit().unwrap());
        let cutter = std::thread::spawn(hang_up);
        reactor.run_until(|| limit.open() == 0).unwrap();
        cutter.join().unwrap();
    }

    #[test]
    fn a_peer_that_holds_buffers_that_nobody_needs_is_not_closed() {
        let test = BufferTest::new();
        let mut writer = test.client(WRITE, 1, &[7; 4000]);
        let mut reader = test.client(READ, 4, b"");
        test.pass(HELD_BUFFERS_TIMEOUT * 10);
        assert!(!writer.is_closed() && !reader.is_closed());
    }
}
