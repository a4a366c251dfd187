//! Orphaned users: peers that have disconnected while their I/O has not completed. On a device that
//! hangs, or a remote volume whose server does not respond, it may never complete.
//!
//! The session of such a peer remains until then, because the volume may still write to its memory.
//! It must not count against the connection limit: a peer that repeatedly connects, starts I/O and
//! disconnects would block all others, users of other volumes included. So orphaned users are
//! counted for each volume, and a volume with too many of them accepts no new users until some have
//! completed. Its current users continue, and their number is bounded by the connection limit.

use super::VolumeState;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts one user as orphaned until it is dropped.
pub struct OrphanedUser(Arc<VolumeState>);

/// The number of orphaned users of a volume.
#[derive(Default)]
pub(super) struct OrphanCount(AtomicUsize);

impl VolumeState {
    /// Counts a user that has disconnected with unfinished I/O; returns how many there are now.
    #[must_use]
    pub fn orphan(self: &Arc<VolumeState>) -> (OrphanedUser, usize) {
        let before = self.orphans.0.fetch_add(1, Ordering::Relaxed);
        (OrphanedUser(self.clone()), before.saturating_add(1))
    }

    /// The number of orphaned users.
    #[must_use]
    pub fn orphans(&self) -> usize {
        self.orphans.0.load(Ordering::Relaxed)
    }

    /// Whether the volume accepts new users: not while it has [`MAX_ORPHANS`] orphaned ones.
    #[must_use]
    pub fn takes_users(&self) -> bool {
        self.orphans() < MAX_ORPHANS
    }
}

impl Drop for OrphanedUser {
    fn drop(&mut self) {
        self.0.orphans.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The number of orphaned users at which a volume accepts no new ones. It allows every client of a
/// temporarily slow device to reconnect once.
pub const MAX_ORPHANS: usize = 1024;
