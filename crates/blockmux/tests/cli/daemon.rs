//! Runs `blockmux serve` for a test, on its own Unix socket.

use crate::program::{BLOCKMUX, kill_if_it_hangs, stop};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// No process takes so long to end.
const LONGEST_END: Duration = Duration::from_secs(300);

/// A running daemon; killed when dropped.
pub(crate) struct Daemon {
    child: Child,
    pub(crate) json: serde_json::Value,
    pub(crate) stderr: BufReader<ChildStderr>,
    pub(crate) directory: TempDir,
}

impl Daemon {
    /// Serves `volumes` and waits until it is ready.
    pub(crate) fn serve(args: &[&str]) -> Daemon {
        Daemon::start(tempfile::tempdir().unwrap(), args)
    }

    /// Serves with `args` and their config file, without an additional NBD listener.
    pub(crate) fn serve_only(args: &[&str]) -> Daemon {
        Daemon::spawn(tempfile::tempdir().unwrap(), args)
    }

    /// Serves again at the same address after it has ended.
    pub(crate) fn start_again(&mut self, args: &[&str]) {
        let place = tempfile::tempdir().unwrap();
        let directory = std::mem::replace(&mut self.directory, place);
        *self = Daemon::start(directory, args);
    }

    fn start(directory: TempDir, args: &[&str]) -> Daemon {
        let listener = format!("unix:{}", directory.path().join("socket").display());
        Daemon::spawn(directory, &[&["--nbd", &listener], args].concat())
    }

    fn spawn(directory: TempDir, args: &[&str]) -> Daemon {
        let mut command = Command::new(BLOCKMUX);
        command.args(["serve", "--json"]).args(args);
        command.env("XDG_STATE_HOME", directory.path().join("state"));
        Daemon::spawn_in(directory, command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    }

    /// Runs a serving command with piped output and waits until it is ready.
    pub(crate) fn spawn_in(directory: TempDir, command: &mut Command) -> Daemon {
        Daemon::wait_until_ready(directory, command.spawn().unwrap())
    }

    /// Waits until a serving process with piped output is ready.
    pub(crate) fn of_child(child: Child) -> Daemon {
        Daemon::wait_until_ready(tempfile::tempdir().unwrap(), child)
    }

    fn wait_until_ready(directory: TempDir, mut child: Child) -> Daemon {
        kill_if_it_hangs(&child);
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        if line.is_empty() {
            stderr.read_line(&mut line).unwrap();
            panic!("did not start: {line}");
        }
        Daemon { child, json: serde_json::from_str(&line).unwrap(), stderr, directory }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    /// The first URL of the first export.
    pub(crate) fn url(&self) -> String {
        self.json["exports"][0]["urls"][0].as_str().unwrap().to_owned()
    }

    /// The URLs of all exports that begin with `scheme`.
    pub(crate) fn urls_of(&self, scheme: &str) -> Vec<String> {
        let exports = self.json["exports"].as_array().unwrap().iter();
        let urls = exports.flat_map(|export| export["urls"].as_array().unwrap());
        let urls = urls.map(|url| url.as_str().unwrap().to_owned());
        urls.filter(|url| url.starts_with(&format!("{scheme}://"))).collect()
    }

    /// The first NVMe/TCP URL without host parameters, for tests with their own hosts.
    pub(crate) fn nvme_place(&self) -> String {
        let url = self.urls_of("nvme+tcp").remove(0);
        url.split('?').next().unwrap_or_default().to_owned()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Stops the process: it answers nothing until it is continued.
    pub(crate) fn stop(&self) {
        stop(&self.child);
    }

    /// Waits for the end of the process. One that hangs fails its test, not the whole run.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + LONGEST_END;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "process {} has not ended", self.child.id());
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }

    /// Reads standard error up to a line with `part` in it, and returns that.
    pub(crate) fn wait_for_line(&mut self, part: &str) -> String {
        let mut line = String::new();
        while !line.contains(part) {
            line.clear();
            assert_ne!(self.stderr.read_line(&mut line).unwrap(), 0, "ended without a line with `{part}`");
        }
        line
    }

    /// Resident memory in bytes, without pages of the program's file, which are clean and shared.
    pub(crate) fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let kib = |name| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
        };
        (kib("RssAnon:") + kib("RssShmem:")) << 10
    }

    /// Used CPU time, user and system, in clock ticks.
    pub(crate) fn cpu_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // The name is in parentheses and may contain any character; utime is field 14, stime 15.
        let fields: Vec<_> = stat[stat.rfind(')').unwrap() + 2..].split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
