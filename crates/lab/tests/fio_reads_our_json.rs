//! The JSON reports have the format of fio 3.33, and are read back.

#[allow(dead_code, reason = "each test file uses its own part of the fixture")]
mod fixture;

use blockmux_lab::fio_json::{from_json, merge, to_json};
use blockmux_lab::job::Rw;
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Command;

/// Every key path and the type of its value, of a job that fio ran; see the file's first line.
const FIO_SHAPE: &str = include_str!("fixture/fio-3.33-shape.txt");
/// Output of fio itself.
const FIO_OUTPUT: &str = include_str!("fixture/fio-3.33.json");

#[test]
fn every_key_of_fio_is_present_with_its_type() {
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
fn the_list_of_keys_matches_fios_output() {
    let document: Value = serde_json::from_str(FIO_OUTPUT).unwrap();
    for line in FIO_SHAPE.lines().filter(|line| !line.starts_with('#')) {
        let (pointer, kind) = line.rsplit_once(' ').unwrap();
        assert_eq!(document.pointer(pointer).map(kind_of), Some(kind), "{pointer}");
    }
}

#[test]
fn the_keys_match_the_installed_fio() {
    let options =
        ["--name=x", "--ioengine=null", "--size=1m", "--rw=randrw", "--iodepth=8", "--output-format=json"];
    let output = match Command::new("fio").args(options).output() {
        Ok(output) => String::from_utf8(output.stdout).unwrap(),
        Err(error) => return skip(&error),
    };
    let theirs: Value = serde_json::from_str(&output[output.find('{').unwrap()..]).unwrap();
    let ours: Value = serde_json::from_str(&to_json(&fixture::comparison())).unwrap();
    // fio has more keys for directions with I/O; our report is one of reads.
    let (theirs, ours) = (keys("", &theirs), keys("", &ours));
    let of_writes = |key: &&String| key.starts_with("/jobs/0/write/clat_ns/percentile");
    let missing: Vec<&String> = theirs.difference(&ours).filter(|key| !of_writes(key)).collect();
    assert_eq!(missing, Vec::<&String>::new());
    let more: Vec<&String> = ours.difference(&theirs).collect();
    assert_eq!(more, ["/blockmux", "/jobs/0/blockmux"]);
}

#[allow(clippy::print_stderr, reason = "a skipped test says why")]
fn skip(error: &std::io::Error) {
    eprintln!("skipped: cannot run fio: {error}");
}

/// Paths of all values; of a list, only of the first entry. Our own keys and a job's options are
/// omitted.
fn keys(path: &str, value: &Value) -> BTreeSet<String> {
    let below: Vec<(String, &Value)> = match value {
        Value::Object(entries) => {
            entries.iter().map(|(key, value)| (format!("{path}/{key}"), value)).collect()
        }
        Value::Array(entries) => {
            entries.first().map(|first| (format!("{path}/0"), first)).into_iter().collect()
        }
        _ => Vec::new(),
    };
    let mut keys = BTreeSet::new();
    for (key, value) in below {
        if !key.ends_with("/blockmux") && !key.ends_with("/job options") {
            keys.extend(self::keys(&key, value));
        }
        keys.insert(key);
    }
    keys
}

#[test]
fn cpu_time_is_that_of_the_initiator_as_user_and_system_time() {
    let mut comparison = fixture::plain_comparison();
    let nbd = &mut comparison.rows[5];
    for run in &mut nbd.runs {
        (run.initiator_cpu_ns, run.initiator_system_ns) = (Some(1_500_000_000), Some(1_000_000_000));
        (run.target_cpu_ns, run.target_system_ns) = (Some(900_000_000), Some(800_000_000));
    }
    let document: Value = serde_json::from_str(&to_json(&comparison)).unwrap();
    let nbd = &document["jobs"][5];
    // The run has two seconds.
    assert_eq!((&nbd["usr_cpu"], &nbd["sys_cpu"]), (&Value::from(25.0), &Value::from(50.0)));
    assert_eq!(nbd["blockmux"]["runs"][0]["target_system_ns"], 800_000_000);
}

#[test]
fn a_report_survives_json() {
    let mut comparison = fixture::comparison();
    comparison.suite = Some("zeta".into());
    comparison.skipped.push(("iser 4 KiB".into(), "no such protocol yet".into()));
    assert!(from_json(&to_json(&comparison)).unwrap() == comparison);
}

#[test]
fn the_fields_of_fio_are_those_of_the_median_run() {
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
fn a_report_by_fio_is_read() {
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
    assert_eq!(all.rows[1].configuration, "nbd (a)");
    let share = |index: usize| all.share_of_ceiling(&all.rows[index]).unwrap();
    assert!((share(1 + one.rows.len()) - share(1) * 2.0).abs() < 1e-9);
}

#[test]
fn an_unknown_machine_is_replaced_by_a_known_one() {
    let fio = from_json(FIO_OUTPUT).unwrap();
    let ours = fixture::plain_comparison();
    for reports in [[("a", &fio), ("b", &ours)], [("a", &ours), ("b", &fio)]] {
        let all = merge(reports.map(|(name, report)| (name.into(), report.clone())).into()).unwrap();
        assert_eq!((&all.machine.cpu, &all.machine.kernel), (&ours.machine.cpu, &ours.machine.kernel));
    }
}

#[test]
fn merged_reports_that_share_no_row_keep_their_names() {
    let one = fixture::plain_comparison();
    let mut two = one.clone();
    two.rows.iter_mut().for_each(|row| row.job.bs = 512);
    let all = merge(vec![("a".into(), one), ("b".into(), two)]).unwrap();
    assert!(all.rows.iter().all(|row| !row.configuration.contains('(')));
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
