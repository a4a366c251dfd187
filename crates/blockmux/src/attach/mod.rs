//! `blockmux attach`: a volume as a disk of this machine, or volumes as files, until the process is
//! stopped.
//!
//! The first signal, or the end of the command of `--run`, flushes and removes the disk. A disk
//! that is in use stays until nobody uses it. A second signal removes it by force; so does a signal
//! while the removal waits for a volume that does not answer. A signal before the disk is attached
//! gives it up. A process that is killed leaves the disk, and the next `attach` of the volume goes
//! on with it.

mod announce;
mod detach;
#[cfg(test)]
pub(crate) mod fake;
mod file;
pub(crate) mod memory;
mod mounted;
pub(crate) mod own_io;
mod probe;
mod starting;
mod volumes;
pub(crate) mod way;

use crate::failure::{Failure, cores_cannot_start};
use crate::process::command::{self, RunningCommand};
use crate::process::poll::Poll;
use crate::process::service_manager;
use crate::process::signals;
use crate::process::stdout::{print, print_json};
use crate::volume_kinds::flush;
use crate::volume_kinds::sizes;
use announce::DiskAnnouncement;
use blockmux_engine::attach::own_io::OwnIo;
use blockmux_engine::attach::{AttachedDisk, DiskName, DiskOptions};
use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::sys::allowed_cpus;
use blockmux_volume::Spec;
use detach::{Detaching, Removed};
use mounted::MountedDisk;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;
use tracing::{info, warn};
use volumes::OpenVolumes;
use way::{WantedWays, Way, WayError, WayOptions};

/// Arguments of `blockmux attach`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct AttachArgs {
    /// A volume or a URL; for fuse also several
    #[arg(value_name = "VOLUME", required_unless_present_any = ["probe", "forget", "owner"])]
    volumes: Vec<Spec>,
    /// How to attach it: ublk or nbd (a block device), fuse (a file) or vhost-user (the disk of a
    /// virtual machine) [default: the first of ublk, nbd and fuse that this machine has]
    #[arg(long, value_enum, value_name = "WAY", hide_possible_values = true)]
    via: Option<Way>,
    /// Where virtual machines find the disk: the Unix socket of vhost-user
    #[arg(long, value_name = "PATH", required_if_eq("via", "vhost-user"), conflicts_with_all = ["name", "mount"])]
    socket: Option<PathBuf>,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Attach the volume although another process uses it for writing, as for a cluster file system
    #[arg(long)]
    shared: bool,
    /// Run a shell command with the disk in its environment, and detach when it ends
    #[arg(long, value_name = "CMD")]
    run: Option<String>,
    /// Name of the disk, which is /dev/blockmux/NAME, too; for fuse, only the name of the file
    #[arg(long, value_name = "NAME")]
    name: Option<DiskName>,
    /// Mount the disk's file system there, as long as it is attached; not for fuse
    #[arg(long, value_name = "DIR")]
    mount: Option<PathBuf>,
    /// Directory of the files, for fuse; it is made if it does not exist [default for one file:
    /// /run/blockmux-files/NAME, below $XDG_RUNTIME_DIR for users other than root]
    #[arg(long, value_name = "DIR", conflicts_with = "socket")]
    directory: Option<PathBuf>,
    /// Let other users read the files, and root write them, for fuse
    #[arg(long, conflicts_with = "socket")]
    allow_other: bool,
    /// Number of threads, each with a queue of the disk; fuse has one [default: one for each CPU]
    #[arg(long, value_name = "N")]
    cores: Option<NonZeroUsize>,
    /// Maximum number of requests in flight on each queue
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..=1024))]
    iodepth: u16,
    /// Polling of idle cores: adaptive (briefly, then sleep), always (use whole CPUs) or never
    /// (sleep at once) [default: adaptive]
    #[arg(long, value_enum, hide_possible_values = true)]
    poll: Option<Poll>,
    /// When ready, print one JSON object instead of text, also before the command of --run
    #[arg(long)]
    json: bool,
    /// Print which ways of attaching this machine has, and why it lacks the others
    #[arg(long, conflicts_with_all = ["volumes", "via", "socket", "read_only", "shared", "run", "forget", "name", "mount", "directory"])]
    probe: bool,
    /// Remove a disk or a mount that a process that has ended has left; what waits for it fails
    #[arg(
        long,
        value_name = "PATH",
        conflicts_with_all = ["volumes", "via", "socket", "read_only", "shared", "run", "json", "name", "mount", "directory"]
    )]
    forget: Option<PathBuf>,
    /// Print user and group of a ublk disk that a user other than root has attached, for udev's
    /// rules; fail for every other
    #[arg(
        long,
        value_name = "PATH",
        conflicts_with_all = ["volumes", "via", "socket", "read_only", "shared", "run", "json", "name", "mount", "directory", "probe", "forget"]
    )]
    owner: Option<PathBuf>,
}

impl AttachArgs {
    /// Whether the process serves a disk until it is stopped.
    pub(crate) fn is_daemon(&self) -> bool {
        !self.volumes.is_empty() && self.run.is_none()
    }
}

/// What the main thread waits for.
enum AttachEvent {
    /// The attempt to attach has ended.
    Attached(Result<Arc<dyn AttachedDisk>, Failure>),
    /// A signal asks to detach, or to give up attaching.
    Signal,
    /// The command of `--run` ended.
    CommandEnded(std::io::Result<std::process::ExitStatus>),
    /// An attempt to remove the disk has ended.
    Removed(Removed),
    /// The disk was removed, maybe by somebody else.
    Gone,
}

/// Attaches volumes until a signal or the end of the command of `--run`.
pub(crate) fn run(args: &AttachArgs) -> Result<ExitCode, Failure> {
    if args.probe {
        return probe::run(args.json);
    }
    if let Some(device) = &args.forget {
        return way::forget(device).map(|()| ExitCode::SUCCESS).map_err(Failure::request);
    }
    if let Some(node) = &args.owner {
        return probe::print_owner(node);
    }
    let name = args.volumes.iter().map(Spec::to_string).collect::<Vec<_>>().join(", ");
    // Opening a volume may create a file, so this is first.
    let is_file = args.directory.is_some() || args.allow_other;
    let asked = args.via.or(args.socket.as_ref().map(|_| Way::VhostUser)).or(is_file.then_some(Way::Fuse));
    check_options(args, asked)?;
    let wanted = if args.mount.is_some() { WantedWays::BlockDevices } else { WantedWays::All };
    let way = Way::choose(asked, wanted).map_err(|error| match error {
        WayError::None { wanted: WantedWays::BlockDevices, .. } => {
            Failure::request(format!("--mount needs a block device: {error}"))
        }
        error => Failure::request(format!("{name}: {error}")),
    })?;
    check_options(args, Some(way))?;
    let io = OwnIo::by(&own_io::by_this_program());
    let files = (way == Way::Fuse).then(|| file::options(args, io.clone())).transpose()?;
    memory::keep(way);
    let mut volumes = OpenVolumes::open(args, way)?;
    let cores = start_cores(args, way)?;
    let options = disk_options(args, way, &cores, volumes.data, io.clone());
    let options = match (way, &args.socket, files) {
        (Way::VhostUser, Some(socket), _) => WayOptions::VhostUser(options, socket.clone()),
        (_, _, Some(files)) => WayOptions::Fuse(files),
        (Way::Nbd, ..) => WayOptions::Nbd(options),
        _ => WayOptions::Ublk(options),
    };
    let exports = volumes.exports.clone();
    let (sender, events) = mpsc::channel();
    // Every signal is an event: a disk that is in use outlives the first. Until now one ends the
    // process at once.
    signals::watch(&sender, &[SIGTERM, SIGINT, SIGHUP], |_| AttachEvent::Signal)
        .map_err(|error| Failure::run(format!("cannot install signal handlers: {error}")))?;
    let _size_checks = volumes.can_change_externally.then(|| sizes::check(&exports)).transpose()?;
    let (cores, mounts_at, own_io) = (Arc::new(cores), args.mount.clone(), io.clone());
    let (served, own, ids) = ((cores.clone(), exports.clone()), name.clone(), volumes.ids());
    let read_only = exports.iter().all(|(_, export)| export.read_only);
    let attach = move || {
        let disk: Arc<dyn AttachedDisk> = match options.attach(&served.0, &served.1, &ids) {
            Ok(disk) => disk.into(),
            Err(error) => return Err(Failure::request(format!("{own}: {error}"))),
        };
        let Some(directory) = mounts_at else { return Ok(disk) };
        let mounted: Arc<dyn AttachedDisk> =
            Arc::new(MountedDisk::mount(disk, &directory, read_only, &own_io)?);
        Ok(mounted)
    };
    let disk = starting::attach(&name, attach, io, &sender, &events)?;
    volumes.announce(&*disk);
    let announcement = DiskAnnouncement::new(args, &exports, way, &*disk);
    let (running, failed) = match announce(args, &announcement, &sender) {
        Ok(running) => (running, None),
        Err(failure) => {
            let _ = sender.send(AttachEvent::Signal);
            (None, Some(failure))
        }
    };
    let removed = sender.clone();
    // The receiver is gone if the process ends for another reason.
    disk.when_removed(Box::new(move || removed.send(AttachEvent::Gone).unwrap_or_default()));
    let status = wait(&events, running.as_ref(), Detaching::new(disk, way, sender));
    service_manager::stopping();
    // The thread that has attached the disk no longer has them.
    if let Some(cores) = Arc::into_inner(cores) {
        cores.stop(END_TIMEOUT);
    }
    let status = status?;
    flush::all(&exports)?;
    failed.map_or(Ok(status), Err)
}

/// Tells that the disk is ready, or starts the command of `--run` with it.
fn announce(
    args: &AttachArgs,
    announcement: &DiskAnnouncement,
    events: &Sender<AttachEvent>,
) -> Result<Option<RunningCommand>, Failure> {
    let running = match &args.run {
        Some(command) => {
            if args.json {
                print_json(&announcement.json())?;
            }
            let ended = events.clone();
            let on_end = move |status| {
                // The receiver is gone if the process ends for another reason.
                let _ = ended.send(AttachEvent::CommandEnded(status));
            };
            memory::release_thread();
            let running = RunningCommand::start(command, announcement.environment(), on_end)?;
            memory::outlive_others();
            Some(running)
        }
        None => {
            memory::outlive_others();
            match args.json {
                true => print_json(&announcement.json())?,
                false => print(announcement.text())?,
            }
            None
        }
    };
    service_manager::ready(announcement.text().lines().next().unwrap_or_default());
    Ok(running)
}

/// Handles events until the disk is removed; returns the exit status.
fn wait(
    events: &Receiver<AttachEvent>,
    running: Option<&RunningCommand>,
    mut detaching: Detaching,
) -> Result<ExitCode, Failure> {
    let mut status = Ok(ExitCode::SUCCESS);
    let mut has_ended = running.is_none();
    loop {
        let event = match detaching.timeout() {
            Some(timeout) => events.recv_timeout(timeout),
            None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match event {
            Err(RecvTimeoutError::Timeout) => detaching.on_timeout()?,
            Ok(AttachEvent::Signal) if !has_ended => {
                if let Some(running) = running {
                    running.terminate();
                }
                // The next signal does not wait for the command.
                has_ended = true;
            }
            Ok(AttachEvent::CommandEnded(ended)) => {
                (status, has_ended) = (command::exit_code(ended), true);
                detaching.on_command_ended()?;
            }
            Ok(AttachEvent::Signal) => detaching.begin()?,
            Ok(AttachEvent::Gone) if has_ended => detaching.on_gone()?,
            // Its command goes on; the disk was attached before.
            Ok(AttachEvent::Gone | AttachEvent::Attached(_)) => {}
            Ok(AttachEvent::Removed(removed)) => {
                if detaching.on_removed(removed)? {
                    return status;
                }
            }
            // This thread has a sender itself.
            Err(RecvTimeoutError::Disconnected) => return status,
        }
    }
}

/// Checks that the way, if it is known, has what the options are for.
fn check_options(args: &AttachArgs, way: Option<Way>) -> Result<(), Failure> {
    let Some(way) = way else { return Ok(()) };
    if way != Way::Fuse && args.volumes.len() > 1 {
        return Err(Failure::request(
            "several volumes are files of one directory, by --via fuse; attach one at a time, or add --via fuse",
        ));
    }
    if args.name.is_some() && args.volumes.len() > 1 {
        return Err(Failure::request("--name is for one volume, and there are several; omit it"));
    }
    if way != Way::Fuse && (args.directory.is_some() || args.allow_other) {
        return Err(Failure::request("--directory and --allow-other are for --via fuse; omit them"));
    }
    if way == Way::Fuse && args.mount.is_some() {
        return Err(Failure::request("--mount needs a block device, and fuse makes a file; omit it"));
    }
    match (way, &args.socket) {
        (Way::VhostUser, None) => Err(Failure::request("--via vhost-user needs --socket PATH")),
        (Way::VhostUser, Some(_)) | (_, None) => Ok(()),
        (_, Some(_)) => {
            let way = way.name();
            Err(Failure::request(format!("--socket is for --via vhost-user; omit it for {way}")))
        }
    }
}

fn start_cores(args: &AttachArgs, way: Way) -> Result<Cores, Failure> {
    let cpus = allowed_cpus().map_or(1, |cpus| cpus.len());
    let count = way.cores(args.cores.map_or(cpus, NonZeroUsize::get).min(MAX_CORES));
    if let Some(asked) = args.cores.filter(|asked| asked.get() > count) {
        warn!("--cores {asked}: {} uses at most {count}", way.name());
    }
    let policy = args.poll.unwrap_or(Poll::Adaptive).into();
    let config = CoresConfig { count, policy, ..CoresConfig::default() };
    Cores::start(&config).map_err(|error| Failure::request(cores_cannot_start(&error)))
}

fn disk_options(
    args: &AttachArgs,
    way: Way,
    cores: &Cores,
    data: Option<NonZeroU64>,
    io: OwnIo,
) -> DiskOptions {
    if data.is_none() && way != Way::Fuse {
        info!("the disk does not outlive this process: its volume does not");
    }
    DiskOptions {
        queues: cores.count() as u16,
        depth: args.iodepth,
        data,
        read_only: args.read_only,
        name: args.name.clone(),
        io,
        may_be_unprivileged: true,
    }
}

/// Maximum number of cores.
const MAX_CORES: usize = 64;
/// Timeout for closing sessions with servers.
const END_TIMEOUT: Duration = Duration::from_secs(5);

const EXAMPLES: &str = "\
The path of the disk or file is printed once it can be read, and is $device for
the command of --run; of several files, $device is the directory. SIGTERM or
SIGINT flushes and removes it, once it is no longer in use, as by a mounted
file system; a second signal removes it by force.

If the process is killed, a block device stays and requests wait. `blockmux
attach` of the same volume goes on with it, without an I/O error. Disks of
volumes whose data is lost with the process, as mem:, are removed or fail. A
file fails every access until the volume is attached again.

ublk needs Linux 6.5 or newer with the module ublk_drv, and root or the rule of
udev for other users (90-blockmux.rules). nbd needs root and the module nbd.
fuse needs root or fusermount3; unmounting it ends the process.

With --socket the disk is a virtual machine's, by vhost-user-blk. QEMU connects
to it, cloud-hypervisor and SPDK too; the command of --run has it as $socket.
While no process serves the socket, requests of the guest wait, if its
hypervisor connects again: give QEMU's chardev reconnect-ms=.

Examples:
  blockmux attach nvme+tcp://192.0.2.7/nqn.2026-11.example:disk/1
  blockmux attach iscsi://192.0.2.7/iqn.2026-11.example:disk/0 --read-only
  blockmux attach mem:1g --run 'mkfs.xfs -q $device && blkid $device'
  blockmux attach nbd://192.0.2.7/disk --socket /run/disk.sock
  blockmux attach nbd://192.0.2.7/disk --via fuse --directory /mnt/disks
  blockmux attach file:a.img file:b.img --directory /mnt/disks
  blockmux attach --probe
  blockmux attach --forget /dev/ublkb0";
