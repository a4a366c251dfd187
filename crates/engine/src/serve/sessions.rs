//! The list of sessions that `blockmux ctl sessions` shows.

use crate::net::zone;
use blockmux_proto::driver::audit_event::Login;
use blockmux_proto::volume_state::{Epoch, Meter, MeterReader, VolumeState, VolumeTraffic};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::SystemTime;

/// The sessions of a process; a clone is another handle to the list.
#[derive(Clone)]
pub struct Sessions {
    all: Arc<Mutex<Vec<Weak<Session>>>>,
    /// The listener of sessions that are added through this handle; empty if none was named.
    listener: Arc<str>,
    /// The fabric of their connections; `None` for those at sockets.
    fabric: Option<&'static str>,
}

impl Default for Sessions {
    fn default() -> Sessions {
        Sessions { all: Arc::default(), listener: "".into(), fabric: None }
    }
}

/// One session that has logged in; dropping it removes it from the list.
pub struct Session {
    login: Arc<Login>,
    peer: Arc<str>,
    listener: Arc<str>,
    fabric: Option<&'static str>,
    since: SystemTime,
    /// The epoch in which its connection began: that of its admissions or an earlier one.
    epoch: Epoch,
    /// [`OPEN`], [`DRAINING`] or [`CLOSED`].
    end: AtomicU8,
    /// Why it was asked to end.
    end_reason: OnceLock<&'static str>,
    /// Counters of each volume that it uses or has used.
    readers: Mutex<Vec<MeterReader>>,
}

/// Description of one session.
#[derive(Clone, Debug)]
pub struct SessionInfo {
    /// Initiator, target and protocol.
    pub login: Login,
    /// The peer's address.
    pub peer: String,
    /// The listener that accepted its connection; empty if none was named.
    pub listener: String,
    /// The fabric of its connection; `None` for one at a socket.
    pub fabric: Option<&'static str>,
    /// When it logged in.
    pub since: SystemTime,
    /// Its I/O counters; `users` is the number of volumes that it has used.
    pub traffic: VolumeTraffic,
}

impl SessionInfo {
    /// The peer's IP address; `None` if it has none.
    #[must_use]
    pub fn peer_ip(&self) -> Option<IpAddr> {
        zone::ip_in(&self.peer)
    }

    /// The client, which may have several sessions: the initiator's name, or where the protocol has
    /// no names for initiators, the peer's IP address or process.
    #[must_use]
    pub fn client(&self) -> String {
        client_of(&self.login, &self.peer)
    }
}

/// Implements [`SessionInfo::client`].
fn client_of(login: &Login, peer: &str) -> String {
    match login.initiator.as_str() {
        "" => zone::ip_in(peer).map_or_else(|| peer.to_owned(), |address| address.to_string()),
        name => name.to_owned(),
    }
}

impl Sessions {
    /// Adds a session to the list, whose connection began in `epoch`.
    #[must_use]
    pub fn begin(
        &self,
        login: impl Into<Arc<Login>>,
        peer: impl Into<Arc<str>>,
        epoch: Epoch,
    ) -> Arc<Session> {
        let (login, peer) = (login.into(), peer.into());
        let session = Arc::new(Session {
            login,
            peer,
            listener: self.listener.clone(),
            fabric: self.fabric,
            since: SystemTime::now(),
            epoch,
            end: AtomicU8::new(OPEN),
            end_reason: OnceLock::new(),
            readers: Mutex::default(),
        });
        let mut all = self.all();
        if all.len() == all.capacity() {
            all.retain(|session| session.strong_count() > 0);
        }
        all.push(Arc::downgrade(&session));
        session
    }

    /// All sessions, oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<SessionInfo> {
        let all: Vec<_> = self.all().iter().filter_map(Weak::upgrade).collect();
        all.iter().map(|session| session.info()).collect()
    }

    /// Another handle to this list, for sessions whose connections are accepted by that listener.
    #[must_use]
    pub fn at(&self, listener: &str) -> Sessions {
        Sessions { all: self.all.clone(), listener: listener.into(), fabric: None }
    }

    /// Another handle to this list, for sessions of the same listener over a fabric.
    #[must_use]
    pub fn over(&self, fabric: &'static str) -> Sessions {
        Sessions { fabric: Some(fabric), ..self.clone() }
    }

    /// Asks the sessions selected by `is_meant` to end as they do when the process stops: I/O in
    /// flight completes, new requests are refused, then the connection closes. Their tasks do so
    /// when they run next; see [`crate::core::cores::Cores::wake_all`]. Sessions that were closed
    /// before, and whose I/O has not ended, are not among them. `reason` is for the log.
    #[must_use]
    pub fn drain(&self, reason: &'static str, is_meant: impl Fn(&SessionInfo) -> bool) -> Draining {
        let all: Vec<_> = self.all().iter().filter_map(Weak::upgrade).collect();
        let meant = all.into_iter().filter(|session| !session.must_close() && is_meant(&session.info()));
        Draining(meant.map(|session| session.drain(reason)).collect())
    }

    /// Asks the sessions to end that a volume fences, of the targets that have it, as
    /// [`Sessions::drain`] does. A session need not have sent I/O: the state of its path says
    /// that it could.
    #[must_use]
    pub fn drain_fenced(
        &self,
        reason: &'static str,
        volume_state: &VolumeState,
        targets: &BTreeSet<String>,
    ) -> Draining {
        let all: Vec<_> = self.all().iter().filter_map(Weak::upgrade).collect();
        let is_fenced = |session: &Arc<Session>| {
            !session.must_close()
                && targets.contains(&session.login.target)
                && volume_state.fences(session.epoch)
        };
        let meant = all.into_iter().filter(is_fenced);
        Draining(meant.map(|session| session.drain(reason)).collect())
    }

    fn all(&self) -> MutexGuard<'_, Vec<Weak<Session>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sessions that were asked to end.
pub struct Draining(Vec<Weak<Session>>);

impl Draining {
    /// The sessions that have not ended yet.
    #[must_use]
    pub fn left(&self) -> Vec<SessionInfo> {
        self.0.iter().filter_map(Weak::upgrade).map(|session| session.info()).collect()
    }

    /// Closes the connections of the sessions that have not ended yet, even with I/O in flight.
    pub fn close(&self) {
        let left = self.0.iter().filter_map(Weak::upgrade);
        left.for_each(|session| session.end.store(CLOSED, Ordering::Relaxed));
    }
}

impl Session {
    /// Whether the session was asked to end.
    #[inline]
    pub(crate) fn is_draining(&self) -> bool {
        self.end.load(Ordering::Relaxed) != OPEN
    }

    /// The client, as [`SessionInfo::client`].
    pub(crate) fn client(&self) -> Arc<str> {
        client_of(&self.login, &self.peer).into()
    }

    /// Why the session was asked to end.
    pub(crate) fn end_reason(&self) -> &'static str {
        self.end_reason.get().copied().unwrap_or(NOT_IN_CONFIG)
    }

    /// Whether the session did not end in time.
    #[inline]
    pub(crate) fn must_close(&self) -> bool {
        self.end.load(Ordering::Relaxed) == CLOSED
    }

    fn drain(self: Arc<Session>, reason: &'static str) -> Weak<Session> {
        let _ = self.end_reason.set(reason);
        self.end.fetch_max(DRAINING, Ordering::Relaxed);
        Arc::downgrade(&self)
    }

    /// Adds the counters of `meter` to this session.
    pub(crate) fn add(&self, meter: &Meter) {
        self.add_reader(meter.reader());
    }

    /// Adds these counters to this session.
    pub(crate) fn add_reader(&self, reader: MeterReader) {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner).push(reader);
    }

    fn info(&self) -> SessionInfo {
        let readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        let traffic = readers.iter().fold(VolumeTraffic::default(), |sum, reader| reader.added_to(sum));
        let traffic = VolumeTraffic { users: readers.len() as u64, ..traffic };
        SessionInfo {
            login: Login::clone(&self.login),
            peer: self.peer.to_string(),
            listener: self.listener.to_string(),
            fabric: self.fabric,
            since: self.since,
            traffic,
        }
    }
}

/// Reason for ending sessions that a changed config does not allow.
pub const NOT_IN_CONFIG: &str = "the config no longer includes it";

/// The session continues.
const OPEN: u8 = 0;
/// The session finishes what is in flight and closes its connection.
const DRAINING: u8 = 1;
/// The session closes its connection at once.
const CLOSED: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::volume_state::{Fence, Origin};
    use blockmux_volume::{Io, MemVolume, Op, Tag};

    fn begin(sessions: &Sessions, login: Login, peer: &str) -> Arc<Session> {
        sessions.begin(login, peer, Epoch::current())
    }

    #[test]
    fn a_session_is_listed_with_its_traffic_until_it_ends() {
        let (sessions, served) = (Sessions::default(), VolumeState::new(Arc::new(MemVolume::new(1 << 20))));
        let login = Login { protocol: "nbd", target: "a".to_owned(), ..Login::default() };
        let (one, other) = (begin(&sessions, login.clone(), "x:1"), begin(&sessions, login.clone(), "x:2"));
        let meter = Meter::new(&served, Origin::default());
        one.add(&meter);
        meter.count(&Io::new(Tag(0), Op::Read, 0, 4096));
        let [first, second] = &sessions.list()[..] else { panic!("there are two sessions") };
        assert_eq!((&first.login, &*first.peer, first.traffic.read_bytes), (&login, "x:1", 4096));
        assert_eq!((&*second.peer, second.traffic), ("x:2", VolumeTraffic::default()));
        drop(one);
        assert_eq!(sessions.list().len(), 1);
        drop(other);
        (0..10_000).for_each(|_| drop(begin(&sessions, Login::default(), "")));
        assert!(sessions.all().capacity() < 64, "ended sessions take no room");
    }

    #[test]
    fn only_a_selected_session_drains_and_closes() {
        let sessions = Sessions::default();
        let login = |target: &str| Login { target: target.to_owned(), ..Login::default() };
        let selected = begin(&sessions.at("127.0.0.1:1"), login("a"), "x:1");
        let other = begin(&sessions, login("b"), "x:2");
        let draining =
            sessions.drain("for a test", |info| info.login.target == "a" && info.listener == "127.0.0.1:1");
        assert!(selected.is_draining() && !selected.must_close() && !other.is_draining());
        assert_eq!(selected.end_reason(), "for a test");
        assert_eq!(draining.left().len(), 1);
        draining.close();
        assert!(selected.must_close() && !other.is_draining());
        drop(selected);
        assert!(draining.left().is_empty());
    }

    #[test]
    fn the_sessions_end_that_a_volume_fences_whether_they_have_sent_io_or_not() {
        let (sessions, volume) = (Sessions::default(), VolumeState::new(Arc::new(MemVolume::new(1 << 20))));
        let start =
            |target: &str| begin(&sessions, Login { target: target.to_owned(), ..Login::default() }, "x:1");
        let [idle, used, of_other] = ["of the volume", "of the volume", "of another"].map(start);
        used.add(&Meter::new(&volume, Origin::default()));
        assert!(Fence::begin(&volume).begin_epoch());
        let later = start("of the volume");
        later.add(&Meter::new(&volume, Origin::default()));
        let targets = BTreeSet::from(["of the volume".to_owned()]);
        let draining = sessions.drain_fenced("for a test", &volume, &targets);
        assert_eq!(draining.left().len(), 2);
        assert!(idle.is_draining() && used.is_draining());
        assert!(!of_other.is_draining() && !later.is_draining(), "they can go on");
    }
}
