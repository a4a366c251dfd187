//! The SCSI logical units of volumes and of remote targets, shared by iSCSI, iSER and SRP.

use crate::output::both_sizes;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::scsi::initiator::UnitInfo;
use blockmux_proto::scsi::{LogicalUnit, UnitIdentity};
use serde_json::{Value, json};
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

    /// Makes the media of these volumes removable, and those of all others fixed.
    pub(super) fn set_removable(&self, volumes: impl Iterator<Item = String>) {
        let mut created = self.created.lock().unwrap_or_else(PoisonError::into_inner);
        created.removable = volumes.collect();
        for (volume, unit) in &created.units {
            let export = self.exports.get(*volume);
            unit.set_removable(export.is_some_and(|export| created.removable.contains(&export.name)));
        }
    }

    /// The unit of a volume; `None` if there is no such volume.
    pub(super) fn of(&self, volume: VolumeId) -> Option<VolumeUnit> {
        let (export, volume_state) = self.exports.get(volume).zip(self.exports.volume_state(volume))?;
        let mut created = self.created.lock().unwrap_or_else(PoisonError::into_inner);
        let CreatedUnits { units, removable } = &mut *created;
        let unit = units.entry(volume).or_insert_with(|| {
            let Export { name, read_only, .. } = &*export;
            let uuid =
                volume_state.uuid().unwrap_or_else(|| VolumeUuid::of_texts(&[&format!("{PREFIX}{name}")]));
            let given = volume_state.unit_identity().cloned().unwrap_or_default();
            let own = UnitIdentity::given(uuid, &given);
            let identity = UnitIdentity { read_only: *read_only, removable: removable.contains(name), ..own };
            LogicalUnit::over(identity, &volume_state)
        });
        Some((volume, unit.clone()))
    }

    /// Removes the units of removed volumes.
    pub(super) fn remove(&self, volumes: &BTreeSet<VolumeId>) {
        let mut created = self.created.lock().unwrap_or_else(PoisonError::into_inner);
        volumes.iter().for_each(|volume| drop(created.units.remove(volume)));
    }
}

/// The description of a remote unit as rows of a table.
pub(super) fn unit_rows(target: String, lun: u16, unit: &UnitInfo) -> Vec<(&'static str, String)> {
    let access = if unit.read_only { "read-only" } else { "read-write" };
    let cache = if unit.write_cache { "writes are stable after a flush" } else { "none" };
    let name = [&unit.vendor, &unit.product, &unit.revision].map(String::as_str).join(" ");
    vec![
        ("target", target),
        ("lun", lun.to_string()),
        ("device", name.trim().to_owned()),
        ("serial", unit.serial.clone()),
        ("identity", unit.designator.clone()),
        ("size", both_sizes(unit.size())),
        ("access", access.to_owned()),
        ("blocks", format!("logical {}, physical {}", unit.block_len, unit.physical_block_len)),
        ("cache", cache.to_owned()),
        ("provisioning", provisioning(unit).to_owned()),
    ]
}

/// The description of a remote unit as JSON.
pub(super) fn unit_json(
    (url, protocol): (String, &str),
    target: Option<&str>,
    lun: u16,
    unit: &UnitInfo,
) -> Value {
    json!({
        "url": url,
        "protocol": protocol,
        "target": target,
        "lun": lun,
        "vendor": unit.vendor,
        "product": unit.product,
        "revision": unit.revision,
        "serial": unit.serial,
        "designator": unit.designator,
        "size": unit.size(),
        "read_only": unit.read_only,
        "logical_block": unit.block_len,
        "physical_block": unit.physical_block_len,
        "write_cache": unit.write_cache,
        "provisioning": provisioning(unit),
    })
}

/// The provisioning of a unit, for people.
fn provisioning(unit: &UnitInfo) -> &'static str {
    match (unit.unmap.is_some(), unit.unmapped_is_zero) {
        (true, true) => "thin, unmapped blocks read as zeroes",
        (true, false) => "thin",
        (false, _) => "full",
    }
}

/// Prefix of the text from which the identity of a volume without UUID is derived.
const PREFIX: &str = "iqn.2026-11.blockmux:";
