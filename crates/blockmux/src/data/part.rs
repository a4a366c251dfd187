//! The parts of files, block devices and remote volumes that a volume consists of. Two slices of
//! one file are different data unless they overlap.

use crate::data::key::DataKey;
use blockmux_volume::spec::{BlockSpec, FileSpec, SliceSpec};
use blockmux_volume::{Spec, range_on_member};

/// A range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    begin: u64,
    end: u64,
}

impl Part {
    /// The whole volume, of any size.
    pub(crate) const WHOLE: Part = Part { begin: 0, end: u64::MAX };

    pub(crate) fn is_whole(self) -> bool {
        self == Part::WHOLE
    }

    /// Converts a part of a slice to the part of the sliced volume.
    pub(crate) fn below_slice(self, slice: SliceSpec) -> Part {
        let end = slice.len.map_or(u64::MAX, |len| slice.offset.saturating_add(len));
        Part {
            begin: slice.offset.saturating_add(self.begin),
            end: slice.offset.saturating_add(self.end).min(end),
        }
    }

    /// Converts a part of a stripe to the part of its member with this number.
    fn on_member(self, chunk: u64, members: usize, member: usize) -> Part {
        if self.is_whole() {
            return self;
        }
        let range = range_on_member(chunk, members, member, self.begin..self.end);
        Part { begin: range.start, end: range.end }
    }

    /// All from this byte on.
    fn from(begin: u64) -> Part {
        Part { begin, ..Part::WHOLE }
    }

    fn overlaps(self, other: Part) -> bool {
        self.begin < other.end && other.begin < self.end
    }

    /// Converts a part of a stripe to the parts of its members.
    pub(crate) fn of_members(self, chunk: u64, members: &[Spec]) -> impl Iterator<Item = (Part, &Spec)> {
        let count = members.len();
        members.iter().enumerate().map(move |(nth, member)| (self.on_member(chunk, count, nth), member))
    }
}

/// A part of data that outlives the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DataPart {
    /// The [`DataKey`] of the whole file, device or remote volume.
    pub(crate) key: String,
    pub(crate) part: Part,
    /// Whether all of the part is used; otherwise something in it, such as by a file on a device.
    pub(crate) is_exact: bool,
}

impl DataPart {
    /// The parts of files and block devices that a volume consists of.
    pub(crate) fn of_spec(spec: &Spec) -> Vec<DataPart> {
        let mut parts = Vec::new();
        for_each_source(spec, Part::WHOLE, &mut |source, part| {
            let key = match source {
                Spec::File(file) => DataKey::of_file(file),
                Spec::Block(block) => DataKey::of_block(block),
                Spec::VhostUser(device) => Some(DataKey::of_vhost_user(device)),
                _ => None,
            };
            parts.extend(key.map(|key| DataPart { key: key.key, part, is_exact: true }));
        });
        parts
    }

    /// The keys of the files and block devices that a volume consists of.
    pub(crate) fn keys_of_spec(spec: &Spec) -> Vec<String> {
        DataPart::of_spec(spec).into_iter().map(|part| part.key).collect()
    }

    /// The parts of files, devices and volumes on other servers that a volume consists of, told
    /// apart by their paths, and by the texts of their specs.
    pub(crate) fn of_text(spec: &Spec) -> Vec<DataPart> {
        let mut parts = Vec::new();
        for_each_source(spec, Part::WHOLE, &mut |source, part| {
            let key = match source {
                Spec::Mem(_) | Spec::Null(_) => return,
                // Its size is an option.
                Spec::File(FileSpec { path, .. }) | Spec::Block(BlockSpec { path, .. }) => {
                    format!("path {}", path.display())
                }
                other => other.to_string(),
            };
            parts.push(DataPart { key, part, is_exact: true });
        });
        parts
    }

    /// The part of a file that is cut off when the volume with these parts gets `size` bytes.
    pub(crate) fn cut(spec: &Spec, parts: &[DataPart], size: u64) -> Option<DataPart> {
        match spec {
            Spec::Slice(slice, inner) if slice.len.is_none() => {
                DataPart::cut(inner, parts, slice.offset.checked_add(size)?)
            }
            Spec::Decorated(_, inner) => DataPart::cut(inner, parts, size),
            Spec::File(_) => {
                let file = parts.iter().find(|part| part.is_exact)?;
                Some(DataPart { part: Part::from(size), ..file.clone() })
            }
            // A slice with a length only becomes shorter itself; the others cannot be cut.
            Spec::Slice(..)
            | Spec::Stripe { .. }
            | Spec::Mem(_)
            | Spec::Null(_)
            | Spec::Block(_)
            | Spec::VhostUser(_)
            | Spec::Rbd(_)
            | Spec::Url(_) => None,
        }
    }

    /// Whether the two have bytes in common. Two that each use something in the same part are
    /// taken to differ, as files of one file system do.
    pub(crate) fn overlaps(&self, other: &DataPart) -> bool {
        self.key == other.key && self.part.overlaps(other.part) && (self.is_exact || other.is_exact)
    }
}

/// Calls `found` for each part of a file, device or server that a volume consists of.
pub(crate) fn for_each_source(spec: &Spec, part: Part, found: &mut dyn FnMut(&Spec, Part)) {
    match spec {
        Spec::Slice(slice, inner) => for_each_source(inner, part.below_slice(*slice), found),
        Spec::Stripe { chunk, members } => {
            part.of_members(*chunk, members).for_each(|(part, member)| for_each_source(member, part, found));
        }
        Spec::Decorated(_, inner) => for_each_source(inner, part, found),
        Spec::File(_)
        | Spec::Block(_)
        | Spec::VhostUser(_)
        | Spec::Rbd(_)
        | Spec::Mem(_)
        | Spec::Null(_)
        | Spec::Url(_) => found(spec, part),
    }
}

/// Finds two volumes that have data in common and are meant.
pub(crate) fn find_overlap<'a>(
    volumes: impl Iterator<Item = (&'a str, &'a [DataPart])>,
    is_meant: impl Fn([&'a str; 2]) -> bool,
) -> Option<[&'a str; 2]> {
    let all = volumes.flat_map(|(name, parts)| parts.iter().map(move |part| (part, name)));
    let mut all: Vec<_> = all.collect();
    all.sort_by(|(a, _), (b, _)| (&a.key, a.part.begin).cmp(&(&b.key, b.part.begin)));
    all.iter().enumerate().find_map(|(at, (part, name))| {
        let behind = all.iter().skip(at + 1);
        // Those that begin behind its end have nothing in common with it.
        let mut near = behind
            .take_while(|(other, _)| other.key == part.key && other.part.begin < part.part.end)
            .filter(|(other, other_name)| other_name != name && other.overlaps(part));
        near.find(|(_, other)| is_meant([name, other])).map(|(_, other)| [*name, *other])
    })
}

/// Pairs of volumes that have data in common. Each volume that shares data is in at least one pair.
pub(crate) fn overlaps<'a>(
    volumes: impl IntoIterator<Item = (&'a str, &'a [DataPart])>,
) -> Vec<[&'a str; 2]> {
    let volumes = volumes.into_iter();
    let all = volumes.flat_map(|(name, parts)| parts.iter().map(move |part| (part, name)));
    let (mut all, loose): (Vec<_>, Vec<_>) = all.partition(|(part, _)| part.is_exact);
    all.sort_by(|(a, _), (b, _)| (&a.key, a.part.begin).cmp(&(&b.key, b.part.begin)));
    let mut pairs: Vec<[&str; 2]> = Vec::new();
    // The part with the greatest end so far among those of the same data.
    let mut farthest: Option<(&DataPart, &str)> = None;
    for &(part, name) in &all {
        if let Some((before, twin)) = farthest.filter(|(before, _)| before.overlaps(part)) {
            if twin != name && !pairs.contains(&[name, twin]) {
                pairs.push([name, twin]);
            }
            if before.part.end >= part.part.end {
                continue;
            }
        }
        farthest = Some((part, name));
    }
    for (part, name) in loose {
        let from = all.partition_point(|(other, _)| other.key < part.key);
        let same = all[from..].iter().take_while(|(other, _)| other.key == part.key);
        for &(_, twin) in same.filter(|(other, twin)| *twin != name && other.overlaps(part)) {
            if !pairs.contains(&[name, twin]) && !pairs.contains(&[twin, name]) {
                pairs.push([name, twin]);
            }
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn parts(text: &str, folder: &Path) -> Vec<(u64, u64)> {
        let spec = text.parse::<Spec>().unwrap().below(folder);
        DataPart::of_spec(&spec).into_iter().map(|own| (own.part.begin, own.part.end)).collect()
    }

    #[test]
    fn a_volume_consists_of_parts_of_files() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "b"] {
            std::fs::write(folder.path().join(name), [1; 512]).unwrap();
        }
        let parts = |text| parts(text, folder.path());
        assert_eq!(parts("file:a"), [(0, u64::MAX)]);
        assert_eq!(parts("rate:iops=1:slice:1k,4k:file:a"), [(1024, 5120)]);
        assert_eq!(parts("slice:512:slice:1k,4k:file:a"), [(1536, 5120)]);
        assert_eq!(parts("slice:512,1k:slice:1k:file:a"), [(1536, 2560)]);
        assert_eq!(parts("slice:8k,8k:stripe:4k:file:a,file:b"), [(4096, 8192); 2]);
        assert_eq!(parts("stripe:4k:file:a,file:b"), [(0, u64::MAX); 2]);
        assert_eq!(parts("slice:1k:mem:1m"), []);
    }

    #[test]
    fn volumes_with_common_data_are_found() {
        let part = |text: &str, begin, end| {
            vec![DataPart { key: text.to_owned(), part: Part { begin, end }, is_exact: true }]
        };
        let all = [
            ("first", part("x", 0, 100)),
            ("second", part("x", 100, 200)),
            ("other", part("y", 0, 1000)),
            ("inside", part("x", 20, 30)),
            ("across", part("x", 150, 300)),
            ("beyond", part("x", 300, 400)),
        ];
        let found = overlaps(all.iter().map(|(name, parts)| (*name, &**parts)));
        assert_eq!(found, [["inside", "first"], ["across", "second"]]);
        let whole = [("whole", part("x", 0, u64::MAX))];
        let found = overlaps(all.iter().chain(&whole).map(|(name, parts)| (*name, &**parts)));
        for (name, _) in all.iter().filter(|(name, _)| *name != "other") {
            assert!(found.iter().any(|pair| pair.contains(name)), "{name}: {found:?}");
        }
        assert!(!found.iter().any(|pair| pair.contains(&"other")));
    }
}
