//! `blockmux ctl`: controls a running daemon over its HTTP API.
//!
//! [`Request`] and [`Answer`] are shared with the daemon's `serve/control.rs`; `routes` maps them
//! to HTTP requests and responses.

mod actions;
mod attachments;
mod fragment;
mod history;
mod objects;
mod plan;
mod routes;
mod sessions;
mod status;

pub(crate) use self::actions::{ActionState, ActionStatus};
pub(crate) use self::attachments::AttachmentStatus;
pub(crate) use self::history::{History, Rates, Series};
use self::objects::ObjectCommand;
pub(crate) use self::plan::{PlanReport, PlannedChange};
pub(crate) use self::sessions::SessionStatus;
use self::status::StatusArgs;
use crate::access::{certificates, secret};
use crate::api::bodies::{SecretInfo, SecretText};
use crate::api::client::{ApiCredentials, Client};
use crate::api::edit::{ConfigEdit, ListQuery, ObjectList, ObjectPath};
use crate::api::fragment::{ApplyOptions, Fragment, FragmentContent};
use crate::api::limits::{self, LimitsBody};
use crate::api::{ApiAddress, ApiError, ErrorBody};
use crate::attach::way::Way;
use crate::failure::Failure;
use crate::output::{both_sizes, printable, shell_word};
use crate::process::log::levels::Levels;
use crate::process::stdout::{print, print_json};
use crate::protocol::frontend::Change;
use crate::spec_text::SpecText;
use blockmux_engine::attach::DiskName;
use blockmux_proto::volume_state::VolumeTraffic;
use blockmux_volume::Limits;
use blockmux_volume::units::{human_size, parse_size};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use utoipa::ToSchema;
use zeroize::Zeroizing;

/// Arguments of `blockmux ctl`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CtlArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: CtlCommand,
}

/// A command of the command line.
#[derive(clap::Subcommand)]
enum CtlCommand {
    /// Show volumes with their protocols, clients and I/O counters
    Status(StatusArgs),
    #[command(flatten)]
    Request(Request),
    #[command(flatten)]
    Objects(ObjectCommand),
}

/// The daemon that a command is for, and the credentials for it.
#[derive(clap::Args)]
pub(crate) struct DaemonArgs {
    /// Address of `serve --control`, or of `serve --api` as http://HOST:PORT or https://HOST:PORT
    /// [default: $BLOCKMUX_CONTROL, /run/blockmux/control or $XDG_RUNTIME_DIR/blockmux/control]
    #[arg(value_name = "unix:PATH")]
    address: Option<ApiAddress>,
    /// File with the token of `serve --api`
    #[arg(long, value_name = "FILE", global = true)]
    token_file: Option<PathBuf>,
    /// Directory with ca-cert.pem and, if clients need one, client-cert.pem and client-key.pem
    #[arg(long = "tls-certs", alias = "tls-certificates", value_name = "DIR", global = true)]
    tls_certificates: Option<PathBuf>,
}

/// A command to a daemon, from the command line or the API.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
pub(crate) enum Request {
    /// Show volumes, clients and I/O counters.
    #[command(skip)]
    Status,
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
    /// Export a new volume.
    #[command(skip)]
    Add {
        volume: SpecText,
        read_only: bool,
        description: String,
        protocols: Option<Vec<String>>,
        allow: Option<Vec<String>>,
        limits: Option<Limits>,
        client_limits: Option<Limits>,
    },
    /// Stop exporting a volume.
    #[command(skip)]
    Remove { name: String, force: bool },
    /// List the secrets that were written.
    #[command(skip)]
    Secrets,
    /// Write a secret.
    #[command(skip)]
    WriteSecret { name: String, value: SecretText },
    /// Remove a secret.
    #[command(skip)]
    RemoveSecret { name: String, force: bool },
    /// List objects of the running config.
    #[command(skip)]
    List { path: ObjectPath, query: ListQuery },
    /// Show an object of the running config.
    #[command(skip)]
    Show { path: ObjectPath },
    /// Change an object of the running config.
    #[command(skip)]
    Edit(ConfigEdit),
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
    Export {
        /// As JSON, and not as TOML.
        #[arg(skip)]
        as_json: bool,
    },
    /// Apply a config fragment: add and change its entries, keep everything else
    Apply {
        /// File of TOML or JSON; - for standard input
        #[arg(value_name = "FILE", value_parser = fragment::read)]
        fragment: Fragment,
        #[command(flatten)]
        options: ApplyOptions,
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
}

/// The request in a few words, for actions and the audit log.
impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Request::Status => f.write_str("status"),
            Request::Sessions => f.write_str("sessions"),
            Request::Resize { name, size: Some(size), shrink } => {
                let shrink = if *shrink { ", also if that discards data" } else { "" };
                write!(f, "resize {name} to {size} bytes{shrink}")
            }
            Request::Resize { name, size: None, .. } => write!(f, "resize {name}"),
            Request::Limit { name, .. } => write!(f, "limit {name}"),
            Request::Add { volume, .. } => write!(f, "add {volume}"),
            Request::Remove { name, .. } => write!(f, "remove {name}"),
            Request::Attach { name, target, .. } => write!(f, "attach {name} to {target}"),
            Request::Detach { target, number, .. } => write!(f, "detach {number} from {target}"),
            Request::AttachDisk { volume, .. } => write!(f, "attach disk {volume}"),
            Request::DetachDisk { volume, .. } => write!(f, "detach disk {volume}"),
            Request::Reload => f.write_str("reload"),
            Request::Diff { .. } => f.write_str("diff"),
            Request::Export { .. } => f.write_str("export"),
            Request::Apply { fragment, options } => {
                let prune = if options.prune { ", and remove what its lists lack" } else { "" };
                write!(f, "apply {}{prune}", fragment.title().display())
            }
            Request::Save => f.write_str("save"),
            Request::Log { levels } => write!(f, "log {}", levels.as_deref().unwrap_or_default()),
            Request::Change(change) => write!(f, "change {}", change.target),
            Request::Disconnect { session } => write!(f, "disconnect {session}"),
            Request::Secrets => f.write_str("list secret"),
            Request::WriteSecret { name, .. } => write!(f, "write secret {name}"),
            Request::RemoveSecret { name, .. } => write!(f, "remove secret {name}"),
            Request::List { path, .. } => write!(f, "list {path}"),
            Request::Show { path } => write!(f, "show {path}"),
            Request::Edit(edit) => edit.fmt(f),
        }
    }
}

/// The daemon's answer to a [`Request`].
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Status(Status),
    Sessions(Vec<SessionStatus>),
    /// The new size of a volume, in bytes.
    Resized {
        size: u64,
    },
    /// The name and the URLs of a new volume.
    Added {
        name: String,
        urls: Vec<String>,
        /// Protocols in the volume's `protocols` that have no listener.
        without_listener: Vec<String>,
    },
    /// Log levels by area.
    Levels(BTreeMap<String, String>),
    /// The NSID or LUN of an attached volume.
    Attached {
        number: u32,
    },
    /// The device of an attached disk.
    DiskAttached {
        device: String,
    },
    /// Changes of a config that were made or would be made.
    Plan(PlanReport),
    /// The desired config.
    Config {
        content: FragmentContent,
        /// Its ETag.
        tag: String,
    },
    /// Secrets, without their values.
    Secrets(Vec<SecretInfo>),
    /// Objects of the config.
    Objects(ObjectList),
    /// An object of the config.
    Object {
        object: Value,
        /// Its ETag.
        tag: String,
    },
    /// An answer with a note for the user.
    Noted {
        answer: Box<Answer>,
        note: String,
    },
    /// Success with a message for the user.
    Message(String),
    /// Success.
    Done,
    /// Failure.
    Failed(ApiError),
}

impl Request {
    /// Whether it only asks what would change.
    pub(crate) fn is_dry_run(&self) -> bool {
        match self {
            Request::Edit(edit) => edit.options.dry_run,
            Request::Apply { options, .. } => options.dry_run,
            _ => false,
        }
    }
}

impl Answer {
    /// This answer with a note, if there is one.
    pub(crate) fn noted(self, note: Option<String>) -> Answer {
        match note {
            Some(note) => Answer::Noted { answer: Box::new(self), note },
            None => self,
        }
    }

    /// The body of the HTTP response, which `--json` prints.
    pub(crate) fn json(&self) -> Value {
        match self {
            Answer::Status(status) => json!(status),
            Answer::Sessions(sessions) => json!(sessions),
            Answer::Resized { size } => json!({ "size": size }),
            Answer::Added { name, urls, without_listener } => {
                json!({ "name": name, "urls": urls, "protocols_without_listener": without_listener })
            }
            Answer::Levels(levels) => json!(levels),
            Answer::Attached { number } => json!({ "number": number }),
            Answer::DiskAttached { device } => json!({ "device": device }),
            Answer::Plan(report) => json!(report),
            Answer::Config { content: FragmentContent::Toml(text), .. } => json!(text),
            Answer::Config { content: FragmentContent::Json(config), .. } => json!(config),
            Answer::Secrets(list) => json!(list),
            Answer::Objects(list) => json!(list),
            Answer::Object { object, .. } => object.clone(),
            Answer::Noted { answer, note } => {
                let mut body = answer.json();
                body.as_object_mut().into_iter().for_each(|body| {
                    body.insert("note".to_owned(), json!(note));
                });
                body
            }
            Answer::Message(text) => json!({ "message": text }),
            Answer::Done => json!({}),
            Answer::Failed(error) => json!(ErrorBody { error: error.clone() }),
        }
    }
}

/// Connections and volumes of a daemon.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct Status {
    pub(crate) connections: usize,
    /// Maximum number of connections.
    pub(crate) max_connections: usize,
    /// Lost connections whose I/O has not ended; they are not counted in `connections`.
    pub(crate) orphaned_connections: usize,
    /// Connections of the listeners of each protocol.
    pub(crate) protocols: Vec<ProtocolStatus>,
    pub(crate) volumes: Vec<VolumeStatus>,
    /// Volumes that are attached as disks of the daemon's machine.
    #[serde(default)]
    pub(crate) attachments: Vec<AttachmentStatus>,
}

/// The listeners of a protocol. Those of iSCSI and NVMe/TCP also accept iSER and NVMe/RDMA; the
/// list of sessions has the protocol of each session.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct ProtocolStatus {
    pub(crate) name: String,
    pub(crate) connections: usize,
}

/// An exported volume and its I/O counters since it was exported.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct VolumeStatus {
    pub(crate) name: String,
    /// In bytes.
    pub(crate) size: u64,
    pub(crate) read_only: bool,
    /// Protocols over which it is exported.
    #[serde(default)]
    pub(crate) protocols: Vec<String>,
    /// iSCSI names, subsystem NQNs and SRP ports that have it.
    #[serde(default)]
    pub(crate) targets: Vec<String>,
    /// Networks from which clients may use it, if not all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) allow: Vec<String>,
    /// Open connections that use the volume.
    pub(crate) users: u64,
    /// Lost connections whose I/O on the volume has not ended.
    pub(crate) orphaned_connections: usize,
    #[serde(flatten)]
    pub(crate) traffic: TrafficStatus,
    /// Limits of all clients together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limits: Option<LimitsBody>,
    /// Limits of each client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) client_limits: Option<LimitsBody>,
    /// Present if limits have held requests back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) throttled: Option<ThrottleStatus>,
    /// Present if an initiator or host is registered or holds a reservation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reservation: Option<ReservationStatus>,
    /// Reconnects of a remote volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reconnects: Option<u64>,
    /// Present for a RAM volume that is populated ahead of use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) populated: Option<PopulatedStatus>,
}

/// I/O counters of a volume or a session.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct TrafficStatus {
    reads: u64,
    read_bytes: u64,
    writes: u64,
    written_bytes: u64,
    /// Flushes, discards, zeroing and all other requests.
    others: u64,
    failed: u64,
}

impl From<VolumeTraffic> for TrafficStatus {
    fn from(traffic: VolumeTraffic) -> TrafficStatus {
        let VolumeTraffic { reads, read_bytes, writes, written_bytes, others, failed, .. } = traffic;
        TrafficStatus { reads, read_bytes, writes, written_bytes, others, failed }
    }
}

impl TrafficStatus {
    /// Number of requests of all kinds.
    pub(crate) fn requests(&self) -> u64 {
        self.reads + self.writes + self.others
    }

    /// Number of bytes read and written.
    pub(crate) fn bytes(&self) -> u64 {
        self.read_bytes + self.written_bytes
    }

    /// Number of failed requests.
    pub(crate) fn failed(&self) -> u64 {
        self.failed
    }

    fn add(&mut self, more: &TrafficStatus) {
        self.reads += more.reads;
        self.read_bytes += more.read_bytes;
        self.writes += more.writes;
        self.written_bytes += more.written_bytes;
        self.others += more.others;
        self.failed += more.failed;
    }

    /// A line for each counter; values begin at column `at`.
    fn lines(&self, at: usize) -> [String; 4] {
        let moved = |count: u64, bytes: u64| format!("{count} ({})", human_size(bytes));
        [
            ("reads", moved(self.reads, self.read_bytes)),
            ("writes", moved(self.writes, self.written_bytes)),
            ("others", self.others.to_string()),
            ("failed", self.failed.to_string()),
        ]
        .map(|(label, value)| format!("{:<at$}{value}", format!("  {label}")))
    }
}

/// Requests that limits have held back.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct ThrottleStatus {
    /// Number of requests that are held now.
    pub(crate) held: u64,
    /// Number of requests that were held since the volume was exported.
    pub(crate) requests: u64,
    /// Sum of the times for which they were held.
    pub(crate) seconds: f64,
}

/// Reservations of a volume.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct ReservationStatus {
    /// Number of registered initiators and hosts.
    pub(crate) registrants: usize,
    /// An initiator or host holds a reservation.
    pub(crate) reserved: bool,
}

/// Populated memory of a RAM volume, in bytes.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct PopulatedStatus {
    pub(crate) bytes: u64,
    pub(crate) of: u64,
}

/// Validates log levels; they are sent as text.
fn checked_levels(text: &str) -> Result<String, String> {
    text.parse::<Levels>().map(|_| text.to_owned())
}

/// Sends the command to the daemon and prints its answer.
pub(crate) fn run(args: &CtlArgs) -> Result<ExitCode, Failure> {
    let client = args.daemon.client()?;
    let request = match &args.command {
        CtlCommand::Status(status) => {
            return status::run(&client, status, args.json).map(|()| ExitCode::SUCCESS);
        }
        CtlCommand::Request(Request::Export { .. }) => &Request::Export { as_json: args.json },
        CtlCommand::Request(request) => request,
        CtlCommand::Objects(command) => &command.request().map_err(Failure::request)?,
    };
    if let Request::Limit { name, limits: None, client_limits: None } = request {
        return show_limits(&client, name, args.json).map(|()| ExitCode::SUCCESS);
    }
    let mut answer = match request {
        Request::List { path, query } => ask_all(&client, path, query)?,
        request => actions::ask(&client, request)?,
    };
    if let Answer::Noted { answer: own, note } = answer {
        tracing::warn!("{}", printable(&note));
        answer = *own;
    }
    let differs = matches!((request, &answer), (Request::Diff { exit_code: true }, Answer::Plan(report)) if !report.is_empty());
    show(answer, request, args.json)?;
    Ok(ExitCode::from(u8::from(differs)))
}

/// Asks for all objects of a list, part by part.
fn ask_all(client: &Client, path: &ObjectPath, query: &ListQuery) -> Result<Answer, Failure> {
    let mut all = ObjectList { items: Vec::new(), next: None };
    loop {
        let query = ListQuery { after: all.next.take(), ..query.clone() };
        match actions::ask(client, &Request::List { path: path.clone(), query })? {
            Answer::Objects(ObjectList { items, next }) => {
                all.items.extend(items);
                all.next = next;
            }
            answer => return Ok(answer),
        }
        if all.next.is_none() {
            return Ok(Answer::Objects(all));
        }
    }
}

/// Prints the limits of a volume.
fn show_limits(client: &Client, name: &str, json: bool) -> Result<(), Failure> {
    let Answer::Status(status) = actions::ask(client, &Request::Status)? else {
        return Err(Failure::run("unexpected answer from the daemon; it may have another version"));
    };
    let Some(volume) = status.volumes.iter().find(|volume| volume.name == name) else {
        return Err(Failure::run(format!("no volume has the name `{name}`")));
    };
    let all = [("limits", &volume.limits), ("client_limits", &volume.client_limits)];
    if json {
        return print_json(&Value::Object(
            all.map(|(key, limits)| (key.to_owned(), json!(limits))).into_iter().collect(),
        ));
    }
    let text =
        |limits: &Option<LimitsBody>| limits.as_ref().map_or_else(|| "none".to_owned(), LimitsBody::text);
    print(format_args!("all clients  {}\neach client  {}", text(&volume.limits), text(&volume.client_limits)))
}

/// Prints an answer to a request.
fn show(answer: Answer, request: &Request, is_json: bool) -> Result<(), Failure> {
    match (answer, request) {
        (Answer::Failed(error), _) => Err(error.into()),
        (answer, _) if is_json => print_json(&answer.json()),
        (Answer::Resized { size }, Request::Resize { name, .. }) => {
            print(format_args!("{name}  {}", both_sizes(size)))
        }
        (Answer::Added { name, urls, without_listener }, Request::Add { protocols, .. }) => {
            let lines = urls.iter().map(|url| format!("\n  {}", printable(&shell_word(url))));
            print(format_args!("{}{}", printable(&name), lines.collect::<String>()))?;
            if urls.is_empty() {
                let why = why_not_exported(&name, protocols.as_deref(), &without_listener);
                why.into_iter().for_each(|why| tracing::warn!("{}", printable(&why)));
            }
            if !without_listener.is_empty() {
                let protocols = printable(&without_listener.join(", ")).to_string();
                tracing::warn!(
                    "not exported over {protocols}: the daemon has no listener for it; start the daemon with one"
                );
            }
            Ok(())
        }
        (Answer::Attached { number }, Request::Attach { target, .. }) => {
            print(format_args!("{}  {number}", printable(target)))
        }
        (Answer::DiskAttached { device }, Request::AttachDisk { volume, .. }) => {
            print(format_args!("{}  {}", printable(&device), printable(volume)))
        }
        (Answer::Plan(report), _) => print(plan::text(&report)),
        (Answer::Config { content: FragmentContent::Toml(text), .. }, _) => print(text.trim_end()),
        (Answer::Secrets(list), _) => print(objects::secrets_text(&list)),
        (Answer::Objects(list), _) => print(objects::list_text(&list)),
        (Answer::Object { object, .. }, _) => print(objects::text(&object)),
        (Answer::Levels(levels), Request::Log { .. }) => {
            let lines: Vec<_> = levels.iter().map(|(area, level)| format!("{area:<10} {level}")).collect();
            print(lines.join("\n"))
        }
        (Answer::Message(text), _) => print(printable(&text)),
        (Answer::Done, _) => Ok(()),
        (Answer::Sessions(sessions), Request::Sessions) => print(sessions::text(sessions)),
        _ => Err(Failure::run("unexpected answer from the daemon; it may have another version")),
    }
}

/// Why a volume that was added with these `protocols` has no URL yet, apart from protocols
/// `without_listener`.
fn why_not_exported(name: &str, protocols: Option<&[String]>, without_listener: &[String]) -> Option<String> {
    let Some(protocols) = protocols else {
        return Some(format!(
            "{name} is not exported yet: attach it to a target, or add it with --protocols"
        ));
    };
    let listens = |word: &&String| !without_listener.contains(&word.replace('_', "-"));
    let listening: Vec<_> = protocols.iter().filter(listens).map(String::as_str).collect();
    match &listening[..] {
        [] => None,
        // NBD has no targets.
        ["nbd"] => Some(format!("no nbd listener exports it: their `?volumes=` lists lack `{name}`")),
        several => Some(format!(
            "{name} is not exported over {} yet: attach it to a target, or add it to the `?volumes=` list of a listener",
            several.join(", ")
        )),
    }
}

impl DaemonArgs {
    /// The daemon's address.
    ///
    /// # Errors
    /// If it is not named, and no daemon is at the usual places.
    pub(crate) fn address(&self) -> Result<ApiAddress, Failure> {
        self.address.clone().map_or_else(ApiAddress::usual, Ok).map_err(Failure::request)
    }

    /// A client of the daemon.
    ///
    /// # Errors
    /// If a file cannot be read, others can read a secret, or the token is missing.
    pub(crate) fn client(&self) -> Result<Client, Failure> {
        let DaemonArgs { token_file, tls_certificates, .. } = self;
        let address = &self.address()?;
        let token = token_file.as_deref().map(|path| secret::read("--token-file", path, api_token));
        let token = token.transpose()?;
        if token.is_none() && matches!(address, ApiAddress::Http(_)) {
            if let Some(own) = address.encrypted().filter(|_| tls_certificates.is_some()) {
                return Err(Failure::request(format!("{address}: --tls-certs needs TLS; use {own}")));
            }
            return Err(Failure::request(format!(
                "{address}: the API requires a token over TCP; add --token-file with the file of \
                 `serve --api-token-file`"
            )));
        }
        let host = address.certified_host();
        if host.is_none() && tls_certificates.is_some() {
            return Err(Failure::request(format!(
                "{address}: --tls-certs has no effect here; remove it, or write https://HOST:PORT"
            )));
        }
        let certificates = host.map(|host| certificates::of_client(tls_certificates.as_deref(), host, true));
        let certificates = certificates.transpose()?;
        Ok(Client::new(address.clone(), ApiCredentials { token, certificates }))
    }
}

/// Parses a token, which is the line of a file.
///
/// # Errors
/// If it has characters that are not allowed in an HTTP header.
pub(crate) fn api_token(line: &[u8]) -> Result<Zeroizing<String>, &'static str> {
    let is_plain = line.iter().all(u8::is_ascii_graphic);
    let text = std::str::from_utf8(line).ok().filter(|_| is_plain);
    text.map(|text| Zeroizing::new(text.to_owned()))
        .ok_or("is not a token of ASCII characters without spaces; create one with `openssl rand -hex 32`")
}

const EXAMPLES: &str = "\
Changes last until the daemon stops; `ctl save` writes them into its config
file. I/O on a removed volume fails, and the volume is flushed. The daemon reads
secret files, so their paths are those of the daemon.

Examples:
  blockmux serve mem:1g --control unix:/run/blockmux/control
  blockmux ctl unix:/run/blockmux/control status
  blockmux ctl unix:/run/blockmux/control resize disk0 2g
  blockmux ctl unix:/run/blockmux/control limit disk0 iops=500
  blockmux ctl unix:/run/blockmux/control add data=mem:1g --protocols nvme-tcp
  blockmux ctl unix:/run/blockmux/control list volume
  blockmux ctl unix:/run/blockmux/control set volume data description=new
  blockmux ctl unix:/run/blockmux/control attach data NQN 2
  blockmux ctl unix:/run/blockmux/control attach-disk data
  blockmux ctl unix:/run/blockmux/control ana NQN 1 inaccessible
  blockmux ctl unix:/run/blockmux/control add-host NQN HOSTNQN
  blockmux ctl unix:/run/blockmux/control alua IQN standby";
