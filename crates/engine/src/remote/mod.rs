//! Remote volumes: an initiator session with a connection under it is a channel.
//!
//! ```text
//!   consumer ──submit──▶ RemoteChannel ──▶ Link ──▶ session ──▶ connection ──▶ socket
//!                                           │ connection lost: dial again, replay what had not completed
//! ```
//! A channel has one or more `Link`s. Each is a session of its own with one connection or, where
//! the protocol supports it, several ([`blockmux_proto::driver::session`]). A link that loses its
//! connection keeps every uncompleted request, reconnects after growing pauses, and replays the
//! requests on the new session, so that each completes exactly once. A link that cannot connect
//! while others can hands its requests to them: some targets accept fewer connections than
//! configured. All requests fail if, for the volume's reconnect timeout, no target answers or every
//! session ends without completing a request; the next request starts over. Data that was completed
//! but not flushed before the loss is as safe as the target made it.
//!
//! A connection also counts as lost if a request gets no reply in time, unless the target aborts
//! the request: see `overdue`.
//!
//! If several paths lead to a volume, a channel has links over each of them. Requests are
//! distributed over the paths that the target ranks best ([`PathRank`]), round-robin or by queue
//! depth ([`Policy`]). Uncompleted requests of a lost path, and requests that a target temporarily
//! refuses on a path, are retried on another path at once. While other paths work, the lost path is
//! tried again every few seconds. As with any multipath, a target that still processes requests of
//! the lost path may execute them after newer ones of the other path: only ending the lost session
//! prevents that, and a session over another port does not end it.
//!
//! A volume may be resized while in use, if its protocol reports that: [`Volume::info`] returns the
//! current size, against which new requests are checked.
//!
//! A target may redirect a link, which follows at once. When that connection is lost, the link
//! dials the original address again, unless the redirection was permanent.
//!
//! A protocol may need a control connection for each session, opened before it and alive as long as
//! it: see `control`.

mod connections;
mod control;
mod current_secrets;
mod link;
mod missing;
mod overdue;
pub(crate) mod redirections;
mod retry;
pub(crate) mod seeds;
mod silence;

use crate::carrier::tls::{ClientTls, Secure};
use crate::core::reactor::EngineCore;
use crate::net::host::Host;
use crate::net::socket::Address;
use blockmux_proto::driver::session::{
    Control, Initiator, Overdue, PathRank, RetryRules, StreamConnections, StreamSession,
};
use blockmux_proto::driver::transport::TransportInfo;
use blockmux_proto::names::uri::DEFAULT_TIMEOUT;
use blockmux_tls::TlsError;
use blockmux_volume::{Channel, Completion, Core, Io, IoError, LinkCounts, Pool, Volume, VolumeInfo, Waker};
pub use current_secrets::CurrentSecrets;
use link::Link;
pub use missing::missing_connections;
use overdue::FailingRequests;
pub(crate) use overdue::{OverdueTimer, format_duration};
pub use redirections::Redirection;
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::info;

/// Addresses of a remote volume, and how requests are distributed over them.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The address of each path, at least one.
    pub addresses: Vec<Address>,
    /// How requests are distributed over equally good paths.
    pub policy: Policy,
    /// How long the oldest request may wait for a reply before the connection counts as lost; four
    /// times that if the request moves no data, such as a flush. `None`: for ever.
    pub timeout: Option<Duration>,
}

impl Paths {
    /// A single path to this address.
    #[must_use]
    pub fn to(address: &Address) -> Paths {
        let addresses = vec![address.clone()];
        Paths { addresses, policy: Policy::default(), timeout: Some(DEFAULT_TIMEOUT) }
    }

    /// The rules for retries over one of these paths; `reconnect` is how long I/O is retried.
    pub(crate) fn retries(&self, reconnect: Duration) -> RetryRules {
        RetryRules { has_other_paths: self.addresses.len() > 1, busy_timeout: reconnect }
    }
}

/// TLS keys of the connections to a remote volume.
pub trait TlsKeys {
    /// TLS of a new session and its control connection; `None`: without TLS.
    fn keys(&self) -> Option<ClientTls>;

    /// Handles the failure of a connection with these keys.
    fn on_failure(&self, _rejected: &ClientTls, _error: &TlsError) {}
}

/// Creates sessions with one remote volume and checks the volume that each one finds.
pub trait Dialer: Send + Sync + 'static {
    /// The protocol's session.
    type Session: Initiator + Overdue + StreamConnections + 'static;

    /// The control session that must be open before a session opens and as long as it lasts, on a
    /// connection of its own; [`NoControl`](blockmux_proto::driver::session::NoControl) for
    /// protocols without one.
    type Control: Control + StreamSession + 'static;

    /// The paths to the volume.
    fn paths(&self) -> &Paths;

    /// The TLS keys of protocols that secure their connections.
    fn tls(&self) -> Option<&dyn TlsKeys> {
        None
    }

    /// A new control session for the next session, if the protocol has one, on a connection with or
    /// without TLS.
    fn control(&self, _is_secured: bool, _opening: &Opening<'_, Self::Control>) -> Option<Self::Control> {
        None
    }

    /// Takes over the result of a control session that was opened only to prepare another, such as
    /// TLS keys. Returns whether there was a result; another control session is then dialled at
    /// once.
    fn take_preparation(&self, _control: &Self::Control) -> bool {
        false
    }

    /// Why a control session cannot be used, if the target refused it or it found another volume,
    /// and a retry does not help.
    fn control_refusal(&self, _control: &Self::Control) -> Option<String> {
        None
    }

    /// Whether the target refused a control session for this side's secrets, which are read again
    /// for the next attempt.
    fn renews_control_secrets(&self, _control: &Self::Control) -> bool {
        false
    }

    /// Whether the target refused a session for this side's secrets, which are read again for the
    /// next attempt.
    fn renews_secrets(&self, _session: &Self::Session) -> bool {
        false
    }

    /// A new session that logs in over one of the paths.
    fn session(&self, opening: &Opening<'_, Self::Control>) -> Self::Session;

    /// Passes on the path's rank as the control session has learned it.
    fn set_path_rank(&self, _session: &mut Self::Session, _rank: PathRank) {}

    /// Checks that a session that has just logged in leads to the expected volume.
    ///
    /// # Errors
    /// If it is another volume, to which requests must not be replayed.
    fn check(&self, session: &Self::Session) -> Result<(), String>;

    /// Why the target refused the session, if a retry does not help.
    fn refusal(&self, session: &Self::Session) -> Option<String>;

    /// The address that the target at `_from` redirects to, if it does.
    ///
    /// # Errors
    /// If it is not an address that can be dialled.
    fn moved(&self, _session: &Self::Session, _from: &Address) -> Option<Result<Redirection, String>> {
        None
    }
}

/// Parameters of a session.
pub struct Opening<'a, C> {
    /// The link's number. All successive sessions of the link have the same number, and no other
    /// session has it, so that a session can abort the requests of its predecessor.
    pub link: u32,
    /// The control session that [`Dialer::control`] made; it is ready. `None` for that call.
    pub control: Option<&'a C>,
    /// Properties of its first connection.
    pub transport: TransportInfo,
    /// The core's pool.
    pub pool: &'a Pool,
    /// The current time.
    pub now: Instant,
}

/// TLS state of a new connection.
fn secure(tls: Option<&ClientTls>) -> Result<Option<Secure>, TlsError> {
    tls.map(ClientTls::secure).transpose()
}

/// How requests are distributed over paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Round-robin.
    #[default]
    RoundRobin,
    /// To the path with the fewest requests; round-robin among equals.
    QueueDepth,
}

/// Checks that requests submitted to a volume with the properties `first` can be replayed to it
/// with the properties `now`, over this many connections. For [`Dialer::check`].
///
/// # Errors
/// The property that has changed.
pub fn check_unchanged(first: &VolumeInfo, now: &VolumeInfo, connections: u32) -> Result<(), String> {
    if now.size != first.size {
        return Err(format!("the volume has {} bytes now, and had {} before", now.size, first.size));
    }
    if now.write_cache && !first.write_cache {
        return Err("the volume has a write cache now, and had none before".to_owned());
    }
    if now.logical_block > first.logical_block {
        let (now, first) = (now.logical_block, first.logical_block);
        return Err(format!("the volume's blocks have {now} bytes now, and had {first} before"));
    }
    if now.read_only && !first.read_only {
        return Err("the volume is read-only now, and was writable before".to_owned());
    }
    if !now.shared_flush && first.shared_flush && connections > 1 {
        return Err("a flush on one connection no longer covers writes on the others".to_owned());
    }
    Ok(())
}

/// A volume served by a remote target.
pub struct RemoteVolume<D: Dialer, H: Host = EngineCore> {
    dialer: Arc<D>,
    known: Arc<VolumeShared>,
    /// The target's identifier of the data, if it reports one.
    designator: Option<String>,
    connections: u32,
    reconnect_timeout: Duration,
    /// Number of links made so far, on all cores.
    links: AtomicU32,
    host: PhantomData<fn(&H)>,
}

/// State shared by all channels of a volume.
struct VolumeShared {
    /// Properties at opening.
    first: VolumeInfo,
    /// Current size, in bytes.
    size: AtomicU64,
    /// Sessions opened to replace a lost one.
    reconnects: AtomicU64,
    /// Callbacks for size changes.
    listeners: Mutex<Vec<Box<dyn Fn() + Send + Sync>>>,
}

impl VolumeShared {
    fn info(&self) -> VolumeInfo {
        VolumeInfo { size: self.size.load(Ordering::Relaxed), ..self.first.clone() }
    }

    /// Takes over the size that a target has reported; returns whether it changed.
    fn take_size(&self, size: u64, target: &Address) -> bool {
        let was = self.size.swap(size, Ordering::Relaxed);
        if was != size {
            let change = if size > was { "grown" } else { "shrunk" };
            info!(%target, "volume has {change} from {was} to {size} bytes");
            self.listeners().iter().for_each(|call| call());
        }
        was != size
    }

    fn listeners(&self) -> MutexGuard<'_, Vec<Box<dyn Fn() + Send + Sync>>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Dialer, H: Host> RemoteVolume<D, H> {
    /// Creates a volume with the properties `info` whose sessions `dialer` creates. Each channel
    /// has `connections` connections, and tries for `reconnect_timeout` to replace a lost one.
    pub fn new(
        dialer: D,
        info: VolumeInfo,
        connections: u32,
        reconnect_timeout: Duration,
    ) -> RemoteVolume<D, H> {
        let (dialer, links) = (Arc::new(dialer), AtomicU32::new(0));
        let known = Arc::new(VolumeShared {
            size: AtomicU64::new(info.size),
            reconnects: AtomicU64::new(0),
            first: info,
            listeners: Mutex::default(),
        });
        let designator = None;
        RemoteVolume { dialer, known, designator, connections, reconnect_timeout, links, host: PhantomData }
    }

    /// Sets the target's identifier of the data; empty: it reports none.
    #[must_use]
    pub fn with_designator(self, designator: String) -> RemoteVolume<D, H> {
        RemoteVolume { designator: Some(designator).filter(|text| !text.is_empty()), ..self }
    }
}

impl<D: Dialer, H: Host> Volume for RemoteVolume<D, H> {
    fn info(&self) -> VolumeInfo {
        self.known.info()
    }

    fn designator(&self) -> Option<&str> {
        self.designator.as_deref()
    }

    fn links(&self) -> Option<LinkCounts> {
        Some(LinkCounts { reconnects: self.known.reconnects.load(Ordering::Relaxed) })
    }

    fn on_resize(&self, call: Box<dyn Fn() + Send + Sync>) {
        self.known.listeners().push(call);
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let core = H::from_core(core).ok_or(IoError::Unsupported)?;
        let group = Rc::new(PathGroup::default());
        let all = (0..self.connections).flat_map(|_| &self.dialer.paths().addresses);
        let links = all.map(|address| Link::spawn(&core, self, address, depth, &waker, &group));
        Ok(Box::new(RemoteChannel {
            info: self.known.info(),
            known: self.known.clone(),
            links: links.collect(),
            group,
            policy: self.dialer.paths().policy,
            next: 0,
            spins: core.spins(),
            done: Vec::with_capacity(depth as usize),
        }))
    }
}

impl<D: Dialer, H: Host> RemoteVolume<D, H> {
    fn next_link(&self) -> u32 {
        self.links.fetch_add(1, Ordering::Relaxed)
    }
}

/// State shared by the links of a channel.
#[derive(Default)]
struct PathGroup {
    /// Number of links that have a connection or try to get one.
    alive: Cell<usize>,
    /// Number of links that have a session.
    open: Cell<usize>,
    /// Requests may have to move to another link.
    is_changed: Cell<bool>,
    /// Requests that timed out, or failed on their path.
    late: RefCell<FailingRequests>,
}

struct RemoteChannel<D: Dialer, H: Host> {
    info: VolumeInfo,
    known: Arc<VolumeShared>,
    links: Vec<Rc<RefCell<Link<D, H>>>>,
    group: Rc<PathGroup>,
    policy: Policy,
    /// Index of the next link (round-robin).
    next: usize,
    spins: bool,
    /// Completions of requests that were invalid, or that no link can perform.
    done: Vec<Completion>,
}

impl<D: Dialer, H: Host> Channel for RemoteChannel<D, H> {
    #[inline]
    fn submit(&mut self, io: Io) {
        let mut checked = self.info.check(&io);
        if checked == Err(IoError::OutOfRange) && self.refresh_size() {
            checked = self.info.check(&io);
        }
        if let Err(error) = checked {
            return self.done.push(Completion { tag: io.tag, result: Err(error) });
        }
        self.next_link().borrow_mut().submit(io);
    }

    #[inline]
    fn kick(&mut self) {
        for link in &self.links {
            link.borrow_mut().kick(self.spins);
        }
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) {
        if self.group.is_changed.take() {
            self.refresh_size();
            self.redistribute();
        }
        let before = done.len();
        done.append(&mut self.done);
        for link in &self.links {
            done.append(&mut link.borrow_mut().done);
        }
        self.group.late.borrow_mut().on_done(&done[before..]);
    }
}

impl<D: Dialer, H: Host> RemoteChannel<D, H> {
    /// Chooses the next link by policy: among the links with a session, if there are any, on the
    /// best path.
    #[inline]
    fn next_link(&mut self) -> &Rc<RefCell<Link<D, H>>> {
        if let [only] = &self.links[..] {
            return only;
        }
        let (first, count) = (self.next, self.links.len());
        let in_turn = (first..count).chain(0..first);
        let cost = |at: usize| {
            let link = self.links[at].borrow();
            let load = if self.policy == Policy::QueueDepth { link.load() } else { 0 };
            link.rank().map(|rank| (rank, load))
        };
        let mut best: Option<(usize, (PathRank, usize))> = None;
        for at in in_turn {
            if let Some(cost) = cost(at)
                && best.is_none_or(|(_, found)| cost < found)
            {
                best = Some((at, cost));
                if cost == (PathRank::Best, 0) {
                    break;
                }
            }
        }
        let at = best.map_or(first, |(at, _)| at);
        self.next = if at + 1 == count { 0 } else { at + 1 };
        &self.links[at]
    }

    /// Takes over the volume's size as another channel or link has learned it; returns whether it
    /// changed.
    #[cold]
    fn refresh_size(&mut self) -> bool {
        let size = self.known.size.load(Ordering::Relaxed);
        let is_changed = size != self.info.size;
        self.info.size = size;
        if is_changed {
            self.links.iter().for_each(|link| link.borrow_mut().resize(size));
        }
        is_changed
    }

    /// Moves requests of links without a connection to other links, or fails them if all have given
    /// up.
    fn redistribute(&mut self) {
        let is_hopeless = self.group.alive.get() == 0;
        if !is_hopeless && !self.links.iter().any(|link| link.borrow().is_usable()) {
            return self.links.iter().for_each(|link| link.borrow_mut().retry_now());
        }
        for at in 0..self.links.len() {
            let left = self.links[at].borrow_mut().hand_over();
            for io in left {
                if is_hopeless {
                    self.done.push(Completion { tag: io.tag, result: Err(IoError::PathLost) });
                } else {
                    self.next_link().borrow_mut().submit(io);
                }
            }
        }
        self.kick();
    }
}

impl<D: Dialer, H: Host> Drop for RemoteChannel<D, H> {
    fn drop(&mut self) {
        for link in &self.links {
            let mut link = link.borrow_mut();
            link.is_closing = true;
            link.queue.clear();
            link.waker.wake();
        }
    }
}
