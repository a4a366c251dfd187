//! What the thread of a disk's socket shares with its session, and with the owner of the disk.

use crate::core::reactor::Inbox;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::virtio::{BlkDevice, MAX_QUEUES};
use blockmux_proto::volume_state::Origin;
use blockmux_volume::VolumeInfo;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

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

    pub(super) fn origin(&self) -> Origin {
        Origin { protocol: "vhost-user", listener: self.path.display().to_string().into() }
    }

    /// The size of the volume now, in bytes.
    fn size(&self) -> u64 {
        self.exports.get(self.volume).map_or(self.info.size, |export| export.volume.info().size)
    }
}
