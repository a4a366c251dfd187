//! The audit log: one line for every login, refusal, logout, reservation change and lost
//! connection.
//!
//! Sessions say what happened ([`AuditEvent`]), and this adds the peer's address. The text that is
//! the same for every peer comes first, then protocol and address, then what the peer itself has
//! sent: whoever bounds repeated lines compares the part before the port, and no peer can make two
//! of its lines differ there. See `docs/decisions/0038-one-event-for-every-audit-line.md`.

use crate::sessions::{Session, Sessions};
use blockmux_proto::event::{AuditEvent, Login};
use blockmux_proto::exports::VolumeId;
use std::sync::Arc;
use tracing::{info, warn};

/// The tracing target of audit lines, by which their level is set.
pub const AUDIT: &str = "audit";

/// What is known of one connection's peer.
pub(crate) struct Audit {
    /// Its address.
    peer: String,
    /// Who has logged in, until the session ends.
    login: Option<Login>,
    /// The peer was refused, and that was logged.
    is_refused: bool,
    /// It is one more connection of a session that has its own lines.
    is_member: bool,
    sessions: Sessions,
    /// Its place in the list of sessions.
    session: Option<Arc<Session>>,
}

impl Audit {
    /// For a peer that has just come; `sessions` lists it once it has logged in.
    pub(crate) fn new(peer: &str, sessions: Sessions) -> Audit {
        let (login, session) = (None, None);
        Audit { peer: peer.to_owned(), login, is_refused: false, is_member: false, sessions, session }
    }

    /// Logs an event; `volume` gives a volume's name.
    #[cold]
    pub(crate) fn on_event(&mut self, event: AuditEvent, volume: impl Fn(VolumeId) -> String) {
        match event {
            AuditEvent::Login(login) => {
                self.info("login", &login);
                self.begin(login);
            }
            AuditEvent::Joined(login) => {
                self.is_member = true;
                self.begin(login);
            }
            // `StationAudits` takes those: a connection is no station.
            AuditEvent::StationCame { .. } | AuditEvent::ByStation { .. } => {}
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
                // A removed volume has no name but the one that its client used.
                let name = Some(volume(id)).filter(|name| !name.is_empty());
                let name = name.unwrap_or_else(|| login.target.clone());
                self.warn(&format!("{name}: requests are refused: {reason}"), &login);
            }
        }
    }

    /// The connection is over, and why; nothing is logged of one that nobody was logged in by.
    #[cold]
    pub(crate) fn on_end(&mut self, is_orderly: bool, reason: &str) {
        self.session = None;
        match (self.login.take().filter(|_| !self.is_member), is_orderly) {
            (Some(login), true) => self.info(&format!("logout: {reason}"), &login),
            (Some(login), false) => self.warn(&format!("connection lost: {reason}"), &login),
            (None, _) => {}
        }
    }

    /// The peer broke the rules before it was logged in, and its session has not said so itself.
    #[cold]
    pub(crate) fn on_refused(&mut self, protocol: &'static str, reason: &str) {
        if !std::mem::replace(&mut self.is_refused, true) {
            self.warn(&format!("login refused: {reason}"), &Login { protocol, ..Login::default() });
        }
    }

    fn begin(&mut self, login: Login) {
        self.session = Some(self.sessions.begin(login.clone(), &self.peer));
        self.login = Some(login);
    }

    /// Its place in the list of sessions, while somebody is logged in.
    pub(crate) fn session(&self) -> Option<&Arc<Session>> {
        self.session.as_ref()
    }

    /// Whether somebody is logged in.
    pub(crate) fn is_logged_in(&self) -> bool {
        self.login.is_some()
    }

    fn info(&self, what: &str, login: &Login) {
        let Login { protocol, initiator, target } = login;
        let (protocol, initiator, target) = (or_dash(protocol), or_dash(initiator), or_dash(target));
        info!(target: AUDIT, protocol, peer = &*self.peer, initiator, target, "{what}");
    }

    fn warn(&self, what: &str, login: &Login) {
        let Login { protocol, initiator, target } = login;
        let (protocol, initiator, target) = (or_dash(protocol), or_dash(initiator), or_dash(target));
        warn!(target: AUDIT, protocol, peer = &*self.peer, initiator, target, "{what}");
    }
}

/// The stations that use a target without connections, each once for each disk.
pub(crate) struct StationAudits {
    sessions: Sessions,
    there: Vec<(Login, Audit)>,
}

impl StationAudits {
    /// `sessions` lists those that are there.
    pub(crate) fn new(sessions: Sessions) -> StationAudits {
        StationAudits { sessions, there: Vec::new() }
    }

    /// Logs an event; `volume` gives a volume's name.
    #[cold]
    pub(crate) fn on_event(&mut self, event: AuditEvent, volume: impl Fn(VolumeId) -> String) {
        match event {
            AuditEvent::StationCame { login, meter } => {
                // Of a flood of stations the session may have dropped events.
                self.there.retain(|(other, _)| *other != login);
                if self.there.len() >= MAX_STATIONS {
                    self.there.remove(0);
                }
                let mut audit = Audit::new(&login.initiator, self.sessions.clone());
                audit.on_event(AuditEvent::Login(login.clone()), volume);
                if let Some(session) = audit.session() {
                    session.add_reader(meter);
                }
                self.there.push((login, audit));
            }
            AuditEvent::ByStation { login, event } => {
                let is_departure = matches!(*event, AuditEvent::Logout { .. });
                match self.there.iter().position(|(other, _)| *other == login) {
                    Some(at) if is_departure => self.there.remove(at).1.on_event(*event, volume),
                    Some(at) => self.there[at].1.on_event(*event, volume),
                    None => {
                        let mut audit = Audit::new(&login.initiator, self.sessions.clone());
                        audit.login = Some(login);
                        audit.on_event(*event, volume);
                    }
                }
            }
            event => Audit::new("", Sessions::default()).on_event(event, volume),
        }
    }
}

/// As many as a session lists.
const MAX_STATIONS: usize = 256;

fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}
