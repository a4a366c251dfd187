//! The one binary: serves, reaches and measures block volumes.
//!
//! A subcommand is one module with its `Args` and its `run`, and one variant of [`Command`].
//! Whatever goes wrong is one line on standard error, see [`failure`].
#![forbid(unsafe_code)]

mod address;
mod bench;
mod copy;
mod ctl;
mod data_key;
mod discover;
mod failure;
mod image_format;
mod info;
mod levels;
mod log;
mod machine;
mod open;
mod output;
mod poll;
mod privileges;
mod protocol;
mod reach;
mod records;
mod regular;
mod repeats;
mod report;
mod reset;
mod retry;
mod serve;
mod show;
mod signals;

use blockmux_engine::sys;
use clap::error::ErrorKind;
use clap::{ArgAction, Parser, Subcommand};
use failure::Failure;
use levels::Levels;
use log::Log;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Puts one block volume on every network block protocol, and measures which one serves you best
#[derive(Parser)]
#[command(name = "blockmux", version, max_term_width = 80, after_help = EXAMPLES)]
struct Cli {
    /// Say more on standard error; -vv says even more
    #[arg(short, long, action = ArgAction::Count, global = true, display_order = BEFORE_HELP)]
    verbose: u8,
    /// Log levels by area: audit, protocol, initiator, volume, control [e.g.
    /// protocol=debug,audit=off]
    #[arg(long, value_name = "AREA=LEVEL,...", global = true, display_order = BEFORE_HELP)]
    log: Option<Levels>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve volumes until told to stop
    Serve(serve::ServeArgs),
    /// Copy a volume to another, holes as holes
    Copy(copy::CopyArgs),
    /// Describe a volume
    Info(info::InfoArgs),
    /// List what a server exports
    Discover(discover::DiscoverArgs),
    /// Reset a logical unit or a target, or end what is under way there
    Reset(reset::ResetArgs),
    /// Ask a running `serve --control` for its status, or change what it serves
    Ctl(ctl::CtlArgs),
    /// Measure volumes over every protocol, beside the bare sockets
    Bench(Box<bench::BenchArgs>),
    /// Show finished measurements again
    Report(report::ReportArgs),
}

impl Command {
    fn run(self, is_verbose: bool) -> Result<ExitCode, Failure> {
        match self {
            Command::Serve(args) => serve::run(args, is_verbose),
            Command::Copy(args) => copy::run(&args),
            Command::Info(args) => info::run(&args).map(|()| ExitCode::SUCCESS),
            Command::Discover(args) => discover::run(&args).map(|()| ExitCode::SUCCESS),
            Command::Reset(args) => reset::run(&args).map(|()| ExitCode::SUCCESS),
            Command::Ctl(args) => ctl::run(&args).map(|()| ExitCode::SUCCESS),
            Command::Bench(args) => bench::run(&args),
            Command::Report(args) => report::run(&args).map(|()| ExitCode::SUCCESS),
        }
    }
}

fn main() -> ExitCode {
    if sys::address_space_left().is_some() {
        sys::share_one_heap();
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return on_no_command(&error),
    };
    let log = match start_log(&cli) {
        Ok(log) => log,
        Err(error) => return Failure::run(format!("cannot start a thread: {error}")).report(),
    };
    if let Err(error) = signals::outlive_file_limit() {
        return Failure::run(format!("cannot watch for signals: {error}")).report();
    }
    let result = cli.command.run(cli.verbose > 0);
    log.finish();
    result.unwrap_or_else(|failure| failure.report())
}

/// Help, the version, or what is wrong with the command line.
fn on_no_command(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // Whoever closed standard output does not want to read it.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    failure::from_command_line(error).report()
}

fn start_log(cli: &Cli) -> io::Result<Log> {
    let is_daemon = matches!(&cli.command, Command::Serve(args) if args.is_daemon());
    let log = Log::start(is_daemon)?;
    let writer = log.clone();
    let lines = tracing_subscriber::fmt::layer()
        .compact()
        .without_time()
        .with_target(false)
        .with_ansi(io::stderr().is_terminal() && output::may_colour())
        .with_writer(move || writer.clone());
    let levels = cli.log.clone().unwrap_or_default().targets(cli.verbose, is_daemon);
    tracing_subscriber::registry().with(lines).with(levels).init();
    Ok(log)
}

/// Where `--verbose` stands in every list of options.
const BEFORE_HELP: usize = 900;

const EXAMPLES: &str = "\
Volumes:
  mem:1g                     RAM
  null:1t                    holds nothing, as fast as can be
  file:disk.img              a file; ?size=10g creates it
  block:/dev/sdb             a block device
  stripe:1m:SPEC,SPEC        RAID 0 of other volumes
  delay:5ms:SPEC             another volume, later
  fault:every=100:SPEC       another volume, failing
  rate:iops=1000:SPEC        another volume, not faster than this
  log:-:SPEC                 another volume, watched on standard error
  URL                        a volume that another server exports:
    nbd://host/export
    nbd+unix:///export?socket=PATH
    iscsi://host/target-name/lun
    iser://host/target-name/lun
    nvme+tcp://host/subsystem-nqn/nsid
    aoe://IFACE/eSHELF.SLOT

Examples:
  blockmux serve mem:1g
  blockmux serve mem:1g --run 'nbdinfo $uri'
  blockmux copy nbd://host/disk file:disk.img --verify

Exit status: 0 done; 1 failed while it ran; 2 could not begin, as with a
wrong command line or a volume that cannot be opened.";

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// The command and those below it, each with what it is called by.
    fn with_all_below(command: &clap::Command, name: &str, found: &mut Vec<(String, clap::Command)>) {
        found.push((name.to_owned(), command.clone()));
        for below in command.get_subcommands() {
            with_all_below(below, &format!("{name} {}", below.get_name()), found);
        }
    }

    #[test]
    fn what_stands_below_the_options_is_broken_into_lines_by_us_and_never_once_more() {
        let mut commands = Vec::new();
        with_all_below(&Cli::command(), "blockmux", &mut commands);
        assert!(commands.iter().any(|(name, _)| name == "blockmux ctl resize"));
        for (name, command) in commands {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let wide: Vec<_> = text.lines().filter(|line| line.chars().count() > 80).collect();
            assert!(wide.is_empty(), "{name}: {wide:#?}");
        }
    }
}
