//! `blockmux ctl`: asks a daemon that runs with `serve --control`, and what the two say to each
//! other.
//!
//! A connection to the socket carries one [`Request`] and one [`Answer`], each a line of JSON. The
//! socket is for its owner and root alone, and the daemon asks the system who it is that talks to
//! it.

mod sessions;

pub(crate) use self::sessions::SessionStatus;
use crate::failure::Failure;
use crate::log::levels::Levels;
use crate::output::{both_sizes, print, printable, shell_word};
use crate::protocol::frontend::Change;
use blockmux_proto::volume_state::VolumeTraffic;
use blockmux_volume::units::{human_size, parse_size};
use rustix::fd::AsFd;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Which daemon, and what to do.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CtlArgs {
    /// Socket of `serve --control`
    #[arg(value_name = "unix:PATH")]
    socket: ControlPath,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    request: Request,
}

/// Where a daemon takes commands: `unix:PATH`, or the path alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ControlPath(pub(crate) PathBuf);

impl FromStr for ControlPath {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<ControlPath, &'static str> {
        match text.strip_prefix("unix:").unwrap_or(text) {
            "" => Err("the socket has no path; write unix:PATH"),
            path => Ok(ControlPath(path.into())),
        }
    }
}

/// What is asked of a daemon, on the command line and at its socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, clap::Subcommand)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
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
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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
    Levels(Vec<(String, String)>),
    /// NSID or LUN.
    Attached {
        number: u32,
    },
    /// What there is to say when it is done.
    Said(String),
    Done,
    /// Why it was not done, and what to do.
    Failed(String),
}

impl Answer {
    /// For programs, in one line: what there is to say without the answer's kind.
    fn json(&self) -> Result<String, Failure> {
        let value = match self {
            Answer::Status(status) => json!(status),
            Answer::Sessions(sessions) => json!(sessions),
            Answer::Resized { size } => json!({ "size": size }),
            Answer::Added { name, urls, unheard } => {
                json!({ "name": name, "urls": urls, "protocols_without_listener": unheard })
            }
            Answer::Levels(levels) => json!(levels.iter().cloned().collect::<BTreeMap<_, _>>()),
            Answer::Attached { number } => json!({ "number": number }),
            Answer::Said(text) => json!({ "message": text }),
            Answer::Done => json!({}),
            Answer::Failed(reason) => json!({ "error": reason }),
        };
        serde_json::to_string(&value).map_err(Failure::run)
    }
}

/// What a daemon does.
#[derive(Debug, Serialize, Deserialize)]
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
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ProtocolStatus {
    pub(crate) name: String,
    pub(crate) connections: usize,
}

/// One volume that a daemon serves, and what has been done on it since.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct VolumeStatus {
    pub(crate) name: String,
    /// In bytes.
    pub(crate) size: u64,
    pub(crate) read_only: bool,
    /// Connections that have used it and are there.
    pub(crate) users: u64,
    /// Connections that are over, and their I/O on it is not.
    pub(crate) gone: usize,
    #[serde(flatten)]
    pub(crate) traffic: TrafficStatus,
    /// Of a RAM volume whose memory is faulted in ahead of use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) populated: Option<PopulatedStatus>,
}

/// What was done on a volume, or over a connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
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

/// How far a RAM volume's memory is faulted in, in bytes.
#[derive(Debug, Serialize, Deserialize)]
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
    match (ask(&args.socket.0, &args.request)?, &args.request) {
        (Answer::Failed(reason), _) => Err(Failure::run(reason)),
        (answer, _) if args.json => print(answer.json()?),
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

/// Whether the process at the other end is ours or root's.
///
/// # Errors
/// If it is not, or the system does not say.
pub(crate) fn check_peer(stream: &UnixStream) -> io::Result<()> {
    let peer = socket_peercred(stream.as_fd())?;
    if peer.uid == geteuid() || peer.uid.is_root() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "the other end belongs to another user"))
}

/// Reads a line, and what it says.
///
/// # Errors
/// If it does not come in time, is too long or no such message.
pub(crate) fn read<T: for<'de> Deserialize<'de>>(stream: impl Read) -> io::Result<T> {
    let mut line = String::new();
    BufReader::new(stream.take(MAX_LINE)).read_line(&mut line)?;
    if !line.ends_with('\n') {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    serde_json::from_str(&line).map_err(io::Error::from)
}

/// Writes a message as a line.
///
/// # Errors
/// If the other end does not take it in time.
pub(crate) fn write(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

fn ask(path: &Path, request: &Request) -> Result<Answer, Failure> {
    let cannot = |error: io::Error| {
        Failure::request(format!(
            "{}: cannot ask the daemon: {error}; is it what `serve --control` names, and does that run?",
            path.display()
        ))
    };
    let stream = UnixStream::connect(path).map_err(cannot)?;
    stream.set_read_timeout(Some(PATIENCE)).and_then(|()| write(&stream, request)).map_err(cannot)?;
    read(&stream).map_err(cannot)
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
        lines.extend(of_gone("  ", volume.gone));
        lines.extend(volume.traffic.in_words(15));
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

/// How long a daemon may take: a file that is resized waits for its disk.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest message, in bytes: the status of tens of thousands of volumes.
const MAX_LINE: u64 = 16 << 20;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_a_line_and_nothing_else_is_taken_for_one() {
        let (here, there) = UnixStream::pair().unwrap();
        let request = Request::Resize { name: "a".to_owned(), size: Some(1 << 20) };
        write(&here, &request).unwrap();
        assert_eq!(read::<Request>(&there).unwrap(), request);
        for bytes in [&b"{}\n"[..], b"\n", b"{\"resize\":{\"name\":1}}\n", b"\"status\"", b"\xff\n"] {
            let (here, there) = UnixStream::pair().unwrap();
            (&here).write_all(bytes).unwrap();
            drop(here);
            assert!(read::<Request>(&there).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn a_socket_is_named_with_or_without_its_kind() {
        for text in ["unix:/run/b.sock", "/run/b.sock"] {
            assert_eq!(text.parse(), Ok(ControlPath("/run/b.sock".into())));
        }
        assert!("unix:".parse::<ControlPath>().is_err());
    }
}
