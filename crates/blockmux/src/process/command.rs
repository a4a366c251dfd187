//! The command of `--run`.

use crate::failure::Failure;
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, ExitStatus};
use std::{io, thread};

/// The running command of `--run`.
pub(crate) struct RunningCommand {
    process: OwnedFd,
}

impl RunningCommand {
    /// Starts `command` in a shell, with these variables in its environment. `on_end` is called
    /// once when it has ended.
    ///
    /// # Errors
    /// If the shell cannot be started.
    pub(crate) fn start(
        command: &str,
        environment: Vec<(String, String)>,
        on_end: impl FnOnce(io::Result<ExitStatus>) + Send + 'static,
    ) -> Result<RunningCommand, Failure> {
        let cannot = |error: io::Error| Failure::run(format!("cannot run `{command}`: {error}"));
        let mut shell = Command::new("sh");
        let mut child = shell.arg("-c").arg(command).envs(environment).spawn().map_err(cannot)?;
        let process =
            pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).map_err(|error| cannot(error.into()))?;
        thread::spawn(move || on_end(child.wait()));
        Ok(RunningCommand { process })
    }

    /// Sends SIGTERM to the shell.
    pub(crate) fn terminate(&self) {
        // It fails if the process has just ended.
        let _ = pidfd_send_signal(&self.process, Signal::TERM);
    }
}

/// The exit code of the command; 128 plus the signal's number if a signal ended it, as in shells.
pub(crate) fn exit_code(status: io::Result<ExitStatus>) -> Result<ExitCode, Failure> {
    let status = status.map_err(|error| Failure::run(format!("cannot wait for the command: {error}")))?;
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    Ok(code.and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
