//! Latency histograms of requests. Each user of a volume has its own.

use blockmux_volume::Op;
use std::sync::atomic::{AtomicU64, Ordering};

/// Kinds of requests, each with a histogram of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// All others, such as write-zeroes, discards and flushes.
    Other,
}

impl RequestKind {
    /// The kind of an operation.
    #[must_use]
    #[inline]
    pub fn of(op: Op) -> RequestKind {
        match op {
            Op::Read => RequestKind::Read,
            Op::Write { .. } | Op::CompareAndWrite { .. } => RequestKind::Write,
            _ => RequestKind::Other,
        }
    }
}

/// Number of buckets of a histogram. Bucket `n` counts requests that took less than `2^n` times
/// [`LATENCY_UNIT_NS`]; the last bucket has no upper bound.
pub const LATENCY_BUCKETS: usize = 25;
/// Upper bound of the first bucket, in nanoseconds.
pub const LATENCY_UNIT_NS: u64 = 1 << UNIT_BITS;
const UNIT_BITS: u32 = 10;

/// One user's histograms.
#[derive(Default)]
pub(super) struct Latencies {
    reads: CoreHistogram,
    writes: CoreHistogram,
    others: CoreHistogram,
}

#[derive(Default)]
struct CoreHistogram {
    buckets: [AtomicU64; LATENCY_BUCKETS],
    sum_ns: AtomicU64,
}

/// A latency histogram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencyHistogram {
    /// Number of requests in each bucket.
    pub buckets: [u64; LATENCY_BUCKETS],
    /// Sum of all latencies, in nanoseconds.
    pub sum_ns: u64,
}

/// The histograms of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeLatency {
    /// Latencies of reads.
    pub reads: LatencyHistogram,
    /// Latencies of writes.
    pub writes: LatencyHistogram,
    /// Latencies of all others, such as write-zeroes, discards and flushes.
    pub others: LatencyHistogram,
}

impl Latencies {
    /// Counts a request that took `latency_ns` nanoseconds.
    #[inline]
    pub(super) fn count(&self, kind: RequestKind, latency_ns: u64) {
        let histogram = match kind {
            RequestKind::Read => &self.reads,
            RequestKind::Write => &self.writes,
            RequestKind::Other => &self.others,
        };
        let units = latency_ns.wrapping_shr(UNIT_BITS);
        let bucket = u64::BITS.saturating_sub(units.leading_zeros()) as usize;
        if let Some(count) = histogram.buckets.get(bucket.min(LATENCY_BUCKETS - 1)) {
            add(count, 1);
        }
        add(&histogram.sum_ns, latency_ns);
    }
}

impl CoreHistogram {
    fn added_to(&self, sum: &mut LatencyHistogram) {
        for (sum, more) in sum.buckets.iter_mut().zip(&self.buckets) {
            *sum = sum.wrapping_add(more.load(Ordering::Relaxed));
        }
        sum.sum_ns = sum.sum_ns.wrapping_add(self.sum_ns.load(Ordering::Relaxed));
    }
}

impl VolumeLatency {
    /// The histogram of each kind, with the kind's name.
    #[must_use]
    pub fn by_kind(&self) -> [(&'static str, &LatencyHistogram); 3] {
        [("read", &self.reads), ("write", &self.writes), ("other", &self.others)]
    }

    /// The sum of both.
    #[must_use]
    pub fn plus(&self, more: &VolumeLatency) -> VolumeLatency {
        VolumeLatency {
            reads: self.reads.plus(&more.reads),
            writes: self.writes.plus(&more.writes),
            others: self.others.plus(&more.others),
        }
    }

    pub(super) fn add(&mut self, more: &Latencies) {
        more.reads.added_to(&mut self.reads);
        more.writes.added_to(&mut self.writes);
        more.others.added_to(&mut self.others);
    }
}

impl LatencyHistogram {
    /// The sum of both.
    #[must_use]
    pub fn plus(&self, more: &LatencyHistogram) -> LatencyHistogram {
        let mut both = *self;
        both.buckets.iter_mut().zip(more.buckets).for_each(|(sum, more)| *sum = sum.wrapping_add(more));
        both.sum_ns = both.sum_ns.wrapping_add(more.sum_ns);
        both
    }

    /// The requests that were counted since `before`.
    #[must_use]
    pub fn since(&self, before: &LatencyHistogram) -> LatencyHistogram {
        let mut later = *self;
        later.buckets.iter_mut().zip(before.buckets).for_each(|(now, then)| *now = now.saturating_sub(then));
        later.sum_ns = later.sum_ns.saturating_sub(before.sum_ns);
        later
    }

    /// Number of requests.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The upper bound of bucket `nth` in nanoseconds; `None` for the last bucket.
    #[must_use]
    pub fn bound_ns(nth: usize) -> Option<u64> {
        (nth < LATENCY_BUCKETS - 1).then(|| LATENCY_UNIT_NS.wrapping_shl(nth as u32))
    }

    /// The latency in nanoseconds that the given share of the requests did not exceed, interpolated
    /// within its bucket; `None` without requests.
    #[must_use]
    pub fn quantile_ns(&self, share: f64) -> Option<f64> {
        let rank = share * self.count() as f64;
        let (mut below, mut lower) = (0.0, 0.0);
        for (nth, own) in self.buckets.iter().enumerate() {
            let (own, upper) = (*own as f64, Self::bound_ns(nth).map_or(lower, |bound| bound as f64));
            if own > 0.0 && below + own >= rank {
                return Some(lower + (upper - lower) * ((rank - below).max(0.0) / own));
            }
            below += own;
            lower = upper;
        }
        None
    }
}

/// Adds without a locked instruction, because only one core writes the counter.
#[inline]
pub(super) fn add(count: &AtomicU64, more: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_counted_in_the_first_bucket_that_it_fits() {
        let latencies = Latencies::default();
        for ns in [0, 1023, 1024, 2047, 2048, 1 << 33, u64::MAX] {
            latencies.count(RequestKind::Write, ns);
        }
        let mut sum = VolumeLatency::default();
        sum.add(&latencies);
        let writes = sum.writes;
        assert_eq!((writes.buckets[..3].to_vec(), writes.buckets[24], writes.count()), (vec![2, 2, 1], 2, 7));
        assert_eq!(sum.reads.count(), 0);
        let bounds: Vec<_> = (0..LATENCY_BUCKETS).map(LatencyHistogram::bound_ns).collect();
        assert_eq!(
            (bounds[0], bounds[1], bounds[23], bounds[24]),
            (Some(1024), Some(2048), Some(1 << 33), None)
        );
    }

    #[test]
    fn quantiles_lie_within_the_bucket_of_their_request() {
        let mut histogram = LatencyHistogram::default();
        assert_eq!(histogram.quantile_ns(0.5), None);
        (histogram.buckets[3], histogram.buckets[10]) = (90, 10);
        assert_eq!(histogram.quantile_ns(0.45), Some(4096.0 + 2048.0));
        assert_eq!(histogram.quantile_ns(0.9), Some(8192.0));
        let p99 = histogram.quantile_ns(0.99).unwrap();
        assert!((512.0 * 1024.0..=1024.0 * 1024.0).contains(&p99), "{p99}");
        let more = LatencyHistogram { sum_ns: 5, ..histogram };
        assert_eq!(more.plus(&histogram).since(&histogram), more);
    }
}
