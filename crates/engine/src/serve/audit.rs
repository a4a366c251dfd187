//! The audit log: one line for every login, refusal, logout, reservation change and lost
//! connection.
//!
//! Sessions report [`AuditEvent`]s; this module adds the peer's address. A line begins with
//! constant text, then protocol and address, then text from the peer: the log's rate limit compares
//! lines up to the port, so that a peer cannot evade it. See
//! `docs/decisions/0038-one-event-type-for-all-audit-lines.md`.

use crate::serve::sessions::{Session, Sessions};
use blockmux_proto::driver::audit_event::{AuditEvent, Login};
use blockmux_proto::exports::VolumeId;
use blockmux_proto::volume_state::Epoch;
use std::sync::Arc;
use tracing::{info, warn};

/// Tracing target of audit lines; log levels are set by it.
pub const AUDIT: &str = "audit";
/// Tracing target of the audit lines of peers that have not proved who they are. It is below
/// [`AUDIT`], so it has its level; the log writes fewer of these lines.
pub const UNAUTHENTICATED: &str = "audit::unauthenticated";

/// Logs a line at a level. The tracing target has to be a constant.
macro_rules! log_line {
    ($level:ident, $audit:expr, $what:expr, $login:expr) => {{
        let Login { protocol, initiator, target, is_authenticated } = $login;
        let (peer, what) = (&*$audit.peer, $what);
        let (protocol, initiator, target) = (or_dash(protocol), or_dash(initiator), or_dash(target));
        match is_authenticated {
            true => $level!(target: AUDIT, protocol, peer, initiator, target, "{what}"),
            false => $level!(target: UNAUTHENTICATED, protocol, peer, initiator, target, "{what}"),
        }
    }};
}

/// Audit state of one connection.
pub(crate) struct Audit {
    /// The peer's address.
    peer: Arc<str>,
    /// The login, until the session ends.
    login: Option<Arc<Login>>,
    /// The peer was refused, and that was logged.
    is_refused: bool,
    /// The connection is not the first of its session; the first one logs the session's lines.
    is_member: bool,
    /// The epoch in which the connection began.
    epoch: Epoch,
    /// The entry in the list of sessions.
    session: Option<Arc<Session>>,
}

impl Audit {
    /// State of a new connection.
    pub(crate) fn new(peer: Arc<str>) -> Audit {
        let (login, is_refused, is_member, session) = (None, false, false, None);
        Audit { peer, login, is_refused, is_member, epoch: Epoch::current(), session }
    }

    /// Logs an event; `sessions` lists a session that has logged in, and `volume` returns a
    /// volume's name.
    #[cold]
    pub(crate) fn on_event(
        &mut self,
        event: AuditEvent,
        sessions: &Sessions,
        volume: impl Fn(VolumeId) -> String,
    ) {
        match event {
            AuditEvent::Login(login) => {
                self.info("login", &login);
                self.begin(login, sessions);
            }
            AuditEvent::Joined(login) => {
                self.is_member = true;
                self.begin(login, sessions);
            }
            // Events of stations go to `StationAudits`.
            AuditEvent::StationLoggedIn { .. } | AuditEvent::ByStation { .. } => {}
            AuditEvent::Refused { login, reason } => {
                self.is_refused = true;
                self.warn(&format!("login refused: {reason}"), &login);
            }
            AuditEvent::Logout { reason } => {
                self.session = None;
                if let Some(login) = self.login.take().filter(|_| !self.is_member) {
                    self.info(&format!("logout: {reason}"), &login);
                }
            }
            AuditEvent::Reservation { unit, change, is_done } => {
                let login = self.login.clone().unwrap_or_default();
                match is_done {
                    true => self.info(&format!("reservation changed: {unit}: {change}"), &login),
                    false => self.warn(&format!("reservation change refused: {unit}: {change}"), &login),
                }
            }
            AuditEvent::RequestsRefused { volume: id, reason } => {
                let login = self.login.clone().unwrap_or_default();
                // A removed volume has no name; the one that its client used is logged.
                let name = Some(volume(id)).filter(|name| !name.is_empty());
                let name = name.unwrap_or_else(|| login.target.clone());
                self.warn(&format!("{name}: requests are refused: {reason}"), &login);
            }
        }
    }

    /// Logs that the connection ended, and why. Logs nothing if there was no login.
    #[cold]
    pub(crate) fn on_end(&mut self, is_orderly: bool, reason: &str) {
        self.session = None;
        match (self.login.take().filter(|_| !self.is_member), is_orderly) {
            (Some(login), true) => self.info(&format!("logout: {reason}"), &login),
            (Some(login), false) => self.warn(&format!("connection lost: {reason}"), &login),
            (None, _) => {}
        }
    }

    /// Logs a protocol error before login, unless the session has reported a refusal itself.
    #[cold]
    pub(crate) fn on_refused(&mut self, protocol: &'static str, reason: &str) {
        if !std::mem::replace(&mut self.is_refused, true) {
            self.warn(&format!("login refused: {reason}"), &Login { protocol, ..Login::default() });
        }
    }

    fn begin(&mut self, login: Login, sessions: &Sessions) {
        let login = Arc::new(login);
        self.session = Some(sessions.begin(login.clone(), self.peer.clone(), self.epoch));
        self.login = Some(login);
    }

    /// The entry in the list of sessions while a peer is logged in.
    pub(crate) fn session(&self) -> Option<&Arc<Session>> {
        self.session.as_ref()
    }

    /// Whether a peer is logged in.
    pub(crate) fn is_logged_in(&self) -> bool {
        self.login.is_some()
    }

    fn info(&self, what: &str, login: &Login) {
        log_line!(info, self, what, login);
    }

    fn warn(&self, what: &str, login: &Login) {
        log_line!(warn, self, what, login);
    }
}

/// Audit state of the stations of a connectionless target: one login for each station and disk.
pub(crate) struct StationAudits {
    sessions: Sessions,
    entries: Vec<(Login, Audit)>,
}

impl StationAudits {
    /// `sessions` lists the stations that use a disk.
    pub(crate) fn new(sessions: Sessions) -> StationAudits {
        StationAudits { sessions, entries: Vec::new() }
    }

    /// Logs an event; `volume` returns a volume's name.
    #[cold]
    pub(crate) fn on_event(&mut self, event: AuditEvent, volume: impl Fn(VolumeId) -> String) {
        match event {
            AuditEvent::StationLoggedIn { login, meter } => {
                // During a flood of stations the session may drop events, so an entry may be a
                // duplicate.
                self.entries.retain(|(other, _)| *other != login);
                if self.entries.len() >= MAX_STATIONS {
                    self.entries.remove(0);
                }
                let mut audit = Audit::new(login.initiator.as_str().into());
                audit.on_event(AuditEvent::Login(login.clone()), &self.sessions, volume);
                if let Some(session) = audit.session() {
                    session.add_reader(meter);
                }
                self.entries.push((login, audit));
            }
            AuditEvent::ByStation { login, event } => {
                let is_departure = matches!(*event, AuditEvent::Logout { .. });
                let sessions = &self.sessions;
                match self.entries.iter().position(|(other, _)| *other == login) {
                    Some(at) if is_departure => self.entries.remove(at).1.on_event(*event, sessions, volume),
                    Some(at) => self.entries[at].1.on_event(*event, sessions, volume),
                    None => {
                        let mut audit = Audit::new(login.initiator.as_str().into());
                        audit.login = Some(login.into());
                        audit.on_event(*event, sessions, volume);
                    }
                }
            }
            event => Audit::new("".into()).on_event(event, &self.sessions, volume),
        }
    }
}

/// Maximum number of stations remembered: as many as a session lists.
const MAX_STATIONS: usize = 256;

fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}
