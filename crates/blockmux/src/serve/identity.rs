//! Which UUID a volume gets when it is served, and what its own target is called
//! ([decision 34](../../../../docs/decisions/0034-identity-belongs-to-the-data.md)).

use super::opening::NamedVolume;
use crate::data_key::DataKey;
use crate::data_part::{DataPart, overlaps};
use crate::failure::Failure;
use crate::protocol::policy::Policy;
use blockmux_engine::sys::random_bytes;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::volume_uuid::VolumeUuid;
use std::collections::BTreeMap;
use std::sync::Arc;
use tracing::warn;

/// Who a volume is.
pub(super) struct Identified {
    pub(super) uuid: VolumeUuid,
    /// After a restart it has the same UUID.
    pub(super) is_lasting: bool,
}

/// The UUID of the config file, or else the one of the data; one at random where the data go with
/// the process.
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
            let uuid = VolumeUuid::of_texts(&["data", machine, &data.text]);
            return Ok(Identified { uuid, is_lasting: true });
        }
        Some(_) => warn!(
            "`{name}`: without /etc/machine-id it has another UUID after each restart; write uuid = \"...\" in its \
             [[volume]] of a config file"
        ),
        None => {}
    }
    let random = random_bytes().map_err(|error| Failure::run(format!("cannot get random bytes: {error}")))?;
    Ok(Identified { uuid: VolumeUuid::random(random), is_lasting: false })
}

/// What the target and the subsystem of a volume are called behind their prefixes. A name that
/// somebody gave is used as it is; volumes without one are called alike in every daemon, so that a
/// part of the UUID follows.
pub(super) fn target_name(named: &NamedVolume, uuid: VolumeUuid) -> String {
    named.entry.name.clone().unwrap_or_else(|| format!("{}.{}", named.name, uuid.short()))
}

/// A volume as [`warn_of_twins`] looks at it.
pub(super) struct Twin<'a> {
    pub(super) name: &'a str,
    pub(super) uuid: Option<VolumeUuid>,
    pub(super) data: Vec<DataPart>,
}

/// Volumes that are served, as [`warn_of_twins`] looks at them.
pub(super) fn twins<'a>(
    all: &'a [(VolumeId, Arc<Export>)],
    exports: &Exports,
    policy: &Policy,
) -> Vec<Twin<'a>> {
    let twin = |(id, export): &'a (VolumeId, Arc<Export>)| {
        let name = export.name.as_str();
        Twin { name, uuid: exports.served(*id).and_then(|served| served.uuid()), data: policy.data_of(name) }
    };
    all.iter().map(twin).collect()
}

/// Warns of volumes of the same data, and of those that overlap in a file or a device: what keeps
/// clients from one does not keep them from the other. `is_meant` chooses the pairs.
pub(super) fn warn_of_twins(volumes: &[Twin<'_>], is_meant: impl Fn([&str; 2]) -> bool) {
    let mut seen = BTreeMap::new();
    let mut pairs = Vec::new();
    for Twin { name, uuid, .. } in volumes {
        if let Some(twin) = uuid.and_then(|uuid| seen.insert(uuid, *name)) {
            pairs.push([*name, twin]);
        }
    }
    for [name, twin] in pairs.iter().copied().filter(|pair| is_meant(*pair)) {
        warn!("`{name}` has the data of `{twin}`: who may use them and reservations are each volume's own");
    }
    let others = overlaps(volumes.iter().map(|twin| (twin.name, &*twin.data)));
    let others = others.into_iter().filter(|[name, twin]| {
        !pairs.contains(&[name, twin]) && !pairs.contains(&[twin, name]) && is_meant([name, twin])
    });
    for [name, twin] in others {
        warn!("`{name}` overlaps `{twin}`: who may use them and reservations are each volume's own");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::config::VolumeEntry;

    const UUID: &str = "6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d";

    fn volume(is_named: bool, uuid: Option<&str>) -> NamedVolume {
        let spec = if is_named { "disk0=null:1m" } else { "null:1m" };
        let uuid = uuid.map(|text| text.parse().unwrap());
        let entry = VolumeEntry { uuid, ..spec.parse().unwrap() };
        NamedVolume { name: "disk0".to_owned(), entry }
    }

    fn identified(uuid: Option<&str>, data: Option<(&str, bool)>, machine: &str) -> (VolumeUuid, bool) {
        let data = data.map(|(text, is_unique)| DataKey { text: text.to_owned(), is_unique });
        let Identified { uuid, is_lasting } = identify(&volume(true, uuid), data.as_ref(), machine).unwrap();
        (uuid, is_lasting)
    }

    #[test]
    fn data_that_last_have_one_uuid_on_one_machine_and_another_on_others() {
        let own = identified(None, Some(("a", false)), "m");
        assert_eq!((own.1, identified(None, Some(("a", false)), "m")), (true, own));
        assert_ne!(identified(None, Some(("b", false)), "m").0, own.0);
        assert_ne!(identified(None, Some(("a", false)), "n").0, own.0);
        assert_eq!(identified(None, Some(("a", true)), ""), identified(None, Some(("a", true)), ""));
    }

    #[test]
    fn what_goes_with_the_process_or_could_be_on_any_machine_has_a_uuid_of_this_start() {
        for data in [None, Some(("a", false))] {
            let [first, second] = [(); 2].map(|()| identified(None, data, ""));
            assert!(first.0 != second.0 && !first.1 && !second.1);
        }
    }

    #[test]
    fn the_uuid_of_the_config_file_wins() {
        let given = (UUID.parse().unwrap(), true);
        assert_eq!(identified(Some(UUID), None, ""), given);
        assert_eq!(identified(Some(UUID), Some(("a", true)), "m"), given);
    }

    #[test]
    fn only_a_name_that_nobody_gave_gets_a_part_of_the_uuid() {
        let uuid: VolumeUuid = UUID.parse().unwrap();
        assert_eq!(target_name(&volume(true, None), uuid), "disk0");
        assert_eq!(target_name(&volume(false, None), uuid), format!("disk0.{}", uuid.short()));
    }
}
