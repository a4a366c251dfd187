//! Finds files and devices that would be opened twice for writing, before any is opened: the lock
//! of the first one that has it open excludes the second.

use crate::data::part::{Part, for_each_source};
use crate::volume_kinds::shared_files::resolved;
use blockmux_volume::Spec;
use blockmux_volume::spec::{BlockSpec, FileSpec};
use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A file or device that a volume opens for itself, as [`written_path`] says.
pub(crate) struct WrittenFile {
    volume: String,
    leaf: Spec,
    /// Whether the volume has only a part of it, as a slice.
    is_part: bool,
}

/// What is at the path of a [`WrittenFile`].
pub(crate) struct FoundFile {
    id: FileId,
    /// The spec with the path without symbolic links.
    resolved: Spec,
}

/// What tells files and devices apart, whatever their paths are.
#[derive(PartialEq, Eq, Hash)]
enum FileId {
    /// The numbers of a file system and of a file in it.
    File(u64, u64),
    /// The number of a device.
    Device(u64),
    /// A file that does not exist yet.
    Absent(PathBuf),
}

impl WrittenFile {
    /// All of a volume. It may be read-only as a whole.
    pub(crate) fn of_volume(name: &str, spec: &Spec, read_only: bool) -> Vec<WrittenFile> {
        let file = |(leaf, part): (Spec, Part)| WrittenFile {
            volume: name.to_owned(),
            leaf,
            is_part: !part.is_whole(),
        };
        written_leaves(spec, read_only).into_iter().map(file).collect()
    }

    /// Looks at its path, which may hang; `None` if that fails, which opening it reports.
    pub(crate) fn look_up(&self) -> Option<FoundFile> {
        let resolved = resolved(&self.leaf);
        let path = written_path(&resolved)?;
        let id = match fs::metadata(path) {
            Ok(found) if found.file_type().is_block_device() => FileId::Device(found.rdev()),
            Ok(found) => FileId::File(found.dev(), found.ino()),
            Err(error) if error.kind() == ErrorKind::NotFound => FileId::Absent(path.to_owned()),
            Err(_) => return None,
        };
        Some(FoundFile { id, resolved })
    }

    fn path(&self) -> String {
        written_path(&self.leaf).map_or_else(String::new, |path| path.display().to_string())
    }
}

/// Checks that no file or device would be opened twice for writing. Slices of one share it, if
/// their paths lead to the same name and their options are the same. What was not found is not
/// compared.
///
/// # Errors
/// Names both volumes and says what to do.
pub(crate) fn check(files: &[WrittenFile], found: Vec<Option<FoundFile>>) -> Result<(), String> {
    let mut first: HashMap<FileId, (&WrittenFile, Spec)> = HashMap::new();
    for (file, found) in files.iter().zip(found) {
        let Some(FoundFile { id, resolved }) = found else { continue };
        let Some((other, its_resolved)) = first.get(&id) else {
            first.insert(id, (file, resolved));
            continue;
        };
        let are_parts = file.is_part && other.is_part;
        if are_parts && *its_resolved == resolved {
            continue;
        }
        let (own, path, leaf) = (&file.volume, file.path(), &file.leaf);
        let WrittenFile { volume: other, leaf: its_leaf, .. } = other;
        return Err(match (are_parts, own == other) {
            (true, true) => format!(
                "volume `{own}`: has slices of one file with different paths or options ({its_leaf} and {leaf}); use \
                 the same in all"
            ),
            (true, false) => format!(
                "volumes `{other}` and `{own}` are slices of one file with different paths or options ({its_leaf} and \
                 {leaf}); use the same in both"
            ),
            (false, true) if is_back_end(leaf) => format!(
                "volume `{own}`: {path} is in it twice, and a vhost-user back end serves one front end; give it once"
            ),
            (false, true) => format!("volume `{own}`: {path} is in it twice; give it once, or slices of it"),
            (false, false) => both_open(other, own, leaf),
        });
    }
    Ok(())
}

/// Why two volumes cannot both open a file, a device or a back end, and what to do.
pub(crate) fn both_open(one: &str, other: &str, leaf: &Spec) -> String {
    let path = written_path(leaf).map_or_else(String::new, |path| path.display().to_string());
    let verb = if is_back_end(leaf) { "use" } else { "write to" };
    format!("volumes `{one}` and `{other}` both {verb} {path}, and {}", opens_once(leaf))
}

/// Why a file, a device or a back end is opened once, and what to do.
pub(crate) fn opens_once(leaf: &Spec) -> &'static str {
    match is_back_end(leaf) {
        true => "a vhost-user back end serves one; remove the other",
        false => {
            "a file is open for writing once; remove one, make both slices of it, or give one ?readonly=on"
        }
    }
}

/// The files and devices that a volume opens for itself, and the part of each. A volume that only
/// reads leaves files and devices to others, but not a back end, which knows no parts either.
pub(crate) fn written_leaves(spec: &Spec, read_only: bool) -> Vec<(Spec, Part)> {
    let mut found = Vec::new();
    for_each_source(spec, Part::WHOLE, &mut |leaf, part| {
        let is_back_end = is_back_end(leaf);
        if written_path(leaf).is_some() && (is_back_end || !read_only) {
            found.push((leaf.clone(), if is_back_end { Part::WHOLE } else { part }));
        }
    });
    found
}

fn is_back_end(leaf: &Spec) -> bool {
    matches!(leaf, Spec::VhostUser(_))
}

/// The path of a file or device that a volume opens for itself: for writing, or as the only front
/// end of a back end.
pub(crate) fn written_path(leaf: &Spec) -> Option<&Path> {
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
    use std::os::unix::fs::symlink;

    #[test]
    fn a_file_is_found_by_each_of_its_names_and_slices_share_it_by_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["a", "other"] {
            fs::write(path(name), [0; 512]).unwrap();
        }
        symlink(path("a"), path("link")).unwrap();
        fs::hard_link(path("a"), path("hard")).unwrap();
        let check_one = |specs: [&str; 2], read_only| {
            let files = ["x", "y"].into_iter().zip(specs).flat_map(|(name, text)| {
                let spec = text.parse::<Spec>().unwrap().below(directory.path());
                WrittenFile::of_volume(name, &spec, read_only && name == "y")
            });
            let files: Vec<_> = files.collect();
            let found = files.iter().map(WrittenFile::look_up).collect();
            check(&files, found).map_err(|said| said.replace(&format!("{}/", directory.path().display()), ""))
        };
        let check_both = |specs| check_one(specs, false);
        assert_eq!(check_one(["file:a", "stripe:4k:file:other,file:link"], true), Ok(()));
        let said = check_one(["vhost-user:v", "stripe:4k:file:a,vhost-user:v"], true).unwrap_err();
        assert!(said.starts_with("volumes `x` and `y` both use v, "), "{said}");
        for specs in [
            ["file:a", "file:other"],
            ["file:a", "file:link?readonly=on"],
            ["slice:0,512:file:a", "slice:512,512:file:link"],
            ["stripe:4k:[slice:0,4k:file:a],[slice:4k,4k:file:a]", "mem:1m"],
            ["file:new?size=1m", "file:newer?size=1m"],
            ["mem:1m", "mem:1m"],
        ] {
            assert_eq!(check_both(specs), Ok(()), "{specs:?}");
        }
        for (specs, expected) in [
            (["file:a", "file:link"], "volumes `x` and `y` both write to link, "),
            (["file:a", "delay:1ms:file:hard"], "volumes `x` and `y` both write to hard, "),
            (["slice:0,512:file:a", "file:a"], "volumes `x` and `y` both write to a, "),
            (["file:new?size=1m", "file:./new?size=1m"], "volumes `x` and `y` both write to ./new, "),
            (["vhost-user:gone", "vhost-user:gone?readonly=on"], "volumes `x` and `y` both use gone, "),
            (
                ["slice:0,512:file:a", "slice:512,512:file:hard"],
                "volumes `x` and `y` are slices of one file with different paths or options (file:a and file:hard); ",
            ),
            (
                ["stripe:4k:file:a,file:link", "mem:1m"],
                "volume `x`: link is in it twice; give it once, or slices",
            ),
            (
                ["stripe:4k:[slice:0,4k:file:a],[slice:4k,4k:file:a?direct=off]", "mem:1m"],
                "volume `x`: has slices of one file with different paths or options (file:a and file:a?direct=off); ",
            ),
            (
                ["stripe:4k:[slice:0,4k:vhost-user:v],[slice:4k,4k:vhost-user:v]", "mem:1m"],
                "volume `x`: v is in it twice, and a vhost-user back end serves one front end; give it once",
            ),
        ] {
            let said = check_both(specs).unwrap_err();
            assert!(said.starts_with(expected), "{said}");
        }
    }
}
