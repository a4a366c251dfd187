//! Names of disks, which do not depend on the order in which disks were attached:
//! `/dev/blockmux/NAME`.
//!
//! udev makes the link, so that units and fstab can wait for it. Its rule (`contrib/udev/`) reads
//! the name from a file in `/run/blockmux-disks`, which is there before the disk. Where udev does
//! not run, the link is made here.

use super::wait::wait_for;
use super::{AttachError, AttachedAs};
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use tracing::{debug, warn};

/// A name of a disk: letters, digits, and `.`, `_`, `-` after the first character.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskName(String);

/// A text is no name of a disk.
#[derive(Debug, thiserror::Error)]
#[error(
    "a disk's name has 1 to {MAX_LEN} letters, digits, '.', '_' or '-', and begins with a letter or digit"
)]
pub struct InvalidDiskName;

impl FromStr for DiskName {
    type Err = InvalidDiskName;

    fn from_str(text: &str) -> Result<DiskName, InvalidDiskName> {
        let may_follow = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let is_name = text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.len() <= MAX_LEN
            && text.chars().all(may_follow);
        if is_name { Ok(DiskName(text.to_owned())) } else { Err(InvalidDiskName) }
    }
}

impl fmt::Display for DiskName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl DiskName {
    /// The link to the disk.
    #[must_use]
    pub fn link(&self) -> PathBuf {
        Path::new(LINKS).join(&self.0)
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Waits for the link to the disk, which is there now; makes it where udev does not run.
    pub(super) fn appear(&self, node: &Path) {
        let link = self.link();
        let is_there = || (fs::canonicalize(&link).ok()? == node).then_some(());
        if is_there().is_some() {
            return;
        }
        if !Path::new(UDEV).exists() {
            let made = fs::create_dir_all(LINKS).and_then(|()| {
                remove_link(&link);
                symlink(node, &link)
            });
            made.unwrap_or_else(|error| warn!("{}: {error}", link.display()));
            return;
        }
        // A disk that was there before has had its events.
        tell_udev(node);
        if wait_for(LINK_APPEARS, is_there).is_none() {
            warn!("{} does not appear; install udev's rule contrib/udev/90-blockmux.rules", link.display());
        }
    }
}

/// Tells udev's rule the name of the disk that has, or will have, this node. A new disk without a
/// name loses that of the last disk with this node, whose process may have been killed.
///
/// # Errors
/// If another disk has the name.
pub(super) fn publish(
    name: Option<&DiskName>,
    attached_as: AttachedAs,
    node: &Path,
) -> Result<(), AttachError> {
    match (name, attached_as) {
        (Some(name), _) => NameFiles::SYSTEM.publish(name, node),
        (None, AttachedAs::New) => {
            if withdraw(node) {
                // The disk may be there already, and have the link.
                tell_udev(node);
            }
            Ok(())
        }
        (None, AttachedAs::Recovered) => Ok(()),
    }
}

/// Forgets the name of the disk that had this node; returns whether it had one.
pub(super) fn withdraw(node: &Path) -> bool {
    let Some(name) = NameFiles::SYSTEM.withdraw(node) else { return false };
    // udev removes its own links.
    if !Path::new(UDEV).exists() && fs::read_link(name.link()).is_ok_and(|to| to == node) {
        remove_link(&name.link());
    }
    true
}

/// Lets udev look at a disk again.
fn tell_udev(node: &Path) {
    let file = Path::new(NameFiles::SYSTEM.disks).join(node.file_name().unwrap_or_default()).join("uevent");
    fs::write(&file, "change").unwrap_or_else(|error| debug!("{}: {error}", file.display()));
}

/// The files with the names of disks, and the kernel's list of disks.
struct NameFiles<'a> {
    files: &'a str,
    disks: &'a str,
}

impl NameFiles<'_> {
    const SYSTEM: NameFiles<'static> = NameFiles { files: "/run/blockmux-disks", disks: "/sys/block" };

    fn publish(&self, name: &DiskName, node: &Path) -> Result<(), AttachError> {
        let file = self.of(node);
        let written = fs::create_dir_all(self.files).and_then(|()| match self.other_with(name, node) {
            Some(other) => Ok(Some(other)),
            None => fs::write(&file, format!("{KEY}={name}\n")).map(|()| None),
        });
        match written {
            Ok(None) => {}
            Ok(Some(other)) => return Err(AttachError::NameInUse { link: name.link(), other }),
            Err(error) => warn!("{}: {error}; the disk gets no name", file.display()),
        }
        Ok(())
    }

    /// Removes the file of a disk; returns the name in it.
    fn withdraw(&self, node: &Path) -> Option<DiskName> {
        let file = self.of(node);
        let name = name_of(&file)?;
        fs::remove_file(&file).unwrap_or_else(|error| debug!("{}: {error}", file.display()));
        Some(name)
    }

    /// Another disk that has this name.
    fn other_with(&self, name: &DiskName, node: &Path) -> Option<PathBuf> {
        let files = fs::read_dir(self.files).into_iter().flatten().flatten();
        let mut others = files.map(|file| file.file_name()).filter(|disk| node.file_name() != Some(disk));
        let has_it = |disk: &OsString| {
            // A file is left behind if its process was killed and the kernel has removed the disk.
            self.is_there(disk) && name_of(&Path::new(self.files).join(disk)).as_ref() == Some(name)
        };
        Some(Path::new("/dev").join(others.find(has_it)?))
    }

    /// Whether there is such a disk. Devices of the NBD driver are there for ever, and have a size
    /// only while they are disks.
    fn is_there(&self, disk: &OsString) -> bool {
        let size = fs::read_to_string(Path::new(self.disks).join(disk).join("size"));
        size.is_ok_and(|size| size.trim() != "0")
    }

    fn of(&self, node: &Path) -> PathBuf {
        Path::new(self.files).join(node.file_name().unwrap_or_default())
    }
}

/// The name in the file of a disk.
fn name_of(file: &Path) -> Option<DiskName> {
    let text = fs::read_to_string(file).ok()?;
    text.trim_end().strip_prefix(KEY)?.strip_prefix('=')?.parse().ok()
}

fn remove_link(link: &Path) {
    match fs::remove_file(link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => debug!("{}: {error}", link.display()),
        _ => {}
    }
}

/// The links to disks.
const LINKS: &str = "/dev/blockmux";
/// The variable in the file of a disk.
const KEY: &str = "BLOCKMUX_DISK";
/// Exists while udev runs.
const UDEV: &str = "/run/udev/control";
/// The time in which udev makes a link.
const LINK_APPEARS: Duration = Duration::from_secs(5);
/// Maximum length of a name.
const MAX_LEN: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_safe_in_paths_and_rules() {
        for name in ["data", "0", "vm-1.root_a", &"a".repeat(64)] {
            let link = Path::new("/dev/blockmux").join(name);
            assert_eq!(name.parse::<DiskName>().unwrap().link(), link);
        }
        for text in ["", ".", "..", "-a", "a/b", "a b", "a=b", "a\n", "ä", "%k", &"a".repeat(65)] {
            assert!(text.parse::<DiskName>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_file_of_a_disk_has_the_kernels_name_of_it() {
        let file = NameFiles::SYSTEM.of(Path::new("/dev/ublkb3"));
        assert_eq!(file, Path::new("/run/blockmux-disks/ublkb3"));
    }

    #[test]
    fn a_name_is_in_use_as_long_as_its_disk_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let (files, disks) = (place("names"), place("block"));
        let names = NameFiles { files: &files, disks: &disks };
        let set_size = |disk: &str, size: &str| {
            let directory = Path::new(&disks).join(disk);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("size"), format!("{size}\n")).unwrap();
        };
        let name: DiskName = "data".parse().unwrap();
        let [first, second] = ["/dev/nbd0", "/dev/nbd1"].map(Path::new);
        set_size("nbd0", "2048");
        names.publish(&name, first).unwrap();
        names.publish(&name, first).unwrap();
        let refused = names.publish(&name, second).unwrap_err();
        assert!(matches!(refused, AttachError::NameInUse { other, .. } if other == first));
        // Its process was killed, and somebody has disconnected it: the device is still there.
        set_size("nbd0", "0");
        names.publish(&name, second).unwrap();
        assert_eq!(names.withdraw(first), Some(name.clone()));
        assert_eq!((names.withdraw(first), names.withdraw(second)), (None, Some(name)));
    }
}
