//! Reads reports by blockmux and by fio.

use super::{FORMAT, Header};
use crate::figure::UNKNOWN;
use crate::job::{Job, Rw, Verify};
use crate::result::{Comparison, ConfigurationKind, Direction, Latency, Machine, Row, Run};
use crate::units::{Size, parse_size};
use crate::when;
use serde_json::{Map, Value};

/// Why a file is not a report: the part that is wrong, and what was expected.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The file is not JSON.
    #[error("not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The JSON is not a report.
    #[error("not a report of blockmux or fio: there is no list named \"jobs\"")]
    Foreign,
    /// The report was written by a later version.
    #[error("written in report format {0}, and this version reads up to {FORMAT}: use a newer blockmux")]
    Newer(u32),
    /// A job cannot be read.
    #[error("job {index} ({name}): {reason}")]
    Job {
        /// Index in `jobs`, from 0.
        index: usize,
        /// The job's `jobname`.
        name: String,
        /// Why the job cannot be read.
        reason: String,
    },
}

/// Reads a report that [`super::to_json`] wrote, or one that fio wrote with `--output-format=json`
/// or `json+`.
///
/// In fio's file each job is a row, whose configuration is the job's name; its target's CPU time is
/// unknown.
///
/// # Errors
/// If the text is neither.
pub fn from_json(text: &str) -> Result<Comparison, ReportError> {
    // fio may write notes to the same stream before it opens the document.
    let start = text.find('{').unwrap_or(0);
    let document: Value = serde_json::from_str(&text[start..])?;
    let jobs = document.get("jobs").and_then(Value::as_array).ok_or(ReportError::Foreign)?;
    let Some(header) = document.get("blockmux") else { return fio_report(&document, jobs) };
    let format = header.get("format").and_then(Value::as_u64).unwrap_or(0);
    if format > u64::from(FORMAT) {
        return Err(ReportError::Newer(u32::try_from(format).unwrap_or(u32::MAX)));
    }
    let Header { mut comparison, .. } = serde_json::from_value(header.clone())?;
    for (index, job) in jobs.iter().enumerate() {
        let row = job.get("blockmux").cloned().unwrap_or_default();
        let row = serde_json::from_value(row).map_err(|error| job_error(index, job, error.to_string()))?;
        comparison.rows.push(row);
    }
    Ok(comparison)
}

/// Merges several reports, each with a name; `None` if there are none.
///
/// If rows of one report could be confused with those of another, the report's name is appended to
/// their configurations and protocols, so that they are still compared with their own ceilings.
#[must_use]
pub fn merge(reports: Vec<(String, Comparison)>) -> Option<Comparison> {
    let clash = clashes(&reports);
    let mut reports = reports.into_iter().zip(clash);
    let rename = |((name, mut report), clash): ((String, Comparison), bool)| {
        for row in report.rows.iter_mut().filter(|_| clash) {
            row.configuration = format!("{} ({name})", row.configuration);
            if !row.protocol.is_empty() {
                row.protocol = format!("{} ({name})", row.protocol);
            }
        }
        report
    };
    let mut all = rename(reports.next()?);
    for report in reports.map(rename) {
        append(&mut all.command, "; ", &report.command);
        append(&mut all.machine.cpu, " and ", &report.machine.cpu);
        append(&mut all.machine.kernel, " and ", &report.machine.kernel);
        append(&mut all.machine.congestion, " and ", &report.machine.congestion);
        append(&mut all.version, " and ", &report.version);
        all.machine.cores = all.machine.cores.max(report.machine.cores);
        all.machine.memory_bytes = all.machine.memory_bytes.max(report.machine.memory_bytes);
        // The earliest time: RFC 3339 in UTC sorts as text.
        all.started = all.started.min(report.started);
        all.suite = all.suite.filter(|suite| Some(suite) == report.suite.as_ref());
        all.rows.extend(report.rows);
        all.skipped.extend(report.skipped);
    }
    Some(all)
}

/// For each report, whether one of its rows has the same name as a row of another one.
fn clashes(reports: &[(String, Comparison)]) -> Vec<bool> {
    let same = |a: &Row, b: &Row| {
        a.configuration == b.configuration
            && a.kind == b.kind
            && a.poll == b.poll
            && a.job.does_the_same_as(&b.job)
    };
    let clash = |at: usize, report: &Comparison| {
        let mut others = reports.iter().enumerate().filter(|&(other, _)| other != at);
        others.any(|(_, (_, other))| report.rows.iter().any(|a| other.rows.iter().any(|b| same(a, b))))
    };
    reports.iter().enumerate().map(|(at, (_, report))| clash(at, report)).collect()
}

/// Appends text that is not contained yet; a known value replaces an unknown one.
fn append(text: &mut String, separator: &str, more: &str) {
    if text == UNKNOWN {
        more.clone_into(text);
    } else if more != UNKNOWN && !text.split(separator).any(|part| part == more) {
        text.push_str(separator);
        text.push_str(more);
    }
}

fn fio_report(document: &Value, jobs: &[Value]) -> Result<Comparison, ReportError> {
    let empty = Map::new();
    let globals = document.get("global options").and_then(Value::as_object).unwrap_or(&empty);
    let row =
        |(index, job): (usize, &Value)| fio_row(job, globals).map_err(|reason| job_error(index, job, reason));
    let rows = jobs.iter().enumerate().map(row).collect::<Result<_, _>>()?;
    let version = document.get("fio version").and_then(Value::as_str).unwrap_or("fio");
    Ok(Comparison {
        command: version.to_owned(),
        started: when::rfc3339(integer(document, "timestamp")),
        version: version.to_owned(),
        machine: Machine {
            cpu: UNKNOWN.into(),
            cores: 0,
            kernel: UNKNOWN.into(),
            memory_bytes: 0,
            congestion: UNKNOWN.into(),
        },
        suite: None,
        rows,
        skipped: Vec::new(),
    })
}

fn fio_row(job: &Value, globals: &Map<String, Value>) -> Result<Row, String> {
    let own = job.get("job options").and_then(Value::as_object);
    let option = |name: &str| own.and_then(|own| own.get(name)).or_else(|| globals.get(name))?.as_str();
    let name = job.get("jobname").and_then(Value::as_str).unwrap_or("fio");
    let target = ["uri", "filename", "directory"].into_iter().find_map(option).unwrap_or_default();
    Ok(Row {
        configuration: name.to_owned(),
        kind: ConfigurationKind::Protocol,
        protocol: String::new(),
        target: target.to_owned(),
        poll: String::new(),
        job: fio_job(name, job, option)?,
        runs: vec![fio_run(job)],
    })
}

fn fio_job<'a>(name: &str, job: &Value, option: impl Fn(&str) -> Option<&'a str>) -> Result<Job, String> {
    let number = |key: &str, default: u64| match option(key) {
        None => Ok(default),
        Some(text) => size(text).ok_or_else(|| format!("{key}={text} is not a number")),
    };
    let small = |key: &str, default: u64| {
        number(key, default).and_then(|n| u32::try_from(n).map_err(|_| format!("{key}={n} is too large")))
    };
    let rw = option("rw").or_else(|| option("readwrite")).unwrap_or("read");
    let bs = if option("bs").is_some() { small("bs", 4096) } else { small("blocksize", 4096) }?;
    Ok(Job {
        name: name.to_owned(),
        rw: pattern(rw).ok_or_else(|| format!("rw={rw} is not supported in reports"))?,
        bs,
        iodepth: small("iodepth", 1)?,
        numjobs: small("numjobs", 1)?,
        runtime_ms: integer(job, "job_runtime"),
        ramp_time_ms: 0,
        size: option("size").and_then(|text| parse_size(text).ok()),
        offset: option("offset").and_then(|text| parse_size(text).ok()).unwrap_or(Size::ZERO),
        rwmixread: u8::try_from(number("rwmixread", 50)?).map_err(|_| "rwmixread is over 100".to_owned())?,
        verify: option("verify").map(|how| if how == "crc32c" { Verify::Crc32c } else { Verify::Pattern }),
        fua_every: 0,
        fsync_every: small("fsync", 0)?,
        randseed: 0,
        ..Job::default()
    })
}

fn fio_run(job: &Value) -> Run {
    let side = |name: &str| job.get(name).map(fio_direction).unwrap_or_default();
    let runtime = |name: &str| job.get(name).map_or(0, |side| integer(side, "runtime"));
    let runtime_ms = ["read", "write", "trim"].into_iter().map(runtime).max().unwrap_or(0);
    let percent = |name: &str| job.get(name).and_then(Value::as_f64).unwrap_or(0.0);
    let cpu_ns = |percent: f64| (percent / 100.0 * integer(job, "job_runtime") as f64 * 1e6) as u64;
    Run {
        runtime_ns: runtime_ms.saturating_mul(1_000_000),
        read: side("read"),
        write: side("write"),
        trim: side("trim"),
        errors: u64::from(integer(job, "error") != 0),
        verify_errors: 0,
        target_cpu_ns: None,
        initiator_cpu_ns: Some(cpu_ns(percent("usr_cpu") + percent("sys_cpu"))),
        target_system_ns: None,
        initiator_system_ns: Some(cpu_ns(percent("sys_cpu"))),
    }
}

fn fio_direction(side: &Value) -> Direction {
    let empty = Value::Null;
    let latency = ["clat_ns", "lat_ns"].into_iter().filter_map(|name| side.get(name));
    let latency = latency.into_iter().find(|latency| integer(latency, "N") > 0).unwrap_or(&empty);
    let float = |name: &str| latency.get(name).and_then(Value::as_f64).unwrap_or(0.0);
    let percentiles = latency.get("percentile").and_then(Value::as_object).into_iter().flatten();
    let mut percentiles: Vec<(f64, u64)> =
        percentiles.filter_map(|(at, ns)| Some((at.parse().ok()?, ns.as_u64()?))).collect();
    percentiles.sort_by(|a, b| a.0.total_cmp(&b.0));
    Direction {
        ios: integer(side, "total_ios"),
        bytes: integer(side, "io_bytes"),
        latency: Latency {
            min_ns: integer(latency, "min"),
            max_ns: integer(latency, "max"),
            mean_ns: float("mean"),
            stddev_ns: float("stddev"),
            percentiles,
        },
    }
}

fn integer(value: &Value, key: &str) -> u64 {
    value.get(key).and_then(Value::as_u64).unwrap_or(0)
}

fn pattern(name: &str) -> Option<Rw> {
    let name = if name == "rw" { "readwrite" } else { name };
    serde_json::from_value(Value::String(name.to_owned())).ok()
}

/// A number with fio's binary suffixes; of several numbers, one for each direction, the first.
fn size(text: &str) -> Option<u64> {
    let first = text.split([',', '-']).next()?.trim().to_ascii_lowercase();
    let digits = first.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match first[digits.len()..].trim_end_matches('b').trim_end_matches('i') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn job_error(index: usize, job: &Value, reason: String) -> ReportError {
    let name = job.get("jobname").and_then(Value::as_str).unwrap_or("unnamed").to_owned();
    ReportError::Job { index, name, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_fio_reads_them() {
        assert_eq!(
            ["4k", "4KiB", "513", "1m,2m", "8g"].map(size),
            [4096, 4096, 513, 1 << 20, 8 << 30].map(Some)
        );
        assert_eq!(["", "k", "4x", "99999999999t"].map(size), [None; 4]);
    }

    #[test]
    fn an_error_says_why_a_file_is_not_a_report() {
        let reason = |text: &str| from_json(text).unwrap_err().to_string();
        assert!(reason("IOPS=12k").starts_with("not JSON"));
        assert!(reason("{}").contains("\"jobs\""));
        assert!(reason(r#"{"jobs":[],"blockmux":{"format":2}}"#).contains("report format 2"));
        let job = r#"{"jobs":[{"jobname":"x","job options":{"rw":"trimwrite"}}]}"#;
        assert_eq!(reason(job), "job 0 (x): rw=trimwrite is not supported in reports");
        let row = r#"{"jobs":[{"jobname":"x"}],"blockmux":{"format":1,"command":"","started":"","version":"",
            "machine":{"cpu":"","cores":1,"kernel":"","memory_bytes":1},"suite":null,"rows":[],"skipped":[]}}"#;
        assert!(reason(row).starts_with("job 0 (x): "));
    }
}
