//! The sessions of a node: limits of concurrent logins, and session reinstatement (RFC 7143
//! §6.3.5).
//!
//! An initiator that lost its connection logs in again with the same name and ISID. The new session
//! must not begin before the old one has ended, because a late write of the old session would
//! overwrite newer data. So the old connections are closed, their tasks end, and only then the new
//! login completes.
//!
//! A login with another ISID creates an additional session. If the initiator has closed the
//! connections of an older session, its state (such as PREVENT MEDIUM REMOVAL) should have ended.
//! Another core may not have noticed the close yet, so the login checks for it and waits briefly;
//! only briefly, because this is another nexus and I/O of the old one may hang.
//!
//! A session lives on the core of its leading connection. Logins on other cores look up that core
//! here (§6.3.4).

use super::name::Name;
use crate::driver::session::{ConnectionHandle, CoreHandle};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The sessions and logins of a node.
#[derive(Default)]
pub(super) struct SessionTable {
    live: Mutex<SessionMap>,
    /// Number of logins in progress.
    logins: AtomicUsize,
}

#[derive(Default)]
struct SessionMap {
    sessions: HashMap<SessionName, SessionEntry>,
    last_tsih: u16,
}

struct SessionEntry {
    tsih: u16,
    core: CoreHandle,
    /// Handle of each connection, by its key.
    handles: Vec<(u32, ConnectionHandle)>,
    /// Another session with this name waits for the end of this one.
    is_replaced: Arc<AtomicBool>,
    /// The session has ended, but is still registered.
    is_over: bool,
}

impl SessionEntry {
    /// Whether the initiator has closed a connection; notifies its session.
    fn is_closed_by_peer(&self) -> bool {
        let mut is_closed_by_peer = self.is_over;
        for (_, handle) in self.handles.iter().filter(|(_, handle)| handle.has_ended()) {
            handle.hang_up();
            is_closed_by_peer = true;
        }
        is_closed_by_peer
    }
}

/// Identity of a session (RFC 7143 §4.4.3): its I_T nexus.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionName {
    pub(super) initiator: Name,
    pub(super) isid: [u8; 6],
    pub(super) target: Name,
    pub(super) group_tag: u16,
}

/// Registration of a session; dropping it removes the session.
pub(super) struct SessionRegistration {
    sessions: Arc<SessionTable>,
    pub(super) name: SessionName,
    /// The session's TSIH.
    pub(super) tsih: u16,
    is_replaced: Arc<AtomicBool>,
}

/// Permission for a login in progress; dropping it releases it.
pub struct LoginPermit(Arc<SessionTable>);

impl SessionTable {
    /// Permission for one more login; `None` if too many are in progress.
    pub(super) fn begin_login(self: &Arc<SessionTable>) -> Option<LoginPermit> {
        if self.logins.fetch_add(1, Ordering::Relaxed) >= MAX_LOGINS {
            self.logins.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(LoginPermit(self.clone()))
    }

    /// Registers a session on `core`. If a session with this name exists, closes its
    /// connections and returns `None`; the caller retries. With `waits_for_closed`, also returns
    /// `None` while another session of this initiator with the target has a closed connection.
    pub(super) fn join(
        self: &Arc<SessionTable>,
        name: &SessionName,
        core: &CoreHandle,
        waits_for_closed: bool,
    ) -> Option<SessionRegistration> {
        let mut live = self.live();
        if let Some(other) = live.sessions.get(name) {
            other.is_replaced.store(true, Ordering::Relaxed);
            other.handles.iter().for_each(|(_, handle)| handle.hang_up());
            return None;
        }
        let is_own =
            |other: &SessionName| (&other.initiator, &other.target) == (&name.initiator, &name.target);
        let mut own = live.sessions.iter().filter(|(other, _)| is_own(other));
        if waits_for_closed && own.any(|(_, entry)| entry.is_closed_by_peer()) {
            return None;
        }
        let (tsih, is_replaced) = (live.next_tsih(), Arc::new(AtomicBool::new(false)));
        let entry = SessionEntry {
            tsih,
            core: core.clone(),
            handles: Vec::new(),
            is_replaced: is_replaced.clone(),
            is_over: false,
        };
        live.sessions.insert(name.clone(), entry);
        Some(SessionRegistration { sessions: self.clone(), name: name.clone(), tsih, is_replaced })
    }

    /// The core of the session with this TSIH.
    pub(super) fn core_of(&self, tsih: u16) -> Option<CoreHandle> {
        let live = self.live();
        live.sessions.values().find(|entry| entry.tsih == tsih).map(|entry| entry.core.clone())
    }

    /// A TSIH for a session that cannot be joined.
    pub(super) fn next_tsih(&self) -> u16 {
        self.live().next_tsih()
    }

    fn live(&self) -> MutexGuard<'_, SessionMap> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SessionMap {
    /// An unused TSIH other than 0, while there are fewer than 65,535 sessions.
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

impl SessionRegistration {
    /// Whether another session with this name waits for the end of this one.
    pub(super) fn is_replaced(&self) -> bool {
        self.is_replaced.load(Ordering::Relaxed)
    }

    /// Marks the session as ended; it stays registered until this is dropped.
    pub(super) fn end(&self) {
        if let Some(entry) = self.sessions.live().sessions.get_mut(&self.name) {
            entry.is_over = true;
        }
    }

    /// Ends all other sessions with this target, for a cold reset.
    pub(super) fn end_others(&self) {
        let live = self.sessions.live();
        let is_other = |name: &SessionName| *name != self.name && name.target == self.name.target;
        for (_, other) in live.sessions.iter().filter(|(name, _)| is_other(name)) {
            other.is_replaced.store(true, Ordering::Relaxed);
            other.handles.iter().for_each(|(_, handle)| handle.hang_up());
        }
    }

    /// Adds a connection of the session.
    pub(super) fn add_connection(&self, key: u32, hang_up: ConnectionHandle) {
        if let Some(entry) = self.sessions.live().sessions.get_mut(&self.name) {
            entry.handles.push((key, hang_up));
        }
    }

    /// Removes a connection of the session.
    pub(super) fn remove_connection(&self, key: u32) {
        if let Some(entry) = self.sessions.live().sessions.get_mut(&self.name) {
            entry.handles.retain(|(of, _)| *of != key);
        }
    }
}

impl Drop for SessionRegistration {
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

/// Maximum number of logins in progress. Each may take 30 seconds and store 64 KiB of text.
pub const MAX_LOGINS: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::session::ConnectionControl;

    fn name(isid: u8) -> SessionName {
        let of = |name| Name::new(name).unwrap();
        SessionName { initiator: of("iqn.a"), isid: [0, 0, 0, 0, 0, isid], target: of("iqn.t"), group_tag: 1 }
    }

    #[test]
    fn session_reinstatement_waits_for_the_end_of_the_old_session() {
        let sessions = Arc::new(SessionTable::default());
        let cuts = Arc::new(AtomicUsize::new(0));
        let (core, elsewhere) = (CoreHandle::new(()), CoreHandle::new(()));
        let first = sessions.join(&name(1), &core, true).unwrap();
        for key in [0, 1, 2] {
            let cuts = cuts.clone();
            let hang_up = move || {
                cuts.fetch_add(1, Ordering::Relaxed);
            };
            first.add_connection(key, Arc::new(hang_up));
        }
        first.remove_connection(1);
        let other = sessions.join(&name(2), &elsewhere, true).unwrap();
        let core_of = |registration: &SessionRegistration| sessions.core_of(registration.tsih).unwrap();
        assert!(core_of(&first).is_same(&core) && core_of(&other).is_same(&elsewhere));
        assert!(first.tsih != 0 && first.tsih != other.tsih);
        assert!(sessions.join(&name(1), &core, true).is_none());
        assert_eq!(cuts.load(Ordering::Relaxed), 2, "all connections of the session");
        assert!(first.is_replaced() && !other.is_replaced());
        let tsih = first.tsih;
        drop(first);
        assert!(sessions.core_of(tsih).is_none());
        assert!(sessions.join(&name(1), &core, true).is_some());
    }

    /// A connection whose peer may have closed it.
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
    fn a_session_with_closed_connections_ends_before_the_next_login() {
        let (sessions, core) = (Arc::new(SessionTable::default()), CoreHandle::new(()));
        let first = sessions.join(&name(1), &core, true).unwrap();
        let handle = Arc::new(Left::default());
        first.add_connection(0, handle.clone());
        drop(sessions.join(&name(2), &core, true).expect("it goes on beside another"));
        handle.has_ended.store(true, Ordering::Relaxed);
        let elsewhere = SessionName { target: Name::new("iqn.u").unwrap(), ..name(2) };
        let other = SessionName { initiator: Name::new("iqn.b").unwrap(), ..name(2) };
        assert!(sessions.join(&elsewhere, &core, true).is_some());
        assert!(sessions.join(&other, &core, true).is_some());
        assert_eq!(handle.cuts.load(Ordering::Relaxed), 0);
        assert!(sessions.join(&name(2), &core, true).is_none());
        assert_eq!(handle.cuts.load(Ordering::Relaxed), 1);
        assert!(sessions.join(&name(2), &core, false).is_some(), "the wait is limited");
        // The connection has ended; the session continues without it, or ends as well.
        first.remove_connection(0);
        assert!(sessions.join(&name(2), &core, true).is_some());
        first.end();
        assert!(sessions.join(&name(2), &core, true).is_none());
        drop(first);
        assert!(sessions.join(&name(2), &core, true).is_some());
    }

    #[test]
    fn a_tsih_is_never_that_of_another_session() {
        let sessions = Arc::new(SessionTable::default());
        let first = sessions.join(&name(1), &CoreHandle::new(()), true).unwrap();
        for _ in 0..=u16::MAX {
            let tsih = sessions.next_tsih();
            assert!(tsih != 0 && tsih != first.tsih);
        }
    }

    #[test]
    fn logins_are_bounded_and_a_permit_returns() {
        let sessions = Arc::new(SessionTable::default());
        let mut permits: Vec<_> = (0..MAX_LOGINS).map(|_| sessions.begin_login().unwrap()).collect();
        assert!(sessions.begin_login().is_none());
        permits.pop();
        assert!(sessions.begin_login().is_some());
    }
}
