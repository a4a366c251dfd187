//! Results as JSON in the format of fio's `--output-format=json` (3.33): writing and reading.
//!
//! One entry of `jobs` is one [`Row`], so a file contains a whole comparison, and a tool that reads
//! `jobs` sees every configuration. Such a tool expects one measurement for each entry, so the
//! plain fields are those of the run with the median IOPS. The fields that fio fills from its
//! periodic samples (`iops_min`, `iops_stddev`, `bw_mean`, ...) are filled from the runs, each of
//! them one sample.
//!
//! Our own data is under the key `blockmux`: in the file, everything outside rows; in a job, the
//! row with all its runs, and the derived figures. [`from_json`] reads it back without loss, and
//! also reads files by fio.
//!
//! `usr_cpu` and `sys_cpu` are the initiator's, as in fio; the target's are under `blockmux`.
//! Submission latency is part of completion latency (`slat_ns` is 0), context switches and page
//! faults are not counted, and the `latency_us` buckets are interpolated between the recorded
//! percentiles.

mod read;

use crate::content::Verify;
use crate::figure::{Figure, Labels};
use crate::job::Rw;
use crate::result::{Comparison, Direction, Row, Run};
use crate::units::{Size, short};
use crate::when;
use serde_json::{Map, Value, json};

pub use read::{ReportError, from_json, merge};

/// A whole comparison as one fio-shaped document.
#[must_use]
pub fn to_json(comparison: &Comparison) -> String {
    let labels = Labels::of(comparison);
    let jobs = comparison.rows.iter().enumerate();
    let jobs: Vec<Value> = jobs.map(|(index, row)| job_entry(comparison, &labels, row, index)).collect();
    let unix_s = when::unix_s(&comparison.started).unwrap_or(0);
    let without_rows = Comparison { rows: Vec::new(), ..comparison.clone() };
    let document = json!({
        "fio version": format!("blockmux-{}", comparison.version),
        "timestamp": unix_s,
        "timestamp_ms": unix_s * 1000,
        "time": when::ctime(unix_s),
        "jobs": jobs,
        "blockmux": Header { format: FORMAT, comparison: without_rows },
    });
    format!("{document:#}\n")
}

/// The content of `blockmux` at the top of a file; rows are with their jobs.
#[derive(serde::Serialize, serde::Deserialize)]
struct Header {
    /// Incremented when a reader of the old format would misread the new one.
    format: u32,
    #[serde(flatten)]
    comparison: Comparison,
}

fn job_entry(comparison: &Comparison, labels: &Labels, row: &Row, index: usize) -> Value {
    let nothing = Run::default();
    let run = median_run(row).unwrap_or(&nothing);
    let system_ns = run.initiator_system_ns.unwrap_or(0);
    let mut entry = json!({
        "jobname": format!("{}: {}", labels.label(row), row.job.name),
        "groupid": index,
        "error": if run.errors > 0 { EIO } else { 0 },
        "eta": 0,
        "elapsed": (row.job.ramp_time_ms + run.runtime_ns / 1_000_000).div_ceil(1000),
        "job options": options(row),
        "read": direction(row, run, |run| &run.read),
        "write": direction(row, run, |run| &run.write),
        "trim": direction(row, run, |run| &run.trim),
        "sync": { "total_ios": 0, "lat_ns": latency(&Direction::default()) },
        "job_runtime": run.runtime_ns / 1_000_000,
        "usr_cpu": percent_of(run.initiator_cpu_ns.unwrap_or(0).saturating_sub(system_ns), run),
        "sys_cpu": percent_of(system_ns, run),
        "ctx": 0,
        "majf": 0,
        "minf": 0,
        "iodepth_level": depth_level(row.job.iodepth),
        "iodepth_submit": zeros(&["0", "4", "8", "16", "32", "64", ">=64"]),
        "iodepth_complete": zeros(&["0", "4", "8", "16", "32", "64", ">=64"]),
        "latency_depth": row.job.iodepth,
        "latency_target": 0,
        "latency_percentile": 100.0,
        "latency_window": 0,
    });
    for (name, unit_ns, bounds) in BUCKETS {
        entry[name] = buckets(run, unit_ns, bounds);
    }
    if run.mixed.ios > 0 {
        entry["mixed"] = direction(row, run, |run| &run.mixed);
    }
    let mut own = json!(row);
    own["figures"] = figures(comparison, row);
    entry["blockmux"] = own;
    entry
}

/// The run with the median IOPS; of an even number, the slower of the middle two.
fn median_run(row: &Row) -> Option<&Run> {
    let mut runs: Vec<&Run> = row.runs.iter().collect();
    runs.sort_by(|a, b| a.iops().total_cmp(&b.iops()));
    runs.get(runs.len().saturating_sub(1) / 2).copied()
}

/// All option values are strings, as fio writes them.
fn options(row: &Row) -> Value {
    let job = &row.job;
    let mut options = Map::new();
    let mut add = |key: &str, value: String| options.insert(key.into(), Value::String(value));
    add("name", job.name.clone());
    add("ioengine", job.program.clone().unwrap_or_else(|| "blockmux".into()));
    add("filename", row.target.clone());
    add("rw", job.rw.name().to_owned());
    add("bs", short(u64::from(job.bs)));
    add("iodepth", job.iodepth.to_string());
    add("numjobs", job.numjobs.to_string());
    add("time_based", "1".into());
    add("runtime", (job.runtime_ms as f64 / 1e3).to_string());
    add("ramp_time", (job.ramp_time_ms as f64 / 1e3).to_string());
    add("offset", job.offset.short());
    add("randseed", job.randseed.to_string());
    if let Some(len) = job.size {
        add("size", len.short());
    }
    if job.offset_increment != Size::ZERO {
        add("offset_increment", job.offset_increment.short());
    }
    if job.norandommap {
        add("norandommap", "1".into());
    }
    if matches!(job.rw, Rw::ReadWrite | Rw::RandRw) {
        add("rwmixread", job.rwmixread.to_string());
    }
    if let Some(verify) = job.verify {
        add("verify", if verify == Verify::Crc32c { "crc32c" } else { "pattern" }.into());
    }
    if job.fsync_every > 0 {
        add("fsync", job.fsync_every.to_string());
    }
    Value::Object(options)
}

fn direction(row: &Row, run: &Run, side: impl Fn(&Run) -> &Direction) -> Value {
    let own = side(run);
    let per_second = |run: &Run, count: u64| {
        if run.runtime_ns == 0 { 0.0 } else { count as f64 * 1e9 / run.runtime_ns as f64 }
    };
    let active = own.ios > 0;
    let samples = |of: &dyn Fn(&Run) -> f64| -> Vec<f64> {
        if active { row.runs.iter().map(of).collect() } else { Vec::new() }
    };
    let bw = Samples::of(&samples(&|run| per_second(run, side(run).bytes) / 1024.0));
    let iops = Samples::of(&samples(&|run| per_second(run, side(run).ios)));
    let bytes_per_second = per_second(run, own.bytes);
    json!({
        "io_bytes": own.bytes,
        "io_kbytes": own.bytes / 1024,
        "bw_bytes": bytes_per_second as u64,
        "bw": (bytes_per_second / 1024.0) as u64,
        "iops": per_second(run, own.ios),
        "runtime": if active { run.runtime_ns / 1_000_000 } else { 0 },
        "total_ios": own.ios,
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": latency(&Direction::default()),
        "clat_ns": with_percentiles(own),
        "lat_ns": latency(own),
        "bw_min": bw.min as u64,
        "bw_max": bw.max as u64,
        "bw_agg": if active { 100.0 } else { 0.0 },
        "bw_mean": bw.mean,
        "bw_dev": bw.stddev,
        "bw_samples": bw.count,
        "iops_min": iops.min as u64,
        "iops_max": iops.max as u64,
        "iops_mean": iops.mean,
        "iops_stddev": iops.stddev,
        "iops_samples": iops.count,
    })
}

fn latency(direction: &Direction) -> Value {
    let latency = &direction.latency;
    json!({
        "min": latency.min_ns,
        "max": latency.max_ns,
        "mean": latency.mean_ns,
        "stddev": latency.stddev_ns,
        "N": direction.ios,
    })
}

fn with_percentiles(direction: &Direction) -> Value {
    let mut value = latency(direction);
    if direction.ios > 0 {
        let percentiles = direction.latency.percentiles.iter();
        let percentiles: Map<_, _> = percentiles.map(|&(at, ns)| (format!("{at:.6}"), json!(ns))).collect();
        value["percentile"] = Value::Object(percentiles);
    }
    value
}

/// Per cent of one CPU, as fio counts its thread.
fn percent_of(cpu_ns: u64, run: &Run) -> f64 {
    if run.runtime_ns == 0 { 0.0 } else { cpu_ns as f64 * 100.0 / run.runtime_ns as f64 }
}

/// The depth of each submission: the loop is closed, so all I/O is submitted at the full depth.
fn depth_level(iodepth: u32) -> Value {
    let levels = [(64, ">=64"), (32, "32"), (16, "16"), (8, "8"), (4, "4"), (2, "2"), (0, "1")];
    let own = levels.iter().find(|&&(from, _)| iodepth >= from).map_or("1", |&(_, name)| name);
    let entry = |&(_, name): &(u32, &str)| (name.to_owned(), json!(if name == own { 100.0 } else { 0.0 }));
    Value::Object(levels.iter().rev().map(entry).collect())
}

fn zeros(names: &[&str]) -> Value {
    Value::Object(names.iter().map(|&name| (name.to_owned(), json!(0.0))).collect())
}

/// Per cent of all I/O in each bucket. A bucket begins at the bound of the one before; the first
/// bucket of a unit begins at the last bound of the smaller unit.
fn buckets(run: &Run, unit_ns: f64, bounds: &[u32]) -> Value {
    let mut below = if unit_ns > 1.0 { percent_within(run, unit_ns) } else { 0.0 };
    let mut entries = Map::new();
    for &bound in bounds {
        let within = percent_within(run, f64::from(bound) * unit_ns);
        entries.insert(bound.to_string(), json!(within - below));
        below = within;
    }
    if unit_ns == MS_NS {
        entries.insert(">=2000".into(), json!(if run.ios() > 0 { 100.0 - below } else { 0.0 }));
    }
    Value::Object(entries)
}

/// Per cent of all I/O with a latency of at most this.
fn percent_within(run: &Run, bound_ns: f64) -> f64 {
    let parts =
        run.active().map(|direction| direction.ios as f64 * direction_percent_within(direction, bound_ns));
    if run.ios() == 0 { 0.0 } else { parts.sum::<f64>() / run.ios() as f64 }
}

fn direction_percent_within(direction: &Direction, bound_ns: f64) -> f64 {
    let latency = &direction.latency;
    let recorded = latency.percentiles.iter().map(|&(at, ns)| (at, ns as f64));
    let (mut below_at, mut below_ns) = (0.0, latency.min_ns as f64);
    for (at, ns) in recorded.chain([(100.0, latency.max_ns as f64)]) {
        if bound_ns < ns {
            let between = if ns > below_ns { (bound_ns - below_ns) / (ns - below_ns) } else { 0.0 };
            return below_at + (at - below_at) * between.max(0.0);
        }
        (below_at, below_ns) = (at, ns);
    }
    100.0
}

/// Median, minimum and maximum of every figure, for readers that do not derive them.
fn figures(comparison: &Comparison, row: &Row) -> Value {
    let mut figures = Map::new();
    for figure in SHOWN {
        if let Some(spread) = row.figure(figure) {
            let value = json!({ "median": spread.median, "min": spread.min, "max": spread.max });
            figures.insert(figure.key(), value);
        }
    }
    if let Some(share) = comparison.share_of_ceiling(row) {
        figures.insert("share_of_ceiling".into(), json!(share));
    }
    Value::Object(figures)
}

#[derive(Default)]
struct Samples {
    min: f64,
    max: f64,
    mean: f64,
    stddev: f64,
    count: usize,
}

impl Samples {
    fn of(values: &[f64]) -> Samples {
        let count = values.len();
        if count == 0 {
            return Samples::default();
        }
        let mean = values.iter().sum::<f64>() / count as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        // The deviation of a sample, so the divisor is one less; one run has no deviation.
        let stddev = if count > 1 { (squares / (count - 1) as f64).sqrt() } else { 0.0 };
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        let max = values.iter().copied().fold(0.0, f64::max);
        Samples { min, max, mean, stddev, count }
    }
}

const FORMAT: u32 = 1;
const EIO: u32 = 5;
const MS_NS: f64 = 1e6;
const SHOWN: [Figure; 14] = [
    Figure::Iops,
    Figure::MbPerSecond,
    Figure::Mean,
    Figure::P50,
    Figure::P99,
    Figure::P999,
    Figure::Max,
    Figure::TargetCpu,
    Figure::InitiatorCpu,
    Figure::TargetSystem,
    Figure::InitiatorSystem,
    Figure::CpuPerGbit,
    Figure::MachineCpu,
    Figure::MachinePerGbit,
];
/// fio's latency buckets: key, nanoseconds of the unit, upper bounds in the unit.
const BUCKETS: [(&str, f64, &[u32]); 3] = [
    ("latency_ns", 1.0, &[2, 4, 10, 20, 50, 100, 250, 500, 750, 1000]),
    ("latency_us", 1e3, &[2, 4, 10, 20, 50, 100, 250, 500, 750, 1000]),
    ("latency_ms", MS_NS, &[2, 4, 10, 20, 50, 100, 250, 500, 750, 1000, 2000]),
];
