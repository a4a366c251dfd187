//! The measured period, as both threads see it.

use crate::cpu::{CpuTime, CpuUsage};
use std::sync::atomic::{AtomicU8, Ordering};

/// Opened and closed by the client, read by the server.
pub(super) struct MeasuredPeriod {
    state: AtomicU8,
}

/// CPU time of one thread within the period.
#[derive(Default)]
pub(super) struct CpuWatch {
    begun: Option<CpuTime>,
    /// CPU time from opening to closing; `None` if it has not seen both.
    pub(super) used: Option<CpuUsage>,
}

impl MeasuredPeriod {
    pub(super) fn new() -> MeasuredPeriod {
        MeasuredPeriod { state: AtomicU8::new(RAMP) }
    }

    pub(super) fn open(&self) {
        self.state.store(OPEN, Ordering::Release);
    }

    pub(super) fn close(&self) {
        self.state.store(CLOSED, Ordering::Release);
    }
}

impl CpuWatch {
    /// Samples the thread's CPU time if the period has just opened or closed.
    #[inline]
    pub(super) fn watch(&mut self, period: &MeasuredPeriod) {
        let state = period.state.load(Ordering::Acquire);
        if self.begun.is_none() && state != RAMP {
            self.begun = Some(CpuTime::of_this_thread());
        }
        if self.used.is_none() && state == CLOSED {
            self.used = self.begun.map(|begun| CpuTime::of_this_thread().since(begun));
        }
    }
}

const RAMP: u8 = 0;
const OPEN: u8 = 1;
const CLOSED: u8 = 2;
