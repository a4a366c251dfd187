//! `blockmux serve`: volumes on every protocol, until told to stop.
//!
//! Listeners are bound first and volumes opened next, so that nothing is created for a daemon that
//! cannot start; then connections are accepted and `ready` is printed. A signal, or the end of
//! `--run`'s command, stops it: I/O in flight completes, and every volume is flushed.

mod alive;
mod announce;
mod api;
mod check;
mod claim;
mod command;
mod config;
mod control;
mod flush;
mod identity;
mod idle;
mod inherited;
mod late;
mod listen;
mod opening;
mod reload;
mod service_manager;
mod setup;
mod sizes;
mod sources;
mod state;

pub(crate) use self::check::{CheckArgs, run as check};

use crate::address::ApiListener;
use crate::api::ControlPath;
use crate::failure::{Failure, cores_cannot_start};
use crate::machine::memory_bytes;
use crate::output::print;
use crate::poll::Poll;
use crate::privileges::{self, ServiceUser};
use crate::protocol::Frontends;
use crate::signals;
use announce::{Amount, Announcement, Asker};
use api::{Api, Endpoint, bind_control, bind_tcp};
use blockmux_engine::congestion::Congestion;
use blockmux_engine::cores::{Cores, CoresConfig};
use blockmux_engine::listener::ConnectionLimit;
use blockmux_volume::MAX_TRANSFER;
use command::Running;
use config::VolumeEntry;
use control::{ControlServer, Parts};
use inherited::InheritedListeners;
use reload::Reloader;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use service_manager::Watchdog;
use setup::Setup;
use signal_hook::consts::SIGHUP;
use std::io;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;
use tracing::{info, warn};

/// What to serve, and how.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ServeArgs {
    /// Volumes to export; those without NAME are disk0, disk1 ...
    #[arg(value_name = "[NAME=]VOLUME")]
    volumes: Vec<VolumeEntry>,
    /// Config file; listeners and volumes here are added, others override
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    frontends: Frontends,
    /// Refuse writes to all volumes
    #[arg(long)]
    read_only: bool,
    /// Run a shell command with the URLs in its environment, then stop
    #[arg(long, value_name = "CMD")]
    run: Option<String>,
    /// Threads that serve [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    cores: Option<NonZeroUsize>,
    /// When idle cores sleep: adaptive (after a short poll), always (never; takes whole CPUs) or
    /// never (at once) [default: adaptive]
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
    /// Run as this user once everything is open
    #[arg(long, value_name = "NAME", conflicts_with_all = ["keep_privileges", "run"])]
    user: Option<ServiceUser>,
    /// Serve the HTTP API over TCP; needs --api-token-file
    #[arg(long, value_name = "ADDR")]
    api: Option<ApiListener>,
    /// File with the token of --api's clients
    #[arg(long, value_name = "FILE")]
    api_token_file: Option<PathBuf>,
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
    pub(crate) fn announce_user(&self) {
        if let Some(user) = &self.user {
            user.announce();
        }
    }

    /// Whether it serves until it is told to stop, and not for one command of its user.
    pub(crate) fn is_daemon(&self) -> bool {
        self.run.is_none()
    }

    /// A command line that says nothing.
    fn of(frontends: Frontends) -> ServeArgs {
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
            api: None,
            user: None,
            api_token_file: None,
            keep_privileges: false,
            json: false,
            quiet: false,
        }
    }

    /// A copy of this command line, before a config file was read.
    fn again(&self) -> ServeArgs {
        ServeArgs {
            volumes: self.volumes.clone(),
            config: self.config.clone(),
            frontends: self.frontends.again(),
            run: self.run.clone(),
            congestion: self.congestion.clone(),
            state: self.state.clone(),
            control: self.control.clone(),
            api: self.api.clone(),
            user: self.user.clone(),
            api_token_file: self.api_token_file.clone(),
            ..*self
        }
    }

    /// A copy of this command line without volumes and listeners.
    fn values(&self) -> ServeArgs {
        ServeArgs { volumes: Vec::new(), frontends: self.frontends.values(), ..self.again() }
    }
}

/// What ends the daemon.
enum StopEvent {
    /// A signal asks for it.
    Signal,
    /// A signal asks for the config file to be loaded again, which does not end it.
    Reload,
    /// The command of `--run` has ended.
    CommandEnded(io::Result<ExitStatus>),
    /// A core ended before it was asked to.
    CoreEnded,
}

fn at_least_one(text: &str) -> Result<NonZeroUsize, &'static str> {
    text.parse().map_err(|_| "write a number of at least 1")
}

/// Serves until a signal or the end of the command.
#[expect(clippy::too_many_lines, reason = "the order of the steps is what matters")]
pub(crate) fn run(args: ServeArgs, is_verbose: bool) -> Result<ExitCode, Failure> {
    let (json, command, keep_privileges) = (args.json, args.run.clone(), args.keep_privileges);
    let amount = match (args.quiet, is_verbose) {
        (true, _) => Amount::Nothing,
        (false, true) => Amount::Everything,
        (false, false) => Amount::Short,
    };
    let reloads = args.config.is_some() && command.is_none();
    let mut inherited = InheritedListeners::from_service_manager()?;
    let user = args.user.clone();
    let mut setup = Setup::gather(args.again(), &inherited)?;
    let (sender, events) = mpsc::channel();
    let (again, event): (&[i32], fn(i32) -> StopEvent) = match reloads {
        true => (&[SIGHUP], |signal| if signal == SIGHUP { StopEvent::Reload } else { StopEvent::Signal }),
        false => (&[], |_| StopEvent::Signal),
    };
    signals::watch(&sender, again, event)
        .map_err(|error| Failure::run(format!("cannot watch for signals: {error}")))?;
    let private = listen::private_directory(&setup, command.is_some())?;
    let bind = |place| listen::bind(place, setup.congestion.as_ref(), &mut inherited);
    let bound = listen::places(&setup, private.as_ref())?.into_iter().map(bind);
    let bound = bound.collect::<Result<Vec<_>, _>>()?;
    let control = setup.control.as_ref().map(bind_control);
    let tcp = setup.api.as_ref().map(|address| bind_tcp(address, setup.api_token_file.as_deref()));
    let endpoints = control.into_iter().chain(tcp).collect::<Result<Vec<_>, _>>()?;
    let api_url = endpoints.iter().find_map(Endpoint::url);
    setup.settle_policy(bound.iter().map(|bound| bound.listener.clone()).collect())?;
    listen::warn_of_open(&setup.policy);
    let exports = setup.open()?;
    let asker = if command.is_some() { Asker::Here } else { Asker::Anywhere };
    let announcement = Announcement::new(&exports, &setup.frontends, &setup.policy, asker).with_api(api_url);
    allow_files();
    let buffers = buffers_of_each(setup.cores, memory_bytes());
    let kept_space = (setup.cores * buffers + SPACE_BESIDE_BUFFERS) as u64;
    let limit = ConnectionLimit::new(setup.max_connections).reserving_space(kept_space);
    let parts = Arc::new(Parts::new(limit.clone()));
    parts.set_timeouts(setup.login_timeout, setup.idle_timeout);
    if let Some(user) = &user {
        let control = setup.control.as_ref().map(|ControlPath(path)| path.as_path());
        user.become_it(setup.state.as_deref(), control)?;
    }
    // A command is to have what the user has.
    if command.is_none() && !keep_privileges {
        privileges::give_up(setup.capabilities())?;
    }
    let cores = start_cores(&setup, buffers)?;
    let reloader = Reloader::start((args, inherited), &setup, &exports, &parts, cores, (bound, private))?;
    if let Some(left) = limit.lacks_space() {
        let (left, kept) = (left >> 20, kept_space >> 20);
        return Err(Failure::request(format!(
            "the limit of address space (RLIMIT_AS) leaves {left} MiB, and serving takes {kept} MiB; raise the limit or \
             use fewer --cores"
        )));
    }
    alive::watch(reloader.cores(), &sender);
    let sizes = sizes::watch(&setup, &exports)?;
    let idle = idle::watch(&setup, &parts, reloader.cores().inboxes())?;
    let reloader = Arc::new(reloader);
    let control = ControlServer {
        exports: exports.clone(),
        parts,
        lives: reloader.lives.clone(),
        cores: reloader.cores().stats(),
        opening: reloader.opening.clone(),
        frontends: reloader.frontends.clone(),
        policy: setup.policy.clone(),
        reloader: reloader.clone(),
    };
    let api = match endpoints.is_empty() {
        true => {
            // It uses the cores.
            drop(control);
            None
        }
        false => Some(Api::start(endpoints, control)?),
    };
    let watchdog = Watchdog::start(reloader.cores().inboxes())?;
    let status = match command {
        Some(command) => {
            let running = Running::start(&command, &announcement, &sender)?;
            wait(&events, Some(&running), &reloader)
        }
        None => {
            if let Some(line) = setup.not_served().filter(|_| !json) {
                warn!("{line}");
            }
            print(if json { announcement.json()? } else { announcement.text(amount) })?;
            service_manager::ready(exports.iter().count());
            wait(&events, None, &reloader)
        }
    };
    service_manager::stopping();
    // What is asked of it from here on concerns nobody any more.
    drop((api, sizes, idle, watchdog));
    info!("{}; another signal ends it at once", late::beginning(&limit, GRACE));
    let cores = Arc::into_inner(reloader).and_then(Reloader::into_cores);
    let cores = cores.ok_or_else(|| Failure::run("something still uses the cores"))?;
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

fn start_cores(setup: &Setup, pool_limit_bytes: usize) -> Result<Cores, Failure> {
    let config = CoresConfig {
        count: setup.cores,
        policy: setup.poll.into(),
        pool_limit_bytes,
        congestion: setup.congestion.clone(),
        ..CoresConfig::default()
    };
    Cores::start(&config).map_err(|error| Failure::request(cores_cannot_start(&error)))
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
fn wait(
    events: &Receiver<StopEvent>,
    running: Option<&Running>,
    reloader: &Reloader,
) -> Result<ExitCode, Failure> {
    loop {
        match (events.recv(), running) {
            (Ok(StopEvent::Reload), _) => reload::log(&reloader.reload()),
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
ADDR is host:port, :port for loopback, or host for the default port; port 0
lets the system choose. [::] is every IPv6 address and no IPv4 one. ADDR and
IFACE may end in ?volumes=a,b to export only these volumes there, and ADDR in
?allow=10.0.0.0/8,::1 to accept only clients in these networks. NBD and AoE
have no authentication; iSCSI and NVMe/TCP have it with a config file only.
Every iSCSI port serves iSER, too.

Volume NAME is NBD export NAME, LUN 0 of iSCSI target
iqn.2026-11.blockmux:NAME, and namespace 1 of NVMe subsystem
nqn.2026-11.blockmux:NAME. AoE disks are eSHELF.0, eSHELF.1 ... in order; a
NAME like e7.3 is that disk.

--run: URLs are in $uri (the first), $BLOCKMUX_URLS (all) and
$BLOCKMUX_NBD_URL; the exit status is the command's.

SIGTERM or SIGINT: I/O in flight completes, volumes are flushed. SIGHUP loads
the config file again; without --config or with --run it stops, too.

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
    fn all_cores_buffers_take_a_quarter_of_memory_at_most_and_never_too_little_to_work() {
        let (gib, mib) = (1_u64 << 30, 1_usize << 20);
        assert_eq!(buffers_of_each(2, 4 * gib), 512 * mib);
        assert_eq!(buffers_of_each(2, 64 * gib), 1024 * mib);
        assert_eq!(buffers_of_each(256, 128 * gib), 128 * mib);
        assert_eq!(buffers_of_each(2, 256 * mib as u64), 64 * mib, "half of what a container has");
        assert_eq!(buffers_of_each(8, 128 * mib as u64), 16 * mib);
    }
}
