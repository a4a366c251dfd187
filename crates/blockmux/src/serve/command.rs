//! The command of `--run`.

use super::StopEvent;
use super::announce::Announcement;
use crate::failure::Failure;
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::mpsc::Sender;
use std::{io, thread};

/// A command that runs; its end becomes an event.
pub(super) struct Running {
    process: OwnedFd,
}

impl Running {
    /// Starts it, with the URLs in its environment.
    pub(super) fn start(
        command: &str,
        announcement: &Announcement,
        events: &Sender<StopEvent>,
    ) -> Result<Running, Failure> {
        let cannot = |error: io::Error| Failure::run(format!("cannot run `{command}`: {error}"));
        let mut shell = Command::new("sh");
        let mut child =
            shell.arg("-c").arg(command).envs(announcement.environment()).spawn().map_err(cannot)?;
        let process =
            pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).map_err(|error| cannot(error.into()))?;
        let events = events.clone();
        thread::spawn(move || {
            // Nobody listens any more when the daemon is ending for another reason.
            let _ = events.send(StopEvent::CommandEnded(child.wait()));
        });
        Ok(Running { process })
    }

    /// Asks it to end.
    pub(super) fn terminate(&self) {
        // It may have ended just now.
        let _ = pidfd_send_signal(&self.process, Signal::TERM);
    }
}

/// The command's exit status as ours; 128 and the signal's number if one killed it, as shells have
/// it.
pub(super) fn exit_code(status: io::Result<ExitStatus>) -> Result<ExitCode, Failure> {
    let status = status.map_err(|error| Failure::run(format!("lost track of the command: {error}")))?;
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    Ok(code.and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
