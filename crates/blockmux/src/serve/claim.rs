//! Who serves what on this machine: two processes that serve the same data share neither
//! reservations nor locks.
//!
//! A claim is a listening Unix socket in the abstract namespace, which the system takes back when
//! the process ends, which processes of all users see, and which needs no directory. A network
//! namespace of its own hides it.

use crate::data_part::DataPart;
use crate::failure::Failure;
use blockmux_proto::volume_uuid::VolumeUuid;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::{Pid, getpid, getuid};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tracing::warn;

/// Data and a UUID that no other process of this machine may serve meanwhile.
pub(super) struct Claim {
    _uuid: Option<OwnedFd>,
    _data: Vec<Arc<DataClaim>>,
}

/// A claimed part of data on another server.
struct DataClaim {
    data: DataPart,
    /// Claims all of the data for this process: slices that do not overlap share it.
    socket: Option<Arc<OwnedFd>>,
}

/// The data that this process has claimed; at most one for each part of a volume.
static CLAIMED: Mutex<Vec<Weak<DataClaim>>> = Mutex::new(Vec::new());

/// What a claim is refused for.
enum Held {
    /// Another process has it, or this one.
    By(Pid),
    /// A user's process who has no word in this.
    ByStranger,
    /// One that so many have asked that it cannot be asked who it is: it is more likely ours than a
    /// stranger's.
    BySomebody,
}

impl Claim {
    /// Claims the data on other servers that a volume is made of, and its UUID. Files and block
    /// devices have locks of their own.
    ///
    /// # Errors
    /// If a process of this user or of root has claimed one of them.
    pub(super) fn take(name: &str, uuid: VolumeUuid, remote: &[DataPart]) -> Result<Claim, Failure> {
        let data = remote.iter().map(|data| claim_data(name, data)).collect::<Result<_, _>>()?;
        let of_uuid = claim(name, &format!("blockmux volume {uuid}"), |process| {
            format!(
                "`{name}`: {process} already serves a volume with the UUID {uuid}, and hosts would take the two for one \
                 disk; write another uuid in the [[volume]] of a config file, or shared = true if they are one"
            )
        })?;
        Ok(Claim { _uuid: of_uuid, _data: data })
    }
}

fn claim_data(name: &str, data: &DataPart) -> Result<Arc<DataClaim>, Failure> {
    let text = &data.text;
    let refusal = |process: &str| {
        format!(
            "`{name}`: {process} already serves what it is made of ({text}), and the two would share neither \
             reservations nor locks; stop that one, serve it read-only, or write shared = true in the \
             [[volume]] of a config file"
        )
    };
    let mut claimed = CLAIMED.lock().unwrap_or_else(PoisonError::into_inner);
    claimed.retain(|own| own.strong_count() > 0);
    let same: Vec<_> =
        claimed.iter().filter_map(Weak::upgrade).filter(|own| own.data.text == *text).collect();
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
        Ok(Err(Held::By(process))) if process == getpid() => Err(Failure::request(refusal("this daemon"))),
        Ok(Err(Held::By(process))) => Err(Failure::request(refusal(&format!("process {process}")))),
        Ok(Err(Held::BySomebody)) => Err(Failure::request(refusal("another process"))),
        Ok(Err(Held::ByStranger)) => {
            warn!(
                "`{name}`: another user's process keeps it from being claimed; see that only one serves it"
            );
            Ok(None)
        }
        Err(error) => {
            warn!("`{name}`: cannot be claimed ({error}); see that no other process serves it");
            Ok(None)
        }
    }
}

fn bind_to(name: &str) -> Result<Result<OwnedFd, Held>, Errno> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let new = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
    };
    // The holder may end between the two attempts.
    for _ in 0..MOST_ATTEMPTS {
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
                let has_a_word = peer.uid == getuid() || peer.uid.is_root();
                return Ok(Err(if has_a_word { Held::By(peer.pid) } else { Held::ByStranger }));
            }
            // Between its bind and its listen, or gone.
            Err(Errno::CONNREFUSED) => std::thread::yield_now(),
            // Each try of ours is one that asks: a daemon that is restarted for days gets here.
            Err(Errno::AGAIN) => return Ok(Err(Held::BySomebody)),
            Err(_) => return Ok(Err(Held::ByStranger)),
        }
    }
    Err(Errno::ADDRINUSE)
}

/// Those who ask connect and leave; nobody accepts them.
const BACKLOG: i32 = 4096;
const MOST_ATTEMPTS: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data_part::Part;
    use blockmux_volume::spec::SliceSpec;

    fn key(text: &str) -> DataPart {
        DataPart { text: format!("{text} {}", getpid()), part: Part::WHOLE }
    }

    fn slice(text: &str, offset: u64, len: u64) -> DataPart {
        DataPart { part: Part::WHOLE.below_slice(SliceSpec { offset, len: Some(len) }), ..key(text) }
    }

    fn uuid(text: &str) -> VolumeUuid {
        VolumeUuid::of_texts(&[text, &getpid().to_string()])
    }

    #[test]
    fn data_are_claimed_once_until_the_claim_is_dropped() {
        let (a, b) = ([key("a")], [key("a"), key("b")]);
        let first = Claim::take("x", uuid("x"), &a).unwrap();
        let refused = Claim::take("y", uuid("y"), &b).map(|_| ()).unwrap_err().to_string();
        assert!(refused.starts_with("`y`: this daemon already serves what it is made of (a "), "{refused}");
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
            assert!(refused.starts_with("`x`: this daemon already serves what it is made of"), "{refused}");
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
        assert!(refused.contains("already serves a volume with the UUID"), "{refused}");
        assert!(Claim::take("y", uuid("two"), &[]).is_ok());
    }

    #[test]
    fn who_was_asked_thousands_of_times_still_has_its_claim() {
        let _first = Claim::take("x", uuid("often"), &[]).unwrap();
        let refusals: Vec<_> = (0..=BACKLOG + 1)
            .map(|_| Claim::take("y", uuid("often"), &[]).map(|_| ()).unwrap_err().to_string())
            .collect();
        assert!(refusals[0].starts_with("`y`: this daemon already serves"), "{}", refusals[0]);
        let last = refusals.last().unwrap();
        assert!(last.starts_with("`y`: another process already serves"), "{last}");
    }
}
