//! Audit events of a target session: logins, refusals, logouts and changed reservations.
//!
//! A session queues an [`AuditEvent`]; its driver takes it by `TargetLifecycle::poll_event`, adds
//! the peer's address and logs it. A lost connection is the driver's own event: only it sees the
//! end of a socket.

use crate::driver::session::ProtocolError;
use crate::exports::VolumeId;
use crate::volume_state::MeterReader;
use std::borrow::Cow;
use std::collections::VecDeque;

/// The two sides of a login.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Login {
    /// The protocol's name, such as `iscsi` or `nvme-tcp`.
    pub protocol: &'static str,
    /// InitiatorName, host NQN or MAC address; empty if the protocol has none or the peer sent
    /// none.
    pub initiator: String,
    /// TargetName, subsystem NQN, export or disk; empty if the peer named none.
    pub target: String,
    /// Whether the peer has proved who it is: by CHAP, DH-HMAC-CHAP, a TLS PSK or a certificate.
    pub is_authenticated: bool,
}

/// An event for the audit log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditEvent {
    /// The peer has logged in.
    Login(Login),
    /// Another connection joined a session whose login was logged: its I/O is counted with the
    /// session, and the log has no line for it.
    Joined(Login),
    /// A station uses a disk, over a protocol without connections; it is listed until its logout.
    StationLoggedIn {
        /// The station, and the disk.
        login: Login,
        /// Its I/O counters for the disk.
        meter: MeterReader,
    },
    /// An event of one station, over a protocol without connections.
    ByStation {
        /// The station, and the disk.
        login: Login,
        /// The event.
        event: Box<AuditEvent>,
    },
    /// The peer was refused.
    Refused {
        /// The names that the peer sent, which are not authenticated.
        login: Login,
        /// The reason, which contains no text of the peer.
        reason: Cow<'static, str>,
    },
    /// The peer or the target has ended the session regularly.
    Logout {
        /// The reason for the end.
        reason: &'static str,
    },
    /// A registration or reservation was changed by this peer.
    Reservation {
        /// The reserved unit: `LUN 0`, `namespace 1`.
        unit: String,
        /// The command's name in the standard.
        change: &'static str,
        /// Whether it succeeded.
        is_done: bool,
    },
    /// Requests to a volume are refused for a reason that the protocol cannot express; logged once
    /// while the reason lasts.
    RequestsRefused {
        /// The volume.
        volume: VolumeId,
        /// The reason.
        reason: &'static str,
    },
}

impl AuditEvent {
    /// Whether the peer did not get what it requested.
    fn is_refusal(&self) -> bool {
        match self {
            AuditEvent::Refused { .. }
            | AuditEvent::RequestsRefused { .. }
            | AuditEvent::Reservation { is_done: false, .. } => true,
            AuditEvent::ByStation { event, .. } => event.is_refusal(),
            AuditEvent::Login(_)
            | AuditEvent::Joined(_)
            | AuditEvent::StationLoggedIn { .. }
            | AuditEvent::Logout { .. }
            | AuditEvent::Reservation { .. } => false,
        }
    }

    /// The event for a peer that violated the protocol during login.
    pub(crate) fn refused_by(error: &ProtocolError, login: Login) -> AuditEvent {
        AuditEvent::Refused { login, reason: format!("peer {}", error.what).into() }
    }
}

/// Events that the driver has not taken yet. When the queue is full, the oldest refusal is dropped,
/// or else the new event: no number of requests hides an earlier login or change.
#[derive(Debug, Default)]
#[allow(clippy::box_collection, reason = "events are rare, and most connections idle")]
pub(crate) struct AuditEvents(Option<Box<VecDeque<AuditEvent>>>);

impl AuditEvents {
    #[cold]
    pub(crate) fn push(&mut self, event: AuditEvent) {
        let events = self.0.get_or_insert_default();
        if events.len() >= MAX_EVENTS {
            let Some(at) = events.iter().position(AuditEvent::is_refusal) else { return };
            events.remove(at);
        }
        events.push_back(event);
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<AuditEvent> {
        let event = self.0.as_mut()?.pop_front();
        self.0.take_if(|events| events.is_empty());
        event
    }
}

/// Truncates a name of an unauthenticated peer to the maximum length of iSCSI and NVMe names.
pub(crate) fn bounded(name: &str) -> String {
    name.chars().take(MAX_NAME).collect()
}

/// The driver takes the events after each receive of at most 256 KiB, and a command that causes an
/// event has at least 48 bytes.
const MAX_EVENTS: usize = (256 << 10) / 48 + 64;
/// The maximum length of a name, in characters; the standards allow 223 bytes.
const MAX_NAME: usize = 223;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_and_names_that_a_peer_causes_are_bounded() {
        let mut events = AuditEvents::default();
        (0..10_000).for_each(|_| events.push(AuditEvent::Logout { reason: "again" }));
        assert_eq!(std::iter::from_fn(|| events.pop()).count(), MAX_EVENTS);
        assert_eq!(bounded(&"x".repeat(1 << 16)).len(), MAX_NAME);
    }

    #[test]
    fn no_number_of_requests_hides_a_login() {
        let mut events = AuditEvents::default();
        let login = AuditEvent::Login(Login { protocol: "iscsi", ..Login::default() });
        events.push(login.clone());
        let change = |change, is_done| AuditEvent::Reservation { unit: "LUN 0".to_owned(), change, is_done };
        // All the commands of one receive.
        (0..5461).for_each(|_| events.push(change("REGISTER", true)));
        (0..MAX_EVENTS).for_each(|_| events.push(change("PREEMPT", false)));
        events.push(change("CLEAR", true));
        let taken: Vec<_> = std::iter::from_fn(|| events.pop()).collect();
        assert_eq!(taken.first(), Some(&login));
        assert_eq!(taken.iter().filter(|event| !event.is_refusal()).count(), 5463);
        assert_eq!(taken.last(), Some(&change("CLEAR", true)));
        assert!(events.0.is_none(), "an empty queue has no memory");
    }
}
