//! What a link does after it has lost its session, or could not get one.

use super::{Link, LinkState, lost};
use crate::carrier::connection::Broken;
use crate::core::reactor::Progress;
use crate::net::host::Host;
use crate::remote::Dialer;
use crate::remote::overdue;
use crate::remote::redirections::Redirection;
use crate::remote::retry::{MAX_PAUSE, RetryDecision};
use blockmux_proto::driver::session::{Connections, Initiator, ProtocolError};
use blockmux_volume::{Completion, Op};
use std::time::{Duration, Instant};
use tracing::{info, warn};

impl<D: Dialer, H: Host> Link<D, H> {
    /// `at`, or the earliest time that the target accepts another session, if later.
    pub(super) fn dial_time(&self, at: Instant) -> Instant {
        self.not_before.map_or(at, |then| then.max(at))
    }

    /// Follows a redirection at once.
    pub(super) fn follow(&mut self, moved: Redirection) -> Progress {
        let (from, to) = (self.redirections.address().clone(), moved.address.clone());
        match self.redirections.follow(moved) {
            Ok(()) => {
                info!(%from, %to, "target redirects");
                self.state = LinkState::Pausing { until: self.core.now() };
                Progress::More
            }
            Err(problem) => self.give_up(&format!("target at {from} redirects to {to}, {problem}")),
        }
    }

    /// Loses the session to a broken connection. A protocol error is logged even if no request
    /// waits for a reconnect, because nothing else would report it.
    pub(super) fn lose_to(&mut self, broken: &Broken) -> Progress {
        if let (Broken::Tls(error), Some(rejected)) = (broken, self.tls.take())
            && let Some(tls) = self.dialer.tls()
        {
            tls.on_failure(&rejected, error);
        }
        let error = if let Broken::Protocol(error) = broken { Some(error) } else { None };
        self.lose_after(&broken.to_string(), error, |_| {})
    }

    /// Loses the session because the oldest request has waited for `span`.
    pub(super) fn lose_unanswered(&mut self, span: Duration) -> Progress {
        let span = overdue::format_duration(span);
        self.lose_after(&format!("no answer within {span}"), None, |link| link.fail_late(&span))
    }

    /// Loses the session: keeps uncompleted requests, and reconnects after a pause or gives up.
    pub(super) fn lose(&mut self, reason: &str) -> Progress {
        self.lose_after(reason, None, |_| {})
    }

    /// Loses the session. `error` is the target's protocol violation, if that is the reason;
    /// `handle_unfinished` handles uncompleted requests before the link reconnects.
    fn lose_after(
        &mut self,
        reason: &str,
        error: Option<&ProtocolError>,
        handle_unfinished: impl FnOnce(&mut Link<D, H>),
    ) -> Progress {
        let was_logged_in = matches!(self.state, LinkState::Open { is_checked: true, .. });
        let done_before = self.done.len();
        self.take_back();
        handle_unfinished(self);
        if self.is_closing {
            return Progress::Idle;
        }
        if was_logged_in {
            self.retry.on_lost_session();
        }
        if self.has_other_paths {
            self.group.is_changed.set(true);
            self.consumer.wake();
        }
        if was_logged_in && self.queue.is_empty() && !self.has_other_paths {
            // Servers close idle connections; the next request dials.
            if let Some(error) = error {
                warn!(target = %self.redirections.address(), "closed the connection: target {error}");
            }
            self.become_idle();
            return Progress::Drained;
        }
        let has_completed = self.done.len() > done_before;
        if has_completed {
            self.retry.on_completion();
        }
        match self.retry.on_loss(was_logged_in && !has_completed, self.core.now()) {
            RetryDecision::GiveUp if self.has_other_paths && self.group.open.get() > 0 => {
                self.redirections.restart();
                let until = self.core.now() + PROBE_PAUSE;
                self.retry.begin(until);
                self.state = LinkState::Pausing { until };
                self.core.wake_at(until, &self.waker);
                Progress::Drained
            }
            RetryDecision::GiveUp => self.give_up(reason),
            RetryDecision::Again { at, is_first } => {
                if is_first && self.was_open {
                    warn!(target = %self.redirections.address(), "connection lost ({reason}); trying again");
                }
                if !self.was_open {
                    self.group.is_changed.set(true);
                    self.consumer.wake();
                }
                self.redirections.restart();
                let until = self.dial_time(at);
                self.state = LinkState::Pausing { until };
                self.core.wake_at(until, &self.waker);
                Progress::Drained
            }
        }
    }

    /// Retries this path soon, even after a long time out of use, because no other path is usable.
    pub(in crate::remote) fn retry_now(&mut self) {
        let soon = self.dial_time(self.core.now() + MAX_PAUSE);
        if let LinkState::Pausing { until } = &mut self.state
            && *until > soon
        {
            *until = soon;
            // The time for reconnecting begins with the attempt.
            self.retry.begin(soon);
            self.core.wake_at(soon, &self.waker);
        }
    }

    /// Fails requests of a closed connection whose timeout has passed.
    fn fail_late(&mut self, span: &str) {
        let (now, reconnect_timeout) = (self.core.now(), self.retry.reconnect_timeout);
        let (mut late, done_before) = (self.group.late.borrow_mut(), self.done.len());
        self.queue.retain(|io| {
            let has_timed_out = late.has_timed_out(io.tag, now, reconnect_timeout);
            if has_timed_out {
                self.done.push(lost(io.tag));
            }
            !has_timed_out
        });
        let failed = self.done.len() - done_before;
        if failed > 0 {
            let (target, reconnect_timeout) =
                (self.redirections.address(), overdue::format_duration(reconnect_timeout));
            warn!(%target, "{failed} requests fail: no answer within {span}, and none over new connections for {reconnect_timeout}");
        }
    }

    /// Becomes idle until the next request; returns how many other links still try.
    fn become_idle(&mut self) -> usize {
        self.was_open = false;
        self.redirections.restart();
        let alive = self.group.alive.get().saturating_sub(1);
        self.group.alive.set(alive);
        alive
    }

    /// Becomes idle until the next request; the channel handles queued requests.
    pub(super) fn give_up(&mut self, reason: &str) -> Progress {
        self.take_back();
        let target = self.redirections.address().clone();
        match self.become_idle() {
            0 => warn!(%target, "volume is out of reach: {reason}"),
            alive => info!(%target, "gave up one connection, {alive} remain: {reason}"),
        }
        self.group.is_changed.set(true);
        self.consumer.wake();
        Progress::Drained
    }

    /// Ends the session and queues its uncompleted requests before all others.
    fn take_back(&mut self) {
        self.in_flight = 0;
        self.silence.on_loss();
        self.overdue.on_loss();
        self.end_control();
        if let LinkState::Open { mut session, is_checked, mut connections } =
            std::mem::replace(&mut self.state, LinkState::Down)
        {
            connections.say_goodbye(&mut session);
            if !self.is_closing {
                connections.end();
            }
            let wait = session.reconnects_after();
            self.not_before = (!wait.is_zero()).then(|| self.core.now() + wait);
            let open = self.group.open.get();
            self.group.open.set(open.saturating_sub(usize::from(is_checked)));
            while let Some(io) = session.poll_returned() {
                self.queue.push_front(io);
            }
            while let Some(completion) = session.poll_done() {
                self.done.push(completion);
            }
            for io in session.take_unfinished().into_iter().rev() {
                self.queue.push_front(io);
            }
        }
        // A lost prefetch needs no replay.
        self.queue.retain(|io| {
            let is_hint = io.op == Op::Prefetch;
            if is_hint {
                self.done.push(Completion { tag: io.tag, result: Ok(blockmux_volume::Output::Nothing) });
            }
            !is_hint
        });
    }
}

/// Pause before a path that was given up is tried again while others are usable.
const PROBE_PAUSE: Duration = Duration::from_secs(5);
