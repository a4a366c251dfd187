//! I/O counters of a volume. Each user has its own, so that cores do not share cache lines.

use super::VolumeState;
use super::latency::{Latencies, RequestKind, VolumeLatency, add};
use blockmux_volume::{Io, IoError, Op};
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
    /// Number of requests that are throttled now.
    pub throttled_now: u64,
    /// Number of requests that were throttled.
    pub throttled: u64,
    /// Time for which requests were throttled, in nanoseconds.
    pub throttled_ns: u64,
}

/// The listener through which users reach a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The listener's protocol; empty if not known.
    pub protocol: &'static str,
    /// The listener's address; empty if it has none.
    pub listener: Arc<str>,
}

/// Counters of all users of a volume that came through one listener.
#[derive(Clone, Debug, Default)]
pub struct OriginTraffic {
    /// The listener.
    pub origin: Origin,
    /// I/O counters.
    pub traffic: VolumeTraffic,
    /// Latencies of their requests.
    pub latency: VolumeLatency,
    /// Number of failed requests of each kind in [`ERROR_KINDS`].
    pub failures: [u64; ERROR_KINDS.len()],
    /// Number of requests that had not completed when their user ended.
    abandoned: u64,
}

/// Counters of one user on one core; the volume's sum includes them also after the drop.
pub struct Meter {
    volume_state: Arc<VolumeState>,
    origin: Origin,
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
pub(super) struct Meters(Mutex<AllCounters>);

#[derive(Default)]
struct AllCounters {
    /// Counters of users that have ended, by origin.
    ended: Vec<OriginTraffic>,
    users: Vec<(Origin, Arc<CoreCounters>)>,
}

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
    throttled_now: AtomicU64,
    throttled: AtomicU64,
    throttled_ns: AtomicU64,
    failures: [AtomicU64; ERROR_KINDS.len()],
    latencies: Latencies,
}

impl CoreCounters {
    #[inline]
    fn count(&self, io: &Io) {
        match io.op {
            Op::Read => {
                add(&self.reads, 1);
                add(&self.read_bytes, io.len);
            }
            Op::Write { .. } | Op::CompareAndWrite { .. } => {
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
    /// Counters for another user of the volume, which comes from `origin`.
    #[must_use]
    pub fn new(volume_state: &Arc<VolumeState>, origin: Origin) -> Meter {
        let counts = Arc::new(CoreCounters::default());
        volume_state.meters.lock().users.push((origin.clone(), counts.clone()));
        Meter { volume_state: volume_state.clone(), origin, counts }
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

    /// Counts a request that took `latency_ns` nanoseconds.
    #[inline]
    pub fn complete(&self, kind: RequestKind, latency_ns: u64) {
        self.counts.latencies.count(kind, latency_ns);
    }

    /// Counts a request that is throttled.
    #[cold]
    pub fn throttle(&self) {
        add(&self.counts.throttled_now, 1);
        // A reader of this count sees the other one too: see `ThrottledUser`.
        let throttled = &self.counts.throttled;
        throttled.store(throttled.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// Counts a request that starts or ends after it was throttled for `waited_ns` nanoseconds.
    #[cold]
    pub fn release(&self, waited_ns: u64) {
        let now = &self.counts.throttled_now;
        // After the request was counted as in flight: `Settling` waits for one or the other.
        now.store(now.load(Ordering::Relaxed).wrapping_sub(1), Ordering::Release);
        add(&self.counts.throttled_ns, waited_ns);
    }

    /// Counts a failed operation.
    #[cold]
    pub fn fail(&self, error: &IoError) {
        add(&self.counts.failed, 1);
        self.counts.failures.get(error_kind(error)).into_iter().for_each(|count| add(count, 1));
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        let mut own = OriginTraffic::default();
        own.add(&self.counts);
        let mut all = self.volume_state.meters.lock();
        all.users.retain(|(_, counts)| !Arc::ptr_eq(counts, &self.counts));
        let sum = all.of(&self.origin);
        self.counts.throttled_now.store(0, Ordering::Release);
        sum.add(&self.counts);
        sum.abandoned = sum.abandoned.wrapping_add(own.in_flight());
    }
}

impl AllCounters {
    /// The counters of ended users of an origin.
    fn of(&mut self, origin: &Origin) -> &mut OriginTraffic {
        let is_known = self.ended.iter().any(|ended| ended.origin == *origin);
        if !is_known {
            self.ended.push(OriginTraffic { origin: origin.clone(), ..OriginTraffic::default() });
        }
        let found = self.ended.iter_mut().find(|ended| ended.origin == *origin);
        found.expect("the origin was found or pushed")
    }
}

impl OriginTraffic {
    /// Number of requests that were submitted and have not completed.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        let VolumeTraffic { reads, writes, others, .. } = self.traffic;
        let begun = reads.wrapping_add(writes).wrapping_add(others);
        let completed = self.latency.by_kind().map(|(_, histogram)| histogram.count());
        let over = completed.into_iter().fold(self.abandoned, u64::wrapping_add);
        // Requests that completed between the two readings must not count as in flight.
        begun.saturating_sub(over)
    }

    fn add(&mut self, counts: &CoreCounters) {
        self.traffic = self.traffic.with(counts);
        self.latency.add(&counts.latencies);
        for (sum, count) in self.failures.iter_mut().zip(&counts.failures) {
            *sum = sum.wrapping_add(count.load(Ordering::Relaxed));
        }
    }
}

/// A user with throttled requests.
pub(super) struct ThrottledUser {
    counts: Arc<CoreCounters>,
    /// The number of its requests that had ever been throttled.
    total: u64,
}

impl ThrottledUser {
    /// Whether as many have been released since: requests of a user are released in order.
    pub(super) fn is_released(&self) -> bool {
        let throttled = self.counts.throttled.load(Ordering::Acquire);
        let now = self.counts.throttled_now.load(Ordering::Acquire);
        throttled.saturating_sub(now) >= self.total
    }
}

impl Meters {
    /// The users with throttled requests.
    pub(super) fn throttled(&self) -> Vec<ThrottledUser> {
        let all = self.lock();
        let users = all.users.iter().map(|(_, counts)| ThrottledUser {
            counts: counts.clone(),
            total: counts.throttled.load(Ordering::Acquire),
        });
        users.filter(|user| !user.is_released()).collect()
    }

    pub(super) fn sum(&self) -> VolumeTraffic {
        let all = self.lock();
        let ended = all.ended.iter().map(|ended| ended.traffic);
        let ended = ended.fold(VolumeTraffic::default(), VolumeTraffic::plus);
        let sum = all.users.iter().fold(ended, |sum, (_, counts)| sum.with(counts));
        VolumeTraffic { users: all.users.len() as u64, ..sum }
    }

    /// The sums of each origin, without the number of users.
    pub(super) fn by_origin(&self) -> Vec<OriginTraffic> {
        let all = self.lock();
        let mut sums = AllCounters { ended: all.ended.clone(), users: Vec::new() };
        for (origin, counts) in &all.users {
            let sum = sums.of(origin);
            sum.add(counts);
            sum.traffic.users = sum.traffic.users.saturating_add(1);
        }
        sums.ended
    }

    fn lock(&self) -> MutexGuard<'_, AllCounters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl VolumeTraffic {
    /// The sum of both.
    #[must_use]
    pub fn plus(self, more: VolumeTraffic) -> VolumeTraffic {
        let sum = u64::wrapping_add;
        VolumeTraffic {
            users: sum(self.users, more.users),
            reads: sum(self.reads, more.reads),
            read_bytes: sum(self.read_bytes, more.read_bytes),
            writes: sum(self.writes, more.writes),
            written_bytes: sum(self.written_bytes, more.written_bytes),
            others: sum(self.others, more.others),
            cleared: sum(self.cleared, more.cleared),
            failed: sum(self.failed, more.failed),
            throttled_now: sum(self.throttled_now, more.throttled_now),
            throttled: sum(self.throttled, more.throttled),
            throttled_ns: sum(self.throttled_ns, more.throttled_ns),
        }
    }

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
            throttled_now: sum(self.throttled_now, &counts.throttled_now),
            throttled: sum(self.throttled, &counts.throttled),
            throttled_ns: sum(self.throttled_ns, &counts.throttled_ns),
        }
    }
}

/// Names of the kinds of failures.
pub const ERROR_KINDS: [&str; 13] = [
    "out_of_range",
    "misaligned",
    "bad_length",
    "read_only",
    "unsupported",
    "reserved",
    "no_space",
    "medium",
    "no_memory",
    "path_lost",
    "aborted",
    "shutting_down",
    "fenced",
];

/// The index of an error's kind in [`ERROR_KINDS`].
#[must_use]
pub fn error_kind(error: &IoError) -> usize {
    match error {
        IoError::OutOfRange => 0,
        IoError::Misaligned => 1,
        IoError::BadLength => 2,
        IoError::ReadOnly => 3,
        IoError::Unsupported => 4,
        IoError::Reserved => 5,
        IoError::NoSpace => 6,
        IoError::Medium => 7,
        IoError::NoMemory => 8,
        IoError::PathLost => 9,
        IoError::Aborted => 10,
        IoError::ShuttingDown => 11,
        IoError::Fenced => 12,
    }
}
