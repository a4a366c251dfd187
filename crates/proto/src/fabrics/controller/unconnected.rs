//! Connections without a queue, or whose host is not authenticated yet.
//!
//! Their number and their lifetime are bounded. When there are too many, a new one replaces the
//! oldest from the address with the most of them. So a host that opens connections without end
//! displaces its own, and hosts elsewhere keep the full time to connect.

use crate::nvme::HangUp;
use blockmux_volume::peer_network;
use core::net::IpAddr;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The unconnected connections of a node.
#[derive(Default)]
pub(crate) struct UnconnectedQueues(Mutex<UnconnectedList>);

#[derive(Default)]
struct UnconnectedList {
    /// The unconnected connections, oldest first.
    waiting: VecDeque<UnconnectedQueue>,
    next: u64,
}

struct UnconnectedQueue {
    number: u64,
    /// `None` if the peer has no IP address.
    peer: Option<IpAddr>,
    hang_up: HangUp,
}

/// Permit of a connection to connect a queue. It is held until the queue is connected and its host
/// authenticated.
pub struct ConnectPermit {
    all: Arc<UnconnectedQueues>,
    number: u64,
    /// The address of the connection's peer; `None` if it has no IP address.
    pub(super) peer: Option<IpAddr>,
}

impl UnconnectedQueues {
    /// Registers a connection from address `peer`, which `hang_up` closes. Returns its permit, and
    /// whether another connection was closed because there were too many.
    pub(crate) fn begin(
        self: &Arc<UnconnectedQueues>,
        peer: Option<IpAddr>,
        hang_up: HangUp,
    ) -> (ConnectPermit, bool) {
        let mut all = self.all();
        let is_crowded = all.waiting.len() >= MAX_UNCONNECTED;
        let cut = if is_crowded { all.evict_oldest() } else { None };
        let number = all.next;
        all.next = number.wrapping_add(1);
        all.waiting.push_back(UnconnectedQueue { number, peer, hang_up });
        drop(all);
        if let Some(cut) = cut {
            cut();
        }
        (ConnectPermit { all: self.clone(), number, peer }, is_crowded)
    }

    fn all(&self) -> MutexGuard<'_, UnconnectedList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnconnectedList {
    /// Removes the oldest connection from the network with the most; returns what closes it.
    fn evict_oldest(&mut self) -> Option<HangUp> {
        let mut counts: HashMap<Option<IpAddr>, usize> = HashMap::new();
        for waiting in &self.waiting {
            let count = counts.entry(waiting.peer.map(peer_network)).or_default();
            *count = count.saturating_add(1);
        }
        let most = counts.values().copied().max()?;
        let is_of_most =
            |waiting: &UnconnectedQueue| counts.get(&waiting.peer.map(peer_network)) == Some(&most);
        let at = self.waiting.iter().position(is_of_most)?;
        self.waiting.remove(at).map(|waiting| waiting.hang_up)
    }
}

impl Drop for ConnectPermit {
    fn drop(&mut self) {
        let mut all = self.all.all();
        // Sorted by number.
        if let Ok(at) = all.waiting.binary_search_by_key(&self.number, |waiting| waiting.number) {
            all.waiting.remove(at);
        }
    }
}

/// Most connections of a node without a queue or without authentication.
pub const MAX_UNCONNECTED: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_peer_with_too_many_connections_loses_its_own_oldest_ones() {
        let (all, cuts) = (Arc::<UnconnectedQueues>::default(), Arc::new(AtomicUsize::new(usize::MAX)));
        let begin = |peer: u8, name: usize| {
            let cuts = cuts.clone();
            let hang_up: HangUp = Arc::new(move || cuts.store(name, Ordering::Relaxed));
            all.begin(Some([192, 0, 2, peer].into()), hang_up)
        };
        let (honest, _) = begin(1, 7777);
        let flood: Vec<_> = (1..MAX_UNCONNECTED).map(|name| begin(2, name)).collect();
        assert!(flood.iter().all(|(_, is_crowded)| !is_crowded));
        let more: Vec<_> =
            (0..3).map(|name| (begin(2, 5000 + name).1, cuts.load(Ordering::Relaxed))).collect();
        // Each permit is dropped immediately.
        assert_eq!(more, [(true, 1), (false, 1), (false, 1)]);
        let (late, is_crowded) = begin(3, 8888);
        assert!(!is_crowded);
        let more: Vec<_> = (0..5).map(|name| begin(2, 6000 + name)).collect();
        assert_eq!(cuts.load(Ordering::Relaxed), 6, "two to five, and the sixth; the honest ones are there");
        drop((flood, more));
        assert_eq!(all.all().waiting.len(), 2);
        drop((honest, late));
        assert!(all.all().waiting.is_empty());
    }
}
