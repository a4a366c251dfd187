//! `blockmux ctl`: asks a running daemon by its HTTP API.
//!
//! [`Request`] and [`Answer`] are what the daemon's `serve/control.rs` takes and gives; `routes`
//! has the HTTP request of each.

mod actions;
mod fragment;
mod history;
mod plan;
mod routes;
mod sessions;

pub(crate) use self::actions::{ActionState, ActionStatus};
pub(crate) use self::fragment::Fragment;
pub(crate) use self::history::{History, Rates, Series};
pub(crate) use self::plan::{PlanReport, PlannedChange};
pub(crate) use self::sessions::SessionStatus;
use crate::api::client::Client;
use crate::api::{ApiAddress, ApiError, ErrorBody};
use crate::failure::Failure;
use crate::log::levels::Levels;
use crate::output::{both_sizes, print, printable, shell_word};
use crate::protocol::frontend::Change;
use crate::protocol::secret;
use blockmux_proto::volume_state::VolumeTraffic;
use blockmux_volume::units::{human_size, parse_size};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use utoipa::ToSchema;
use zeroize::Zeroizing;

/// Which daemon, and what to do.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CtlArgs {
    /// Address of `serve --control`, or of `serve --api` as http://HOST:PORT
    #[arg(value_name = "unix:PATH")]
    address: ApiAddress,
    /// File with the token of `serve --api`
    #[arg(long, value_name = "FILE", global = true)]
    token_file: Option<PathBuf>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    request: Request,
}

/// What is asked of a daemon, on the command line and by its API.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
pub(crate) enum Request {
    /// Show volumes, clients and I/O counters
    Status,
    /// Show who is logged in, since when, with I/O counters
    Sessions,
    /// Resize a volume and notify its clients
    Resize {
        /// Name of the volume
        name: String,
        /// As 10g [default: the size that the file or device has now]
        #[arg(value_parser = parse_size)]
        size: Option<u64>,
    },
    /// Export one more volume
    Add {
        /// As for serve; paths are the daemon's
        #[arg(value_name = "[NAME=]VOLUME")]
        volume: String,
        /// Refuse writes
        #[arg(long)]
        read_only: bool,
        /// Shown by discovery
        #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
        description: String,
        /// Protocols that export it [default: all, or none if a target restricts it]
        #[arg(long, value_name = "NAME,NAME", value_delimiter = ',')]
        protocols: Option<Vec<String>>,
        /// Networks from which clients may use it, as 10.0.0.0/8 [default: all]
        #[arg(long, value_name = "NETWORK,...", value_delimiter = ',')]
        allow: Option<Vec<String>>,
    },
    /// Stop exporting a volume
    Remove {
        /// Name of the volume
        name: String,
    },
    /// Add a volume to an NVMe subsystem or an iSCSI target
    Attach {
        /// Name of the volume
        name: String,
        /// Subsystem NQN or iSCSI name
        target: String,
        /// NSID or LUN [default: the lowest free one]
        number: Option<u32>,
        /// ANAGRPID [default: the last group, if any]
        #[arg(long, value_name = "N")]
        ana_group: Option<u32>,
    },
    /// Remove a namespace or logical unit; keep exporting its volume elsewhere
    Detach {
        /// Subsystem NQN or iSCSI name
        target: String,
        /// NSID or LUN
        number: u32,
    },
    /// Load the daemon's config file again and apply what is different
    Reload,
    /// Show what reload would change, and whom it would affect
    Diff,
    /// Print what runs as a config file
    Export,
    /// Add and change what a part of a config file names; keep everything else
    Apply {
        /// TOML file; - for standard input
        #[arg(value_name = "FILE", value_parser = fragment::read)]
        fragment: Fragment,
    },
    /// Write what runs into the daemon's config file; keep comments
    Save,
    /// Show the log's levels, or change them until the daemon stops
    Log {
        /// Levels by area, as for --log
        #[arg(value_name = "AREA=LEVEL,...", value_parser = checked_levels)]
        levels: Option<String>,
    },
    /// What one protocol alone knows.
    #[command(flatten)]
    Change(Change),
}

/// What it answers.
#[derive(Debug)]
pub(crate) enum Answer {
    Status(Status),
    Sessions(Vec<SessionStatus>),
    /// The size in bytes that the volume has now.
    Resized {
        size: u64,
    },
    /// What the volume is called, and how it is reached.
    Added {
        name: String,
        urls: Vec<String>,
        /// Protocols that are to serve it and have no listener.
        unheard: Vec<String>,
    },
    /// The log's areas, each with its level.
    Levels(BTreeMap<String, String>),
    /// NSID or LUN.
    Attached {
        number: u32,
    },
    /// What was changed, or would be.
    Plan(PlanReport),
    /// A config file.
    Text(String),
    /// What was answered, and what there is to say about it.
    Noted {
        answer: Box<Answer>,
        note: String,
    },
    /// What there is to say when it is done.
    Said(String),
    Done,
    /// Why it was not done, and what to do.
    Failed(ApiError),
}

impl Answer {
    /// The body of the HTTP response, which `--json` prints.
    pub(crate) fn json(&self) -> Value {
        match self {
            Answer::Status(status) => json!(status),
            Answer::Sessions(sessions) => json!(sessions),
            Answer::Resized { size } => json!({ "size": size }),
            Answer::Added { name, urls, unheard } => {
                json!({ "name": name, "urls": urls, "protocols_without_listener": unheard })
            }
            Answer::Levels(levels) => json!(levels),
            Answer::Attached { number } => json!({ "number": number }),
            Answer::Plan(report) => json!(report),
            Answer::Text(text) => json!({ "text": text }),
            Answer::Noted { answer, note } => {
                let mut body = answer.json();
                body.as_object_mut().into_iter().for_each(|body| {
                    body.insert("note".to_owned(), json!(note));
                });
                body
            }
            Answer::Said(text) => json!({ "message": text }),
            Answer::Done => json!({}),
            Answer::Failed(error) => json!(ErrorBody { error: error.clone() }),
        }
    }
}

/// What a daemon does.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct Status {
    pub(crate) connections: usize,
    /// How many there may be.
    pub(crate) max_connections: usize,
    /// How many are over whose I/O has not ended; they are none of those that are open.
    pub(crate) gone: usize,
    /// By protocol; those without connections of their own are left out.
    pub(crate) protocols: Vec<ProtocolStatus>,
    pub(crate) volumes: Vec<VolumeStatus>,
}

/// One protocol that a daemon listens for.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct ProtocolStatus {
    pub(crate) name: String,
    pub(crate) connections: usize,
}

/// One volume that a daemon serves, and what has been done on it since.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct VolumeStatus {
    pub(crate) name: String,
    /// In bytes.
    pub(crate) size: u64,
    pub(crate) read_only: bool,
    /// Networks from which clients may use it, if not all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) allow: Vec<String>,
    /// Connections that have used it and are there.
    pub(crate) users: u64,
    /// Connections that are over, and their I/O on it is not.
    pub(crate) gone: usize,
    #[serde(flatten)]
    pub(crate) traffic: TrafficStatus,
    /// If somebody has registered or reserved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reservation: Option<ReservationStatus>,
    /// Of a remote volume: sessions that were opened after another was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reconnects: Option<u64>,
    /// Of a RAM volume whose memory is faulted in ahead of use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) populated: Option<PopulatedStatus>,
}

/// What was done on a volume, or over a connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct TrafficStatus {
    reads: u64,
    read_bytes: u64,
    writes: u64,
    written_bytes: u64,
    /// Flushes, discards, zeroing and all else.
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
    /// Requests of all kinds.
    pub(crate) fn requests(&self) -> u64 {
        self.reads + self.writes + self.others
    }

    /// Bytes that reads asked for and writes brought.
    pub(crate) fn bytes(&self) -> u64 {
        self.read_bytes + self.written_bytes
    }

    /// Requests that failed.
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

    /// A line for each kind, with values from column `at` on.
    fn in_words(&self, at: usize) -> [String; 4] {
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

/// Reservations of a volume.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct ReservationStatus {
    /// Registrations of initiators and hosts.
    pub(crate) registrants: usize,
    /// Somebody holds a reservation.
    pub(crate) reserved: bool,
}

/// How far a RAM volume's memory is faulted in, in bytes.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct PopulatedStatus {
    pub(crate) bytes: u64,
    pub(crate) of: u64,
}

/// Checks levels where they are written; they travel as text.
fn checked_levels(text: &str) -> Result<String, String> {
    text.parse::<Levels>().map(|_| text.to_owned())
}

/// Asks the daemon, and shows what it answers.
pub(crate) fn run(args: &CtlArgs) -> Result<(), Failure> {
    let client = client(&args.address, args.token_file.as_deref())?;
    let mut answer = actions::ask(&client, &args.request)?;
    if let Answer::Noted { answer: own, note } = answer {
        tracing::warn!("{}", printable(&note));
        answer = *own;
    }
    match (answer, &args.request) {
        (Answer::Failed(error), _) => Err(Failure::run(error)),
        (answer, _) if args.json => print(answer.json()),
        (Answer::Resized { size }, Request::Resize { name, .. }) => {
            print(format_args!("{name}  {}", both_sizes(size)))
        }
        (Answer::Added { name, urls, unheard }, Request::Add { .. }) => {
            let lines = urls.iter().map(|url| format!("\n  {}", printable(&shell_word(url))));
            print(format_args!("{}{}", printable(&name), lines.collect::<String>()))?;
            if urls.is_empty() {
                tracing::warn!(
                    "{name} is served by nobody yet: attach it to a target, or add it with --protocols"
                );
            }
            if !unheard.is_empty() {
                let unheard = printable(&unheard.join(", ")).to_string();
                tracing::warn!(
                    "not served over {unheard}: the daemon has no listener for it; start it with one"
                );
            }
            Ok(())
        }
        (Answer::Attached { number }, Request::Attach { target, .. }) => {
            print(format_args!("{}  {number}", printable(target)))
        }
        (Answer::Plan(report), _) => print(plan::in_words(&report)),
        (Answer::Text(text), _) => print(text.trim_end()),
        (Answer::Levels(levels), Request::Log { .. }) => {
            let lines: Vec<_> = levels.iter().map(|(area, level)| format!("{area:<10} {level}")).collect();
            print(lines.join("\n"))
        }
        (Answer::Said(text), _) => print(printable(&text)),
        (Answer::Done, _) => Ok(()),
        (Answer::Status(status), Request::Status) => print(in_words(&status)),
        (Answer::Sessions(sessions), Request::Sessions) => print(sessions::in_words(sessions)),
        _ => Err(Failure::run("the daemon has answered something else; it may be of another version")),
    }
}

/// A client of the daemon at that address.
///
/// # Errors
/// If the token's file cannot be read, or is for somebody else's eyes, too.
pub(crate) fn client(address: &ApiAddress, token_file: Option<&Path>) -> Result<Client, Failure> {
    let token = token_file.map(|path| secret::read("--token-file", path, api_token)).transpose()?;
    if token.is_none() && matches!(address, ApiAddress::Tcp(_)) {
        return Err(Failure::request(format!(
            "{address}: the API requires a token over TCP; add --token-file with the file of `serve --api-token-file`"
        )));
    }
    Ok(Client::new(address.clone(), token))
}

/// The token that a line of a file holds.
///
/// # Errors
/// If it cannot stand in a header.
pub(crate) fn api_token(line: &[u8]) -> Result<Zeroizing<String>, &'static str> {
    let is_plain = line.iter().all(u8::is_ascii_graphic);
    let text = std::str::from_utf8(line).ok().filter(|_| is_plain);
    text.map(|text| Zeroizing::new(text.to_owned()))
        .ok_or("a token is letters, digits and signs without spaces; `openssl rand -hex 32` makes one")
}

fn in_words(status: &Status) -> String {
    let mut lines = vec![format!("connections  {} of {}", status.connections, status.max_connections)];
    let of_protocol =
        |ProtocolStatus { name, connections }: &ProtocolStatus| format!("  {name}  {connections}");
    lines.extend(status.protocols.iter().map(of_protocol));
    lines.extend(of_gone("", status.gone));
    for volume in &status.volumes {
        let read_only = if volume.read_only { "  read-only" } else { "" };
        lines.push(format!("{}  {}{read_only}", printable(&volume.name), both_sizes(volume.size)));
        lines.push(format!("  connections  {}", volume.users));
        if !volume.allow.is_empty() {
            lines.push(format!("  allow        {}", printable(&volume.allow.join(", "))));
        }
        lines.extend(of_gone("  ", volume.gone));
        lines.extend(volume.traffic.in_words(15));
        if let Some(ReservationStatus { registrants, reserved }) = &volume.reservation {
            let held = if *reserved { ", reserved" } else { "" };
            lines.push(format!("  registered   {registrants}{held}"));
        }
        lines.extend(volume.reconnects.map(|reconnects| format!("  reconnects   {reconnects}")));
        let populated = volume.populated.as_ref();
        lines.extend(
            populated
                .map(|now| format!("  populated    {} of {}", human_size(now.bytes), human_size(now.of))),
        );
    }
    lines.join("\n")
}

/// A line for connections that are over before their I/O; there seldom are any.
fn of_gone(indent: &str, gone: usize) -> Option<String> {
    (gone > 0).then(|| format!("{indent}gone         {gone}, with I/O that has not ended"))
}

const EXAMPLES: &str = "\
Changes last until the daemon stops; put what should stay into its config file.
I/O on a removed volume fails; what was written before is flushed. Secrets are
read from files by the daemon.

Examples:
  blockmux serve mem:1g --control unix:/run/user/1000/blockmux.sock
  blockmux ctl unix:/run/user/1000/blockmux.sock status
  blockmux ctl unix:/run/user/1000/blockmux.sock resize disk0 2g
  blockmux ctl unix:/run/user/1000/blockmux.sock add data=file:/srv/data.img
  blockmux ctl unix:/run/user/1000/blockmux.sock attach data NQN 2
  blockmux ctl unix:/run/user/1000/blockmux.sock ana NQN 1 inaccessible
  blockmux ctl unix:/run/user/1000/blockmux.sock add-host NQN HOSTNQN
  blockmux ctl unix:/run/user/1000/blockmux.sock alua IQN standby";
