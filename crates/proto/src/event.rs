//! What a target session tells about its peer, for whoever audits: who logged in, was refused,
//! logged out or changed a reservation.
//!
//! A session queues an [`AuditEvent`]; its driver takes it by
//! [`crate::session::Target::poll_event`], adds the peer's address and logs it. A lost connection
//! is the driver's own event: only it sees the end of a socket.

use crate::exports::VolumeId;
use crate::session::ProtocolError;
use crate::volume_state::MeterReader;
use std::borrow::Cow;
use std::collections::VecDeque;

/// Who logs in, and to what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Login {
    /// The protocol's name: `nbd`, `iscsi`, `iser`, `nvme-tcp`, `aoe`.
    pub protocol: &'static str,
    /// InitiatorName, host NQN or MAC address; empty where the protocol has no such name, or none
    /// was sent.
    pub initiator: String,
    /// TargetName, subsystem NQN, export or disk; empty if none was named.
    pub target: String,
}

/// What a peer did, or what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditEvent {
    /// The peer has logged in.
    Login(Login),
    /// One more connection of a session whose login was told: its I/O is counted, and it has no
    /// lines of its own.
    Joined(Login),
    /// A station is heard of, over a protocol without connections. It is there until it logs out.
    StationCame {
        /// The station, and the disk.
        login: Login,
        /// What it does on that disk.
        meter: MeterReader,
    },
    /// What a station did, over a protocol without connections.
    ByStation {
        /// The station, and the disk.
        login: Login,
        /// What it did.
        event: Box<AuditEvent>,
    },
    /// The peer was refused.
    Refused {
        /// What the peer said of itself; nothing of it is proved.
        login: Login,
        /// Why; nothing in it is the peer's text.
        reason: Cow<'static, str>,
    },
    /// The peer, or the target, has ended the session in order.
    Logout {
        /// Who wanted it.
        reason: &'static str,
    },
    /// A registration or reservation was changed by this peer.
    Reservation {
        /// What is reserved: `LUN 0`, `namespace 1`.
        unit: String,
        /// The command's name in the standard.
        change: &'static str,
        /// Whether it succeeded.
        is_done: bool,
    },
    /// Requests for a volume are refused for a reason that the protocol has no error for; told once
    /// while the reason stays.
    RequestsRefused {
        /// The volume.
        volume: VolumeId,
        /// Why.
        reason: &'static str,
    },
}

impl AuditEvent {
    /// A peer that broke the rules of a login.
    pub(crate) fn refused_by(error: &ProtocolError, login: Login) -> AuditEvent {
        AuditEvent::Refused { login, reason: format!("peer {}", error.what).into() }
    }
}

/// AuditEvents that the driver has not taken yet. A peer that causes many before the driver looks
/// loses the oldest.
#[derive(Debug, Default)]
pub(crate) struct AuditEvents(VecDeque<AuditEvent>);

impl AuditEvents {
    #[cold]
    pub(crate) fn push(&mut self, event: AuditEvent) {
        if self.0.len() >= MAX_EVENTS {
            self.0.pop_front();
        }
        self.0.push_back(event);
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<AuditEvent> {
        self.0.pop_front()
    }
}

/// A name that an unauthenticated peer has sent, at most as long as the longest of iSCSI and NVMe.
pub(crate) fn bounded(name: &str) -> String {
    name.chars().take(MAX_NAME).collect()
}

const MAX_EVENTS: usize = 64;
/// In characters; the standards allow 223 bytes.
const MAX_NAME: usize = 223;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_and_names_that_a_peer_causes_are_bounded() {
        let mut events = AuditEvents::default();
        (0..1000).for_each(|_| events.push(AuditEvent::Logout { reason: "again" }));
        assert_eq!(std::iter::from_fn(|| events.pop()).count(), MAX_EVENTS);
        assert_eq!(bounded(&"x".repeat(1 << 16)).len(), MAX_NAME);
    }
}
