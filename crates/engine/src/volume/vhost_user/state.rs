//! What a volume shares with its thread and its channels.

use crate::core::reactor::Inbox;
use blockmux_volume::{Io, IoError, VolumeInfo};
use rustix::io::write;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What the volume shares with its thread and its channels.
pub(super) struct DiskState {
    pub(super) path: PathBuf,
    /// Properties at opening.
    pub(super) first: VolumeInfo,
    /// Current size, in bytes.
    pub(super) size: AtomicU64,
    pub(super) reconnects: AtomicU64,
    pub(super) reconnect_timeout: Duration,
    /// How long the back end may take for a request; `None`: for ever.
    pub(super) request_timeout: Option<Duration>,
    /// The back end has taken longer than that.
    pub(super) is_overdue: AtomicBool,
    pub(super) queues: Mutex<DiskQueues>,
    /// Callbacks for size changes.
    pub(super) listeners: Mutex<Vec<Box<dyn Fn() + Send + Sync>>>,
    /// Identifies the volume on its cores.
    pub(super) id: u64,
    pub(super) is_closed: AtomicBool,
    /// Wakes the thread.
    pub(super) wake: OwnedFd,
}

/// The virtqueues of a disk.
pub(super) struct DiskQueues {
    /// Largest number of virtqueues of the back end that is connected, or was last. It is never
    /// smaller than the number of cores.
    pub(super) most: usize,
    /// The core of each virtqueue that is used.
    pub(super) cores: Vec<Inbox>,
}

/// A disk that is in use: by its volume, and by channels, which may outlive that. The last user
/// closes it.
pub(super) struct OpenDisk(pub(super) Arc<DiskState>);

impl Drop for OpenDisk {
    fn drop(&mut self) {
        self.0.is_closed.store(true, Ordering::Relaxed);
        self.0.wake();
    }
}

impl DiskState {
    /// Checks a request against the current size.
    #[inline]
    pub(super) fn check(&self, io: &Io) -> Result<(), IoError> {
        self.first.check_within(io, self.size.load(Ordering::Relaxed))
    }

    /// The back end does not answer in time: the thread connects again.
    #[cold]
    pub(super) fn on_overdue(&self) {
        self.is_overdue.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// The properties now.
    pub(super) fn info(&self) -> VolumeInfo {
        VolumeInfo { size: self.size.load(Ordering::Relaxed), ..self.first.clone() }
    }

    /// Wakes the thread.
    pub(super) fn wake(&self) {
        // The write fails only if the counter is full, and then it is readable anyway.
        let _ = write(&self.wake, &1_u64.to_ne_bytes());
    }
}
