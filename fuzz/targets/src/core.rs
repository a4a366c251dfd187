//! The least that volumes need of a core.

use blockmux_volume::{Core, Pool, Waker};
use std::any::Any;
use std::rc::Rc;
use std::time::Instant;

/// A core with this pool and nothing else.
pub(crate) fn core(pool: &Pool) -> Rc<dyn Core> {
    Rc::new(BareCore { pool: pool.clone() })
}

struct BareCore {
    pool: Pool,
}

impl Core for BareCore {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn wake_at(&self, _when: Instant, _waker: &Waker) {}

    fn as_any(&self) -> &dyn Any {
        self
    }
}
