//! The `blockmux` binary: serves, accesses and benchmarks block volumes.
//!
//! A subcommand is a module with its `Args` and its `run`, and a variant of [`Command`]. An error
//! is one line on standard error; see [`failure`].
#![forbid(unsafe_code)]

mod access;
mod api;
mod attach;
mod cli;
mod daemon;
mod data;
mod failure;
mod import;
mod output;
mod process;
mod protocol;
mod spec_text;
#[cfg(test)]
#[path = "../../engine/tests/turns_storage/mod.rs"]
mod turns_storage;
mod volume_kinds;

use blockmux_engine::sys;
use blockmux_engine::volume::rbd::wait_until_closed;
use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory, Parser, Subcommand};
use cli::{bench, command_docs, copy, ctl, discover, info, rdma, report, reset, top};
use failure::Failure;
use process::log::levels::{self, Levels};
use process::log::{Log, LogFormat};
use process::signals;
use std::io;
use std::process::ExitCode;
use std::time::Duration;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Serve, access and benchmark network block devices
#[derive(Parser)]
#[command(name = "blockmux", version = VERSION, max_term_width = 80, after_help = EXAMPLES)]
struct Cli {
    /// Increase log verbosity; -vv for more
    #[arg(short, long, action = ArgAction::Count, global = true, display_order = BEFORE_HELP)]
    verbose: u8,
    /// Log levels by area: audit, protocol, initiator, volume, control [e.g.
    /// protocol=debug,audit=off]
    #[arg(long, value_name = "AREA=LEVEL,...", global = true, display_order = BEFORE_HELP)]
    log: Option<Levels>,
    /// Format of the log: text, json (one object per line) or journald (fields)
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        default_value = "text",
        hide_possible_values = true,
        hide_default_value = true,
        global = true,
        display_order = BEFORE_HELP
    )]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Export volumes over the network until stopped
    Serve(Box<daemon::ServeArgs>),
    /// Attach a volume to this machine as a block device, until stopped
    Attach(Box<attach::AttachArgs>),
    /// Check a config file of `serve`
    Check(daemon::CheckArgs),
    /// Write a config from that of another target, such as tgt or LIO
    Import(import::ImportArgs),
    /// Copy a volume to another; keep holes
    Copy(copy::CopyArgs),
    /// Describe a volume
    Info(info::InfoArgs),
    /// List the exports of a server
    Discover(discover::DiscoverArgs),
    /// List RDMA fabrics and devices, and what keeps devices from being used
    Rdma(rdma::RdmaArgs),
    /// Reset an iSCSI or SRP logical unit or an iSCSI target, or abort its commands
    Reset(reset::ResetArgs),
    /// Control a running daemon
    Ctl(ctl::CtlArgs),
    /// Show volumes, sessions and I/O rates of a running daemon, refreshed each second
    Top(top::TopArgs),
    /// Benchmark volumes over every protocol, compared with raw sockets
    Bench(Box<bench::BenchArgs>),
    /// Show or compare finished measurements
    Report(report::ReportArgs),
    /// Print the completion script for a shell
    Completions(command_docs::CompletionsArgs),
    /// Write the manual pages into a directory
    #[command(hide = true)]
    ManPages(command_docs::ManPagesArgs),
    /// Read and flush an attached disk for the process that serves it
    #[command(hide = true)]
    DiskIo(attach::own_io::DiskIoArgs),
}

impl Command {
    fn run(self, is_verbose: bool) -> Result<ExitCode, Failure> {
        match self {
            Command::Serve(args) => daemon::run(*args, is_verbose),
            Command::Attach(args) => attach::run(&args),
            Command::Check(args) => daemon::check(args).map(|()| ExitCode::SUCCESS),
            Command::Import(args) => import::run(&args).map(|()| ExitCode::SUCCESS),
            Command::Copy(args) => copy::run(&args),
            Command::Info(args) => info::run(&args).map(|()| ExitCode::SUCCESS),
            Command::Discover(args) => discover::run(&args).map(|()| ExitCode::SUCCESS),
            Command::Rdma(args) => rdma::run(&args).map(|()| ExitCode::SUCCESS),
            Command::Reset(args) => reset::run(&args).map(|()| ExitCode::SUCCESS),
            Command::Ctl(args) => ctl::run(args),
            Command::Top(args) => top::run(&args).map(|()| ExitCode::SUCCESS),
            Command::Bench(args) => bench::run(&args),
            Command::Report(args) => report::run(&args).map(|()| ExitCode::SUCCESS),
            Command::Completions(args) => {
                command_docs::complete(&args, Cli::command()).map(|()| ExitCode::SUCCESS)
            }
            Command::DiskIo(args) => attach::own_io::run(&args).map(|()| ExitCode::SUCCESS),
            Command::ManPages(args) => {
                command_docs::write_pages(&args, Cli::command()).map(|()| ExitCode::SUCCESS)
            }
        }
    }
}

fn main() -> ExitCode {
    if sys::address_space_left().is_some() {
        sys::share_one_heap();
    }
    failure::print_as_json_if_asked(std::env::args_os().skip(1));
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return on_no_command(&error),
    };
    match &cli.command {
        Command::Serve(args) => args.prepare_user(),
        Command::Check(args) => args.prepare_user(),
        _ => {}
    }
    let log = match start_log(&cli) {
        Ok(log) => log,
        Err(error) => {
            return Failure::request(format!("cannot open the log: {error}; check --log-format")).report();
        }
    };
    if let Err(error) = signals::outlive_file_limit() {
        return Failure::run(format!("cannot handle SIGXFSZ: {error}")).report();
    }
    let result = cli.command.run(cli.verbose > 0);
    if !wait_until_closed(IMAGE_CLOSE_TIMEOUT) {
        tracing::warn!(
            "an image of Ceph is not closed after {} s; its lock and its watch end when the cluster notices that",
            IMAGE_CLOSE_TIMEOUT.as_secs()
        );
    }
    log.finish();
    result.unwrap_or_else(|failure| failure.report())
}

/// Prints the help, the version, or the error of the command line.
fn on_no_command(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // An error means that standard output is closed.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    failure::from_command_line(error).report()
}

fn start_log(cli: &Cli) -> io::Result<Log> {
    let is_daemon = match &cli.command {
        Command::Serve(args) => args.is_daemon(),
        Command::Attach(args) => args.is_daemon(),
        _ => false,
    };
    let log = Log::start(cli.log_format, is_daemon)?;
    let filter = levels::filter(cli.log.clone().unwrap_or_default(), cli.verbose, is_daemon);
    tracing_subscriber::registry().with(filter).with(log.clone()).init();
    Ok(log)
}

/// Time for closing images of Ceph at the end.
const IMAGE_CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Position of `--verbose` in every list of options.
const BEFORE_HELP: usize = 900;

/// The version, and what a static build cannot do.
const VERSION: &str = if cfg!(target_feature = "crt-static") {
    concat!(env!("CARGO_PKG_VERSION"), " (static build: loads no libraries, so it cannot use RDMA devices)")
} else {
    env!("CARGO_PKG_VERSION")
};

const EXAMPLES: &str = "\
Volumes:
  mem:1g                     RAM
  null:1t                    discards writes, reads zeroes
  file:disk.img              a file; ?size=10g creates it
  block:/dev/sdb             a block device
  vhost-user:/run/disk.sock  the disk of a vhost-user back end
  rbd:pool/image             an image of Ceph RBD; @snapshot, ?id=user&conf=path
  slice:1m,10g:SPEC          a part of another volume: 10g from byte 1m on
  stripe:1m:SPEC,SPEC        RAID 0 of other volumes
  delay:5ms:SPEC             adds latency to a volume
  fault:every=100:SPEC       makes requests of a volume fail
  rate:iops=1000:SPEC        limits the rate of a volume
  log:-:SPEC                 logs each request of a volume to standard error
  URL                        a volume that another server exports:
    nbd://host/export           (nbds:// with TLS)
    nbd+unix:///export?socket=PATH
    iscsi://host/target-name/lun
    iser://host/target-name/lun
    nvme+tcp://host/subsystem-nqn/nsid
    nvme+rdma://host/subsystem-nqn/nsid
    srp://host/TARGET-PORT-ID/lun
    aoe://IFACE/eSHELF.SLOT
Each takes ?block_size=4096 (4Kn) and ?physical_block_size=4096 (512e).

Examples:
  blockmux serve mem:1g
  blockmux serve mem:1g --run 'nbdinfo $uri'
  blockmux copy nbd://host/disk file:disk.img --verify

Exit status: 0 success; 1 failed while running; 2 could not start, for example
because of an invalid command line or a volume that cannot be opened.";

#[cfg(test)]
#[path = "../tests/cli/examples.rs"]
mod examples;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::examples::{CommandLine, pages};

    /// Collects a command and its subcommands, with their names.
    fn with_all_below(command: &clap::Command, name: &str, found: &mut Vec<(String, clap::Command)>) {
        found.push((name.to_owned(), command.clone()));
        for below in command.get_subcommands() {
            with_all_below(below, &format!("{name} {}", below.get_name()), found);
        }
    }

    #[test]
    fn text_below_the_options_has_lines_of_at_most_80_columns() {
        let mut commands = Vec::new();
        with_all_below(&Cli::command(), "blockmux", &mut commands);
        assert!(commands.iter().any(|(name, _)| name == "blockmux ctl resize"));
        for (name, command) in commands {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let wide: Vec<_> = text.lines().filter(|line| line.chars().count() > 80).collect();
            assert!(wide.is_empty(), "{name}: {wide:#?}");
        }
    }

    /// `WRITE_DOCS=1 cargo test -p blockmux` writes the page.
    #[test]
    fn the_command_line_reference_has_the_output_of_help() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/command-line.md");
        let mut commands = Vec::new();
        with_all_below(&Cli::command(), "blockmux", &mut commands);
        let mut page = "# Command line\n\n<!-- What `blockmux help COMMAND` prints; written by a test of \
                        crates/blockmux/src/main.rs. -->\n\n\
                        The options of `blockmux` itself are options of every command, those of `blockmux ctl` \
                        of every command below it.\n"
            .to_owned();
        let (of_all, of_ctl) = (["log", "log_format", "verbose"], ["token_file", "tls_certificates", "json"]);
        let hidden = |from: clap::Command, names: &[&str]| {
            names.iter().fold(from, |all, own| all.mut_arg(own, |own| own.hide(true)))
        };
        let without = hidden(Cli::command(), &of_all).disable_help_flag(true);
        let below_ctl = without.clone().mut_subcommand("ctl", |ctl| hidden(ctl, &of_ctl));
        for (name, _) in commands.into_iter().filter(|(_, command)| !command.is_hide_set()) {
            let words = ["blockmux", "help"].into_iter().chain(name.split(' ').skip(1));
            let command = match name.strip_prefix("blockmux") {
                Some("") => Cli::command(),
                Some(below) if below.starts_with(" ctl ") => below_ctl.clone(),
                _ => without.clone(),
            };
            let help = command.try_get_matches_from(words).unwrap_err().to_string();
            let help: Vec<_> = help.lines().map(str::trim_end).collect();
            page += &format!("\n## {name}\n\n```text\n{}\n```\n", help.join("\n").trim_end());
        }
        if std::env::var_os("WRITE_DOCS").is_some() {
            std::fs::write(path, &page).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap();
        assert!(written == page, "{path} is outdated; run WRITE_DOCS=1 cargo test -p blockmux");
    }

    /// What stands in the pages where a reader writes something of their own.
    const PLACEHOLDERS: [(&str, &str); 10] = [
        ("SOCKET", "unix:/run/blockmux/control"),
        ("URL", "nbd://host/disk"),
        ("SPEC", "mem:1g"),
        ("GROUP", "1"),
        ("ADDR", "192.0.2.1:4420"),
        ("NUMBER", "1"),
        ("SIZE", "1g"),
        ("COMMAND", "serve"),
        ("nbds://...", "nbds://host/disk"),
        ("part.toml", concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/blockmux.toml")),
    ];

    /// The words as a reader would type them.
    fn filled_in(line: &CommandLine) -> Vec<String> {
        let state = if line.words.contains(&"ana".to_owned()) { "optimized" } else { "active/optimized" };
        let fill = |word: &String| match PLACEHOLDERS.iter().find(|(name, _)| name == word) {
            Some((_, value)) => (*value).to_owned(),
            None if word == "STATE" => state.to_owned(),
            None => word.clone(),
        };
        let mut words: Vec<_> = line.words.iter().filter(|word| *word != "...").map(fill).collect();
        // The service's user, whom only its package creates.
        if let Some(at) = words.iter().position(|word| word == "--user") {
            words[at + 1] = uzers::get_current_username().unwrap().into_string().unwrap();
        }
        words
    }

    /// The error of a command line that the program refuses. A sentence may name a command, such as
    /// `blockmux ctl status`, without what it needs.
    fn refused(line: &CommandLine) -> Option<clap::Error> {
        let mut words = filled_in(line);
        if !line.is_example && words[1] == "ctl" && words.get(2).is_none_or(|word| !word.contains(':')) {
            words.insert(2, "unix:/run/blockmux/control".to_owned());
        }
        let error = Cli::try_parse_from(words).err()?;
        let is_name = match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => true,
            ErrorKind::MissingRequiredArgument
            | ErrorKind::MissingSubcommand
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => !line.is_example,
            _ => false,
        };
        (!is_name).then_some(error)
    }

    #[test]
    fn every_command_line_of_the_documents_is_accepted() {
        let lines: Vec<_> = pages().iter().flat_map(|page| page.command_lines()).collect();
        assert!(lines.len() > 150, "{}", lines.len());
        let refused = lines.iter().filter_map(|line| {
            let error = refused(line)?.to_string();
            Some(format!("{}: {}: {error}", line.place, line.words.join(" ")))
        });
        let refused: Vec<_> = refused.collect();
        assert!(refused.is_empty(), "{}", refused.join("\n"));
    }
}
