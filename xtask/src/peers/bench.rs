//! The environment of all turns: directories, durations, and running a client to completion.

use super::group::Group;
use super::machine::{CpuSet, Side};
use super::network::Network;
use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The environment of a comparison.
pub(crate) struct Bench {
    /// In memory; removed when the comparison ends.
    pub(crate) dir: TempDir,
    /// The Blockmux program.
    pub(crate) blockmux: PathBuf,
    pub(crate) cpus: CpuSet,
    /// Network namespaces of the programs, if not the machine's own.
    pub(crate) network: Option<Network>,
    /// Measured time of each run.
    pub(crate) runtime: Duration,
    /// Most attempts of a run while other programs use much CPU time. The last one counts, and the
    /// report says so.
    pub(crate) max_attempts: u32,
    /// Bytes of each volume.
    pub(crate) size: u64,
    pub(crate) bar: ProgressBar,
    /// A signal requested the end.
    pub(crate) interrupted: Arc<AtomicBool>,
}

impl Bench {
    /// The file shared by servers of files, of which only one runs at a time.
    pub(crate) fn file(&self) -> PathBuf {
        self.dir.path().join("disk.img")
    }

    /// The working directory of one server.
    ///
    /// # Errors
    /// If it cannot be created.
    pub(crate) fn dir_of(&self, name: &str) -> Result<PathBuf> {
        let dir = self.dir.path().join(name);
        fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
        Ok(dir)
    }

    /// A command on its side's CPU, in its side's network namespace.
    pub(crate) fn command(&self, side: Side, program: &Path) -> Command {
        let command = self.cpus.command(side, program);
        match &self.network {
            Some(network) => network.within(side, &command),
            None => command,
        }
    }

    /// The placement of programs on CPUs and networks, in sentences.
    pub(crate) fn placement(&self) -> String {
        let words = self.cpus.words();
        match &self.network {
            Some(network) => format!("{words} Frames pass a veth pair with an MTU of {}.", network.mtu),
            None => words,
        }
    }

    /// Fills the shared file with non-zero bytes, so that no program treats it as a hole.
    ///
    /// # Errors
    /// If there is no room for it.
    pub(crate) fn fill_file(&self) -> Result<()> {
        let mut block = vec![0_u8; 1 << 20];
        for (at, byte) in block.iter_mut().enumerate() {
            *byte = (at % 251) as u8 | 1;
        }
        let blocks = std::iter::repeat_n(&block[..], (self.size >> 20) as usize);
        let mut file = File::create(self.file())?;
        for block in blocks {
            std::io::Write::write_all(&mut file, block).context("cannot write a volume's file in memory")?;
        }
        Ok(())
    }

    /// Runs a client to completion and returns its standard output.
    ///
    /// # Errors
    /// If the client fails or takes much too long, with the end of its standard error; or if a
    /// signal arrived.
    pub(crate) fn run(&self, command: &mut Command) -> Result<String> {
        self.check_interrupt()?;
        let log = self.dir.path().join("client.log");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(&log)?);
        let mut group = Group::start(command)?;
        let mut stdout = group.take_stdout().context("its standard output is not a pipe")?;
        let (sender, text) = mpsc::channel();
        std::thread::spawn(move || {
            let mut text = String::new();
            let read = stdout.read_to_string(&mut text).map(|_| text);
            // After a timeout the output is not needed.
            let _ = sender.send(read);
        });
        let deadline = Instant::now() + CLIENT_TIMEOUT + self.runtime * RUNS_A_TURN;
        let text = loop {
            match text.recv_timeout(INTERRUPT_EVERY) {
                Ok(text) => break text?,
                Err(RecvTimeoutError::Disconnected) => bail!("its output could not be read"),
                Err(RecvTimeoutError::Timeout) => self.check_interrupt()?,
            }
            if Instant::now() >= deadline {
                bail!("it did not end within the time limit");
            }
        };
        if !group.wait()?.success() {
            self.check_interrupt()?;
            bail!("{}", last_line(&log).unwrap_or_else(|| "it failed without a message".to_owned()));
        }
        Ok(text)
    }

    /// # Errors
    /// If a signal arrived.
    pub(crate) fn check_interrupt(&self) -> Result<()> {
        if self.is_interrupted() {
            bail!("interrupted");
        }
        Ok(())
    }

    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }
}

/// The last non-empty line of a log.
pub(crate) fn last_line(log: &Path) -> Option<String> {
    let bytes = fs::read(log).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    text.lines().rev().find(|line| !line.trim().is_empty()).map(|line| line.trim().to_owned())
}

/// Time allowed beyond the measured time: starting, connecting, preparing.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(60);
/// Factor of the time limit: a client may measure several times in a turn, and a slow server takes
/// longer than estimated.
const RUNS_A_TURN: u32 = 8;
const INTERRUPT_EVERY: Duration = Duration::from_millis(100);

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An environment without a server.
    pub(crate) fn bench() -> Bench {
        Bench {
            dir: tempfile::tempdir().unwrap(),
            blockmux: "blockmux".into(),
            cpus: CpuSet::here().unwrap(),
            network: None,
            runtime: Duration::from_millis(1),
            max_attempts: 1,
            size: 2 << 20,
            bar: ProgressBar::hidden(),
            interrupted: Arc::default(),
        }
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_clients_result_is_its_stdout_and_its_error_is_its_stderr() {
        let bench = bench();
        assert_eq!(bench.run(&mut shell("echo figures; echo noise >&2")).unwrap(), "figures\n");
        let error = bench.run(&mut shell("echo one >&2; echo because >&2; exit 1")).unwrap_err();
        assert_eq!(error.to_string(), "because");
    }

    #[test]
    fn an_interrupt_ends_a_client_that_would_run_on() {
        let bench = bench();
        let interrupted = bench.interrupted.clone();
        let mut client = shell("sleep 1000");
        std::thread::scope(|scope| {
            let run = scope.spawn(|| bench.run(&mut client));
            interrupted.store(true, Ordering::Relaxed);
            assert_eq!(run.join().unwrap().unwrap_err().to_string(), "interrupted");
        });
    }

    #[test]
    fn the_shared_file_is_as_large_as_a_volume_and_has_no_zeroes() {
        let bench = bench();
        bench.fill_file().unwrap();
        let bytes = fs::read(bench.file()).unwrap();
        assert_eq!(bytes.len(), 2 << 20);
        assert!(bytes.iter().all(|&byte| byte != 0));
    }
}
