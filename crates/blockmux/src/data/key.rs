//! The key of a volume's data: a text from which its UUID is derived, so that the volume has the
//! same identity after a restart, and a copy has another one (docs/decisions, number 34).
//!
//! Nothing is stored for that. The key of a file is its file system, inode and creation time. The
//! key of a block device is its WWID or its name in the volume manager. The key of a remote volume
//! is the identifier that its server reports.

use blockmux_engine::volume::rbd::RbdVolume;
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_volume::Volume;
use blockmux_volume::spec::{BlockSpec, FileSpec, VhostUserSpec};
use rustix::fs::{major, makedev, minor, statvfs};
use std::fs::{self, Metadata};
use std::num::NonZeroU64;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf, absolute};
use std::time::UNIX_EPOCH;

/// Key of data that outlives the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DataKey {
    pub(crate) key: String,
    /// Whether the key is unique among all machines, or on this machine only.
    pub(crate) is_unique: bool,
}

impl DataKey {
    /// The key of a file; `None` if its metadata cannot be read.
    pub(crate) fn of_file(file: &FileSpec) -> Option<DataKey> {
        of_inode(&file.path, &fs::metadata(&file.path).ok()?, 0)
    }

    /// The key of a block device.
    pub(crate) fn of_block(block: &BlockSpec) -> Option<DataKey> {
        let metadata = fs::metadata(&block.path).ok().filter(|found| found.file_type().is_block_device())?;
        // A link below /dev/disk is stable; its target may have another name after a restart.
        let by_path = || {
            let path = absolute(&block.path).unwrap_or_else(|_| block.path.clone());
            DataKey { key: format!("device {}", path.display()), is_unique: false }
        };
        Some(of_device(Path::new(SYSFS), metadata.rdev(), 0).unwrap_or_else(by_path))
    }

    /// The key of a vhost-user device: its socket, because a serial number need not be unique.
    pub(crate) fn of_vhost_user(device: &VhostUserSpec) -> DataKey {
        let path = absolute(&device.path).unwrap_or_else(|_| device.path.clone());
        DataKey { key: format!("vhost-user {}", path.display()), is_unique: false }
    }

    /// The key of an image of Ceph, from what identifies it in all clusters. Gateways that do not
    /// own it share no reservations, so they are one disk only if their configs say so.
    pub(crate) fn of_rbd(volume: &RbdVolume, is_owned: bool) -> DataKey {
        DataKey { key: format!("rbd {}", volume.identity()), is_unique: is_owned }
    }

    /// The key of a remote volume. `volume_key` distinguishes it from other volumes of its server,
    /// because carelessly configured servers report the same identifiers.
    pub(crate) fn of_remote(volume: &dyn Volume, volume_key: &str) -> DataKey {
        let designator = volume.designator().unwrap_or_default();
        // Two gateways to one server share no reservations, so they are one disk only if their
        // configs say so.
        DataKey { key: format!("remote {designator} {volume_key}"), is_unique: false }
    }

    /// The key of a slice. It differs from the key of the whole volume and does not depend on the
    /// slice's length.
    pub(crate) fn of_slice(offset: u64, whole: &DataKey) -> DataKey {
        DataKey { key: format!("slice from {offset} of [{}]", whole.key), is_unique: whole.is_unique }
    }

    /// The number by which a disk of this machine finds its data again, also in another process.
    pub(crate) fn disk_number(&self) -> Option<NonZeroU64> {
        let hash = VolumeUuid::of_texts(&["attached disk", &self.key]).to_bytes();
        let (number, _) = hash.split_first_chunk()?;
        NonZeroU64::new(u64::from_be_bytes(*number))
    }

    /// The key of a stripe; `None` if a member does not outlive the process.
    pub(crate) fn of_stripe(chunk: u64, members: &[Option<DataKey>]) -> Option<DataKey> {
        let known: Vec<&DataKey> = members.iter().map(Option::as_ref).collect::<Option<_>>()?;
        let texts: Vec<&str> = known.iter().map(|key| key.key.as_str()).collect();
        let is_unique = known.iter().all(|key| key.is_unique);
        Some(DataKey { key: format!("stripe {chunk} [{}]", texts.join("], [")), is_unique })
    }
}

/// The key of a file, from its inode.
fn of_inode(path: &Path, metadata: &Metadata, depth: u32) -> Option<DataKey> {
    // A snapshot of the file system has the same inodes and creation times on another device. The
    // number of a device may change with a restart, so it is the last resort.
    let device = of_device(Path::new(SYSFS), metadata.dev(), depth).filter(|device| device.is_unique);
    let id = || statvfs(path).ok().map(|system| system.f_fsid).filter(|id| *id != 0);
    let number = || format!("device {}", metadata.dev());
    let system = match device {
        Some(device) => device.key,
        None => id().map_or_else(number, |id| format!("id {id:x}")),
    };
    let made = metadata.created().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let made_ns = made.map_or(0, |made| made.as_nanos());
    let key = format!("file {} made {made_ns} of file system {system}", metadata.ino());
    Some(DataKey { key, is_unique: made_ns != 0 })
}

/// The key of a block device from sysfs; `None` if it has no stable name.
fn of_device(sysfs: &Path, number: u64, depth: u32) -> Option<DataKey> {
    let link = sysfs.join(format!("{}:{}", major(number), minor(number)));
    let place = link.canonicalize().ok()?;
    let read = |name: &str| read(&place.join(name));
    if let Some(partition) = read("partition") {
        let whole = read_number(&read_from(place.parent()?, "dev")?)?;
        let DataKey { key, is_unique } = of_device(sysfs, whole, depth)?;
        let start = read("start").unwrap_or_default();
        return Some(DataKey { key: format!("{key}, partition {partition} from {start}"), is_unique });
    }
    if let Some(file) = read("loop/backing_file") {
        let path = PathBuf::from(file);
        let metadata = fs::metadata(&path).ok().filter(|_| depth < MAX_NESTED)?;
        let DataKey { key, is_unique } = of_inode(&path, &metadata, depth + 1)?;
        let offset = read("loop/offset").unwrap_or_default();
        return Some(DataKey { key: format!("{key}, from {offset}"), is_unique });
    }
    if let Some(name) = read("dm/uuid").or_else(|| read("md/uuid")) {
        return Some(DataKey { key: name, is_unique: true });
    }
    let name = read("wwid").or_else(|| read("device/wwid")).or_else(|| read("serial"))?;
    // Other names consist of model and serial number, which virtual disks of many machines share.
    let is_unique = ["naa.", "eui.", "uuid."].iter().any(|kind| name.starts_with(kind));
    Some(DataKey { key: name, is_unique })
}

/// Parses a device number `MAJOR:MINOR`.
fn read_number(text: &str) -> Option<u64> {
    let (high, low) = text.split_once(':')?;
    Some(makedev(high.parse().ok()?, low.parse().ok()?))
}

fn read_from(place: &Path, name: &str) -> Option<String> {
    read(&place.join(name))
}

/// Reads an attribute of sysfs; `None` if it is missing or empty.
fn read(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

const SYSFS: &str = "/sys/dev/block";
/// The maximum depth of nested loop devices.
const MAX_NESTED: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::process::Command;

    fn file(path: &Path) -> DataKey {
        DataKey::of_file(&FileSpec::new(path.to_owned())).unwrap()
    }

    #[test]
    fn a_renamed_file_keeps_its_key_and_a_copy_has_another_key() {
        let folder = tempfile::tempdir().unwrap();
        let [first, link, moved, copy] = ["a", "link", "moved", "copy"].map(|name| folder.path().join(name));
        fs::write(&first, [1; 512]).unwrap();
        symlink(&first, &link).unwrap();
        let key = file(&first);
        assert_eq!(file(&link), key);
        fs::write(&first, [2; 512]).unwrap();
        assert_eq!(file(&first), key, "the content does not matter");
        assert!(Command::new("cp").arg("-a").args([&first, &copy]).status().unwrap().success());
        assert_ne!(file(&copy), key);
        fs::rename(&first, &moved).unwrap();
        assert_eq!(file(&moved), key);
        fs::rename(&copy, &first).unwrap();
        assert_ne!(file(&first), key, "another file at the same path");
    }

    /// A sysfs tree with a disk and its second partition.
    fn sysfs(attributes: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let all = [("8:16/dev", "8:16\n"), ("8:16/2/partition", "2\n"), ("8:16/2/start", "2048\n")];
        for (path, text) in all.iter().chain(attributes) {
            let path = root.path().join("devices").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        symlink(root.path().join("devices/8:16"), root.path().join("8:16")).unwrap();
        symlink(root.path().join("devices/8:16/2"), root.path().join("8:18")).unwrap();
        root
    }

    #[test]
    fn the_key_of_a_device_is_its_wwid_and_that_of_a_partition_has_its_start() {
        let key = |attributes: &[(&str, &str)], small| {
            let key = of_device(sysfs(attributes).path(), makedev(8, small), 0);
            key.map(|DataKey { key, is_unique }| (key, is_unique))
        };
        let own = |text: &str, is_unique| Some((text.to_owned(), is_unique));
        let naa = [("8:16/device/wwid", "naa.600140\n")];
        assert_eq!(key(&naa, 16), own("naa.600140", true));
        assert_eq!(key(&naa, 18), own("naa.600140, partition 2 from 2048", true));
        let virtual_disk = [("8:16/device/wwid", "t10.ATA     QEMU HARDDISK\n")];
        assert_eq!(key(&virtual_disk, 16), own("t10.ATA     QEMU HARDDISK", false));
        assert_eq!(key(&[("8:16/serial", "s1\n")], 16), own("s1", false));
        assert_eq!(key(&[("8:16/dm/uuid", "LVM-abc\n")], 16), own("LVM-abc", true));
        assert_eq!((key(&[("8:16/serial", "\n")], 16), key(&naa, 99)), (None, None));
    }

    #[test]
    fn the_key_of_a_loop_device_is_that_of_its_file() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let backing = image.path().display().to_string();
        let root = sysfs(&[("8:16/loop/backing_file", &backing), ("8:16/loop/offset", "512\n")]);
        let key = of_device(root.path(), makedev(8, 16), 0).unwrap();
        assert_eq!(key.key, format!("{}, from 512", file(image.path()).key));
    }

    #[test]
    fn the_key_of_a_slice_depends_on_its_offset() {
        let whole = DataKey { key: "a".to_owned(), is_unique: true };
        let slice = DataKey::of_slice(4096, &whole);
        assert_eq!((slice.key.as_str(), slice.is_unique), ("slice from 4096 of [a]", true));
        assert_ne!(DataKey::of_slice(0, &whole), whole);
    }

    #[test]
    fn the_key_of_a_stripe_has_its_members_in_order() {
        let key = |text: &str| Some(DataKey { key: text.to_owned(), is_unique: text != "c" });
        let stripe = |members: &[&str]| {
            let members: Vec<_> = members.iter().map(|text| key(text)).collect();
            DataKey::of_stripe(65_536, &members).unwrap()
        };
        assert_eq!(stripe(&["a", "b"]).key, "stripe 65536 [a], [b]");
        assert!(stripe(&["a", "b"]) != stripe(&["b", "a"]));
        assert!(stripe(&["a", "b"]).is_unique && !stripe(&["a", "c"]).is_unique);
        assert_eq!(DataKey::of_stripe(65_536, &[key("a"), None]), None);
    }
}
