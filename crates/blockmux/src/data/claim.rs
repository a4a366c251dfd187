//! Prevents two processes of a machine from using the same data for writing, because reservations
//! and locks are not shared between processes, and each disk has a page cache of its own.
//!
//! A claim is a listening Unix socket in the abstract namespace. The kernel releases it when the
//! process ends, processes of all users see it, and it needs no directory. It is not visible in
//! other network namespaces.

use crate::data::part::DataPart;
use crate::failure::Failure;
use crate::output::printable;
use crate::process::retry::retry_while_held;
use blockmux_proto::names::volume_uuid::VolumeUuid;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::{Pid, getpid, getuid};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tracing::{debug, warn};

/// The exclusive right to use some data and a UUID; dropping it releases them.
pub(crate) struct Claim {
    _uuid: Option<OwnedFd>,
    data: Vec<Arc<DataClaim>>,
    /// Sockets whose names say where the data is attached.
    places: Vec<OwnedFd>,
}

/// What data is claimed for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ClaimPurpose {
    /// It is exported as a volume with this UUID, which is claimed, too.
    Export(VolumeUuid),
    /// It is attached as a disk.
    Attachment,
}

/// A claimed part of data on another server.
struct DataClaim {
    data: DataPart,
    /// Claims the whole data for this process. Claims of slices that do not overlap share the
    /// socket.
    socket: Option<Arc<OwnedFd>>,
}

/// The claims of this process; none of them overlap.
static CLAIMED: Mutex<Vec<Weak<DataClaim>>> = Mutex::new(Vec::new());

/// The current holder of a claim.
enum ClaimHolder {
    /// A process of this user or of root, possibly this process.
    Process(Pid),
    /// A process of another user, whose claims are ignored.
    OtherUser,
    /// Unknown, because the holder's accept queue is full. It counts as a process of this user:
    /// only claim attempts fill the queue.
    Unknown,
}

impl Claim {
    /// Claims the data on other servers that the volume `name` uses, and the UUID of an export.
    /// Files and block devices have their own locks.
    ///
    /// # Errors
    /// If a process of this user or of root has claimed one of them.
    pub(crate) fn take(name: &str, purpose: ClaimPurpose, remote: &[DataPart]) -> Result<Claim, Failure> {
        let data = remote.iter().map(|data| claim_data(name, purpose, data)).collect::<Result<_, _>>()?;
        let of_uuid = match purpose {
            ClaimPurpose::Attachment => None,
            ClaimPurpose::Export(uuid) => claim(name, &format!("blockmux volume {uuid}"), |holder| {
                format!(
                    "`{name}`: {holder} already exports a volume with the UUID {uuid}, and hosts would treat the two \
                     as one disk; set another `uuid` in the [[volume]] of a config file, or `shared = true` if they \
                     are one disk"
                )
            })?,
        };
        Ok(Claim { _uuid: of_uuid, data, places: Vec::new() })
    }

    /// Tells others, whose claims of the data are refused, where it is attached.
    pub(crate) fn announce(&mut self, place: &Path) {
        for own in &self.data {
            let name = format!("{}{}", place_prefix(&socket_name(&own.data.key)), place.display());
            // As much of the place as the name has room for.
            let end = (0..=name.len().min(MAX_NAME)).rev().find(|at| name.is_char_boundary(*at));
            let bound = SocketAddrUnix::new_abstract_name(&name.as_bytes()[..end.unwrap_or_default()])
                .and_then(|address| {
                    let socket = new_socket()?;
                    bind(&socket, &address).map(|()| socket)
                });
            match bound {
                Ok(socket) => self.places.push(socket),
                Err(error) => debug!("{}: cannot be announced: {error}", place.display()),
            }
        }
    }
}

impl ClaimPurpose {
    fn refusal(self, name: &str, holder: &str, data: &str) -> String {
        match self {
            ClaimPurpose::Export(_) => format!(
                "`{name}`: {holder} already uses the same data ({data}), and the two would share neither reservations \
                 nor locks; end that use, export the data read-only, or set `shared = true` in the [[volume]] of a \
                 config file"
            ),
            ClaimPurpose::Attachment => format!(
                "{name}: {holder} already uses the same data ({data}), and neither would see what the other caches; \
                 use it there, stop that process first, or add --read-only, or --shared if all users expect that"
            ),
        }
    }
}

fn claim_data(name: &str, purpose: ClaimPurpose, data: &DataPart) -> Result<Arc<DataClaim>, Failure> {
    let text = &data.key;
    let mut claimed = CLAIMED.lock().unwrap_or_else(PoisonError::into_inner);
    claimed.retain(|own| own.strong_count() > 0);
    let same: Vec<_> = claimed.iter().filter_map(Weak::upgrade).filter(|own| own.data.key == *text).collect();
    if same.iter().any(|own| own.data.overlaps(data)) {
        return Err(Failure::request(purpose.refusal(name, THIS_PROCESS, text)));
    }
    let socket = match same.first() {
        Some(own) => own.socket.clone(),
        None => {
            let refusal = |holder: &str| purpose.refusal(name, holder, text);
            claim(name, &socket_name(text), refusal)?.map(Arc::new)
        }
    };
    let own = Arc::new(DataClaim { data: data.clone(), socket });
    claimed.push(Arc::downgrade(&own));
    Ok(own)
}

/// The name of the socket that claims some data.
fn socket_name(key: &str) -> String {
    format!("blockmux data {}", VolumeUuid::of_texts(&["claim", key]))
}

/// What the names of sockets begin with that say where claimed data is attached.
fn place_prefix(claimed: &str) -> String {
    format!("{claimed} at ")
}

/// Where claimed data is attached, if its holder says so.
fn place_of(claimed: &str) -> Option<String> {
    // The kernel writes `@` in place of the zero that begins an abstract name.
    let prefix = format!(" @{}", place_prefix(claimed));
    let sockets = fs::read("/proc/net/unix").unwrap_or_default();
    let sockets = String::from_utf8_lossy(&sockets);
    sockets.lines().find_map(|line| Some(printable(line.split_once(&prefix)?.1).to_string()))
}

fn claim(
    name: &str,
    claimed: &str,
    refusal: impl FnOnce(&str) -> String,
) -> Result<Option<OwnedFd>, Failure> {
    let bound = retry_while_held(
        || bind_to(claimed),
        |holder| matches!(holder, Ok(ClaimHolder::Process(process)) if is_ending(*process)),
    );
    match bound {
        Ok(socket) => Ok(Some(socket)),
        Err(Ok(ClaimHolder::Process(process))) if process == getpid() => {
            Err(Failure::request(refusal(THIS_PROCESS)))
        }
        Err(Ok(ClaimHolder::Process(process))) => {
            let place = place_of(claimed).map_or_else(String::new, |place| format!(" ({place})"));
            Err(Failure::request(refusal(&format!("process {process}{place}"))))
        }
        Err(Ok(ClaimHolder::Unknown)) => Err(Failure::request(refusal("another process"))),
        Err(Ok(ClaimHolder::OtherUser)) => {
            warn!(
                "`{name}`: a process of another user holds its claim; make sure that only one process uses it for writing"
            );
            Ok(None)
        }
        Err(Err(error)) => {
            warn!(
                "`{name}`: cannot be claimed ({error}); make sure that no other process uses it for writing"
            );
            Ok(None)
        }
    }
}

/// Whether a process that was killed still holds what the kernel has not released yet.
fn is_ending(process: Pid) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{process}/stat")) else { return true };
    // The name of the program, in parentheses, may have any character (proc_pid_stat(5)).
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let mut fields = fields.split_whitespace();
    let has_ended = fields.next().is_none_or(|state| ["Z", "X"].contains(&state));
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u64>().ok()).unwrap_or_default();
    has_ended || flags & PF_EXITING != 0
}

fn bind_to(name: &str) -> Result<OwnedFd, Result<ClaimHolder, Errno>> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(Err)?;
    // The holder may end between the two attempts.
    for _ in 0..MAX_ATTEMPTS {
        let socket = new_socket().map_err(Err)?;
        match bind(&socket, &address) {
            Ok(()) => return listen(&socket, BACKLOG).map(|()| socket).map_err(Err),
            Err(Errno::ADDRINUSE) => {}
            Err(error) => return Err(Err(error)),
        }
        let asking = new_socket().map_err(Err)?;
        match connect(&asking, &address) {
            Ok(()) => {
                let peer = socket_peercred(&asking).map_err(Err)?;
                let is_trusted = peer.uid == getuid() || peer.uid.is_root();
                return Err(Ok(if is_trusted {
                    ClaimHolder::Process(peer.pid)
                } else {
                    ClaimHolder::OtherUser
                }));
            }
            // The holder has not called listen yet, or has just ended.
            Err(Errno::CONNREFUSED) => std::thread::yield_now(),
            // The accept queue is full of earlier attempts, as after days of failed restarts.
            Err(Errno::AGAIN) => return Err(Ok(ClaimHolder::Unknown)),
            Err(_) => return Err(Ok(ClaimHolder::OtherUser)),
        }
    }
    Err(Err(Errno::ADDRINUSE))
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

const THIS_PROCESS: &str = "this process";
/// Length of the longest abstract name of a socket, in bytes.
const MAX_NAME: usize = 107;
/// The process is being dismantled (`linux/sched.h`).
const PF_EXITING: u64 = 4;
/// Length of the accept queue. Processes that query the holder connect and close; the connections
/// are never accepted.
const BACKLOG: i32 = 4096;
const MAX_ATTEMPTS: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::part::Part;
    use blockmux_volume::spec::SliceSpec;

    fn key(text: &str) -> DataPart {
        DataPart { key: format!("{text} {}", getpid()), part: Part::WHOLE, is_exact: true }
    }

    fn slice(text: &str, offset: u64, len: u64) -> DataPart {
        DataPart { part: Part::WHOLE.below_slice(SliceSpec { offset, len: Some(len) }), ..key(text) }
    }

    fn export(name: &str, uuid_of: &str, data: &[DataPart]) -> Result<Claim, Failure> {
        let uuid = VolumeUuid::of_texts(&[uuid_of, &getpid().to_string()]);
        Claim::take(name, ClaimPurpose::Export(uuid), data)
    }

    #[test]
    fn data_is_claimed_once_until_the_claim_is_dropped() {
        let (a, b) = ([key("a")], [key("a"), key("b")]);
        let first = export("x", "x", &a).unwrap();
        let refused = export("y", "y", &b).map(|_| ()).unwrap_err().to_string();
        assert!(refused.starts_with("`y`: this process already uses the same data (a "), "{refused}");
        drop(first);
        let _second = export("y", "y", &b).unwrap();
        assert!(export("x", "x", &a).is_err());
    }

    #[test]
    fn slices_of_the_same_data_are_claimed_unless_they_overlap() {
        let take = |uuid_of: &str, data: DataPart| export("x", uuid_of, &[data]);
        let first = take("slice 1", slice("c", 0, 100)).unwrap();
        let second = take("slice 2", slice("c", 100, 100)).unwrap();
        for overlapping in [slice("c", 99, 1), slice("c", 150, 100), key("c")] {
            let refused = take("slice 3", overlapping).map(|_| ()).unwrap_err().to_string();
            assert!(refused.starts_with("`x`: this process already uses the same data"), "{refused}");
        }
        drop(first);
        let _third = take("slice 3", slice("c", 0, 50)).unwrap();
        drop(second);
        let _fourth = take("slice 4", slice("c", 50, 1000)).unwrap();
    }

    #[test]
    fn a_uuid_is_claimed_once() {
        let _first = export("x", "one", &[]).unwrap();
        let refused = export("y", "one", &[]).map(|_| ()).unwrap_err().to_string();
        assert!(refused.contains("already exports a volume with the UUID"), "{refused}");
        assert!(export("y", "two", &[]).is_ok());
    }

    #[test]
    fn a_claim_holds_after_thousands_of_attempts() {
        let _first = export("x", "often", &[]).unwrap();
        let refusals: Vec<_> = (0..=BACKLOG + 1)
            .map(|_| export("y", "often", &[]).map(|_| ()).unwrap_err().to_string())
            .collect();
        assert!(refusals[0].starts_with("`y`: this process already exports"), "{}", refusals[0]);
        let last = refusals.last().unwrap();
        assert!(last.starts_with("`y`: another process already exports"), "{last}");
    }

    #[test]
    fn an_attachment_is_refused_beside_an_export_and_says_what_to_do() {
        let data = [key("attached")];
        let _export = export("x", "attached", &data).unwrap();
        let refused = Claim::take("nbd://h/x", ClaimPurpose::Attachment, &data).map(|_| ()).unwrap_err();
        let refused = refused.to_string();
        assert!(refused.starts_with("nbd://h/x: this process already uses the same data"), "{refused}");
        assert!(refused.contains("add --read-only, or --shared"), "{refused}");
    }

    #[test]
    fn the_name_of_a_socket_says_where_claimed_data_is_attached() {
        let data = key("placed");
        let mut claim = Claim::take("x", ClaimPurpose::Attachment, std::slice::from_ref(&data)).unwrap();
        let place = || place_of(&socket_name(&data.key));
        assert_eq!(place(), None);
        claim.announce(Path::new("/run/my disks/@a"));
        assert_eq!(place().as_deref(), Some("/run/my disks/@a"));
        drop(claim);
        assert_eq!(place(), None);
        let mut claim = Claim::take("x", ClaimPurpose::Attachment, std::slice::from_ref(&data)).unwrap();
        claim.announce(Path::new(&format!("/{}", "ü".repeat(100))));
        assert!(place().unwrap().starts_with("/üü"), "as much of it as a name has");
    }

    #[test]
    fn a_process_that_has_ended_and_is_not_reaped_is_ending_and_this_one_is_not() {
        assert!(!is_ending(getpid()));
        let mut child =
            std::process::Command::new("true").stdout(std::process::Stdio::piped()).spawn().unwrap();
        // Its end of the pipe is closed while it ends.
        std::io::copy(&mut child.stdout.take().unwrap(), &mut std::io::sink()).unwrap();
        assert!(is_ending(Pid::from_child(&child)));
        child.wait().unwrap();
    }
}
