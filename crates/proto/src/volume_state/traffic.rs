//! I/O counters of a volume. Each user has its own, so that cores do not share cache lines.

use super::VolumeState;
use blockmux_volume::{Io, Op};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// I/O counters of a volume since its export, of all current and past users.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeTraffic {
    /// Number of current users; a connection counts from its first I/O on.
    pub users: u64,
    /// Number of reads.
    pub reads: u64,
    /// Bytes of all reads.
    pub read_bytes: u64,
    /// Number of writes.
    pub writes: u64,
    /// Bytes of all writes.
    pub written_bytes: u64,
    /// Number of other operations: write-zeroes, discards, flushes and the rest.
    pub others: u64,
    /// Number of write-zeroes and discards, which are part of `others`.
    pub cleared: u64,
    /// Number of failed operations of all kinds.
    pub failed: u64,
}

/// Counters of one user on one core; the volume's sum includes them also after the drop.
pub struct Meter {
    served: Arc<VolumeState>,
    counts: Arc<CoreCounters>,
}

/// Counters of one user of a shared session, on one core; no volume's sum includes them.
#[derive(Default)]
pub(crate) struct UserMeter(Arc<CoreCounters>);

/// Reads one user's counters, also after its end.
#[derive(Clone)]
pub struct MeterReader(Arc<CoreCounters>);

impl UserMeter {
    /// Counts an operation.
    #[inline]
    pub(crate) fn count(&self, io: &Io) {
        self.0.count(io);
    }

    /// Counts a failed operation.
    #[cold]
    pub(crate) fn fail(&self) {
        add(&self.0.failed, 1);
    }

    /// A handle to read these counters from another thread.
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
    /// Returns `sum` plus these counters.
    #[must_use]
    pub fn added_to(&self, sum: VolumeTraffic) -> VolumeTraffic {
        sum.with(&self.0)
    }
}

/// All counters of a volume.
#[derive(Default)]
pub(super) struct Meters(Mutex<(VolumeTraffic, Vec<Arc<CoreCounters>>)>);

/// Counters of one user, in cache lines of their own.
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
    /// Counters for another user of the volume.
    #[must_use]
    pub fn new(served: &Arc<VolumeState>) -> Meter {
        let counts = Arc::new(CoreCounters::default());
        served.meters.lock().1.push(counts.clone());
        Meter { served: served.clone(), counts }
    }

    /// A handle to read these counters from another thread.
    #[must_use]
    pub fn reader(&self) -> MeterReader {
        MeterReader(self.counts.clone())
    }

    /// Counts an operation.
    #[inline]
    pub fn count(&self, io: &Io) {
        self.counts.count(io);
    }

    /// Counts a failed operation.
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

/// Adds without a locked instruction, because only one core writes the counter.
#[inline]
fn add(count: &AtomicU64, more: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}
