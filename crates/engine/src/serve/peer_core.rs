//! A core as the channels of one peer see it: memory is charged to the peer's account.

use crate::net::host::Host;
use blockmux_volume::{Core, Pool, Waker};
use std::any::Any;
use std::rc::Rc;
use std::time::Instant;

pub(crate) struct PeerCore<H: Host> {
    pub(crate) core: Rc<H>,
    pub(crate) pool: Pool,
}

impl<H: Host> PeerCore<H> {
    /// Whether tasks were asked to finish.
    #[inline]
    pub(crate) fn is_stopping(&self) -> bool {
        self.core.is_stopping()
    }
}

impl<H: Host> Core for PeerCore<H> {
    fn now(&self) -> Instant {
        self.core.now()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn wake_at(&self, when: Instant, waker: &Waker) {
        self.core.wake_at(when, waker);
    }

    fn as_any(&self) -> &dyn Any {
        self.core.as_any()
    }
}
