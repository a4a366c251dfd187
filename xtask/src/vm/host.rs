//! The host's side of a guest's script: runs programs for it, in a directory of the test. All
//! programs end with the test.
//!
//! | request of a script | the script continues when |
//! |---|---|
//! | `host run COMMAND` | the command has ended; its exit status is that of `host` |
//! | `host start NAME COMMAND` | the program has been started |
//! | `host until NAME TEXT` | the program has printed a line with that text; fails if it ends before |
//! | `host kill NAME` | the program has been killed, as by a power failure |
//! | `host stop NAME` | the program has ended after SIGTERM; its exit status is that of `host` |
//! | `host wait NAME` | the program has ended by itself; its exit status is that of `host` |
//! | `host monitor COMMAND` | QEMU's monitor has executed the command; fails if it has answered with an error |
//!
//! A shell executes `COMMAND`. Its environment has the addresses `HOST` and `GUEST`, and the
//! interface `TAP` if there is one. `start` starts one program.

use super::log::Log;
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, PipeReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// State of the host in one test.
pub(crate) struct Host {
    directory: TempDir,
    /// Environment of every program.
    environment: Vec<(&'static str, String)>,
    processes: BTreeMap<String, Process>,
    log: Arc<Log>,
}

impl Host {
    /// Creates the host's side of a test. The directory `programs` takes precedence in PATH.
    ///
    /// # Errors
    /// If no directory can be created.
    pub(crate) fn new(
        programs: &Path,
        addresses: [(&'static str, String); 3],
        log: Arc<Log>,
    ) -> Result<Host> {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut environment = vec![("PATH", format!("{}:{path}", programs.display()))];
        environment.extend(addresses);
        Ok(Host { directory: tempfile::tempdir()?, environment, processes: BTreeMap::new(), log })
    }

    /// The directory of the test.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The socket of QEMU's monitor.
    pub(crate) fn monitor(&self) -> PathBuf {
        self.directory.path().join("monitor")
    }

    /// Executes a script's request and returns its exit status; 1 if it cannot be executed.
    pub(crate) fn execute(&mut self, line: &str) -> i32 {
        self.log.add("host", line);
        let status = self.try_to_obey(line).unwrap_or_else(|error| {
            self.log.add("host", &format!("{error:#}"));
            1
        });
        if status != 0 {
            self.log.add("host", &format!("status {status}"));
        }
        status
    }

    fn try_to_obey(&mut self, line: &str) -> Result<i32> {
        let (verb, rest) = split(line);
        match verb {
            "run" => return Ok(code(self.process("run", rest)?.end()?)),
            "monitor" => return self.monitor_says(rest).map(|said| i32::from(said.contains("Error"))),
            _ => {}
        }
        let (name, rest) = split(rest);
        match verb {
            "start" => {
                let process = self.process(name, &format!("exec {rest}"))?;
                self.processes.insert(name.to_owned(), process);
                Ok(0)
            }
            "until" => self.named(name)?.until(rest).map(|()| 0),
            "kill" => {
                let mut process = self.take(name)?;
                process.child.kill()?;
                process.end().map(|_| 0)
            }
            "stop" => {
                let process = self.take(name)?;
                kill_process(Pid::from_child(&process.child), Signal::TERM)?;
                process.end().map(code)
            }
            "wait" => self.take(name)?.end().map(code),
            _ => bail!("unknown request {verb}"),
        }
    }

    /// Waits until QEMU executes commands.
    ///
    /// # Errors
    /// If it does not within the timeout.
    pub(crate) fn await_monitor(&self) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while UnixStream::connect(self.monitor()).is_err() {
            ensure!(Instant::now() < deadline, "QEMU has no monitor after {TIMEOUT:?}");
            thread::park_timeout(Duration::from_millis(10));
        }
        // It answers when all devices exist.
        self.monitor_says("info status").map(drop)
    }

    /// What QEMU's monitor answers to a command.
    fn monitor_says(&self, command: &str) -> Result<String> {
        let mut monitor = UnixStream::connect(self.monitor()).context("cannot connect to QEMU's monitor")?;
        monitor.set_read_timeout(Some(TIMEOUT))?;
        read_prompt(&mut monitor)?;
        writeln!(monitor, "{command}")?;
        let said = read_prompt(&mut monitor)?;
        // It repeats the command, with a line editor's escape sequences.
        for line in said.lines().filter(|line| !line.contains('\x1b')) {
            self.log.add("monitor", line);
        }
        Ok(said)
    }

    fn process(&self, name: &str, command: &str) -> Result<Process> {
        let mut shell = Command::new("sh");
        shell.arg("-ec").arg(command).current_dir(&self.directory);
        shell.envs(self.environment.iter().map(|(name, value)| (name, value)));
        Process::start(shell, name, self.log.clone())
    }

    fn named(&mut self, name: &str) -> Result<&mut Process> {
        self.processes.get_mut(name).with_context(|| format!("no {name} was started"))
    }

    fn take(&mut self, name: &str) -> Result<Process> {
        self.processes.remove(name).with_context(|| format!("no {name} was started"))
    }
}

/// A running program; killed when dropped.
struct Process {
    child: Child,
    /// Its output, which ends with the program.
    lines: Receiver<String>,
}

impl Process {
    fn start(mut command: Command, name: &str, log: Arc<Log>) -> Result<Process> {
        let (reader, writer) = std::io::pipe()?;
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let (sender, lines) = mpsc::channel();
        let name = name.to_owned();
        thread::spawn(move || {
            for line in lines_of(reader) {
                log.add(&name, &line);
                // The receiver may have been dropped; the log has the line anyway.
                let _ = sender.send(line);
            }
        });
        Ok(Process { child, lines })
    }

    /// Waits for a line with `text`.
    fn until(&mut self, text: &str) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if line.contains(text) => return Ok(()),
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("it ended without printing {text}"),
                Err(RecvTimeoutError::Timeout) => bail!("it did not print {text} within {TIMEOUT:?}"),
            }
        }
    }

    /// Waits for the program to end.
    fn end(mut self) -> Result<ExitStatus> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(self.child.wait()?),
                Err(RecvTimeoutError::Timeout) => bail!("it did not end within {TIMEOUT:?}"),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads up to the prompt of QEMU's monitor.
fn read_prompt(monitor: &mut impl Read) -> Result<String> {
    let mut said = Vec::new();
    while !said.ends_with(b"(qemu) ") {
        let mut byte = [0];
        monitor.read_exact(&mut byte).context("QEMU's monitor does not answer")?;
        said.extend(byte);
    }
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// Lines of text, with invalid UTF-8 replaced.
pub(crate) fn lines_of(reader: PipeReader) -> impl Iterator<Item = String> {
    BufReader::new(reader).split(b'\n').map_while(std::io::Result::ok).map(|mut line| {
        line.pop_if(|byte| *byte == b'\r');
        String::from_utf8_lossy(&line).into_owned()
    })
}

/// Splits text into its first word and the rest.
fn split(text: &str) -> (&str, &str) {
    text.split_once(char::is_whitespace).unwrap_or((text, ""))
}

/// Exit status as in a shell.
fn code(status: ExitStatus) -> i32 {
    status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1)
}

/// Timeout of each wait of a script.
const TIMEOUT: Duration = Duration::from_secs(90);

#[cfg(test)]
mod tests {
    use super::*;

    fn host(directory: &Path) -> (Host, std::path::PathBuf) {
        let path = directory.join("log");
        let log = Arc::new(Log::create(&path).unwrap());
        let addresses = [("HOST", "127.0.0.2"), ("GUEST", "127.0.0.3"), ("TAP", "tap")];
        let addresses = addresses.map(|(name, value)| (name, value.to_owned()));
        (Host::new(directory, addresses, log).unwrap(), path)
    }

    #[test]
    fn a_script_gets_the_exit_status_of_its_requests() {
        let directory = tempfile::tempdir().unwrap();
        let (mut host, log) = host(directory.path());
        assert_eq!(host.execute("run echo $HOST > file"), 0);
        assert_eq!(host.execute("run test $(cat file) = 127.0.0.2"), 0);
        assert_eq!(host.execute("run exit 3"), 3);
        assert_eq!(host.execute("run false\ntrue"), 1);
        assert_eq!(host.execute("start cat sleep 1000"), 0);
        assert_eq!(host.execute("stop cat"), 128 + 15);
        assert_eq!(host.execute("start echo printf 'a\\nready at last\\n'"), 0);
        assert_eq!(host.execute("until echo ready"), 0);
        assert_eq!(host.execute("until echo ready"), 1);
        assert_eq!(host.execute("wait echo"), 0);
        assert_eq!(host.execute("kill echo"), 1);
        assert_eq!(host.execute("dance"), 1);
        let said = std::fs::read_to_string(log).unwrap();
        assert!(said.contains("echo     ready at last") && said.contains("no echo was started"), "{said}");
    }
}
