//! Running other programs, such as those that mount file systems.

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::env;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// A program that runs, without input.
#[derive(Debug)]
pub struct RunningProgram {
    name: String,
    child: Child,
    group: ProgramGroup,
}

/// The process group of a program, as long as it runs.
#[derive(Clone, Debug)]
pub struct ProgramGroup(Arc<Mutex<Option<Pid>>>);

/// Why a program has not succeeded.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It cannot be started, read or waited for.
    #[error("cannot run {program}: {error}")]
    NotRun {
        /// The program.
        program: String,
        /// What failed.
        error: io::Error,
    },
    /// It has failed.
    #[error("{program}: {said}")]
    Failed {
        /// The program.
        program: String,
        /// The last line that it has printed, or the signal that has killed it.
        said: String,
    },
}

/// Runs a program to its end; returns its standard output.
///
/// # Errors
/// If it cannot be started, or fails.
pub fn run(command: &mut Command) -> Result<String, ProgramError> {
    RunningProgram::start(command)?.wait(|_| ())
}

impl RunningProgram {
    /// Starts a program, in a process group of its own: an interrupt at the terminal is for this
    /// process, which may end the program.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(command: &mut Command) -> Result<RunningProgram, ProgramError> {
        let name = command.get_program().to_string_lossy().into_owned();
        let piped = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        match piped.process_group(0).spawn() {
            Ok(child) => {
                let group = ProgramGroup(Arc::new(Mutex::new(Some(Pid::from_child(&child)))));
                Ok(RunningProgram { name, child, group })
            }
            Err(error) => Err(ProgramError::NotRun { program: name, error }),
        }
    }

    /// Its process number.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its process group, which a signal ends early.
    #[must_use]
    pub fn group(&self) -> ProgramGroup {
        self.group.clone()
    }

    /// Waits for its end; returns its standard output. `listen` gets each piece of what it says on
    /// standard error at once.
    ///
    /// # Errors
    /// If it fails.
    pub fn wait(mut self, listen: impl FnMut(&str)) -> Result<String, ProgramError> {
        let waited = self.read_and_reap(listen);
        let program = self.name;
        let (status, output, said) = match waited {
            Ok(waited) => waited,
            Err(error) => return Err(ProgramError::NotRun { program, error }),
        };
        if status.success() {
            return Ok(String::from_utf8_lossy(&output).into_owned());
        }
        let said = match status.signal() {
            Some(signal) => format!("was killed by signal {signal}"),
            None => last_line(&said, &output),
        };
        // Many programs begin their messages with their names.
        let said = said.strip_prefix(&format!("{program}: ")).map(str::to_owned).unwrap_or(said);
        Err(ProgramError::Failed { program, said })
    }

    /// Its status, standard output and standard error.
    fn read_and_reap(&mut self, listen: impl FnMut(&str)) -> io::Result<(ExitStatus, Vec<u8>, Vec<u8>)> {
        let (mut output, mut said) = (Vec::new(), Vec::new());
        let mut read = self.child.stderr.take().map_or(Ok(()), |stderr| hear(stderr, &mut said, listen));
        // These programs print little, so that the pipe does not become full meanwhile.
        if let Some(mut stdout) = self.child.stdout.take() {
            read = read.and(stdout.read_to_end(&mut output).map(drop));
        }
        // Its number is not given to another process before it is reaped.
        let leader = WaitId::Pid(Pid::from_child(&self.child));
        let ended = waitid(leader, WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        *self.group.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let status = self.child.wait()?;
        read.and(ended.map_err(io::Error::from)).map(|_| (status, output, said))
    }
}

impl ProgramGroup {
    /// Sends a signal to the program and to what it has started. One that has ended gets none.
    pub fn signal(&self, signal: Signal) {
        if let Some(group) = *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            // It fails if the program has just ended.
            let _ = kill_process_group(group, signal);
        }
    }
}

fn hear(mut stderr: impl Read, said: &mut Vec<u8>, mut listen: impl FnMut(&str)) -> io::Result<()> {
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
}

/// The last line of what a program has said, on standard error if it said something there.
fn last_line(said: &[u8], output: &[u8]) -> String {
    let line = |text: &[u8]| {
        let text = String::from_utf8_lossy(text);
        text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
    };
    line(said).or_else(|| line(output)).unwrap_or_else(|| "it failed".to_owned())
}

/// Whether a program is installed, where a shell would find it.
#[must_use]
pub fn is_installed(program: &str) -> bool {
    is_in(&env::var_os("PATH").unwrap_or_default(), program)
}

fn is_in(path: &OsStr, program: &str) -> bool {
    env::split_paths(path).any(|directory| directory.join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn shell(command: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", command]);
        shell
    }

    #[test]
    fn the_last_line_of_a_failed_program_is_its_reason() {
        assert_eq!(run(&mut shell("echo 7; echo noise >&2")).unwrap(), "7\n");
        let said = |command| run(&mut shell(command)).unwrap_err().to_string();
        assert_eq!(said("echo usage; echo first >&2; echo no space >&2; exit 1"), "sh: no space");
        assert_eq!(said("echo only here; exit 1"), "sh: only here");
        assert_eq!(said("echo sh: /x: bad superblock >&2; exit 1"), "sh: /x: bad superblock");
        assert_eq!(said("exit 1"), "sh: it failed");
        assert_eq!(said("kill -9 $$"), "sh: was killed by signal 9");
        let error = run(&mut Command::new("/no/such/program")).unwrap_err().to_string();
        assert!(error.starts_with("cannot run /no/such/program: "), "{error}");
    }

    #[test]
    fn a_listener_hears_everything_in_order() {
        let program = RunningProgram::start(&mut shell("echo one >&2; echo $$; echo two >&2")).unwrap();
        let (process, mut heard) = (program.id(), String::new());
        let printed = program.wait(|piece| heard += piece).unwrap();
        assert_eq!((printed, heard.as_str()), (format!("{process}\n"), "one\ntwo\n"));
    }

    #[test]
    fn a_signal_ends_a_program_with_what_it_has_started_and_nothing_after_its_end() {
        let program = RunningProgram::start(&mut shell("tail -f /dev/null & wait")).unwrap();
        let group = program.group();
        group.signal(Signal::KILL);
        assert_eq!(program.wait(|_| ()).unwrap_err().to_string(), "sh: was killed by signal 9");
        assert!(group.0.lock().unwrap().is_none());
        group.signal(Signal::KILL);
    }

    #[test]
    fn a_program_is_a_file_in_any_directory_of_the_path() {
        let [first, second] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        fs::write(second.path().join("fusermount3"), "").unwrap();
        fs::create_dir(first.path().join("nbd-client")).unwrap();
        let path = env::join_paths([first.path(), second.path()]).unwrap();
        assert!(is_in(&path, "fusermount3"));
        assert!(!is_in(&path, "nbd-client"), "it is a directory");
        assert!(!is_in(OsStr::new(""), "fusermount3"));
    }
}
