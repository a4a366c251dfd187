//! A target's session with its channels, whatever carries it to its peers: what the tasks of
//! connections and of frames have in common.

use crate::core::reactor::Progress;
use crate::serve::channels::Channels;
use blockmux_proto::driver::target::TargetLifecycle;
use blockmux_proto::exports::Exports;
use blockmux_proto::volume_state::Origin;
use blockmux_volume::{Core, Waker};
use std::rc::Rc;
use std::time::Instant;

pub(crate) struct ServedSession<S> {
    pub(crate) session: S,
    pub(crate) channels: Channels,
}

impl<S: TargetLifecycle> ServedSession<S> {
    /// Starts a session, whose volume ids are indices of `exports`. Its I/O is counted for
    /// `origin`.
    pub(crate) fn start(
        mut session: S,
        exports: Exports,
        core: Rc<dyn Core>,
        waker: &Waker,
        origin: Origin,
    ) -> ServedSession<S> {
        session.on_start(waker, core.now());
        ServedSession { session, channels: Channels::new(exports, core, waker.clone(), origin) }
    }

    #[inline]
    pub(crate) fn move_io(&mut self, now: Instant) -> Progress {
        self.channels.move_io(self.session.source(), now)
    }

    /// Asks the session to end. Limits throttle nothing from now on.
    pub(crate) fn stop(&mut self, now: Instant) {
        self.session.on_stop(now);
        self.channels.lift_limits();
    }
}
