//! The commands of `blockmux ctl` as they are typed, and the requests that they stand for.

use super::cluster::ClusterCommand;
use super::fragment;
use super::objects::ObjectCommand;
use super::snapshots::SnapshotCommand;
use super::status::StatusArgs;
use crate::api::bodies::{AttachVolume, Attachment, LimitVolume};
use crate::api::fragment::{ApplyOptions, Fragment};
use crate::api::limits;
use crate::api::request::Request;
use crate::attach::way::Way;
use crate::process::log::levels::Levels;
use crate::protocol::frontend::Change;
use blockmux_engine::attach::DiskName;
use blockmux_volume::Limits;
use blockmux_volume::units::parse_size;
use std::path::PathBuf;

/// A command of the command line.
#[derive(clap::Subcommand)]
pub(super) enum CtlCommand {
    /// Show volumes with their protocols, clients and I/O counters
    Status(StatusArgs),
    /// Show logged-in sessions with their start times and I/O counters
    Sessions,
    /// Disconnect the sessions of a client; most clients connect again
    Disconnect {
        /// Address of the session, or name of the initiator, as sessions shows them
        #[arg(value_name = "ADDRESS|INITIATOR")]
        session: String,
    },
    /// Resize a volume and notify its clients
    Resize {
        /// Name of the volume
        name: String,
        /// New size, as 10g [default: the current size of the file or device]
        #[arg(value_parser = parse_size)]
        size: Option<u64>,
        /// Allow a smaller size and discard the data beyond it
        #[arg(long, requires = "size")]
        shrink: bool,
    },
    /// Serve a volume that several daemons serve in turns (exclusive=standby)
    Activate {
        /// Name of the volume
        volume: String,
        /// Shut out the daemon that serves it now, with all of its requests
        #[arg(long)]
        take: bool,
    },
    /// Stop serving a volume, so that another daemon can; sessions end
    Deactivate {
        /// Name of the volume
        volume: String,
    },
    /// Show or change the group of gateways that the daemon belongs to
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Create, list, delete or protect snapshots of a volume whose storage has them
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Limit a volume's I/O, also for clients that are connected; without limits, show them
    Limit {
        /// Name of the volume
        name: String,
        /// Limits of all clients together, as iops=500,bandwidth=10m; none removes them
        #[arg(value_name = "KEY=N,...", value_parser = limits::parse)]
        limits: Option<Limits>,
        /// Limits of each client
        #[arg(long = "client", value_name = "KEY=N,...", value_parser = limits::parse)]
        client_limits: Option<Limits>,
    },
    /// Add a volume to a subsystem or a target
    Attach {
        /// Name of the volume
        name: String,
        /// Subsystem NQN, iSCSI name or SRP port
        target: String,
        /// NSID or LUN [default: the lowest free one]
        number: Option<u32>,
        /// ANAGRPID [default: in no ana_group]
        #[arg(long, value_name = "N")]
        ana_group: Option<u32>,
    },
    /// Remove a namespace or logical unit; keep exporting its volume elsewhere
    Detach {
        /// Subsystem NQN, iSCSI name or SRP port
        target: String,
        /// NSID or LUN
        number: u32,
        /// Also if the target or subsystem has sessions; their I/O to it fails
        #[arg(long)]
        force: bool,
    },
    /// Attach a volume as a disk of the daemon's machine
    AttachDisk {
        /// Name of the volume
        volume: String,
        /// How to attach it: ublk or nbd (a block device), fuse (a file, only if the daemon runs
        /// with --keep-privileges) or vhost-user (the disk of a virtual machine) [default: the best
        /// that the machine has]
        #[arg(long, value_enum, value_name = "WAY", hide_possible_values = true)]
        via: Option<Way>,
        /// Where virtual machines find the disk: the Unix socket of vhost-user
        #[arg(long, value_name = "PATH", required_if_eq("via", "vhost-user"), conflicts_with = "name")]
        socket: Option<PathBuf>,
        /// Name it /dev/blockmux/NAME
        #[arg(long, value_name = "NAME")]
        name: Option<DiskName>,
        /// Refuse writes
        #[arg(long)]
        read_only: bool,
    },
    /// Flush and detach the disk of a volume; keep exporting the volume
    DetachDisk {
        /// Name of the volume
        volume: String,
        /// Also if the disk is in use; its users' I/O fails, and what they have not flushed is lost
        #[arg(long)]
        force: bool,
    },
    /// Load the daemon's config file again and apply its changes
    Reload,
    /// Show the changes that reload would make, and the sessions they would affect
    Diff {
        /// Exit with status 1 if there are changes
        #[arg(long)]
        exit_code: bool,
    },
    /// Print the config as a config file, with changes that wait for the next start
    Export,
    /// Apply a config fragment: add and change its entries, keep everything else
    Apply {
        /// File of TOML or JSON; - for standard input
        #[arg(value_name = "FILE", value_parser = fragment::read)]
        fragment: Fragment,
        /// Remove the entries that the lists of the fragment lack, as its volumes or its targets
        #[arg(long)]
        prune: bool,
        /// Only show what would change
        #[arg(long)]
        dry_run: bool,
    },
    /// Write the running config into the daemon's config file; keep comments
    Save,
    /// Show log levels, or change them until the daemon stops
    Log {
        /// Levels by area, as for --log
        #[arg(value_name = "AREA=LEVEL,...", value_parser = checked_levels)]
        levels: Option<String>,
    },
    /// A protocol-specific command.
    #[command(flatten)]
    Change(Change),
    #[command(flatten)]
    Objects(ObjectCommand),
}

impl CtlCommand {
    /// The request to the daemon.
    ///
    /// # Errors
    /// If the words are no object, or no keys with values.
    pub(super) fn request(self, as_json: bool) -> Result<Request, String> {
        Ok(match self {
            CtlCommand::Status(_) => Request::Status,
            CtlCommand::Sessions => Request::Sessions,
            CtlCommand::Disconnect { session } => Request::Disconnect { session },
            CtlCommand::Activate { volume, take } => Request::Activate { volume, take },
            CtlCommand::Deactivate { volume } => Request::Deactivate { volume },
            CtlCommand::Resize { name, size, shrink } => Request::Resize { name, size, shrink },
            CtlCommand::Cluster(command) => command.request(),
            CtlCommand::Snapshot(command) => command.request(),
            CtlCommand::Limit { name, limits, client_limits } => {
                let [limits, client_limits] = [limits, client_limits].map(|limits| limits.map(Into::into));
                Request::Limit { name, limits: LimitVolume { limits, client_limits } }
            }
            CtlCommand::Attach { name, target, number, ana_group } => {
                Request::Attach { target, unit: AttachVolume { volume: name, number, ana_group } }
            }
            CtlCommand::Detach { target, number, force } => Request::Detach { target, number, force },
            CtlCommand::AttachDisk { volume, via, socket, name, read_only } => {
                Request::AttachDisk(Attachment { volume, via, socket, name, read_only })
            }
            CtlCommand::DetachDisk { volume, force } => Request::DetachDisk { volume, force },
            CtlCommand::Reload => Request::Reload,
            CtlCommand::Diff { .. } => Request::Diff,
            CtlCommand::Export => Request::Export { as_json },
            CtlCommand::Apply { fragment, prune, dry_run } => {
                Request::Apply { fragment, options: ApplyOptions { prune, dry_run, if_match: None } }
            }
            CtlCommand::Save => Request::Save,
            CtlCommand::Log { levels } => Request::Log { levels },
            CtlCommand::Change(change) => Request::Change(change),
            CtlCommand::Objects(command) => command.request()?,
        })
    }
}

/// Validates log levels; they are sent as text.
fn checked_levels(text: &str) -> Result<String, String> {
    text.parse::<Levels>().map(|_| text.to_owned())
}
