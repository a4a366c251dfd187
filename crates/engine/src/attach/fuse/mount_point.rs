//! Mount points, and which mount is there.
//!
//! A path may lead elsewhere tomorrow: its directories are renamed, another user may own one of
//! them, and other file systems are mounted on the way. So the directory above a mount point is
//! opened once, as safely as other paths of root (`docs/decisions`, number 79), and everything is
//! done by its descriptor. A mount is known by its numbers, not by its path. A descriptor of the
//! mount itself would keep it from being unmounted.

use crate::attach::mount_table::unescaped;
use crate::sys::safe_path;
use rustix::fs::{
    AtFlags, Dir, Mode, OFlags, Statx, StatxFlags, mkdirat, openat, readlinkat, statx, unlinkat,
};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf, absolute};
use std::process;

/// A directory that a file system is mounted on, or will be.
#[derive(Debug)]
pub(super) struct MountPoint {
    /// The directory that it is in.
    above: OwnedFd,
    name: OsString,
}

/// Which mount it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MountId {
    /// Number of the file system, which belongs to it until the kernel has ended it.
    device: (u32, u32),
    /// Number of the mount. A file system may have several.
    id: u64,
}

/// A line of the kernel's table of mounts.
pub(super) struct MountEntry {
    mount: MountId,
    /// The directory or file of the file system that is mounted.
    root: String,
    /// Where it is mounted.
    pub(super) place: String,
    /// The type of the file system.
    pub(super) file_system: String,
}

impl MountPoint {
    /// The mount point with this path, which need not exist.
    ///
    /// # Errors
    /// If the directory above does not exist, or another user leads root to what is not that
    /// user's.
    pub(super) fn at(path: &Path) -> io::Result<MountPoint> {
        MountPoint::below(path, |above| {
            Ok(safe_path::open(above, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?.into())
        })
    }

    /// The mount point with this path; makes the directories above.
    ///
    /// # Errors
    /// If they cannot be made, or another user leads root to what is not that user's.
    pub(super) fn with_directories_above(path: &Path) -> io::Result<MountPoint> {
        MountPoint::below(path, open_or_make)
    }

    fn below(path: &Path, open: impl FnOnce(&Path) -> io::Result<OwnedFd>) -> io::Result<MountPoint> {
        let path = absolute(path)?;
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no name of a directory"));
        };
        Ok(MountPoint { above: open(above)?, name: name.to_owned() })
    }

    /// Another descriptor of it.
    pub(super) fn try_clone(&self) -> io::Result<MountPoint> {
        Ok(MountPoint { above: self.above.try_clone()?, name: self.name.clone() })
    }

    /// Makes the directory unless it exists; returns whether it did.
    pub(super) fn make(&self) -> io::Result<bool> {
        match mkdirat(&self.above, &self.name, NEW_DIRECTORY) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the directory has no entries, which a mount would hide.
    pub(super) fn is_empty(&self) -> io::Result<bool> {
        let entries = Dir::read_from(self.open(OFlags::RDONLY)?)?;
        for entry in entries {
            if ![&b"."[..], b".."].contains(&entry?.file_name().to_bytes()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Removes the directory.
    pub(super) fn remove(&self) -> io::Result<()> {
        Ok(unlinkat(&self.above, &self.name, AtFlags::REMOVEDIR)?)
    }

    /// Opens the directory. A link is not followed: its owner could exchange it later.
    pub(super) fn open(&self, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(&self.above, &self.name, flags, Mode::empty());
        opened.map_err(|error| match readlinkat(&self.above, &self.name, Vec::new()) {
            Ok(_) => io::Error::other("it is a symbolic link, which is not followed"),
            Err(_) => error.into(),
        })
    }

    /// Where it is now.
    pub(super) fn path(&self) -> PathBuf {
        let descriptor = format!("/proc/self/fd/{}", self.above.as_raw_fd());
        fs::read_link(&descriptor).unwrap_or_else(|_| PathBuf::from(descriptor)).join(&self.name)
    }

    /// A path to it that nobody can lead elsewhere as long as this process has it open; for
    /// processes of the same user, too.
    pub(super) fn safe_path(&self) -> PathBuf {
        Path::new(&format!("/proc/{}/fd/{}", process::id(), self.above.as_raw_fd())).join(&self.name)
    }

    /// The mount on top of the others there. Asks only the kernel, so it does not wait for the
    /// process of a file system.
    pub(super) fn mounted(&self) -> io::Result<Option<MountId>> {
        let there = match status(&self.above, &self.name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            there => MountId::new(&there?)?,
        };
        let above = MountId::of(&self.above)?;
        Ok(Some(there).filter(|there| there.id != above.id))
    }
}

impl MountId {
    /// The mount that a descriptor is of.
    pub(super) fn of(file: impl AsFd) -> io::Result<MountId> {
        MountId::new(&status(file, "")?)
    }

    fn new(status: &Statx) -> io::Result<MountId> {
        if StatxFlags::from_bits_retain(status.stx_mask).contains(StatxFlags::MNT_ID) {
            Ok(MountId { device: (status.stx_dev_major, status.stx_dev_minor), id: status.stx_mnt_id })
        } else {
            Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel does not number mounts (Linux 5.8)"))
        }
    }

    /// Its line in the table of mounts; `None` if it is not mounted here, or no longer.
    pub(super) fn entry(self) -> Option<MountEntry> {
        entries().into_iter().find(|entry| entry.mount == self)
    }

    /// Other places where its file system is mounted.
    pub(super) fn other_entries(self) -> Vec<MountEntry> {
        let is_other = |entry: &MountEntry| entry.mount.device == self.device && entry.mount.id != self.id;
        entries().into_iter().filter(is_other).collect()
    }
}

impl MountEntry {
    /// Whether only a part of the file system is mounted, as by a bind mount of a file. The whole
    /// of it may be one that the kernel has made, and removes, along with another.
    pub(super) fn is_of_part(&self) -> bool {
        self.root != "/"
    }
}

/// What statx(2) tells without asking the process of a file system.
fn status(directory: impl AsFd, name: impl rustix::path::Arg) -> io::Result<Statx> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    Ok(statx(directory, name, flags | AtFlags::EMPTY_PATH, StatxFlags::empty())?)
}

/// Opens a directory; makes it, and those above, unless it exists.
fn open_or_make(directory: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let missing = match safe_path::open(directory, flags, Mode::empty()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => error,
        opened => return Ok(opened?.into()),
    };
    let (Some(above), Some(name)) = (directory.parent(), directory.file_name()) else { return Err(missing) };
    let above = open_or_make(above)?;
    mkdirat(&above, name, NEW_DIRECTORY)?;
    Ok(openat(&above, name, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
}

fn entries() -> Vec<MountEntry> {
    let table = fs::read(MOUNTS).unwrap_or_default();
    entries_in(&String::from_utf8_lossy(&table))
}

/// See `proc_pid_mountinfo(5)`.
fn entries_in(table: &str) -> Vec<MountEntry> {
    let entry = |line: &str| {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut words = mount.split(' ');
        let (id, _parent, device) = (words.next()?.parse().ok()?, words.next()?, words.next()?);
        let (major, minor) = device.split_once(':')?;
        let device = (major.parse().ok()?, minor.parse().ok()?);
        Some(MountEntry {
            mount: MountId { device, id },
            root: unescaped(words.next()?),
            place: unescaped(words.next()?),
            file_system: file_system.split(' ').next()?.to_owned(),
        })
    };
    table.lines().filter_map(entry).collect()
}

const MOUNTS: &str = "/proc/self/mountinfo";
/// Permissions of a new directory; the umask applies.
const NEW_DIRECTORY: Mode = Mode::from_raw_mode(0o777);

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_table_of_mounts_is_read_as_the_kernel_writes_it() {
        let table = "29 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw\n\
                     81 29 0:52 / /my\\040disks rw,nosuid shared:9 master:1 - fuse.blockmux blockmux rw\n\
                     82 29 0:52 /disk.img /b rw - fuse.blockmux blockmux rw\nno line\n";
        let entries = entries_in(table);
        let read = entries.iter().map(|entry| (entry.place.as_str(), entry.file_system.as_str()));
        assert_eq!(
            read.collect::<Vec<_>>(),
            [("/", "ext4"), ("/my disks", "fuse.blockmux"), ("/b", "fuse.blockmux")]
        );
        let mounts = entries.iter().map(|entry| (entry.mount.id, entry.mount.device, entry.is_of_part()));
        let expected = [(29, (254, 0), false), (81, (0, 52), false), (82, (0, 52), true)];
        assert_eq!(mounts.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn what_is_mounted_is_known_whatever_its_path_contains() {
        let proc = MountPoint::at(Path::new("/proc")).unwrap();
        let mounted = proc.mounted().unwrap().unwrap();
        assert_eq!(mounted.entry().unwrap().file_system, "proc");
        let directory = tempfile::tempdir().unwrap();
        let plain = MountPoint::at(&directory.path().join("two\nlines")).unwrap();
        assert_eq!(plain.mounted().unwrap(), None);
        assert!(plain.make().unwrap() && !plain.make().unwrap());
        assert_eq!(plain.mounted().unwrap(), None);
    }

    #[test]
    fn a_mount_point_stays_itself_when_a_directory_above_is_renamed() {
        let directory = tempfile::tempdir().unwrap();
        let place = |path| directory.path().join(path);
        let point = MountPoint::with_directories_above(&place("a/b/disks")).unwrap();
        assert!(point.make().unwrap());
        fs::rename(place("a"), place("moved")).unwrap();
        fs::create_dir_all(place("a/b/disks")).unwrap();
        let moved = place("moved").canonicalize().unwrap().join("b/disks");
        assert_eq!((point.path(), fs::canonicalize(point.safe_path()).unwrap()), (moved.clone(), moved));
        point.remove().unwrap();
        assert!(place("a/b/disks").exists() && !place("moved/b/disks").exists());
    }

    #[test]
    fn a_link_is_no_mount_point() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        symlink(directory.path(), &link).unwrap();
        let point = MountPoint::at(&link).unwrap();
        assert!(!point.make().unwrap());
        let error = point.open(OFlags::PATH).unwrap_err();
        assert_eq!(error.to_string(), "it is a symbolic link, which is not followed");
        assert!(MountPoint::at(Path::new("/")).is_err());
    }
}
