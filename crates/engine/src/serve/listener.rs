//! Accepts connections and distributes them over the cores.

use crate::core::reactor::{EngineCore, Inbox, Progress, Task, WakeOnEvent};
use crate::core::ring::Registration;
use crate::net::host::{ByteStream, Host, NetworkStream};
use crate::net::socket::{Listener, Stream};
use crate::serve::audit::AUDIT;
use crate::serve::handover::SessionHandover;
use crate::serve::sessions::Sessions;
use crate::sys;
use blockmux_proto::names::networks::AllowedNetworks;
use blockmux_proto::volume_state::Origin;
use blockmux_volume::{Core, Waker, bytes_from_system, peer_network};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tracing::warn;

/// Starts serving a connection on the calling core. The permit is held as long as the connection
/// lives.
pub type Serve<H = EngineCore> = Arc<dyn Fn(&Rc<H>, <H as Host>::Stream, Permit) + Send + Sync>;

/// Limits the connections of a process; a clone is another handle to the same limit.
#[derive(Clone)]
pub struct ConnectionLimit(Arc<LimitHandle>);

/// What the permits of a handle share with it.
#[derive(Clone)]
struct LimitHandle {
    open: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
    /// Open connections of this handle and its clones.
    open_of_protocol: Arc<AtomicUsize>,
    /// Connections that are closed with I/O still in flight.
    orphaned: Arc<AtomicUsize>,
    /// Connections in their handshake.
    half_open: Arc<Mutex<Replaceable>>,
    /// Connections that discover targets without having proved who they are.
    discovering: Arc<Mutex<Replaceable>>,
    /// Closed connections whose sessions wait for a new one.
    lingering: Arc<Mutex<Replaceable>>,
    /// Address space that must stay free for existing connections, in bytes, including what the
    /// pools have.
    reserved_space_bytes: u64,
    /// The protocol of this handle.
    protocol: &'static str,
    listener: Arc<ListenerState>,
    sessions: Sessions,
    session_handover: Arc<SessionHandover>,
    /// Login timeout in seconds; 0: only the protocol's own timeout applies.
    login_timeout_s: Arc<AtomicU64>,
}

/// State of one listener, which its connections and monitoring share.
#[derive(Debug, Default)]
pub struct ListenerState {
    address: Arc<str>,
    /// Networks from which it accepts connections.
    networks: RwLock<AllowedNetworks>,
    accepted: AtomicU64,
    refused: AtomicU64,
    open: AtomicUsize,
}

impl ListenerState {
    /// The address on which it listens.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Connections that were accepted since the start.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Connections that were refused: not allowed, above the limit, or for lack of memory.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Connections that are open.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Changes the networks from which connections are accepted. Open connections stay.
    pub fn set_networks(&self, networks: AllowedNetworks) {
        *self.networks.write().unwrap_or_else(PoisonError::into_inner) = networks;
    }

    /// Whether a peer with this address is accepted; `None` is a peer without an IP address.
    fn admits(&self, peer: Option<IpAddr>) -> bool {
        self.networks.read().unwrap_or_else(PoisonError::into_inner).admits(peer)
    }
}

/// One connection's share of the limit.
pub struct Permit {
    limit: ConnectionLimit,
    /// The peer has disconnected, and the share was released.
    is_orphaned: bool,
    /// The peer's address; `None` if it has no IP address.
    peer: Option<IpAddr>,
    /// Login deadline. It stays the same if the connection moves to another core.
    login_by: Option<Instant>,
    /// The list of replaceable connections that holds this one: during its handshake, for an open
    /// discovery, or once it lingers.
    entry: Option<(Arc<Mutex<Replaceable>>, Arc<ReplaceableConnection>)>,
    /// See [`Permit::closing`].
    closed_at_end: Option<OwnedFd>,
}

/// Connections that may be closed for a new one: those in their handshake, those of open discovery,
/// and those that are closed while their session waits. The oldest connection of the source with
/// most of them is closed first, the new one included, so that one source cannot keep others out.
#[derive(Default)]
struct Replaceable {
    /// The connections of each source by their number, so the oldest first; no source is empty.
    sources: BTreeMap<Source, BTreeMap<u64, Arc<ReplaceableConnection>>>,
    /// The sources in the order in which they lose a connection, the first one last.
    ranking: BTreeSet<(Rank, Source)>,
}

/// Numbers the entries of all lists, so that the older one of two lists is known.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// The number of a source's connections, and the number of the oldest one.
type Rank = (usize, Reverse<u64>);

/// Source of connections: the listener's protocol and the peer's [`peer_network`]; `None` for a
/// Unix socket.
type Source = (&'static str, Option<IpAddr>);

/// A connection that may be closed for a new one.
struct ReplaceableConnection {
    source: Source,
    /// Shuts the connection down.
    hang_up: Arc<dyn Fn() + Send + Sync>,
    /// Sequence number of its entry.
    number: u64,
    /// Its share of the limit was given to another connection.
    is_replaced: AtomicBool,
}

impl Replaceable {
    fn len(&self) -> usize {
        self.sources.values().map(BTreeMap::len).sum()
    }

    /// The source that loses a connection to a new one of `newcomer`, and its rank, which includes
    /// the new one.
    fn loser(&self, newcomer: Source) -> Option<(Rank, Source)> {
        let most = self.ranking.last().copied();
        let own = self.sources.get(&newcomer).and_then(|own| {
            let oldest = Reverse(*own.keys().next()?);
            Some(((own.len() + 1, oldest), newcomer))
        });
        own.filter(|own| most.is_none_or(|most| own.0.0 > most.0.0)).or(most)
    }

    fn enter(&mut self, source: Source, hang_up: Arc<dyn Fn() + Send + Sync>) -> Arc<ReplaceableConnection> {
        let (number, is_replaced) = (NUMBERS.fetch_add(1, Ordering::Relaxed), AtomicBool::new(false));
        let entry = Arc::new(ReplaceableConnection { source, hang_up, number, is_replaced });
        self.change(source, |own| drop(own.insert(number, entry.clone())));
        entry
    }

    fn remove(&mut self, entry: &ReplaceableConnection) {
        self.change(entry.source, |own| drop(own.remove(&entry.number)));
    }

    /// Changes the connections of a source, and its rank accordingly.
    fn change(
        &mut self,
        source: Source,
        change: impl FnOnce(&mut BTreeMap<u64, Arc<ReplaceableConnection>>),
    ) {
        let rank = |own: &BTreeMap<u64, _>| Some((own.len(), Reverse(*own.keys().next()?)));
        let own = self.sources.entry(source).or_default();
        rank(own).map(|rank| self.ranking.remove(&(rank, source)));
        change(own);
        match rank(own) {
            Some(rank) => drop(self.ranking.insert((rank, source))),
            None => drop(self.sources.remove(&source)),
        }
    }

    /// Closes one connection for a new one of `newcomer`, which gets its share of the limit if
    /// `gives_share`; returns whether there was one.
    fn replace_one(&mut self, newcomer: Source, gives_share: bool) -> bool {
        let oldest = self.loser(newcomer).and_then(|(_, source)| self.sources.get(&source)?.values().next());
        let Some(entry) = oldest.cloned() else { return false };
        self.remove(&entry);
        // Set under the lock and before it is closed: its permit asks once it is in no list.
        entry.is_replaced.store(gives_share, Ordering::Relaxed);
        (entry.hang_up)();
        true
    }
}

impl ConnectionLimit {
    /// A limit of `most` simultaneous connections.
    #[must_use]
    pub fn new(most: usize) -> ConnectionLimit {
        ConnectionLimit(Arc::new(LimitHandle {
            open: Arc::default(),
            most: Arc::new(AtomicUsize::new(most)),
            open_of_protocol: Arc::default(),
            orphaned: Arc::default(),
            half_open: Arc::default(),
            discovering: Arc::default(),
            lingering: Arc::default(),
            reserved_space_bytes: 0,
            protocol: "",
            listener: Arc::default(),
            sessions: Sessions::default(),
            session_handover: Arc::default(),
            login_timeout_s: Arc::default(),
        }))
    }

    /// Another handle to this limit, changed by `change`.
    fn with(&self, change: impl FnOnce(&mut LimitHandle)) -> ConnectionLimit {
        let mut handle = LimitHandle::clone(&self.0);
        change(&mut handle);
        ConnectionLimit(Arc::new(handle))
    }

    /// A handle to this limit for one protocol's connections, which are also counted separately.
    #[must_use]
    pub fn for_protocol(&self, protocol: &'static str) -> ConnectionLimit {
        self.with(|handle| (handle.open_of_protocol, handle.protocol) = (Arc::default(), protocol))
    }

    /// A handle for the connections of one listener, which are also counted separately, and whose
    /// sessions are listed with it.
    #[must_use]
    pub fn for_listener(&self, address: &str) -> ConnectionLimit {
        let listener = ListenerState { address: address.into(), ..ListenerState::default() };
        let sessions = self.sessions().at(address);
        self.with(|handle| (handle.listener, handle.sessions) = (Arc::new(listener), sessions))
    }

    /// A handle for the connections of the same listener over a fabric, with which their sessions
    /// are listed.
    #[must_use]
    pub fn over(&self, fabric: &'static str) -> ConnectionLimit {
        let sessions = self.sessions().over(fabric);
        self.with(|handle| handle.sessions = sessions)
    }

    /// This handle's listener.
    #[must_use]
    pub fn listener(&self) -> &Arc<ListenerState> {
        &self.0.listener
    }

    /// Changes the limit. Connections beyond it stay; new ones are refused until there is room.
    pub fn set_most(&self, most: usize) {
        self.0.most.store(most, Ordering::Relaxed);
    }

    /// Sets the login timeout of later connections, in whole seconds. If it is `None`, or longer
    /// than the protocol's own timeout, only the latter applies.
    pub fn set_login_timeout(&self, timeout: Option<Duration>) {
        let seconds = timeout.map_or(0, |timeout| timeout.as_secs().max(1));
        self.0.login_timeout_s.store(seconds, Ordering::Relaxed);
    }

    /// The list of sessions of all protocols.
    #[must_use]
    pub fn sessions(&self) -> &Sessions {
        &self.0.sessions
    }

    /// The connections of all protocols that move to another process.
    #[must_use]
    pub fn session_handover(&self) -> &Arc<SessionHandover> {
        &self.0.session_handover
    }

    /// Also limits address space, under RLIMIT_AS: no connection is accepted while less than
    /// `bytes` are free, so that existing connections do not run out of memory. Memory of the pools
    /// counts as free.
    #[must_use]
    pub fn reserving_space(self, bytes: u64) -> ConnectionLimit {
        self.with(|handle| handle.reserved_space_bytes = bytes)
    }

    /// The free address space in bytes if it is below the reserve; costs a system call.
    #[must_use]
    pub fn lacks_space(&self) -> Option<u64> {
        let still_kept = self.0.reserved_space_bytes.saturating_sub(bytes_from_system() as u64);
        sys::address_space_left().filter(|left| *left < still_kept)
    }

    /// Number of open connections of this protocol.
    #[must_use]
    pub fn open_of_protocol(&self) -> usize {
        self.0.open_of_protocol.load(Ordering::Relaxed)
    }

    /// The limit.
    #[must_use]
    pub fn most(&self) -> usize {
        self.0.most.load(Ordering::Relaxed)
    }

    /// Number of open connections.
    #[must_use]
    pub fn open(&self) -> usize {
        self.0.open.load(Ordering::Relaxed)
    }

    /// Number of closed connections with I/O in flight: see [`Permit::orphan`].
    #[must_use]
    pub fn orphaned(&self) -> usize {
        self.0.orphaned.load(Ordering::Relaxed)
    }

    /// A share for one more connection until it is dropped; `None` if the limit is reached.
    #[must_use]
    pub fn permit(&self) -> Option<Permit> {
        if self.0.open.fetch_add(1, Ordering::Relaxed) >= self.most() {
            self.0.open.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(self.share())
    }

    /// Whether a peer may connect: the listener accepts its address, and there is memory for a
    /// connection. A refusal is logged; `peer` is its address, and its name in messages.
    pub(crate) fn accepts(&self, (address, peer): (Option<IpAddr>, &str)) -> bool {
        let listener = &self.0.listener;
        if !listener.admits(address) {
            listener.refused.fetch_add(1, Ordering::Relaxed);
            warn!(
                target: AUDIT,
                protocol = self.0.protocol,
                peer,
                "connection refused: the `allow` list of the listener {} does not have this address",
                listener.address
            );
            return false;
        }
        if let Some(left) = self.lacks_space() {
            let left = left >> 20;
            listener.refused.fetch_add(1, Ordering::Relaxed);
            warn!(peer, "refused: only {left} MiB of address space are left; raise its limit (RLIMIT_AS)");
            return false;
        }
        true
    }

    /// [`ConnectionLimit::admit`] for a stream. A refusal is logged.
    pub(crate) fn admit_or_log(&self, stream: &impl NetworkStream) -> Option<Permit> {
        let (hang_up, peer) = (stream.hang_up(), stream.peer());
        let permit = self.admit(stream.peer_ip(), move || hang_up());
        if permit.is_none() {
            self.0.listener.refused.fetch_add(1, Ordering::Relaxed);
            warn!(
                target: AUDIT,
                protocol = self.0.protocol,
                peer,
                "login refused: {} connections are open already; raise --max-connections",
                self.most()
            );
        }
        permit
    }

    /// A share for a connection just accepted from `peer`, which `hang_up` shuts down. If too many
    /// connections are in their handshake, one of those is closed. If the limit is reached, the new
    /// connection replaces a lingering one, else one that discovers or is in its handshake; `None`
    /// if there is none.
    #[must_use]
    pub fn admit(&self, peer: Option<IpAddr>, hang_up: impl Fn() + Send + Sync + 'static) -> Option<Permit> {
        let source = (self.0.protocol, peer.map(peer_network));
        let mut half_open = lock(&self.0.half_open);
        if half_open.len() >= MAX_HALF_OPEN {
            half_open.replace_one(source, false);
        }
        let mut permit = match self.permit() {
            Some(permit) => permit,
            None => {
                let has_replaced = lock(&self.0.lingering).replace_one(source, true)
                    || self.replace_unproved(&mut half_open, source);
                has_replaced.then(|| self.share())?
            }
        };
        permit.peer = peer;
        let entry = half_open.enter(source, Arc::new(hang_up));
        permit.entry = Some((self.0.half_open.clone(), entry));
        Some(permit)
    }

    /// Closes a connection that discovers or is in its handshake: of the source with most of either
    /// kind, else the oldest one, so that neither a flood of connections nor one of discoveries
    /// displaces others.
    fn replace_unproved(&self, half_open: &mut Replaceable, newcomer: Source) -> bool {
        let mut discovering = lock(&self.0.discovering);
        let rank = |list: &Replaceable| list.loser(newcomer).map(|(rank, _)| rank);
        match rank(&discovering) > rank(half_open) {
            true => discovering.replace_one(newcomer, true),
            false => half_open.replace_one(newcomer, true),
        }
    }

    fn share(&self) -> Permit {
        self.0.open_of_protocol.fetch_add(1, Ordering::Relaxed);
        self.0.listener.open.fetch_add(1, Ordering::Relaxed);
        self.0.listener.accepted.fetch_add(1, Ordering::Relaxed);
        Permit {
            limit: self.clone(),
            is_orphaned: false,
            peer: None,
            login_by: None,
            entry: None,
            closed_at_end: None,
        }
    }
}

impl Permit {
    /// Closes `fd` when the connection ends, even if its I/O is in flight, so that another thread
    /// can wait for the end.
    #[must_use]
    pub(crate) fn closing(mut self, fd: OwnedFd) -> Permit {
        self.closed_at_end = Some(fd);
        self
    }

    /// The list of sessions for this connection's session.
    #[must_use]
    pub fn sessions(&self) -> &Sessions {
        &self.limit.0.sessions
    }

    /// The connections that move to another process.
    #[must_use]
    pub fn session_handover(&self) -> &Arc<SessionHandover> {
        &self.limit.0.session_handover
    }

    /// The listener's protocol; empty if not set.
    #[must_use]
    pub fn protocol(&self) -> &'static str {
        self.limit.0.protocol
    }

    /// The listener that accepted the connection.
    #[must_use]
    pub fn origin(&self) -> Origin {
        Origin { protocol: self.limit.0.protocol, listener: self.limit.0.listener.address.clone() }
    }

    /// The peer's address; `None` if it has no IP address.
    #[must_use]
    pub fn peer(&self) -> Option<IpAddr> {
        self.peer
    }

    /// Whether the listener still accepts the peer's address. A connection that was accepted before
    /// the networks changed may complete its handshake afterwards.
    #[must_use]
    pub fn is_admitted(&self) -> bool {
        self.limit.0.listener.admits(self.peer)
    }

    /// Sets the login deadline, unless it is set already, if there is a login timeout; `now` is
    /// when the connection was accepted.
    pub(crate) fn begin_login(&mut self, now: Instant) {
        self.login_by = match self.limit.0.login_timeout_s.load(Ordering::Relaxed) {
            0 => None,
            seconds => self.login_by.or_else(|| now.checked_add(Duration::from_secs(seconds))),
        };
    }

    /// The login deadline, if there is one.
    pub(crate) fn login_by(&self) -> Option<Instant> {
        self.login_by
    }

    /// Makes the connection no longer replaceable, because its handshake is complete.
    pub fn establish(&mut self) {
        self.leave();
        if !self.is_replaced() {
            self.entry = None;
        }
    }

    /// Leaves the list of replaceable connections.
    fn leave(&self) {
        if let Some((entries, entry)) = &self.entry {
            lock(entries).remove(entry);
        }
    }

    /// Keeps the connection replaceable after its handshake, because its peer discovers targets and
    /// has not proved who it is.
    pub fn discover(&mut self) {
        let hang_up = self.entry.as_ref().map(|(_, entry)| entry.hang_up.clone());
        let discovering = self.limit.0.discovering.clone();
        hang_up.into_iter().for_each(|hang_up| self.move_to(&discovering, hang_up));
    }

    /// Makes the connection replaceable, because it is closed and its session waits for a new one.
    pub fn linger(&mut self) {
        let lingering = self.limit.0.lingering.clone();
        self.move_to(&lingering, Arc::new(|| {}));
    }

    /// Moves the connection to another list of replaceable ones, unless it was replaced.
    fn move_to(&mut self, list: &Arc<Mutex<Replaceable>>, hang_up: Arc<dyn Fn() + Send + Sync>) {
        self.leave();
        if !self.is_replaced() {
            let entry = lock(list).enter((self.limit.0.protocol, self.peer.map(peer_network)), hang_up);
            self.entry = Some((list.clone(), entry));
        }
    }

    /// Whether a new connection has taken its share.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.entry.as_ref().is_some_and(|(_, entry)| entry.is_replaced.load(Ordering::Relaxed))
    }

    /// Releases the share of a connection whose peer has disconnected with I/O in flight, which may
    /// never end. Such connections are counted separately, and limited for each volume.
    pub fn orphan(&mut self) {
        self.closed_at_end = None;
        if !std::mem::replace(&mut self.is_orphaned, true) {
            self.limit.0.orphaned.fetch_add(1, Ordering::Relaxed);
            self.give_back();
        }
    }

    fn give_back(&self) {
        self.leave();
        self.limit.0.open_of_protocol.fetch_sub(1, Ordering::Relaxed);
        self.limit.0.listener.open.fetch_sub(1, Ordering::Relaxed);
        if !self.is_replaced() {
            self.limit.0.open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn lock(list: &Mutex<Replaceable>) -> MutexGuard<'_, Replaceable> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.is_orphaned {
            self.limit.0.orphaned.fetch_sub(1, Ordering::Relaxed);
        } else {
            self.give_back();
        }
    }
}

/// Ends a listener from any thread; a clone is another handle to the same listener.
#[derive(Clone, Default)]
pub struct ListenerEnd(Arc<AtomicBool>);

impl ListenerEnd {
    pub(crate) fn is_due(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Asks the listener to close its socket. Its task does so when it runs next; see
    /// [`crate::core::cores::Cores::wake_all`].
    pub fn end(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Accepts on one core and passes connections to all cores round-robin.
pub struct ListenerTask {
    listener: Listener,
    end: ListenerEnd,
    cores: Vec<Inbox>,
    next_core: usize,
    serve: Serve,
    limit: ConnectionLimit,
    core: Rc<EngineCore>,
    waker: Waker,
    registration: Registration,
    readiness: Rc<WakeOnEvent>,
    /// The last accept failed for lack of resources, and that was logged.
    is_short: bool,
}

impl ListenerTask {
    /// Accepts on `core` until the core stops.
    pub fn spawn(
        core: &Rc<EngineCore>,
        listener: Listener,
        cores: Vec<Inbox>,
        serve: Serve,
        limit: ConnectionLimit,
    ) {
        ListenerTask::spawn_until(core, (listener, ListenerEnd::default()), cores, serve, limit);
    }

    /// Accepts on `core` until the core stops or [`ListenerEnd::end`] is called.
    pub fn spawn_until(
        core: &Rc<EngineCore>,
        (listener, end): (Listener, ListenerEnd),
        cores: Vec<Inbox>,
        serve: Serve,
        limit: ConnectionLimit,
    ) {
        core.spawn(|waker| {
            let readiness = WakeOnEvent::new(waker);
            ListenerTask {
                listener,
                end,
                cores,
                next_core: 0,
                serve,
                limit,
                core: core.clone(),
                waker: waker.clone(),
                registration: core.register(readiness.clone()),
                readiness,
                is_short: false,
            }
        });
    }

    fn hand_over(&mut self, stream: Stream) {
        if !self.limit.accepts((stream.peer_ip(), stream.peer())) {
            return;
        }
        let Some(permit) = self.limit.admit_or_log(&stream) else { return };
        let serve = self.serve.clone();
        self.cores[self.next_core].send(move |core| serve(core, stream, permit));
        self.next_core = (self.next_core + 1) % self.cores.len();
    }
}

impl Task for ListenerTask {
    fn run(&mut self) -> Progress {
        if self.core.is_stopping() || self.end.is_due() {
            return Progress::Done;
        }
        for _ in 0..ACCEPTS_PER_TURN {
            match self.listener.accept() {
                Ok(stream) => {
                    self.is_short = false;
                    self.hand_over(stream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.readiness.arm(
                        &self.registration,
                        self.listener.as_fd().as_raw_fd(),
                        libc::POLLIN,
                        0,
                    );
                    return Progress::Drained;
                }
                Err(error) if is_lack_of_resources(&error) => {
                    if !std::mem::replace(&mut self.is_short, true) {
                        warn!(listener = %self.listener.address(), "cannot accept for now: {error}");
                    }
                    self.core.wake_at(self.core.now() + RETRY, &self.waker);
                    return Progress::Idle;
                }
                // The peer disconnected before the connection was accepted.
                Err(_) => {}
            }
        }
        Progress::More
    }
}

impl Drop for ListenerTask {
    fn drop(&mut self) {
        self.readiness.disarm(&self.registration);
    }
}

fn is_lack_of_resources(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

const ACCEPTS_PER_TURN: usize = 64;
/// Maximum number of connections in their handshake, of all protocols together. It is below each
/// protocol's own limit of logins, because a connection that was closed for a new one takes a
/// moment to end.
pub(crate) const MAX_HALF_OPEN: usize = 256;
const RETRY: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    /// Indices of connections that were shut down, in order.
    type HungUp = Arc<Mutex<Vec<usize>>>;

    fn admit(limit: &ConnectionLimit, hung_up: &HungUp, number: usize) -> Option<Permit> {
        let hung_up = hung_up.clone();
        limit.admit(None, move || hung_up.lock().unwrap().push(number))
    }

    #[test]
    fn at_the_limit_a_new_connection_replaces_the_oldest_one_in_its_handshake() {
        let (limit, hung_up) = (ConnectionLimit::new(3), HungUp::default());
        let mut permits: Vec<_> = (0..3).map(|number| admit(&limit, &hung_up, number).unwrap()).collect();
        permits[0].establish();
        permits.push(admit(&limit, &hung_up, 3).unwrap());
        assert_eq!((*hung_up.lock().unwrap()).as_slice(), [1]);
        // The connection that was shut down ends a little later, when its share is already taken.
        drop(permits.remove(1));
        assert_eq!(limit.open(), 3);
        permits.iter_mut().for_each(Permit::establish);
        assert!(admit(&limit, &hung_up, 4).is_none(), "no connection is replaceable");
        permits.clear();
        assert_eq!((limit.open(), limit.open_of_protocol()), (0, 0));
    }

    #[test]
    fn at_the_limit_a_new_connection_replaces_a_lingering_session_before_a_handshake() {
        let (limit, hung_up) = (ConnectionLimit::new(3), HungUp::default());
        let mut lingering: Vec<_> = (0..2).map(|number| admit(&limit, &hung_up, number).unwrap()).collect();
        let handshake = admit(&limit, &hung_up, 2).unwrap();
        for permit in &mut lingering {
            permit.establish();
            permit.linger();
        }
        let mut new_one = admit(&limit, &hung_up, 3).unwrap();
        new_one.establish();
        assert_eq!(
            (lingering[0].is_replaced(), lingering[1].is_replaced(), handshake.is_replaced()),
            (true, false, false)
        );
        drop(lingering);
        assert_eq!(limit.open(), 2, "the new connection has one share");
        drop((new_one, handshake));
        assert_eq!((limit.open(), limit.0.lingering.lock().unwrap().len()), (0, 0));
    }

    #[test]
    fn a_discovery_survives_as_many_handshakes_of_other_addresses_as_there_are_places() {
        let (limit, hung_up) = (ConnectionLimit::new(4), HungUp::default());
        let connect = |host: u8| {
            let hung_up = hung_up.clone();
            let peer = Some([192, 0, 2, host].into());
            limit.admit(peer, move || hung_up.lock().unwrap().push(host.into())).unwrap()
        };
        let mut flood: Vec<_> = (2..5).map(connect).collect();
        let mut honest = connect(1);
        honest.discover();
        for host in 5..8 {
            flood.push(connect(host));
        }
        assert_eq!(*hung_up.lock().unwrap(), [2, 3, 4]);
        flood.push(connect(8));
        assert_eq!(hung_up.lock().unwrap().last(), Some(&1), "it is the oldest");
    }

    #[test]
    fn a_connection_that_ends_while_it_is_replaced_gives_no_share_back() {
        for _ in 0..200 {
            let limit = ConnectionLimit::new(1);
            let (permit, end) = (Arc::new(Mutex::new(None::<Permit>)), Arc::new(Mutex::new(None)));
            let (own_permit, own_end) = (permit.clone(), end.clone());
            let hang_up = move || {
                let permit = own_permit.lock().unwrap().take();
                *own_end.lock().unwrap() = Some(std::thread::spawn(|| drop(permit)));
            };
            let mut first = limit.admit(None, hang_up).unwrap();
            first.discover();
            *permit.lock().unwrap() = Some(first);
            let second = limit.admit(None, || ()).unwrap();
            end.lock().unwrap().take().unwrap().join().unwrap();
            assert_eq!(limit.open(), 1);
            drop(second);
            assert_eq!(limit.open(), 0);
        }
    }

    #[test]
    fn at_the_limit_a_new_connection_replaces_a_discovery_of_the_address_with_most() {
        let (limit, hung_up) = (ConnectionLimit::new(5), HungUp::default());
        let connect = |host: u8, number: usize| {
            let hung_up = hung_up.clone();
            let peer = Some([192, 0, 2, host].into());
            limit.admit(peer, move || hung_up.lock().unwrap().push(number)).unwrap()
        };
        let mut logged_in = connect(1, 0);
        logged_in.establish();
        let mut honest = connect(2, 1);
        honest.discover();
        let mut strangers: Vec<_> = (2..5).map(|number| connect(3, number)).collect();
        strangers.iter_mut().for_each(Permit::discover);
        assert!(hung_up.lock().unwrap().is_empty(), "there were places");
        // The honest host logs in with two connections; the stranger goes on.
        let mut more: Vec<_> = [2, 2].map(|host| connect(host, 5)).into();
        more.iter_mut().for_each(Permit::establish);
        more.extend((6..9).map(|number| connect(3, number)));
        assert_eq!(*hung_up.lock().unwrap(), [2, 3, 4, 6, 7]);
        assert!(strangers.iter().all(Permit::is_replaced) && !honest.is_replaced());
        strangers.clear();
        assert_eq!(limit.open(), 5);
        drop((logged_in, honest, more));
        assert_eq!(
            (limit.open(), lock(&limit.0.discovering).len(), lock(&limit.0.half_open).len()),
            (0, 0, 0)
        );
    }

    #[test]
    fn an_orphaned_connection_releases_its_share_of_the_limit() {
        let (limit, hung_up) = (ConnectionLimit::new(1), HungUp::default());
        let mut orphaned = admit(&limit, &hung_up, 0).unwrap();
        orphaned.orphan();
        orphaned.orphan();
        assert_eq!((limit.open(), limit.open_of_protocol(), limit.orphaned()), (0, 0, 1));
        let mut established = admit(&limit, &hung_up, 1).unwrap();
        established.establish();
        assert!(admit(&limit, &hung_up, 2).is_none());
        drop(orphaned);
        assert_eq!((limit.open(), limit.open_of_protocol(), limit.orphaned()), (1, 1, 0));
        assert!(hung_up.lock().unwrap().is_empty(), "an orphaned connection is not shut down");
    }

    #[test]
    fn the_source_with_the_most_handshakes_loses_one_to_a_new_connection() {
        let (limit, hung_up) = (ConnectionLimit::new(usize::MAX), HungUp::default());
        let (nbd, iscsi) = (limit.for_protocol("nbd"), limit.for_protocol("iscsi"));
        let slow = admit(&iscsi, &hung_up, 1000).unwrap();
        let flood: Vec<_> = (0..MAX_HALF_OPEN + 3).map(|number| admit(&nbd, &hung_up, number)).collect();
        assert_eq!(
            (*hung_up.lock().unwrap()).as_slice(),
            [0, 1, 2, 3],
            "the other listener keeps its connections"
        );
        let number = hung_up.clone();
        let from_elsewhere =
            nbd.admit(Some([192, 0, 2, 1].into()), move || number.lock().unwrap().push(2000));
        flood.into_iter().skip(200).for_each(drop);
        let other: Vec<_> = (300..600).map(|number| admit(&nbd, &hung_up, number)).collect();
        assert!(!hung_up.lock().unwrap().iter().any(|number| [1000, 2000].contains(number)));
        drop((slow, from_elsewhere, other));
        assert_eq!((limit.open(), limit.0.half_open.lock().unwrap().len()), (0, 0));
    }

    #[test]
    fn a_connection_accepted_before_the_networks_changed_is_not_admitted_afterwards() {
        let limit = ConnectionLimit::new(9).for_listener("192.0.2.1:10809");
        let admit = |last| limit.admit(Some([192, 0, 2, last].into()), || {}).unwrap();
        let (stays, goes, unix) = (admit(7), admit(8), limit.admit(None, || {}).unwrap());
        assert!(stays.is_admitted() && goes.is_admitted() && unix.is_admitted());
        limit.listener().set_networks(AllowedNetworks::only(&["192.0.2.7".parse().unwrap()]));
        assert!(stays.is_admitted() && !goes.is_admitted() && unix.is_admitted());
    }

    #[test]
    fn an_ipv6_network_is_one_source() {
        let (limit, hung_up) = (ConnectionLimit::new(3), HungUp::default());
        let from = |address: &str, number: usize| {
            let hung_up = hung_up.clone();
            limit.admit(address.parse().ok(), move || hung_up.lock().unwrap().push(number)).unwrap()
        };
        let _all = [from("2001:db8::1", 1), from("2001:db8:0:1::1", 2), from("2001:db8:0:1::2", 3)];
        let _new = from("2001:db8:0:2::1", 4);
        assert_eq!(*hung_up.lock().unwrap(), [2], "the oldest of the network with two");
    }

    #[test]
    fn the_number_of_simultaneous_handshakes_is_limited() {
        let (limit, hung_up) = (ConnectionLimit::new(usize::MAX), HungUp::default());
        let permits: Vec<_> = (0..MAX_HALF_OPEN + 2).map(|number| admit(&limit, &hung_up, number)).collect();
        assert!(permits.iter().all(Option::is_some));
        assert_eq!((*hung_up.lock().unwrap()).as_slice(), [0, 1]);
        drop(permits);
        assert_eq!((limit.open(), limit.0.half_open.lock().unwrap().len()), (0, 0));
    }
}
