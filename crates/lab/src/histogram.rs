//! A latency histogram with small memory and a few nanoseconds per record.
//!
//! hdrhistogram keeps the distribution to three significant digits; minimum, maximum and sum are
//! exact. All memory (about 270 KiB, of which a run touches little) is allocated at creation.

use crate::result::Latency;

/// A distribution of latencies in nanoseconds. Each worker has its own; they are merged at the end.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: hdrhistogram::Histogram<u64>,
    min_ns: u64,
    max_ns: u64,
    sum_ns: u64,
}

/// Largest latency in percentiles, an hour; larger ones are clamped.
pub const MAX_NS: u64 = 3_600_000_000_000;

/// fio's default percentiles.
pub const PERCENTILES: [f64; 17] =
    [1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99];

impl Histogram {
    /// An empty one.
    #[must_use]
    pub fn new() -> Histogram {
        let counts = hdrhistogram::Histogram::new_with_bounds(1, MAX_NS, SIGNIFICANT_DIGITS);
        Histogram {
            counts: counts.expect("the bounds are constant and good"),
            min_ns: u64::MAX,
            max_ns: 0,
            sum_ns: 0,
        }
    }

    /// Adds one latency. Never allocates or fails; values above [`MAX_NS`] are clamped except in
    /// maximum and mean.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.counts.saturating_record(ns.min(MAX_NS));
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// Adds all values of `other`.
    pub fn merge(&mut self, other: &Histogram) {
        // All have the same bounds, so there is always room.
        self.counts.add(&other.counts).expect("same bounds");
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }

    /// Removes all values and keeps the memory: between ramp and run.
    pub fn clear(&mut self) {
        self.counts.reset();
        (self.min_ns, self.max_ns, self.sum_ns) = (u64::MAX, 0, 0);
    }

    /// Number of values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.len()
    }

    /// Summary; all zero and without percentiles if there are no values.
    #[must_use]
    pub fn latency(&self) -> Latency {
        if self.counts.is_empty() {
            return Latency::default();
        }
        // The upper end of a bucket may exceed every recorded value.
        let value = |percentile: f64| {
            let quantile = percentile / 100.0 * (1.0 - ROUNDING);
            self.counts.value_at_quantile(quantile).clamp(self.min_ns, self.max_ns)
        };
        Latency {
            min_ns: self.min_ns,
            max_ns: self.max_ns,
            mean_ns: self.sum_ns as f64 / self.count() as f64,
            stddev_ns: self.counts.stdev(),
            percentiles: PERCENTILES.map(|percentile| (percentile, value(percentile))).to_vec(),
        }
    }
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram::new()
    }
}

const SIGNIFICANT_DIGITS: u8 = 3;
/// 99.9 has no exact binary form: without this, 99.9% of 1000 would be the 1000th value, not the
/// 999th.
const ROUNDING: f64 = 1e-12;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(latencies: &[u64]) -> Histogram {
        let mut histogram = Histogram::new();
        latencies.iter().for_each(|&ns| histogram.record(ns));
        histogram
    }

    #[test]
    fn an_empty_histogram_has_no_figures() {
        assert_eq!(Histogram::new().latency(), Latency::default());
    }

    #[test]
    fn a_known_distribution_has_the_expected_figures() {
        let latency = of(&(1..=1000).collect::<Vec<u64>>()).latency();
        assert_eq!((latency.min_ns, latency.max_ns, latency.mean_ns), (1, 1000, 500.5));
        assert!((latency.stddev_ns - 288.67).abs() < 0.5);
        let at = |wanted| latency.percentiles.iter().find(|(percentile, _)| *percentile == wanted).unwrap().1;
        assert_eq!((at(1.0), at(50.0), at(99.0), at(99.9), at(99.99)), (10, 500, 990, 999, 1000));
    }

    #[test]
    fn percentiles_are_fios_and_ascend() {
        let latency = of(&[5, 70_000, 3_000_000]).latency();
        assert!(latency.percentiles.iter().map(|(percentile, _)| *percentile).eq(PERCENTILES));
        assert!(latency.percentiles.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1));
    }

    #[test]
    fn latencies_out_of_bounds_are_counted_at_the_bound() {
        let histogram = of(&[0, u64::MAX, u64::MAX]);
        let latency = histogram.latency();
        assert_eq!((histogram.count(), latency.min_ns, latency.max_ns), (3, 0, u64::MAX));
        let (_, p99) = latency.percentiles[12];
        assert!(p99.abs_diff(MAX_NS) < MAX_NS / 1000);
    }

    #[test]
    fn clearing_leaves_nothing() {
        let mut histogram = of(&[1, 2, 3]);
        histogram.clear();
        histogram.record(7);
        assert_eq!((histogram.count(), histogram.latency().min_ns, histogram.latency().max_ns), (1, 7, 7));
        assert_eq!(histogram.latency().mean_ns, 7.0);
    }

    proptest! {
        #[test]
        fn merging_is_the_same_as_recording_together(
            a in prop::collection::vec(0_u64..10_000_000_000, 0..50),
            b in prop::collection::vec(0_u64..10_000_000_000, 0..50),
        ) {
            let mut merged = of(&a);
            merged.merge(&of(&b));
            let (merged, together) = (merged.latency(), of(&[a, b].concat()).latency());
            prop_assert!((merged.stddev_ns - together.stddev_ns).abs() <= together.stddev_ns * 1e-9);
            prop_assert_eq!(Latency { stddev_ns: 0.0, ..merged }, Latency { stddev_ns: 0.0, ..together });
        }

        #[test]
        fn percentiles_are_right_to_three_digits(mut latencies in prop::collection::vec(0_u64..10_000_000_000, 1..200)) {
            let latency = of(&latencies).latency();
            latencies.sort_unstable();
            for (percentile, value) in latency.percentiles {
                let rank = ((percentile * 100.0).round() as usize * latencies.len()).div_ceil(10_000);
                let exact = latencies[rank.max(1) - 1];
                prop_assert!(value.abs_diff(exact) <= exact / 1000 + 1, "{percentile}: {value} for {exact}");
            }
        }
    }
}
