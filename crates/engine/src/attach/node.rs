//! The node of a disk in `/dev`: when it appears, whether the disk can be read, and who uses it.

use rustix::fs::OFlags;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Opens a node for reading and writing as soon as it exists. `TimedOut` if it does not appear.
pub(super) fn open_when_there(node: &Path) -> io::Result<File> {
    wait_for(APPEARS, || match File::options().read(true).write(true).open(node) {
        // udev may still change its permissions.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            None
        }
        opened => Some(opened),
    })
    .unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
}

/// Reads the first block of a disk from its server, not from the page cache, as soon as its node
/// exists.
pub(super) fn read_first_block(node: &Path, block: usize) -> io::Result<()> {
    let opened = wait_for(APPEARS, || {
        let is_there = fs::metadata(node).is_ok_and(|found| found.file_type().is_block_device());
        let direct = OFlags::DIRECT.bits() as i32;
        is_there.then(|| File::options().read(true).custom_flags(direct).open(node))
    });
    let disk = opened.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))?;
    // Direct I/O takes memory that is aligned to a block.
    let mut memory = vec![0; 2 * block];
    let start = memory.as_ptr().align_offset(block).min(block);
    let data = memory.get_mut(start..start + block).ok_or(io::ErrorKind::InvalidInput)?;
    disk.read_exact_at(data, 0)
}

/// Opens a disk exclusively: nobody has mounted it, and nobody can as long as it is open. `None` if
/// somebody has.
pub(super) fn open_unused(node: &Path) -> io::Result<Option<File>> {
    let exclusive = OFlags::EXCL.bits() as i32;
    let open = || match File::options().read(true).custom_flags(exclusive).open(node) {
        Ok(disk) => Some(Ok(Some(disk))),
        // A program such as mkfs may be about to close it.
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => None,
        Err(error) => Some(Err(error)),
    };
    wait_for(CLOSES, open).unwrap_or(Ok(None))
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

/// A word of `/proc/self/mounts`, in which spaces and the like are octal.
fn unescaped(word: &str) -> String {
    let mut text = Vec::with_capacity(word.len());
    let mut rest = word.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| first == b'\\').and_then(|digits| {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        text.push(octal.unwrap_or(first));
        rest = if octal.is_some() { &after[3..] } else { after };
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Asks until there is an answer; `None` if there is none within `time`.
pub(super) fn wait_for<T>(time: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + time;
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        if Instant::now() >= deadline {
            return None;
        }
        thread::park_timeout(POLL);
    }
}

/// The time in which a node appears.
const APPEARS: Duration = Duration::from_secs(10);
/// The time in which a program closes a disk that it uses briefly.
const CLOSES: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(5);

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

    #[test]
    fn places_are_read_as_the_kernel_writes_them() {
        assert_eq!(unescaped("/mnt/two\\040words\\134x"), "/mnt/two words\\x");
        assert_eq!(unescaped("/mnt\\04"), "/mnt\\04");
        assert_eq!(unescaped(""), "");
    }

    #[test]
    fn a_node_that_does_not_appear_in_time_is_missing() {
        assert_eq!(wait_for(Duration::ZERO, || None::<()>), None);
        let mut asked = 0;
        let answer = wait_for(Duration::from_secs(60), || {
            asked += 1;
            (asked == 3).then_some(asked)
        });
        assert_eq!(answer, Some(3));
    }
}
