//! Claims the upper byte of AoE tags, which separates the commands of one queue to a disk from
//! those of all other queues on this machine.
//!
//! The kernel delivers a reply to every socket at the station whose filter matches that byte. Two
//! queues with the same byte would accept each other's replies, with data of other blocks. So a
//! queue claims the byte for a disk by binding a socket in the abstract name space (`unix(7)`) to a
//! name that contains both. The kernel releases the name however the program ends. The name space
//! belongs to the network namespace, as interfaces do.
//!
//! Linux's driver leaves the upper bit of its tags clear, so bytes with that bit are tried first.
//!
//! The rest of the tag counts from a random start: a target remembers recent writes by station and
//! tag, and would mistake writes of a restarted queue with the same tags for retransmits.

use crate::sys;
use blockmux_proto::aoe::AoeAddress;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// A queue's range of tags, claimed until this is dropped.
#[derive(Debug)]
pub struct QueueId {
    /// Upper byte of the tags.
    pub id: u8,
    /// First value of the rest of the tag.
    pub first: u32,
    /// The bound socket.
    _claim: Option<UnixDatagram>,
}

impl QueueId {
    /// Claims a byte that no other queue to that disk has.
    ///
    /// # Errors
    /// `AddrInUse` if all 256 are claimed; any other error if no socket can be made.
    pub fn claim(disk: AoeAddress) -> io::Result<QueueId> {
        let start = random();
        let upper_half = (0..=0x7f).map(|nth: u8| start.id.wrapping_add(nth) | 0x80);
        let lower_half = (0..=0x7f).map(|nth: u8| start.id.wrapping_add(nth) & 0x7f);
        for id in upper_half.chain(lower_half) {
            let name = SocketAddr::from_abstract_name(format!("blockmux-aoe-{disk}-{id:02x}"))?;
            match UnixDatagram::bind_addr(&name) {
                Ok(socket) => return Ok(QueueId { id, _claim: Some(socket), ..start }),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    }

    /// The id of a queue that is the only one at its station.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) const ALONE: QueueId = QueueId { id: 0x80, first: 0, _claim: None };

    /// An id that is not claimed, for queries of a disk's description.
    pub(crate) fn any() -> QueueId {
        random()
    }
}

fn random() -> QueueId {
    // Random numbers are missing only early at boot, when hardly any other queue exists.
    let [id, first @ ..]: [u8; 5] = sys::random_bytes().unwrap_or_default();
    QueueId { id, first: u32::from_le_bytes(first), _claim: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const DISK: AoeAddress = AoeAddress { shelf: 65_000, slot: 250 };
    const OTHER: AoeAddress = AoeAddress { shelf: 65_000, slot: 251 };

    #[test]
    fn queues_to_a_disk_have_unique_ids_and_a_released_id_is_reused() {
        let mut claimed: Vec<QueueId> = (0..256).map(|_| QueueId::claim(DISK).unwrap()).collect();
        let ids: HashSet<u8> = claimed.iter().map(|queue| queue.id).collect();
        assert_eq!(ids.len(), 256);
        assert!(claimed[..128].iter().all(|queue| queue.id & 0x80 != 0), "none that Linux's driver has");
        assert_eq!(QueueId::claim(DISK).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(QueueId::claim(OTHER).is_ok(), "of another disk");
        let id = claimed.remove(7).id;
        assert_eq!(QueueId::claim(DISK).unwrap().id, id);
    }

    #[test]
    fn queues_start_at_random_tags() {
        let firsts: HashSet<u32> = (0..100).map(|_| QueueId::any().first).collect();
        assert!(firsts.len() > 90);
    }
}
