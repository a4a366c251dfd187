//! Keep Alive Timer of a controller (Base 2.0 §3.9).

use crate::driver::session::ProtocolError;
use std::time::{Duration, Instant};

/// The Keep Alive Timer of a controller that has a timeout.
pub(super) struct KeepAlive {
    timeout: Duration,
    pub(super) next_check: Instant,
    /// Whether traffic arrived since the last check.
    pub(super) has_traffic: bool,
    /// Number of consecutive checks without traffic.
    missed: u32,
}

impl KeepAlive {
    /// Sets the timeout, which begins at `now`; `None` disables the timer.
    pub(super) fn set(keep_alive: &mut Option<KeepAlive>, timeout: Option<Duration>, now: Instant) {
        if keep_alive.as_ref().map(|it| it.timeout) != timeout {
            let next_check = |timeout| now.checked_add(pause(timeout)).unwrap_or(now);
            *keep_alive = timeout.map(|timeout| KeepAlive {
                timeout,
                next_check: next_check(timeout),
                has_traffic: false,
                missed: 0,
            });
        }
    }

    /// Checks for traffic if a check is due. `is_excused` counts as traffic.
    pub(super) fn check(&mut self, now: Instant, is_excused: bool) -> Result<(), ProtocolError> {
        if self.next_check > now {
            return Ok(());
        }
        let has_traffic = std::mem::take(&mut self.has_traffic) || is_excused;
        self.next_check = now.checked_add(pause(self.timeout)).unwrap_or(now);
        self.missed = if has_traffic { 0 } else { self.missed.saturating_add(1) };
        if self.missed <= CHECKS {
            return Ok(());
        }
        Err(ProtocolError {
            what: "did not keep its controller alive within its Keep Alive Timeout",
            reference: "NVMe Base 2.0 §3.9",
        })
    }
}

/// Interval between two checks.
fn pause(timeout: Duration) -> Duration {
    timeout.checked_div(CHECKS).unwrap_or_default()
}

/// Number of checks within one Keep Alive Timeout.
const CHECKS: u32 = 4;
