//! What was done in the last hour: a ring of samples, taken by the API's thread.

use crate::ctl::{History, Rates, Series};
use crate::serve::control::{Figures, VolumeFigures};
use blockmux_proto::volume_state::{LatencyHistogram, VolumeTraffic};
use jiff::Timestamp;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The samples of all volumes together, and of each.
#[derive(Default)]
pub(super) struct Samples {
    all: Track,
    volumes: Vec<(String, Track)>,
    /// Ticks since the last point.
    ticks: u32,
}

/// The samples of one series.
#[derive(Default)]
struct Track {
    /// At the last tick.
    last: Option<Sample>,
    /// At the last point.
    last_point: Option<Sample>,
    now: Rates,
    /// Oldest first.
    points: VecDeque<Rates>,
}

#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    traffic: VolumeTraffic,
    latency: LatencyHistogram,
}

impl Samples {
    /// Takes a sample; called once in each [`TICK`].
    pub(super) fn take(&mut self, figures: &Figures, at: Instant) {
        self.ticks += 1;
        let is_point = self.ticks >= TICKS_PER_POINT;
        if is_point {
            self.ticks = 0;
        }
        let mut sum = Sample { at, traffic: VolumeTraffic::default(), latency: LatencyHistogram::default() };
        self.volumes.retain(|(name, _)| figures.volumes.iter().any(|volume| volume.name == *name));
        for volume in &figures.volumes {
            let sample = sample(volume, at);
            sum.traffic = sum.traffic.plus(sample.traffic);
            sum.latency = sum.latency.plus(&sample.latency);
            let known = self.volumes.iter().position(|(name, _)| *name == volume.name);
            let at = known.unwrap_or(self.volumes.len());
            if known.is_none() && at < MOST_VOLUMES {
                self.volumes.push((volume.name.clone(), Track::default()));
            }
            if let Some((_, track)) = self.volumes.get_mut(at) {
                track.take(sample, is_point);
            }
        }
        self.all.take(sum, is_point);
    }

    /// Everything, for a client.
    pub(super) fn history(&self) -> History {
        let series = |name: &str, track: &Track| Series {
            name: name.to_owned(),
            now: track.now,
            points: track.points.iter().copied().collect(),
        };
        History {
            at: format!("{:.0}", Timestamp::now()),
            interval_seconds: TICKS_PER_POINT * TICK.as_secs() as u32,
            total: series("", &self.all),
            volumes: self.volumes.iter().map(|(name, track)| series(name, track)).collect(),
        }
    }
}

impl Track {
    fn take(&mut self, sample: Sample, is_point: bool) {
        // A removed volume takes its counts along.
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

fn sample(volume: &VolumeFigures, at: Instant) -> Sample {
    let latency = volume.latency();
    let latency = latency.reads.plus(&latency.writes).plus(&latency.others);
    let sum = volume.origins.iter().fold(VolumeTraffic::default(), |sum, one| sum.plus(one.traffic));
    Sample { at, traffic: sum, latency }
}

/// What was done between two samples, per second.
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
        p50_us: micros(0.5),
        p99_us: micros(0.99),
    }
}

/// Interval of samples.
pub(super) const TICK: Duration = Duration::from_secs(1);
const TICKS_PER_POINT: u32 = 10;
/// An hour.
const POINTS: usize = 360;
/// Volumes with series of their own.
const MOST_VOLUMES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::volume_state::OriginTraffic;

    fn figures(reads: u64) -> Figures {
        let mut sum = OriginTraffic::default();
        sum.traffic = VolumeTraffic { reads, read_bytes: reads * 4096, ..VolumeTraffic::default() };
        sum.latency.reads.buckets[5] = reads;
        let volume = VolumeFigures { name: "a".to_owned(), origins: vec![sum], ..VolumeFigures::default() };
        Figures { volumes: vec![volume], ..Figures::default() }
    }

    #[test]
    fn an_hour_is_kept_at_ten_seconds_a_point_beside_the_last_second() {
        let (mut samples, begun) = (Samples::default(), Instant::now());
        for tick in 0..4000_u64 {
            samples.take(&figures(tick * 100), begun + tick as u32 * TICK);
        }
        let History { interval_seconds, total, volumes, .. } = samples.history();
        assert_eq!((interval_seconds, total.points.len(), volumes[0].points.len()), (10, POINTS, POINTS));
        assert_eq!((total.now.reads, total.now.read_bytes, total.points[0].reads), (100, 409_600, 100));
        let p50 = volumes[0].now.p50_us.unwrap();
        assert!((16.384..=32.768).contains(&p50), "{p50}");
        // A volume that comes again under its name begins anew.
        samples.take(&figures(5), begun + 4000 * TICK);
        samples.take(&figures(6), begun + 4001 * TICK);
        assert_eq!(samples.history().volumes[0].now.reads, 1);
        samples.take(&Figures::default(), begun + 4002 * TICK);
        assert!(samples.history().volumes.is_empty());
    }
}
