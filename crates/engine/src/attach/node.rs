//! The node of a disk in `/dev`: when it appears, whether the disk can be read, and who uses it.

use super::DetachError;
use super::mount_table::unescaped;
use super::own_io::{HeldDisk, OwnIo};
use super::wait::wait_for;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Opens a node for reading and writing as soon as it exists and its permissions allow that.
///
/// # Errors
/// `TimedOut` if it does not appear, `PermissionDenied` if it stays another user's.
pub(super) fn open_when_there(node: &Path) -> io::Result<File> {
    let mut missing = io::ErrorKind::TimedOut;
    let opened = wait_for(APPEARS, || match File::options().read(true).write(true).open(node) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        // udev may still change its permissions.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            missing = io::ErrorKind::PermissionDenied;
            None
        }
        opened => Some(opened),
    });
    opened.unwrap_or_else(|| Err(missing.into()))
}

/// Reads the first block of a disk from its server, not from the page cache, as soon as its node
/// exists and its permissions allow that.
///
/// # Errors
/// As [`open_when_there`], and those of the read.
pub(super) fn read_first_block(io: &OwnIo, node: &Path, block: usize) -> io::Result<()> {
    let is_there = || fs::metadata(node).is_ok_and(|found| found.file_type().is_block_device());
    wait_for(APPEARS, || is_there().then_some(())).ok_or(io::ErrorKind::TimedOut)?;
    io.read(node, block)
}

/// Opens a disk exclusively: nobody has mounted it, and nobody can as long as it is held.
///
/// # Errors
/// If it is in use, or cannot be opened.
pub(super) fn hold_unused(io: &OwnIo, node: PathBuf) -> Result<HeldDisk, DetachError> {
    io.hold(&node).map_err(|error| match error.kind() {
        io::ErrorKind::ResourceBusy => DetachError::InUse { places: mount_points(&node), node },
        _ => DetachError::Flush { node, error },
    })
}

/// Where the disk or its partitions are mounted.
#[must_use]
pub fn mount_points(node: &Path) -> Vec<String> {
    mount_points_in(&fs::read_to_string("/proc/self/mounts").unwrap_or_default(), node)
}

fn mount_points_in(mounts: &str, node: &Path) -> Vec<String> {
    let node = node.display().to_string();
    let is_ours = |device: &str| {
        let rest = device.strip_prefix(&node);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('p'))
    };
    let lines = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ');
        Some((words.next()?, words.next()?))
    });
    lines.filter(|(device, _)| is_ours(device)).map(|(_, place)| unescaped(place)).collect()
}

/// The time in which a node appears.
const APPEARS: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_mounted_where_it_or_a_partition_of_it_is() {
        let mounts = "/dev/ublkb1 /mnt xfs rw 0 0\n/dev/ublkb1p2 /data ext4 rw 0 0\n/dev/ublkb10 /other xfs rw 0 0\n\
                      proc /proc proc rw 0 0\n\n";
        assert_eq!(mount_points_in(mounts, Path::new("/dev/ublkb1")), ["/mnt", "/data"]);
        assert_eq!(mount_points_in(mounts, Path::new("/dev/ublkb2")), [""; 0]);
    }
}
