//! What has been done on a volume: counters that each of its users keeps for itself, so that cores
//! share none of them.

use super::VolumeState;
use blockmux_volume::{Io, Op};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What has been done on a volume since it is served, by all who use it or used it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeTraffic {
    /// How many use it now: a connection counts from its first I/O on.
    pub users: u64,
    /// Reads.
    pub reads: u64,
    /// Bytes that they asked for.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes that they brought.
    pub written_bytes: u64,
    /// Zeroing, discards, flushes and all else.
    pub others: u64,
    /// Of these, zeroing and discards: what changes the volume's content or its mapping.
    pub cleared: u64,
    /// Of all of them, how many failed.
    pub failed: u64,
}

/// One user's counters, on one core; they stay in the sum when it is dropped.
pub struct Meter {
    served: Arc<VolumeState>,
    counts: Arc<CoreCounters>,
}

/// Counters of one of several users of a session, on one core; they are part of no volume's sum.
#[derive(Default)]
pub(crate) struct UserMeter(Arc<CoreCounters>);

/// Reads one user's counters, also after that user has ended.
#[derive(Clone)]
pub struct MeterReader(Arc<CoreCounters>);

impl UserMeter {
    /// Counts a request.
    #[inline]
    pub(crate) fn count(&self, io: &Io) {
        self.0.count(io);
    }

    /// Counts one that failed.
    #[cold]
    pub(crate) fn fail(&self) {
        add(&self.0.failed, 1);
    }

    /// Reads these counters from another thread.
    pub(crate) fn reader(&self) -> MeterReader {
        MeterReader(self.0.clone())
    }
}

impl PartialEq for MeterReader {
    fn eq(&self, other: &MeterReader) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for MeterReader {}

impl fmt::Debug for MeterReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.added_to(VolumeTraffic::default()).fmt(f)
    }
}

impl MeterReader {
    /// What was counted, added to `sum`.
    #[must_use]
    pub fn added_to(&self, sum: VolumeTraffic) -> VolumeTraffic {
        sum.with(&self.0)
    }
}

/// All counters of a volume.
#[derive(Default)]
pub(super) struct Meters(Mutex<(VolumeTraffic, Vec<Arc<CoreCounters>>)>);

/// Nobody else's are in the same line of a processor's cache.
#[derive(Default)]
#[repr(align(128))]
struct CoreCounters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    others: AtomicU64,
    cleared: AtomicU64,
    failed: AtomicU64,
}

impl CoreCounters {
    #[inline]
    fn count(&self, io: &Io) {
        match io.op {
            Op::Read => {
                add(&self.reads, 1);
                add(&self.read_bytes, io.len);
            }
            Op::Write { .. } => {
                add(&self.writes, 1);
                add(&self.written_bytes, io.len);
            }
            op => {
                add(&self.others, 1);
                add(&self.cleared, op.is_write().into());
            }
        }
    }
}

impl Meter {
    /// Counters for one more user.
    #[must_use]
    pub fn new(served: &Arc<VolumeState>) -> Meter {
        let counts = Arc::new(CoreCounters::default());
        served.meters.lock().1.push(counts.clone());
        Meter { served: served.clone(), counts }
    }

    /// Reads these counters from another thread.
    #[must_use]
    pub fn reader(&self) -> MeterReader {
        MeterReader(self.counts.clone())
    }

    /// Counts a request.
    #[inline]
    pub fn count(&self, io: &Io) {
        self.counts.count(io);
    }

    /// Counts one that failed.
    #[cold]
    pub fn fail(&self) {
        add(&self.counts.failed, 1);
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        let mut all = self.served.meters.lock();
        all.0 = all.0.with(&self.counts);
        all.1.retain(|counts| !Arc::ptr_eq(counts, &self.counts));
    }
}

impl Meters {
    pub(super) fn sum(&self) -> VolumeTraffic {
        let all = self.lock();
        let sum = all.1.iter().fold(all.0, |sum, counts| sum.with(counts));
        VolumeTraffic { users: all.1.len() as u64, ..sum }
    }

    fn lock(&self) -> MutexGuard<'_, (VolumeTraffic, Vec<Arc<CoreCounters>>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl VolumeTraffic {
    fn with(self, counts: &CoreCounters) -> VolumeTraffic {
        let sum = |so_far: u64, count: &AtomicU64| so_far.wrapping_add(count.load(Ordering::Relaxed));
        VolumeTraffic {
            users: self.users,
            reads: sum(self.reads, &counts.reads),
            read_bytes: sum(self.read_bytes, &counts.read_bytes),
            writes: sum(self.writes, &counts.writes),
            written_bytes: sum(self.written_bytes, &counts.written_bytes),
            others: sum(self.others, &counts.others),
            cleared: sum(self.cleared, &counts.cleared),
            failed: sum(self.failed, &counts.failed),
        }
    }
}

/// Without a locked instruction: one core alone writes it.
#[inline]
fn add(count: &AtomicU64, more: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}
