//! `blockmux bench --file-system`: a study of a file system, on disks that the bench attaches.
//!
//! The tests that measure need root, loop devices, bonnie++ and mkfs.xfs. Without them they print a
//! line that begins with `skipped: ` and end.

use crate::bench::{Bench, jobs, printed};
use crate::control::eventually;
use crate::privileges::is_root;
use crate::program::{BLOCKMUX, end_by, has, text};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const SUITE: &str = "--suite aatrokoski-2007 --file-system";

#[expect(clippy::print_stdout, reason = "a skipped test says why")]
fn can_measure() -> bool {
    let has_loop_devices = Path::new("/dev/loop-control").exists() && Path::new("/dev/fuse").exists();
    if !has_loop_devices {
        println!("skipped: no loop devices or no FUSE");
    }
    let programs = ["bonnie++", "mkfs.xfs", "losetup", "mount", "ip", "tc"];
    has_loop_devices && programs.into_iter().all(has) && is_root()
}

/// What the bench may leave behind, of all benches with this directory for temporary files.
fn left_behind(directory: &str) -> Vec<String> {
    let backing = |entry: fs::DirEntry| fs::read_to_string(entry.path().join("loop/backing_file"));
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten().flat_map(backing);
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    let places = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path().display().to_string());
    let lines = mounts.lines().map(str::to_owned);
    devices.chain(lines).filter(|line| line.contains(directory)).chain(places).collect()
}

/// A bench whose temporary files are in `files`, which exists.
fn command(bench: &Bench, words: &str, rest: &[&str]) -> Command {
    let files = bench.path("files");
    fs::create_dir_all(&files).unwrap();
    let mut command = bench.command(&format!("{SUITE} {words}"), rest);
    command.env("TMPDIR", files);
    command
}

fn refused(output: &Output) -> String {
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
    said
}

#[test]
fn bonnie_runs_on_xfs_over_attached_disks_and_its_rates_stand_beside_those_of_the_study() {
    if !can_measure() {
        return;
    }
    let bench = Bench::new();
    let cells = [
        "local, 4-way stripe",
        "aoe, 12-way stripe, 1 Gbit/s, MTU 4132",
        "nbd, 4-way stripe, 1 Gbit/s, MTU 1500",
    ];
    let only = cells.map(|cell| format!("--only={cell}"));
    let only = only.iter().map(String::as_str).collect::<Vec<_>>();
    let out = printed(&command(&bench, "--size 96m --runs 2", &only).output().unwrap());
    for table in ["\naoe, 12-way stripe", "\nnbd, 4-way stripe"] {
        assert!(out.contains(&format!("{table}, MB/s: measured here, then as published\n")), "{out}");
    }
    let words = out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("wrote 96 MiB in each run, on XFS on a disk attached by "), "{out}");
    assert!(out.lines().all(|line| line.chars().count() <= 80 || line.starts_with(&bench.path(""))), "{out}");
    let report = bench.json();
    let rows: Vec<&Value> = jobs(&report).iter().map(|job| &job["blockmux"]).collect();
    let of_aoe = rows.iter().filter(|row| row["protocol"] == "aoe");
    assert_eq!(of_aoe.clone().count(), 3, "{out}");
    // Over 1 Gbit/s, a test usually takes long enough for a rate, but for what is in the cache.
    let rates: Vec<f64> =
        of_aoe.clone().filter_map(|row| row["figures"]["mb_per_s"]["median"].as_f64()).collect();
    assert!(!rates.is_empty(), "{out}");
    assert!(rates.iter().all(|rate| *rate > 0.0 && *rate < 500.0), "no more than the link: {out}");
    for row in of_aoe {
        assert_eq!(row["job"]["program"], "bonnie++ on XFS");
        assert!(row["runs"].as_array().unwrap().len() <= 2, "{row}");
    }
    let page = bench.read("bench.html");
    for part in ["<caption>nbd, 4-way stripe, MB/s</caption>", "Block read, 12 disks", "96 MiB"] {
        assert!(page.contains(part), "no {part:?}");
    }
    assert_eq!(left_behind(&bench.path("files")), [""; 0]);
}

#[test]
fn an_interrupt_removes_everything_that_was_made() {
    if !can_measure() {
        return;
    }
    let bench = Bench::new();
    let only = "--only=aoe, 4-way stripe, 1 Gbit/s, MTU 1500";
    let mut command = command(&bench, "--size 64m --runs 1", &[only]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let files = bench.path("files");
    // The file system is mounted where only the bench sees it.
    let mounts = format!("/proc/{}/task", child.id());
    let is_mounted = || {
        let threads = fs::read_dir(&mounts).into_iter().flatten().flatten();
        let of_thread = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("mounts"));
        threads
            .flat_map(of_thread)
            .any(|mounts| mounts.lines().any(|line| line.contains(&files) && line.contains(" xfs ")))
    };
    eventually("the file system is mounted", is_mounted);
    assert_eq!(end_by(&mut child, Signal::INT).code(), Some(130));
    assert_eq!(left_behind(&files), [""; 0]);
}

#[test]
fn what_does_not_fit_a_file_system_is_refused_in_one_line() {
    let bench = Bench::new();
    for (words, expected) in [
        (
            "--suite zeta-2016 --file-system",
            "--suite zeta-2016: its study measured no file system; omit --file-system",
        ),
        (
            "--suite aatrokoski-2007 --file-system mem:1g",
            "mem:1g: --file-system measures stripes of RAM; omit it",
        ),
        (
            "--suite aatrokoski-2007 --file-system --runtime 1",
            "--runtime has no effect on bonnie++, which writes and reads --size; omit it",
        ),
        ("--suite aatrokoski-2007 --file-system --size 1m", "--size 1m: bonnie++ needs at least 16m"),
        (
            "--suite aatrokoski-2007 --file-system --size 50%",
            "--size 50%: give the bytes that bonnie++ writes, as 1g",
        ),
        ("--suite aatrokoski-2007 --file-system --bs 4k", "--bs is set by the suite; remove one of the two"),
        (
            "--suite aatrokoski-2007 --file-system --poll always --poll never",
            "--file-system measures with one polling policy; give --poll once",
        ),
    ] {
        let said = refused(&bench.command(words, &[]).output().unwrap());
        assert_eq!(said, format!("blockmux: {expected}\n"));
    }
    assert!(refused(&bench.command("--file-system", &[]).output().unwrap()).contains("--suite"));
}

#[test]
fn a_missing_program_is_named_with_its_package() {
    let bench = Bench::new();
    let programs = bench.path("programs");
    fs::create_dir(&programs).unwrap();
    let run = || command(&bench, "--size 64m", &[]).env("PATH", &programs).output().unwrap();
    let needs = |program: &str, package: &str| {
        format!("blockmux: --file-system needs the program {program}; install the package {package}\n")
    };
    assert_eq!(refused(&run()), needs("bonnie++", "bonnie++"));
    fs::write(format!("{programs}/bonnie++"), "").unwrap();
    assert_eq!(refused(&run()), needs("mkfs.xfs", "xfsprogs"));
}

#[test]
fn without_the_privilege_to_make_links_one_line_says_so() {
    if !(has("setpriv") && can_measure()) {
        return;
    }
    let bench = Bench::new();
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-sys_admin", BLOCKMUX, "bench"]).args(SUITE.split(' '));
    let said = refused(&command.args(["--report", &bench.path("report")]).output().unwrap());
    assert!(said.contains("which needs root and the program `ip`"), "{said}");
    let only = bench.command(&format!("{SUITE} --size 64m"), &["--only", "nbd, 5-way"]).output().unwrap();
    assert!(refused(&only).contains("--only nbd, 5-way: is in the name of no configuration"));
}
