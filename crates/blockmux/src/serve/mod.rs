//! `blockmux serve`: volumes on every protocol, until told to stop.
//!
//! Listeners are bound first and volumes opened next, so that nothing is created for a daemon that cannot start; then
//! connections are accepted and `ready` is printed. A signal, or the end of `--run`'s command, stops it: I/O in flight
//! completes, and every volume is flushed.

mod announce;
mod command;
mod config;
mod flush;
mod setup;

use crate::address::{ListenAddress, is_local};
use crate::failure::Failure;
use crate::output::print;
use crate::patience::patiently;
use crate::protocol::{PROTOCOLS, Protocol, Service};
use crate::signals;
use announce::Announcement;
use blockmux_engine::cores::{Cores, CoresConfig};
use blockmux_engine::listener::{ConnectionLimit, ListenerTask, Serve};
use blockmux_engine::reactor::PollPolicy;
use blockmux_engine::socket::{Address, Listener};
use blockmux_proto::exports::Exports;
use blockmux_volume::MAX_TRANSFER;
use command::Running;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::system::sysinfo;
use serde::Deserialize;
use setup::{NamedSpec, Setup};
use std::io;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;
use tempfile::TempDir;
use tracing::{info, warn};

/// What to serve, and how.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// What to serve; names are disk0, disk1 ... where none is given
    #[arg(value_name = "[NAME=]VOLUME")]
    volumes: Vec<NamedSpec>,
    /// Read a TOML file; options here add to it or replace what it says
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Serve NBD here; repeatable [default: 127.0.0.1:10809]
    #[arg(long, value_name = "ADDR|unix:PATH")]
    nbd: Vec<ListenAddress>,
    /// Serve iSCSI here; repeatable [default: 127.0.0.1:3260]
    #[arg(long, value_name = "ADDR")]
    iscsi: Vec<ListenAddress>,
    /// Refuse all writes
    #[arg(long)]
    read_only: bool,
    /// Run a shell command with the URLs in its environment, then stop
    #[arg(long, value_name = "CMD")]
    run: Option<String>,
    /// Threads that serve [default: one for each processor]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    cores: Option<NonZeroUsize>,
    /// How long an idle core looks for work before it sleeps [default: adaptive]
    #[arg(long, value_enum)]
    poll: Option<Poll>,
    /// Connections at a time [default: 4096]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    max_connections: Option<NonZeroUsize>,
    /// Print one JSON object instead of text when ready
    #[arg(long, conflicts_with = "run")]
    json: bool,
}

/// When a core that has nothing to do goes to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Poll {
    /// A short while after the last activity
    Adaptive,
    /// For ever: takes whole processors, and answers fastest
    Always,
    /// Not at all: it sleeps at once
    Never,
}

impl From<Poll> for PollPolicy {
    fn from(poll: Poll) -> PollPolicy {
        match poll {
            Poll::Adaptive => PollPolicy::ADAPTIVE,
            Poll::Always => PollPolicy::Always,
            Poll::Never => PollPolicy::Never,
        }
    }
}

/// What ends the daemon.
enum Event {
    /// A signal asks for it.
    Signal,
    /// The command of `--run` has ended.
    CommandEnded(io::Result<ExitStatus>),
}

fn at_least_one(text: &str) -> Result<NonZeroUsize, &'static str> {
    text.parse().map_err(|_| "write a number of at least 1")
}

/// Serves until a signal or the end of the command.
pub(crate) fn run(args: Args) -> Result<ExitCode, Failure> {
    let (json, command) = (args.json, args.run.clone());
    let setup = Setup::gather(args)?;
    let (sender, events) = mpsc::channel();
    signals::watch(&sender, |_| Event::Signal)
        .map_err(|error| Failure::run(format!("cannot watch for signals: {error}")))?;
    let private = private_directory(&setup, command.is_some())?;
    let listeners = listen(&setup, private.as_ref())?;
    let addresses: Vec<_> =
        listeners.iter().map(|(protocol, listener)| (*protocol, listener.address().clone())).collect();
    let exports = setup.open()?;
    let announcement = Announcement::new(&exports, &addresses, &setup.settings);
    allow_files();
    let cores = start(&setup, listeners, &exports)?;
    let status = match command {
        Some(command) => {
            let running = Running::start(&command, &announcement, &sender)?;
            wait(&events, Some(&running))
        }
        None => {
            print(if json { announcement.json()? } else { announcement.text() })?;
            wait(&events, None)
        }
    };
    info!("stopping; another signal ends it at once");
    if !cores.stop(GRACE) {
        warn!("connections that did not finish within {} s were cut", GRACE.as_secs());
    }
    flush::all(&exports)?;
    status
}

/// Where a command's sockets are, if nobody said where to listen.
fn private_directory(setup: &Setup, has_command: bool) -> Result<Option<TempDir>, Failure> {
    if !has_command || !setup.listeners.is_empty() {
        return Ok(None);
    }
    let directory = tempfile::Builder::new().prefix("blockmux-").tempdir();
    directory.map(Some).map_err(|error| {
        Failure::request(format!(
            "cannot make a directory for the socket: {error}; set TMPDIR to one that works"
        ))
    })
}

/// Binds what was asked for; else each protocol's private socket, or its own port of loopback.
fn listen(setup: &Setup, private: Option<&TempDir>) -> Result<Vec<(&'static Protocol, Listener)>, Failure> {
    let usual = |protocol: &'static Protocol| match private {
        Some(_) if !protocol.has_unix_sockets() => ListenAddress::ANY_PORT,
        Some(directory) => ListenAddress::Unix(directory.path().join(format!("{}.sock", protocol.name))),
        None => ListenAddress::LOOPBACK,
    };
    let mut wanted = setup.listeners.clone();
    if wanted.is_empty() {
        wanted = PROTOCOLS.iter().map(|&protocol| (protocol, usual(protocol))).collect();
    }
    let addresses = wanted
        .into_iter()
        .map(|(protocol, address)| Ok((protocol, address.resolve(protocol.port)?)))
        .collect::<Result<Vec<_>, Failure>>()?;
    let mut listeners = Vec::new();
    for (protocol, address) in addresses {
        let bound = patiently(|| Listener::bind(&address), |error| error.kind() == io::ErrorKind::AddrInUse);
        listeners.push((protocol, bound.map_err(|error| cannot_listen(protocol, &address, &error))?));
        if !is_local(&address) && (protocol.is_open)(&setup.settings) {
            warn!("{address} can be reached from other machines, and there is no authentication");
        }
    }
    Ok(listeners)
}

fn cannot_listen(protocol: &Protocol, address: &Address, error: &io::Error) -> Failure {
    let advice = match (error.kind(), address) {
        (io::ErrorKind::AddrInUse, Address::Tcp(_)) => {
            let option = protocol.name;
            &format!(
                "another program listens there; stop it, or use another port, such as --{option} 127.0.0.1:0"
            )
        }
        (io::ErrorKind::AddrInUse, Address::Unix(_)) => {
            "another program listens there, or it is no socket; name another path"
        }
        (io::ErrorKind::PermissionDenied, Address::Tcp(_)) => "not permitted; use a port from 1024 on",
        (io::ErrorKind::PermissionDenied, Address::Unix(_)) => {
            "not permitted; name a path that you may write"
        }
        (io::ErrorKind::AddrNotAvailable, _) => "this machine has no such address; `ip address` lists them",
        (io::ErrorKind::NotFound, _) => "the directory does not exist; create it, or name another path",
        _ => return Failure::request(format!("cannot listen on {address}: {error}; name another address")),
    };
    Failure::request(format!("cannot listen on {address}: {advice}"))
}

/// Lets the process open as many files as it may: each connection takes one, and one more for each file below.
fn allow_files() {
    let limit = getrlimit(Resource::Nofile);
    if setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).is_err() {
        warn!("the limit of open files stays at {:?}; fewer connections may fit", limit.current);
    }
}

fn start(
    setup: &Setup,
    listeners: Vec<(&'static Protocol, Listener)>,
    exports: &Exports,
) -> Result<Cores, Failure> {
    let config = CoresConfig {
        count: setup.cores,
        policy: setup.poll.into(),
        pool_limit_bytes: buffers_of_each(setup.cores, ram()),
        ..CoresConfig::default()
    };
    let cores = Cores::start(&config).map_err(|error| {
        Failure::request(format!(
            "cannot start {} cores: {error}; io_uring must be permitted here",
            setup.cores
        ))
    })?;
    let limit = ConnectionLimit::new(setup.max_connections);
    for (nth, (listener, serve)) in serve_all(setup, listeners, exports).into_iter().enumerate() {
        let (inboxes, limit) = (cores.inboxes(), limit.clone());
        cores
            .ask(nth % cores.count(), move |core| ListenerTask::spawn(core, listener, inboxes, serve, limit))
            .ok_or_else(|| Failure::run("a core has ended; start again with -v"))?;
    }
    Ok(cores)
}

/// What each listener does with a connection. All of a protocol share what it keeps about the volumes.
fn serve_all(
    setup: &Setup,
    listeners: Vec<(&'static Protocol, Listener)>,
    exports: &Exports,
) -> Vec<(Listener, Serve)> {
    let (mut served, mut others) = (Vec::new(), listeners);
    while let Some(&(protocol, _)) = others.first() {
        let (own, rest): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|(other, _)| other.name == protocol.name);
        let addresses: Vec<_> = own.iter().map(|(_, listener)| listener.address().clone()).collect();
        let service = Service { exports, addresses: &addresses, settings: &setup.settings };
        served.extend(own.into_iter().map(|(_, listener)| listener).zip((protocol.serve)(&service)));
        others = rest;
    }
    served
}

/// The most bytes of buffers of one core: what clients can make a daemon hold leaves room for others on the machine.
fn buffers_of_each(cores: usize, ram: usize) -> usize {
    (ram / BUFFERS_SHARE / cores).clamp(LEAST_BUFFERS, CoresConfig::default().pool_limit_bytes)
}

/// The machine's memory, in bytes.
fn ram() -> usize {
    let memory = sysinfo();
    (memory.totalram as usize).saturating_mul(memory.mem_unit as usize)
}

/// Waits for what ends the daemon; answers the exit status.
fn wait(events: &Receiver<Event>, running: Option<&Running>) -> Result<ExitCode, Failure> {
    loop {
        match (events.recv(), running) {
            (Ok(Event::Signal), None) | (Err(_), _) => return Ok(ExitCode::SUCCESS),
            (Ok(Event::Signal), Some(running)) => running.terminate(),
            (Ok(Event::CommandEnded(status)), _) => return command::exit_code(status),
        }
    }
}

/// All cores' buffers together take at most the machine's memory divided by this.
const BUFFERS_SHARE: usize = 4;
/// Half of it is for long payload, and two of the longest requests have to fit.
const LEAST_BUFFERS: usize = 4 * MAX_TRANSFER as usize;
/// How long clients have for what is in flight.
const GRACE: Duration = Duration::from_secs(10);

const EXAMPLES: &str = "\
Addresses: host:port, :port for loopback, host for the protocol's port
(NBD 10809, iSCSI 3260), with NBD also unix:PATH; port 0 lets the system
choose. NBD has no authentication yet, and iSCSI only with targets from a
config file, so listen beyond loopback only on networks that you trust.

Names: the volume NAME is NBD's export NAME, and LUN 0 of the iSCSI target
iqn.2026-11.blockmux:NAME.

Config file, the same things by the same names, with _ for -:
  nbd = [\"127.0.0.1:10809\", \"unix:nbd.sock\"]
  iscsi = [\"127.0.0.1:3260\"]
  poll = \"adaptive\"
  [[volume]]
  name = \"disk0\"
  spec = \"file:disk.img?size=10g\"
  description = \"scratch\"
  read_only = false

iSCSI targets, LUN maps and who may log in, by RFC 7143's names; without any
each volume is a target of its own. A secret file is chmod 600:
  [[iscsi_target]]
  TargetName = \"iqn.2026-11.com.example:disk\"
  luns = { 0 = \"disk0\" }
  HeaderDigest = \"CRC32C\"
  [[iscsi_target.acl]]
  InitiatorName = \"iqn.1993-08.org.debian:01:host\"
  luns = [0]
  CHAP_N = \"host\"
  secret_file = \"host.secret\"

--run: the command finds the first URL in $BLOCKMUX_URL and $uri, all of
them in $BLOCKMUX_URLS, and NBD's in $BLOCKMUX_NBD_URL; $nbd has QEMU's old
form. Without a listener NBD gets a private Unix socket, and iSCSI a port of
loopback that the system chooses. Its exit status becomes blockmux's own.

Examples:
  blockmux serve mem:1g
  blockmux serve root=file:root.img data=block:/dev/sdb --nbd :10809
  blockmux serve 'file:disk.img?size=10g' --nbd unix:nbd.sock
  blockmux serve mem:1g --iscsi :3260
  blockmux serve mem:1g --run 'qemu-img info $uri'

SIGTERM or SIGINT: I/O in flight completes, volumes are flushed, status 0.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_cores_buffers_take_a_quarter_of_memory_at_most_and_never_too_little_to_work() {
        let mib = 1 << 20;
        assert_eq!(buffers_of_each(2, 4096 * mib), 512 * mib);
        assert_eq!(buffers_of_each(2, 64 << 30), 1024 * mib);
        assert_eq!(buffers_of_each(256, 4096 * mib), 128 * mib);
    }
}
