//! Whether a link's target answers: told where it is silent, and where a request gets no answer in
//! time, made to give it up, or given up.

use super::controlled::CONTROL_EVERY;
use super::{Link, LinkState, is_shut, lost};
use crate::host::Host;
use crate::initiator::overdue::{self, LOOKS};
use crate::initiator::{Dialer, silence};
use crate::reactor::Progress;
use blockmux_proto::session::{Initiator, Overdue};
use tracing::warn;

impl<D: Dialer, H: Host> Link<D, H> {
    /// Has the link look later whether the target answers.
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

    /// Has the target give up a request that gets no answer, or gives up the connection.
    #[inline]
    pub(super) fn look_for_answers(&mut self) -> Option<Progress> {
        if self.turns.is_multiple_of(CONTROL_EVERY) {
            // One that is always busy never parks.
            self.watch();
        }
        let core = &self.core;
        if !self.overdue.is_due(|| core.now()) {
            return None;
        }
        let LinkState::Open { session, is_checked: true, .. } = &mut self.state else { return None };
        let is_none = is_shut(session.path_rank(), self.has_other_paths);
        let is_shut = self.in_flight == 0 && !self.queue.is_empty() && !is_none;
        let span = self.overdue.on_look(session.look(), is_shut)?;
        // Where there are other paths, one of them does it sooner.
        let asked = if self.has_other_paths { None } else { session.abort_overdue(LOOKS) };
        if let Some(asked) = asked {
            let (target, span) = (self.moves.address(), overdue::written(span));
            warn!(%target, "no answer within {span}; the target is asked {asked}");
            return Some(Progress::More);
        }
        Some(self.lose_unanswered(span))
    }

    /// Sends again, by this path or another, what the target has given up and what this path does
    /// not do now, or fails what has had all patience.
    #[inline]
    pub(super) fn take_handed_back(&mut self) -> Option<Progress> {
        let LinkState::Open { session, .. } = &mut self.state else { return None };
        let mut next = session.poll_returned();
        next.as_ref()?;
        let (now, patience, mut failed) = (self.core.now(), self.retry.reconnect_timeout(), 0);
        while let Some(io) = next {
            self.in_flight -= 1;
            if self.group.late.borrow_mut().is_hopeless(io.tag, now, patience) {
                self.done.push(lost(io.tag));
                failed += 1;
            } else {
                self.queue.push_back(io);
            }
            next = session.poll_returned();
        }
        if failed > 0 {
            let (target, patience) = (self.moves.address(), overdue::written(patience));
            warn!(%target, "{failed} requests fail: sent again and again for {patience}, they got nowhere");
        }
        Some(Progress::More)
    }

    #[inline]
    pub(super) fn check_silence(&mut self) {
        let (core, waiting) = (&self.core, self.in_flight);
        if self.silence.is_to_tell(|| core.now(), waiting > 0) {
            let (target, seconds) = (self.moves.address(), silence::PATIENCE.as_secs());
            warn!(%target, "no answer for {seconds} s, {waiting} requests wait for one");
        }
    }
}
