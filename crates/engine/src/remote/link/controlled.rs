//! The control session of a link, opened before the session and alive as long as it.

use super::{Link, LinkState};
use crate::core::reactor::Progress;
use crate::net::host::Host;
use crate::remote::Dialer;
use blockmux_proto::driver::session::Control;

impl<D: Dialer, H: Host> Link<D, H> {
    /// Whether a busy task polls its control session now. Polling costs a system call, so it is
    /// done every [`CONTROL_EVERY`] turns, but in each turn while the session waits for the control
    /// session.
    #[inline]
    pub(super) fn is_control_due(&mut self) -> bool {
        self.turns = self.turns.wrapping_add(1);
        let is_open = matches!(self.state, LinkState::Open { is_checked: true, .. });
        !is_open || self.turns.is_multiple_of(CONTROL_EVERY)
    }

    /// Runs the control session; if it is lost, so is the session.
    #[inline]
    pub(super) fn run_control(&mut self) -> Progress {
        let Some(control) = &mut self.control else { return Progress::Idle };
        let turn = control.turn();
        let refusal = self.dialer.control_refusal(&control.session);
        let has_failed = turn.is_err() || refusal.is_some();
        let is_about_secrets = has_failed && self.dialer.renews_control_secrets(&control.session);
        let has_prepared = self.dialer.take_preparation(&control.session);
        if let Some(size) = control.session.poll_size()
            && self.known.take_size(size, self.redirections.address())
        {
            self.group.is_changed.set(true);
            self.consumer.wake();
        }
        if let Some(rank) = control.session.poll_path_rank() {
            self.reported_rank = rank;
            if let LinkState::Open { session, .. } = &mut self.state {
                self.dialer.set_path_rank(session, rank);
            }
        }
        match (turn, refusal) {
            (_, Some(reason)) if is_about_secrets => self.lose(&reason),
            (_, Some(reason)) => self.give_up(&reason),
            (_, None) if has_prepared => {
                self.end_control();
                self.state = LinkState::Pausing { until: self.core.now() };
                Progress::More
            }
            (Ok(progress), None) => progress,
            (Err(broken), None) => self.lose_to(&broken),
        }
    }

    /// Dials the session once the control session is ready.
    pub(super) fn run_controlling(&mut self) -> Progress {
        let is_ready = self.control.as_ref().is_some_and(|control| control.session.is_ready());
        if is_ready { self.dial() } else { Progress::Idle }
    }

    /// Logs out the control session, because the session is over.
    pub(super) fn end_control(&mut self) {
        if let Some(mut control) = self.control.take() {
            control.end();
        }
    }
}

/// Turns of a busy task between two polls of its control session.
pub(super) const CONTROL_EVERY: u32 = 64;
