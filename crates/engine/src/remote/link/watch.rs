//! Reply timeouts of a link: logs a silent target, aborts overdue requests, or gives up the
//! connection.

use super::controlled::CONTROL_EVERY;
use super::{Link, LinkState, is_shut, lost};
use crate::core::reactor::Progress;
use crate::net::host::Host;
use crate::remote::overdue::{self, TICKS};
use crate::remote::{Dialer, silence};
use blockmux_proto::driver::session::{Initiator, Overdue};
use tracing::warn;

impl<D: Dialer, H: Host> Link<D, H> {
    /// Arms the next check for replies.
    #[inline]
    pub(super) fn watch(&mut self) {
        let core = &self.core;
        if self.in_flight > 0
            && let Some(until) = self.silence.watch(|| core.now())
        {
            core.wake_at(until, &self.waker);
        }
        if self.load() > 0
            && let Some(until) = self.overdue.watch(|| core.now())
        {
            core.wake_at(until, &self.waker);
        }
    }

    /// Aborts an overdue request, or gives up the connection.
    #[inline]
    pub(super) fn check_answers(&mut self) -> Option<Progress> {
        if self.turns.is_multiple_of(CONTROL_EVERY) {
            // A busy task never parks, so the check is armed here.
            self.watch();
        }
        let core = &self.core;
        if !self.overdue.is_due(|| core.now()) {
            return None;
        }
        let LinkState::Open { session, is_checked: true, .. } = &mut self.state else { return None };
        let is_none = is_shut(session.path_rank(), self.has_other_paths);
        let is_shut = self.in_flight == 0 && !self.queue.is_empty() && !is_none;
        let span = self.overdue.on_tick(session.tick(), is_shut)?;
        // If there are other paths, using one of them is faster than an abort.
        let asked = if self.has_other_paths { None } else { session.abort_overdue(TICKS) };
        if let Some(asked) = asked {
            let (target, span) = (self.redirections.address(), overdue::format_duration(span));
            warn!(%target, "no answer within {span}; the target is asked {asked}");
            return Some(Progress::More);
        }
        Some(self.lose_unanswered(span))
    }

    /// Retries requests that the target has aborted or that this path cannot do now, or fails those
    /// whose timeout has passed.
    #[inline]
    pub(super) fn take_handed_back(&mut self) -> Option<Progress> {
        let LinkState::Open { session, .. } = &mut self.state else { return None };
        let mut next = session.poll_returned();
        next.as_ref()?;
        let (now, reconnect_timeout, mut failed) = (self.core.now(), self.retry.reconnect_timeout, 0);
        while let Some(io) = next {
            self.in_flight -= 1;
            if self.group.late.borrow_mut().has_timed_out(io.tag, now, reconnect_timeout) {
                self.done.push(lost(io.tag));
                failed += 1;
            } else {
                self.queue.push_back(io);
            }
            next = session.poll_returned();
        }
        if failed > 0 {
            let (target, reconnect_timeout) =
                (self.redirections.address(), overdue::format_duration(reconnect_timeout));
            warn!(%target, "{failed} requests fail: retried for {reconnect_timeout} without success");
        }
        Some(Progress::More)
    }

    #[inline]
    pub(super) fn check_silence(&mut self) {
        let (core, waiting) = (&self.core, self.in_flight);
        if self.silence.is_report_due(|| core.now(), waiting > 0) {
            let (target, seconds) = (self.redirections.address(), silence::REPORT_AFTER.as_secs());
            warn!(%target, "no answer for {seconds} s, {waiting} requests wait for one");
        }
    }
}
