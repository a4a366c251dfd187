//! One session of a channel, over all its lives: dials, carries requests beside its control
//! (`controlled`), watches whether the target answers (`watch`), and when it is lost (`loss`)
//! replays, waits, gives up.

mod controlled;
mod loss;
mod watch;

use super::connections::{ConnectionSet, Dial};
use super::control::ControlLink;
use super::moves::{Move, Moves};
use super::overdue::Overdue;
use super::retry::ReconnectTimer;
use super::silence::Silence;
use super::{Dialer, Known, Opening, PathGroup, RemoteVolume, TlsKeys};
use crate::connection::{Broken, Connection, Inflow};
use crate::host::{ByteStream, Host};
use crate::reactor::{Progress, Task};
use crate::socket::Address;
use blockmux_proto::session::{Initiator, PathRank};
use blockmux_tls::Psk;
use blockmux_volume::{Completion, Io, IoError, Tag, Waker};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;
use tracing::warn;

/// One session of a channel, over all its lives.
pub(super) struct Link<D: Dialer, H: Host> {
    dialer: Arc<D>,
    known: Arc<Known>,
    /// Its number, for the dialer.
    number: u32,
    /// Others go by other paths.
    has_other_paths: bool,
    /// As it was when the channel was last told.
    rank: Option<PathRank>,
    /// As the control has told it, where there is one.
    told_rank: PathRank,
    moves: Moves,
    core: Rc<H>,
    /// Wakes the link's own task.
    pub(super) waker: Waker,
    /// Wakes whoever uses the channel.
    consumer: Waker,
    group: Rc<PathGroup>,
    /// What the connections of the session are secured with, and of its control.
    tls_keys: Option<Arc<[Psk]>>,
    /// Whether the kernel makes the records of TLS where it can.
    uses_ktls: bool,
    /// Open before the session and as long as it is; `None` where the protocol has none, or without
    /// a connection.
    control: Option<ControlLink<D::Control, H>>,
    state: LinkState<D::Session, H>,
    /// Waits for a session, or for room in it; replayed requests first.
    pub(super) queue: VecDeque<Io>,
    pub(super) done: Vec<Completion>,
    retry: ReconnectTimer,
    silence: Silence,
    overdue: Overdue,
    /// The target wants no other session before that.
    not_before: Option<Instant>,
    /// Requests that the session holds.
    in_flight: usize,
    /// It had a session since it was last at rest: what waits may have been sent before, and waits
    /// for this link.
    was_open: bool,
    is_parked: bool,
    /// How often it has run.
    turns: u32,
    /// The channel is gone: say goodbye and end.
    pub(super) is_closing: bool,
}

enum LinkState<S, H: Host> {
    /// Nothing to do: dial with the next request.
    Down,
    /// Between two attempts.
    Pausing {
        until: Instant,
    },
    Connecting {
        connection: Connection<H>,
        until: Instant,
    },
    /// The control is brought up: until then nothing else can be.
    Controlling,
    /// Logging in, or logged in.
    Open {
        connections: ConnectionSet<H>,
        session: S,
        is_checked: bool,
    },
}

struct LinkTask<D: Dialer, H: Host>(Rc<RefCell<Link<D, H>>>);

impl<D: Dialer, H: Host> Task for LinkTask<D, H> {
    #[inline]
    fn run(&mut self) -> Progress {
        self.0.borrow_mut().run()
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn park(&mut self) {
        let mut link = self.0.borrow_mut();
        link.is_parked = true;
        if let Some(control) = &mut link.control {
            control.park();
        }
        match &mut link.state {
            LinkState::Open { connections, .. } => {
                connections.park();
                link.watch();
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
                uses_ktls: volume.dialer.tls().is_some_and(TlsKeys::uses_ktls),
                known: volume.known.clone(),
                number: volume.next_link(),
                has_other_paths: volume.dialer.paths().addresses.len() > 1,
                rank: None,
                told_rank: PathRank::Best,
                moves: Moves::from(home.clone()),
                core: core.clone(),
                waker: waker.clone(),
                consumer: consumer.clone(),
                group: group.clone(),
                tls_keys: None,
                control: None,
                state: LinkState::Pausing { until: core.now() },
                queue: VecDeque::with_capacity(depth as usize),
                done: Vec::with_capacity(depth as usize),
                retry: ReconnectTimer::new(volume.reconnect_timeout, core.now()),
                silence: Silence::default(),
                overdue: Overdue::new(volume.dialer.paths().timeout),
                not_before: None,
                in_flight: 0,
                was_open: false,
                is_parked: false,
                turns: 0,
                is_closing: false,
            }));
            made = Some(link.clone());
            LinkTask(link)
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
                let until = self.when_wanted(now);
                self.retry.begin(now);
                self.state = LinkState::Pausing { until };
                self.core.wake_at(until, &self.waker);
                self.waker.wake();
            }
            _ => self.queue.push_back(io),
        }
    }

    /// Another session has learned that the volume is of this size.
    pub(super) fn resize(&mut self, size: u64) {
        if let LinkState::Open { session, .. } = &mut self.state {
            session.resize(size);
        }
    }

    /// Sends what `submit` has queued up, and takes over what completed without the target.
    #[inline]
    pub(super) fn kick(&mut self, spins: bool) {
        let LinkState::Open { connections, session, .. } = &mut self.state else { return };
        while let Some(completion) = session.poll_done() {
            self.in_flight -= 1;
            self.done.push(completion);
        }
        let Some(is_stuck) = connections.send_now(session) else { return };
        // A spinning core looks for the answer itself; a stuck send is the task's to sort out.
        if is_stuck || (spins && self.is_parked) {
            self.waker.wake();
        }
        if self.is_parked {
            self.watch();
        }
    }

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
                self.look_for_answers().unwrap_or(progress)
            }
            LinkState::Down => Progress::Idle,
            LinkState::Pausing { until } if *until > self.core.now() => Progress::Idle,
            LinkState::Pausing { .. } => self.dial(),
            LinkState::Connecting { .. } => self.run_connecting(),
            LinkState::Controlling => self.run_controlling(),
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

    fn dial(&mut self) -> Progress {
        if self.is_closing {
            return Progress::Idle;
        }
        if self.control.is_none() {
            self.tls_keys = self.dialer.tls().and_then(TlsKeys::keys);
        }
        let secure = match super::secure(self.tls_keys.as_deref(), self.uses_ktls) {
            Ok(secure) => secure,
            Err(error) => {
                self.give_up(&Broken::from(error).to_string());
                return Progress::More;
            }
        };
        match self.core.connect(self.moves.address()) {
            Ok(stream) => {
                let until = self.retry.attempt_ends(self.core.now());
                self.core.wake_at(until, &self.waker);
                let connection = Connection::new(stream, &self.core, &self.waker).secured(secure);
                self.state = LinkState::Connecting { connection, until };
                self.run_connecting()
            }
            Err(error) => {
                // No retry mends that, and a user who waits for the last one should know what to
                // mend.
                if error.kind() == ErrorKind::PermissionDenied && self.retry.on_denial() {
                    let target = self.moves.address();
                    warn!(%target, "cannot connect: {error}; let this process open it, it is tried again meanwhile");
                }
                self.lose(&error.to_string())
            }
        }
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
                let (pool, now) = (self.core.pool(), self.core.now());
                if self.control.is_none()
                    && let Some(control) = self.dialer.control(self.tls_keys.is_some(), pool, now)
                {
                    self.told_rank = PathRank::Best;
                    self.control = Some(ControlLink::new(connection, control));
                    self.state = LinkState::Controlling;
                    self.run_control();
                    return Progress::More;
                }
                let mut session = self.dialer.session(&Opening {
                    link: self.number,
                    control: self.control.as_ref().map(ControlLink::session),
                    segment_len: connection.stream().segment_len(),
                    pool,
                    now,
                });
                self.dialer.set_path_rank(&mut session, self.told_rank);
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
            Err(SessionEnd::Refused(reason)) => self.give_up(&reason),
            Err(SessionEnd::Moved(moved)) => self.follow(moved),
        }
    }

    #[inline]
    fn turn(&mut self) -> Result<Progress, SessionEnd> {
        let LinkState::Open { connections, session, is_checked } = &mut self.state else {
            return Ok(Progress::Idle);
        };
        let tls = (self.tls_keys.as_deref(), self.uses_ktls);
        let dial = Dial { core: &self.core, waker: &self.waker, address: self.moves.address(), tls };
        let is_dialled = connections.dial(session, &dial)?;
        let inflow = connections.receive(session, &dial)?;
        if !*is_checked && let Some(moved) = self.dialer.moved(session) {
            return Err(moved.map_or_else(SessionEnd::Refused, SessionEnd::Moved));
        }
        if !*is_checked && let Some(reason) = self.dialer.refusal(session) {
            // The session has its good-bye ready; whether it arrives changes nothing.
            let _ = connections.send_now(session);
            return Err(SessionEnd::Refused(reason));
        }
        if !*is_checked && session.is_ready() {
            if let Err(reason) = self.dialer.check(session) {
                // The target did nothing wrong, and is not left without a word.
                session.on_stop();
                let _ = connections.send_now(session);
                return Err(SessionEnd::Refused(reason));
            }
            (*is_checked, self.was_open) = (true, true);
            self.group.open.set(self.group.open.get() + 1);
            self.moves.settle();
            self.retry.on_session();
            self.group.is_changed.set(true);
            self.consumer.wake();
        }
        if let Some(size) = session.poll_size()
            && self.known.take_size(size, self.moves.address())
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
            && self.told_rank != PathRank::Unusable
            && let Some(control) = &mut self.control
        {
            self.told_rank = PathRank::Unusable;
            control.look_at_path();
        }
        let is_none = rank.is_some_and(|rank| is_shut(rank, self.has_other_paths));
        if self.has_other_paths && (rank != self.rank || (is_none && !self.queue.is_empty())) {
            self.rank = rank;
            self.group.is_changed.set(true);
            self.consumer.wake();
        }
        if self.retry.is_stranded_too_long(is_none && !self.queue.is_empty(), || self.core.now()) {
            self.done.extend(self.queue.drain(..).map(|io| lost(io.tag)));
        }
        while *is_checked && !is_none && session.room() > 0 {
            let Some(io) = self.queue.pop_front() else { break };
            session.submit(io);
            self.in_flight += 1;
        }
        if self.is_closing {
            session.on_stop();
        }
        let tls = (self.tls_keys.as_deref(), self.uses_ktls);
        let dial = Dial { core: &self.core, waker: &self.waker, address: self.moves.address(), tls };
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

    /// How well it reaches the volume, if it has a session.
    #[inline]
    pub(super) fn rank(&self) -> Option<PathRank> {
        match &self.state {
            LinkState::Open { session, is_checked: true, .. } => Some(session.path_rank()),
            _ => None,
        }
    }

    /// How many requests it has.
    #[inline]
    pub(super) fn load(&self) -> usize {
        self.in_flight + self.queue.len()
    }

    /// Whether requests get anywhere by it.
    pub(super) fn is_usable(&self) -> bool {
        self.rank().is_some_and(|rank| !is_shut(rank, self.has_other_paths))
    }

    /// What waits here and was never sent, or has been given up; by one of several paths, whatever
    /// waits for it.
    pub(super) fn hand_over(&mut self) -> VecDeque<Io> {
        let waits_for_it = self.was_open && !self.has_other_paths;
        if waits_for_it || self.is_usable() { VecDeque::new() } else { std::mem::take(&mut self.queue) }
    }
}

/// Whether nothing is sent by a path now. One that the target calls none is used all the same where
/// there is no other, and one that fails is not.
#[inline]
fn is_shut(rank: PathRank, has_others: bool) -> bool {
    rank == PathRank::Failing || has_others && rank == PathRank::Unusable
}

/// By no path anybody gets there.
fn lost(tag: Tag) -> Completion {
    Completion { tag, result: Err(IoError::PathLost) }
}

/// Why a session is over.
enum SessionEnd {
    Broken(Broken),
    Finished,
    Refused(String),
    Moved(Move),
}

impl From<Broken> for SessionEnd {
    fn from(broken: Broken) -> SessionEnd {
        SessionEnd::Broken(broken)
    }
}
