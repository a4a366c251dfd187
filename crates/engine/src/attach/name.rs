//! Names of disks, which do not depend on the order in which disks were attached:
//! `/dev/blockmux/NAME`.
//!
//! udev makes the link, so that units and fstab can wait for it. Its rule (`contrib/udev/`) reads
//! the name from a file in [`DISKS`], which is there before the disk. Where udev does not run, the
//! link is made here.

use super::AttachError;
use super::wait::wait_for;
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

    /// Tells udev's rule the name of the disk that has, or will have, this node.
    ///
    /// # Errors
    /// If another disk has the name.
    pub(super) fn publish(&self, node: &Path) -> Result<(), AttachError> {
        let file = name_file(node);
        let written = fs::create_dir_all(DISKS).and_then(|()| match self.other_with_it(node) {
            Some(other) => Ok(Some(other)),
            None => fs::write(&file, format!("{KEY}={}\n", self.0)).map(|()| None),
        });
        match written {
            Ok(None) => {}
            Ok(Some(other)) => return Err(AttachError::NameInUse { link: self.link(), other }),
            Err(error) => warn!("{}: {error}; the disk gets no name", file.display()),
        }
        Ok(())
    }

    /// Another disk that has this name.
    fn other_with_it(&self, node: &Path) -> Option<PathBuf> {
        let files = fs::read_dir(DISKS).into_iter().flatten().flatten();
        let mut others = files.map(|file| file.file_name()).filter(|disk| node.file_name() != Some(disk));
        let has_it = |disk: &OsString| {
            // A file is left behind if its process was killed and the kernel has removed the disk.
            let is_there = Path::new("/sys/block").join(disk).exists();
            is_there && name_of(&Path::new(DISKS).join(disk)).as_ref() == Some(self)
        };
        Some(Path::new("/dev").join(others.find(has_it)?))
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
        let sysfs = Path::new("/sys/block").join(node.file_name().unwrap_or_default()).join("uevent");
        fs::write(&sysfs, "change").unwrap_or_else(|error| debug!("{}: {error}", sysfs.display()));
        if wait_for(LINK_APPEARS, is_there).is_none() {
            warn!("{} does not appear; install udev's rule contrib/udev/90-blockmux.rules", link.display());
        }
    }
}

/// Forgets the name of the disk that had this node.
pub(super) fn withdraw(node: &Path) {
    let file = name_file(node);
    let Some(name) = name_of(&file) else { return };
    fs::remove_file(&file).unwrap_or_else(|error| debug!("{}: {error}", file.display()));
    // udev removes its own links.
    if !Path::new(UDEV).exists() && fs::read_link(name.link()).is_ok_and(|to| to == node) {
        remove_link(&name.link());
    }
}

fn name_file(node: &Path) -> PathBuf {
    Path::new(DISKS).join(node.file_name().unwrap_or_default())
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

/// The names of disks: a file with the kernel's name of each.
const DISKS: &str = "/run/blockmux-disks";
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
        assert_eq!(name_file(Path::new("/dev/ublkb3")), Path::new("/run/blockmux-disks/ublkb3"));
    }
}
