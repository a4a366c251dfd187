//! Places of the clients of an endpoint.
//!
//! A client that has proved nothing may be replaced: when all places are taken, a new client
//! replaces the oldest unproved one of the address with the most of them (decision 31). A client
//! proves something with its first request whose credentials are accepted.

use blockmux_volume::peer_network;
use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// The places of an endpoint. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Places(Arc<PlacesState>);

#[derive(Default)]
struct PlacesState {
    list: Mutex<PlaceList>,
    /// Notified when a place is free again.
    freed: Notify,
}

#[derive(Default)]
struct PlaceList {
    last_number: u64,
    /// The numbers of the clients that have a place.
    taken: BTreeSet<u64>,
    /// The clients that have proved nothing, oldest first.
    unproved: Vec<Unproved>,
}

struct Unproved {
    number: u64,
    network: Option<IpAddr>,
    replaced: Arc<Notify>,
}

/// The place of a connected client; free once it is dropped.
pub(super) struct Place {
    places: Places,
    number: u64,
    replaced: Arc<Notify>,
}

impl Places {
    /// Waits until another client may connect.
    pub(super) async fn available(&self) {
        loop {
            let freed = self.0.freed.notified();
            if self.list().is_available() {
                return;
            }
            freed.await;
        }
    }

    /// The place of a new client, for which another one may lose its place. If all others have
    /// proved themselves since [`Places::available`] returned, there is one place more.
    pub(super) fn enter(&self, address: Option<IpAddr>) -> Place {
        let mut list = self.list();
        if list.taken.len() >= MAX_CLIENTS {
            list.replace_one();
        }
        list.last_number += 1;
        let (number, replaced) = (list.last_number, Arc::new(Notify::new()));
        let network = address.map(peer_network);
        list.taken.insert(number);
        list.unproved.push(Unproved { number, network, replaced: replaced.clone() });
        drop(list);
        Place { places: self.clone(), number, replaced }
    }

    fn list(&self) -> MutexGuard<'_, PlaceList> {
        self.0.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PlaceList {
    fn is_available(&self) -> bool {
        self.taken.len() < MAX_CLIENTS || !self.unproved.is_empty()
    }

    /// Takes the place of the oldest unproved client of the network with the most of them.
    fn replace_one(&mut self) {
        let mut counts: HashMap<Option<IpAddr>, usize> = HashMap::new();
        self.unproved.iter().for_each(|client| *counts.entry(client.network).or_default() += 1);
        let most = counts.values().copied().max();
        let is_of_most = |client: &Unproved| counts.get(&client.network).copied() == most;
        if let Some(at) = self.unproved.iter().position(is_of_most) {
            let client = self.unproved.remove(at);
            self.taken.remove(&client.number);
            client.replaced.notify_one();
        }
    }
}

impl Place {
    /// The client has proved itself, so that it keeps its place.
    pub(super) fn prove(&self) {
        self.places.list().unproved.retain(|client| client.number != self.number);
    }

    /// Waits until the place was given to another client.
    pub(super) async fn replaced(&self) {
        self.replaced.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut list = self.places.list();
        list.taken.remove(&self.number);
        list.unproved.retain(|client| client.number != self.number);
        drop(list);
        self.places.0.freed.notify_one();
    }
}

/// Maximum number of connected clients of an endpoint; if all have proved themselves, others wait.
const MAX_CLIENTS: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::runtime::Builder;
    use tokio::time::{Duration, timeout};

    fn address(last: u8) -> Option<IpAddr> {
        Some([192, 0, 2, last].into())
    }

    /// Whether the place was given to another client.
    async fn is_replaced(place: &Place) -> bool {
        timeout(Duration::ZERO, place.replaced()).await.is_ok()
    }

    fn run(test: impl Future<Output = ()>) {
        Builder::new_current_thread().enable_time().build().unwrap().block_on(test);
    }

    #[test]
    fn clients_that_prove_nothing_make_way_for_new_ones() {
        run(async {
            let places = Places::default();
            let owner = places.enter(address(1));
            owner.prove();
            let honest = places.enter(address(2));
            let flood: Vec<_> = (2..MAX_CLIENTS).map(|_| places.enter(address(3))).collect();
            assert!(!is_replaced(&flood[0]).await);
            places.available().await;
            let late = places.enter(address(4));
            assert!(is_replaced(&flood[0]).await && !is_replaced(&flood[1]).await);
            late.prove();
            for _ in 0..MAX_CLIENTS {
                places.enter(address(3));
            }
            assert!(!is_replaced(&owner).await && !is_replaced(&honest).await && !is_replaced(&late).await);
        });
    }

    #[test]
    fn a_client_waits_while_all_others_have_proved_themselves() {
        run(async {
            let places = Places::default();
            let mut all: Vec<_> = (0..MAX_CLIENTS).map(|_| places.enter(address(1))).collect();
            all.iter().for_each(Place::prove);
            assert!(timeout(Duration::ZERO, places.available()).await.is_err());
            all.pop();
            places.available().await;
        });
    }
}
