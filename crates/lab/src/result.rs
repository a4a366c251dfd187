//! Results: one [`Row`] for each configuration and job, with every run.

use crate::job::Job;
use blockmux_engine::sys::congestion::Congestion;
use serde::{Deserialize, Serialize};

/// A finished comparison: everything that table, JSON and page show.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The command that measured.
    pub command: String,
    /// Start time, RFC 3339 in UTC.
    pub started: String,
    /// Blockmux's version.
    pub version: String,
    /// The machine that measured.
    pub machine: Machine,
    /// Suite name of the published study that was repeated.
    pub suite: Option<String>,
    /// One for each configuration and job, in display order.
    pub rows: Vec<Row>,
    /// Jobs that could not run, with the reason.
    pub skipped: Vec<(String, String)>,
    /// What readers must know about how it was measured, as sentences.
    #[serde(default)]
    pub conditions: Vec<String>,
    /// The changes, if this was merged from two reports with cases in common.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changes: Option<Changes>,
}

/// The machine that measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// CPU model name.
    pub cpu: String,
    /// CPUs that the process may use.
    pub cores: u32,
    /// Kernel release.
    pub kernel: String,
    /// Main memory in bytes.
    pub memory_bytes: u64,
    /// TCP congestion control of the measured connections: the system's, or as requested.
    #[serde(default = "unknown")]
    pub congestion: String,
}

fn is_first(report: &u8) -> bool {
    *report == 0
}

fn unknown() -> String {
    UNKNOWN.to_owned()
}

/// The kind of a measured configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConfigurationKind {
    /// A volume of this process, without a protocol: the upper bound of IOPS.
    Local,
    /// A volume behind a protocol.
    Protocol,
    /// A disk of this machine: another driver or program does what a protocol does in this process.
    Device,
    /// Bare sockets with the same message sizes, both sides sleeping when idle.
    CeilingSleeping,
    /// Bare sockets with the same message sizes, both sides spinning.
    CeilingSpinning,
}

/// One configuration under one job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The configuration's name in tables: "nbd", "local mem", "ceiling".
    #[serde(rename = "subject")]
    pub configuration: String,
    /// The kind of configuration.
    pub kind: ConfigurationKind,
    /// The protocol whose message sizes a ceiling repeats, or that a protocol row speaks; a disk's
    /// driver; empty for local.
    pub protocol: String,
    /// The volume or URL.
    pub target: String,
    /// Polling policy of both sides: "adaptive", "always", "never"; empty if not applicable.
    pub poll: String,
    /// The job.
    pub job: Job,
    /// Number of the merged report that it is from; 0 for the first, and if no other has the case.
    #[serde(default, skip_serializing_if = "is_first")]
    pub report: u8,
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
    /// I/O whose direction is unknown, as in reports of fio with `unified_rw_reporting`.
    #[serde(default)]
    pub mixed: Direction,
    /// I/O that failed.
    pub errors: u64,
    /// Blocks with other content than was written.
    pub verify_errors: u64,
    /// CPU time of the target's threads in nanoseconds, if they are in this process.
    pub target_cpu_ns: Option<u64>,
    /// CPU time of the initiator's threads in nanoseconds.
    pub initiator_cpu_ns: Option<u64>,
    /// System time of the target's threads in nanoseconds, if the run was long enough to tell.
    #[serde(default)]
    pub target_system_ns: Option<u64>,
    /// System time of the initiator's threads in nanoseconds, if the run was long enough to tell.
    #[serde(default)]
    pub initiator_system_ns: Option<u64>,
    /// CPU time of the whole machine in nanoseconds, of the kernel and of all programs.
    #[serde(default)]
    pub machine_cpu_ns: Option<u64>,
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
    /// (percentile, value), ascending: 1, 5, 10, 20, ... 50 ... 90, 95, 99, 99.5, 99.9, 99.95,
    /// 99.99, as in fio.
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

/// The changes between two reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Changes {
    /// Name of the first report.
    pub before: String,
    /// Name of the second report.
    pub after: String,
    /// One for each case that both have, in the order of the first.
    pub cases: Vec<CaseChange>,
}

/// The changes of one configuration under one job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseChange {
    /// The job in words.
    pub job: String,
    /// The configuration's label.
    pub configuration: String,
    /// The figures that both reports have: IOPS, p50, p99 and CPU time, in this order.
    pub figures: Vec<FigureChange>,
}

/// The change of one figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FigureChange {
    /// The figure's key in JSON.
    pub figure: String,
    /// Median of the first report.
    pub before: f64,
    /// Median of the second report.
    pub after: f64,
    /// The change in per cent of the first median.
    pub percent: f64,
    /// Whether it can be told from the spread of the runs.
    pub significance: Significance,
}

/// Whether a change is more than the spread of the runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Significance {
    /// Every run of one report is better than every run of the other.
    RunsDiffer,
    /// Some run of the worse report is as good as one of the better: it may be chance.
    RunsOverlap,
    /// One of the reports has a single run, without a spread.
    SingleRun,
}

impl Comparison {
    /// A warning about figures over TCP; `None` if there is none.
    #[must_use]
    pub fn caution(&self) -> Option<String> {
        let congestion: Congestion = self.machine.congestion.parse().ok()?;
        let is_over_tcp = |row: &Row| {
            let is_tcp = row.protocol != "aoe" && !row.protocol.ends_with("+unix");
            is_tcp && !row.protocol.is_empty() && row.kind != ConfigurationKind::Device
        };
        (congestion.paces() && self.rows.iter().any(is_over_tcp)).then(|| {
            format!(
                "TCP by {congestion} paces segments by timers, over loopback too: rows of 64 KiB and more measure those \
                 timers. Use --congestion cubic, Linux's default, which does not pace."
            )
        })
    }
}

impl Run {
    /// Whether nothing completed in the measured time, not even with an error.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.ios() == 0 && self.errors == 0
    }

    /// I/O per second, all directions.
    #[must_use]
    pub fn iops(&self) -> f64 {
        self.per_second(self.ios())
    }

    /// Bytes per second, all directions.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        self.per_second(self.bytes())
    }

    /// I/O completed, all directions.
    #[must_use]
    pub fn ios(&self) -> u64 {
        self.directions().map(|direction| direction.ios).sum()
    }

    /// Bytes moved, all directions.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.directions().map(|direction| direction.bytes).sum()
    }

    /// The directions that did any I/O: none for an empty run, two for a mixed one.
    pub fn active(&self) -> impl Iterator<Item = &Direction> {
        self.directions().filter(|direction| direction.ios > 0)
    }

    fn directions(&self) -> impl Iterator<Item = &Direction> {
        [&self.read, &self.write, &self.trim, &self.mixed].into_iter()
    }

    /// Mean completion latency over all I/O in nanoseconds; `None` if it was not recorded.
    #[must_use]
    pub fn mean_ns(&self) -> Option<f64> {
        let (mut sum, mut ios) = (0.0, 0);
        for direction in self.active().filter(|direction| direction.latency.is_recorded()) {
            sum += direction.latency.mean_ns * direction.ios as f64;
            ios += direction.ios;
        }
        (ios > 0).then(|| sum / ios as f64)
    }

    /// Largest completion latency in nanoseconds; `None` if it was not recorded.
    #[must_use]
    pub fn max_ns(&self) -> Option<u64> {
        let recorded =
            self.active().map(|direction| &direction.latency).filter(|latency| latency.is_recorded());
        recorded.map(|latency| latency.max_ns).max()
    }

    /// A percentile of completion latency in nanoseconds; `None` if it was not recorded.
    ///
    /// Percentiles of two directions cannot be combined, so a mixed job has that of its slower
    /// direction, an upper bound of the percentile of both.
    #[must_use]
    pub fn percentile_ns(&self, percentile: f64) -> Option<u64> {
        self.active().filter_map(|direction| direction.latency.percentile_ns(percentile)).max()
    }

    fn per_second(&self, count: u64) -> f64 {
        if self.runtime_ns == 0 { 0.0 } else { count as f64 * 1e9 / self.runtime_ns as f64 }
    }
}

impl Latency {
    /// Whether there is any latency: fio does not measure it with `gtod_reduce`.
    fn is_recorded(&self) -> bool {
        self.max_ns > 0 || self.mean_ns > 0.0
    }

    /// The value at a recorded percentile.
    #[must_use]
    pub fn percentile_ns(&self, percentile: f64) -> Option<u64> {
        let found = self.percentiles.iter().find(|(at, _)| (at - percentile).abs() < 1e-6);
        found.map(|&(_, value_ns)| value_ns)
    }
}

impl Spread {
    /// Half the range, in per cent of the median; 0 if the median is 0.
    #[must_use]
    pub fn half_range_percent(&self) -> f64 {
        if self.median == 0.0 { 0.0 } else { (self.max - self.min) / 2.0 / self.median * 100.0 }
    }
}

impl ConfigurationKind {
    /// Whether the configuration is one that users choose from, and that is ranked.
    #[must_use]
    pub fn is_candidate(self) -> bool {
        matches!(self, ConfigurationKind::Protocol | ConfigurationKind::Device)
    }

    /// Whether the configuration is a bare-socket ceiling, sleeping or spinning.
    #[must_use]
    pub fn is_ceiling(self) -> bool {
        matches!(self, ConfigurationKind::CeilingSleeping | ConfigurationKind::CeilingSpinning)
    }
}

impl Comparison {
    /// Whether a disk was measured. The CPU time of its driver and of other programs behind it is
    /// only known as part of the machine's.
    #[must_use]
    pub fn has_devices(&self) -> bool {
        self.rows.iter().any(|row| row.kind == ConfigurationKind::Device)
    }

    /// Rows grouped by job, jobs in order of first appearance. Jobs are compared by their options,
    /// not by name.
    #[must_use]
    pub fn groups(&self) -> Vec<Vec<&Row>> {
        let mut groups: Vec<Vec<&Row>> = Vec::new();
        for row in &self.rows {
            match groups.iter_mut().find(|group| group[0].job.does_the_same_as(&row.job)) {
                Some(group) => group.push(row),
                None => groups.push(vec![row]),
            }
        }
        groups
    }

    /// Skipped rows grouped by reason: (reason, rows).
    #[must_use]
    pub fn skipped_by_reason(&self) -> Vec<(&str, Vec<&str>)> {
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for (row, reason) in &self.skipped {
            match reasons.iter_mut().find(|(known, _)| known == reason) {
                Some((_, rows)) => rows.push(row),
                None => reasons.push((reason, vec![row])),
            }
        }
        reasons
    }

    /// The ceiling to which a protocol row is compared: bare sockets with the same job and message
    /// sizes. For `never` it is the sleeping one, for `always` the spinning one; for `adaptive` and
    /// unknown policies the faster of the two.
    #[must_use]
    pub fn ceiling_of(&self, row: &Row) -> Option<&Row> {
        if row.kind != ConfigurationKind::Protocol {
            return None;
        }
        let alike = |kind: ConfigurationKind| match row.poll.as_str() {
            "never" => kind == ConfigurationKind::CeilingSleeping,
            "always" => kind == ConfigurationKind::CeilingSpinning,
            _ => kind.is_ceiling(),
        };
        let iops = |row: &Row| row.spread(|run| Some(run.iops())).map_or(0.0, |spread| spread.median);
        self.rows
            .iter()
            .filter(|other| alike(other.kind) && other.protocol == row.protocol)
            .filter(|other| other.job.does_the_same_as(&row.job))
            .max_by(|a, b| iops(a).total_cmp(&iops(b)))
    }

    /// Whether a protocol row exceeds its ceiling by more than `NOISY_SHARE`: other load has then
    /// slowed the ceiling down.
    #[must_use]
    pub fn has_noisy_ceiling(&self) -> bool {
        self.rows.iter().filter_map(|row| self.share_of_ceiling(row)).any(|share| share > NOISY_SHARE)
    }

    /// Median IOPS of a protocol row as a fraction of its ceiling's; see
    /// [`Comparison::ceiling_of`].
    #[must_use]
    pub fn share_of_ceiling(&self, row: &Row) -> Option<f64> {
        let ceiling = self.ceiling_of(row)?.spread(|run| Some(run.iops()))?.median;
        let own = row.spread(|run| Some(run.iops()))?.median;
        (ceiling > 0.0).then(|| own / ceiling)
    }
}

/// The largest block whose rate is shown in I/O per second, in bytes.
const SMALL: u32 = 16 << 10;
/// Up to this share of its ceiling a row causes no warning, because both values are measured and
/// vary.
pub(crate) const NOISY_SHARE: f64 = 1.1;

impl Job {
    /// Whether its rate is shown in I/O per second, as of small blocks.
    pub(crate) fn is_small(&self) -> bool {
        self.bs <= SMALL && self.program.is_none()
    }

    /// Whether two jobs differ only in their names and the seed of their offsets.
    pub(crate) fn does_the_same_as(&self, other: &Job) -> bool {
        let same = Job { name: other.name.clone(), randseed: other.randseed, ..self.clone() };
        same == *other
    }
}

impl Row {
    /// Median and extremes of `figure` over the runs; `None` if no run has it.
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

/// Placeholder in a [`Machine`] for what could not be determined.
pub(crate) const UNKNOWN: &str = "unknown";

#[cfg(test)]
impl Comparison {
    /// A comparison of these rows on some machine, for tests.
    pub(crate) fn of_rows(rows: Vec<Row>) -> Comparison {
        Comparison {
            command: "blockmux bench".into(),
            started: "2026-11-21T12:00:00Z".into(),
            version: "0.1.0".into(),
            machine: Machine {
                cpu: "c".into(),
                cores: 2,
                kernel: "k".into(),
                memory_bytes: 1 << 30,
                congestion: "reno".into(),
            },
            suite: None,
            rows,
            skipped: Vec::new(),
            conditions: Vec::new(),
            changes: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Rw;

    fn ceiling(kind: ConfigurationKind, iops: u64) -> Row {
        Row { configuration: "ceiling".into(), kind, poll: String::new(), ..row(&[iops]) }
    }

    fn row(iops: &[u64]) -> Row {
        let job = Job { name: "t".into(), rw: Rw::RandRead, ..Job::default() };
        let runs = iops.iter().map(|&ios| Run {
            runtime_ns: 1_000_000_000,
            read: Direction { ios, bytes: ios * 4096, ..Direction::default() },
            ..Run::default()
        });
        Row {
            configuration: "nbd".into(),
            kind: ConfigurationKind::Protocol,
            protocol: "nbd".into(),
            target: "nbd://h/x".into(),
            poll: "never".into(),
            job,
            report: 0,
            runs: runs.collect(),
        }
    }

    #[test]
    fn the_median_of_an_even_count_is_the_mean_of_the_middle_two() {
        let spread = row(&[40, 10, 20, 30]).spread(|run| Some(run.iops())).unwrap();
        assert_eq!((spread.median, spread.min, spread.max), (25.0, 10.0, 40.0));
    }

    #[test]
    fn a_figure_that_no_run_has_is_none() {
        assert_eq!(row(&[1]).spread(|run| run.target_cpu_ns.map(|ns| ns as f64)), None);
    }

    #[test]
    fn a_row_is_compared_with_the_ceiling_of_its_polling_policy() {
        let polls = |poll: &str| Row { poll: poll.into(), ..row(&[50]) };
        let rows = vec![
            polls("never"),
            polls("always"),
            polls("adaptive"),
            ceiling(ConfigurationKind::CeilingSleeping, 100),
            ceiling(ConfigurationKind::CeilingSpinning, 200),
        ];
        let all = Comparison::of_rows(rows);
        let shares: Vec<_> = all.rows.iter().map(|row| all.share_of_ceiling(row)).collect();
        assert_eq!(shares, [Some(0.5), Some(0.25), Some(0.25), None, None]);
    }

    #[test]
    fn a_ceiling_of_another_job_or_protocol_is_not_compared() {
        let mut deeper = ceiling(ConfigurationKind::CeilingSleeping, 100);
        deeper.job.iodepth = 2;
        let other = Row { protocol: "aoe".into(), ..ceiling(ConfigurationKind::CeilingSleeping, 100) };
        let all = Comparison::of_rows(vec![row(&[50]), deeper, other]);
        assert_eq!(all.share_of_ceiling(&all.rows[0]), None);
    }

    #[test]
    fn rows_of_equal_jobs_are_grouped_despite_different_names() {
        let mut renamed = row(&[2]);
        renamed.job.name = "other".into();
        let mut larger = row(&[3]);
        larger.job.bs = 8192;
        let all = Comparison::of_rows(vec![row(&[1]), larger, renamed]);
        let sizes: Vec<_> = all.groups().iter().map(Vec::len).collect();
        assert_eq!(sizes, [2, 1]);
    }

    #[test]
    fn a_mixed_job_has_the_weighted_mean_and_its_slower_percentile() {
        let direction = |ios, mean_ns, p99| Direction {
            ios,
            bytes: 0,
            latency: Latency { mean_ns, percentiles: vec![(99.0, p99)], ..Latency::default() },
        };
        let run = Run { read: direction(3, 10.0, 70), write: direction(1, 30.0, 50), ..Run::default() };
        assert_eq!((run.mean_ns(), run.percentile_ns(99.0)), (Some(15.0), Some(70)));
        assert_eq!(run.percentile_ns(50.0), None);
        assert_eq!((Run::default().mean_ns(), Run::default().percentile_ns(99.0)), (None, None));
    }
}
