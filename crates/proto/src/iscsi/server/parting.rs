//! How a target that stops takes leave of an initiator (RFC 7143 §11.9.1).
//!
//! ```text
//!   stop ──▶ asked to log out ── logs out ─────────────────────────▶ closed
//!              (AsyncEvent 1) └─ is idle, and does not, for as ──▶ dropped ──▶ closed when nothing is in flight
//!                                long as Parameter3 has told        (AsyncEvent 3)
//! ```
//! Meanwhile what is in flight comes to its end, and new commands are answered BUSY: an initiator tries those again, and
//! finds the target that has been started anew or another path. The time counts from when nothing is in flight, so that
//! an initiator which waits for its commands before it logs out need not hurry. Each connection is asked by itself, and a
//! logout that closes the session ends them all.

use super::connection::Connection;
use super::full::Turn;
use crate::iscsi::login::target::Session;
use blockmux_wire::iscsi::session::AsyncEvent;
use std::time::{Duration, Instant};

/// How far the leave-taking of a connection is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Parting {
    /// Nobody leaves.
    #[default]
    No,
    /// The initiator was asked to log out, and has until then; `None` until somebody says what time it is, and nothing is
    /// in flight.
    Asked(Option<Instant>),
    /// It was told that there is no more time: the connection is closed as soon as nothing is in flight.
    Dropping,
}

impl Parting {
    pub(super) fn has_begun(self) -> bool {
        self != Parting::No
    }
}

impl Connection {
    /// When to look whether the initiator has had its time to log out.
    pub(super) fn parts_at(&self) -> Option<Instant> {
        match self.parting {
            Parting::Asked(until) if self.live == 0 => Some(until.unwrap_or(self.retry_at)),
            _ => None,
        }
    }
}

impl Turn<'_> {
    /// The target stops. A discovery session has nothing to bring to an end, and is dropped at once.
    pub(super) fn on_stop(&mut self) {
        if self.connection.is_failed {
            return self.end();
        }
        if self.connection.parting.has_begun() || self.connection.is_over {
            return;
        }
        if matches!(self.session.kind, Session::Discovery) {
            return self.drop_initiator();
        }
        self.connection.parting = Parting::Asked(None);
        let window = self.session.window;
        self.connection.replies.event(window, AsyncEvent::LOGOUT_REQUEST, [0, 0, SECONDS_TO_LOG_OUT]);
    }

    /// Time passes for an initiator that was asked to log out.
    pub(super) fn part(&mut self, now: Instant) {
        let Parting::Asked(until) = self.connection.parting else { return };
        if self.connection.live > 0 {
            return;
        }
        let patience = Duration::from_secs(SECONDS_TO_LOG_OUT.into());
        match until {
            None => self.connection.parting = Parting::Asked(now.checked_add(patience)),
            Some(until) if now >= until => self.drop_initiator(),
            Some(_) => {}
        }
    }

    fn drop_initiator(&mut self) {
        self.connection.parting = Parting::Dropping;
        let (wait, retain) = self.times();
        let window = self.session.window;
        self.connection.replies.event(window, AsyncEvent::SESSION_DROP, [0, wait, retain]);
    }
}

/// Whoever means to log out does so within milliseconds, and a daemon that is told to stop is to be gone soon: the
/// shortest time that a message can name.
const SECONDS_TO_LOG_OUT: u16 = 1;
