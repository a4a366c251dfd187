//! `blockmux bench`: measures volumes over every protocol, beside the local volume and beside the ceiling.
//!
//! ```text
//!   arguments, job files, suites ──▶ plan: lanes × jobs ──▶ every lane in turn, again and again ──▶ table, JSON, page
//! ```
//! A lane is one subject under one job. Runs are interleaved: each lane runs once before any runs twice, so that a
//! machine that slows down slows all of them.

mod lane;
mod plan;
mod protocol;

use crate::failure::Failure;
use crate::output::{self, printable};
use blockmux_lab::page::{self, PublishedFigure};
use blockmux_lab::result::{Comparison, Machine, Row};
use blockmux_lab::{fio_json, table, when};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use plan::Plan;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Measure volumes over every protocol, beside the bare sockets
///
/// Without VOLUME: the comparison of every protocol on a RAM volume over loopback. Options carry fio's names and
/// meanings; give --rw, --bs, --iodepth or --numjobs several times to measure every combination.
#[derive(clap::Args)]
#[command(rename_all = "snake_case", after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Volume, URL, or fio job file (a path without a colon)
    #[arg(value_name = "VOLUME|URL|JOBFILE")]
    subjects: Vec<String>,
    /// A published study's jobs, its figures beside ours
    #[arg(long, value_name = "NAME")]
    suite: Option<String>,
    /// read, write, randread, randwrite, readwrite, randrw, trim, randtrim
    #[arg(long)]
    rw: Vec<String>,
    /// Block size, as 4k
    #[arg(long)]
    bs: Vec<String>,
    /// I/O in flight of each worker
    #[arg(long)]
    iodepth: Vec<String>,
    /// Workers, each with its own connection
    #[arg(long)]
    numjobs: Vec<String>,
    /// Measured time of each run in seconds
    #[arg(long)]
    runtime: Option<String>,
    /// Time before it in seconds
    #[arg(long)]
    ramp_time: Option<String>,
    /// How much of the volume to use, as 1g or 50%; also the size of the default RAM volume
    #[arg(long)]
    size: Option<String>,
    /// Where to begin
    #[arg(long)]
    offset: Option<String>,
    /// Per cent of reads in a mix
    #[arg(long)]
    rwmixread: Option<String>,
    /// Check content: crc32c or pattern
    #[arg(long)]
    verify: Option<String>,
    /// Flush after so many writes
    #[arg(long)]
    fsync: Option<String>,
    /// Seed of random offsets
    #[arg(long)]
    randseed: Option<String>,
    /// How often each lane runs
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Polling of both sides: adaptive, always, never; several times to compare them
    #[arg(long, value_name = "POLICY")]
    poll: Vec<String>,
    /// Do not measure the bare sockets
    #[arg(long)]
    no_ceiling: bool,
    /// Where bench.json and bench.html go
    #[arg(long, value_name = "DIR", default_value = "bench-results")]
    report: PathBuf,
    /// Print the JSON in place of the table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    // Where the report goes is found out before minutes of measuring and not after.
    std::fs::create_dir_all(&args.report).map_err(|error| {
        let dir = args.report.display();
        Failure::request(format!("--report {dir}: cannot make this directory: {error}; name another one"))
    })?;
    let plan = Plan::make(args)?;
    let comparison = measure(&plan, args)?;
    let json = fio_json::to_json(&comparison);
    let files = write_report(&args.report, &comparison, &plan.published, &json)?;
    if args.json {
        output::print(json)?;
    } else {
        output::print(table::render(&comparison, width(), colour()))?;
        output::print(format_args!("{}\n{}", files.0.display(), files.1.display()))?;
    }
    let wrong: u64 = comparison.rows.iter().flat_map(|row| &row.runs).map(|run| run.errors + run.verify_errors).sum();
    if wrong > 0 {
        return Err(Failure::run(format!("{wrong} I/Os failed or brought wrong data; the warnings above name the first")));
    }
    Ok(())
}

/// Runs every lane `runs` times, in turn.
fn measure(plan: &Plan, args: &Args) -> Result<Comparison, Failure> {
    let started = when::now();
    let mut rows: Vec<Row> = plan.lanes.iter().map(lane::Lane::row).collect();
    let bar = progress_bar(plan, args.runs);
    plan.prepare(&bar)?;
    bar.reset_elapsed();
    let mut done_ms = 0;
    for run in 1..=args.runs {
        for (lane, row) in plan.lanes.iter().zip(&mut rows) {
            bar.set_message(format!("run {run}/{}: {}, {}", args.runs, lane.subject(), lane.job.name));
            let lane_ms = lane.job.ramp_time_ms + lane.job.runtime_ms;
            let found = lane.run(plan, &|share| bar.set_position(done_ms + (share * lane_ms as f64) as u64))?;
            row.runs.push(found);
            done_ms += lane_ms;
            bar.set_position(done_ms);
        }
    }
    bar.finish_and_clear();
    Ok(Comparison {
        command: command_line(),
        started,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        machine: Machine::here(),
        suite: args.suite.clone(),
        rows,
        skipped: plan.skipped.clone(),
    })
}

/// Writes both files; answers where.
pub(crate) fn write_report(
    dir: &Path,
    comparison: &Comparison,
    published: &[PublishedFigure],
    json: &str,
) -> Result<(PathBuf, PathBuf), Failure> {
    let page = page::render(comparison, published).map_err(Failure::run)?;
    let write = |name: &str, text: &str| {
        let path = dir.join(name);
        std::fs::write(&path, text).map_err(|error| {
            Failure::run(format!("{}: cannot write the report: {error}", path.display()))
        })?;
        Ok::<_, Failure>(path)
    };
    Ok((write("bench.json", json)?, write("bench.html", &page)?))
}

/// The terminal's columns, 80 where there is none.
pub(crate) fn width() -> table::Width {
    let columns = console_columns().filter(|&columns| columns >= 40).unwrap_or(80);
    table::Width(columns.min(120))
}

/// Colours for people only.
pub(crate) fn colour() -> table::Colour {
    let wanted = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    if wanted { table::Colour::Ansi } else { table::Colour::Off }
}

fn console_columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(size.ws_col.into())
}

fn progress_bar(plan: &Plan, runs: u32) -> ProgressBar {
    let lane_ms: u64 = plan.lanes.iter().map(|lane| lane.job.ramp_time_ms + lane.job.runtime_ms).sum();
    let bar = ProgressBar::with_draw_target(Some(lane_ms * u64::from(runs)), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("{bar:24} {percent:>3}% {elapsed} (about {eta} left) {wide_msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

fn command_line() -> String {
    let mut words = vec!["blockmux".to_owned()];
    words.extend(std::env::args().skip(1).map(|word| output::shell_word(&word).into_owned()));
    printable(&words.join(" ")).into_owned()
}

const EXAMPLES: &str = "\
Examples:
  blockmux bench
  blockmux bench nbd://host/disk0 --rw randread --bs 4k --iodepth 32
  blockmux bench file:disk.img --poll always --poll never
  blockmux bench --suite taocloud-2022
  blockmux bench mem:1g jobs.fio";
