//! `blockmux serve`: exports volumes over every protocol until the daemon is stopped.
//!
//! The daemon binds its listeners before it opens volumes, so that a daemon that cannot start
//! creates no file. Then it accepts connections and prints `ready`. A signal, or the end of the
//! command of `--run`, stops it: I/O in flight completes, and every volume is flushed.

mod access;
mod alive;
mod announce;
mod api;
mod attachment;
mod blocking_work;
mod check;
mod client_commands;
mod config;
mod config_audit;
mod control;
mod disk_setup;
mod disks;
mod exported;
mod gateway;
mod group;
mod identity;
mod idle;
mod inherited;
mod listen;
mod mdns;
mod named_lock;
mod offer;
mod opening;
mod reload;
mod role;
mod secrets;
mod serving_commands;
mod setup;
mod shutdown;
mod snapshot_commands;
mod sources;
mod start;
mod state;
mod takeover;

pub(crate) use self::check::{CheckArgs, run as check};

use crate::api::ControlPath;
use crate::api::bodies::DaemonStage;
use crate::failure::{Failure, cores_cannot_start};
use crate::process::command::{self, RunningCommand};
use crate::process::machine::memory_bytes;
use crate::process::poll::Poll;
use crate::process::privileges::{self, ServiceUser};
use crate::process::service_manager::{self, Watchdog};
use crate::process::signals;
use crate::process::stdout::print;
use crate::protocol::Frontends;
use crate::protocol::address::ApiListener;
use crate::volume_kinds::{flush, sizes};
use access::ApiAccess;
use announce::{Announcement, AnnouncementDetail, ClientLocation};
use api::{Api, Probes, bind_control, bind_tcp};
use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::serve::listener::ConnectionLimit;
use blockmux_engine::sys::congestion::Congestion;
use blockmux_engine::volume::rbd::MemberClient;
use blockmux_proto::exports::Exports;
use blockmux_volume::MAX_TRANSFER;
use config::VolumeEntry;
use control::{ConnectionLimits, ControlServer};
use disk_setup::DiskSetup;
use disks::{DiskServer, EndingDisks};
use inherited::InheritedListeners;
use reload::{ReloadRequests, Reloader, complete_save};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;
use secrets::Secrets;
use setup::Setup;
use signal_hook::consts::SIGHUP;
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};
use takeover::{Handover, Takeover, TakeoverServer};
use tokio::sync::watch;
use tracing::{info, warn};

/// Arguments of `blockmux serve`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ServeArgs {
    /// Volumes to export; those without NAME are disk0, disk1 ...
    #[arg(value_name = "[NAME=]VOLUME")]
    volumes: Vec<VolumeEntry>,
    /// Config file; volumes and listeners of the command line are added, other options override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    frontends: Frontends,
    /// Refuse writes to all volumes
    #[arg(long)]
    read_only: bool,
    /// Run a shell command with the URLs in its environment, and stop when it ends
    #[arg(long, value_name = "CMD")]
    run: Option<String>,
    /// Number of threads that serve [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    cores: Option<NonZeroUsize>,
    /// Polling of idle cores: adaptive (briefly, then sleep), always (use whole CPUs) or never
    /// (sleep at once) [default: adaptive]
    #[arg(long, value_enum, hide_possible_values = true)]
    poll: Option<Poll>,
    /// Maximum number of connections [default: 4096]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    max_connections: Option<NonZeroUsize>,
    /// TCP congestion control, such as cubic [default: the system's]
    #[arg(long, value_name = "NAME")]
    congestion: Option<Congestion>,
    /// Directory for persistent reservations (APTPL) [default: ~/.local/state/blockmux]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Accept commands of `blockmux ctl` at this Unix socket
    #[arg(long, value_name = "unix:PATH")]
    control: Option<ControlPath>,
    /// Take over from the daemon with this control socket, without an outage; start normally if
    /// there is none
    #[arg(long, value_name = "unix:PATH", conflicts_with = "run")]
    takeover: Option<ControlPath>,
    /// Run as this user once everything is open
    #[arg(long, value_name = "NAME", conflicts_with_all = ["keep_privileges", "run"])]
    user: Option<ServiceUser>,
    /// Serve the HTTP API over TCP; needs --api-token-file or --api-tls-certs
    #[arg(long, value_name = "ADDR")]
    api: Option<ApiListener>,
    #[command(flatten)]
    api_access: ApiAccess,
    /// Announce listeners to the local network by multicast DNS
    #[arg(long)]
    mdns: bool,
    /// Do not drop root's capabilities once everything is open
    #[arg(long)]
    keep_privileges: bool,
    /// When ready, print one JSON object instead of text
    #[arg(long, conflicts_with = "run")]
    json: bool,
    /// When ready, print no URLs and commands
    #[arg(long, short, conflicts_with_all = ["json", "run"])]
    quiet: bool,
}

impl ServeArgs {
    /// Prepares for `--user`, before any thread is started.
    pub(crate) fn prepare_user(&self) {
        if let Some(user) = &self.user {
            user.prepare();
        }
    }

    /// Whether the daemon serves until it is stopped. With `--run` it serves until the command
    /// ends.
    pub(crate) fn is_daemon(&self) -> bool {
        self.run.is_none()
    }

    /// A command line without arguments.
    fn empty(frontends: Frontends) -> ServeArgs {
        ServeArgs {
            volumes: Vec::new(),
            config: None,
            frontends,
            read_only: false,
            run: None,
            cores: None,
            poll: None,
            max_connections: None,
            congestion: None,
            state: None,
            control: None,
            takeover: None,
            api: None,
            user: None,
            api_access: ApiAccess::default(),
            mdns: false,
            keep_privileges: false,
            json: false,
            quiet: false,
        }
    }

    /// A copy of this command line; its frontends have not read the config file.
    fn duplicate(&self) -> ServeArgs {
        ServeArgs {
            volumes: self.volumes.clone(),
            config: self.config.clone(),
            frontends: self.frontends.duplicate(),
            run: self.run.clone(),
            congestion: self.congestion.clone(),
            state: self.state.clone(),
            control: self.control.clone(),
            takeover: self.takeover.clone(),
            api: self.api.clone(),
            user: self.user.clone(),
            api_access: self.api_access.clone(),
            ..*self
        }
    }

    /// A copy of this command line without volumes and listeners.
    fn without_volumes_and_listeners(&self) -> ServeArgs {
        let frontends = self.frontends.without_listeners();
        ServeArgs { volumes: Vec::new(), frontends, ..self.duplicate() }
    }
}

/// An event that the main thread handles while the daemon serves.
enum DaemonEvent {
    /// A signal asked the daemon to stop.
    Signal,
    /// SIGHUP asked the daemon to reload its config file.
    Reload,
    /// The command of `--run` ended.
    CommandEnded(io::Result<ExitStatus>),
    /// A core ended before the daemon stopped.
    CoreEnded,
    /// Another process is ready to take over.
    HandOver(Box<Handover>),
}

/// How the daemon ends.
enum End {
    Stop(ExitCode),
    HandOver(Box<Handover>),
}

fn at_least_one(text: &str) -> Result<NonZeroUsize, &'static str> {
    text.parse().map_err(|_| "write a number of at least 1")
}

/// Serves until a signal arrives or the command of `--run` ends.
#[expect(clippy::too_many_lines, reason = "the order of the steps is what matters")]
pub(crate) fn run(args: ServeArgs, is_verbose: bool) -> Result<ExitCode, Failure> {
    let (json, command, keep_privileges) = (args.json, args.run.clone(), args.keep_privileges);
    let detail = match (args.quiet, is_verbose) {
        (true, _) => AnnouncementDetail::ReadyLine,
        (false, true) => AnnouncementDetail::Full,
        (false, false) => AnnouncementDetail::Short,
    };
    let reloads = args.config.is_some() && command.is_none();
    let mut inherited = InheritedListeners::from_service_manager()?;
    let is_of_client = inherited.has_unnamed();
    let user = args.user.clone();
    let takeover = args.takeover.as_ref().map(|path| Takeover::ask(path, user.as_ref(), &mut inherited));
    let mut takeover = takeover.transpose()?.flatten();
    if let Some(path) = args.config.as_deref().filter(|_| takeover.is_none()) {
        // The daemon before this one completes its own.
        complete_save(path)?;
    }
    let mut setup = Setup::gather(args.duplicate(), &inherited)?;
    let (sender, events) = mpsc::channel();
    let (repeatable, event): (&[i32], fn(i32) -> DaemonEvent) = match reloads {
        true => {
            (&[SIGHUP], |signal| if signal == SIGHUP { DaemonEvent::Reload } else { DaemonEvent::Signal })
        }
        false => (&[], |_| DaemonEvent::Signal),
    };
    signals::watch(&sender, repeatable, event)
        .map_err(|error| Failure::run(format!("cannot install signal handlers: {error}")))?;
    let private = listen::private_directory(&setup, command.is_some())?;
    let bind = |place| {
        let inherited = inherited.take_for(&place);
        listen::bind(place, setup.congestion.as_ref(), inherited)
    };
    let bound = listen::places(&setup, private.as_ref())?.into_iter().map(bind);
    let bound = bound.collect::<Result<Vec<_>, _>>()?;
    let control = setup.control.as_ref().map(|path| bind_control(path, &mut inherited));
    let control = control.transpose()?;
    let api_credentials = setup.api_credentials.clone().map(watch::Sender::new);
    let tcp = setup.api.as_ref().zip(api_credentials.as_ref());
    let tcp = tcp.map(|(listener, credentials)| bind_tcp(listener, credentials.subscribe(), &mut inherited));
    let endpoints: Vec<_> = control.into_iter().chain(tcp.transpose()?).map(Arc::new).collect();
    let api_url = endpoints.iter().find_map(|endpoint| endpoint.url());
    setup.settle_policy(bound.iter().map(|bound| bound.listener.clone()).collect())?;
    listen::warn_of_places(&setup.policy);
    // The command of --run keeps the privileges of the user who started it.
    let drops_privileges = command.is_none() && !keep_privileges;
    let disk_setup = DiskSetup::begin(&setup, drops_privileges, command.is_some())?;
    let member = Arc::<MemberClient>::default();
    let (stage, of_daemon) = watch::channel(DaemonStage::Starting);
    let (setup, opening) = (Arc::new(setup), start::Opening { events: &events, sender: &sender });
    let start_probes = || Probes::start(&endpoints, of_daemon.clone());
    let opened = opening.open((&setup, &member), takeover.as_mut(), &mut inherited, start_probes)?;
    let Some((exports, probes)) = opened else {
        info!("stopped before the volumes were open");
        return Ok(ExitCode::SUCCESS);
    };
    let clients = if command.is_some() { ClientLocation::Local } else { ClientLocation::Anywhere };
    let announcement =
        Announcement::new(&exports, &setup.frontends, &setup.policy, clients).with_api(api_url);
    raise_open_file_limit();
    raise_locked_memory_limit();
    let buffers = pool_limit_bytes(setup.cores, memory_bytes());
    let reserved_space = (setup.cores * buffers + SESSION_ADDRESS_SPACE) as u64;
    let limit = ConnectionLimit::new(setup.max_connections).reserving_space(reserved_space);
    let connection_limits = Arc::new(ConnectionLimits::new(limit.clone()));
    connection_limits.set_timeouts(setup.login_timeout, setup.idle_timeout);
    if let Some(user) = &user {
        let control = setup.control.as_ref().map(|ControlPath(path)| path.as_path());
        let served = setup.volumes.iter().flat_map(|named| named.entry.spec.files());
        let served: Vec<_> = served.map(Path::to_owned).collect();
        user.switch(setup.state.as_deref(), &served, control)?;
    }
    let disks = Arc::new(disk_setup.finish()?);
    let cores = Arc::new(start_cores(&setup, buffers, drops_privileges)?);
    // Before clients can connect, which a failure would disconnect.
    let server = DiskServer { cores: cores.clone(), exports: exports.clone() };
    if !opening.attach(&setup, &disks, &server)? {
        info!("stopped before the disks were attached");
        return Ok(ExitCode::SUCCESS);
    }
    // Also if the daemon cannot start after all.
    let ending = EndingDisks::new(&disks, server);
    let announcement = announcement.with_disks(&disks.list());
    let (served, bound) = ((cores, disks.clone()), (bound, private));
    let started =
        Reloader::start((args, inherited), &setup, &exports, &connection_limits, served, bound, &member)?;
    let reloader = started.with_api_credentials(api_credentials);
    takeover.iter_mut().for_each(|takeover| takeover.resume(&reloader));
    if let Some(left) = limit.lacks_space() {
        let (left, needed) = (left >> 20, reserved_space >> 20);
        return Err(Failure::request(format!(
            "the limit of address space (RLIMIT_AS) leaves {left} MiB, but the daemon needs {needed} MiB; raise the \
             limit or use fewer --cores"
        )));
    }
    alive::watch(reloader.cores(), &sender);
    let may_resize = setup.may_change() || setup.specs().any(sizes::can_change_externally);
    let size_checks = may_resize.then(|| sizes::check(&exports)).transpose()?;
    let idle = idle::watch(&setup, &connection_limits, reloader.cores().inboxes())?;
    let reloader = Arc::new(reloader);
    let offers = endpoints.iter().map(|endpoint| endpoint.offer()).collect::<Result<Vec<_>, _>>()?;
    let successors = TakeoverServer::new(reloader.clone(), offers, setup.state.clone(), sender.clone());
    let control = ControlServer {
        exports: exports.clone(),
        connection_limits,
        live_protocols: reloader.live_protocols.clone(),
        cores: reloader.cores().stats(),
        opener: reloader.opener.clone(),
        frontends: reloader.frontends.clone(),
        policy: setup.policy.clone(),
        secrets: Secrets::below(setup.asked_state.as_deref()),
        reloader: reloader.clone(),
    };
    drop(probes);
    let api = match endpoints.is_empty() {
        true => {
            // The control server would keep a reference to the cores.
            drop((control, successors));
            None
        }
        false => Some(Api::start(endpoints.clone(), control, successors, of_daemon.clone())?),
    };
    let watchdog = Watchdog::start(reloader.cores().inboxes())?;
    gateway::start(setup.group.as_ref(), &reloader)?;
    let reloads = ReloadRequests::start(&reloader)?;
    stage.send_replace(DaemonStage::Serving);
    let status = match command {
        Some(command) => {
            let ended = sender.clone();
            let on_end = move |status| {
                // The receiver is gone if the daemon stops for another reason.
                let _ = ended.send(DaemonEvent::CommandEnded(status));
            };
            let environment = announcement.environment();
            let running =
                disk_setup.start_command(|| RunningCommand::start(&command, environment, on_end))?;
            wait(&events, Some(&running), &reloader, &reloads)
        }
        None => {
            if let Some(line) = setup.not_served().filter(|_| !json) {
                warn!("{line}");
            }
            if json {
                print(announcement.json()?)?;
            } else if !is_of_client {
                // Otherwise standard output is that of the client, which may write data to it.
                print(announcement.text(detail))?;
            }
            let volumes = exports.iter().count();
            let plural = if volumes == 1 { "" } else { "s" };
            service_manager::ready(&format!("serving {volumes} volume{plural}"));
            if let Some(takeover) = takeover {
                takeover.end();
            }
            wait(&events, None, &reloader, &reloads)
        }
    };
    stage.send_replace(DaemonStage::Stopping);
    service_manager::stopping();
    if !matches!(status, Ok(End::HandOver(_))) {
        reloader.mdns.withdraw();
    }
    // While its sessions are served, and before another process of this member joins.
    reloader.group.leave();
    reloader.blocking.stop();
    let hands_over = match &status {
        Ok(End::HandOver(handover)) => {
            reloader.blocking.close();
            handover.begin(limit.session_handover());
            disks.leave();
            true
        }
        _ => false,
    };
    drop((ending, disks));
    // The API, the size watch, the idle watch and the watchdog end before the cores that they use.
    drop((api, size_checks, idle, watchdog));
    // The new process serves the sockets.
    let endpoints = if hands_over { Vec::new() } else { endpoints };
    let _probes = Probes::start(&endpoints, of_daemon).inspect_err(|failure| warn!("{failure}"));
    info!("{}; send another signal to stop at once", shutdown::started(&limit, GRACE));
    // A command that hangs may still refer to the reloader.
    let cores = reloader.cores().clone();
    drop(reloader);
    let mut settled = Ok(());
    cores.finish(GRACE, || {
        warn!("{}", shutdown::overdue(&limit, &exports, GRACE));
        if hands_over {
            settled = settle(&exports);
        }
    });
    let hanging = cores.end(END_TIMEOUT);
    if hanging > 0 {
        warn!("cores that hang in a system call and are left behind: {hanging}");
    }
    match status? {
        End::Stop(status) => {
            let flushed = flush::all(&exports);
            shutdown::close(exports);
            flushed.map(|()| status)
        }
        End::HandOver(handover) => {
            let flushed = settled.and_then(|()| flush::all(&exports));
            let released = flushed.and_then(|()| handover.release(exports, limit.session_handover(), GRACE));
            released.inspect_err(|failure| handover.fail(failure)).map(|()| ExitCode::SUCCESS)
        }
    }
}

/// Waits until no I/O is in flight on any volume. The cores must run meanwhile. Otherwise a late
/// write of this process could overwrite one of the new process.
fn settle(exports: &Exports) -> Result<(), Failure> {
    let all = exports.iter().filter_map(|(id, export)| Some((export, exports.volume_state(id)?.settling())));
    let mut left: Vec<_> = all.collect();
    let end = Instant::now() + SETTLE;
    loop {
        left.retain(|(_, settling)| !settling.is_over());
        match left.first() {
            None => return Ok(()),
            Some((export, _)) if Instant::now() >= end => {
                let (name, seconds) = (&export.name, SETTLE.as_secs());
                return Err(Failure::run(format!(
                    "{name}: I/O is still in flight after {seconds} s, and nothing is served; find out why the volume \
                     hangs, then start the daemon again"
                )));
            }
            Some(_) => thread::park_timeout(Duration::from_millis(1)),
        }
    }
}

/// Raises the soft limit of open files to the hard limit. Each connection takes one file
/// descriptor, and each file volume takes one on each core.
fn raise_open_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        let current = limit.current.unwrap_or(u64::MAX);
        warn!("cannot raise the limit of open files from {current}: {error}; fewer connections may fit");
    }
}

/// Raises the limit of locked memory, as far as this process may. Of processes without
/// CAP_IPC_LOCK, the kernel counts the rings of all cores of a user's processes against it, about
/// 150 KiB each.
fn raise_locked_memory_limit() {
    let limit = getrlimit(Resource::Memlock);
    let unlimited = Rlimit { current: None, maximum: None };
    if limit.current.is_some() && setrlimit(Resource::Memlock, unlimited).is_err() {
        // To the hard limit at least, which may be enough.
        let _ = setrlimit(Resource::Memlock, Rlimit { current: limit.maximum, ..limit });
    }
}

/// Starts the cores; before that, if `drops_privileges`, drops those that serving does not need.
fn start_cores(setup: &Setup, pool_limit_bytes: usize, drops_privileges: bool) -> Result<Cores, Failure> {
    let leaves_to_commands = drops_privileges && setup.serves_disks();
    if drops_privileges {
        let mut kept = setup.capabilities();
        kept.set(CapabilitySet::SYS_ADMIN, leaves_to_commands);
        privileges::drop_capabilities(kept)?;
        privileges::deny_system_calls();
    }
    let config = CoresConfig {
        count: setup.cores,
        policy: setup.poll.into(),
        pool_limit_bytes,
        congestion: setup.congestion.clone(),
        begin: leaves_to_commands.then_some(privileges::leave_to_commands),
        ..CoresConfig::default()
    };
    let cores = Cores::start(&config).map_err(|error| Failure::request(cores_cannot_start(&error)))?;
    if leaves_to_commands {
        privileges::drop_capabilities(setup.capabilities())?;
    }
    Ok(cores)
}

/// Limit of one core's buffers, in bytes. The buffers of all cores take a share of the machine's
/// memory, so that clients cannot make the daemon use all of it.
fn pool_limit_bytes(cores: usize, memory_bytes: u64) -> usize {
    let share = usize::try_from(memory_bytes / POOL_MEMORY_DIVISOR).unwrap_or(usize::MAX);
    let half = usize::try_from(memory_bytes / 2).unwrap_or(usize::MAX) / cores;
    let min = MIN_POOL_BYTES.min(half).max(MIN_POOL_BYTES_SMALL_MACHINE);
    (share / cores).clamp(min, CoresConfig::default().pool_limit_bytes)
}

/// Handles events until one ends the daemon; returns how it ends.
fn wait(
    events: &Receiver<DaemonEvent>,
    running: Option<&RunningCommand>,
    reloader: &Reloader,
    reloads: &ReloadRequests,
) -> Result<End, Failure> {
    loop {
        match (events.recv(), running) {
            (Ok(DaemonEvent::Reload), _) => reloads.request(reloader),
            (Ok(DaemonEvent::Signal), None) | (Err(_), _) => return Ok(End::Stop(ExitCode::SUCCESS)),
            (Ok(DaemonEvent::HandOver(handover)), running) => {
                if let Some(handover) = handover.accepted(reloader, running.is_some()) {
                    return Ok(End::HandOver(handover));
                }
            }
            (Ok(DaemonEvent::Signal), Some(running)) => running.terminate(),
            (Ok(DaemonEvent::CommandEnded(status)), _) => return command::exit_code(status).map(End::Stop),
            (Ok(DaemonEvent::CoreEnded), running) => {
                if let Some(running) = running {
                    running.terminate();
                }
                return Err(Failure::run(
                    "a core and its connections ended unexpectedly; start the daemon again with -v",
                ));
            }
        }
    }
}

/// The buffers of all cores together take at most the machine's memory divided by this.
const POOL_MEMORY_DIVISOR: u64 = 4;
/// Minimum of [`pool_limit_bytes`]. Half of a pool is for long payloads, and two of the longest
/// requests must fit into that half.
const MIN_POOL_BYTES: usize = 4 * MAX_TRANSFER as usize;
/// Minimum of [`pool_limit_bytes`] on machines where [`MIN_POOL_BYTES`] for each core would be more
/// than half of the memory. Longer requests are refused there.
const MIN_POOL_BYTES_SMALL_MACHINE: usize = 16 << 20;
/// Address space that is reserved for sessions and their queues, in bytes.
const SESSION_ADDRESS_SPACE: usize = 32 << 20;
/// Time for clients to complete I/O in flight and to receive the replies when the daemon stops. A
/// client that has stopped reading, for example because its network failed, must not keep the
/// daemon from stopping; service managers wait for 90 s by default.
const GRACE: Duration = Duration::from_secs(10);
/// Time for cores to end with the tasks that have not finished in time.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for I/O that is still in flight after [`GRACE`], when another process takes over.
const SETTLE: Duration = Duration::from_secs(60);

const EXAMPLES: &str = "\
ADDR is host:port, :port for loopback, or host for the default port; port 0
lets the system choose. [::] is every IPv6 address and no IPv4 one. A link-local
address names its interface, as [fe80::1%eth0]:3260. ADDR and IFACE may end in
?volumes=a,b to export only these volumes there, and ADDR in
?allow=10.0.0.0/8,::1 to accept only clients in these networks. Every iSCSI
port serves iSER, too, and every NVMe/TCP port NVMe/RDMA; with ?rdma=roce they
and SRP ports also accept RoCEv2, at UDP port 4791, and with ?rdma=verbs
connections over RDMA devices. ?advertise=HOST:PORT is the address that clients
are told, as behind NAT.

NBD clients can authenticate with TLS, iSCSI initiators and NVMe hosts with
secrets or keys of a config file. AoE and SRP have no authentication.

Volume NAME is NBD export NAME, LUN 0 of iSCSI target
iqn.2026-11.blockmux:NAME, and namespace 1 of NVMe subsystem
nqn.2026-11.blockmux:NAME. AoE disks are eSHELF.0, eSHELF.1 ... in order; a
volume that is named e7.3 is disk e7.3.

--run: URLs are in $uri (the first), $BLOCKMUX_URLS (all) and
$BLOCKMUX_NBD_URL; disks of [[attachment]] in $device and $BLOCKMUX_DEVICES, or
with a socket in $socket and $BLOCKMUX_SOCKETS. The exit status is the
command's.

SIGTERM or SIGINT stops the daemon: I/O in flight completes, and volumes are
flushed. SIGHUP loads the config file again; without --config, or with --run, it
stops the daemon.

Examples:
  blockmux serve mem:1g
  blockmux serve root=file:root.img data=block:/dev/sdb --nbd :10809
  blockmux serve 'file:disk.img?size=10g' --nbd unix:nbd.sock
  blockmux serve mem:1g --iscsi 192.0.2.1 --nvme-tcp 192.0.2.1
  blockmux serve mem:1g --run 'qemu-img info $uri'
  blockmux serve --config /etc/blockmux/blockmux.toml";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_take_at_most_a_quarter_of_memory_but_not_less_than_the_minimum() {
        let (gib, mib) = (1_u64 << 30, 1_usize << 20);
        assert_eq!(pool_limit_bytes(2, 4 * gib), 512 * mib);
        assert_eq!(pool_limit_bytes(2, 64 * gib), 1024 * mib);
        assert_eq!(pool_limit_bytes(256, 128 * gib), 128 * mib);
        assert_eq!(pool_limit_bytes(2, 256 * mib as u64), 64 * mib, "half of the memory of a container");
        assert_eq!(pool_limit_bytes(8, 128 * mib as u64), 16 * mib);
    }
}
