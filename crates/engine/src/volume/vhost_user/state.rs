//! What a volume shares with its thread and its channels.

use super::back_end::{BackEnd, BackEndError};
use crate::core::reactor::Inbox;
use blockmux_volume::{Io, IoError, VolumeInfo};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Options of a volume.
#[derive(Clone, Copy, Debug)]
pub struct VhostUserOptions {
    /// Refuse writes.
    pub read_only: bool,
    /// How long requests wait for another connection when this one is lost.
    pub reconnect_timeout: Duration,
    /// How long a request may take before the back end counts as lost; `None`: for ever.
    pub request_timeout: Option<Duration>,
}

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
    /// Why a queue needs another connection.
    complaint: Mutex<Option<BackEndError>>,
    /// A queue has an answer since the last loss.
    pub(super) has_answered: AtomicBool,
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
    /// smaller than the number of users.
    pub(super) most: usize,
    /// The user of each virtqueue that was used on this connection; `None`: its core has ended.
    pub(super) users: Vec<Option<QueueUser>>,
    /// The number of the next user.
    next_number: u64,
}

/// The core that uses a virtqueue.
#[derive(Clone)]
pub(super) struct QueueUser {
    /// No other user of the disk has it.
    pub(super) number: u64,
    pub(super) core: Inbox,
}

impl DiskQueues {
    fn new(most: usize) -> DiskQueues {
        DiskQueues { most: most.min(MAX_CORES), users: Vec::new(), next_number: 0 }
    }

    /// A virtqueue for another core; returns the number of its user, or `None` if all are used. One
    /// that another core has used before is the last choice, because it is stopped first, and back
    /// ends as SPDK's stop their whole device for that.
    pub(super) fn take(&mut self, core: &Inbox) -> Option<u64> {
        if self.users.len() < self.most {
            self.users.push(None);
        }
        let free = self.users.iter_mut().rfind(|user| user.is_none())?;
        let number = self.next_number;
        self.next_number += 1;
        *free = Some(QueueUser { number, core: core.clone() });
        Some(number)
    }

    /// Takes the number of virtqueues of another connection, on which none was used yet.
    ///
    /// # Errors
    /// If there are more users; it returns their number.
    pub(super) fn reconnect(&mut self, found: usize) -> Result<(), usize> {
        self.users.retain(Option::is_some);
        if found < self.users.len() {
            return Err(self.users.len());
        }
        self.most = found.min(MAX_CORES);
        Ok(())
    }
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
    pub(super) fn new(
        path: &Path,
        back_end: &BackEnd,
        options: VhostUserOptions,
    ) -> Result<DiskState, BackEndError> {
        let found = &back_end.disk.info;
        let first = VolumeInfo { read_only: found.read_only || options.read_only, ..found.clone() };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(DiskState {
            path: path.to_owned(),
            size: AtomicU64::new(first.size),
            first,
            reconnects: AtomicU64::new(0),
            reconnect_timeout: options.reconnect_timeout,
            request_timeout: options.request_timeout,
            complaint: Mutex::default(),
            has_answered: AtomicBool::new(false),
            queues: Mutex::new(DiskQueues::new(back_end.queues)),
            listeners: Mutex::default(),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            is_closed: AtomicBool::new(false),
            wake: wake.map_err(|error| BackEndError::Memory(error.into()))?,
        })
    }

    /// Checks a request against the current size.
    #[inline]
    pub(super) fn check(&self, io: &Io) -> Result<(), IoError> {
        self.first.check_within(io, self.size.load(Ordering::Relaxed))
    }

    /// A queue cannot go on with this connection: the thread makes another one.
    #[cold]
    pub(super) fn complain(&self, why: BackEndError) {
        *lock(&self.complaint) = Some(why);
        self.wake();
    }

    /// Why a queue needs another connection, if one does.
    pub(super) fn take_complaint(&self) -> Option<BackEndError> {
        lock(&self.complaint).take()
    }

    /// The properties now.
    pub(super) fn info(&self) -> VolumeInfo {
        VolumeInfo { size: self.size.load(Ordering::Relaxed), ..self.first.clone() }
    }

    /// A core no longer uses its virtqueue: another one may.
    pub(super) fn give_back(&self, number: u64) {
        for user in &mut lock(&self.queues).users {
            user.take_if(|user| user.number == number);
        }
    }

    /// Wakes the thread.
    pub(super) fn wake(&self) {
        // The write fails only if the counter is full, and then it is readable anyway.
        let _ = write(&self.wake, &1_u64.to_ne_bytes());
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Identifies volumes on their cores.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);
/// Largest number of cores that use a volume.
pub(super) const MAX_CORES: usize = 64;
