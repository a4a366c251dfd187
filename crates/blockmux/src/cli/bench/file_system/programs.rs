//! Running other programs, which an interrupt ends.

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Runs programs one at a time, until it is told to stop.
#[derive(Default)]
pub(super) struct Programs(Mutex<RunningPrograms>);

#[derive(Default)]
struct RunningPrograms {
    is_stopped: bool,
    /// The process group of the program that runs, until it is reaped.
    group: Option<Pid>,
    /// Makes a program end that waits for its disk.
    give_up_disk: Option<Box<dyn FnOnce() + Send>>,
}

impl Programs {
    /// Runs a program to its end; returns its standard output.
    ///
    /// # Errors
    /// If it fails, with the last line that it has printed; if it was stopped, or may not begin.
    pub(super) fn run(&self, command: &mut Command) -> Result<String, String> {
        self.run_and_listen(command, |_| {}, |_| {})
    }

    /// Runs a program to its end; returns its standard output. `has_begun` gets its process number,
    /// and `listen` each piece of what it says on standard error at once.
    ///
    /// # Errors
    /// As of [`Programs::run`].
    pub(super) fn run_and_listen(
        &self,
        command: &mut Command,
        has_begun: impl FnOnce(u32),
        mut listen: impl FnMut(&str),
    ) -> Result<String, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        let failed = |error: io::Error| format!("cannot run {name}: {error}");
        let piped = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // An interrupt at the terminal is for this process, which ends the program.
        let piped = piped.process_group(0);
        let (mut child, leader) = {
            let mut running = self.lock();
            if running.is_stopped {
                return Err(STOPPED.to_owned());
            }
            let child = piped.spawn().map_err(failed)?;
            let leader = Pid::from_child(&child);
            running.group = Some(leader);
            (child, leader)
        };
        has_begun(child.id());
        let (mut output, mut said) = (Vec::new(), Vec::new());
        let mut read = child.stderr.take().map_or(Ok(()), |mut stderr| {
            let mut piece = [0; 4096];
            loop {
                match stderr.read(&mut piece) {
                    Ok(0) => return Ok(()),
                    Ok(len) => {
                        said.extend_from_slice(&piece[..len]);
                        listen(&String::from_utf8_lossy(&piece[..len]));
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        });
        // These programs print little, so that the pipe does not become full meanwhile.
        if let Some(mut stdout) = child.stdout.take() {
            read = read.and(stdout.read_to_end(&mut output).map(drop));
        }
        // Its number is not given to another process before it is reaped.
        let ended = waitid(WaitId::Pid(leader), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        let is_stopped = {
            let mut running = self.lock();
            running.group = None;
            running.is_stopped
        };
        let status = child.wait().map_err(failed)?;
        read.and(ended.map_err(io::Error::from).map(drop)).map_err(failed)?;
        if status.success() {
            return Ok(String::from_utf8_lossy(&output).into_owned());
        }
        Err(match (is_stopped, status.signal()) {
            (true, _) => STOPPED.to_owned(),
            (false, Some(signal)) => format!("{name}: was killed by signal {signal}"),
            (false, None) => format!("{name}: {}", last_line(&said, &output)),
        })
    }

    /// Ends the program that runs; no other one begins. A program that flushes its files ends only
    /// when that has succeeded or failed, so the disk is given up.
    pub(super) fn stop(&self) {
        let give_up_disk = {
            let mut running = self.lock();
            running.is_stopped = true;
            if let Some(group) = running.group {
                // It fails if the program has just ended.
                let _ = kill_process_group(group, Signal::TERM);
            }
            running.give_up_disk.take()
        };
        if let Some(give_up_disk) = give_up_disk {
            give_up_disk();
        }
    }

    /// Sets what gives up the disk that programs use from now on; `None` if they use none.
    pub(super) fn use_disk(&self, give_up: Option<Box<dyn FnOnce() + Send>>) {
        self.lock().give_up_disk = give_up;
    }

    fn lock(&self) -> MutexGuard<'_, RunningPrograms> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last line of what a program has said, on standard error if it said something there.
fn last_line(said: &[u8], output: &[u8]) -> String {
    let line = |text: &[u8]| {
        let text = String::from_utf8_lossy(text);
        text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
    };
    line(said).or_else(|| line(output)).unwrap_or_else(|| "it failed".to_owned())
}

const STOPPED: &str = "interrupted";

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    fn shell(command: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", command]);
        shell
    }

    #[test]
    fn the_last_line_of_a_failed_program_is_its_reason() {
        let programs = Programs::default();
        assert_eq!(programs.run(&mut shell("echo 7; echo noise >&2")), Ok("7\n".to_owned()));
        let said = |command| programs.run(&mut shell(command)).unwrap_err();
        assert_eq!(said("echo usage; echo first >&2; echo no space >&2; exit 1"), "sh: no space");
        assert_eq!(said("echo only here; exit 1"), "sh: only here");
        assert_eq!(said("exit 1"), "sh: it failed");
        assert_eq!(said("kill -9 $$"), "sh: was killed by signal 9");
        assert!(programs.run(&mut Command::new("/no/such/program")).is_err());
    }

    #[test]
    fn a_listener_hears_everything_in_order() {
        let (mut process, mut heard) = (0, String::new());
        let mut echo = shell("echo one >&2; echo $$; echo two >&2");
        let printed =
            Programs::default().run_and_listen(&mut echo, |id| process = id, |piece| heard += piece);
        assert_eq!((printed, heard.as_str()), (Ok(format!("{process}\n")), "one\ntwo\n"));
    }

    #[test]
    fn stopping_ends_a_program_with_what_it_has_started_and_lets_no_other_one_begin() {
        let programs = Programs::default();
        let (begun, has_begun) = mpsc::channel();
        let place = tempfile::tempdir().unwrap();
        let pipe = place.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let endless = format!("(echo > '{}'; exec tail -f /dev/null) & wait", pipe.display());
        thread::scope(|scope| {
            let run = scope.spawn(|| programs.run(&mut shell(&endless)));
            scope.spawn(move || begun.send(std::fs::read(&pipe)));
            has_begun.recv().unwrap().unwrap();
            let (given_up, is_given_up) = mpsc::channel();
            programs.use_disk(Some(Box::new(move || given_up.send(()).unwrap())));
            programs.stop();
            assert_eq!(run.join().unwrap(), Err("interrupted".to_owned()));
            assert_eq!(is_given_up.try_recv(), Ok(()));
        });
        assert_eq!(programs.run(&mut shell("exit 0")), Err("interrupted".to_owned()));
    }
}
