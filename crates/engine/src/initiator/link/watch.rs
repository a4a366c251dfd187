//! Whether a link's target answers: told where it is silent, and given up where a request gets no answer in time.

use super::controlled::CONTROL_EVERY;
use super::{Link, State};
use crate::host::Host;
use crate::initiator::{Dialer, silence};
use crate::reactor::Progress;
use blockmux_proto::session::{Initiator, PathRank};
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

    /// Gives up a connection that a request gets no answer over.
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
        let State::Open { session, is_checked: true, .. } = &mut self.state else { return None };
        let is_none = self.has_other_paths && session.path_rank() == PathRank::Unusable;
        let is_shut = self.in_flight == 0 && !self.queue.is_empty() && !is_none;
        let span = self.overdue.on_look(session.look(), is_shut)?;
        Some(self.lose_unanswered(span))
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
