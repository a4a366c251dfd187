//! Connections that have no queue yet, or whose host has not proved who it is.
//!
//! There are only so many of them, and none is held for long. One more takes the place of another:
//! the oldest of those from the address that has the most. So who opens connections without end
//! loses its own, and who comes from elsewhere and knows what it wants has all the time that it
//! needs.

use crate::nvme::HangUp;
use core::net::IpAddr;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Those of a node.
#[derive(Default)]
pub(crate) struct UnconnectedQueues(Mutex<UnconnectedList>);

#[derive(Default)]
struct UnconnectedList {
    /// Oldest first.
    waiting: VecDeque<UnconnectedQueue>,
    next: u64,
}

struct UnconnectedQueue {
    number: u64,
    /// `None`: not by an address.
    peer: Option<IpAddr>,
    hang_up: HangUp,
}

/// A connection's leave to connect a queue, held until it has and its host has proved who it is.
pub struct ConnectPermit {
    all: Arc<UnconnectedQueues>,
    number: u64,
}

impl UnconnectedQueues {
    /// Leave for one more connection, from that address and cut by that; whether another one lost
    /// its own for it.
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
        (ConnectPermit { all: self.clone(), number }, is_crowded)
    }

    fn all(&self) -> MutexGuard<'_, UnconnectedList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnconnectedList {
    /// Takes the oldest from the address with the most: what cuts it.
    fn evict_oldest(&mut self) -> Option<HangUp> {
        let mut counts: HashMap<Option<IpAddr>, usize> = HashMap::new();
        for waiting in &self.waiting {
            let count = counts.entry(waiting.peer).or_default();
            *count = count.saturating_add(1);
        }
        let most = counts.values().copied().max()?;
        let is_of_most = |waiting: &UnconnectedQueue| counts.get(&waiting.peer) == Some(&most);
        let at = self.waiting.iter().position(is_of_most)?;
        self.waiting.remove(at).map(|waiting| waiting.hang_up)
    }
}

impl Drop for ConnectPermit {
    fn drop(&mut self) {
        let mut all = self.all.all();
        // They are in order.
        if let Ok(at) = all.waiting.binary_search_by_key(&self.number, |waiting| waiting.number) {
            all.waiting.remove(at);
        }
    }
}

/// Connections without a queue, or a proof, at a time.
pub const MAX_UNCONNECTED: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn who_crowds_others_loses_its_own_oldest_connections() {
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
        // Each of them is gone as soon as it is dropped here.
        assert_eq!(more, [(true, 1), (false, 1), (false, 1)]);
        let (late, is_crowded) = begin(3, 8888);
        assert!(!is_crowded);
        let kept: Vec<_> = (0..5).map(|name| begin(2, 6000 + name)).collect();
        assert_eq!(cuts.load(Ordering::Relaxed), 6, "two to five, and the sixth; the honest ones are there");
        drop((flood, kept));
        assert_eq!(all.all().waiting.len(), 2);
        drop((honest, late));
        assert!(all.all().waiting.is_empty());
    }
}
