//! The UUID of an exported volume, and the name of the volume's own target
//! ([decision 34](../../../../docs/decisions/0034-a-volume-uuid-belongs-to-the-data.md)).

use super::opening::NamedVolume;
use crate::data::key::DataKey;
use crate::data::part::{DataPart, overlaps};
use crate::failure::Failure;
use crate::protocol::policy::Policy;
use blockmux_engine::sys::random_bytes;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::names::volume_uuid::VolumeUuid;
use std::collections::BTreeMap;
use std::sync::Arc;
use tracing::warn;

/// The identity of a volume.
#[derive(Clone, Copy)]
pub(super) struct Identified {
    pub(super) uuid: VolumeUuid,
    /// The volume has the same UUID after a restart.
    pub(super) is_lasting: bool,
}

/// The configured UUID, or one that is derived from `data` and `machine`, or a random one if the
/// data does not outlive the process.
///
/// # Errors
/// If the system provides no random bytes.
pub(super) fn identify(
    named: &NamedVolume,
    data: Option<&DataKey>,
    machine: &str,
) -> Result<Identified, Failure> {
    let name = &named.name;
    if let Some(uuid) = named.entry.uuid {
        return Ok(Identified { uuid, is_lasting: true });
    }
    match data {
        Some(data) if data.is_unique || !machine.is_empty() => {
            let uuid = VolumeUuid::of_texts(&["data", machine, &data.key]);
            return Ok(Identified { uuid, is_lasting: true });
        }
        Some(_) => warn!(
            "`{name}`: without /etc/machine-id its UUID changes with each restart; set `uuid` in its [[volume]] of a \
             config file"
        ),
        None => {}
    }
    let random = random_bytes().map_err(|error| Failure::run(format!("cannot get random bytes: {error}")))?;
    Ok(Identified { uuid: VolumeUuid::random(random), is_lasting: false })
}

/// The name of the volume's own target and subsystem, behind their prefixes. A configured name is
/// used unchanged. Generated names are the same in every daemon, so part of the UUID is appended.
pub(super) fn target_name(named: &NamedVolume, uuid: VolumeUuid) -> String {
    named.entry.name.clone().unwrap_or_else(|| format!("{}.{}", named.name, uuid.short()))
}

/// The data of an exported volume.
pub(super) struct ServedData<'a> {
    pub(super) name: &'a str,
    pub(super) uuid: Option<VolumeUuid>,
    pub(super) parts: Vec<DataPart>,
}

/// The data of all exported volumes.
pub(super) fn served_data<'a>(
    all: &'a [(VolumeId, Arc<Export>)],
    exports: &Exports,
    policy: &Policy,
) -> Vec<ServedData<'a>> {
    let data = |(id, export): &'a (VolumeId, Arc<Export>)| {
        let uuid = exports.volume_state(*id).and_then(|state| state.uuid());
        ServedData { name: &export.name, uuid, parts: policy.data_of(&export.name) }
    };
    all.iter().map(data).collect()
}

/// Warns of volumes with the same data, and of volumes that overlap in a file or a device: access
/// control and reservations of one do not apply to the other. `is_meant` selects the pairs.
pub(super) fn warn_of_same_data(volumes: &[ServedData<'_>], is_meant: impl Fn([&str; 2]) -> bool) {
    let mut seen = BTreeMap::new();
    let mut pairs = Vec::new();
    for ServedData { name, uuid, .. } in volumes {
        if let Some(other) = uuid.and_then(|uuid| seen.insert(uuid, *name)) {
            pairs.push([*name, other]);
        }
    }
    for [name, other] in pairs.iter().copied().filter(|pair| is_meant(*pair)) {
        warn!(
            "`{name}` and `{other}` export the same data: reservations and access control of one do not apply to \
             the other"
        );
    }
    let overlapping = overlaps(volumes.iter().map(|data| (data.name, &*data.parts)));
    let overlapping = overlapping.into_iter().filter(|[name, other]| {
        !pairs.contains(&[name, other]) && !pairs.contains(&[other, name]) && is_meant([name, other])
    });
    for [name, other] in overlapping {
        warn!(
            "`{name}` and `{other}` overlap: reservations and access control of one do not apply to the other"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::config::VolumeEntry;

    const UUID: &str = "6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d";

    fn volume(is_named: bool, uuid: Option<&str>) -> NamedVolume {
        let spec = if is_named { "disk0=null:1m" } else { "null:1m" };
        let uuid = uuid.map(|text| text.parse().unwrap());
        let entry = VolumeEntry { uuid, ..spec.parse().unwrap() };
        NamedVolume { name: "disk0".to_owned(), entry }
    }

    fn identified(uuid: Option<&str>, data: Option<(&str, bool)>, machine: &str) -> (VolumeUuid, bool) {
        let data = data.map(|(text, is_unique)| DataKey { key: text.to_owned(), is_unique });
        let Identified { uuid, is_lasting } = identify(&volume(true, uuid), data.as_ref(), machine).unwrap();
        (uuid, is_lasting)
    }

    #[test]
    fn persistent_data_has_one_uuid_on_one_machine_and_others_on_other_machines() {
        let own = identified(None, Some(("a", false)), "m");
        assert_eq!((own.1, identified(None, Some(("a", false)), "m")), (true, own));
        assert_ne!(identified(None, Some(("b", false)), "m").0, own.0);
        assert_ne!(identified(None, Some(("a", false)), "n").0, own.0);
        assert_eq!(identified(None, Some(("a", true)), ""), identified(None, Some(("a", true)), ""));
    }

    #[test]
    fn data_of_the_process_or_without_a_machine_id_get_a_random_uuid() {
        for data in [None, Some(("a", false))] {
            let [first, second] = [(); 2].map(|()| identified(None, data, ""));
            assert!(first.0 != second.0 && !first.1 && !second.1);
        }
    }

    #[test]
    fn the_configured_uuid_has_priority() {
        let given = (UUID.parse().unwrap(), true);
        assert_eq!(identified(Some(UUID), None, ""), given);
        assert_eq!(identified(Some(UUID), Some(("a", true)), "m"), given);
    }

    #[test]
    fn only_a_generated_name_has_part_of_the_uuid() {
        let uuid: VolumeUuid = UUID.parse().unwrap();
        assert_eq!(target_name(&volume(true, None), uuid), "disk0");
        assert_eq!(target_name(&volume(false, None), uuid), format!("disk0.{}", uuid.short()));
    }
}
