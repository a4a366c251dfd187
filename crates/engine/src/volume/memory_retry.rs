//! Retry timer of requests that wait for memory.

use blockmux_volume::{Core, Waker};
use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The retry timer of a channel. It is needed for channels without a peer account, and for requests
/// that wait for their own peer's credit: the pool wakes neither.
pub(super) struct MemoryRetry {
    core: Rc<dyn Core>,
    fires_at: Cell<Option<Instant>>,
    pause: Cell<Duration>,
}

impl MemoryRetry {
    pub(super) fn new(core: &Rc<dyn Core>) -> MemoryRetry {
        MemoryRetry { core: core.clone(), fires_at: Cell::new(None), pause: Cell::new(SHORTEST) }
    }

    /// If requests wait, wakes `waker` after a delay that grows each time.
    pub(super) fn arm(&self, waits: bool, waker: &Waker) {
        if !waits {
            return self.pause.set(SHORTEST);
        }
        let now = self.core.now();
        if self.fires_at.get().is_none_or(|when| when <= now) {
            let pause = self.pause.get();
            if self.core.pool().account().is_some() {
                self.pause.set((pause * 2).min(MAX_PAUSE));
            }
            self.fires_at.set(Some(now + pause));
            self.core.wake_at(now + pause, waker);
        }
    }
}

const SHORTEST: Duration = Duration::from_micros(200);
/// Longest delay: thousands of channels may wait, and together they must not use up a CPU.
const MAX_PAUSE: Duration = Duration::from_millis(100);
