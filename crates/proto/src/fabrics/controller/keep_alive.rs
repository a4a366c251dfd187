//! Whether a host keeps its controller alive (Base 2.0 §3.9).

use crate::session::ProtocolError;
use std::time::{Duration, Instant};

/// The Keep Alive Timeout of a controller that has one.
pub(super) struct KeepAlive {
    timeout: Duration,
    pub(super) next_check: Instant,
    /// Something has come since the last check.
    pub(super) is_heard: bool,
    /// Checks in a row at which nothing had.
    silent: u32,
}

impl KeepAlive {
    /// A new timeout from `now` on; `None` is none.
    pub(super) fn set(keep_alive: &mut Option<KeepAlive>, timeout: Option<Duration>, now: Instant) {
        if keep_alive.as_ref().map(|it| it.timeout) != timeout {
            let next_check = |timeout| now.checked_add(pause(timeout)).unwrap_or(now);
            *keep_alive = timeout.map(|timeout| KeepAlive {
                timeout,
                next_check: next_check(timeout),
                is_heard: false,
                silent: 0,
            });
        }
    }

    /// Checks whether the host was heard of, if that is due. A host that is excused counts as
    /// heard.
    pub(super) fn check(&mut self, now: Instant, is_excused: bool) -> Result<(), ProtocolError> {
        if self.next_check > now {
            return Ok(());
        }
        let is_heard = std::mem::take(&mut self.is_heard) || is_excused;
        self.next_check = now.checked_add(pause(self.timeout)).unwrap_or(now);
        self.silent = if is_heard { 0 } else { self.silent.saturating_add(1) };
        if self.silent <= CHECKS {
            return Ok(());
        }
        Err(ProtocolError {
            what: "did not keep its controller alive within its Keep Alive Timeout",
            reference: "NVMe Base 2.0 §3.9",
        })
    }
}

/// Between two checks.
fn pause(timeout: Duration) -> Duration {
    timeout.checked_div(CHECKS).unwrap_or_default()
}

/// How often it is checked, in a Keep Alive Timeout, whether the host was heard of.
const CHECKS: u32 = 4;
