//! I/O counters of queues, for the SMART / Health log.
//!
//! Each queue has its own counters, which no other core writes; reading the log adds them up.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The counters of all queues of a subsystem.
#[derive(Default)]
pub(crate) struct SubsystemTraffic {
    shared: Arc<SharedTraffic>,
}

#[derive(Default)]
struct SharedTraffic {
    live: Mutex<LiveQueues>,
}

#[derive(Default)]
struct LiveQueues {
    queues: Vec<Arc<QueueCounters>>,
    /// Sums of the queues that have ended.
    ended: TrafficTotals,
}

/// Sums of counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TrafficTotals {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    /// In bytes.
    pub(crate) read_bytes: u64,
    /// In bytes.
    pub(crate) written_bytes: u64,
    /// Reads and writes that failed with a media error.
    pub(crate) media_errors: u64,
}

/// The counters of one queue, in a cache line of their own.
#[derive(Default)]
#[repr(align(128))]
struct QueueCounters {
    reads: AtomicU64,
    writes: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    media_errors: AtomicU64,
}

/// A queue's handle to its counters.
pub(crate) struct QueueCounts {
    shared: Arc<SharedTraffic>,
    counters: Arc<QueueCounters>,
}

impl SubsystemTraffic {
    /// Creates the counters of a new queue.
    pub(crate) fn counts(&self) -> QueueCounts {
        let counters = Arc::<QueueCounters>::default();
        self.shared.live(|live| live.queues.push(counters.clone()));
        QueueCounts { shared: self.shared.clone(), counters }
    }

    /// The sums up to now.
    pub(crate) fn totals(&self) -> TrafficTotals {
        self.shared
            .live(|live| live.queues.iter().fold(live.ended, |sum, counters| sum.plus(counters.totals())))
    }
}

impl QueueCounts {
    /// Counts a completed read.
    #[inline]
    pub(crate) fn read(&self, bytes: u64) {
        add(&self.counters.reads, 1);
        add(&self.counters.read_bytes, bytes);
    }

    /// Counts a completed write.
    #[inline]
    pub(crate) fn wrote(&self, bytes: u64) {
        add(&self.counters.writes, 1);
        add(&self.counters.written_bytes, bytes);
    }

    /// Counts a media error.
    pub(crate) fn failed(&self) {
        add(&self.counters.media_errors, 1);
    }
}

impl Drop for QueueCounts {
    fn drop(&mut self) {
        self.shared.live(|live| {
            live.queues.retain(|counters| !Arc::ptr_eq(counters, &self.counters));
            live.ended = live.ended.plus(self.counters.totals());
        });
    }
}

impl SharedTraffic {
    fn live<R>(&self, look: impl FnOnce(&mut LiveQueues) -> R) -> R {
        look(&mut self.live.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl QueueCounters {
    fn totals(&self) -> TrafficTotals {
        TrafficTotals {
            reads: self.reads.load(Ordering::Relaxed),
            writes: self.writes.load(Ordering::Relaxed),
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
            written_bytes: self.written_bytes.load(Ordering::Relaxed),
            media_errors: self.media_errors.load(Ordering::Relaxed),
        }
    }
}

impl TrafficTotals {
    fn plus(self, other: TrafficTotals) -> TrafficTotals {
        TrafficTotals {
            reads: self.reads.saturating_add(other.reads),
            writes: self.writes.saturating_add(other.writes),
            read_bytes: self.read_bytes.saturating_add(other.read_bytes),
            written_bytes: self.written_bytes.saturating_add(other.written_bytes),
            media_errors: self.media_errors.saturating_add(other.media_errors),
        }
    }
}

/// Adds to a counter that no other core writes.
#[inline]
fn add(count: &AtomicU64, more: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counters_of_a_queue_outlive_it() {
        let traffic = SubsystemTraffic::default();
        let (one, other) = (traffic.counts(), traffic.counts());
        one.read(512);
        one.read(1024);
        other.wrote(4096);
        other.failed();
        let totals =
            TrafficTotals { reads: 2, writes: 1, read_bytes: 1536, written_bytes: 4096, media_errors: 1 };
        assert_eq!(traffic.totals(), totals);
        drop(one);
        assert_eq!(traffic.totals(), totals);
    }
}
