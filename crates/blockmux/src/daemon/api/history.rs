//! I/O rates and latencies of the last hour: a ring of samples, taken by the API's thread.

use crate::api::history::{History, Rates, Series};
use crate::daemon::control::{Snapshot, VolumeCounters};
use blockmux_proto::volume_state::{LatencyHistogram, VolumeTraffic};
use jiff::Timestamp;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The samples of all volumes together, and of each volume.
#[derive(Default)]
pub(super) struct Samples {
    all: SampleSeries,
    volumes: Vec<(String, SampleSeries)>,
    /// Ticks since the last point.
    ticks: u32,
}

/// The samples of one series.
#[derive(Default)]
struct SampleSeries {
    /// The sample of the last tick.
    last: Option<Sample>,
    /// The sample of the last point.
    last_point: Option<Sample>,
    now: Rates,
    /// Points, oldest first; at most [`POINTS`].
    points: VecDeque<Rates>,
}

#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    traffic: VolumeTraffic,
    latency: LatencyHistogram,
}

impl Samples {
    /// Adds a sample; called once in each [`TICK`].
    pub(super) fn add(&mut self, snapshot: &Snapshot, at: Instant) {
        self.ticks += 1;
        let is_point = self.ticks >= TICKS_PER_POINT;
        if is_point {
            self.ticks = 0;
        }
        let mut sum = Sample { at, traffic: VolumeTraffic::default(), latency: LatencyHistogram::default() };
        self.volumes.retain(|(name, _)| snapshot.volumes.iter().any(|volume| volume.name == *name));
        for volume in &snapshot.volumes {
            let sample = sample(volume, at);
            sum.traffic = sum.traffic.plus(sample.traffic);
            sum.latency = sum.latency.plus(&sample.latency);
            let known = self.volumes.iter().position(|(name, _)| *name == volume.name);
            let at = known.unwrap_or(self.volumes.len());
            if known.is_none() && at < MAX_VOLUMES {
                self.volumes.push((volume.name.clone(), SampleSeries::default()));
            }
            if let Some((_, series)) = self.volumes.get_mut(at) {
                series.add(sample, is_point);
            }
        }
        self.all.add(sum, is_point);
    }

    /// All series, in the form of the API.
    pub(super) fn history(&self) -> History {
        let series = |name: &str, samples: &SampleSeries| Series {
            name: name.to_owned(),
            now: samples.now,
            points: samples.points.iter().copied().chain(samples.first_point()).collect(),
        };
        History {
            at: format!("{:.0}", Timestamp::now()),
            interval_seconds: TICKS_PER_POINT * TICK.as_secs() as u32,
            total: series("", &self.all),
            volumes: self.volumes.iter().map(|(name, samples)| series(name, samples)).collect(),
        }
    }
}

impl SampleSeries {
    /// What the first point is so far, until it is complete.
    fn first_point(&self) -> Option<Rates> {
        let (from, to) = self.last_point.as_ref().zip(self.last.as_ref())?;
        (self.points.is_empty() && from.at < to.at).then(|| rates(from, to))
    }

    fn add(&mut self, sample: Sample, is_point: bool) {
        // Sums decrease when a volume is removed.
        let is_less = |before: &Sample| {
            before.traffic.reads > sample.traffic.reads || before.traffic.writes > sample.traffic.writes
        };
        if self.last.as_ref().is_some_and(is_less) {
            (self.last, self.last_point) = (Some(sample), Some(sample));
            return;
        }
        if let Some(last) = self.last.replace(sample) {
            self.now = rates(&last, &sample);
        }
        let first = *self.last_point.get_or_insert(sample);
        if is_point && first.at < sample.at {
            if self.points.len() >= POINTS {
                self.points.pop_front();
            }
            self.points.push_back(rates(&first, &sample));
            self.last_point = Some(sample);
        }
    }
}

fn sample(volume: &VolumeCounters, at: Instant) -> Sample {
    let latency = volume.latency();
    let latency = latency.reads.plus(&latency.writes).plus(&latency.others);
    let sum = volume.origins.iter().fold(VolumeTraffic::default(), |sum, one| sum.plus(one.traffic));
    Sample { at, traffic: sum, latency }
}

/// The rates between two samples, per second.
fn rates(from: &Sample, to: &Sample) -> Rates {
    let seconds = to.at.saturating_duration_since(from.at).as_secs_f64().max(1e-3);
    let rate = |count: fn(&VolumeTraffic) -> u64| {
        (count(&to.traffic).saturating_sub(count(&from.traffic)) as f64 / seconds).round() as u64
    };
    let latency = to.latency.since(&from.latency);
    let micros = |share| latency.quantile_ns(share).map(|ns| (ns / 100.0).round() / 10.0);
    Rates {
        reads: rate(|traffic| traffic.reads),
        writes: rate(|traffic| traffic.writes),
        others: rate(|traffic| traffic.others),
        read_bytes: rate(|traffic| traffic.read_bytes),
        written_bytes: rate(|traffic| traffic.written_bytes),
        failed: to.traffic.failed.saturating_sub(from.traffic.failed),
        throttled: rate(|traffic| traffic.throttled),
        p50_us: micros(0.5),
        p99_us: micros(0.99),
    }
}

/// Interval of samples.
pub(super) const TICK: Duration = Duration::from_secs(1);
const TICKS_PER_POINT: u32 = 10;
/// Number of points: one hour.
const POINTS: usize = 360;
/// Maximum number of volumes with their own series.
const MAX_VOLUMES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::volume_state::OriginTraffic;

    fn snapshot(reads: u64) -> Snapshot {
        let mut sum = OriginTraffic::default();
        let (read_bytes, throttled) = (reads * 4096, reads / 4);
        sum.traffic = VolumeTraffic { reads, read_bytes, throttled, ..VolumeTraffic::default() };
        sum.latency.reads.buckets[5] = reads;
        let volume = VolumeCounters { name: "a".to_owned(), origins: vec![sum], ..VolumeCounters::default() };
        Snapshot { volumes: vec![volume], ..Snapshot::default() }
    }

    #[test]
    fn an_hour_is_kept_at_ten_seconds_a_point_along_with_the_last_second() {
        let (mut samples, begun) = (Samples::default(), Instant::now());
        samples.add(&snapshot(0), begun);
        assert!(samples.history().total.points.is_empty());
        samples.add(&snapshot(70), begun + TICK);
        samples.add(&snapshot(140), begun + 2 * TICK);
        let first = samples.history();
        assert_eq!(
            (first.total.points.len(), first.volumes[0].points[0].reads),
            (1, 70),
            "it is shown at once"
        );
        samples = Samples::default();
        for tick in 0..4000_u64 {
            samples.add(&snapshot(tick * 100), begun + tick as u32 * TICK);
        }
        let History { interval_seconds, total, volumes, .. } = samples.history();
        assert_eq!((interval_seconds, total.points.len(), volumes[0].points.len()), (10, POINTS, POINTS));
        assert_eq!((total.now.reads, total.now.read_bytes, total.points[0].reads), (100, 409_600, 100));
        assert_eq!((total.now.throttled, total.now.throttled_percent()), (25, Some(25)));
        let p50 = volumes[0].now.p50_us.unwrap();
        assert!((16.384..=32.768).contains(&p50), "{p50}");
        // The series of a volume that was removed and added again starts anew.
        samples.add(&snapshot(5), begun + 4000 * TICK);
        samples.add(&snapshot(6), begun + 4001 * TICK);
        assert_eq!(samples.history().volumes[0].now.reads, 1);
        samples.add(&Snapshot::default(), begun + 4002 * TICK);
        assert!(samples.history().volumes.is_empty());
    }
}
