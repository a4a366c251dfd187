//! The sessions of a node: what bounds logins, and how an initiator that logs in again ends the
//! session that it had (RFC 7143 §6.3.5, session reinstatement).
//!
//! An initiator that has lost its connection logs in again by the same name and ISID. Its new
//! session must not begin before the old one is over: a write of the old session that comes late
//! would undo what the new one has written. So the old one's connections are cut, its tasks end,
//! and only then the new login gets its last response.
//!
//! By another ISID it is another session, and the old one may go on beside it. But if the initiator
//! has left that one, what only lasts as long as it does has to be over for whoever comes next, as
//! that the medium may not be removed. Another core may not have seen yet that it was left, so the
//! login looks, and waits for its end; not for long, because this is another nexus, and I/O of the
//! old one may hang.
//!
//! A session lives on the core of its leading connection. A login to it on another core learns from
//! here which one that is (§6.3.4).

use super::name::Name;
use crate::session::Home;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A session's connection, for any thread.
pub trait ConnectionControl: Send + Sync {
    /// Cuts it: the session sees that its peer has left.
    fn hang_up(&self);

    /// Whether the peer has closed its side. The session may not have seen that yet.
    fn has_ended(&self) -> bool;
}

/// One that is only cut.
impl<F: Fn() + Send + Sync> ConnectionControl for F {
    fn hang_up(&self) {
        self();
    }

    fn has_ended(&self) -> bool {
        false
    }
}

/// Reaches a session's connection.
pub type ConnectionHandle = Arc<dyn ConnectionControl>;

/// The sessions and logins of a node.
#[derive(Default)]
pub(super) struct Sessions {
    live: Mutex<LiveSessions>,
    /// How many logins are under way.
    logins: AtomicUsize,
}

#[derive(Default)]
struct LiveSessions {
    sessions: HashMap<SessionName, SessionEntry>,
    last_tsih: u16,
}

struct SessionEntry {
    tsih: u16,
    home: Home,
    /// Of each connection, by its key.
    hang_ups: Vec<(u32, ConnectionHandle)>,
    /// Another session of that name waits for this one's end.
    is_unwanted: Arc<AtomicBool>,
    /// It does nothing more, but is not gone yet.
    is_over: bool,
}

impl SessionEntry {
    /// Whether the initiator has left it; if it does not know that yet, it hears of it now.
    fn is_left(&self) -> bool {
        let mut is_left = self.is_over;
        for (_, line) in self.hang_ups.iter().filter(|(_, line)| line.has_ended()) {
            line.hang_up();
            is_left = true;
        }
        is_left
    }
}

/// What makes a session the same one again (RFC 7143 §4.4.3): its I_T nexus.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionName {
    pub(super) initiator: Name,
    pub(super) isid: [u8; 6],
    pub(super) target: Name,
    pub(super) group_tag: u16,
}

/// A session's place among the others, as long as it lives.
pub(super) struct Membership {
    sessions: Arc<Sessions>,
    name: SessionName,
    tsih: u16,
    is_unwanted: Arc<AtomicBool>,
}

/// A connection's leave to log in, held until it has.
pub struct LoginPermit(Arc<Sessions>);

impl Sessions {
    /// Leave for one more login; `None` if too many are under way.
    pub(super) fn begin_login(self: &Arc<Sessions>) -> Option<LoginPermit> {
        if self.logins.fetch_add(1, Ordering::Relaxed) >= MAX_LOGINS {
            self.logins.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(LoginPermit(self.clone()))
    }

    /// Adds a session that lives on the core `home`; while there is another of that name, cuts its
    /// connections and answers `None`: ask again. With `waits_for_left` the same while there is
    /// another that the initiator has had with the target, and has left.
    pub(super) fn join(
        self: &Arc<Sessions>,
        name: &SessionName,
        home: &Home,
        waits_for_left: bool,
    ) -> Option<Membership> {
        let mut live = self.live();
        if let Some(other) = live.sessions.get(name) {
            other.is_unwanted.store(true, Ordering::Relaxed);
            other.hang_ups.iter().for_each(|(_, line)| line.hang_up());
            return None;
        }
        let is_its =
            |other: &SessionName| (&other.initiator, &other.target) == (&name.initiator, &name.target);
        let mut own = live.sessions.iter().filter(|(other, _)| is_its(other));
        if waits_for_left && own.any(|(_, entry)| entry.is_left()) {
            return None;
        }
        let (tsih, is_unwanted) = (live.next_tsih(), Arc::new(AtomicBool::new(false)));
        let entry = SessionEntry {
            tsih,
            home: home.clone(),
            hang_ups: Vec::new(),
            is_unwanted: is_unwanted.clone(),
            is_over: false,
        };
        live.sessions.insert(name.clone(), entry);
        Some(Membership { sessions: self.clone(), name: name.clone(), tsih, is_unwanted })
    }

    /// Where the session of that handle lives.
    pub(super) fn home_of(&self, tsih: u16) -> Option<Home> {
        let live = self.live();
        live.sessions.values().find(|entry| entry.tsih == tsih).map(|entry| entry.home.clone())
    }

    /// A handle for a session that nobody asks for again.
    pub(super) fn next_tsih(&self) -> u16 {
        self.live().next_tsih()
    }

    fn live(&self) -> MutexGuard<'_, LiveSessions> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LiveSessions {
    /// Never 0, and no other session's as long as there are fewer than 65,535.
    fn next_tsih(&mut self) -> u16 {
        for _ in 0..=u16::MAX {
            self.last_tsih = self.last_tsih.wrapping_add(1).max(1);
            if self.sessions.values().all(|entry| entry.tsih != self.last_tsih) {
                break;
            }
        }
        self.last_tsih
    }
}

impl Membership {
    /// The session's handle.
    pub(super) fn tsih(&self) -> u16 {
        self.tsih
    }

    pub(super) fn name(&self) -> &SessionName {
        &self.name
    }

    /// Whether another session of that name waits for this one's end.
    pub(super) fn is_unwanted(&self) -> bool {
        self.is_unwanted.load(Ordering::Relaxed)
    }

    /// The session does nothing more; it is gone when this is dropped.
    pub(super) fn end(&self) {
        if let Some(entry) = self.sessions.live().sessions.get_mut(&self.name) {
            entry.is_over = true;
        }
    }

    /// Ends all other sessions with the same target, as a cold reset does.
    pub(super) fn end_others(&self) {
        let live = self.sessions.live();
        let is_other = |name: &SessionName| *name != self.name && name.target == self.name.target;
        for (_, other) in live.sessions.iter().filter(|(name, _)| is_other(name)) {
            other.is_unwanted.store(true, Ordering::Relaxed);
            other.hang_ups.iter().for_each(|(_, line)| line.hang_up());
        }
    }

    /// The session has another connection.
    pub(super) fn add_connection(&self, key: u32, hang_up: ConnectionHandle) {
        if let Some(entry) = self.sessions.live().sessions.get_mut(&self.name) {
            entry.hang_ups.push((key, hang_up));
        }
    }

    /// One of its connections is over.
    pub(super) fn remove_connection(&self, key: u32) {
        if let Some(entry) = self.sessions.live().sessions.get_mut(&self.name) {
            entry.hang_ups.retain(|(of, _)| *of != key);
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.sessions.live().sessions.remove(&self.name);
    }
}

impl Drop for LoginPermit {
    fn drop(&mut self) {
        self.0.logins.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for LoginPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoginPermit")
    }
}

/// Logins under way at a time; each may take 30 seconds and keep 64 KiB of text.
pub const MAX_LOGINS: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    fn name(isid: u8) -> SessionName {
        let of = |name| Name::new(name).unwrap();
        SessionName { initiator: of("iqn.a"), isid: [0, 0, 0, 0, 0, isid], target: of("iqn.t"), group_tag: 1 }
    }

    #[test]
    fn a_session_that_comes_again_waits_until_the_other_is_gone() {
        let sessions = Arc::new(Sessions::default());
        let cuts = Arc::new(AtomicUsize::new(0));
        let (home, elsewhere) = (Home::new(()), Home::new(()));
        let first = sessions.join(&name(1), &home, true).unwrap();
        for key in [0, 1, 2] {
            let cuts = cuts.clone();
            let hang_up = move || {
                cuts.fetch_add(1, Ordering::Relaxed);
            };
            first.add_connection(key, Arc::new(hang_up));
        }
        first.remove_connection(1);
        let other = sessions.join(&name(2), &elsewhere, true).unwrap();
        let home_of = |membership: &Membership| sessions.home_of(membership.tsih()).unwrap();
        assert!(home_of(&first).is(&home) && home_of(&other).is(&elsewhere));
        assert!(first.tsih() != 0 && first.tsih() != other.tsih());
        assert!(sessions.join(&name(1), &home, true).is_none());
        assert_eq!(cuts.load(Ordering::Relaxed), 2, "every connection that it has");
        assert!(first.is_unwanted() && !other.is_unwanted());
        let tsih = first.tsih();
        drop(first);
        assert!(sessions.home_of(tsih).is_none());
        assert!(sessions.join(&name(1), &home, true).is_some());
    }

    /// A connection whose peer may have left.
    #[derive(Default)]
    struct Left {
        has_ended: AtomicBool,
        cuts: AtomicUsize,
    }

    impl ConnectionControl for Left {
        fn hang_up(&self) {
            self.cuts.fetch_add(1, Ordering::Relaxed);
        }

        fn has_ended(&self) -> bool {
            self.has_ended.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn a_session_that_its_initiator_has_left_is_over_before_its_next_one_begins() {
        let (sessions, home) = (Arc::new(Sessions::default()), Home::new(()));
        let first = sessions.join(&name(1), &home, true).unwrap();
        let line = Arc::new(Left::default());
        first.add_connection(0, line.clone());
        drop(sessions.join(&name(2), &home, true).expect("it goes on beside another"));
        line.has_ended.store(true, Ordering::Relaxed);
        let elsewhere = SessionName { target: Name::new("iqn.u").unwrap(), ..name(2) };
        let other = SessionName { initiator: Name::new("iqn.b").unwrap(), ..name(2) };
        assert!(sessions.join(&elsewhere, &home, true).is_some());
        assert!(sessions.join(&other, &home, true).is_some());
        assert_eq!(line.cuts.load(Ordering::Relaxed), 0);
        assert!(sessions.join(&name(2), &home, true).is_none());
        assert_eq!(line.cuts.load(Ordering::Relaxed), 1);
        assert!(sessions.join(&name(2), &home, false).is_some(), "not for ever");
        // The connection is gone, and the session goes on without it, or is over as well.
        first.remove_connection(0);
        assert!(sessions.join(&name(2), &home, true).is_some());
        first.end();
        assert!(sessions.join(&name(2), &home, true).is_none());
        drop(first);
        assert!(sessions.join(&name(2), &home, true).is_some());
    }

    #[test]
    fn a_handle_is_never_that_of_a_living_session() {
        let sessions = Arc::new(Sessions::default());
        let first = sessions.join(&name(1), &Home::new(()), true).unwrap();
        for _ in 0..=u16::MAX {
            let tsih = sessions.next_tsih();
            assert!(tsih != 0 && tsih != first.tsih());
        }
    }

    #[test]
    fn logins_are_bounded_and_a_permit_returns() {
        let sessions = Arc::new(Sessions::default());
        let mut permits: Vec<_> = (0..MAX_LOGINS).map(|_| sessions.begin_login().unwrap()).collect();
        assert!(sessions.begin_login().is_none());
        permits.pop();
        assert!(sessions.begin_login().is_some());
    }
}
