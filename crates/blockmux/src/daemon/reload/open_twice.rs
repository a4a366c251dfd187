//! Finds what a reload would have to open or export twice: it opens new volumes before it closes
//! old ones. A file that is open for writing cannot be opened for writing again, and a disk is
//! exported once, because hosts would take the two for one.

use super::model::Model;
use super::plan::{VolumeStep, VolumeSteps};
use crate::daemon::opening::NamedVolume;
use crate::data::part::Part;
use crate::data::unit_identity;
use crate::volume_kinds::opened_twice::{
    self, WrittenFile, both_open, opens_once, written_leaves, written_path,
};
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_volume::Spec;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Marks the steps that would open a file or export a disk a second time; returns why the first of
/// them is refused. Only the texts of paths are compared, because to look at a path may hang.
pub(super) fn mark(steps: &mut VolumeSteps, running: &Model, desired: &Model) -> Option<String> {
    if !steps.values().any(|step| step.opens()) {
        return None;
    }
    let is_closed = |own: &NamedVolume| steps.get(&own.name).is_some_and(|step| step.closes());
    let closed = WrittenPaths::of(running.volumes().iter().filter(|own| is_closed(own)));
    let beside = WrittenPaths::of(open_together(running, desired, steps));
    let exported = ClaimedDisks::of(running.volumes(), |own| !is_closed(own));
    let mut refusal = None;
    for (name, step) in steps.iter_mut().filter(|(_, step)| step.opens()) {
        let Some(new) = desired.volume(name) else { continue };
        let (text, why) = if let Some((leaf, owner)) = closed.shared_with(new, |_| true) {
            let path = written_path(&leaf).unwrap_or(Path::new("")).display();
            let what = format!("{path} is served by this daemon as `{owner}`");
            (format!("volume `{name}`: spec: {what}; {OPEN_TWICE}"), OPEN_TWICE)
        } else if let Some((leaf, other)) = beside.shared_with(new, |own| own != name) {
            (both_open(other, name, &leaf), opens_once(&leaf))
        } else if let Some(own) = exported.same_as(new) {
            let what = format!("this daemon exports the same disk as `{own}`");
            (format!("volume `{name}`: spec: {what}; {EXPORT_TWICE}"), EXPORT_TWICE)
        } else {
            continue;
        };
        *step = VolumeStep::Twice(why);
        refusal.get_or_insert(text);
    }
    refusal
}

/// Why a volume could not be opened, if another one has its file by another name. Looks at the
/// paths of all volumes, which may hang.
pub(super) fn other_writer(
    new: &NamedVolume,
    (running, desired): (&Model, &Model),
    steps: &VolumeSteps,
) -> Option<String> {
    let files = |own: &NamedVolume| WrittenFile::of_volume(&own.name, &own.entry.spec, own.entry.read_only);
    let mut others = open_together(running, desired, steps).filter(|own| own.name != new.name);
    others.find_map(|other| {
        let both: Vec<_> = files(other).into_iter().chain(files(new)).collect();
        let found = both.iter().map(WrittenFile::look_up).collect();
        opened_twice::check(&both, found).err()
    })
}

/// The volumes that a reload leaves open, and those that it opens.
fn open_together<'a>(
    running: &'a Model,
    desired: &'a Model,
    steps: &VolumeSteps,
) -> impl Iterator<Item = &'a NamedVolume> {
    let step = |own: &NamedVolume| steps.get(&own.name).copied();
    let stays = running.volumes().iter().filter(move |own| !step(own).is_some_and(VolumeStep::closes));
    let opened = desired.volumes().iter().filter(move |own| step(own).is_some_and(VolumeStep::opens));
    stays.chain(opened)
}

/// What hosts tell disks by.
#[derive(PartialEq, Eq, Hash)]
enum DiskClaim {
    /// The identity of the data ([`disk`]).
    Data(String),
    Uuid(VolumeUuid),
    /// What initiators recognize a unit by.
    Unit(&'static str, String),
}

/// What the volumes of a config claim to be, each claim with the first volume that makes it.
struct ClaimedDisks<'a>(HashMap<DiskClaim, (usize, &'a str)>);

impl<'a> ClaimedDisks<'a> {
    /// A volume that `stays` has its UUID and its SCSI identity until the next start, and no config
    /// has them twice; one that is closed gives them up.
    fn of(volumes: &'a [NamedVolume], stays: impl Fn(&NamedVolume) -> bool) -> ClaimedDisks<'a> {
        let mut claims = HashMap::new();
        for (at, own) in volumes.iter().enumerate() {
            let given = given_claims(own).filter(|_| stays(own));
            for claim in disk(own).map(DiskClaim::Data).into_iter().chain(given) {
                claims.entry(claim).or_insert((at, own.name.as_str()));
            }
        }
        ClaimedDisks(claims)
    }

    /// The first volume that hosts would take for this one.
    fn same_as(&self, new: &NamedVolume) -> Option<&'a str> {
        let claims = disk(new).map(DiskClaim::Data).into_iter().chain(given_claims(new));
        claims.filter_map(|claim| self.0.get(&claim)).min().map(|(_, name)| *name)
    }
}

/// The configured identifiers of a volume.
fn given_claims(named: &NamedVolume) -> impl Iterator<Item = DiskClaim> {
    let unit = unit_identity::unique(&named.entry.scsi);
    let unit = unit.map(|(key, text)| DiskClaim::Unit(key, text));
    named.entry.uuid.map(DiskClaim::Uuid).into_iter().chain(unit)
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

/// The place and the name of a volume, and a part that it writes to.
type WrittenPart<'a> = (usize, &'a str, (Spec, Part));

/// The files and devices that volumes write to, each with the parts.
struct WrittenPaths<'a>(HashMap<PathBuf, Vec<WrittenPart<'a>>>);

impl<'a> WrittenPaths<'a> {
    fn of(volumes: impl Iterator<Item = &'a NamedVolume>) -> WrittenPaths<'a> {
        let mut paths: HashMap<PathBuf, Vec<_>> = HashMap::new();
        for (at, own) in volumes.enumerate() {
            for leaf in written(own) {
                let Some(path) = written_path(&leaf.0).map(Path::to_owned) else { continue };
                paths.entry(path).or_default().push((at, own.name.as_str(), leaf));
            }
        }
        WrittenPaths(paths)
    }

    /// The file or device that this volume and one of those that are meant write to and cannot
    /// share, and the name of the first one of them.
    fn shared_with(&self, new: &NamedVolume, is_meant: impl Fn(&str) -> bool) -> Option<(Spec, &'a str)> {
        let is_shared = |(own, own_part): &(Spec, Part), (new, new_part): &(Spec, Part)| {
            own == new && !own_part.is_whole() && !new_part.is_whole()
        };
        let mut found: Vec<_> = Vec::new();
        for leaf in written(new) {
            let Some(path) = written_path(&leaf.0) else { continue };
            let others = self.0.get(path).into_iter().flatten().filter(|(_, name, _)| is_meant(name));
            let first = others.filter(|(_, _, own)| !is_shared(own, &leaf)).min_by_key(|(at, ..)| *at);
            found.extend(first.map(|(at, name, _)| (*at, leaf.0.clone(), *name)));
        }
        found.into_iter().min_by_key(|(at, ..)| *at).map(|(_, leaf, name)| (leaf, name))
    }
}

/// The files and devices that a volume opens for itself, and the part of each.
fn written(named: &NamedVolume) -> Vec<(Spec, Part)> {
    written_leaves(&named.entry.spec, named.entry.read_only)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::config::VolumeEntry;

    /// Whether a volume cannot be opened while the other one is closed.
    fn is_same_disk(own: NamedVolume, new: &NamedVolume) -> bool {
        ClaimedDisks::of(&[own], |_| false).same_as(new).is_some()
    }

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
            assert_eq!(is_same_disk(named(own), &named(new)), is_same, "{own} {new}");
        }
        let shared = |volume: NamedVolume| NamedVolume {
            entry: VolumeEntry { shared: true, ..volume.entry },
            ..volume
        };
        // Its UUID alone is not shared, so only the data counts.
        assert!(!is_same_disk(named("mem:1m one"), &shared(named("mem:1m one"))));
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
            ("slice:1m,1m:vhost-user:/v", "slice:2m,1m:vhost-user:/v", Some("/v")),
        ] {
            let named = |spec: &str, read_only| {
                let entry: VolumeEntry = format!("v={spec}").parse().unwrap();
                NamedVolume { name: "v".to_owned(), entry: VolumeEntry { read_only, ..entry } }
            };
            let shared = |read_only| {
                let own_volume = named(own, read_only);
                let written = WrittenPaths::of([&own_volume].into_iter());
                let found = written.shared_with(&named(new, false), |_| true);
                found.and_then(|(leaf, _)| written_path(&leaf).map(Path::to_owned))
            };
            assert_eq!(shared(false).as_deref(), path.map(Path::new), "{own} {new}");
            // A back end serves one front end, also one that only reads.
            let of_back_end = path.filter(|_| own.contains("vhost-user"));
            assert_eq!(shared(true).as_deref(), of_back_end.map(Path::new), "{own} {new}, read-only");
        }
    }
}
