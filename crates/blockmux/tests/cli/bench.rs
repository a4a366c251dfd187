//! `blockmux bench` and `blockmux report`: output, files and exit status.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, end_by, has, text, unignore_signals};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A directory for a report, and runs of the bench that write it there.
pub(crate) struct Bench(TempDir);

impl Bench {
    pub(crate) fn new() -> Bench {
        Bench(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    /// A bench with the arguments `words` and `rest`, and with a new report.
    pub(crate) fn command(&self, words: &str, rest: &[&str]) -> Command {
        let _ = std::fs::remove_dir_all(self.path("report"));
        let mut command = Command::new(BLOCKMUX);
        command.args(["bench", "--report", &self.path("report")]).args(words.split_whitespace()).args(rest);
        command
    }

    pub(crate) fn run(&self, words: &str, rest: &[&str]) -> Output {
        self.command(&format!("--runtime 0.05 --ramp_time 0.01 --runs 2 {words}"), rest).output().unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.read("bench.json")).unwrap()
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.path().join("report").join(name)).unwrap()
    }
}

/// Standard output of a successful run. Standard error must contain only progress lines.
pub(crate) fn printed(output: &Output) -> String {
    let stderr = text(&output.stderr);
    let others: Vec<&str> = stderr.lines().filter(|line| !is_progress(line)).collect();
    assert_eq!((output.status.code(), others), (Some(0), Vec::new()));
    text(&output.stdout)
}

/// Whether a line of standard error is " 11%, 36s left; run 1/3 finished: ...".
fn is_progress(line: &str) -> bool {
    line.trim_start().starts_with(|c: char| c.is_ascii_digit()) && line.contains(" left; run ")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"))
}

pub(crate) fn jobs(report: &Value) -> &Vec<Value> {
    report["jobs"].as_array().unwrap()
}

#[test]
fn output_to_a_pipe_is_plain_text_of_80_columns() {
    let bench = Bench::new();
    let out = printed(&bench.run("--size 16m --full", &[]));
    for line in out.lines() {
        assert!(line.chars().count() <= 80 || line.starts_with(&bench.path("")), "{line}");
    }
    assert!(!out.contains(['\u{1b}', '\r']));
    let ceilings = ["nbd", "iscsi", "iser", "nvme-tcp", "nvme-rdma", "srp"]
        .map(|name| [format!("\n{name} ceiling sleeps "), format!("\n{name} ceiling spins ")]);
    let rows = [
        "1 MiB sequential write, depth 8",
        "\nlocal ",
        "\nnbd ",
        "\niscsi ",
        "\niser ",
        "\nnvme-tcp ",
        "\nnvme-rdma ",
        "\nsrp ",
        "\nvhost-user ",
    ];
    for part in rows.iter().copied().chain(ceilings.iter().flatten().map(String::as_str)) {
        assert!(out.contains(part), "no {part:?} in {out}");
    }
    let page = bench.read("bench.html");
    assert!(page.contains("<title>Blockmux"));
    assert!(!page.contains("By block size and depth"), "two sizes and two depths make no line");
    // Eight jobs of eight configurations and twelve ceilings.
    assert_eq!(jobs(&bench.json()).len(), 160);
}

/// Total measured time of a bench, in milliseconds, from its report.
fn measured_ms(report: &Value) -> f64 {
    let of = |job: &Value| {
        let ms = |name: &str| job["job options"][name].as_str().unwrap().parse::<f64>().unwrap() * 1e3;
        let runs = job["blockmux"]["runs"].as_array().unwrap().len();
        (ms("runtime") + ms("ramp_time")) * runs as f64
    };
    jobs(report).iter().map(of).sum()
}

#[test]
fn the_default_bench_measures_three_jobs_three_times_with_one_ceiling_each_in_less_than_a_minute() {
    let bench = Bench::new();
    let output = bench.command("--size 16m", &[]).output().unwrap();
    printed(&output);
    let report = bench.json();
    // Three jobs of the local volume, five protocols with a ceiling of each, and vhost-user.
    assert_eq!(jobs(&report).len(), 36);
    assert!(jobs(&report).iter().all(|job| job["blockmux"]["runs"].as_array().unwrap().len() == 3));
    let of = |rw: &str, bs: &str, depth: &str| {
        let is_it = |job: &&Value| {
            let options = &job["job options"];
            (&options["rw"], &options["bs"], &options["iodepth"]) == (&rw.into(), &bs.into(), &depth.into())
        };
        jobs(&report).iter().filter(is_it).count()
    };
    let all = [of("randread", "4k", "32"), of("randwrite", "4k", "32"), of("read", "1m", "8")];
    assert_eq!(all, [12, 12, 12]);
    assert!(measured_ms(&report) < 55_000.0, "{}", measured_ms(&report));
    // A line for each finished job of each run; the last one has no time left.
    let said = text(&output.stderr);
    let finished: Vec<&str> = said.lines().map(|line| line.split("; ").nth(1).unwrap()).collect();
    assert_eq!(finished[0], "run 1/3 finished: 4 KiB random read, depth 32");
    assert_eq!(finished[8], "run 3/3 finished: 1 MiB sequential read, depth 8");
    assert_eq!(finished.len(), 9);
    assert!(said.starts_with(" 11%, ") && said.contains("\n100%, "), "{said}");
}

#[test]
fn each_policy_of_a_short_bench_has_its_own_ceiling() {
    let bench = Bench::new();
    let out = printed(&bench.run("mem:16m --poll never", &[]));
    assert!(out.contains("\nnbd ceiling sleeps ") && !out.contains("ceiling spins "), "{out}");
    let out = printed(&bench.run("mem:16m --poll never --poll always", &[]));
    assert!(out.contains("\nnbd ceiling sleeps ") && out.contains("\nnbd ceiling spins "), "{out}");
}

#[test]
fn only_the_protocols_that_are_asked_for_are_measured_with_their_ceilings() {
    let bench = Bench::new();
    let out = printed(&bench.run("mem:16m --rw randread --protocols nbd,vhost_user", &[]));
    let measured: Vec<_> = jobs(&bench.json())
        .iter()
        .map(|job| job["blockmux"]["protocol"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(measured, ["nbd", "vhost-user", "nbd", "nbd"], "{out}");
    let out = printed(&bench.run("mem:16m --suite taocloud-2022 --protocols iscsi --no_ceiling", &[]));
    assert!(jobs(&bench.json()).iter().all(|job| job["blockmux"]["protocol"] == "iscsi"), "{out}");
    let unknown = blockmux(["bench", "mem:16m", "--protocols", "nbd,nfs"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(
        text(&unknown.stderr).contains("nfs: not one of local, vhost-user, nbd, "),
        "{}",
        text(&unknown.stderr)
    );
}

#[test]
fn a_report_of_two_benches_shows_which_changes_are_more_than_chance() {
    let bench = Bench::new();
    printed(&bench.run("mem:16m --rw randread --protocols local,nbd --no_ceiling", &[]));
    let mut report = bench.json();
    let write = |name: &str, report: &Value| {
        std::fs::create_dir(bench.path(name)).unwrap();
        std::fs::write(bench.path(&format!("{name}/bench.json")), report.to_string()).unwrap();
    };
    write("before", &report);
    let slower =
        report["jobs"].as_array_mut().unwrap().iter_mut().filter(|job| job["blockmux"]["protocol"] == "nbd");
    for run in slower.flat_map(|job| job["blockmux"]["runs"].as_array_mut().unwrap()) {
        run["runtime_ns"] = (run["runtime_ns"].as_u64().unwrap() * 100).into();
    }
    write("after", &report);
    let shown = |more: &[&str]| {
        let mut command = Command::new(BLOCKMUX);
        command.args(["report", "before/bench.json", "after/bench.json"]).args(more);
        printed(&command.current_dir(bench.0.path()).output().unwrap())
    };
    let out = shown(&["--report", "both"]);
    let (_, changes) = out.split_once("\nChange from before to after\n4 KiB random read, depth 1\n").unwrap();
    let words = |nth: usize| changes.lines().nth(nth).unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!(words(0), ["before", "after", "IOPS", "p50", "p99", "%/Gb"]);
    assert_eq!((words(1)[0], words(1)[3]), ("local", "(+0.0%)"), "its runs are the same");
    assert_eq!((words(2)[0], words(2)[3]), ("nbd", "-99.0%"), "{out}");
    assert!(out.lines().all(|line| line.chars().count() <= 80), "{out}");
    let page = std::fs::read_to_string(bench.path("both/bench.html")).unwrap();
    assert!(page.contains("<h2>Change from before to after</h2>") && page.contains("<td>-99.0%</td>"));
    assert!(page.contains("class=\"bar nbd second\""), "the second report has its own shade");
    let json: Value = serde_json::from_str(&shown(&["--json"])).unwrap();
    let iops = &json["blockmux"]["changes"]["cases"][1]["figures"][0];
    assert_eq!((&iops["figure"], &iops["significance"]), (&"iops".into(), &"runs_differ".into()), "{iops}");
}

#[test]
fn a_report_is_never_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let words = "mem:16m --rw randread --protocols local --runs 1 --runtime 0.01 --ramp_time 0";
    let run = |more: &[&str]| {
        let mut command = Command::new(BLOCKMUX);
        command.arg("bench").args(words.split(' ')).args(more).current_dir(&directory).output().unwrap()
    };
    for name in ["bench-results", "bench-results-2"] {
        let out = printed(&run(&[]));
        assert!(out.ends_with(&format!("{name}/bench.json\n{name}/bench.html\n")), "{out}");
    }
    let first = std::fs::read(directory.path().join("bench-results/bench.json")).unwrap();
    let refused = run(&["--report", "bench-results"]);
    assert_eq!(refused.status.code(), Some(2));
    let said = text(&refused.stderr);
    assert!(said.contains("--report bench-results: has a report already; "), "{said}");
    assert_eq!(std::fs::read(directory.path().join("bench-results/bench.json")).unwrap(), first);
}

#[test]
fn a_congestion_control_is_named_in_every_report_and_an_unknown_one_is_refused() {
    let bench = Bench::new();
    let words = "mem:16m --rw randread --congestion";
    // Where the line of the machine wraps depends on the processor's name.
    let out = printed(&bench.run(&format!("{words} reno"), &[])).replace('\n', " ");
    assert!(out.contains("TCP by reno") && !out.contains("timers"), "{out}");
    assert!(bench.read("bench.html").contains("TCP by reno"));
    assert_eq!(bench.json()["blockmux"]["machine"]["congestion"], "reno");
    for command in ["bench", "serve"] {
        let refused = blockmux([command, "mem:1m", "--congestion", "nosuch"]);
        let expected = "blockmux: --congestion nosuch: this kernel has no congestion control nosuch; it has ";
        assert_eq!(refused.status.code(), Some(2));
        assert!(text(&refused.stderr).starts_with(expected), "{}", text(&refused.stderr));
    }
}

#[test]
fn every_access_pattern_runs_with_consistent_results() {
    let bench = Bench::new();
    let patterns = "--rw read,write,randread,randwrite --rw readwrite --rw randrw,trim,randtrim";
    printed(&bench.run(&format!("mem:16m --no_ceiling --iodepth 1,8 --numjobs 1,2 {patterns}"), &[]));
    let report = bench.json();
    assert_eq!(jobs(&report).len(), 8 * 2 * 2 * 8);
    let mut seen = 0;
    for job in jobs(&report) {
        let option = |name: &str| job["job options"][name].as_str().unwrap();
        let name = &job["jobname"];
        for side in ["read", "write", "trim"] {
            let side = &job[side];
            assert_eq!(number(&side["io_bytes"]), number(&side["total_ios"]) * 4096.0, "{name}");
            assert!((number(&side["bw_bytes"]) - number(&side["iops"]) * 4096.0).abs() <= 1.0, "{name}");
            assert_eq!(side["clat_ns"]["N"], side["total_ios"], "{name}");
        }
        // On a busy machine no request may complete in so short a time.
        let did: Vec<_> = ["read", "write", "trim"]
            .into_iter()
            .filter(|side| number(&job[side]["total_ios"]) > 0.0)
            .collect();
        let allowed = match option("rw") {
            "read" | "randread" => ["read"].as_slice(),
            "write" | "randwrite" => &["write"],
            "trim" | "randtrim" => &["trim"],
            _ => &["read", "write"],
        };
        assert!(did.iter().all(|side| allowed.contains(side)), "{name} did {did:?}");
        seen += did.len();
    }
    assert!(seen > 0, "no request completed");
}

#[test]
fn cpu_time_of_both_sides_is_reported_as_user_and_system_time() {
    let bench = Bench::new();
    let words = "mem:16m --no_ceiling --rw randread --iodepth 32 --runs 1 --runtime 0.5";
    printed(&bench.command(words, &[]).output().unwrap());
    let report = bench.json();
    let [local, remote @ ..] = jobs(&report).as_slice() else { panic!("no rows") };
    let of_run = |job: &Value, name: &str| number(&job["blockmux"]["runs"][0][name]);
    assert_eq!(local["blockmux"]["runs"][0]["target_cpu_ns"], Value::Null);
    assert_eq!(remote.len(), 7, "NBD, iSCSI, iSER, NVMe/TCP, NVMe/RDMA, SRP and vhost-user");
    for job in remote {
        for side in ["target", "initiator"] {
            let (cpu, system) = (format!("{side}_cpu_ns"), format!("{side}_system_ns"));
            let cpu = of_run(job, &cpu);
            match job["blockmux"]["runs"][0][&system].as_f64() {
                Some(system) => assert!(system <= cpu, "{side}"),
                // On a busy machine a side may have got too little CPU time for a clock tick.
                None => assert!(cpu < 50e6, "{side} used {cpu} ns"),
            }
        }
        let percent = number(&job["usr_cpu"]) + number(&job["sys_cpu"]);
        let expected = of_run(job, "initiator_cpu_ns") / of_run(job, "runtime_ns") * 100.0;
        assert!((percent - expected).abs() < 0.01, "{percent} for {expected}");
    }
}

#[test]
fn several_volumes_and_socket_kinds_are_distinguished() {
    let daemon = Daemon::serve(&["mem:1m", "--nbd", "127.0.0.1:0"]);
    let urls = daemon.json["exports"][0]["urls"].as_array().unwrap();
    let urls: Vec<&str> = urls.iter().map(|url| url.as_str().unwrap()).collect();
    let bench = Bench::new();
    let words = ["mem:1m", "null:1m", urls[0], urls[1]];
    let out = printed(&bench.run("--rw randread", &words));
    for label in ["local mem:1m ", "nbd mem:1m ", "nbd null:1m ", "vhost-user mem:1m ", "vhost-user null:1m "]
    {
        assert!(out.contains(&format!("\n{label}")), "{out}");
    }
    assert_eq!(
        (out.matches("\nnbd+unix ceiling ").count(), out.matches("\nnbd ceiling ").count()),
        (2, 2),
        "{out}"
    );
}

#[test]
fn the_default_jobs_do_not_overwrite_existing_volumes() {
    let bench = Bench::new();
    let file = bench.path("disk.img");
    std::fs::write(&file, vec![0xA5; 16 << 20]).unwrap();
    let out = printed(&bench.run("--no_ceiling", &[&format!("file:{file}")]));
    assert!(out.contains("would be overwritten (give --overwrite"), "{out}");
    assert!(
        jobs(&bench.json()).iter().all(|job| job["job options"]["rw"].as_str().unwrap().contains("read"))
    );
    assert!(std::fs::read(&file).unwrap().iter().all(|&byte| byte == 0xA5));
    printed(&bench.run("--no_ceiling --rw write", &[&format!("file:{file}")]));
    assert!(std::fs::read(&file).unwrap().iter().any(|&byte| byte != 0xA5));
}

#[test]
fn a_job_file_or_a_suite_overwrites_an_existing_volume_only_with_overwrite() {
    let bench = Bench::new();
    let (file, jobs) = (bench.path("disk.img"), bench.path("jobs.fio"));
    let content = vec![0xA5; 64 << 20];
    std::fs::write(&file, &content).unwrap();
    std::fs::write(&jobs, "[global]\nbs=4k\n[first]\nrw=randread\n[second]\nrw=randwrite\n").unwrap();
    let volume = format!("file:{file}");
    for rest in [[&*volume, &*jobs], [&volume, "--suite=zeta-2016"], [&volume, "--suite=taocloud-2022"]] {
        let output = bench.run("--no_ceiling", &rest);
        let said = text(&output.stderr);
        let expected =
            format!(" would overwrite {volume}, which existed before; to allow that, give --overwrite");
        assert!(output.status.code() == Some(2) && said.contains(&expected), "{rest:?}: {said}");
        assert!(std::fs::read(&file).unwrap() == content, "{rest:?}");
    }
    printed(&bench.run("--no_ceiling --overwrite", &[&volume, &jobs]));
    assert!(std::fs::read(&file).unwrap() != content);
    // Jobs that only read need no word, nor does a volume that the bench creates.
    std::fs::write(&jobs, "[first]\nrw=randread\nbs=4k\n").unwrap();
    printed(&bench.run("--no_ceiling", &[&volume, &jobs]));
}

#[test]
fn a_job_file_runs_and_its_errors_are_reported_with_their_lines() {
    let bench = Bench::new();
    let file = bench.path("jobs.fio");
    let good = "[global]\nbs=4k\nruntime=60\n[first]\nrw=randread\n[second]\nrw=write\nbs=64k\niodepth=4\n";
    std::fs::write(&file, good).unwrap();
    // The command line overrides the file.
    let out = printed(&bench.run("mem:4m --no_ceiling", &[&file]));
    for part in ["4 KiB random read, depth 1\n", "64 KiB sequential write, depth 4\n", "2 runs of 0.05 s."] {
        assert!(out.contains(part), "{out}");
    }
    std::fs::write(&file, "[global]\nbs=4k\n\n[a]\nfoo=1\n").unwrap();
    let output = bench.run("mem:4m", &[&file]);
    let said = text(&output.stderr);
    assert!(said.starts_with(&format!("blockmux: {file}:5: unknown fio option `foo`; known are ")), "{said}");
    assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1));
    std::fs::write(&file, "[a]\nfilename=disk.img\n").unwrap();
    let said = text(&bench.run("", &[&file]).stderr);
    assert!(said.starts_with(&format!("blockmux: {file}:1: job a: `disk.img` does not say ")), "{said}");
}

#[test]
fn an_image_given_as_a_job_file_is_not_printed() {
    let bench = Bench::new();
    let image = bench.path("disk.img");
    for content in [vec![0; 4096], vec![0xff; 4096], vec![b'a'; (1 << 20) + 1]] {
        std::fs::write(&image, content).unwrap();
        // A message about an option that the file also sets does not print it either.
        for options in ["", "--rw randread"] {
            let output = bench.run(options, &[&image]);
            let expected = format!(
                "blockmux: {image}: is not a fio job file; to measure it as a volume, write file:{image}\n"
            );
            assert_eq!((text(&output.stderr), output.status.code()), (expected, Some(2)));
        }
    }
}

#[test]
fn an_error_in_an_option_names_the_option() {
    let bench = Bench::new();
    for (words, expected) in [
        ("mem:1m --rw randreed", "--rw randreed: patterns are read write "),
        ("mem:1m --iodepth 1,x", "--iodepth x: not a number"),
        ("mem:1m --bs 4k,8k", "--bs 4k,8k: give one block size"),
        ("mem:1m --verify md5 --rw write", "--verify md5: give crc32c or pattern"),
        ("mem:1m --verify crc32c --rw randrw", "--verify crc32c: rw=randrw cannot be verified"),
        ("mem:1m --size 2m", "--size 2m: only 1m is left from 0 to the volume's end"),
        ("mem:1m --numjobs 0", "--numjobs 0: must be from 1 to 1024"),
        ("mem:1m --poll sometimes", "--poll sometimes: not one of adaptive, always, never"),
        ("mem:64m --suite zeta-2016 --bs 4k", "--bs is set by the suite; remove one of the two"),
        ("mem:64m --suite zeta-2016 --verify crc32c", "--verify is set by the suite"),
        ("--full --bs 4k", "--full has its own jobs, and so has --bs; remove one of the two"),
        ("--full --suite zeta-2016", "--full has its own jobs, and so has the suite; remove one"),
        ("--suite zeta", "--suite zeta: unknown suite `zeta`; known are aatrokoski-2007, "),
        ("mem:1m --rdma verbs", "--rdma verbs: needs a device; measure it by a URL with ?rdma=verbs"),
        ("mem:1m --rdma rose", "--rdma rose: not one of iwarp, roce"),
        ("mem:1m --rdma roce --protocols nbd", "--rdma roce: is for protocols over RDMA that bench serves "),
        ("nbd+unix:///x?socket=/nowhere/s", "nbd+unix:///x?socket=/nowhere/s: "),
        ("jobs.fio", "jobs.fio: neither a volume, such as mem:1g, nor a job file: "),
    ] {
        let output = bench.run(words, &[]);
        let said = text(&output.stderr);
        assert!(said.starts_with(&format!("blockmux: {expected}")), "{words}: {said}");
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{words}: {said}");
    }
}

#[test]
fn every_suite_runs_with_published_and_measured_values() {
    let figures: [(&str, &[&str]); 3] = [
        (
            "zeta-2016",
            &[
                "\npublished          373k      1529        iser, InfiniBand\n",
                "\nsrp, iWARP ",
                "\nsrp, RoCEv2 ",
            ],
        ),
        ("taocloud-2022", &["\npublished                        127  iscsi, lowest mean latency\n"]),
        ("chelsio-iwarp", &["\niser, iWARP ", "\niser, RoCEv2 ", "\nnvme-rdma, RoCEv2 "]),
    ];
    for (suite, figures) in figures {
        let bench = Bench::new();
        let words = format!("mem:64m --no_ceiling --suite {suite} --runs 1 --runtime 0.005 --ramp_time 0");
        let out = printed(&bench.command(&words, &[]).output().unwrap());
        assert!(figures.iter().all(|figure| out.contains(figure)), "{out}");
        assert!(out.find("\nlocal ") < out.find("\nnbd "), "the floor first, as everywhere: {out}");
        let page = bench.read("bench.html");
        assert!(page.contains("Published and measured") && page.contains("<dt>Measured there</dt>"));
        assert!(page.contains("<h2>By block size and depth</h2>"), "{suite}");
        // A report of the report has them, too.
        let report = printed(&blockmux([
            "report",
            &bench.path("report/bench.json"),
            "--report",
            &bench.path("again"),
        ]));
        assert!(figures.iter().all(|figure| report.contains(figure)), "{report}");
        assert_eq!(std::fs::read_to_string(bench.path("again/bench.html")).unwrap(), page);
    }
}

/// Whether network namespaces can be created here; if not, prints that the test is skipped.
#[expect(clippy::print_stdout, reason = "the reason of a skipped test")]
fn makes_networks() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: creating network namespaces needs root");
    }
    has("ip") && has("tc") && is_root
}

#[test]
fn the_mtu_study_runs_over_virtual_links_with_published_and_measured_values() {
    if !makes_networks() {
        return;
    }
    let bench = Bench::new();
    let words = "--suite aatrokoski-2007 --size 64m --runs 1 --runtime 0.02 --ramp_time 0";
    let out = printed(&bench.command(words, &[]).output().unwrap());
    for part in [
        "\naoe, 1 Gbit/s, MTU 4132 ",
        "\nnbd, no limit, MTU 9000 ",
        "\nlocal, 12-way stripe ",
        "\naoe, MB/s: measured here, then as published\n",
        " 106 72.0 ",
    ] {
        assert!(out.contains(part), "no {part:?} in {out}");
    }
    let tables = out
        .lines()
        .skip_while(|line| !line.contains("measured here, then"))
        .take_while(|line| !line.is_empty());
    assert!(tables.map(|line| line.chars().count()).all(|width| width <= 80), "{out}");
    let page = bench.read("bench.html");
    assert!(page.contains("<caption>nbd, MB/s</caption>") && page.contains("PS3, 4 disks"));
    let report =
        printed(&blockmux(["report", &bench.path("report/bench.json"), "--report", &bench.path("again")]));
    assert!(report.contains("\naoe, MB/s: measured here, then as published\n"), "{report}");
}

#[test]
fn the_mtu_study_reports_a_missing_capability_in_one_line() {
    if !has("setpriv") {
        return;
    }
    let bench = Bench::new();
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-sys_admin", BLOCKMUX, "bench", "--suite", "aatrokoski-2007"]);
    let output = command.args(["--size", "64m", "--report", &bench.path("report")]).output().unwrap();
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
    assert!(said.contains("which needs root and the program `ip`"), "{said}");
}

/// The inodes of the network namespaces of a process, except that of the tests.
fn networks(process: u32) -> Vec<u64> {
    let inode = |path: &Path| Some(std::fs::metadata(path).ok()?.ino());
    let here = inode(Path::new("/proc/self/ns/net"));
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap().flatten();
    let found = tasks.filter_map(|task| inode(&task.path().join("ns/net")));
    found.filter(|network| Some(*network) != here).collect()
}

/// Whether a process of this group is running.
fn lives(group: u32) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.filter_map(|process| std::fs::read_to_string(process.path().join("stat")).ok()).any(|stat| {
        // The fields after the name are state, parent and group.
        let (_, behind) = stat.rsplit_once(") ").unwrap();
        behind.split(' ').nth(2) == Some(&group.to_string())
    })
}

#[test]
fn a_killed_bench_leaves_no_processes_and_no_names_of_its_network_namespaces() {
    if !makes_networks() {
        return;
    }
    unignore_signals();
    for signal in [Signal::KILL, Signal::INT] {
        let bench = Bench::new();
        let words = "--suite aatrokoski-2007 --size 64m --runtime 10";
        let mut command = bench.command(words, &[]);
        command.process_group(0).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let made = loop {
            let made = networks(child.id());
            if !made.is_empty() {
                break made;
            }
            assert!(child.try_wait().unwrap().is_none(), "it ended at once");
            assert!(Instant::now() < deadline, "no network namespaces exist after a minute");
            std::thread::yield_now();
        };
        end_by(&mut child, signal);
        // A running `ip` command ends by itself.
        let deadline = Instant::now() + Duration::from_secs(20);
        while lives(child.id()) {
            assert!(Instant::now() < deadline, "somebody stays in them");
            std::thread::yield_now();
        }
        // A named network namespace is a mount of its inode.
        let names = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
        let has_name = |name: &std::fs::DirEntry| {
            std::fs::metadata(name.path()).is_ok_and(|network| made.contains(&network.ino()))
        };
        let left: Vec<_> = names.filter(has_name).map(|name| name.file_name()).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn corrupted_data_is_found_and_its_offset_reported() {
    let bench = Bench::new();
    let file = bench.path("disk.img");
    let volume = format!("file:{file}?size=512k");
    let words = "--no_ceiling --bs 64k --verify crc32c";
    printed(&bench.run(&format!("{words} --rw write"), &[&volume]));
    printed(&bench.run(&format!("{words} --rw read"), &[&volume]));
    let disk = std::fs::File::options().write(true).open(Path::new(&file)).unwrap();
    disk.write_all_at(b"junk", (5 << 16) + 1000).unwrap();
    let output = bench.run(&format!("{words} --rw read"), &[&volume]);
    let said = text(&output.stderr);
    assert!(said.contains(" verify: block at 327680 has CRC "), "{said}");
    assert!(said.contains(" blocks had wrong data; the warnings above name the first"), "{said}");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains(" blocks had other content than was written\n"));
}

#[test]
fn failed_io_is_counted_and_the_first_is_reported() {
    let bench = Bench::new();
    let output = bench.run("fault:op=write,every=3:mem:1m --no_ceiling --rw write --verify pattern", &[]);
    let said = text(&output.stderr);
    assert!(said.contains("I/O failed: medium error") && said.contains("offset="), "{said}");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("    ! "));
    assert!(bench.json()["jobs"][0]["error"] == 5);
}

#[test]
fn an_interrupted_bench_reports_the_complete_runs() {
    unignore_signals();
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let bench = Bench::new();
        // One case completes at once and the other never.
        let file = bench.path("jobs.fio");
        std::fs::write(&file, "[short]\nruntime=20ms\n[long]\nrw=write\nruntime=600\n").unwrap();
        let mut command = bench.command("mem:4m --no_ceiling --runs 1 -v", &[&file]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while said.matches("run 1/1 of ").count() < 8 {
            assert_ne!(stderr.read_line(&mut said).unwrap(), 0, "{said}");
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        stderr.read_to_string(&mut said).unwrap();
        // With -v, other threads may log after it.
        assert!(said.contains("\nblockmux: interrupted; 8 of 16 runs were done\n"), "{said}");
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(status));
        let out = text(&output.stdout);
        assert!(out.contains("sequential read") && !out.contains("sequential write"), "{out}");
        assert_eq!(jobs(&bench.json()).len(), 8);
    }
}
