//! Remote volumes: an initiator session with a connection under it is a channel.
//!
//! ```text
//!   consumer ──submit──▶ RemoteChannel ──▶ Link ──▶ session ──▶ connection ──▶ socket
//!                                           │ connection lost: dial again, replay what had not completed
//! ```
//! A channel has one `Link` or several, each a session of its own, with one connection or, where
//! the protocol has that, several ([`blockmux_proto::session`]). A link that loses its connection
//! keeps every request that has not completed, dials again with growing pauses, and replays them on
//! the new session; a request so completes exactly once. A link that does not get a connection
//! while others have one hands its requests to them: some targets take fewer connections than we
//! would like. When nothing answers for the volume's patience, or sessions begin for so long and
//! end without completing anything, all requests fail, and the next one starts over. What had
//! completed before the loss and was not flushed is as safe as the target made it.
//!
//! A connection over which a request gets no answer in time counts as lost, too, unless the target
//! gives up the request: see `overdue`.
//!
//! Where several paths lead to a volume, a channel has links by each of them. Requests go in turn
//! over those whose target calls them the best ([`PathRank`]), or to the one of those that has the
//! fewest ([`Policy`]). What was under way by a path that is lost goes on by another at once, and
//! so does what the target does not do there now; the path is tried again, every few seconds as
//! long as others do. As with every multipath, a target that still works on what came by the lost
//! path may do that after the other path has done the same, and more: only what ends the lost
//! session there prevents it, which a session by another port does not.
//!
//! A volume may grow or shrink while it is used, as far as its protocol tells: [`Volume::info`]
//! says how large it is now, and what is submitted from then on is checked against that.
//!
//! A target may say that it is elsewhere. A link follows it there at once; when that connection is
//! lost, it asks where it asked first, unless the move was for good.
//!
//! A protocol may need a second connection beside each, which is opened first and lives as long:
//! see `control`.

mod connections;
mod control;
mod datamover;
mod generated;
pub mod iscsi;
mod link;
mod missing;
mod moves;
pub mod nvme;
mod overdue;
mod retry;
mod seeds;
mod silence;

use crate::host::Host;
use crate::reactor::EngineCore;
use crate::secure::Secure;
use crate::socket::Address;
use blockmux_proto::session::{Control, DEFAULT_TIMEOUT, Initiator, Overdue, PathRank, StreamConnections};
use blockmux_tls::{Psk, TlsError};
use blockmux_volume::{Channel, Completion, Core, Io, IoError, Pool, Volume, VolumeInfo, Waker};
pub use generated::GeneratedKeys;
use link::Link;
pub use missing::missing_connections;
pub use moves::Move;
use overdue::Late;
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::info;

/// Where a remote volume is reached, and how requests get there.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The address of each path, at least one.
    pub addresses: Vec<Address>,
    /// How requests are shared among the paths that are equally good.
    pub policy: Policy,
    /// How long the oldest request may wait for an answer before the connection counts as lost;
    /// four times that where the request moves no data, as a flush. `None`: for ever.
    pub timeout: Option<Duration>,
}

impl Paths {
    /// One path to this address.
    #[must_use]
    pub fn to(address: &Address) -> Paths {
        let addresses = vec![address.clone()];
        Paths { addresses, policy: Policy::default(), timeout: Some(DEFAULT_TIMEOUT) }
    }
}

/// TLS keys of the connections to a remote volume.
pub trait TlsKeys {
    /// Keys for the connections of a new session and of its control, the best first; `None`:
    /// without TLS.
    fn keys(&self) -> Option<Arc<[Psk]>>;

    /// Whether the kernel makes the records of TLS where it can.
    fn uses_ktls(&self) -> bool;

    /// A connection could not be secured with these keys.
    fn forget(&self, keys: &[Psk]);
}

/// Makes sessions with one remote volume, as often as needed, and judges what they find there.
pub trait Dialer: Send + Sync + 'static {
    /// The protocol's session.
    type Session: Initiator + Overdue + StreamConnections + 'static;

    /// What has to be open before a session and beside it, on a connection of its own;
    /// [`NoControl`](blockmux_proto::session::NoControl) for protocols without.
    type Control: Control + 'static;

    /// The paths to the volume.
    fn paths(&self) -> &Paths;

    /// The TLS keys of protocols that secure their connections.
    fn tls(&self) -> Option<&dyn TlsKeys> {
        None
    }

    /// A new control for the session to come, if the protocol has one, on a connection with or
    /// without TLS.
    fn control(&self, _is_secured: bool, _pool: &Pool, _now: Instant) -> Option<Self::Control> {
        None
    }

    /// Takes what a control has only prepared, if it has: another one is dialled at once then.
    fn take_preparation(&self, _control: &Self::Control) -> bool {
        false
    }

    /// Why a control is of no use, if the target refused it or it found another volume, and trying
    /// again does not help.
    fn control_refusal(&self, _control: &Self::Control) -> Option<String> {
        None
    }

    /// A new session that logs in by one of the paths.
    fn session(&self, opening: &Opening<'_, Self::Control>) -> Self::Session;

    /// The session's control has learned how well the volume is reached.
    fn set_path_rank(&self, _session: &mut Self::Session, _rank: PathRank) {}

    /// Whether a session that has just logged in leads to the volume that it is meant to.
    ///
    /// # Errors
    /// If it is another now: replaying there would be wrong.
    fn check(&self, session: &Self::Session) -> Result<(), String>;

    /// Why the target turned the session away, if it did and trying again is of no use.
    fn refusal(&self, session: &Self::Session) -> Option<String>;

    /// Where the target says that it is instead, if it does.
    ///
    /// # Errors
    /// If that is no address that can be dialled.
    fn moved(&self, _session: &Self::Session) -> Option<Result<Move, String>> {
        None
    }
}

/// What a session is opened with.
pub struct Opening<'a, C> {
    /// The number of its link, which all sessions of one connection's lives have, and no others:
    /// with it can be ended what a target still does for the one before.
    pub link: u32,
    /// The control that [`Dialer::control`] made; it is ready.
    pub control: Option<&'a C>,
    /// How many bytes the segments of the session's connection have, where that is known.
    pub segment_len: Option<usize>,
    /// The core's.
    pub pool: &'a Pool,
    /// Now.
    pub now: Instant,
}

/// What secures a new connection, with these keys, and by the kernel if it can and is wanted.
fn secure(keys: Option<&[Psk]>, ktls: bool) -> Result<Option<Secure>, TlsError> {
    keys.map(|keys| Ok(Secure::client(keys)?.by_kernel(ktls))).transpose()
}

/// How requests are shared among paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// In turn.
    #[default]
    RoundRobin,
    /// To the one that has the fewest, in turn where several have as few.
    QueueDepth,
}

/// Whether a volume that was like `first` can be used on as it is `now`, over so many connections.
/// For [`Dialer::check`].
///
/// # Errors
/// If what was submitted for the one cannot be replayed to the other.
pub fn check_unchanged(first: &VolumeInfo, now: &VolumeInfo, connections: u32) -> Result<(), String> {
    if now.size != first.size {
        return Err(format!("the volume has {} bytes now, it had {}", now.size, first.size));
    }
    if now.write_cache && !first.write_cache {
        return Err("the volume has a write cache now, and had none to be flushed".to_owned());
    }
    if now.logical_block > first.logical_block {
        let (now, first) = (now.logical_block, first.logical_block);
        return Err(format!("the volume takes blocks of {now} bytes now, they were {first}"));
    }
    if now.read_only && !first.read_only {
        return Err("the volume is read-only now, and was not".to_owned());
    }
    if !now.shared_flush && first.shared_flush && connections > 1 {
        return Err("the target does not let several connections be used together any more".to_owned());
    }
    Ok(())
}

/// A volume that a remote target serves.
pub struct RemoteVolume<D: Dialer, H: Host = EngineCore> {
    dialer: Arc<D>,
    known: Arc<Known>,
    /// What the target calls the data, if it tells.
    designator: Option<String>,
    connections: u32,
    reconnect_timeout: Duration,
    /// How many links there have been, over all cores.
    links: AtomicU32,
    host: PhantomData<fn(&H)>,
}

/// What all channels of a volume know.
struct Known {
    /// As it was when it was opened.
    first: VolumeInfo,
    /// In bytes, as it is now.
    size: AtomicU64,
    /// Whoever wants to hear of another size.
    listeners: Mutex<Vec<Box<dyn Fn() + Send + Sync>>>,
}

impl Known {
    fn info(&self) -> VolumeInfo {
        VolumeInfo { size: self.size.load(Ordering::Relaxed), ..self.first.clone() }
    }

    /// A target told how large the volume is; whether that is news.
    fn take_size(&self, size: u64, target: &Address) -> bool {
        let was = self.size.swap(size, Ordering::Relaxed);
        if was != size {
            let how = if size > was { "grown" } else { "shrunk" };
            info!(%target, "volume has {how} from {was} to {size} bytes");
            self.listeners().iter().for_each(|call| call());
        }
        was != size
    }

    fn listeners(&self) -> MutexGuard<'_, Vec<Box<dyn Fn() + Send + Sync>>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Dialer, H: Host> RemoteVolume<D, H> {
    /// A volume like `info` behind `dialer`; each channel has so many connections and waits so long
    /// for a lost one.
    pub fn new(dialer: D, info: VolumeInfo, connections: u32, patience: Duration) -> RemoteVolume<D, H> {
        let (dialer, links) = (Arc::new(dialer), AtomicU32::new(0));
        let known =
            Arc::new(Known { size: AtomicU64::new(info.size), first: info, listeners: Mutex::default() });
        let designator = None;
        RemoteVolume {
            dialer,
            known,
            designator,
            connections,
            reconnect_timeout: patience,
            links,
            host: PhantomData,
        }
    }

    /// The volume with what its target calls the data; empty if it does not tell.
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

    fn on_resize(&self, call: Box<dyn Fn() + Send + Sync>) {
        self.known.listeners().push(call);
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let core = H::from_core(core).ok_or(IoError::Unsupported)?;
        let group = Rc::new(PathGroup::default());
        let all = (0..self.connections).flat_map(|_| &self.dialer.paths().addresses);
        let links = all.map(|home| Link::spawn(&core, self, home, depth, &waker, &group));
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

/// What the links of a channel know of each other.
#[derive(Default)]
struct PathGroup {
    /// How many have a connection, or try to get one.
    alive: Cell<usize>,
    /// How many have a session.
    open: Cell<usize>,
    /// Requests may have to move from one to another.
    is_changed: Cell<bool>,
    /// Requests that got no answer in time by any of them, or failed on their way.
    late: RefCell<Late>,
}

struct RemoteChannel<D: Dialer, H: Host> {
    info: VolumeInfo,
    known: Arc<Known>,
    links: Vec<Rc<RefCell<Link<D, H>>>>,
    group: Rc<PathGroup>,
    policy: Policy,
    /// Whose turn it is.
    next: usize,
    spins: bool,
    /// Requests that were wrong from the start, or that no link can do.
    done: Vec<Completion>,
}

impl<D: Dialer, H: Host> Channel for RemoteChannel<D, H> {
    #[inline]
    fn submit(&mut self, io: Io) {
        let mut checked = self.info.check(&io);
        if checked == Err(IoError::OutOfRange) && self.look_at_size() {
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
            self.look_at_size();
            self.share_out();
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
    /// The link whose turn it is, among those with a session if there are any, by the best path.
    #[inline]
    fn next_link(&mut self) -> &Rc<RefCell<Link<D, H>>> {
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

    /// Takes over what another channel, or a link of this one, has learned of the volume's size;
    /// whether that is news.
    #[cold]
    fn look_at_size(&mut self) -> bool {
        let size = self.known.size.load(Ordering::Relaxed);
        let is_news = size != self.info.size;
        self.info.size = size;
        if is_news {
            self.links.iter().for_each(|link| link.borrow_mut().resize(size));
        }
        is_news
    }

    /// Finds another link for what waits at one that has no connection, or fails it where all have
    /// given up.
    fn share_out(&mut self) {
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
