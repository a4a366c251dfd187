//! Programs that serve a volume: their names, how they are started, and running instances.

use super::bench::{Bench, last_line};
use super::group::Group;
use super::machine::Side;
use crate::process::find;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// One row of a protocol's table of servers.
pub(crate) struct Server {
    /// Name in tables and on the command line.
    pub(crate) name: &'static str,
    pub(crate) program: ProgramOrigin,
    /// The URL of its volume, by port of loopback.
    pub(crate) url: Url,
    /// Adds the program's arguments. May write files to the server's directory.
    pub(crate) arguments: Arguments,
    /// Commands to run once it accepts connections, before it serves anything.
    pub(crate) set_up: fn(&ServerParameters) -> Result<Vec<Command>>,
    /// Whether the server has its own memory. It must be written once, because reads of unwritten
    /// blocks transfer no stored data.
    pub(crate) has_own_memory: bool,
    /// Whether it becomes a daemon and writes its PID to the file `pid` in its directory.
    pub(crate) is_daemon: bool,
    /// Polling policy of our own generator for this server, and of the server if it is Blockmux.
    pub(crate) poll: &'static str,
    /// Whether only our own generator measures this server, because other clients have no polling
    /// policy.
    pub(crate) is_for_generator: bool,
}

pub(crate) type Url = fn(u16) -> String;
pub(crate) type Arguments = fn(&ServerParameters, &mut Command) -> Result<()>;

/// Origin of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramOrigin {
    Blockmux,
    /// Its name, and its Debian package.
    Peer(&'static str, &'static str),
}

/// Parameters of a server's start.
pub(crate) struct ServerParameters<'a> {
    /// The server's directory.
    pub(crate) dir: PathBuf,
    /// The file to serve, if it serves one.
    pub(crate) file: &'a Path,
    /// A free port of loopback.
    pub(crate) port: u16,
    /// Bytes of the volume.
    pub(crate) size: u64,
    /// Polling policy, if it is Blockmux.
    pub(crate) poll: &'static str,
}

/// A running server, paused except in its turns.
pub(crate) struct Running {
    pub(crate) server: &'static Server,
    pub(crate) url: String,
    /// Its command line.
    pub(crate) command: String,
    group: Group,
}

impl ProgramOrigin {
    /// The path of the program.
    ///
    /// # Errors
    /// If it is not installed, with what to do.
    pub(crate) fn find(self, blockmux: &Path) -> Result<PathBuf> {
        match self {
            ProgramOrigin::Blockmux => Ok(blockmux.to_owned()),
            ProgramOrigin::Peer(name, package) => find(name).with_context(|| {
                format!("{name} is not installed; Debian package {package}, or cargo xtask install-peers")
            }),
        }
    }
}

/// Another project's program that serves the file, which is in memory, and stays in the foreground.
pub(crate) const fn peer(
    name: &'static str,
    package: &'static str,
    url: Url,
    arguments: Arguments,
) -> Server {
    Server {
        name,
        program: ProgramOrigin::Peer(name, package),
        url,
        arguments,
        set_up: |_| Ok(Vec::new()),
        has_own_memory: false,
        is_daemon: false,
        poll: "adaptive",
        is_for_generator: false,
    }
}

impl Running {
    /// Starts a server, waits until it accepts connections, sets it up, fills and reads its volume,
    /// and pauses it.
    ///
    /// # Errors
    /// If any of that fails, with the end of the server's log.
    pub(crate) fn start(server: &'static Server, bench: &Bench) -> Result<Running> {
        let program = server.program.find(&bench.blockmux)?;
        let (dir, file) = (bench.dir_of(server.name)?, bench.file());
        let log = dir.join("log");
        let place =
            ServerParameters { dir, file: &file, port: free_port()?, size: bench.size, poll: server.poll };
        let mut command = bench.command(Side::Server, &program);
        (server.arguments)(&place, &mut command)?;
        let log_file = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(log_file.try_clone()?).stderr(log_file);
        let started = if server.is_daemon {
            Group::start_daemon(&mut command, &place.dir.join("pid"))
        } else {
            Group::start(&mut command)
        };
        let said = || last_line(&log).unwrap_or_else(|| "it printed nothing".to_owned());
        let group = started.with_context(said)?;
        let mut running =
            Running { server, url: (server.url)(place.port), command: words_of(&command, bench), group };
        running.make_ready(&place, bench).with_context(said)?;
        running.group.pause()?;
        Ok(running)
    }

    /// Runs `turn` with the server unpaused; also returns the CPU time that the server used.
    ///
    /// # Errors
    /// If the turn fails or the server has ended.
    pub(crate) fn turn<T>(&self, turn: impl FnOnce() -> Result<T>) -> Result<(T, Duration)> {
        self.group.resume()?;
        let before = self.group.cpu_time()?;
        let found = turn()?;
        let used = self.group.cpu_time()?.saturating_sub(before);
        self.group.pause()?;
        Ok((found, used))
    }

    /// Pauses the server again after a failed turn.
    pub(crate) fn pause(&self) {
        // A server that has ended needs no pause.
        let _ = self.group.pause();
    }

    fn make_ready(&mut self, place: &ServerParameters, bench: &Bench) -> Result<()> {
        match bench.network {
            Some(_) => self.wait_until_answered(bench)?,
            None => self.wait_until_ready(place.port, bench)?,
        }
        for mut command in (self.server.set_up)(place)? {
            bench.run(&mut command).context("its set-up commands failed")?;
        }
        self.fill(place.file, bench)
    }

    fn wait_until_ready(&mut self, port: u16, bench: &Bench) -> Result<()> {
        let deadline = Instant::now() + READY_TIMEOUT;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        while TcpStream::connect_timeout(&address, READY_EVERY).is_err() {
            bench.check_interrupt()?;
            if let Some(status) = self.group.ended()? {
                bail!("it ended at once, {status}");
            }
            if Instant::now() >= deadline {
                bail!("it does not accept connections on port {port}");
            }
            std::thread::park_timeout(READY_EVERY);
        }
        Ok(())
    }

    /// Raw frames have no connections: the server is ready when our own client has found it.
    fn wait_until_answered(&mut self, bench: &Bench) -> Result<()> {
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            let mut info = bench.command(Side::Client, &bench.blockmux);
            let answered = bench.run(info.args(["info", &self.url]));
            if let Some(status) = self.group.ended()? {
                bail!("it ended at once, {status}");
            }
            match answered {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() >= deadline => return Err(error.context("it does not answer")),
                Err(_) => bench.check_interrupt()?,
            }
        }
    }

    /// Writes the server's own memory once, and reads every volume once, so that first-use costs
    /// are not measured.
    fn fill(&self, file: &Path, bench: &Bench) -> Result<()> {
        let copy = |from: &str, to: &str| {
            let mut command = bench.command(Side::Client, &bench.blockmux);
            bench.run(command.args(["copy", from, to])).map(|_| ())
        };
        if self.server.has_own_memory {
            copy(&format!("file:{}", file.display()), &self.url).context("cannot write its volume")?;
        }
        copy(&self.url, &format!("null:{}", bench.size)).context("cannot read its volume")
    }
}

/// A command as for a shell, without this run's directories.
fn words_of(command: &Command, bench: &Bench) -> String {
    let dir = format!("{}/", bench.dir.path().display());
    let program = Path::new(command.get_program()).file_name().unwrap_or_default();
    let words = std::iter::once(program).chain(command.get_args());
    let word = |word: &std::ffi::OsStr| {
        let text = word.to_string_lossy().replace(&dir, "");
        if Path::new(&text).is_absolute() {
            text.rsplit('/').next().unwrap_or_default().to_owned()
        } else {
            text
        }
    };
    words.map(word).collect::<Vec<_>>().join(" ")
}

/// A free port of loopback.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port on loopback")?;
    Ok(listener.local_addr()?.port())
}

const READY_TIMEOUT: Duration = Duration::from_secs(20);
const READY_EVERY: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::super::bench::tests::bench;
    use super::*;

    const BROKEN: Server = peer(
        "sh",
        "dash",
        |port| port.to_string(),
        |_, command| {
            command.args(["-c", "echo no such volume >&2; exit 3"]);
            Ok(())
        },
    );

    #[test]
    fn the_output_of_a_server_that_ends_at_once_is_reported() {
        let Err(error) = Running::start(&BROKEN, &bench()) else {
            panic!("it cannot run");
        };
        let text = format!("{error:#}");
        assert!(text.starts_with("no such volume: it ended at once"), "{text}");
    }

    #[test]
    fn a_program_that_is_not_installed_names_its_package() {
        let error = ProgramOrigin::Peer("no-such-server", "a-package").find(Path::new("")).unwrap_err();
        assert!(error.to_string().contains("Debian package a-package"), "{error}");
    }

    #[test]
    fn a_command_is_shown_without_the_directories_of_one_run() {
        let bench = bench();
        let mut command = Command::new("/usr/bin/taskset");
        command.args(["-c", "0", "/usr/sbin/server"]).arg(format!("file={}", bench.file().display()));
        assert_eq!(words_of(&command, &bench), "taskset -c 0 server file=disk.img");
    }
}
