//! Reads reports by blockmux and by fio.

use super::{FORMAT, Header};
use crate::change::is_same_case;
use crate::content::Verify;
use crate::job::{Job, Rw};
use crate::result::UNKNOWN;
use crate::result::{Changes, Comparison, ConfigurationKind, Direction, Latency, Machine, Row, Run};
use crate::units::{Size, parse_int, parse_size};
use crate::when;
use serde_json::{Map, Value};

/// Why a file is not a report: the part that is wrong, and what was expected.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ReportError(String);

impl ReportError {
    fn foreign() -> ReportError {
        ReportError("not a report of blockmux or fio: there is no list named \"jobs\"".to_owned())
    }
}

impl From<serde_json::Error> for ReportError {
    fn from(error: serde_json::Error) -> ReportError {
        ReportError(format!("not JSON: {error}"))
    }
}

/// Reads what [`super::to_json`] wrote, or fio with `--output-format=json` or `json+`: one or more
/// documents, with any text of fio between them.
///
/// In fio's file each job is a row, whose configuration is the job's name; its target's CPU time is
/// unknown. A job that a row cannot describe is in `skipped`.
///
/// # Errors
/// If the text has no report, or a document of it is damaged.
pub fn from_json(text: &str) -> Result<Comparison, ReportError> {
    let documents = documents(text)?;
    if let [document] = &documents[..] {
        return comparison(document);
    }
    let named =
        (1..).zip(&documents).map(|(number, document)| Ok((format!("{number}"), comparison(document)?)));
    merge(named.collect::<Result<_, ReportError>>()?).ok_or_else(ReportError::foreign)
}

/// The JSON documents of a text that have jobs. A document begins with a line that begins with `{`.
fn documents(text: &str) -> Result<Vec<Value>, ReportError> {
    let mut found = Vec::new();
    let mut is_json = false;
    let mut at = 0;
    while let Some(start) = next_line_with_brace(text, at) {
        let rest = &text[start..];
        let mut stream = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        at = start + 1;
        match stream.next() {
            Some(Ok(document)) => {
                at = start + stream.byte_offset();
                is_json = true;
                found.extend(jobs_of(&document).is_some().then_some(document));
            }
            // Text such as "{note}" is not a damaged document.
            Some(Err(error)) if rest[1..].trim_start().starts_with(['"', '}']) => return Err(error.into()),
            _ => {}
        }
    }
    if found.is_empty() && !is_json {
        serde_json::from_str::<Value>(text)?;
    }
    if found.is_empty() { Err(ReportError::foreign()) } else { Ok(found) }
}

/// The offset of the first `{` at the beginning of a line, from offset `at` on.
fn next_line_with_brace(text: &str, at: usize) -> Option<usize> {
    if at == 0 && text.starts_with('{') {
        return Some(0);
    }
    let from = at.saturating_sub(1);
    // A progress line of fio ends with a carriage return.
    let begins = ["\n{", "\r{"].into_iter().filter_map(|begin| text.get(from..)?.find(begin));
    begins.min().map(|found| from + found + 1)
}

/// The jobs of a document; of fio's clients and servers, those of all servers.
fn jobs_of(document: &Value) -> Option<&Vec<Value>> {
    ["jobs", "client_stats"].into_iter().find_map(|key| document.get(key)).and_then(Value::as_array)
}

fn comparison(document: &Value) -> Result<Comparison, ReportError> {
    let jobs = jobs_of(document).ok_or_else(ReportError::foreign)?;
    let Some(header) = document.get("blockmux") else { return fio_report(document, jobs) };
    let format = header.get("format").and_then(Value::as_u64).unwrap_or(0);
    if format > u64::from(FORMAT) {
        return Err(ReportError(format!(
            "written in report format {format}, and this version reads up to {FORMAT}: use a newer blockmux"
        )));
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
    let changes = match &reports[..] {
        [(before, first), (after, second)] => Changes::between((before, first), (after, second)),
        _ => None,
    };
    let is_merged = reports.len() > 1;
    let mut reports = reports.into_iter().zip(clash).enumerate();
    let rename = |(number, ((name, mut report), clash)): (usize, ((String, Comparison), bool))| {
        for row in report.rows.iter_mut().filter(|_| clash) {
            row.report = u8::try_from(number).unwrap_or(u8::MAX);
            row.configuration = format!("{} ({name})", row.configuration);
            if !row.protocol.is_empty() {
                row.protocol = format!("{} ({name})", row.protocol);
            }
        }
        report
    };
    let mut all = rename(reports.next()?);
    if is_merged {
        all.changes = changes;
    }
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
        for condition in report.conditions {
            if !all.conditions.contains(&condition) {
                all.conditions.push(condition);
            }
        }
    }
    Some(all)
}

/// For each report, whether one of its rows has the same name as a row of another one.
fn clashes(reports: &[(String, Comparison)]) -> Vec<bool> {
    let clash = |at: usize, report: &Comparison| {
        let mut others = reports.iter().enumerate().filter(|&(other, _)| other != at);
        others
            .any(|(_, (_, other))| report.rows.iter().any(|a| other.rows.iter().any(|b| is_same_case(a, b))))
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
    let (mut rows, mut skipped) = (Vec::new(), Vec::new());
    // With several servers, fio adds a job that is the sum of all.
    let is_sum = |job: &Value| jobs.len() > 1 && job_name(job) == "All clients";
    for (index, job) in jobs.iter().enumerate().filter(|(_, job)| !is_sum(job)) {
        match fio_row(job, globals) {
            Ok(row) => rows.push(row),
            Err(reason) if jobs.len() == 1 => return Err(job_error(index, job, reason)),
            Err(reason) => skipped.push((job_name(job).to_owned(), reason)),
        }
    }
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
        skipped,
        conditions: Vec::new(),
        changes: None,
    })
}

fn fio_row(job: &Value, globals: &Map<String, Value>) -> Result<Row, String> {
    let own = job.get("job options").and_then(Value::as_object);
    let option = |name: &str| own.and_then(|own| own.get(name)).or_else(|| globals.get(name))?.as_str();
    let name = job_name(job);
    let target = ["uri", "filename", "directory"].into_iter().find_map(option).unwrap_or_default();
    Ok(Row {
        configuration: name.to_owned(),
        kind: ConfigurationKind::Protocol,
        protocol: String::new(),
        target: target.to_owned(),
        poll: String::new(),
        job: fio_job(name, job, option)?,
        report: 0,
        runs: vec![fio_run(job)],
    })
}

fn fio_job<'a>(name: &str, job: &Value, option: impl Fn(&str) -> Option<&'a str>) -> Result<Job, String> {
    // Options only describe the row, so one of a form that is unknown here has fio's default.
    let small = |key: &str, default: u32| {
        option(key).and_then(size).and_then(|number| u32::try_from(number).ok()).unwrap_or(default)
    };
    let rw = option("rw").or_else(|| option("readwrite")).unwrap_or("read");
    // "randread:8" takes eight blocks for each random offset.
    let pattern = pattern(rw.split(':').next().unwrap_or(rw));
    let rwmixread = option("rwmixwrite")
        .map_or_else(|| small("rwmixread", 50), |_| 100 - small("rwmixwrite", 50).min(100));
    let bs = option("bs").or_else(|| option("blocksize"));
    let ranges = ["bsrange", "blocksize_range", "bssplit"];
    let is_range = ranges.into_iter().any(|key| option(key).is_some());
    Ok(Job {
        name: name.to_owned(),
        rw: pattern.ok_or_else(|| format!("rw={rw} is not supported in reports"))?,
        // Of ranges, splits and sizes by direction, the mean of what was done.
        bs: match bs.map_or(Some(4096), one_size).filter(|_| !is_range) {
            Some(bs) => u32::try_from(bs).unwrap_or_else(|_| mean_bs(job)),
            None => mean_bs(job),
        },
        iodepth: small("iodepth", 1),
        numjobs: small("numjobs", 1),
        runtime_ms: integer(job, "job_runtime"),
        ramp_time_ms: 0,
        size: option("size").and_then(|text| parse_size(text).ok()),
        offset: option("offset").and_then(|text| parse_size(text).ok()).unwrap_or(Size::ZERO),
        rwmixread: u8::try_from(rwmixread).unwrap_or(100).min(100),
        verify: option("verify").map(|how| if how == "crc32c" { Verify::Crc32c } else { Verify::Pattern }),
        fua_every: 0,
        fsync_every: small("fsync", 0),
        randseed: 0,
        ..Job::default()
    })
}

/// Bytes of one I/O in the mean, or fio's default block size if there was none.
fn mean_bs(job: &Value) -> u32 {
    let run = fio_run(job);
    let mean = run.bytes().checked_div(run.ios()).and_then(|bs| u32::try_from(bs).ok());
    mean.filter(|&bs| bs > 0).unwrap_or(4096)
}

fn fio_run(job: &Value) -> Run {
    let side = |name: &str| job.get(name).map(fio_direction).unwrap_or_default();
    let runtime = |name: &str| job.get(name).map_or(0, |side| integer(side, "runtime"));
    let runtime_ms = ["read", "write", "trim", "mixed"].into_iter().map(runtime).max().unwrap_or(0);
    // With `unified_rw_reporting=both`, `mixed` repeats the others.
    let is_split = ["read", "write", "trim"].iter().any(|&name| side(name).ios > 0);
    let percent = |name: &str| job.get(name).and_then(Value::as_f64).unwrap_or(0.0);
    let cpu_ns = |percent: f64| (percent / 100.0 * integer(job, "job_runtime") as f64 * 1e6) as u64;
    Run {
        runtime_ns: runtime_ms.saturating_mul(1_000_000),
        read: side("read"),
        write: side("write"),
        trim: side("trim"),
        mixed: if is_split { Direction::default() } else { side("mixed") },
        errors: u64::from(integer(job, "error") != 0),
        verify_errors: 0,
        target_cpu_ns: None,
        initiator_cpu_ns: Some(cpu_ns(percent("usr_cpu") + percent("sys_cpu"))),
        target_system_ns: None,
        initiator_system_ns: Some(cpu_ns(percent("sys_cpu"))),
        machine_cpu_ns: None,
    }
}

fn fio_direction(side: &Value) -> Direction {
    let empty = Value::Null;
    let latencies = || ["clat_ns", "lat_ns"].into_iter().filter_map(|name| side.get(name));
    // With `gtod_reduce` there is none, and all its fields are 0.
    let latency = latencies().find(|latency| integer(latency, "N") > 0).unwrap_or(&empty);
    let float = |name: &str| latency.get(name).and_then(Value::as_f64).unwrap_or(0.0);
    let percentiles = latencies().find_map(|latency| latency.get("percentile")?.as_object());
    let mut percentiles: Vec<(f64, u64)> = percentiles
        .into_iter()
        .flatten()
        .filter_map(|(at, ns)| Some((at.parse().ok()?, ns.as_u64()?)))
        .collect();
    percentiles.sort_by(|a, b| a.0.total_cmp(&b.0));
    if latency.is_null() {
        percentiles.clear();
    }
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
    parse_int(text.split([',', '-', '/', ':']).next()?.trim()).ok()
}

/// The size that a text gives for all directions.
fn one_size(text: &str) -> Option<u64> {
    let mut sizes = text.split(',').filter(|text| !text.is_empty()).map(size);
    let first = sizes.next()??;
    sizes.all(|other| other == Some(first)).then_some(first)
}

fn job_name(job: &Value) -> &str {
    job.get("jobname").and_then(Value::as_str).unwrap_or("unnamed")
}

fn job_error(index: usize, job: &Value, reason: String) -> ReportError {
    ReportError(format!("job {index} ({}): {reason}", job_name(job)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_fio_reads_them() {
        assert_eq!(
            ["4k", "4KiB", "513", "1m,2m", "8g", "1.5k", "512-4k", "4k/60:8k/40"].map(size),
            [4096, 4096, 513, 1 << 20, 8 << 30, 1536, 512, 4096].map(Some)
        );
        assert_eq!(["", "k", "4x", "99999999999t"].map(size), [None; 4]);
    }

    /// A document of fio with one job. `sides` has its directions, as fio 3.33 writes them.
    fn document(name: &str, options: &str, sides: &str) -> String {
        let job = format!(
            r#"{{"jobname":"{name}","error":0,"job options":{{{options}}},{sides},"job_runtime":1000}}"#
        );
        format!("{{\n  \"fio version\" : \"fio-3.33\",\n  \"timestamp\" : 1,\n  \"jobs\" : [\n{job}\n]\n}}\n")
    }

    /// A direction with `ios` of 4 KiB in one second, each of which took `us` microseconds.
    fn side(name: &str, ios: u64, us: u64) -> String {
        let (bytes, ns) = (ios * 4096, us * 1000);
        format!(
            r#""{name}":{{"io_bytes":{bytes},"total_ios":{ios},"runtime":1000,"clat_ns":{{"N":{ios},"min":{ns},"max":{ns},
            "mean":{ns}.0,"percentile":{{"99.000000":{ns}}}}}}}"#
        )
    }

    #[test]
    fn every_unified_reporting_gives_the_same_figures() {
        let mixed = side("mixed", 300, 20);
        let split = [side("read", 200, 20), side("write", 100, 20), side("trim", 0, 0)].join(",");
        for (how, sides) in
            [("none", split.clone()), ("mixed", mixed.clone()), ("both", format!("{split},{mixed}"))]
        {
            let report = from_json(&document("x", r#""rw":"randrw""#, &sides)).unwrap();
            let run = &report.rows[0].runs[0];
            assert_eq!((run.ios(), run.bytes(), run.runtime_ns), (300, 300 * 4096, 1_000_000_000), "{how}");
            assert_eq!((run.mean_ns(), run.percentile_ns(99.0)), (Some(20_000.0), Some(20_000)), "{how}");
        }
    }

    #[test]
    fn io_of_unknown_direction_is_written_and_read_back() {
        let report = from_json(&document("x", r#""rw":"randrw""#, &side("mixed", 300, 20))).unwrap();
        assert_eq!(from_json(&super::super::to_json(&report)).unwrap(), report);
    }

    #[test]
    fn latency_that_was_not_measured_is_unknown() {
        // As with `gtod_reduce`.
        let read = r#""read":{"io_bytes":4096,"total_ios":1,"runtime":1000,"lat_ns":{"N":0,"min":0,"max":0,"mean":0.0},
            "clat_ns":{"N":0,"min":0,"max":0,"mean":0.0,"percentile":{"99.000000":0}}}"#;
        let report = from_json(&document("x", r#""rw":"read""#, read)).unwrap();
        let run = &report.rows[0].runs[0];
        assert_eq!((run.ios(), run.mean_ns(), run.max_ns(), run.percentile_ns(99.0)), (1, None, None, None));
    }

    #[test]
    fn percentiles_of_total_latency_are_read() {
        // As with `lat_percentiles`, where completion latency has none.
        let read = r#""read":{"io_bytes":4096,"total_ios":1,"runtime":1000,"clat_ns":{"N":1,"min":5,"max":5,"mean":5.0},
            "lat_ns":{"N":1,"min":7,"max":7,"mean":7.0,"percentile":{"99.000000":7}}}"#;
        let report = from_json(&document("x", r#""rw":"read""#, read)).unwrap();
        assert_eq!(report.rows[0].runs[0].percentile_ns(99.0), Some(7));
    }

    #[test]
    fn text_of_fio_and_further_documents_are_read() {
        let first = document("a", r#""rw":"read""#, &side("read", 10, 1));
        let second = document("b", r#""rw":"write""#, &side("write", 20, 1));
        let text = format!(
            "fio: note {{x}}\n{{y}}\n{first}\nx: (groupid=0, jobs=1)\n  iops {{1}}\n{second}Run status\n"
        );
        let report = from_json(&text).unwrap();
        let names: Vec<&str> = report.rows.iter().map(|row| row.configuration.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
    }

    #[test]
    fn a_damaged_document_is_an_error_even_behind_a_whole_one() {
        let whole = document("a", r#""rw":"read""#, &side("read", 10, 1));
        let damaged = &whole[..whole.len() / 2];
        let refused = from_json(&format!("{whole}{damaged}")).unwrap_err().to_string();
        assert!(refused.starts_with("not JSON: "), "{refused}");
    }

    #[test]
    fn a_job_that_cannot_be_shown_does_not_hide_the_others() {
        let text = r#"{"jobs":[{"jobname":"x","job options":{"rw":"trimwrite"}},
            {"jobname":"y","job options":{"rw":"randread:8","bsrange":"4k-64k","iodepth":"many"},
            "read":{"io_bytes":16384,"total_ios":2,"runtime":10}}]}"#;
        let report = from_json(text).unwrap();
        assert_eq!(report.skipped, [("x".to_owned(), "rw=trimwrite is not supported in reports".to_owned())]);
        let job = &report.rows[0].job;
        assert_eq!((job.rw, job.bs, job.iodepth), (Rw::RandRead, 8192, 1));
    }

    #[test]
    fn the_servers_of_fio_are_rows() {
        let text =
            document("a", r#""rw":"read""#, &side("read", 10, 1)).replace("\"jobs\"", "\"client_stats\"");
        assert_eq!(from_json(&text).unwrap().rows.len(), 1);
        let job = |name: &str| format!(r#"{{"jobname":"{name}","job options":{{"rw":"read"}}}}"#);
        let text = format!(r#"{{"client_stats":[{},{},{}]}}"#, job("a"), job("a"), job("All clients"));
        assert_eq!(from_json(&text).unwrap().rows.len(), 2, "their sum is no row");
    }

    #[test]
    fn a_progress_line_may_precede_a_document() {
        let document = document("a", r#""rw":"read""#, &side("read", 10, 1));
        let text = format!("Jobs: 1 (f=1)\rJobs: 1 (f=1): [R(1)][100.0%]\r{document}");
        assert_eq!(from_json(&text).unwrap().rows.len(), 1);
    }

    #[test]
    fn the_block_size_of_a_row_is_that_of_its_job() {
        let bs = |options: &str| {
            let side = r#""read":{"io_bytes":30000,"total_ios":10,"runtime":10}"#;
            from_json(&document("a", options, side)).unwrap().rows[0].job.bs
        };
        assert_eq!(bs(r#""rw":"read""#), 4096, "fio's default, also if a last I/O is cut short");
        assert_eq!(bs(r#""rw":"read","bs":"8k,8k""#), 8192);
        assert_eq!(bs(r#""rw":"read","bs":"4k,8k""#), 3000);
        assert_eq!(bs(r#""rw":"read","bsrange":"4k-64k""#), 3000);
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
