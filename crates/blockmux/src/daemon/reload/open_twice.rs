//! Finds what a reload would have to open or export twice: it opens new volumes before it closes
//! old ones. A file that is open for writing cannot be opened for writing again, and a disk is
//! exported once, because hosts would take the two for one.

use super::model::Model;
use super::plan::VolumeStep;
use crate::daemon::opening::NamedVolume;
use crate::data::part::{Part, for_each_source};
use crate::data::unit_identity;
use blockmux_proto::names::unit_identity::GivenUnitIdentity;
use blockmux_volume::Spec;
use blockmux_volume::spec::{BlockSpec, FileSpec};
use std::path::{Path, PathBuf};

/// Marks the steps that would open a file or export a disk a second time; returns why the first of
/// them is refused. Only the texts of paths are compared, because to look at a path may hang.
pub(super) fn mark(steps: &mut [(String, VolumeStep)], running: &Model, desired: &Model) -> Option<String> {
    let closed = steps.iter().filter(|(_, step)| step.closes());
    let closed: Vec<_> = closed.filter_map(|(name, _)| running.volume(name)).collect();
    let mut refusal = None;
    for (name, step) in steps.iter_mut().filter(|(_, step)| step.opens()) {
        let Some(new) = desired.volume(name) else { continue };
        let opened = closed.iter().find_map(|own| Some((path_in_both(own, new)?, own.name.as_str())));
        // Also one that stays has its UUID and its SCSI identity until the next start, and no
        // config has them twice.
        let stays = |own: &NamedVolume| !closed.iter().any(|closed| closed.name == own.name);
        let has_uuid = |own: &NamedVolume| new.entry.uuid.is_some() && own.entry.uuid == new.entry.uuid;
        let is_unit = |own: &NamedVolume| is_same_unit(&own.entry.scsi, &new.entry.scsi);
        let is_same =
            |own: &&NamedVolume| is_same_disk(own, new) || (has_uuid(own) || is_unit(own)) && stays(own);
        let exported = || running.volumes.iter().find(is_same);
        let (what, why) = match opened {
            Some((path, owner)) => {
                (format!("{} is served by this daemon as `{owner}`", path.display()), OPEN_TWICE)
            }
            None => match exported() {
                Some(own) => (format!("this daemon exports the same disk as `{}`", own.name), EXPORT_TWICE),
                None => continue,
            },
        };
        *step = VolumeStep::Twice(why);
        refusal.get_or_insert_with(|| format!("volume `{name}`: spec: {what}; {why}"));
    }
    refusal
}

/// Whether both volumes claim the same identity.
fn is_same_disk(own: &NamedVolume, new: &NamedVolume) -> bool {
    disk(own).is_some_and(|own| Some(own) == disk(new))
}

/// Whether initiators would take both units for one disk.
fn is_same_unit(own: &GivenUnitIdentity, new: &GivenUnitIdentity) -> bool {
    unit_identity::unique(own).any(|own| unit_identity::unique(new).any(|new| new == own))
}

/// The identity that a volume claims: its UUID, or what that is derived from.
fn disk(named: &NamedVolume) -> Option<String> {
    let entry = &named.entry;
    if entry.shared || entry.read_only {
        return None;
    }
    entry.uuid.map(|uuid| uuid.to_string()).or_else(|| data_of(&entry.spec))
}

/// The data of a volume as text, as its key is derived from it; `None` for data that does not
/// outlive the process.
fn data_of(spec: &Spec) -> Option<String> {
    match spec {
        Spec::Decorated(_, inner) => data_of(inner),
        Spec::Slice(slice, inner) => Some(format!("slice from {} of [{}]", slice.offset, data_of(inner)?)),
        Spec::Stripe { chunk, members } => {
            let members: Vec<_> = members.iter().map(data_of).collect::<Option<_>>()?;
            Some(format!("stripe {chunk} [{}]", members.join("], [")))
        }
        leaf => written_path(leaf).map(|path| path.display().to_string()),
    }
}

/// Why a volume is not opened while another one has its file, and what to do.
const OPEN_TWICE: &str = "one file cannot be open twice; remove the volume, reload, and add it again";
/// Why a volume is not opened while another one has its identity, and what to do.
const EXPORT_TWICE: &str = "one disk cannot be exported twice; remove the volume, reload, and add it again";

/// The path of a file or device that both volumes write to and cannot share.
fn path_in_both(own: &NamedVolume, new: &NamedVolume) -> Option<PathBuf> {
    let (own, new) = (written(own), written(new));
    let is_shared = |(own, own_part): &(Spec, Part), (new, new_part): &(Spec, Part)| {
        own == new && !own_part.is_whole() && !new_part.is_whole()
    };
    let in_both = new.iter().filter(|new| {
        own.iter().any(|own| written_path(&own.0) == written_path(&new.0) && !is_shared(own, new))
    });
    in_both.filter_map(|(leaf, _)| written_path(leaf)).map(Path::to_owned).next()
}

/// The files and devices that a volume writes to, and the part of each.
fn written(named: &NamedVolume) -> Vec<(Spec, Part)> {
    let mut found = Vec::new();
    if !named.entry.read_only {
        for_each_source(&named.entry.spec, Part::WHOLE, &mut |leaf, part| {
            found.extend(written_path(leaf).map(|_| (leaf.clone(), part)));
        });
    }
    found
}

fn written_path(leaf: &Spec) -> Option<&Path> {
    match leaf {
        Spec::File(FileSpec { path, read_only: false, .. })
        | Spec::Block(BlockSpec { path, read_only: false, .. }) => Some(path),
        // A back end serves one front end, also one that only reads.
        Spec::VhostUser(device) => Some(&device.path),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::config::VolumeEntry;
    use blockmux_proto::names::volume_uuid::VolumeUuid;

    #[test]
    fn volumes_with_the_same_uuid_or_the_same_data_are_one_disk_unless_one_claims_nothing() {
        let named = |text: &str| {
            let (spec, uuid) = text.split_once(' ').unwrap_or((text, ""));
            let entry: VolumeEntry = format!("v={spec}").parse().unwrap();
            let uuid = (!uuid.is_empty()).then(|| VolumeUuid::of_texts(&[uuid]));
            NamedVolume { name: "v".to_owned(), entry: VolumeEntry { uuid, ..entry } }
        };
        for (own, new, is_same) in [
            ("mem:1m one", "null:2m one", true),
            ("mem:1m one", "mem:1m two", false),
            ("mem:1m", "mem:1m", false),
            ("slice:4m,1m:file:/a", "delay:1ms:slice:4m,2m:file:/a", true),
            ("slice:4m,1m:file:/a", "slice:5m,1m:file:/a", false),
            ("slice:4m,1m:file:/a", "slice:4m,1m:file:/b", false),
            ("stripe:64k:file:/a,file:/b", "stripe:64k:file:/b,file:/a", false),
        ] {
            assert_eq!(is_same_disk(&named(own), &named(new)), is_same, "{own} {new}");
        }
        let shared = |volume: NamedVolume| NamedVolume {
            entry: VolumeEntry { shared: true, ..volume.entry },
            ..volume
        };
        assert!(!is_same_disk(&named("mem:1m one"), &shared(named("mem:1m one"))));
    }

    #[test]
    fn a_file_is_written_by_both_unless_one_only_reads_or_both_are_slices_of_it() {
        for (own, new, path) in [
            ("file:/a", "file:/a?direct=off", Some("/a")),
            ("file:/a", "delay:1ms:file:/a", Some("/a")),
            ("block:/dev/b", "stripe:64k:file:/a,block:/dev/b", Some("/dev/b")),
            ("file:/a", "slice:1m,1m:file:/a", Some("/a")),
            ("slice:1m,1m:file:/a", "slice:2m,1m:file:/a", None),
            ("slice:1m,1m:file:/a", "slice:2m,1m:file:/a?direct=off", Some("/a")),
            ("file:/a", "file:/a?readonly=on", None),
            ("file:/a", "file:/b", None),
            ("mem:1m", "mem:2m", None),
        ] {
            let named = |spec: &str| {
                let entry: VolumeEntry = format!("v={spec}").parse().unwrap();
                NamedVolume { name: "v".to_owned(), entry }
            };
            let found = path_in_both(&named(own), &named(new));
            assert_eq!(found.as_deref(), path.map(Path::new), "{own} {new}");
        }
    }
}
