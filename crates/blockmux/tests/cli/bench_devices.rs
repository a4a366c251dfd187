//! `blockmux bench --device`: disks of this machine beside volumes.

use crate::bench::{Bench, jobs, printed};
use crate::control::LoopDevice;
use crate::daemon::Daemon;
use crate::program::text;
use rustix::fs::OFlags;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A file of 16 MiB with data.
fn disk(bench: &Bench) -> String {
    let file = bench.path("disk");
    fs::write(&file, vec![0xA5; 16 << 20]).unwrap();
    file
}

fn is_untouched(file: &str) -> bool {
    fs::read(file).unwrap().iter().all(|&byte| byte == 0xA5)
}

fn rows<'a>(report: &'a Value, kind: &str) -> Vec<&'a Value> {
    jobs(report).iter().map(|job| &job["blockmux"]).filter(|row| row["kind"] == kind).collect()
}

#[test]
fn a_disk_is_measured_beside_a_volume_of_another_server_with_the_cpu_time_of_the_machine() {
    let bench = Bench::new();
    let file = disk(&bench);
    let daemon = Daemon::serve(&["mem:16m", "--nbd", "127.0.0.1:0"]);
    let url = daemon.json["exports"][0]["urls"][0].as_str().unwrap().to_owned();
    // Long enough for the kernel's count of idle time.
    let words = "--rw randread --iodepth 8 --no_ceiling --runs 2 --runtime 0.2";
    let out = printed(&bench.command(words, &["--device", &file, &url]).output().unwrap());
    // Long names are shortened in the middle.
    assert!(out.contains(&format!("\n{}", &url[..12])) && out.contains(" (file) "), "{out}");
    let heading = out.lines().find(|line| line.contains("IOPS")).unwrap();
    assert!(heading.split_whitespace().any(|column| column == "all"), "{out}");
    let all = out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(all.contains("all: CPU time of this whole machine for each I/O"), "{out}");
    assert!(out.lines().all(|line| line.chars().count() <= 80 || line.starts_with(&bench.path(""))), "{out}");
    let report = bench.json();
    assert_eq!(jobs(&report).len(), 2, "no other volume is measured");
    let [row] = rows(&report, "device")[..] else { panic!("{report}") };
    assert_eq!((&row["target"], &row["protocol"]), (&file.as_str().into(), &"file".into()));
    assert_eq!(row["runs"][0]["target_cpu_ns"], Value::Null);
    for row in [row, rows(&report, "protocol")[0]] {
        assert!(row["figures"]["machine_cpu_us_per_io"]["median"].as_f64().unwrap() > 0.0, "{row}");
    }
    let page = bench.read("bench.html");
    assert!(page.contains("the rest of the machine") && page.contains("(file)"));
    // The report of a report has it, too.
    let again = printed(&crate::program::blockmux(["report", &bench.path("report/bench.json")]));
    assert!(again.contains(" (file) "), "{again}");
}

#[test]
fn without_a_disk_there_is_no_column_of_the_machine() {
    let bench = Bench::new();
    let out = printed(&bench.run("mem:4m --rw randread --no_ceiling", &[]));
    let heading = out.lines().find(|line| line.contains("IOPS")).unwrap();
    assert!(!heading.split_whitespace().any(|column| column == "all"), "{out}");
    assert!(!out.contains("whole machine"), "{out}");
}

#[test]
fn nothing_is_written_to_a_disk_without_overwrite() {
    let bench = Bench::new();
    let file = disk(&bench);
    let device = ["--device", file.as_str()];
    // The default jobs leave out those that write.
    let out = printed(&bench.run("--no_ceiling", &device));
    assert!(out.contains("would be overwritten (give --overwrite"), "{out}");
    assert!(is_untouched(&file));
    // Jobs of the user are refused, although the pattern says so.
    for words in ["--rw randwrite", "--rw trim", "--rw randrw", "--suite taocloud-2022"] {
        let output = bench.run(words, &device);
        let said = text(&output.stderr);
        let expected =
            format!(" would overwrite {file}, which existed before; to allow that, give --overwrite");
        assert!(output.status.code() == Some(2) && said.contains(&expected), "{words}: {said}");
        assert!(is_untouched(&file), "{words}");
    }
    printed(&bench.run("--rw randwrite --overwrite --no_ceiling", &device));
    assert!(!is_untouched(&file));
}

#[test]
fn a_block_device_has_its_name_and_driver_and_must_not_be_in_use() {
    let bench = Bench::new();
    let file = disk(&bench);
    let Some(device) = LoopDevice::over(Path::new(&file), &[]) else { return };
    let out = printed(&bench.run("--rw read --no_ceiling", &["--device", &device.0]));
    let name = device.0.strip_prefix("/dev/").unwrap();
    assert!(out.contains(&format!("\n{name} (loop) ")), "{out}");
    assert_eq!(rows(&bench.json(), "device")[0]["protocol"], "loop");
    let twice = bench.run("--rw read", &["--device", &device.0, "--device", &device.0]);
    assert!(text(&twice.stderr).contains("is given twice"), "{}", text(&twice.stderr));
    // A mounted file system holds its device in this way.
    let _user =
        fs::OpenOptions::new().read(true).custom_flags(OFlags::EXCL.bits() as i32).open(&device.0).unwrap();
    let output = bench.run("--rw read", &["--device", &device.0]);
    let expected = format!("blockmux: block:{}: is mounted or in use; unmount it\n", device.0);
    assert_eq!((text(&output.stderr), output.status.code()), (expected, Some(2)));
}

#[test]
fn a_read_only_disk_can_be_read() {
    let bench = Bench::new();
    let file = disk(&bench);
    let Some(device) = LoopDevice::over(Path::new(&file), &["--read-only"]) else { return };
    printed(&bench.run("--rw read --no_ceiling", &["--device", &device.0]));
    let output = bench.run("--rw write --overwrite", &["--device", &device.0]);
    assert!(text(&output.stderr).contains("is read-only, and write writes"), "{}", text(&output.stderr));
}

#[test]
fn a_suite_measures_a_disk_after_its_protocols() {
    let bench = Bench::new();
    let file = disk(&bench);
    let words =
        "--suite zeta-2016 --size 16m --overwrite --no_ceiling --runs 1 --runtime 0.02 --ramp_time 0.01";
    let out = printed(&bench.command(words, &["--device", &file]).output().unwrap());
    let (disk, nbd) = (out.find(" (file) ").unwrap(), out.find("\nnbd ").unwrap());
    assert!(nbd < disk, "{out}");
    let report = bench.json();
    assert_eq!(rows(&report, "device").len(), rows(&report, "local").len());
}
