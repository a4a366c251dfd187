//! `--control`: commands to a daemon that runs, at a Unix socket for its owner and root.
//!
//! A thread of its own takes them, one after the other, so that no core waits for what a command waits for. What they
//! change goes through [`blockmux_proto::served`], as whatever else is shared about a volume.

use super::setup::LARGEST;
use crate::ctl::{
    Answer, ControlPath, ProtocolStatus, Request, Status, VolumeStatus, check_peer, read, write,
};
use crate::failure::Failure;
use crate::protocol::Protocol;
use blockmux_engine::listener::ConnectionLimit;
use blockmux_engine::socket::{Address, Listener};
use blockmux_proto::exports::Exports;
use blockmux_volume::Resize;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Mode;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::{geteuid, umask};
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fs, io};
use tracing::{debug, info};

/// Takes commands until it is dropped; then the socket's file is gone.
pub(super) struct Control {
    /// Its other end is told by the end of this one.
    end: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

/// The connections of each protocol, and the bound on all of them.
pub(super) struct Parts {
    limit: ConnectionLimit,
    parts: Vec<(&'static str, ConnectionLimit)>,
}

impl Parts {
    /// For those protocols, which may come several times.
    pub(super) fn new(max_connections: usize, listeners: &[(&'static Protocol, Address)]) -> Parts {
        let limit = ConnectionLimit::new(max_connections);
        let mut parts: Vec<(&'static str, ConnectionLimit)> = Vec::new();
        for (protocol, _) in listeners {
            if parts.iter().all(|(name, _)| *name != protocol.name) {
                parts.push((protocol.name, limit.for_part()));
            }
        }
        Parts { limit, parts }
    }

    /// The bound on all of them.
    pub(super) fn limit(&self) -> &ConnectionLimit {
        &self.limit
    }

    /// What the listeners of one of them ask.
    pub(super) fn limit_of(&self, protocol: &Protocol) -> ConnectionLimit {
        let part = self.parts.iter().find(|(name, _)| *name == protocol.name);
        part.map_or(&self.limit, |(_, part)| part).clone()
    }
}

/// Listens for commands, in a directory where nobody else can put a socket in the place of this one.
///
/// # Errors
/// If others may write there, or the path cannot be had.
pub(super) fn bind(path: &ControlPath) -> Result<Listener, Failure> {
    let path = &path.0;
    let cannot = |reason: &str| {
        Failure::request(format!("cannot take commands at {}: {reason}; check --control", path.display()))
    };
    let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    let directory = fs::metadata(parent).map_err(|error| cannot(&format!("its directory: {error}")))?;
    let is_ours = directory.uid() == geteuid().as_raw() || directory.uid() == ROOT;
    if !is_ours || directory.mode() & OTHERS_WRITE != 0 {
        return Err(cannot("others may write in its directory; make one for yourself, with chmod 700"));
    }
    // Nobody else gets as far as to connect, not even before the permissions are set.
    let before = umask(Mode::from_raw_mode(0o177));
    let bound = Listener::bind(&Address::Unix(path.clone()));
    umask(before);
    let listener = bound.map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => cannot("something is there already"),
        _ => cannot(&error.to_string()),
    })?;
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(|error| cannot(&error.to_string()))?;
    Ok(listener)
}

impl Control {
    /// Takes commands.
    ///
    /// # Errors
    /// If the system has no thread for it.
    pub(super) fn start(listener: Listener, exports: Exports, parts: Parts) -> Result<Control, Failure> {
        let desk = Desk { exports, parts };
        let start = || {
            let (end, told) = UnixStream::pair()?;
            let run = move || desk.run(&listener, &told);
            let thread = thread::Builder::new().name("control".to_owned()).spawn(run)?;
            Ok(Control { end: Some(end), thread: Some(thread) })
        };
        start().map_err(|error: io::Error| Failure::run(format!("cannot start a thread: {error}")))
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.end.take();
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the thread that takes commands has panicked");
        }
    }
}

/// Where commands come to.
struct Desk {
    exports: Exports,
    parts: Parts,
}

impl Desk {
    fn run(&self, listener: &Listener, told: &UnixStream) {
        loop {
            match next(listener, told) {
                Ok(Some(stream)) => {
                    if let Err(error) = self.serve(&stream) {
                        debug!("a command was not taken: {error}");
                    }
                }
                Ok(None) => return,
                // Out of files, as it may be: those that are open will be closed.
                Err(error) => {
                    debug!("cannot take a command for now: {error}");
                    thread::park_timeout(PAUSE);
                }
            }
        }
    }

    fn serve(&self, stream: &UnixStream) -> io::Result<()> {
        check_peer(stream)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let answer = match read::<Request>(stream) {
            Ok(request) => self.answer(&request),
            Err(error) => Answer::Failed(format!("this is no command that is known here: {error}")),
        };
        write(stream, &answer)
    }

    fn answer(&self, request: &Request) -> Answer {
        match request {
            Request::Status => Answer::Status(self.status()),
            Request::Resize { name, size } => match self.resize(name, *size) {
                Ok(size) => Answer::Resized { size },
                Err(reason) => Answer::Failed(reason),
            },
        }
    }

    fn resize(&self, name: &str, size: Option<u64>) -> Result<u64, String> {
        let found = self.exports.find(name).and_then(|(id, _)| self.exports.served(id));
        let served = found.ok_or_else(|| {
            let names: Vec<_> = self.exports.iter().map(|(_, export)| export.name.as_str()).collect();
            format!("no volume is called `{name}`; there is {}", names.join(", "))
        })?;
        if size.is_some_and(|size| size > LARGEST) {
            return Err(format!("{name}: clients count to 2^63 - 1 bytes; take a smaller size"));
        }
        let size = served
            .resize(size.map_or(Resize::Own, Resize::Bytes))
            .map_err(|error| format!("{name}: {error}"))?;
        info!("{name} has {size} bytes now");
        Ok(size)
    }

    fn status(&self) -> Status {
        let volumes = self.exports.iter().filter_map(|(id, export)| {
            let served = self.exports.served(id)?;
            let (info, traffic) = (served.volume().info(), served.traffic());
            Some(VolumeStatus {
                name: export.name.clone(),
                size: info.size,
                read_only: export.read_only || info.read_only,
                users: traffic.users,
                reads: traffic.reads,
                read_bytes: traffic.read_bytes,
                writes: traffic.writes,
                written_bytes: traffic.written_bytes,
                others: traffic.others,
                failed: traffic.failed,
            })
        });
        let protocols = self.parts.parts.iter().map(|(name, part)| ProtocolStatus {
            name: (*name).to_owned(),
            connections: part.open_of_part(),
        });
        Status {
            connections: self.parts.limit.open(),
            max_connections: self.parts.limit.most(),
            protocols: protocols.collect(),
            volumes: volumes.collect(),
        }
    }
}

/// The next who has a command; `None` when the daemon ends.
fn next(listener: &Listener, told: &UnixStream) -> io::Result<Option<UnixStream>> {
    let mut waiting = [PollFd::new(listener, PollFlags::IN), PollFd::new(told, PollFlags::IN)];
    poll(&mut waiting, None)?;
    let [_, told] = waiting;
    if !told.revents().is_empty() {
        return Ok(None);
    }
    match accept_with(listener, SocketFlags::CLOEXEC) {
        Ok(socket) => Ok(Some(UnixStream::from(socket))),
        Err(error) => Err(error.into()),
    }
}

const ROOT: u32 = 0;
/// Group and others.
const OTHERS_WRITE: u32 = 0o022;
/// How long whoever connects may take to say what it wants, and to hear the answer.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(100);
