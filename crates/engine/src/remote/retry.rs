//! When a link that lost its connection dials again, and when it gives up.
//!
//! It gives up when there has been no session for its reconnect timeout, or when every session in
//! that time has ended without a completion: then a request may be the cause. In between it dials
//! after pauses that grow until something completes.

use super::missing;
use std::time::{Duration, Instant};

pub(super) struct ReconnectTimer {
    /// How long the link retries before it gives up.
    pub(super) reconnect_timeout: Duration,
    /// Since when there has been no session.
    lost_since: Option<Instant>,
    /// Since when every session has been lost before it completed anything.
    fruitless_since: Option<Instant>,
    /// Since when requests wait for the path to become usable.
    stranded_since: Option<Instant>,
    pause: Duration,
    /// The session was lost and is not restored.
    is_missing: bool,
    /// A permission error has been logged since the last session.
    is_denial_logged: bool,
}

/// What to do about a loss.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RetryDecision {
    GiveUp,
    /// Dial at that time; whether it is the first of several attempts.
    Again {
        at: Instant,
        is_first: bool,
    },
}

impl ReconnectTimer {
    /// The timer of a link that starts to dial `now`.
    pub(super) fn new(reconnect_timeout: Duration, now: Instant) -> ReconnectTimer {
        ReconnectTimer {
            reconnect_timeout,
            lost_since: Some(now),
            fruitless_since: None,
            stranded_since: None,
            pause: FIRST_PAUSE,
            is_missing: false,
            is_denial_logged: false,
        }
    }

    /// Whether requests have waited for longer than the timeout for the path to become usable.
    #[inline]
    pub(super) fn is_stranded_too_long(&mut self, waits: bool, now: impl FnOnce() -> Instant) -> bool {
        if !waits {
            self.stranded_since = None;
            return false;
        }
        let now = now();
        let since = *self.stranded_since.get_or_insert(now);
        now.duration_since(since) >= self.reconnect_timeout
    }

    /// Restarts the timer: a link that was idle starts to dial.
    pub(super) fn begin(&mut self, now: Instant) {
        *self = ReconnectTimer {
            is_missing: self.is_missing,
            ..ReconnectTimer::new(self.reconnect_timeout, now)
        };
    }

    /// Deadline of an attempt that begins `now`: when the link gives up, but not before
    /// `MIN_ATTEMPT`. `None`: there is none.
    pub(super) fn attempt_ends(&self, now: Instant) -> Option<Instant> {
        Some(self.gives_up_at(now)?.max(now + MIN_ATTEMPT))
    }

    /// When the link gives up, if it has had no session since `now` or before; `None`: never.
    fn gives_up_at(&self, now: Instant) -> Option<Instant> {
        let lost_since = self.lost_since.unwrap_or(now);
        let since = self.fruitless_since.map_or(lost_since, |fruitless| fruitless.min(lost_since));
        since.checked_add(self.reconnect_timeout)
    }

    /// Records that a session is open.
    pub(super) fn on_session(&mut self) {
        (self.lost_since, self.is_denial_logged) = (None, false);
        missing::take(u32::from(std::mem::take(&mut self.is_missing)));
    }

    /// Records that an attempt failed for lack of permission; returns whether to log that: once for
    /// each loss.
    pub(super) fn on_denial(&mut self) -> bool {
        !std::mem::replace(&mut self.is_denial_logged, true)
    }

    /// Records that a session that had logged in was lost.
    pub(super) fn on_lost_session(&mut self) {
        self.is_missing = true;
        missing::add(1);
    }

    /// Records that a request has completed.
    #[inline]
    pub(super) fn on_completion(&mut self) {
        (self.fruitless_since, self.pause) = (None, FIRST_PAUSE);
    }

    /// Decides what to do after an attempt that failed, or a session that ended.
    pub(super) fn on_loss(&mut self, had_session: bool, now: Instant) -> RetryDecision {
        if had_session {
            self.fruitless_since.get_or_insert(now);
        }
        self.lost_since.get_or_insert(now);
        let ends = self.gives_up_at(now);
        if ends.is_some_and(|ends| now >= ends) {
            return RetryDecision::GiveUp;
        }
        let (at, is_first) = (now + self.pause, self.pause == FIRST_PAUSE);
        let at = ends.map_or(at, |ends| ends.min(at));
        self.pause = (self.pause * 2).min(MAX_PAUSE);
        RetryDecision::Again { at, is_first }
    }
}

/// Time limit of the connection of an attempt, before the login.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that each attempt has, even with a shorter reconnect timeout or at the end of it.
const MIN_ATTEMPT: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(10);
pub(super) const MAX_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    const RECONNECT_TIMEOUT: Duration = Duration::from_secs(5);

    /// Fails one attempt after the other at the earliest time; returns how many, and for how long.
    fn lose_until_it_gives_up(
        retry: &mut ReconnectTimer,
        had_session: bool,
        from: Instant,
    ) -> (u32, Duration) {
        let (mut now, mut losses) = (from, 0);
        loop {
            losses += 1;
            match retry.on_loss(had_session, now) {
                RetryDecision::GiveUp => return (losses, now - from),
                RetryDecision::Again { at, is_first } => {
                    assert_eq!(is_first, losses == 1);
                    assert!(at > now && at - now <= MAX_PAUSE);
                    now = at;
                }
            }
        }
    }

    #[test]
    fn pauses_grow_until_the_timeout() {
        let now = Instant::now();
        let (losses, time) =
            lose_until_it_gives_up(&mut ReconnectTimer::new(RECONNECT_TIMEOUT, now), false, now);
        assert!((8..15).contains(&losses), "{losses}");
        assert!(time >= RECONNECT_TIMEOUT && time < RECONNECT_TIMEOUT + MAX_PAUSE, "{time:?}");
    }

    #[test]
    fn an_attempt_ends_when_the_link_gives_up() {
        let now = Instant::now();
        let retry = |timeout| ReconnectTimer::new(timeout, now);
        assert_eq!(retry(RECONNECT_TIMEOUT).attempt_ends(now), Some(now + RECONNECT_TIMEOUT));
        // The last attempt, and each with a short timeout, has time to succeed.
        let last = now + RECONNECT_TIMEOUT;
        assert_eq!(retry(RECONNECT_TIMEOUT).attempt_ends(last), Some(last + MIN_ATTEMPT));
        assert_eq!(retry(Duration::ZERO).attempt_ends(now), Some(now + MIN_ATTEMPT));
        assert_eq!(retry(Duration::MAX).attempt_ends(now), None);
        assert!(matches!(retry(Duration::MAX).on_loss(false, now), RetryDecision::Again { .. }));
    }

    #[test]
    fn sessions_that_complete_nothing_do_not_prolong_the_timeout() {
        let now = Instant::now();
        let mut retry = ReconnectTimer::new(RECONNECT_TIMEOUT, now);
        retry.on_session();
        let (mut at, mut losses) = (now, 0);
        while let RetryDecision::Again { at: next, .. } = retry.on_loss(true, at) {
            (at, losses) = (next, losses + 1);
            retry.on_session();
        }
        assert!(at - now >= RECONNECT_TIMEOUT && losses < 15, "{losses}");
    }

    #[test]
    fn a_completion_or_an_idle_period_restarts_the_timeout() {
        let now = Instant::now();
        let mut retry = ReconnectTimer::new(RECONNECT_TIMEOUT, now);
        retry.on_session();
        assert!(matches!(retry.on_loss(true, now), RetryDecision::Again { is_first: true, .. }));
        retry.on_session();
        retry.on_completion();
        let later = now + RECONNECT_TIMEOUT * 2;
        assert!(matches!(retry.on_loss(true, later), RetryDecision::Again { is_first: true, .. }));
        let much_later = later + RECONNECT_TIMEOUT * 2;
        retry.begin(much_later);
        assert!(lose_until_it_gives_up(&mut retry, false, much_later).1 >= RECONNECT_TIMEOUT);
    }
}
