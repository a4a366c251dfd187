//! The SCSI logical units that volumes are, whichever protocol leads to them.

use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::scsi::{LogicalUnit, UnitIdentity};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

/// A volume as a logical unit. It is the same one for every target of every protocol, so that mode
/// pages, unit attentions and its identity are too.
pub(super) type Unit = (VolumeId, Arc<LogicalUnit>);

/// The logical units of a daemon's volumes, each made when it is first asked for.
pub(crate) struct Units {
    exports: Exports,
    made: Mutex<MadeUnits>,
}

#[derive(Default)]
struct MadeUnits {
    units: BTreeMap<VolumeId, Arc<LogicalUnit>>,
    /// Names of volumes whose media can be ejected.
    removable: BTreeSet<String>,
}

impl Units {
    pub(crate) fn new(exports: &Exports) -> Arc<Units> {
        Arc::new(Units { exports: exports.clone(), made: Mutex::default() })
    }

    /// Makes the media of volumes removable whose units were not asked for yet.
    pub(super) fn set_removable(&self, volumes: impl Iterator<Item = String>) {
        self.made.lock().unwrap_or_else(PoisonError::into_inner).removable.extend(volumes);
    }

    /// The unit that a volume is; `None` if there is no such volume.
    pub(super) fn of(&self, volume: VolumeId) -> Option<Unit> {
        let (export, served) = self.exports.get(volume).zip(self.exports.volume_state(volume))?;
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let MadeUnits { units, removable } = &mut *made;
        let unit = units.entry(volume).or_insert_with(|| {
            let Export { name, read_only, .. } = &*export;
            let own = served
                .uuid()
                .map_or_else(|| UnitIdentity::of(&format!("{PREFIX}{name}")), UnitIdentity::of_volume);
            let identity = UnitIdentity { read_only: *read_only, removable: removable.contains(name), ..own };
            LogicalUnit::over(identity, &served)
        });
        Some((volume, unit.clone()))
    }

    /// A volume is gone.
    pub(super) fn forget(&self, volume: VolumeId) {
        self.made.lock().unwrap_or_else(PoisonError::into_inner).units.remove(&volume);
    }
}

/// What the identity of a volume without UUID is made of, before its name.
const PREFIX: &str = "iqn.2026-11.blockmux:";
