//! The SCSI logical units of volumes, shared by iSCSI, iSER and SRP.

use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::scsi::{LogicalUnit, UnitIdentity};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

/// A volume with its logical unit. All targets of all protocols share the unit, and so its mode
/// pages, unit attentions and identity.
pub(super) type VolumeUnit = (VolumeId, Arc<LogicalUnit>);

/// The logical units of a daemon's volumes. Each is created at its first use.
pub(crate) struct LogicalUnits {
    exports: Exports,
    created: Mutex<CreatedUnits>,
}

#[derive(Default)]
struct CreatedUnits {
    units: BTreeMap<VolumeId, Arc<LogicalUnit>>,
    /// Names of volumes with removable media.
    removable: BTreeSet<String>,
}

impl LogicalUnits {
    pub(crate) fn new(exports: &Exports) -> Arc<LogicalUnits> {
        Arc::new(LogicalUnits { exports: exports.clone(), created: Mutex::default() })
    }

    /// Makes the media of these volumes removable. It has no effect on units that are in use.
    pub(super) fn set_removable(&self, volumes: impl Iterator<Item = String>) {
        self.created.lock().unwrap_or_else(PoisonError::into_inner).removable.extend(volumes);
    }

    /// The unit of a volume; `None` if there is no such volume.
    pub(super) fn of(&self, volume: VolumeId) -> Option<VolumeUnit> {
        let (export, volume_state) = self.exports.get(volume).zip(self.exports.volume_state(volume))?;
        let mut created = self.created.lock().unwrap_or_else(PoisonError::into_inner);
        let CreatedUnits { units, removable } = &mut *created;
        let unit = units.entry(volume).or_insert_with(|| {
            let Export { name, read_only, .. } = &*export;
            let own = volume_state
                .uuid()
                .map_or_else(|| UnitIdentity::of(&format!("{PREFIX}{name}")), UnitIdentity::of_volume);
            let identity = UnitIdentity { read_only: *read_only, removable: removable.contains(name), ..own };
            LogicalUnit::over(identity, &volume_state)
        });
        Some((volume, unit.clone()))
    }

    /// Removes the unit of a removed volume.
    pub(super) fn remove(&self, volume: VolumeId) {
        self.created.lock().unwrap_or_else(PoisonError::into_inner).units.remove(&volume);
    }
}

/// Prefix of the text from which the identity of a volume without UUID is derived.
const PREFIX: &str = "iqn.2026-11.blockmux:";
