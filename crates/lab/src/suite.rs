//! Published measurements with the jobs that repeat them here, and the jobs of a plain comparison.
//!
//! The figures are facts from public studies, in `data/`, one file for each with its source.
//! Reports show them next to our measurements and never mix the two. A suite's jobs are those of
//! the study, with a RAM volume in place of its disks, and loopback in place of its links unless
//! the study compares links.

use crate::figure::Figure;
use crate::job::{Job, Rw};
use crate::link::Links;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;

/// A published study and the jobs that repeat it.
#[derive(Clone, Debug, PartialEq)]
pub struct Suite {
    /// Its name for `--suite`.
    name: &'static str,
    jobs: Vec<Job>,
    data: SuiteData,
}

/// The data file of a suite.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct SuiteData {
    /// The study's title.
    title: String,
    publisher: String,
    /// Date as `YYYY-MM-DD`, if known.
    date: Option<String>,
    /// URL of the study, if known.
    url: Option<String>,
    /// Setup of the study.
    study: String,
    /// How the jobs here differ from the study's.
    adapted: String,
    /// The study's result, in words.
    finding: String,
    /// Caveats.
    note: String,
    /// The study's protocols.
    protocols: Vec<String>,
    /// Others that are measured, too.
    also: Vec<String>,
    #[serde(default)]
    published: Vec<Figures>,
    /// The fabrics of its protocols over RDMA.
    #[serde(default)]
    fabrics: Vec<String>,
    links: Option<Links>,
    file_system: Option<OnFileSystem>,
    #[serde(default)]
    job: Vec<Entry>,
    /// More jobs, after `job`.
    #[serde(default)]
    sweep: Vec<Sweep>,
    #[serde(default)]
    chart: Vec<StudyChart>,
}

/// How a study that measured a file system is repeated on one.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct OnFileSystem {
    /// The program that does the jobs, and the file system.
    program: String,
    /// How the measurement here differs from the study's.
    adapted: String,
    /// Caveats.
    note: String,
    /// The program's jobs, with the names that the study's figures have.
    job: Vec<Entry>,
    /// Charts beside those of the suite.
    #[serde(default)]
    chart: Vec<StudyChart>,
}

/// A study as reports show it: its setup, and its figures for comparison with ours.
#[derive(Clone, Debug, PartialEq)]
pub struct Study {
    /// Title, publisher and date in one line.
    pub source: String,
    /// Link to the study, if known.
    pub url: Option<String>,
    /// Setup of the study.
    pub setting: String,
    /// How the jobs here differ from the study's.
    pub adapted: String,
    /// The study's result, in words.
    pub finding: String,
    /// Caveats.
    pub note: String,
    /// In the order of its jobs; empty if it gives no numbers.
    pub figures: Vec<PublishedFigure>,
    /// The charts that compare them.
    pub charts: Vec<StudyChart>,
}

/// Figures of a study that are compared with each other, relative to one of them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StudyChart {
    /// Title of the chart.
    pub title: String,
    /// The unit of the study's figures.
    pub unit: Unit,
    /// Names of jobs; in the data, `randread-4k-*` stands for all with that beginning. The best of
    /// these jobs counts for each configuration measured here.
    pub jobs: Vec<String>,
    /// Use only figures whose labels begin with this volume.
    pub volume: Option<String>,
    /// The figure that is 1.0; for our measurements, that of the same protocol.
    pub reference: Reference,
}

/// Names the figure that the others are relative to.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    /// Blockmux's name of the protocol.
    pub protocol: String,
    /// The label of the published figure.
    pub label: String,
}

/// One figure of a study with the job that it was measured with; shown beside our measurements,
/// never mixed with them.
#[derive(Clone, Debug, PartialEq)]
pub struct PublishedFigure {
    /// Blockmux's name of the protocol; "local" for a volume without one.
    pub protocol: String,
    /// Link, disks or depth, which distinguishes it from the protocol's other figures.
    pub label: String,
    /// The value, in `unit`.
    pub value: f64,
    /// The unit of `value`.
    pub unit: Unit,
    /// The study gives only an approximate value.
    pub approximate: bool,
    /// The corresponding job here.
    pub job: Job,
}

/// One job under one protocol: a row to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct SuiteRow {
    /// "iscsi", "iser", "srp", "nbd", "aoe", "nvme-tcp", "nvme-rdma", or "local" for a volume
    /// without a protocol. The caller knows which of them it can run.
    pub protocol: String,
    /// What to do.
    pub job: Job,
}

/// The unit of a published figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
pub enum Unit {
    /// I/O per second.
    #[serde(rename = "iops")]
    Iops,
    /// 1,048,576 bytes per second.
    #[serde(rename = "mib_s")]
    MibPerSecond,
    /// Megabytes per second, as printed in the study, which does not define them.
    #[serde(rename = "mb_s")]
    MbPerSecond,
    /// Mean latency in microseconds.
    #[serde(rename = "mean_us")]
    MeanMicroseconds,
}

impl PublishedFigure {
    /// Name of the figure in a list of several protocols: "iser, InfiniBand".
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}, {}", self.protocol, self.label)
    }

    /// Whether a job measured here corresponds to the figure.
    #[must_use]
    pub fn is_about(&self, job: &Job) -> bool {
        let shape = |job: &Job| (job.rw, job.bs, job.iodepth, job.numjobs, job.program.clone());
        shape(&self.job) == shape(job)
    }
}

impl Unit {
    /// Our figure of the same kind, with the conversion factor to this unit.
    #[must_use]
    pub fn measured_as(self) -> (Figure, f64) {
        match self {
            Unit::Iops => (Figure::Iops, 1.0),
            Unit::MibPerSecond => (Figure::MbPerSecond, 1e6 / f64::from(1 << 20)),
            Unit::MbPerSecond => (Figure::MbPerSecond, 1.0),
            Unit::MeanMicroseconds => (Figure::Mean, 1.0),
        }
    }
}

impl Unit {
    /// Whether greater is better.
    #[must_use]
    pub fn more_is_better(self) -> bool {
        self != Unit::MeanMicroseconds
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unit::Iops => "IOPS",
            Unit::MibPerSecond => "MiB/s",
            Unit::MbPerSecond => "MB/s",
            Unit::MeanMicroseconds => "µs mean",
        })
    }
}

/// An unknown suite was requested.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown suite `{name}`; known are {}", DATA.map(|(name, _)| name).join(", "))]
pub struct UnknownSuite {
    /// The name as given.
    pub name: String,
}

impl Suite {
    /// The suite called `name`.
    ///
    /// # Errors
    /// If there is none.
    pub fn by_name(name: &str) -> Result<Suite, UnknownSuite> {
        let found = DATA.iter().find(|(known, _)| *known == name);
        found
            .map(|(name, text)| Suite::load(name, text))
            .ok_or_else(|| UnknownSuite { name: name.to_owned() })
    }

    /// Every job under every protocol, by job, each for `runtime_ms` after `ramp_time_ms`.
    #[must_use]
    pub fn rows(&self, runtime_ms: u64, ramp_time_ms: u64) -> Vec<SuiteRow> {
        let pairs = self.jobs.iter().flat_map(|job| self.protocols().map(move |own| (job, own)));
        let row = |(job, protocol): (&Job, &str)| SuiteRow {
            protocol: protocol.to_owned(),
            job: Job { runtime_ms, ramp_time_ms, ..job.clone() },
        };
        pairs.map(row).collect()
    }

    /// The jobs of the suite.
    pub fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.iter()
    }

    /// The protocols that are measured, with "local" for a volume without one.
    pub fn protocols(&self) -> impl Iterator<Item = &str> {
        [&self.data.protocols, &self.data.also].into_iter().flatten().map(String::as_str)
    }

    /// The fabrics that its protocols over RDMA are measured over, as URLs name them; none: one.
    pub fn fabrics(&self) -> impl Iterator<Item = &str> {
        self.data.fabrics.iter().map(String::as_str)
    }

    /// The links that it is measured over, if not loopback.
    #[must_use]
    pub fn links(&self) -> Option<&Links> {
        self.data.links.as_ref()
    }

    /// The suite as it is measured on a file system, with the jobs of another program; `None` if
    /// the study did not.
    #[must_use]
    pub fn on_file_system(self) -> Option<Suite> {
        let OnFileSystem { program, adapted, note, job, chart } = self.data.file_system?;
        let jobs = job.into_iter().map(|entry| Job { program: Some(program.clone()), ..entry.into_job() });
        let chart = [self.data.chart, chart].concat();
        let data = SuiteData { adapted, note, chart, file_system: None, ..self.data };
        Some(Suite { jobs: jobs.collect(), data, ..self })
    }

    /// The study as reports show it.
    #[must_use]
    pub fn to_study(&self) -> Study {
        let rows = self.rows(1, 0);
        let figures = rows.iter().flat_map(|row| self.published_for(&row.protocol, &row.job));
        Study {
            source: self.source(),
            url: self.data.url.clone(),
            charts: self.data.chart.clone(),
            setting: self.data.study.clone(),
            adapted: self.data.adapted.clone(),
            finding: self.data.finding.clone(),
            note: self.data.note.clone(),
            figures: figures.collect(),
        }
    }

    /// Title, publisher and date in one line.
    fn source(&self) -> String {
        let SuiteData { title, publisher, date, .. } = &self.data;
        let date = date.as_ref().map_or_else(String::new, |date| format!(", {date}"));
        format!("\"{title}\", {publisher}{date}")
    }

    fn published_for(&self, protocol: &str, job: &Job) -> Vec<PublishedFigure> {
        let of_row = |figures: &&Figures| figures.protocol == protocol && figures.job == job.name;
        let published = self.data.published.iter().filter(of_row).flat_map(|figures| {
            figures.by_unit().map(|(unit, value)| PublishedFigure {
                protocol: protocol.to_owned(),
                label: figures.label.clone(),
                value,
                unit,
                approximate: figures.approximate,
                job: job.clone(),
            })
        });
        published.collect()
    }

    /// # Panics
    /// If the data is invalid, which a test excludes.
    fn load(name: &'static str, text: &str) -> Suite {
        let data: SuiteData = toml::from_str(text).unwrap_or_else(|error| panic!("{name}: {error}"));
        let jobs = data.job.iter().cloned().map(Entry::into_job);
        let jobs: Vec<Job> = jobs.chain(data.sweep.iter().flat_map(Sweep::jobs)).collect();
        let chart = data.chart.iter().cloned().map(|chart| chart.with_whole_names(&jobs)).collect();
        Suite { name, jobs, data: SuiteData { chart, ..data } }
    }
}

/// The jobs of `bench --full`: small I/O at depth 1 and deeper, where protocols differ, then large
/// I/O, which shows the cost of copies.
#[must_use]
pub fn full_jobs(runtime_ms: u64, ramp_time_ms: u64) -> Vec<Job> {
    let cells = [
        (Rw::RandRead, 4, 1),
        (Rw::RandWrite, 4, 1),
        (Rw::RandRead, 4, 32),
        (Rw::RandWrite, 4, 32),
        (Rw::RandRead, 64, 32),
        (Rw::RandWrite, 64, 32),
        (Rw::Read, 1024, 8),
        (Rw::Write, 1024, 8),
    ];
    jobs_of(&cells, runtime_ms, ramp_time_ms)
}

/// The jobs of a plain `bench`: those of the full list that distinguish protocols the most.
#[must_use]
pub fn quick_jobs(runtime_ms: u64, ramp_time_ms: u64) -> Vec<Job> {
    let cells = [(Rw::RandRead, 4, 32), (Rw::RandWrite, 4, 32), (Rw::Read, 1024, 8)];
    jobs_of(&cells, runtime_ms, ramp_time_ms)
}

/// Jobs by pattern, block size in KiB and depth.
fn jobs_of(cells: &[(Rw, u32, u32)], runtime_ms: u64, ramp_time_ms: u64) -> Vec<Job> {
    let job = |&(rw, kib, iodepth): &(Rw, u32, u32)| {
        let job = Job { rw, bs: kib << 10, iodepth, runtime_ms, ramp_time_ms, ..Job::default() };
        Job { name: job.name_by_shape(), ..job }
    };
    cells.iter().map(job).collect()
}

/// A job with fio's options.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    options: BTreeMap<String, String>,
}

impl Entry {
    fn into_job(self) -> Job {
        let mut job = Job { name: self.name, ..Job::default() };
        for (key, value) in &self.options {
            job.set(key, value).unwrap_or_else(|error| panic!("{}: {error}", job.name));
        }
        job
    }
}

/// Jobs with every combination of these options, named by their shapes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sweep {
    rw: Vec<String>,
    bs: Vec<String>,
    numjobs: Vec<String>,
    iodepth: Vec<String>,
}

impl Sweep {
    fn jobs(&self) -> Vec<Job> {
        let mut jobs = vec![Job::default()];
        let options =
            [("rw", &self.rw), ("bs", &self.bs), ("numjobs", &self.numjobs), ("iodepth", &self.iodepth)];
        for (key, values) in options {
            let with = |job: &Job, value: &String| {
                let mut job = job.clone();
                job.set(key, value).unwrap_or_else(|error| panic!("sweep: {error}"));
                job
            };
            jobs = jobs.iter().flat_map(|job| values.iter().map(|value| with(job, value))).collect();
        }
        jobs.into_iter().map(|job| Job { name: job.name_by_shape(), ..job }).collect()
    }
}

impl StudyChart {
    /// Replaces beginnings of names by the names of all jobs that have them.
    fn with_whole_names(self, jobs: &[Job]) -> StudyChart {
        let names = |name: String| match name.strip_suffix('*') {
            Some(start) => {
                let all = jobs.iter().map(|job| &job.name).filter(|name| name.starts_with(start));
                all.cloned().collect()
            }
            None => vec![name],
        };
        StudyChart { jobs: self.jobs.into_iter().flat_map(names).collect(), ..self }
    }
}

/// One cell of a study's tables.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Figures {
    protocol: String,
    job: String,
    label: String,
    iops: Option<f64>,
    mib_s: Option<f64>,
    mb_s: Option<f64>,
    mean_us: Option<f64>,
    #[serde(default)]
    approximate: bool,
}

impl Figures {
    fn by_unit(&self) -> impl Iterator<Item = (Unit, f64)> {
        let figures = [
            (Unit::Iops, self.iops),
            (Unit::MibPerSecond, self.mib_s),
            (Unit::MbPerSecond, self.mb_s),
            (Unit::MeanMicroseconds, self.mean_us),
        ];
        figures.into_iter().filter_map(|(unit, value)| Some((unit, value?)))
    }
}

/// Every suite by its name, in the order of their studies.
const DATA: [(&str, &str); 4] = [
    ("aatrokoski-2007", include_str!("../data/aatrokoski-2007.toml")),
    ("chelsio-iwarp", include_str!("../data/chelsio-iwarp.toml")),
    ("zeta-2016", include_str!("../data/zeta-2016.toml")),
    ("taocloud-2022", include_str!("../data/taocloud-2022.toml")),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn suite(name: &str) -> Suite {
        Suite::by_name(name).unwrap()
    }

    fn all() -> Vec<Suite> {
        DATA.map(|(name, _)| suite(name)).into()
    }

    fn published_for(suite: &Suite, protocol: &str, job: &str) -> Vec<PublishedFigure> {
        suite.published_for(protocol, suite.jobs.iter().find(|known| known.name == job).unwrap())
    }

    /// The only figure of that cell.
    fn figure(suite: &Suite, protocol: &str, job: &str, label: &str, unit: Unit) -> f64 {
        let found: Vec<f64> = published_for(suite, protocol, job)
            .into_iter()
            .filter(|published| published.label == label && published.unit == unit)
            .map(|published| published.value)
            .collect();
        assert_eq!(found.len(), 1, "{protocol} {job} {label}");
        found[0]
    }

    fn sum(suite: &Suite, pick: impl Fn(&Figures) -> Option<f64>) -> f64 {
        suite.data.published.iter().filter_map(pick).sum()
    }

    #[test]
    fn every_suite_runs_on_a_small_volume() {
        for suite in all() {
            let rows = suite.rows(250, 50);
            assert_eq!(rows.len(), suite.jobs.len() * suite.protocols().count());
            for row in &rows {
                assert_eq!((row.job.runtime_ms, row.job.ramp_time_ms), (250, 50));
                row.job.validate(64 << 20, 512).unwrap();
            }
            assert!(
                rows.iter().any(|row| row.protocol == "local")
                    && rows.iter().any(|row| row.protocol == "nbd")
            );
        }
    }

    #[test]
    fn every_cell_has_a_value_above_zero() {
        for suite in all() {
            assert!(suite.data.published.iter().all(|figures| figures.by_unit().next().is_some()));
            assert!(suite.to_study().figures.iter().all(|figure| figure.value > 0.0));
        }
    }

    #[test]
    fn names_of_protocols_and_jobs_are_known_and_unique() {
        for suite in all() {
            let mut jobs: Vec<&str> = suite.jobs.iter().map(|job| job.name.as_str()).collect();
            let mut protocols: Vec<&str> = suite.protocols().collect();
            let known = ["iscsi", "iser", "srp", "nbd", "aoe", "nvme-tcp", "nvme-rdma", "local"];
            assert!(protocols.iter().all(|protocol| known.contains(protocol)), "{protocols:?}");
            for names in [&mut jobs, &mut protocols] {
                let count = names.len();
                names.sort_unstable();
                names.dedup();
                assert_eq!(names.len(), count, "{}: {names:?}", suite.name);
            }
        }
    }

    #[test]
    fn a_study_has_every_figure_of_its_suite_with_its_job() {
        for suite in all() {
            let (study, rows) = (suite.to_study(), suite.rows(1000, 0));
            let count = suite.data.published.iter().map(|figures| figures.by_unit().count()).sum::<usize>();
            assert_eq!(study.figures.len(), count);
            for figure in &study.figures {
                // Independently of the runtime here.
                assert_eq!(
                    rows.iter()
                        .filter(|row| row.protocol == figure.protocol && figure.is_about(&row.job))
                        .count(),
                    1,
                    "{}",
                    figure.name()
                );
            }
        }
    }

    #[test]
    fn every_chart_has_its_jobs_and_one_reference_and_every_study_with_figures_has_charts_and_a_source() {
        for suite in all() {
            let study = suite.to_study();
            assert_eq!(study.charts.is_empty(), study.figures.is_empty(), "{}", suite.name);
            assert!(study.url.is_some() || study.figures.is_empty(), "{}", suite.name);
            for chart in &study.charts {
                let of_chart = |name: &String| suite.jobs.iter().any(|job| job.name == *name);
                assert!(!chart.jobs.is_empty() && chart.jobs.iter().all(of_chart), "{}", chart.title);
                let is_reference = |figure: &&PublishedFigure| {
                    (&figure.protocol, &figure.label) == (&chart.reference.protocol, &chart.reference.label)
                        && figure.unit == chart.unit
                        && chart.jobs.contains(&figure.job.name)
                };
                assert_eq!(study.figures.iter().filter(is_reference).count(), 1, "{}", chart.title);
            }
        }
    }

    #[test]
    fn measured_rates_are_compared_in_the_unit_of_the_study() {
        let (figure, mib) = Unit::MibPerSecond.measured_as();
        assert_eq!((figure, 1048.576 * mib), (Figure::MbPerSecond, 1000.0));
    }

    #[test]
    fn an_unknown_suite_is_named_with_the_known_ones() {
        let error = Suite::by_name("zeta").unwrap_err().to_string();
        assert_eq!(
            error,
            "unknown suite `zeta`; known are aatrokoski-2007, chelsio-iwarp, zeta-2016, taocloud-2022"
        );
    }

    #[test]
    fn a_source_has_title_publisher_and_date_if_known() {
        assert_eq!(suite("taocloud-2022").source(), "\"FASS iSCSI vs NVMe/TCP\", TaoCloud, 2022-07-29");
        assert_eq!(suite("chelsio-iwarp").data.date, None);
        for suite in all() {
            for text in [&suite.data.study, &suite.data.adapted, &suite.data.finding, &suite.data.note] {
                assert!(text.len() > 20 && !text.contains('\n'), "{}: {text}", suite.name);
            }
        }
    }

    #[test]
    fn zetas_rates_are_its_iops_times_the_block_size() {
        let suite = suite("zeta-2016");
        assert_eq!(suite.data.published.len(), 30);
        for figures in &suite.data.published {
            let bs = suite.jobs.iter().find(|job| job.name == figures.job).unwrap().bs;
            let (iops, mib_s) = (figures.iops.unwrap(), figures.mib_s.unwrap());
            let from_iops = iops * f64::from(bs) / f64::from(1 << 20);
            assert!((from_iops / mib_s - 1.0).abs() < 0.03, "{figures:?}: {from_iops}");
        }
    }

    #[test]
    fn zetas_totals_and_order_match_its_tables() {
        let suite = suite("zeta-2016");
        assert_eq!(sum(&suite, |figures| figures.iops), 4_771_711.0);
        assert!((sum(&suite, |figures| figures.mib_s) - 74_924.7).abs() < 0.01);
        let is_published = |job: &&Job| suite.data.published.iter().any(|figures| figures.job == job.name);
        assert_eq!(suite.jobs.iter().filter(is_published).count(), 6);
        for job in suite.jobs.iter().filter(is_published) {
            let iops = |protocol, label| figure(&suite, protocol, &job.name, label, Unit::Iops);
            assert!(iops("iscsi", "10 GbE") < iops("iscsi", "40 GbE"));
            assert!(iops("iscsi", "40 GbE") < iops("srp", "InfiniBand"));
            assert!(iops("srp", "InfiniBand") < iops("iser", "InfiniBand"));
            assert!(iops("iser", "40 GbE") < iops("iser", "InfiniBand"));
        }
        assert_eq!(figure(&suite, "srp", "randwrite-16k", "InfiniBand", Unit::Iops), 179_615.0);
    }

    #[test]
    fn aatrokoskis_totals_match_his_tables_and_fit_the_links() {
        let suite = suite("aatrokoski-2007");
        let total = |job: &str| sum(&suite, |figures| figures.mb_s.filter(|_| figures.job == job));
        assert_eq!((total("read"), total("write"), total("rewrite")), (3227.0, 2812.0, 1517.0));
        assert_eq!(suite.data.published.len(), 69);
        for figures in &suite.data.published {
            let rate = figures.mb_s.unwrap();
            let link = if figures.label.contains(" 1 Gbit/s") { 125.0 } else { 1250.0 };
            assert!(rate < link, "{figures:?}");
        }
        let rate = |protocol, job, label| figure(&suite, protocol, job, label, Unit::MbPerSecond);
        assert_eq!(rate("nbd", "write", "4 disks, 10 Gbit/s, MTU 9000"), 216.0);
        assert_eq!(rate("aoe", "rewrite", "12 disks, 10 Gbit/s, MTU 9000"), 126.0);
        assert_eq!(rate("local", "read", "12 disks"), 577.0);
    }

    #[test]
    fn aatrokoskis_rewrites_are_slower_than_reads_in_every_cell() {
        let suite = suite("aatrokoski-2007");
        for read in suite.data.published.iter().filter(|figures| figures.job == "read") {
            let rewrite = figure(&suite, &read.protocol, "rewrite", &read.label, Unit::MbPerSecond);
            assert!(rewrite < read.mb_s.unwrap(), "{read:?}: {rewrite}");
        }
    }

    #[test]
    fn aatrokoskis_file_system_jobs_have_every_figure_of_the_study() {
        let suite = suite("aatrokoski-2007");
        let (blocks, files) = (suite.to_study(), suite.on_file_system().unwrap());
        assert!(files.jobs.iter().all(|job| job.program.as_deref() == Some("bonnie++ on XFS")));
        let study = files.to_study();
        assert_eq!(study.figures.len(), blocks.figures.len());
        assert_ne!((study.adapted, study.note), (blocks.adapted, blocks.note));
        let is_about_others =
            |figure: &PublishedFigure| blocks.figures.iter().any(|other| other.is_about(&figure.job));
        assert!(!study.figures.iter().any(is_about_others), "block jobs are other jobs");
        assert!(study.charts.iter().any(|chart| chart.volume.as_deref() == Some("12 disks")));
        for chart in &study.charts {
            let is_reference = |figure: &&PublishedFigure| {
                (&figure.protocol, &figure.label) == (&chart.reference.protocol, &chart.reference.label)
                    && chart.jobs.contains(&figure.job.name)
            };
            assert_eq!(study.figures.iter().filter(is_reference).count(), 1, "{}", chart.title);
        }
        assert!(Suite::by_name("zeta-2016").unwrap().on_file_system().is_none());
    }

    #[test]
    fn taoclouds_best_rates_exceed_those_of_one_request_in_flight() {
        let suite = suite("taocloud-2022");
        for (protocol, depth) in [("iscsi", "qd32"), ("nvme-tcp", "qd256-x2")] {
            for rw in ["randread", "randwrite"] {
                let alone = published_for(&suite, protocol, &format!("{rw}-4k-qd1"))[0].value;
                let best = published_for(&suite, protocol, &format!("{rw}-4k-{depth}"));
                assert_eq!(best.len(), 1);
                assert!(best[0].unit == Unit::Iops && best[0].value > 1e6 / alone, "{protocol} {rw}");
            }
        }
        assert!((sum(&suite, |figures| figures.iops) - 820_268.01).abs() < 0.001);
        assert!((sum(&suite, |figures| figures.mean_us) - 572.71).abs() < 0.001);
        // Jobs of 1 MiB stay below 100 Gbit/s, and only figures that the study calls approximate
        // are round.
        for figures in suite.data.published.iter().filter(|figures| figures.job.contains("-1m-")) {
            let iops = figures.iops.unwrap();
            assert!(iops * f64::from(1 << 20) < 12.5e9);
            assert_eq!(figures.approximate, iops % 50.0 == 0.0);
        }
    }

    #[test]
    fn chelsio_has_a_finding_and_no_figures() {
        let suite = suite("chelsio-iwarp");
        assert!(suite.data.published.is_empty() && suite.data.finding.contains("InfiniBand FDR"));
        let blocks = |rw| suite.jobs.iter().filter(move |job| job.rw == rw).map(|job| job.bs >> 10);
        let powers: Vec<u32> = (0..=10).map(|power| 1 << power).collect();
        assert_eq!(blocks(Rw::RandRead).collect::<Vec<_>>(), powers);
        assert_eq!(blocks(Rw::RandWrite).collect::<Vec<_>>(), powers);
        assert!(suite.jobs.iter().all(|job| (job.numjobs, job.iodepth) == (16, 1)));
    }

    #[test]
    fn taocloud_has_every_depth_of_the_study_with_one_thread_and_with_several() {
        let suite = suite("taocloud-2022");
        let depths = |rw, numjobs| {
            let of = suite.jobs.iter().filter(move |job| (job.rw, job.numjobs) == (rw, numjobs));
            of.map(|job| job.iodepth).collect::<Vec<_>>()
        };
        for rw in [Rw::RandRead, Rw::RandWrite] {
            for threads in [1, 2, 4] {
                assert_eq!(depths(rw, threads), [1, 2, 4, 8, 16, 32, 64, 128, 256]);
            }
        }
        assert_eq!(depths(Rw::Read, 1), [1, 2, 4, 8, 16, 32]);
        let best =
            suite.data.chart.iter().find(|chart| chart.title == "4 KiB random write, best depth").unwrap();
        assert_eq!(best.jobs.len(), 27);
        assert!(best.jobs.iter().all(|job| job.starts_with("randwrite-4k-qd")));
    }

    #[test]
    fn the_default_comparison_has_eight_jobs_with_names_of_their_own() {
        let jobs = full_jobs(500, 100);
        let names: Vec<&str> = jobs.iter().map(|job| job.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "randread-4k-qd1",
                "randwrite-4k-qd1",
                "randread-4k-qd32",
                "randwrite-4k-qd32",
                "randread-64k-qd32",
                "randwrite-64k-qd32",
                "read-1m-qd8",
                "write-1m-qd8",
            ]
        );
        for job in jobs {
            job.validate(64 << 20, 4096).unwrap();
            assert_eq!((job.runtime_ms, job.ramp_time_ms), (500, 100));
        }
    }
}
