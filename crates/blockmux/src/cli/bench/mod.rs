//! `blockmux bench`: measures volumes over every protocol, compared with the local volume and the
//! ceiling.
//!
//! ```text
//!   arguments, job files, suites ──▶ plan: cases × jobs ──▶ runs of all cases, interleaved ──▶ table, JSON, page
//! ```
//! A case is one configuration under one job. Runs are interleaved: each case runs once before any
//! case runs twice, so that a change of the machine's speed affects all of them. The order is
//! shuffled, because a case affects the next one.

mod case;
mod device;
mod fabric;
mod file_system;
mod jobs;
mod linked;
mod measure;
mod plan;
mod served;
mod veth;
mod vhost_user;

use crate::cli::show;
use crate::failure::{self, Failure};
use crate::output::{printable, shell_word};
use crate::process::poll::Poll;
use crate::protocol::PROTOCOLS;
use blockmux_engine::sys::congestion::Congestion;
use blockmux_lab::result::{Comparison, Machine};
use blockmux_lab::when;
use blockmux_volume::spec::without_secrets;
use fabric::BenchFabric;
use file_system::FileSystemResults;
use measure::{BenchEnd, Interrupts, Measured, measure};
use plan::BenchPlan;
use std::path::PathBuf;
use std::process::ExitCode;
use vhost_user::VHOST_USER;

/// Arguments of `blockmux bench`; names and meanings are those of fio.
#[derive(clap::Args)]
#[command(rename_all = "snake_case", after_help = EXAMPLES)]
pub(crate) struct BenchArgs {
    /// Volume, URL, or fio job file (a path without a colon)
    #[arg(value_name = "VOLUME|URL|JOBFILE")]
    volumes_and_jobs: Vec<String>,
    /// Measure a disk of this machine, as /dev/ublkb0, or a file on FUSE; repeatable
    #[arg(long, value_name = "PATH")]
    device: Vec<PathBuf>,
    /// Jobs and figures of a published study: aatrokoski-2007, chelsio-iwarp, taocloud-2022,
    /// zeta-2016
    #[arg(long, value_name = "NAME")]
    suite: Option<String>,
    /// Measure the suite's study as it was, on a file system: bonnie++ on XFS on attached disks
    #[arg(long = "file-system", alias = "file_system", requires = "suite")]
    file_system: bool,
    /// Measure only configurations of --file-system whose names contain this, as "nbd, 4-way
    /// stripe, 1 Gbit/s"; repeatable
    #[arg(long, value_name = "TEXT", requires = "file_system")]
    only: Vec<String>,
    /// read, write, randread, randwrite, readwrite, randrw, trim, randtrim [default: randread]
    #[arg(long)]
    rw: Vec<String>,
    /// Block size [default: 4k]
    #[arg(long)]
    bs: Vec<String>,
    /// I/O in flight of each worker, as 1,8,32 [default: 1]
    #[arg(long)]
    iodepth: Vec<String>,
    /// Workers, each with its own connection, as 1,4 [default: 1]
    #[arg(long)]
    numjobs: Vec<String>,
    /// Measured time of each run in seconds, or as 500ms [default: 0.4 for the short list, else 1]
    #[arg(long)]
    runtime: Option<String>,
    /// Warm-up time before measuring, in seconds [default: 0.1 for the short list, else 0.2]
    #[arg(long)]
    ramp_time: Option<String>,
    /// Length of the used part of the volume, as 1g or 50%; size of the default RAM volume; what
    /// bonnie++ writes, with --file-system
    #[arg(long)]
    size: Option<String>,
    /// Start of the used part of the volume [default: 0]
    #[arg(long)]
    offset: Option<String>,
    /// Percentage of reads in a mix [default: 50]
    #[arg(long)]
    rwmixread: Option<String>,
    /// Verify data: crc32c or pattern; reads need a verifying write before them
    #[arg(long)]
    verify: Option<String>,
    /// Flush after this many writes
    #[arg(long)]
    fsync: Option<String>,
    /// Seed of random offsets
    #[arg(long)]
    randseed: Option<String>,
    /// Number of runs of each case [default: 3 for the short list and --file-system, else 5]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: Option<u32>,
    /// Measure eight jobs, both ceilings and longer runs: about twelve minutes
    #[arg(long)]
    full: bool,
    /// Polling of idle cores: adaptive (briefly, then sleep), always (use whole CPUs) or never
    /// (sleep at once); repeatable [default: adaptive]
    #[arg(
        long,
        value_enum,
        default_value = "adaptive",
        hide_possible_values = true,
        hide_default_value = true
    )]
    poll: Vec<Poll>,
    /// Fabric of protocols over RDMA: iwarp or roce, in software; repeatable [default: iwarp, or
    /// those of the suite]
    #[arg(
        long,
        value_parser = BenchFabric::parser(),
        hide_possible_values = true,
        conflicts_with = "file_system"
    )]
    rdma: Vec<BenchFabric>,
    /// TCP congestion control, such as cubic [default: the system's]
    #[arg(long, value_name = "NAME")]
    congestion: Option<Congestion>,
    /// Measure local volumes only over these: local, nbd, iscsi, iser, nvme-tcp, nvme-rdma, srp,
    /// vhost-user, and aoe over virtual links [default: those of the list or the suite]
    #[arg(
        long,
        value_name = "NAME,...",
        value_delimiter = ',',
        value_parser = known_protocol,
        conflicts_with = "file_system"
    )]
    protocols: Vec<String>,
    /// Do not measure bare sockets
    #[arg(long)]
    no_ceiling: bool,
    /// Let jobs also write to volumes that existed before and to disks of --device
    #[arg(long)]
    overwrite: bool,
    /// Directory for bench.json and bench.html, without those of an earlier bench [default:
    /// bench-results, or else bench-results-2, ...]
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Print JSON instead of the table
    #[arg(long)]
    json: bool,
}

impl BenchArgs {
    /// Whether the short list of jobs is measured, not the full list or the user's jobs.
    fn is_quick(&self) -> bool {
        let shapes = [&self.rw, &self.bs, &self.iodepth, &self.numjobs];
        let names_jobs = self.suite.is_some()
            || shapes.iter().any(|values| !values.is_empty())
            || self.volumes_and_jobs.iter().any(|word| is_job_file(word));
        !self.full && !names_jobs
    }

    /// Whether local volumes are measured over this protocol, or as they are for [`LOCAL`].
    fn measures(&self, name: &str) -> bool {
        self.protocols.is_empty() || self.protocols.iter().any(|wanted| wanted == name)
    }

    /// Number of runs of each case.
    fn runs(&self) -> u32 {
        self.runs.unwrap_or(if self.is_quick() || self.file_system { QUICK_RUNS } else { FULL_RUNS })
    }
}

/// Reads a name of `--protocols`.
fn known_protocol(text: &str) -> Result<String, String> {
    let name = text.replace('_', "-");
    let known: Vec<_> =
        [LOCAL, VHOST_USER].into_iter().chain(PROTOCOLS.iter().map(|protocol| protocol.name)).collect();
    match known.contains(&name.as_str()) {
        true => Ok(name),
        false => Err(format!("not one of {}", known.join(", "))),
    }
}

/// Whether an argument is a job file: volumes and URLs contain a colon, job files do not.
fn is_job_file(word: &str) -> bool {
    !word.contains(':')
}

/// Runs the command.
pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode, Failure> {
    if let Some(congestion) = &args.congestion {
        let wrong = |why| Failure::request(format!("--congestion {congestion}: {why}"));
        congestion.check().map_err(wrong)?;
    }
    // The lock lasts until the report is written.
    let (report, _lock) = match &args.report {
        Some(report) => show::make_directory(report).map(|()| (report.clone(), None))?,
        None => show::make_usual_directory().map(|(report, lock)| (report, Some(lock)))?,
    };
    let interrupts = Interrupts::watch()?;
    let started = when::now();
    let (measured, skipped, conditions) = if args.file_system {
        let FileSystemResults { measured, skipped, conditions } = file_system::run(args, interrupts)?;
        (measured, skipped, conditions)
    } else {
        let mut plan = BenchPlan::make(args)?;
        let skipped = std::mem::take(&mut plan.skipped);
        (measure(plan, args.runs(), interrupts)?, skipped, Vec::new())
    };
    let (cases, done) = (measured.rows.len(), measured.rows.iter().map(|row| row.runs.len()).sum::<usize>());
    let Measured { rows, lost_connection, end } = measured.without_unmeasured_rows();
    let comparison = Comparison {
        command: command_line(),
        started,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        machine: Machine::here(args.congestion.as_ref()),
        suite: args.suite.clone(),
        rows,
        skipped,
        conditions,
        changes: None,
    };
    if done > 0 {
        show::show(&comparison, Some(&report), args.json)?;
    }
    let all = cases * args.runs() as usize;
    match end {
        BenchEnd::Failed(failure) => Err(failure),
        BenchEnd::Signal(signal) => {
            Failure::run(format!("interrupted; {done} of {all} runs were done")).report();
            Ok(failure::status_of_signal(signal))
        }
        BenchEnd::Complete => exit_code(&comparison, lost_connection),
    }
}

/// The exit status: failure if a measured job had errors.
fn exit_code(comparison: &Comparison, lost_connection: u32) -> Result<ExitCode, Failure> {
    let runs = || comparison.rows.iter().flat_map(|row| &row.runs);
    let (failed, wrong): (u64, u64) =
        (runs().map(|run| run.errors).sum(), runs().map(|run| run.verify_errors).sum());
    let what = match (failed, wrong) {
        (0, 0) if lost_connection == 0 => return Ok(ExitCode::SUCCESS),
        (0, 0) if lost_connection == 1 => {
            "a connection was lost in one run; the warnings above name it".to_owned()
        }
        (0, 0) => format!("connections were lost in {lost_connection} runs; the warnings above name them"),
        (failed, 0) => format!("{failed} I/O failed; {FIRST_ABOVE}"),
        (0, wrong) => format!("{wrong} blocks had wrong data; {FIRST_ABOVE}"),
        (failed, wrong) => {
            format!("{failed} I/O failed, and {wrong} blocks had wrong data; {FIRST_ABOVE}")
        }
    };
    Err(Failure::run(what))
}

fn command_line() -> String {
    let mut words = vec!["blockmux".to_owned()];
    words.extend(std::env::args().skip(1).map(|word| shell_word(&without_secrets(&word)).into_owned()));
    printable(&words.join(" ")).into_owned()
}

/// The name of volumes without a protocol.
const LOCAL: &str = "local";
/// Number of runs of the short list, whose 27 cases of 0.5 s take less than a minute, and of a file
/// system, whose 38 take some 10 s each.
const QUICK_RUNS: u32 = 3;
const FULL_RUNS: u32 = 5;
const FIRST_ABOVE: &str = "the warnings above name the first of each run";

const EXAMPLES: &str = "\
Without arguments: three jobs on a RAM volume over every protocol that `serve`
uses by default, and by vhost-user, in less than a minute; --full adds SRP.
Several values of --rw, --bs, --iodepth and --numjobs are measured in every
combination. A job file has one [section] for each combination instead. Volumes
that existed before are written to only if --overwrite or --rw says so, disks of
--device only if --overwrite does. Ctrl-C prints what has been measured.
--suite aatrokoski-2007 needs root and `ip`; with --file-system also bonnie++
and mkfs.xfs.

Examples:
  blockmux bench
  blockmux bench nbd://host/disk0 --rw randread --bs 4k --iodepth 32
  blockmux bench file:disk.img --poll always --poll never
  blockmux bench mem:1g --rw write --rw randread --verify crc32c
  blockmux bench mem:1g jobs.fio
  blockmux bench --suite taocloud-2022
  blockmux bench mem:1g --rdma roce --iodepth 1,32
  blockmux bench mem:1g --protocols nbd,iscsi --rw randwrite
  blockmux bench --suite aatrokoski-2007 --file-system --size 512m
  blockmux bench --device /dev/ublkb0 iscsi://host/iqn.2026-11.example:disk/0

Exit status: 0 success; 1 a run failed, lost its connection or read wrong data;
2 could not start; 130 interrupted.";
