//! Development tasks of this repository: `cargo xtask ci`, and each of its parts.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program that reports to a terminal")]

mod ci;
mod cluster;
mod fuzz;
mod package;
mod peers;
mod process;
mod programs;
mod release;
mod results;
mod tidy;
mod vm;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::path::Path;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// All checks and tests: format, lints, tidy, tests, docs, and half a minute of fuzzing
    Ci,
    /// Checks the rules of this repository that the compiler does not check
    Tidy,
    /// Installs the programs that interop tests run against (Debian, as root)
    InstallPeers,
    /// Runs tests with the Linux kernel as the peer, in QEMU
    Vm {
        /// Scripts of tests/vm [default: all]
        scripts: Vec<String>,
        /// Runs a release build, whose speed says something
        #[arg(long)]
        release: bool,
    },
    /// Runs tests with a Ceph cluster, which it starts on loopback (Debian, as root)
    Cluster {
        /// Names of tests [default: all]
        tests: Vec<String>,
    },
    /// Compares Blockmux with other implementations
    Peers {
        #[command(subcommand)]
        protocol: peers::Protocols,
    },
    /// Builds the Debian package
    Package {
        /// Installs, upgrades and purges it in a Debian of its own, too (as root)
        #[arg(long)]
        test: bool,
    },
    /// Builds all artifacts of a release into target/release-artifacts (Debian, x86-64)
    Release {
        /// Target triples [default: all]
        targets: Vec<String>,
    },
    /// Makes the pages of docs/results from the measurements in docs/results/data
    Results,
    /// Fuzzes one target, or all targets for an equal share of the time
    Fuzz {
        /// Total time in seconds
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// Name of a target, which is a directory of fuzz/corpus [default: all]
        target: Option<String>,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().task, repository()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task, root: &Path) -> Result<()> {
    match task {
        Task::Ci => ci::run(root),
        Task::Tidy => tidy::run(root),
        Task::InstallPeers => {
            peers::install();
            peers::install_python();
            Ok(())
        }
        Task::Vm { scripts, release } => {
            let profile = if release { vm::Profile::Release } else { vm::Profile::Debug };
            for line in vm::run(root, profile, &scripts, &mut |line| println!("{line}"))? {
                println!("{line}");
            }
            Ok(())
        }
        Task::Cluster { tests } => cluster::run(root, &tests),
        Task::Peers { protocol } => peers::run(root, protocol),
        Task::Package { test: true } => package::test(root),
        Task::Package { test: false } => {
            println!("{}", package::build(root)?.display());
            Ok(())
        }
        Task::Release { targets } => {
            for line in release::run(root, &targets)? {
                println!("{line}");
            }
            Ok(())
        }
        Task::Results => {
            println!("{} pages written", results::write(root)?);
            Ok(())
        }
        Task::Fuzz { seconds, target } => {
            for line in fuzz::run(root, seconds, target.as_deref())? {
                println!("{line}");
            }
            Ok(())
        }
    }
}

/// The root of the repository from which this program was built.
fn repository() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
}
