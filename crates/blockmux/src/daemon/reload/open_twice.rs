//! Finds the files and devices that a reload would have to open twice: it opens new volumes before
//! it closes old ones, and a file that is open for writing cannot be opened for writing again.

use super::model::Model;
use super::plan::{OPEN_TWICE, VolumeStep};
use crate::daemon::opening::NamedVolume;
use crate::data::part::{Part, for_each_source};
use blockmux_volume::Spec;
use blockmux_volume::spec::{BlockSpec, FileSpec};
use std::path::{Path, PathBuf};

/// Marks the steps that would open a file a second time; returns why the first of them is refused.
/// Only the texts of paths are compared, because to look at a path may hang.
pub(super) fn mark(steps: &mut [(String, VolumeStep)], running: &Model, desired: &Model) -> Option<String> {
    let closed = steps.iter().filter(|(_, step)| step.closes());
    let closed: Vec<_> = closed.filter_map(|(name, _)| running.volume(name)).collect();
    let mut refusal = None;
    for (name, step) in steps.iter_mut().filter(|(_, step)| step.opens()) {
        let found = desired
            .volume(name)
            .and_then(|new| closed.iter().find_map(|own| Some((path_in_both(own, new)?, own.name.as_str()))));
        let Some((path, owner)) = found else { continue };
        *step = VolumeStep::OpenTwice;
        let what = format!("{} is served by this daemon as `{owner}`", path.display());
        refusal.get_or_insert_with(|| format!("volume `{name}`: spec: {what}; {OPEN_TWICE}"));
    }
    refusal
}

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
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::config::VolumeEntry;

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
