//! The JSON has the shape that fio 3.33 gives its own, and is read back.

#[allow(dead_code, reason = "each test file uses its own part of the fixture")]
mod fixture;

use blockmux_lab::fio_json::{fio_plot_files, from_json, merge, to_json};
use blockmux_lab::job::Rw;
use serde_json::Value;

/// Every key path and the type of its value, of a job that fio ran; see the file's first line.
const FIO_SHAPE: &str = include_str!("fixture/fio-3.33-shape.txt");
/// What fio itself wrote.
const FIO_OUTPUT: &str = include_str!("fixture/fio-3.33.json");

#[test]
fn every_key_that_fio_has_is_there_with_its_type() {
    let document: Value = serde_json::from_str(&to_json(&fixture::comparison())).unwrap();
    let mut missing = Vec::new();
    let paths: Vec<&str> = FIO_SHAPE.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(paths.len() > 150, "the list of paths is cut off");
    for line in paths {
        let (pointer, kind) = line.rsplit_once(' ').unwrap();
        if document.pointer(pointer).map(kind_of) != Some(kind) {
            missing.push(line);
        }
    }
    assert_eq!(missing, Vec::<&str>::new());
}

#[test]
fn the_list_of_keys_is_what_fio_wrote() {
    let document: Value = serde_json::from_str(FIO_OUTPUT).unwrap();
    for line in FIO_SHAPE.lines().filter(|line| !line.starts_with('#')) {
        let (pointer, kind) = line.rsplit_once(' ').unwrap();
        assert_eq!(document.pointer(pointer).map(kind_of), Some(kind), "{pointer}");
    }
}

#[test]
fn what_is_written_is_read_back() {
    let mut comparison = fixture::comparison();
    comparison.suite = Some("zeta".into());
    comparison.skipped.push(("iser 4 KiB".into(), "no such protocol yet".into()));
    assert!(from_json(&to_json(&comparison)).unwrap() == comparison);
}

#[test]
fn the_plain_fields_are_those_of_the_median_run() {
    let comparison = fixture::plain_comparison();
    let document: Value = serde_json::from_str(&to_json(&comparison)).unwrap();
    let nbd = &document["jobs"][5];
    assert_eq!(nbd["jobname"], "nbd: randread-4096-32");
    assert_eq!(nbd["job options"]["bs"], "4k");
    assert_eq!(nbd["job options"]["iodepth"], "32");
    assert_eq!(nbd["read"]["iops"], 747_000.0 * 0.88);
    assert_eq!(nbd["read"]["total_ios"], 1_314_720);
    assert_eq!(nbd["read"]["bw"], 2_629_440);
    assert_eq!(nbd["read"]["iops_samples"], 5);
    assert_eq!(nbd["write"]["iops_samples"], 0);
    assert_eq!(nbd["iodepth_level"]["32"], 100.0);
    assert_eq!(nbd["blockmux"]["runs"].as_array().unwrap().len(), 5);
    assert_eq!(nbd["blockmux"]["figures"]["iops"]["median"], 747_000.0 * 0.88);
}

#[test]
fn the_latency_buckets_hold_every_io() {
    let document: Value = serde_json::from_str(&to_json(&fixture::comparison())).unwrap();
    for job in document["jobs"].as_array().unwrap() {
        let buckets = ["latency_ns", "latency_us", "latency_ms"];
        let values = buckets.iter().flat_map(|name| job[name].as_object().unwrap().values());
        let sum: f64 = values.map(|value| value.as_f64().unwrap()).sum();
        assert!((sum - 100.0).abs() < 1e-6, "{}: {sum}", job["jobname"]);
    }
}

#[test]
fn a_file_for_each_job_is_named_as_plotting_tools_expect() {
    let files = fio_plot_files(&fixture::comparison());
    assert_eq!(files[1].0, "nbd-adaptive-4k/randread-1-1.json");
    let document: Value = serde_json::from_str(&files[1].1).unwrap();
    assert_eq!(document["jobs"].as_array().unwrap().len(), 1);
    let mut names: Vec<_> = files.iter().map(|file| &file.0).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), files.len());
}

#[test]
fn a_report_of_fio_itself_is_read() {
    let comparison = from_json(&format!("note: both iodepth >= 1 and synchronous\n{FIO_OUTPUT}")).unwrap();
    let row = &comparison.rows[0];
    assert_eq!((row.job.rw, row.job.bs, row.job.iodepth), (Rw::RandRead, 4096, 32));
    assert_eq!(row.runs[0].read.ios, 256);
    assert_eq!(row.runs[0].percentile_ns(99.99), Some(row.runs[0].read.latency.percentiles[16].1));
    assert_eq!(comparison.started.len(), "2026-11-21T12:00:00Z".len());
}

#[test]
fn merged_reports_keep_their_own_ceilings() {
    let one = fixture::plain_comparison();
    let mut two = one.clone();
    for row in two.rows.iter_mut().filter(|row| row.kind.is_ceiling()) {
        row.runs.iter_mut().for_each(|run| run.runtime_ns *= 2);
    }
    let all = merge(vec![("a".into(), one.clone()), ("b".into(), two)]).unwrap();
    assert_eq!(all.rows.len(), one.rows.len() * 2);
    assert_eq!(all.rows[1].subject, "nbd (a)");
    let share = |index: usize| all.share_of_ceiling(&all.rows[index]).unwrap();
    assert!((share(1 + one.rows.len()) - share(1) * 2.0).abs() < 1e-9);
}

#[test]
fn merged_reports_that_share_no_row_keep_their_names() {
    let one = fixture::plain_comparison();
    let mut two = one.clone();
    two.rows.iter_mut().for_each(|row| row.job.bs = 512);
    let all = merge(vec![("a".into(), one), ("b".into(), two)]).unwrap();
    assert!(all.rows.iter().all(|row| !row.subject.contains('(')));
    assert_eq!(merge(Vec::new()), None);
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "list",
        Value::Object(_) => "object",
    }
}
