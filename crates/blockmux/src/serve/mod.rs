//! `blockmux serve`: volumes on every protocol, until told to stop.
//!
//! Listeners are bound first and volumes opened next, so that nothing is created for a daemon that
//! cannot start; then connections are accepted and `ready` is printed. A signal, or the end of
//! `--run`'s command, stops it: I/O in flight completes, and every volume is flushed.

mod alive;
mod announce;
mod claim;
mod command;
mod config;
mod control;
mod flush;
mod identity;
mod late;
mod listen;
mod opening;
mod setup;
mod sizes;
mod state;

use crate::ctl::ControlPath;
use crate::failure::Failure;
use crate::machine::memory_bytes;
use crate::output::print;
use crate::poll::Poll;
use crate::privileges;
use crate::protocol::frontend::{LiveProtocol, Service, Started};
use crate::protocol::{Frontends, Protocol};
use crate::signals;
use announce::{Amount, Announcement, Asker};
use blockmux_engine::congestion::Congestion;
use blockmux_engine::cores::{Cores, CoresConfig};
use blockmux_engine::listener::{ConnectionLimit, ListenerTask, Serve};
use blockmux_engine::sessions::Sessions;
use blockmux_engine::socket::Listener;
use blockmux_proto::exports::Exports;
use blockmux_volume::MAX_TRANSFER;
use command::Running;
use config::VolumeEntry;
use control::{Control, ControlServer, Parts};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use setup::Setup;
use std::io;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;
use tracing::{info, warn};

/// What to serve, and how.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ServeArgs {
    /// What to serve; names are disk0, disk1 ... where none is given
    #[arg(value_name = "[NAME=]VOLUME")]
    volumes: Vec<VolumeEntry>,
    /// Read a TOML file; options here add to it or replace what it says
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    frontends: Frontends,
    /// Refuse all writes
    #[arg(long)]
    read_only: bool,
    /// Run a shell command with the URLs in its environment, then stop; prints no URLs
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
    /// TCP congestion control of all connections, such as cubic [default: the system's]
    #[arg(long, value_name = "NAME")]
    congestion: Option<Congestion>,
    /// Keep reservations here that initiators want to outlive a restart [default:
    /// ~/.local/state/blockmux]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Take commands of `blockmux ctl` at this Unix socket
    #[arg(long, value_name = "unix:PATH")]
    control: Option<ControlPath>,
    /// Keep the capabilities that it was started with, as with --run; else root's are dropped once
    /// all is open
    #[arg(long)]
    keep_privileges: bool,
    /// Print one JSON object instead of text when ready; not with --run
    #[arg(long, conflicts_with = "run")]
    json: bool,
    /// Print no URLs and commands, only `ready`
    #[arg(long, short, conflicts_with_all = ["json", "run"])]
    quiet: bool,
}

impl ServeArgs {
    /// Whether it serves until it is told to stop, and not for one command of its user.
    pub(crate) fn is_daemon(&self) -> bool {
        self.run.is_none()
    }
}

/// What ends the daemon.
enum StopEvent {
    /// A signal asks for it.
    Signal,
    /// The command of `--run` has ended.
    CommandEnded(io::Result<ExitStatus>),
    /// A core ended before it was asked to.
    CoreEnded,
}

/// A listener, its protocol, and what is done with its connections.
type Accepting = (&'static Protocol, Listener, Serve);

fn at_least_one(text: &str) -> Result<NonZeroUsize, &'static str> {
    text.parse().map_err(|_| "write a number of at least 1")
}

/// Serves until a signal or the end of the command.
pub(crate) fn run(args: ServeArgs, is_verbose: bool) -> Result<ExitCode, Failure> {
    let (json, command, keep_privileges) = (args.json, args.run.clone(), args.keep_privileges);
    let amount = match (args.quiet, is_verbose) {
        (true, _) => Amount::Nothing,
        (false, true) => Amount::Everything,
        (false, false) => Amount::Short,
    };
    let mut setup = Setup::gather(args)?;
    let (sender, events) = mpsc::channel();
    signals::watch(&sender, |_| StopEvent::Signal)
        .map_err(|error| Failure::run(format!("cannot watch for signals: {error}")))?;
    let private = listen::private_directory(&setup, command.is_some())?;
    let (places, listeners) = listen::bind(&setup, private.as_ref())?;
    let control = setup.control.as_ref().map(control::bind).transpose()?;
    setup.settle_policy(places)?;
    listen::warn_of_open(&setup.policy);
    let exports = setup.open()?;
    let asker = if command.is_some() { Asker::Here } else { Asker::Anywhere };
    let announcement = Announcement::new(&exports, &setup.frontends, &setup.policy, asker);
    allow_files();
    let buffers = buffers_of_each(setup.cores, memory_bytes());
    let kept_space = (setup.cores * buffers + SPACE_BESIDE_BUFFERS) as u64;
    let limit = ConnectionLimit::new(setup.max_connections).keeping_space(kept_space);
    let parts = Parts::new(limit.clone(), &listeners);
    // A command is to have what the user has.
    if command.is_none() && !keep_privileges {
        privileges::give_up(setup.capabilities())?;
    }
    let (cores, lives) = start(&setup, buffers, listeners, &exports, &parts)?;
    if let Some(left) = limit.lacks_space() {
        let (left, kept) = (left >> 20, kept_space >> 20);
        return Err(Failure::request(format!(
            "the limit of address space (RLIMIT_AS) leaves {left} MiB, and serving takes {kept} MiB; raise the limit or \
             use fewer --cores"
        )));
    }
    alive::watch(&cores, &sender);
    let sizes = sizes::watch(&setup, &exports)?;
    let desk = ControlServer {
        exports: exports.clone(),
        parts,
        lives: Mutex::new(lives),
        opening: setup.opening(),
        frontends: setup.frontends.clone(),
        policy: setup.policy.clone(),
    };
    let control = control.map(|listener| Control::start(listener, desk)).transpose()?;
    let status = match command {
        Some(command) => {
            let running = Running::start(&command, &announcement, &sender)?;
            wait(&events, Some(&running))
        }
        None => {
            if let Some(line) = setup.not_served().filter(|_| !json) {
                warn!("{line}");
            }
            print(if json { announcement.json()? } else { announcement.text(amount) })?;
            wait(&events, None)
        }
    };
    // What is asked of it from here on concerns nobody any more.
    drop((control, sizes));
    info!("{}; another signal ends it at once", late::beginning(&limit, GRACE));
    cores.stop_or(GRACE, || warn!("{}", late::end(&limit, &exports, GRACE)));
    flush::all(&exports)?;
    status
}

/// Lets the process open as many files as it may: each connection takes one, and one more for each
/// file below.
fn allow_files() {
    let limit = getrlimit(Resource::Nofile);
    if setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).is_err() {
        warn!("the limit of open files stays at {:?}; fewer connections may fit", limit.current);
    }
}

fn start(
    setup: &Setup,
    pool_limit_bytes: usize,
    listeners: Vec<(&'static Protocol, Listener)>,
    exports: &Exports,
    parts: &Parts,
) -> Result<(Cores, Vec<LiveProtocol>), Failure> {
    let config = CoresConfig {
        count: setup.cores,
        policy: setup.poll.into(),
        pool_limit_bytes,
        congestion: setup.congestion.clone(),
        ..CoresConfig::default()
    };
    let cores = Cores::start(&config).map_err(|error| {
        Failure::request(format!(
            "cannot start {} cores: {error}; io_uring must be permitted here",
            setup.cores
        ))
    })?;
    let (served, lives) = serve_all(setup, listeners, exports, &cores, parts.sessions())?;
    for (nth, (protocol, listener, serve)) in served.into_iter().enumerate() {
        let (inboxes, limit) = (cores.inboxes(), parts.limit_of(protocol));
        cores
            .ask(nth % cores.count(), move |core| ListenerTask::spawn(core, listener, inboxes, serve, limit))
            .ok_or_else(|| Failure::run("a core has ended; start again with -v"))?;
    }
    Ok((cores, lives))
}

/// What each listener does with a connection, and what can be changed meanwhile. All of a protocol,
/// and of what is served with it, share what it keeps about the volumes.
fn serve_all(
    setup: &Setup,
    mut listeners: Vec<(&'static Protocol, Listener)>,
    exports: &Exports,
    cores: &Cores,
    sessions: &Sessions,
) -> Result<(Vec<Accepting>, Vec<LiveProtocol>), Failure> {
    let (mut served, mut lives, policy) = (Vec::new(), Vec::new(), &setup.policy);
    for (protocol, frontend) in setup.frontends.iter() {
        let places: Vec<_> = policy.places_of(protocol).cloned().collect();
        if places.is_empty() {
            continue;
        }
        let service = Service { exports, places: &places, policy, cores, sessions };
        let Started { serve, live } = frontend.serve(&service)?;
        lives.extend(live.map(|live| (protocol, live)));
        let own = listeners.extract_if(.., |(other, _)| other.served_as() == protocol.name);
        served.extend(own.zip(serve).map(|((protocol, listener), serve)| (protocol, listener, serve)));
    }
    Ok((served, lives))
}

/// The most bytes of buffers of one core: what clients can make a daemon hold leaves room for
/// others on the machine.
fn buffers_of_each(cores: usize, memory_bytes: u64) -> usize {
    let share = usize::try_from(memory_bytes / BUFFERS_SHARE).unwrap_or(usize::MAX);
    let half = usize::try_from(memory_bytes / 2).unwrap_or(usize::MAX) / cores;
    let least = LEAST_BUFFERS.min(half).max(FEWEST_BUFFERS);
    (share / cores).clamp(least, CoresConfig::default().pool_limit_bytes)
}

/// Waits for what ends the daemon; answers the exit status.
fn wait(events: &Receiver<StopEvent>, running: Option<&Running>) -> Result<ExitCode, Failure> {
    loop {
        match (events.recv(), running) {
            (Ok(StopEvent::Signal), None) | (Err(_), _) => return Ok(ExitCode::SUCCESS),
            (Ok(StopEvent::Signal), Some(running)) => running.terminate(),
            (Ok(StopEvent::CommandEnded(status)), _) => return command::exit_code(status),
            (Ok(StopEvent::CoreEnded), running) => {
                if let Some(running) = running {
                    running.terminate();
                }
                return Err(Failure::run(
                    "a core has ended, and its connections with it; start again with -v",
                ));
            }
        }
    }
}

/// All cores' buffers together take at most the machine's memory divided by this.
const BUFFERS_SHARE: u64 = 4;
/// Half of it is for long payload, and two of the longest requests have to fit.
const LEAST_BUFFERS: usize = 4 * MAX_TRANSFER as usize;
/// Where that would be more than half of the memory, longer requests are refused before less than
/// this is used.
const FEWEST_BUFFERS: usize = 16 << 20;
/// Sessions and their queues, in bytes of address space.
const SPACE_BESIDE_BUFFERS: usize = 32 << 20;
/// How long clients have for what is in flight, and for taking the answers. One that stopped
/// reading without a word, as behind a cable that was pulled, would else keep the daemon from
/// ending; service managers wait for 90 s by default.
const GRACE: Duration = Duration::from_secs(10);

const EXAMPLES: &str = "\
Addresses: host:port, :port for loopback, host for the protocol's port
(NBD 10809, iSCSI 3260, NVMe/TCP 4420), with NBD also unix:PATH; port 0
lets the system choose. [::] is every IPv6 address and no IPv4 one: give
0.0.0.0 too, as a second listener. NBD has no authentication, and iSCSI and
NVMe/TCP only with targets and subsystems from a config file, so listen beyond
loopback only on networks that you trust.

Every port of iSCSI serves iSER too, over iWARP: what a connection begins with
tells them apart.

A listener that names volumes, as --nbd ':10809?volumes=root,data', serves those
alone; at --aoe it is the same. What a target or a subsystem restricts, by an
ACL, a secret or a key, is served by nothing else unless that is written: in
`protocols` of its [[volume]], or at a listener. Once there is a restriction,
NBD, AoE, and iSCSI and NVMe/TCP without targets and subsystems, serve only
volumes that are named so.

Names: the volume NAME is NBD's export NAME, LUN 0 of the iSCSI target
iqn.2026-11.blockmux:NAME, and namespace 1 of the NVMe subsystem
nqn.2026-11.blockmux:NAME. One without a name is disk0 for NBD, and in the
others disk0.3f9a12bc, with a part of its UUID: no two daemons have that.

ATA over Ethernet has no addresses: the first volume is disk eSHELF.0 at each
interface of --aoe, the next eSHELF.1, and one whose NAME is e7.3 is that disk.
Everybody on that network may use them. It needs CAP_NET_RAW, and is served only
where --aoe says so.

Config file, the same things by the same names, with _ for -:
  nbd = [\"127.0.0.1:10809\", \"unix:nbd.sock\"]
  iscsi = [\"127.0.0.1:3260\"]
  poll = \"adaptive\"
  [[volume]]
  name = \"disk0\"
  spec = \"file:disk.img?size=10g\"
  description = \"scratch\"
  read_only = false
  uuid = \"6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d\"
  protocols = [\"nbd\", \"iscsi\"]
Relative paths in it are relative to that file.

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
Listeners that lead to a target less well than others, or not now:
  access_states = { \"192.0.2.2:3260\" = \"active/non-optimized\" }

--state: initiators can ask for reservations that outlive a restart (APTPL).
They are kept in that directory, $XDG_STATE_HOME/blockmux if that is set, one
file for each such volume. Nobody else may write there.

Subsystems of NVMe/TCP, by the specification's names. A host that is named has
to prove who it is where it has a secret, and sees the namespaces that are
named, or all:
  [[nvme_subsystem]]
  nqn = \"nqn.2026-11.com.example:disk\"
  namespaces = { 1 = \"disk0\" }
  [[nvme_subsystem.host]]
  hostnqn = \"nqn.2014-08.org.nvmexpress:uuid:...\"
  namespaces = [1]
  dhchap_secret_file = \"host.secret\"
  [[nvme_discovery.referral]]
  traddr = \"192.0.2.2\"
Before the first table, how much data a write may bring in its capsule:
  nvme_in_capsule_data_size = 8192

--control: only its owner and root can use that socket, and the directory is
one where nobody else may write. A RAM volume can grow then, to 16 GiB or four
times its size, within 16 times the machine's memory.

--run: the command finds the first URL in $BLOCKMUX_URL and $uri, all of
them in $BLOCKMUX_URLS, and NBD's in $BLOCKMUX_NBD_URL; $nbd has QEMU's old
form. Without a listener NBD gets a private Unix socket, and iSCSI a port of
loopback that the system chooses. Its exit status becomes blockmux's own.

Of many volumes ten lines are printed, with --verbose all.

Examples:
  blockmux serve mem:1g
  blockmux serve root=file:root.img data=block:/dev/sdb --nbd :10809
  blockmux serve 'file:disk.img?size=10g' --nbd unix:nbd.sock
  blockmux serve mem:1g --iscsi :3260
  blockmux serve mem:1g --iscsi 192.0.2.1 --iser 192.0.2.1:3261
  blockmux serve mem:1g --run 'qemu-img info $uri'

SIGTERM, SIGINT or SIGHUP: I/O in flight completes, volumes are flushed,
status 0.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_cores_buffers_take_a_quarter_of_memory_at_most_and_never_too_little_to_work() {
        let (gib, mib) = (1_u64 << 30, 1_usize << 20);
        assert_eq!(buffers_of_each(2, 4 * gib), 512 * mib);
        assert_eq!(buffers_of_each(2, 64 * gib), 1024 * mib);
        assert_eq!(buffers_of_each(256, 128 * gib), 128 * mib);
        assert_eq!(buffers_of_each(2, 256 * mib as u64), 64 * mib, "half of what a container has");
        assert_eq!(buffers_of_each(8, 128 * mib as u64), 16 * mib);
    }
}
