//! Running other programs, which an interrupt ends.

use blockmux_engine::attach::program::{ProgramGroup, RunningProgram};
use rustix::process::Signal;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Runs programs one at a time, until it is told to stop. What undoes their work is run without it,
/// also after an interrupt.
#[derive(Default)]
pub(super) struct Programs(Mutex<RunningPrograms>);

#[derive(Default)]
struct RunningPrograms {
    is_stopped: bool,
    /// The program that runs.
    group: Option<ProgramGroup>,
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
        listen: impl FnMut(&str),
    ) -> Result<String, String> {
        let program = {
            let mut running = self.lock();
            if running.is_stopped {
                return Err(STOPPED.to_owned());
            }
            let program = RunningProgram::start(command).map_err(|error| error.to_string())?;
            running.group = Some(program.group());
            program
        };
        has_begun(program.id());
        let ended = program.wait(listen);
        ended.map_err(|error| if self.lock().is_stopped { STOPPED.to_owned() } else { error.to_string() })
    }

    /// Ends the program that runs; no other one begins. A program that flushes its files ends only
    /// when that has succeeded or failed, so the disk is given up.
    pub(super) fn stop(&self) {
        let give_up_disk = {
            let mut running = self.lock();
            running.is_stopped = true;
            if let Some(group) = &running.group {
                group.signal(Signal::TERM);
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
