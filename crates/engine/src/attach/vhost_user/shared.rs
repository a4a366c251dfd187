//! What the thread of a disk's socket shares with its session, and with the owner of the disk.

use crate::core::reactor::Inbox;
use crate::sys::lost_memory::MappingQuota;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::virtio::{BlkDevice, MAX_QUEUES, MAX_REGIONS};
use blockmux_proto::volume_state::Origin;
use blockmux_volume::VolumeInfo;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

/// What the thread of the socket shares with the owner of the disk.
pub(super) struct DiskShared {
    pub(super) path: PathBuf,
    pub(super) exports: Exports,
    pub(super) volume: VolumeId,
    /// Properties of the volume when it was attached.
    pub(super) info: VolumeInfo,
    pub(super) serial: String,
    pub(super) cores: Vec<Inbox>,
    pub(super) is_stopping: AtomicBool,
    /// The front end does not know the size yet.
    pub(super) has_new_size: AtomicBool,
    /// Queues end without answers.
    pub(super) is_forced: AtomicBool,
    pub(super) front_end: Mutex<Option<FrontEndProcess>>,
    /// Of all front ends, also those whose I/O has not ended yet.
    pub(super) mappings: Arc<MappingQuota>,
}

/// The process of a front end that is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrontEndProcess {
    /// `None` if the system does not know it.
    pub(super) id: Option<u32>,
}

impl DiskShared {
    /// The device that the volume is now.
    pub(super) fn device(&self) -> BlkDevice {
        BlkDevice::new(&VolumeInfo { size: self.size(), ..self.info.clone() }, MAX_QUEUES, &self.serial)
    }

    /// The core of a virtqueue.
    pub(super) fn core(&self, index: usize) -> &Inbox {
        &self.cores[index % self.cores.len()]
    }

    /// The front end that is connected.
    pub(super) fn front_end(&self) -> Option<FrontEndProcess> {
        *self.front_end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_front_end(&self, front_end: Option<FrontEndProcess>) {
        *self.front_end.lock().unwrap_or_else(PoisonError::into_inner) = front_end;
    }

    pub(super) fn origin(&self) -> Origin {
        Origin { protocol: "vhost-user", listener: self.path.display().to_string().into() }
    }

    /// The size of the volume now, in bytes.
    pub(super) fn size(&self) -> u64 {
        self.exports.get(self.volume).map_or(self.info.size, |export| export.volume.info().size)
    }
}

/// Largest number of mappings that a disk has: the regions of its front end, and as many of earlier
/// tables and front ends whose I/O has not ended.
pub(super) const MAX_DISK_MAPPINGS: usize = 2 * MAX_REGIONS;
