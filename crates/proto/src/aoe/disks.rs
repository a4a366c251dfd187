//! The disks of a target and where each is served. They change while the target runs.
//!
//! Changes are rare and the list is read for every frame. It is behind a lock with a version
//! number, and each session has a copy that it renews when the version changes.

use super::AoeAddress;
use super::unit::AoeUnit;
use crate::driver::frames::PortId;
use crate::exports::VolumeId;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A disk and where it is served.
#[derive(Clone)]
pub struct AoeDisk {
    /// The disk.
    pub unit: AoeUnit,
    /// The ports at which it is served; `None` for all.
    pub ports: Option<Vec<PortId>>,
}

/// The disks of a target; clones share the list.
#[derive(Clone, Default)]
pub struct AoeDisks(Arc<SharedDisks>);

#[derive(Default)]
struct SharedDisks {
    /// Incremented by every change.
    version: AtomicU32,
    list: Mutex<Vec<AoeDisk>>,
}

impl AoeDisks {
    /// Disks that are served at all ports.
    #[must_use]
    pub fn everywhere(units: Vec<AoeUnit>) -> AoeDisks {
        let disks = AoeDisks::default();
        disks.replace(units.into_iter().map(|unit| AoeDisk { unit, ports: None }).collect());
        disks
    }

    /// Changes the list. Addresses are unique, and a volume keeps its address. Each session takes
    /// the change over in its next turn.
    pub fn replace(&self, mut disks: Vec<AoeDisk>) {
        disks.sort_by_key(|disk| disk.unit.address);
        *self.list_mut() = disks;
        self.0.version.fetch_add(1, Ordering::Release);
    }

    /// Removes the disk of a volume.
    pub fn remove(&self, volume: VolumeId) {
        self.list_mut().retain(|disk| disk.unit.volume != volume);
        self.0.version.fetch_add(1, Ordering::Release);
    }

    /// The disk of a volume.
    #[must_use]
    pub fn of_volume(&self, volume: VolumeId) -> Option<AoeAddress> {
        let list = self.list_mut();
        list.iter().find(|disk| disk.unit.volume == volume).map(|disk| disk.unit.address)
    }

    /// The disks, each with its volume.
    #[must_use]
    pub fn all(&self) -> Vec<(VolumeId, AoeAddress)> {
        self.list_mut().iter().map(|disk| (disk.unit.volume, disk.unit.address)).collect()
    }

    /// Whether a disk is served at any port.
    #[must_use]
    pub fn has(&self, address: AoeAddress) -> bool {
        self.list_mut().iter().any(|disk| disk.unit.address == address)
    }

    /// The disks, sorted by address.
    pub(super) fn list(&self) -> Vec<AoeDisk> {
        self.list_mut().clone()
    }

    #[inline]
    pub(super) fn version(&self) -> u32 {
        self.0.version.load(Ordering::Acquire)
    }

    fn list_mut(&self) -> MutexGuard<'_, Vec<AoeDisk>> {
        self.0.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
