//! `blockmux disk-io`: reads and flushes a disk for the process that serves it, which starts it.

use crate::failure::Failure;
use blockmux_engine::attach::own_io::{IoProgram, OwnIo, execute_requests};
use std::io;
use std::path::PathBuf;

/// Arguments of `blockmux disk-io`.
#[derive(clap::Args)]
pub(crate) struct DiskIoArgs {
    /// The disk
    #[arg(value_name = "PATH")]
    disk: PathBuf,
}

/// I/O on an attached disk by this program, as a process of its own.
pub(crate) fn by_this_program() -> OwnIo {
    // Also if the file of the program was replaced since this process has started.
    OwnIo::by(IoProgram { path: "/proc/self/exe".into(), arguments: vec![COMMAND.to_owned()] })
}

/// Executes the requests on standard input until it ends.
///
/// # Errors
/// If the process that makes them has ended.
pub(crate) fn run(args: &DiskIoArgs) -> Result<(), Failure> {
    execute_requests(&args.disk, io::stdin().lock(), io::stdout().lock())
        .map_err(|error| Failure::run(format!("{}: {error}", args.disk.display())))
}

const COMMAND: &str = "disk-io";
