//! What users leave behind: a peer that has gone may have begun I/O that has not ended, and on a
//! device that hangs, or a remote volume whose server is silent, it may never end.
//!
//! Its session is kept until then, because the volume may still write its memory. It is no
//! connection any more, and must not take the place of one: whoever connects, begins I/O and
//! leaves, over and over, would have everybody else kept out, users of other volumes too. So what
//! is left behind is counted apart, for each volume; and when there is much of it, that volume
//! takes no more users until some has ended. Those that use it go on, and of them there are no more
//! than there may be connections.

use super::VolumeState;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts one user's unfinished I/O as left behind until it is dropped.
pub struct OrphanedUser(Arc<VolumeState>);

/// How many have left unfinished I/O behind.
#[derive(Default)]
pub(super) struct OrphanCount(AtomicUsize);

impl VolumeState {
    /// A user has gone, and not all of its I/O has ended.
    #[must_use]
    pub fn orphan(self: &Arc<VolumeState>) -> OrphanedUser {
        self.left.0.fetch_add(1, Ordering::Relaxed);
        OrphanedUser(self.clone())
    }

    /// How many have left unfinished I/O behind.
    #[must_use]
    pub fn orphans(&self) -> usize {
        self.left.0.load(Ordering::Relaxed)
    }

    /// Whether somebody new may use the volume: not while [`MAX_ORPHANS`] have left unfinished I/O
    /// behind.
    #[must_use]
    pub fn takes_users(&self) -> bool {
        self.orphans() < MAX_ORPHANS
    }
}

impl Drop for OrphanedUser {
    fn drop(&mut self) {
        self.0.left.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Users that may have left unfinished I/O behind before no more are taken. All clients of a device
/// that is slow for a while may come anew meanwhile, once each.
pub const MAX_ORPHANS: usize = 1024;
