//! The client of the cluster by which this process opens the images that a gateway group hands out.

use blockmux_rbd::cluster::Cluster;
use std::sync::{Arc, Mutex, PoisonError};

/// The client of a group's member, of which there is one at a time: the cluster fences a client
/// with all of its images, and the member that joins again does so with another one. All images of
/// the group share it.
#[derive(Default)]
pub struct MemberClient(Mutex<Option<Arc<Cluster>>>);

impl MemberClient {
    /// Images are opened by this client from now on.
    pub fn set(&self, client: Arc<Cluster>) {
        let before = self.0.lock().unwrap_or_else(PoisonError::into_inner).replace(client);
        // Without the lock, because the last user disconnects.
        drop(before);
    }

    /// Images are opened by no client from now on. Returns the present one; its last user
    /// disconnects, which may block.
    pub fn take(&self) -> Option<Arc<Cluster>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The present client.
    #[must_use]
    pub fn get(&self) -> Option<Arc<Cluster>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
