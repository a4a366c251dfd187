//! The measured time, as both threads see it.

use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

/// Opened and closed by the client, watched by the server.
pub(super) struct Window {
    state: AtomicU8,
}

/// One thread's processor time within the window.
#[derive(Default)]
pub(super) struct CpuTime {
    begun: Option<Duration>,
    total: Option<Duration>,
}

impl Window {
    pub(super) fn new() -> Window {
        Window { state: AtomicU8::new(RAMP) }
    }

    pub(super) fn open(&self) {
        self.state.store(OPEN, Ordering::Release);
    }

    pub(super) fn close(&self) {
        self.state.store(CLOSED, Ordering::Release);
    }
}

impl CpuTime {
    /// Notes where the calling thread stands if the window has just opened or closed.
    #[inline]
    pub(super) fn watch(&mut self, window: &Window) {
        let state = window.state.load(Ordering::Acquire);
        if self.begun.is_none() && state != RAMP {
            self.begun = Some(thread_cpu_time());
        }
        if self.total.is_none() && state == CLOSED {
            self.total = self.begun.map(|begun| thread_cpu_time().saturating_sub(begun));
        }
    }

    /// Its time from the opening to the closing; `None` if it has not seen both.
    pub(super) fn total(&self) -> Option<Duration> {
        self.total
    }
}

fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

const RAMP: u8 = 0;
const OPEN: u8 = 1;
const CLOSED: u8 = 2;
