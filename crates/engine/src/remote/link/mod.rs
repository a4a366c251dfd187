//! A link keeps one session of a channel connected. It connects, opens the control session first if
//! the protocol has one (`controlled`), passes requests to the session, and checks that the target
//! replies (`watch`). When the session is lost, it replays the requests, waits, or gives up
//! (`loss`).

mod controlled;
mod loss;
mod watch;

use super::connections::{ConnectionSet, Dial};
use super::control::ControlLink;
use super::overdue::OverdueTimer;
use super::redirections::{Redirection, Redirections};
use super::retry::{CONNECT_TIMEOUT, ReconnectTimer};
use super::silence::Silence;
use super::{Dialer, Opening, PathGroup, RemoteVolume, TlsKeys, VolumeShared};
use crate::carrier::connection::{Broken, Connection, Inflow};
use crate::carrier::tls::ClientTls;
use crate::core::reactor::{Progress, Task};
use crate::net::host::{ByteStream, Host};
use crate::net::socket::Address;
use blockmux_proto::driver::session::{Initiator, PathRank};
use blockmux_volume::{Completion, Io, IoError, Tag, Waker};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tracing::warn;

/// Keeps one session of a channel connected: replaces it after a loss and replays its requests.
pub(super) struct Link<D: Dialer, H: Host> {
    dialer: Arc<D>,
    known: Arc<VolumeShared>,
    /// The link's number, for the dialer.
    number: u32,
    /// The channel has other paths.
    has_other_paths: bool,
    /// The rank that the channel was last notified of.
    rank: Option<PathRank>,
    /// The rank as the control session has reported it.
    reported_rank: PathRank,
    redirections: Redirections,
    core: Rc<H>,
    /// Wakes the link's own task.
    pub(super) waker: Waker,
    /// Wakes the channel's user.
    consumer: Waker,
    group: Rc<PathGroup>,
    /// TLS of the session's connections and of its control connection.
    tls: Option<ClientTls>,
    /// The control session, opened before the session and open as long as it. `None` if the
    /// protocol has none, or while not connected.
    control: Option<ControlLink<D::Control, H>>,
    state: LinkState<D::Session, H>,
    /// Requests that wait for a session or for room in it; replayed ones first.
    pub(super) queue: VecDeque<Io>,
    pub(super) done: Vec<Completion>,
    retry: ReconnectTimer,
    /// Time by which the present attempt must have a session; `None`: it has no limit of its own.
    attempt_until: Option<Instant>,
    silence: Silence,
    overdue: OverdueTimer,
    /// The target accepts no other session before this time (iSCSI's Time2Wait).
    not_before: Option<Instant>,
    /// Requests that the session holds.
    in_flight: usize,
    /// The link had a session since it was last idle: queued requests may have been sent, and must
    /// not move to another link.
    was_open: bool,
    is_parked: bool,
    /// Number of turns.
    turns: u32,
    /// The channel was dropped: log out and end.
    pub(super) is_closing: bool,
}

enum LinkState<S, H: Host> {
    /// Not connected: the next request starts a connection.
    Down,
    /// Between two attempts.
    Pausing {
        until: Instant,
    },
    Connecting {
        connection: Connection<H>,
        until: Instant,
    },
    /// The control session is logging in; the session starts after it.
    Controlling,
    /// Logging in, or logged in.
    Open {
        connections: ConnectionSet<H>,
        session: S,
        is_checked: bool,
    },
}

impl<D: Dialer, H: Host> Task for Link<D, H> {
    #[inline]
    fn run(&mut self) -> Progress {
        let was_parked = std::mem::replace(&mut self.is_parked, false);
        let completed_before = self.done.len();
        let controlled =
            if was_parked || self.is_control_due() { self.run_control() } else { Progress::Idle };
        let progress = match &mut self.state {
            LinkState::Open { .. } => {
                self.check_silence();
                let progress = self.run_open();
                let progress = self.take_handed_back().unwrap_or(progress);
                self.check_answers().unwrap_or(progress)
            }
            LinkState::Down => Progress::Idle,
            LinkState::Pausing { until } if *until > self.core.now() => Progress::Idle,
            LinkState::Pausing { .. } => self.dial(),
            LinkState::Connecting { .. } => self.run_connecting(),
            LinkState::Controlling => self.run_controlling(),
        };
        let progress = if self.is_attempt_over() {
            self.lose("target accepted the connection and did not complete the login in time")
        } else {
            progress
        };
        let progress = if progress == Progress::Idle { controlled } else { progress };
        if self.done.len() > completed_before {
            self.consumer.wake();
        }
        let ends = self.is_closing && !matches!(self.state, LinkState::Open { .. });
        if ends {
            self.end_control();
            return Progress::Done;
        }
        progress
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn park(&mut self) {
        self.is_parked = true;
        if let Some(control) = &mut self.control {
            control.connection.park();
        }
        match &mut self.state {
            LinkState::Open { connections, .. } => {
                connections.park();
                self.watch();
            }
            LinkState::Connecting { connection, .. } => connection.park_connecting(),
            LinkState::Down | LinkState::Pausing { .. } | LinkState::Controlling => {}
        }
    }
}

impl<D: Dialer, H: Host> Link<D, H> {
    /// A link that dials at once.
    pub(super) fn spawn(
        core: &Rc<H>,
        volume: &RemoteVolume<D, H>,
        home: &Address,
        depth: u32,
        consumer: &Waker,
        group: &Rc<PathGroup>,
    ) -> Rc<RefCell<Link<D, H>>> {
        let mut made = None;
        group.alive.set(group.alive.get() + 1);
        core.spawn(|waker| {
            let link = Rc::new(RefCell::new(Link {
                dialer: volume.dialer.clone(),
                known: volume.known.clone(),
                number: volume.next_link(),
                has_other_paths: volume.dialer.paths().addresses.len() > 1,
                rank: None,
                reported_rank: PathRank::Best,
                redirections: Redirections::from(home.clone()),
                core: core.clone(),
                waker: waker.clone(),
                consumer: consumer.clone(),
                group: group.clone(),
                tls: None,
                control: None,
                state: LinkState::Pausing { until: core.now() },
                queue: VecDeque::with_capacity(depth as usize),
                done: Vec::with_capacity(depth as usize),
                retry: ReconnectTimer::new(volume.reconnect_timeout, core.now()),
                attempt_until: None,
                silence: Silence::default(),
                overdue: OverdueTimer::new(volume.dialer.paths().timeout),
                not_before: None,
                in_flight: 0,
                was_open: false,
                is_parked: false,
                turns: 0,
                is_closing: false,
            }));
            made = Some(link.clone());
            link
        });
        made.expect("spawn makes the task before it returns")
    }

    #[inline]
    pub(super) fn submit(&mut self, io: Io) {
        match &mut self.state {
            LinkState::Open { session, is_checked: true, .. }
                if self.queue.is_empty()
                    && session.room() > 0
                    && !is_shut(session.path_rank(), self.has_other_paths) =>
            {
                session.submit(io);
                self.in_flight += 1;
            }
            LinkState::Down => {
                self.queue.push_back(io);
                self.group.alive.set(self.group.alive.get() + 1);
                let now = self.core.now();
                let until = self.dial_time(now);
                self.retry.begin(now);
                self.state = LinkState::Pausing { until };
                self.core.wake_at(until, &self.waker);
                self.waker.wake();
            }
            _ => self.queue.push_back(io),
        }
    }

    /// Passes on the size of the volume, which another session has learned.
    pub(super) fn resize(&mut self, size: u64) {
        if let LinkState::Open { session, .. } = &mut self.state {
            session.resize(size);
        }
    }

    /// Sends what `submit` has queued, and takes over what completed without the target.
    #[inline]
    pub(super) fn kick(&mut self, spins: bool) {
        let LinkState::Open { connections, session, .. } = &mut self.state else { return };
        while let Some(completion) = session.poll_done() {
            self.in_flight -= 1;
            self.done.push(completion);
        }
        let Some(is_stuck) = connections.send_now(session) else { return };
        // A spinning core polls for the reply itself; a full socket is handled by the task.
        if is_stuck || (spins && self.is_parked) {
            self.waker.wake();
        }
        if self.is_parked {
            self.watch();
        }
    }

    fn dial(&mut self) -> Progress {
        if self.is_closing {
            return Progress::Idle;
        }
        if self.control.is_none() {
            self.tls = self.dialer.tls().and_then(TlsKeys::keys);
        }
        let secure = match super::secure(self.tls.as_ref()) {
            Ok(secure) => secure,
            Err(error) => {
                self.give_up(&Broken::from(error).to_string());
                return Progress::More;
            }
        };
        match self.core.connect(self.redirections.address()) {
            Ok(stream) => {
                let now = self.core.now();
                self.attempt_until = self.retry.attempt_ends(now);
                let until = now + CONNECT_TIMEOUT;
                let until = self.attempt_until.map_or(until, |ends| ends.min(until));
                for until in [Some(until), self.attempt_until].into_iter().flatten() {
                    self.core.wake_at(until, &self.waker);
                }
                let connection = Connection::new(stream, &self.core, &self.waker).secured(secure);
                self.state = LinkState::Connecting { connection, until };
                self.run_connecting()
            }
            Err(error) => {
                // Retrying does not help, and the user should learn why.
                if error.kind() == ErrorKind::PermissionDenied && self.retry.on_denial() {
                    let target = self.redirections.address();
                    warn!(%target, "cannot connect: {error}; grant this process access; it keeps trying");
                }
                self.lose(&error.to_string())
            }
        }
    }

    /// Whether the present attempt has no session although its time is over. A session has time
    /// limits of its own for its login, which may be longer.
    #[inline]
    fn is_attempt_over(&self) -> bool {
        let is_attempt = matches!(
            self.state,
            LinkState::Connecting { .. } | LinkState::Controlling | LinkState::Open { is_checked: false, .. }
        );
        is_attempt && self.attempt_until.is_some_and(|until| self.core.now() >= until)
    }

    fn run_connecting(&mut self) -> Progress {
        let LinkState::Connecting { connection, until } = &self.state else { return Progress::Idle };
        match connection.stream().connect_result() {
            None if *until > self.core.now() => Progress::Idle,
            None => self.lose("no answer"),
            Some(Err(error)) => self.lose(&error.to_string()),
            Some(Ok(())) => {
                let LinkState::Connecting { connection, .. } =
                    std::mem::replace(&mut self.state, LinkState::Down)
                else {
                    return Progress::Idle;
                };
                let opening = Opening {
                    link: self.number,
                    control: self.control.as_ref().map(|control| &control.session),
                    transport: connection.stream().transport(),
                    pool: self.core.pool(),
                    now: self.core.now(),
                };
                if self.control.is_none()
                    && let Some(control) = self.dialer.control(self.tls.is_some(), &opening)
                {
                    self.reported_rank = PathRank::Best;
                    self.control = Some(ControlLink::new(connection, control));
                    self.state = LinkState::Controlling;
                    self.run_control();
                    return Progress::More;
                }
                let mut session = self.dialer.session(&opening);
                self.dialer.set_path_rank(&mut session, self.reported_rank);
                self.state = LinkState::Open {
                    connections: ConnectionSet::new(connection),
                    session,
                    is_checked: false,
                };
                self.run_open();
                Progress::More
            }
        }
    }

    #[inline]
    fn run_open(&mut self) -> Progress {
        match self.turn() {
            Ok(progress) => progress,
            Err(SessionEnd::Broken(broken)) => self.lose_to(&broken),
            Err(SessionEnd::Finished) => self.lose("target closed the connection"),
            Err(SessionEnd::Outdated(reason)) => self.lose(&reason),
            Err(SessionEnd::Refused(reason)) => self.give_up(&reason),
            Err(SessionEnd::Moved(moved)) => self.follow(moved),
        }
    }

    #[inline]
    fn turn(&mut self) -> Result<Progress, SessionEnd> {
        let LinkState::Open { connections, session, is_checked } = &mut self.state else {
            return Ok(Progress::Idle);
        };
        let (address, tls) = (self.redirections.address(), self.tls.as_ref());
        let dial = Dial { core: &self.core, waker: &self.waker, address, tls };
        let is_dialled = connections.dial(session, &dial)?;
        let inflow = connections.receive(session, &dial)?;
        if !*is_checked && let Some(moved) = self.dialer.moved(session, address) {
            return Err(moved.map_or_else(SessionEnd::Refused, SessionEnd::Moved));
        }
        if !*is_checked && let Some(reason) = self.dialer.refusal(session) {
            // The logout is sent best effort.
            let _ = connections.send_now(session);
            let is_outdated = self.dialer.renews_secrets(session);
            return Err(if is_outdated { SessionEnd::Outdated(reason) } else { SessionEnd::Refused(reason) });
        }
        if !*is_checked && session.is_ready() {
            if let Err(reason) = self.dialer.check(session) {
                // The target did nothing wrong and gets an orderly logout.
                session.on_stop();
                let _ = connections.send_now(session);
                return Err(SessionEnd::Refused(reason));
            }
            *is_checked = true;
            if std::mem::replace(&mut self.was_open, true) {
                self.known.reconnects.fetch_add(1, Ordering::Relaxed);
            }
            self.group.open.set(self.group.open.get() + 1);
            self.redirections.settle();
            self.retry.on_session();
            self.group.is_changed.set(true);
            self.consumer.wake();
        }
        if let Some(size) = session.poll_size()
            && self.known.take_size(size, self.redirections.address())
        {
            self.group.is_changed.set(true);
            self.consumer.wake();
        }
        while let Some(completion) = session.poll_done() {
            self.retry.on_completion();
            self.in_flight -= 1;
            self.done.push(completion);
        }
        let rank = is_checked.then(|| session.path_rank());
        if rank == Some(PathRank::Unusable)
            && self.reported_rank != PathRank::Unusable
            && let Some(control) = &mut self.control
        {
            self.reported_rank = PathRank::Unusable;
            control.refresh_path();
        }
        let is_blocked = rank.is_some_and(|rank| is_shut(rank, self.has_other_paths));
        if self.has_other_paths && (rank != self.rank || (is_blocked && !self.queue.is_empty())) {
            self.rank = rank;
            self.group.is_changed.set(true);
            self.consumer.wake();
        }
        if self.retry.is_stranded_too_long(is_blocked && !self.queue.is_empty(), || self.core.now()) {
            self.done.extend(self.queue.drain(..).map(|io| lost(io.tag)));
        }
        while *is_checked && !is_blocked && session.room() > 0 {
            let Some(io) = self.queue.pop_front() else { break };
            session.submit(io);
            self.in_flight += 1;
        }
        if self.is_closing {
            session.on_stop();
        }
        let (address, tls) = (self.redirections.address(), self.tls.as_ref());
        let dial = Dial { core: &self.core, waker: &self.waker, address, tls };
        let has_sent = connections.send(session, &dial)? || is_dialled;
        if has_sent || matches!(inflow, Inflow::More | Inflow::Drained) {
            self.silence.on_move();
        }
        match inflow {
            Inflow::Finished => Err(SessionEnd::Finished),
            Inflow::More => Ok(Progress::More),
            Inflow::Drained => Ok(Progress::Drained),
            Inflow::Empty | Inflow::Blocked if has_sent => Ok(Progress::Drained),
            Inflow::Empty | Inflow::Blocked => Ok(Progress::Idle),
        }
    }

    /// The path's rank, if there is a session.
    #[inline]
    pub(super) fn rank(&self) -> Option<PathRank> {
        match &self.state {
            LinkState::Open { session, is_checked: true, .. } => Some(session.path_rank()),
            _ => None,
        }
    }

    /// Number of requests that the link holds.
    #[inline]
    pub(super) fn load(&self) -> usize {
        self.in_flight + self.queue.len()
    }

    /// Whether the link can make progress with requests.
    pub(super) fn is_usable(&self) -> bool {
        self.rank().is_some_and(|rank| !is_shut(rank, self.has_other_paths))
    }

    /// Removes and returns queued requests that may move to another link: those that were never
    /// sent or were aborted, and with several paths all.
    pub(super) fn hand_over(&mut self) -> VecDeque<Io> {
        let waits_for_it = self.was_open && !self.has_other_paths;
        if waits_for_it || self.is_usable() { VecDeque::new() } else { std::mem::take(&mut self.queue) }
    }
}

/// Whether no request is sent over a path now: it has failed, or it is inaccessible and there are
/// others.
#[inline]
fn is_shut(rank: PathRank, has_others: bool) -> bool {
    rank == PathRank::Failing || has_others && rank == PathRank::Unusable
}

/// The completion of a request that no path can carry.
fn lost(tag: Tag) -> Completion {
    Completion { tag, result: Err(IoError::PathLost) }
}

/// Why a session is over.
enum SessionEnd {
    Broken(Broken),
    Finished,
    /// Refused for secrets that are being read again.
    Outdated(String),
    Refused(String),
    Moved(Redirection),
}

impl From<Broken> for SessionEnd {
    fn from(broken: Broken) -> SessionEnd {
        SessionEnd::Broken(broken)
    }
}
