//! The files and devices below a block device, as far as sysfs tells: the file of a loop device,
//! the device of a partition, the devices of a device-mapper or RAID device. A file lies on the
//! device of its file system. So a volume is found to be part of another one through every layer.

use crate::data::key::DataKey;
use crate::data::part::{DataPart, Part, for_each_source};
use blockmux_volume::Spec;
use blockmux_volume::spec::{FileSpec, SliceSpec};
use rustix::fs::{major, makedev, minor};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// The parts of files and devices that a volume consists of, and those below them.
pub(crate) fn of_spec(spec: &Spec) -> Vec<DataPart> {
    let mut parts = DataPart::of_spec(spec);
    let mut layers = Layers { sysfs: Path::new(SYSFS), parts: &mut parts };
    for_each_source(spec, Part::WHOLE, &mut |source, part| match source {
        Spec::File(file) => {
            if let Ok(metadata) = fs::metadata(&file.path) {
                // The file is somewhere on that device.
                layers.add(metadata.dev(), Part::WHOLE, false, 0);
            }
        }
        Spec::Block(block) => {
            let found = fs::metadata(&block.path).ok();
            if let Some(number) = found.and_then(|found| device_number(&found)) {
                layers.add(number, part, true, 0);
            }
        }
        _ => {}
    });
    parts
}

fn device_number(metadata: &fs::Metadata) -> Option<u64> {
    metadata.file_type().is_block_device().then(|| metadata.rdev())
}

struct Layers<'a> {
    sysfs: &'a Path,
    parts: &'a mut Vec<DataPart>,
}

impl Layers<'_> {
    /// Adds a part of the device with this number, and the parts below it.
    fn add(&mut self, number: u64, part: Part, is_exact: bool, depth: u32) {
        let shown = format!("{}:{}", major(number), minor(number));
        let Ok(place) = self.sysfs.join(&shown).canonicalize() else { return };
        self.parts.push(DataPart { key: format!("device number {shown}"), part, is_exact });
        if depth >= MAX_NESTED {
            return;
        }
        let text = |name: &str| fs::read_to_string(place.join(name)).ok().map(|text| text.trim().to_owned());
        let count =
            |name: &str| text(name).and_then(|text| text.parse::<u64>().ok()).filter(|count| *count > 0);
        if text("partition").is_some() {
            let (start, size) = (count("start").unwrap_or(0), count("size").unwrap_or(0));
            let range =
                SliceSpec { offset: start.saturating_mul(SECTOR), len: Some(size.saturating_mul(SECTOR)) };
            if let Some(whole) = place.parent().and_then(number_in) {
                self.add(whole, part.below_slice(range), is_exact, depth + 1);
            }
        }
        if let Some(file) = text("loop/backing_file") {
            let range = SliceSpec { offset: count("loop/offset").unwrap_or(0), len: count("loop/sizelimit") };
            self.add_backing(Path::new(&file), part.below_slice(range), is_exact, depth);
        }
        let lower = fs::read_dir(place.join("slaves")).into_iter().flatten().flatten();
        for number in lower.filter_map(|entry| number_in(&entry.path())).take(MAX_LOWER) {
            // Sysfs does not tell where on it.
            self.add(number, Part::WHOLE, false, depth + 1);
        }
    }

    /// Adds a part of the file or device of a loop device.
    fn add_backing(&mut self, path: &Path, part: Part, is_exact: bool, depth: u32) {
        let Ok(metadata) = fs::metadata(path) else { return };
        if let Some(number) = device_number(&metadata) {
            return self.add(number, part, is_exact, depth + 1);
        }
        if let Some(DataKey { key, .. }) = DataKey::of_file(&FileSpec::new(path.to_owned())) {
            self.parts.push(DataPart { key, part, is_exact });
        }
        self.add(metadata.dev(), Part::WHOLE, false, depth + 1);
    }
}

/// The number of the device with this directory in sysfs.
fn number_in(place: &Path) -> Option<u64> {
    let text = fs::read_to_string(place.join("dev")).ok()?;
    let (high, low) = text.trim().split_once(':')?;
    Some(makedev(high.parse().ok()?, low.parse().ok()?))
}

const SYSFS: &str = "/sys/dev/block";
/// Bytes of the unit in which sysfs gives places of partitions.
const SECTOR: u64 = 512;
/// Maximum depth of devices on devices.
const MAX_NESTED: u32 = 8;
/// Maximum number of devices below one.
const MAX_LOWER: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::part::overlaps;
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    /// A sysfs tree: disk 8:0 with partitions 8:1 and 8:2, loop devices 7:0 over the file `image`
    /// and 7:1 over a part of it, and 253:0 and 253:1 of the device mapper on 8:2.
    fn machine() -> TempDir {
        let root = tempfile::tempdir().unwrap();
        let image = root.path().join("image");
        fs::write(&image, [1; 4096]).unwrap();
        let backing = format!("{}\n", image.display());
        for (path, text) in [
            ("sda/dev", "8:0\n"),
            ("sda/sda1/partition", "1\n"),
            ("sda/sda1/dev", "8:1\n"),
            ("sda/sda1/start", "8\n"),
            ("sda/sda1/size", "8\n"),
            ("sda/sda2/partition", "2\n"),
            ("sda/sda2/dev", "8:2\n"),
            ("sda/sda2/start", "16\n"),
            ("sda/sda2/size", "16\n"),
            ("loop0/dev", "7:0\n"),
            ("loop0/loop/backing_file", &backing),
            ("loop1/dev", "7:1\n"),
            ("loop1/loop/backing_file", &backing),
            ("loop1/loop/offset", "2048\n"),
            ("loop1/loop/sizelimit", "0\n"),
            ("dm-0/dev", "253:0\n"),
            ("dm-1/dev", "253:1\n"),
            ("dm-2/dev", "253:2\n"),
        ] {
            let path = root.path().join("devices").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        for (upper, lower, name) in
            [("dm-0", "sda/sda2", "sda2"), ("dm-1", "sda/sda2", "sda2"), ("dm-2", "loop0", "loop0")]
        {
            let slaves = root.path().join("devices").join(upper).join("slaves");
            fs::create_dir_all(&slaves).unwrap();
            symlink(root.path().join("devices").join(lower), slaves.join(name)).unwrap();
        }
        for (number, device) in [
            ("8:0", "sda"),
            ("8:1", "sda/sda1"),
            ("8:2", "sda/sda2"),
            ("7:0", "loop0"),
            ("7:1", "loop1"),
            ("253:0", "dm-0"),
            ("253:1", "dm-1"),
            ("253:2", "dm-2"),
        ] {
            symlink(root.path().join("devices").join(device), root.path().join(number)).unwrap();
        }
        root
    }

    #[test]
    fn devices_overlap_through_partitions_loops_and_the_device_mapper() {
        let machine = machine();
        let device = |(high, low)| {
            let mut parts = Vec::new();
            Layers { sysfs: machine.path(), parts: &mut parts }.add(makedev(high, low), Part::WHOLE, true, 0);
            parts
        };
        let image = DataKey::of_file(&FileSpec::new(machine.path().join("image"))).unwrap();
        let image = vec![DataPart { key: image.key, part: Part::WHOLE, is_exact: true }];
        let begin = SliceSpec { offset: 0, len: Some(2048) };
        let begin = vec![DataPart { part: Part::WHOLE.below_slice(begin), ..image[0].clone() }];
        let (disk, first, second) = (device((8, 0)), device((8, 1)), device((8, 2)));
        let (whole_loop, end_loop) = (device((7, 0)), device((7, 1)));
        let (mapped, neighbour, over_loop) = (device((253, 0)), device((253, 1)), device((253, 2)));
        for (one, other, is_same) in [
            (&disk, &first, true),
            (&first, &second, false),
            (&disk, &mapped, true),
            (&second, &mapped, true),
            (&first, &mapped, false),
            (&mapped, &neighbour, false),
            (&mapped, &mapped, true),
            (&image, &whole_loop, true),
            (&image, &end_loop, true),
            (&begin, &whole_loop, true),
            (&begin, &end_loop, false),
            (&image, &over_loop, true),
            (&whole_loop, &over_loop, true),
            (&image, &disk, false),
        ] {
            assert_eq!(
                !overlaps([("one", &**one), ("other", &**other)]).is_empty(),
                is_same,
                "{one:?} {other:?}"
            );
            let has_common = one.iter().any(|part| other.iter().any(|other| part.overlaps(other)));
            assert_eq!(has_common, is_same, "{one:?} {other:?}");
        }
    }

    #[test]
    fn a_file_is_on_the_device_of_its_file_system() {
        let machine = machine();
        let mut parts = Vec::new();
        let mut layers = Layers { sysfs: machine.path(), parts: &mut parts };
        layers.add(makedev(8, 1), Part::WHOLE, false, 0);
        let of_file = DataKey::of_file(&FileSpec::new(machine.path().join("image"))).unwrap();
        parts.push(DataPart { key: of_file.key, part: Part::WHOLE, is_exact: true });
        let of = |low| {
            let mut parts = Vec::new();
            Layers { sysfs: machine.path(), parts: &mut parts }.add(makedev(8, low), Part::WHOLE, true, 0);
            parts
        };
        let has_file = |low| !overlaps([("file", &*parts), ("device", &*of(low))]).is_empty();
        assert_eq!([has_file(0), has_file(1), has_file(2)], [true, true, false]);
        let other = [
            DataPart { key: "another file".to_owned(), part: Part::WHOLE, is_exact: true },
            parts[0].clone(),
        ];
        assert!(
            overlaps([("file", &*parts), ("other", &other[..])]).is_empty(),
            "two files of one file system"
        );
    }
}
