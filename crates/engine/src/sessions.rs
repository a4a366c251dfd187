//! The list of sessions that `blockmux ctl sessions` shows.

use blockmux_proto::event::Login;
use blockmux_proto::volume_state::{Meter, MeterReader, VolumeTraffic};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::SystemTime;

/// The sessions of a process; a clone is another handle to the list.
#[derive(Clone, Default)]
pub struct Sessions(Arc<Mutex<Vec<Weak<Session>>>>);

/// One session that has logged in; dropping it removes it from the list.
pub struct Session {
    login: Login,
    peer: String,
    since: SystemTime,
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
    /// When it logged in.
    pub since: SystemTime,
    /// Its I/O counters; `users` is the number of volumes that it has used.
    pub traffic: VolumeTraffic,
}

impl Sessions {
    /// Adds a session to the list.
    #[must_use]
    pub fn begin(&self, login: Login, peer: &str) -> Arc<Session> {
        let session =
            Session { login, peer: peer.to_owned(), since: SystemTime::now(), readers: Mutex::default() };
        let session = Arc::new(session);
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

    fn all(&self) -> MutexGuard<'_, Vec<Weak<Session>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
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
        SessionInfo { login: self.login.clone(), peer: self.peer.clone(), since: self.since, traffic }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::volume_state::{Origin, VolumeState};
    use blockmux_volume::{Io, MemVolume, Op, Tag};

    #[test]
    fn a_session_is_listed_with_what_it_does_until_it_ends() {
        let (sessions, served) = (Sessions::default(), VolumeState::new(Arc::new(MemVolume::new(1 << 20))));
        let login = Login { protocol: "nbd", initiator: String::new(), target: "a".to_owned() };
        let (one, other) = (sessions.begin(login.clone(), "x:1"), sessions.begin(login.clone(), "x:2"));
        let meter = Meter::new(&served, Origin::default());
        one.add(&meter);
        meter.count(&Io::new(Tag(0), Op::Read, 0, 4096));
        let [first, second] = &sessions.list()[..] else { panic!("two are there") };
        assert_eq!((&first.login, &*first.peer, first.traffic.read_bytes), (&login, "x:1", 4096));
        assert_eq!((&*second.peer, second.traffic), ("x:2", VolumeTraffic::default()));
        drop(one);
        assert_eq!(sessions.list().len(), 1);
        drop(other);
        (0..10_000).for_each(|_| drop(sessions.begin(Login::default(), "")));
        assert!(sessions.all().capacity() < 64, "those that are over take no room");
    }
}
