//! What was found: one [`Row`] for each subject and job, with every run kept.

use crate::job::Job;
use serde::{Deserialize, Serialize};

/// A finished comparison: all that the table, the JSON and the page show.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The command that made it.
    pub command: String,
    /// When it began, RFC 3339 in UTC.
    pub started: String,
    /// Blockmux's version.
    pub version: String,
    /// Where it ran.
    pub machine: Machine,
    /// The published study that it repeats, by suite name.
    pub suite: Option<String>,
    /// One for each subject and job, in the order in which they are shown.
    pub rows: Vec<Row>,
    /// Rows of a suite that could not run, and why: (row, reason).
    pub skipped: Vec<(String, String)>,
}

/// The machine that measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Model name of the processor.
    pub cpu: String,
    /// Processors that the process may use.
    pub cores: u32,
    /// Kernel release.
    pub kernel: String,
    /// Main memory in bytes.
    pub memory_bytes: u64,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A volume of this process, without a protocol: the floor.
    Local,
    /// A volume behind a protocol.
    Protocol,
    /// Bare sockets with the same message sizes, both sides sleeping when idle.
    CeilingSleeping,
    /// Bare sockets with the same message sizes, both sides spinning.
    CeilingSpinning,
}

/// One subject under one job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// "nbd", "local mem", "ceiling": what the table calls it.
    pub subject: String,
    /// What kind of thing it is.
    pub kind: Kind,
    /// The protocol whose message sizes a ceiling repeats, or that a protocol row speaks; empty for local.
    pub protocol: String,
    /// The volume or URL.
    pub target: String,
    /// The polling policy of both sides: "adaptive", "always", "never"; empty where it means nothing.
    pub poll: String,
    /// What was done.
    pub job: Job,
    /// Every run, in the order in which they ran.
    pub runs: Vec<Run>,
}

/// One run. Rates are over the measured time; a mixed job's totals are both directions together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Measured time in nanoseconds.
    pub runtime_ns: u64,
    /// Reads.
    pub read: Direction,
    /// Writes.
    pub write: Direction,
    /// Discards.
    pub trim: Direction,
    /// I/O that failed.
    pub errors: u64,
    /// Blocks whose content was not what had been written.
    pub verify_errors: u64,
    /// Processor time of the target's threads in nanoseconds, if they are ours to see.
    pub target_cpu_ns: Option<u64>,
    /// Processor time of the initiator's threads in nanoseconds.
    pub initiator_cpu_ns: Option<u64>,
}

/// One direction of a run; all zero if there was none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Direction {
    /// I/O completed.
    pub ios: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Completion latency, submit to completion.
    pub latency: Latency,
}

/// A latency distribution in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Smallest.
    pub min_ns: u64,
    /// Largest.
    pub max_ns: u64,
    /// Mean.
    pub mean_ns: f64,
    /// Standard deviation.
    pub stddev_ns: f64,
    /// (percentile, value), ascending: 1, 5, 10, 20, ... 50 ... 90, 95, 99, 99.5, 99.9, 99.95, 99.99, as fio has them.
    pub percentiles: Vec<(f64, u64)>,
}

/// Median, smallest and largest of several runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
}

impl Run {
    /// I/O per second, all directions.
    #[must_use]
    pub fn iops(&self) -> f64 {
        self.per_second(self.ios())
    }

    /// Bytes per second, all directions.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        self.per_second(self.read.bytes + self.write.bytes + self.trim.bytes)
    }

    /// I/O completed, all directions.
    #[must_use]
    pub fn ios(&self) -> u64 {
        self.read.ios + self.write.ios + self.trim.ios
    }

    fn per_second(&self, count: u64) -> f64 {
        if self.runtime_ns == 0 { 0.0 } else { count as f64 * 1e9 / self.runtime_ns as f64 }
    }
}

impl Row {
    /// Median and extremes over the runs of what `figure` takes from each; `None` if no run has it.
    pub fn spread(&self, figure: impl Fn(&Run) -> Option<f64>) -> Option<Spread> {
        let mut values: Vec<f64> = self.runs.iter().filter_map(figure).collect();
        values.sort_by(f64::total_cmp);
        let (&min, &max) = (values.first()?, values.last()?);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            f64::midpoint(values[middle - 1], values[middle])
        };
        Some(Spread { median, min, max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Rw;

    fn row(iops: &[u64]) -> Row {
        let job = Job { name: "t".into(), rw: Rw::RandRead, ..Job::default() };
        let runs = iops.iter().map(|&ios| Run {
            runtime_ns: 1_000_000_000,
            read: Direction { ios, bytes: ios * 4096, ..Direction::default() },
            ..Run::default()
        });
        Row {
            subject: "nbd".into(),
            kind: Kind::Protocol,
            protocol: "nbd".into(),
            target: "nbd://h/x".into(),
            poll: "never".into(),
            job,
            runs: runs.collect(),
        }
    }

    #[test]
    fn the_median_of_an_even_count_lies_between() {
        let spread = row(&[40, 10, 20, 30]).spread(|run| Some(run.iops())).unwrap();
        assert_eq!((spread.median, spread.min, spread.max), (25.0, 10.0, 40.0));
    }

    #[test]
    fn a_figure_that_no_run_has_is_none() {
        assert_eq!(row(&[1]).spread(|run| run.target_cpu_ns.map(|ns| ns as f64)), None);
    }
}
