//! What tells the commands of one queue to a disk from those of every other on this machine: the
//! upper byte of their tags.
//!
//! An answer goes to a station, and the kernel gives it to every socket there whose filter takes
//! that byte. Two queues that had it in common would take each other's answers, with the data of
//! other blocks. So a queue has the byte for a disk to itself: it holds a socket in the abstract
//! name space (`unix(7)`) under a name made of both, which nobody else can have meanwhile, and
//! which the system gives back however the program ends. That name space is the network's, as
//! interfaces are.
//!
//! Linux's driver leaves the upper bit of its tags clear, so that bytes with that bit come first.
//!
//! The rest of a tag counts, from anywhere on. A target remembers for a while what this station has
//! written under which tag; a queue that began where the one before it began would have its writes
//! taken for repetitions.

use crate::sys;
use blockmux_proto::aoe::AoeAddress;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// A queue's part of tags, its own for as long as this is kept.
#[derive(Debug)]
pub struct QueueId {
    /// The upper byte.
    pub id: u8,
    /// Where the rest begins to count.
    pub first: u32,
    /// What others cannot bind.
    _claim: Option<UnixDatagram>,
}

impl QueueId {
    /// One that no other queue to that disk has.
    ///
    /// # Errors
    /// `AddrInUse` if 256 have one; else if the system has no socket.
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

    /// That of the only queue at its station.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) const ALONE: QueueId = QueueId { id: 0x80, first: 0, _claim: None };

    /// One that others may have, too: for who asks no more than what disks are like.
    pub(crate) fn any() -> QueueId {
        random()
    }
}

fn random() -> QueueId {
    // A system that has no random numbers yet has hardly any other queue.
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
    fn no_two_queues_to_a_disk_have_the_same_id_and_an_id_that_is_given_up_is_had_again() {
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
    fn queues_begin_to_count_anywhere() {
        let firsts: HashSet<u32> = (0..100).map(|_| QueueId::any().first).collect();
        assert!(firsts.len() > 90);
    }
}
