//! A program and all of its child processes, ended together by their process group.

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, getpgid, kill_process_group};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus};
use std::time::{Duration, Instant};

/// A running program as the leader of its own process group. Dropping it kills the group.
pub(crate) struct Group {
    leader: Pid,
    /// The leader, unless it has become a daemon.
    child: Option<Child>,
}

impl Group {
    /// Starts `command`; Ctrl-C of a terminal does not reach it.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(crate) fn start(command: &mut Command) -> Result<Group> {
        let child = command.process_group(0).spawn();
        let child = child.with_context(|| format!("cannot run {}", command.get_program().display()))?;
        Ok(Group { leader: Pid::from_child(&child), child: Some(child) })
    }

    /// Starts a daemon, which must lead its own process group and write its PID to `pid_file`.
    ///
    /// # Errors
    /// If it fails, or writes no valid PID.
    pub(crate) fn start_daemon(command: &mut Command, pid_file: &Path) -> Result<Group> {
        // Not in a new process group, which would be killed with the parent that exits here.
        let status = command.status();
        let status = status.with_context(|| format!("cannot run {}", command.get_program().display()))?;
        if !status.success() {
            bail!("it ended at once, {status}");
        }
        // The daemon writes the file asynchronously.
        let deadline = Instant::now() + PID_FILE_TIMEOUT;
        loop {
            let text = fs::read_to_string(pid_file).unwrap_or_default();
            let leader = text.trim().parse().ok().and_then(Pid::from_raw);
            // Only a process group led by that process is ever ended.
            if let Some(leader) = leader.filter(|&pid| getpgid(Some(pid)) == Ok(pid)) {
                return Ok(Group { leader, child: None });
            }
            if Instant::now() >= deadline {
                bail!("it runs in the background, but has written no valid PID");
            }
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }

    /// The program's standard output, if it is a pipe.
    pub(crate) fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.as_mut()?.stdout.take()
    }

    /// The program's exit status, if it has ended.
    ///
    /// # Errors
    /// If the system does not report it.
    pub(crate) fn ended(&mut self) -> Result<Option<String>> {
        match &mut self.child {
            Some(child) => Ok(child.try_wait()?.map(|status| status.to_string())),
            None => Ok(getpgid(Some(self.leader)).is_err().then(|| "in the background".to_owned())),
        }
    }

    /// Waits for the program to end.
    ///
    /// # Errors
    /// If the system cannot tell.
    pub(crate) fn wait(&mut self) -> Result<ExitStatus> {
        Ok(self.child.as_mut().context("it is in the background")?.wait()?)
    }

    /// Stops all processes (SIGSTOP): they use no CPU time until [`Group::resume`].
    ///
    /// # Errors
    /// If it has ended.
    pub(crate) fn pause(&self) -> Result<()> {
        kill_process_group(self.leader, Signal::STOP).context("cannot pause it")
    }

    /// Resumes all processes (SIGCONT).
    ///
    /// # Errors
    /// If it has ended.
    pub(crate) fn resume(&self) -> Result<()> {
        kill_process_group(self.leader, Signal::CONT).context("cannot resume it")
    }

    /// User and system time of all processes so far, with the resolution of a clock tick.
    ///
    /// # Errors
    /// If it has ended.
    pub(crate) fn cpu_time(&self) -> Result<Duration> {
        let leader = self.leader.as_raw_nonzero().get();
        let own = || -> Result<Stat> {
            let stat = fs::read_to_string(format!("/proc/{leader}/stat")).context("it has ended")?;
            parse_stat(&stat).context("/proc has no such fields")
        };
        loop {
            let before = own()?;
            let others: u64 = members(leader)?.iter().map(|stat| stat.own_ticks).sum();
            let after = own()?;
            // Otherwise a child reaped in between would count twice or not at all.
            if before.reaped_ticks == after.reaped_ticks {
                let ticks = after.own_ticks + after.reaped_ticks + others;
                return Ok(Duration::from_millis(ticks * 1000 / TICKS_PER_S));
            }
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Both fail only if the group has already ended; SIGKILL also ends stopped processes.
        let _ = kill_process_group(self.leader, Signal::KILL);
        let _ = self.child.as_mut().map(Child::wait);
    }
}

/// CPU times in `/proc/PID/stat`; see proc(5).
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    process_group: i32,
    /// CPU time of the process, utime and stime, in clock ticks.
    pub(crate) own_ticks: u64,
    /// CPU time of children that were waited for, cutime and cstime, in clock ticks.
    pub(crate) reaped_ticks: u64,
}

/// Parses a line; `None` if it is malformed.
pub(crate) fn parse_stat(text: &str) -> Option<Stat> {
    // The program's name, in parentheses, may contain anything; field 3 follows it.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    Some(Stat {
        process_group: fields.get(2)?.parse().ok()?,
        own_ticks: ticks(14)? + ticks(15)?,
        reaped_ticks: ticks(16)? + ticks(17)?,
    })
}

/// The processes of a group without its leader.
fn members(leader: i32) -> Result<Vec<Stat>> {
    let mut members = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // The process may have ended.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok();
        let stat = stat.as_deref().and_then(parse_stat);
        members.extend(stat.filter(|stat| pid != leader && stat.process_group == leader));
    }
    Ok(members)
}

/// USER_HZ, which is 100 whatever the kernel's timer frequency.
pub(crate) const TICKS_PER_S: u64 = 100;
const PID_FILE_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::process::Stdio;

    fn shell(script: &str) -> Group {
        Group::start(Command::new("sh").args(["-c", script]).stdout(Stdio::piped())).unwrap()
    }

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let line = "71 (a) (b c) S 1 70 70 0 -1 4194304 9 8 7 6 100 20 3 4 20 0 1 0 99";
        let stat = Stat { process_group: 70, own_ticks: 120, reaped_ticks: 7 };
        assert_eq!(parse_stat(line), Some(stat));
        assert_eq!(parse_stat("71 (a) S 1"), None);
    }

    #[test]
    fn dropping_it_ends_its_children_even_when_paused() {
        let mut group = shell("sleep 1000 & echo started; wait");
        let mut output = BufReader::new(group.take_stdout().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        group.pause().unwrap();
        drop(group);
        // The pipe ends when the last process with its write end has ended.
        output.read_to_string(&mut line).unwrap();
        assert_eq!(line, "started\n");
    }

    #[test]
    fn a_program_in_the_background_is_ended_with_its_group() {
        let dir = tempfile::tempdir().unwrap();
        let pid_file = dir.path().join("pid");
        let (mut output, end) = std::io::pipe().unwrap();
        let script = "setsid sh -c 'echo $$ >\"$0\"; sleep 1000 & wait' \"$0\" &";
        let mut shell = Command::new("sh");
        let mut group =
            Group::start_daemon(shell.args(["-c", script]).arg(&pid_file).stdout(end), &pid_file).unwrap();
        drop(shell);
        assert!(group.ended().unwrap().is_none());
        group.cpu_time().unwrap();
        drop(group);
        let mut text = String::new();
        output.read_to_string(&mut text).unwrap();
        assert!(text.is_empty());
    }

    #[test]
    fn a_process_that_leads_no_group_is_not_accepted_as_a_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let pid_file = dir.path().join("pid");
        let error = |script: &str| {
            let mut shell = Command::new("sh");
            let started = Group::start_daemon(shell.args(["-c", script]).arg(&pid_file), &pid_file);
            started.map(|_| ()).unwrap_err().to_string()
        };
        assert!(error("exit 3").starts_with("it ended at once"), "{}", error("exit 3"));
        assert!(error("sleep 1000 & echo $! >\"$0\"").contains("no valid PID"));
        let left: i32 = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
        rustix::process::kill_process(Pid::from_raw(left).unwrap(), Signal::KILL).unwrap();
    }

    #[test]
    fn a_paused_program_continues_when_resumed() {
        let (input, mut words) = std::io::pipe().unwrap();
        let script = "read word; echo $word";
        let mut shell = Command::new("sh");
        let mut group = Group::start(shell.args(["-c", script]).stdin(input).stdout(Stdio::piped())).unwrap();
        group.pause().unwrap();
        let stat = format!("/proc/{}/stat", group.leader.as_raw_nonzero());
        while !fs::read_to_string(&stat).unwrap().contains(") T ") {
            std::thread::yield_now();
        }
        words.write_all(b"onward\n").unwrap();
        group.resume().unwrap();
        let mut line = String::new();
        group.take_stdout().unwrap().read_to_string(&mut line).unwrap();
        assert_eq!(line, "onward\n");
        assert!(group.wait().unwrap().success());
    }

    #[test]
    fn cpu_time_of_children_counts() {
        // The child has ended and was waited for when its parent says so.
        let mut group =
            shell("sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'; echo done; sleep 1000");
        let mut line = String::new();
        BufReader::new(group.take_stdout().unwrap()).read_line(&mut line).unwrap();
        assert!(group.cpu_time().unwrap() > Duration::ZERO);
    }
}
