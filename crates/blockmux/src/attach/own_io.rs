//! `blockmux disk-io`: reads and flushes disks for the process that serves them, which starts it.

use super::memory;
use crate::failure::Failure;
use crate::process::{privileges, signals};
use blockmux_engine::attach::own_io::{IoProcesses, IoProgram, execute_requests, start_processes};
use rustix::thread::CapabilitySet;
use std::io::{self, BufRead};
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Arguments of `blockmux disk-io`.
#[derive(clap::Args)]
pub(crate) struct DiskIoArgs {
    /// The disk; without it, a process is started for each disk that standard input names
    #[arg(value_name = "PATH")]
    disk: Option<PathBuf>,
}

/// I/O on attached disks by this program, as processes of their own.
pub(crate) fn by_this_program() -> IoProcesses {
    IoProcesses::of(program())
}

fn program() -> IoProgram {
    // Also if the file of the program was replaced since this process has started.
    IoProgram { path: "/proc/self/exe".into(), arguments: vec!["disk-io".to_owned()] }
}

/// Executes the requests on standard input until it ends.
///
/// # Errors
/// If the process that makes them has ended.
pub(crate) fn run(args: &DiskIoArgs) -> Result<(), Failure> {
    // A service manager stops all processes of a service at once, but this one has work until the
    // process that has started it ends.
    signals::ignore_stops().map_err(|error| Failure::run(format!("cannot handle signals: {error}")))?;
    match &args.disk {
        Some(disk) => execute_requests(disk, requests(), io::stdout().lock())
            .map_err(|error| Failure::run(format!("{}: {error}", disk.display()))),
        None => {
            memory::outlive_others();
            // The nodes of disks belong to root.
            privileges::pass_on_only(CapabilitySet::DAC_OVERRIDE);
            start_processes(&program(), &io::stdin())
                .map_err(|error| Failure::run(format!("no disk can be read or flushed: {error}")))
        }
    }
}

/// The requests on standard input. When it ends, the process does, too, although its I/O may hang:
/// the kernel ends what it can.
fn requests() -> mpsc::IntoIter<io::Result<String>> {
    let (sender, requests) = mpsc::channel();
    let read = move || {
        for line in io::stdin().lock().lines() {
            // The receiver is gone if an answer could not be written.
            let _ = sender.send(line);
        }
        drop(sender);
        thread::park_timeout(ENDS);
        std::process::exit(1);
    };
    // Without a thread there are no requests, and the process ends.
    drop(thread::Builder::new().name("requests".to_owned()).spawn(read));
    requests.into_iter()
}

/// The time in which a request ends that does not hang.
const ENDS: Duration = Duration::from_secs(1);
