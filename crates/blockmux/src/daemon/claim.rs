//! Prevents two processes of a machine from exporting the same data, because reservations and locks
//! are not shared between processes.
//!
//! A claim is a listening Unix socket in the abstract namespace. The kernel releases it when the
//! process ends, processes of all users see it, and it needs no directory. It is not visible in
//! other network namespaces.

use crate::data::part::DataPart;
use crate::failure::Failure;
use blockmux_proto::names::volume_uuid::VolumeUuid;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::{Pid, getpid, getuid};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tracing::warn;

/// The exclusive right to export some data and a UUID; dropping it releases them.
pub(super) struct Claim {
    _uuid: Option<OwnedFd>,
    _data: Vec<Arc<DataClaim>>,
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
    /// Claims the UUID of the volume `name` and the data on other servers that it uses. Files and
    /// block devices have their own locks.
    ///
    /// # Errors
    /// If a process of this user or of root has claimed one of them.
    pub(super) fn take(name: &str, uuid: VolumeUuid, remote: &[DataPart]) -> Result<Claim, Failure> {
        let data = remote.iter().map(|data| claim_data(name, data)).collect::<Result<_, _>>()?;
        let of_uuid = claim(name, &format!("blockmux volume {uuid}"), |process| {
            format!(
                "`{name}`: {process} already exports a volume with the UUID {uuid}, and hosts would treat the two as \
                 one disk; set another `uuid` in the [[volume]] of a config file, or `shared = true` if they are one disk"
            )
        })?;
        Ok(Claim { _uuid: of_uuid, _data: data })
    }
}

fn claim_data(name: &str, data: &DataPart) -> Result<Arc<DataClaim>, Failure> {
    let text = &data.key;
    let refusal = |process: &str| {
        format!(
            "`{name}`: {process} already exports the same data ({text}), and the two would share neither \
             reservations nor locks; stop that export, export the data read-only, or set `shared = true` in the \
             [[volume]] of a config file"
        )
    };
    let mut claimed = CLAIMED.lock().unwrap_or_else(PoisonError::into_inner);
    claimed.retain(|own| own.strong_count() > 0);
    let same: Vec<_> = claimed.iter().filter_map(Weak::upgrade).filter(|own| own.data.key == *text).collect();
    if same.iter().any(|own| own.data.overlaps(data)) {
        return Err(Failure::request(refusal("this daemon")));
    }
    let socket = match same.first() {
        Some(own) => own.socket.clone(),
        None => {
            let id = VolumeUuid::of_texts(&["claim", text]);
            claim(name, &format!("blockmux data {id}"), refusal)?.map(Arc::new)
        }
    };
    let own = Arc::new(DataClaim { data: data.clone(), socket });
    claimed.push(Arc::downgrade(&own));
    Ok(own)
}

fn claim(
    name: &str,
    claimed: &str,
    refusal: impl FnOnce(&str) -> String,
) -> Result<Option<OwnedFd>, Failure> {
    match bind_to(claimed) {
        Ok(Ok(socket)) => Ok(Some(socket)),
        Ok(Err(ClaimHolder::Process(process))) if process == getpid() => {
            Err(Failure::request(refusal("this daemon")))
        }
        Ok(Err(ClaimHolder::Process(process))) => {
            Err(Failure::request(refusal(&format!("process {process}"))))
        }
        Ok(Err(ClaimHolder::Unknown)) => Err(Failure::request(refusal("another process"))),
        Ok(Err(ClaimHolder::OtherUser)) => {
            warn!(
                "`{name}`: a process of another user holds its claim; make sure that only one process exports it"
            );
            Ok(None)
        }
        Err(error) => {
            warn!("`{name}`: cannot be claimed ({error}); make sure that no other process exports it");
            Ok(None)
        }
    }
}

fn bind_to(name: &str) -> Result<Result<OwnedFd, ClaimHolder>, Errno> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let new = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
    };
    // The holder may end between the two attempts.
    for _ in 0..MAX_ATTEMPTS {
        let socket = new()?;
        match bind(&socket, &address) {
            Ok(()) => {
                listen(&socket, BACKLOG)?;
                return Ok(Ok(socket));
            }
            Err(Errno::ADDRINUSE) => {}
            Err(error) => return Err(error),
        }
        let asking = new()?;
        match connect(&asking, &address) {
            Ok(()) => {
                let peer = socket_peercred(&asking)?;
                let is_trusted = peer.uid == getuid() || peer.uid.is_root();
                return Ok(Err(if is_trusted {
                    ClaimHolder::Process(peer.pid)
                } else {
                    ClaimHolder::OtherUser
                }));
            }
            // The holder has not called listen yet, or has just ended.
            Err(Errno::CONNREFUSED) => std::thread::yield_now(),
            // The accept queue is full of earlier attempts, as after days of failed restarts.
            Err(Errno::AGAIN) => return Ok(Err(ClaimHolder::Unknown)),
            Err(_) => return Ok(Err(ClaimHolder::OtherUser)),
        }
    }
    Err(Errno::ADDRINUSE)
}

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

    fn uuid(text: &str) -> VolumeUuid {
        VolumeUuid::of_texts(&[text, &getpid().to_string()])
    }

    #[test]
    fn data_is_claimed_once_until_the_claim_is_dropped() {
        let (a, b) = ([key("a")], [key("a"), key("b")]);
        let first = Claim::take("x", uuid("x"), &a).unwrap();
        let refused = Claim::take("y", uuid("y"), &b).map(|_| ()).unwrap_err().to_string();
        assert!(refused.starts_with("`y`: this daemon already exports the same data (a "), "{refused}");
        drop(first);
        let _second = Claim::take("y", uuid("y"), &b).unwrap();
        assert!(Claim::take("x", uuid("x"), &a).is_err());
    }

    #[test]
    fn slices_of_the_same_data_are_claimed_unless_they_overlap() {
        let take = |uuid_of: &str, data: DataPart| Claim::take("x", uuid(uuid_of), &[data]);
        let first = take("slice 1", slice("c", 0, 100)).unwrap();
        let second = take("slice 2", slice("c", 100, 100)).unwrap();
        for overlapping in [slice("c", 99, 1), slice("c", 150, 100), key("c")] {
            let refused = take("slice 3", overlapping).map(|_| ()).unwrap_err().to_string();
            assert!(refused.starts_with("`x`: this daemon already exports the same data"), "{refused}");
        }
        drop(first);
        let _third = take("slice 3", slice("c", 0, 50)).unwrap();
        drop(second);
        let _fourth = take("slice 4", slice("c", 50, 1000)).unwrap();
    }

    #[test]
    fn a_uuid_is_claimed_once() {
        let _first = Claim::take("x", uuid("one"), &[]).unwrap();
        let refused = Claim::take("y", uuid("one"), &[]).map(|_| ()).unwrap_err().to_string();
        assert!(refused.contains("already exports a volume with the UUID"), "{refused}");
        assert!(Claim::take("y", uuid("two"), &[]).is_ok());
    }

    #[test]
    fn a_claim_holds_after_thousands_of_attempts() {
        let _first = Claim::take("x", uuid("often"), &[]).unwrap();
        let refusals: Vec<_> = (0..=BACKLOG + 1)
            .map(|_| Claim::take("y", uuid("often"), &[]).map(|_| ()).unwrap_err().to_string())
            .collect();
        assert!(refusals[0].starts_with("`y`: this daemon already exports"), "{}", refusals[0]);
        let last = refusals.last().unwrap();
        assert!(last.starts_with("`y`: another process already exports"), "{last}");
    }
}
