//! The snapshots of an image.

use super::state::ImageState;
use blockmux_rbd::error::{Errno, RbdError};
use blockmux_rbd::image::Snapshot;
use blockmux_volume::{SnapshotError, SnapshotInfo, Snapshots};

impl Snapshots for ImageState {
    fn list(&self) -> Result<Vec<SnapshotInfo>, SnapshotError> {
        let all = self.image.snapshots().map_err(|error| storage("list the snapshots", error))?;
        all.iter().filter_map(|snapshot| self.info_of(snapshot).transpose()).collect()
    }

    fn create(&self, name: &str) -> Result<SnapshotInfo, SnapshotError> {
        check_name(name)?;
        self.check_writable()?;
        self.image
            .create_snapshot(name)
            .map_err(|error| self.meaning("create the snapshot", name, error, Busy::IsProtected))?;
        let all = self.image.snapshots().map_err(|error| storage("list the snapshots", error))?;
        let created = all.iter().find(|snapshot| snapshot.name == name);
        let info = created.map_or(Ok(None), |created| self.info_of(created))?;
        info.ok_or_else(|| SnapshotError::NotFound(name.to_owned()))
    }

    fn delete(&self, name: &str) -> Result<(), SnapshotError> {
        self.check_writable()?;
        self.image
            .delete_snapshot(name)
            .map_err(|error| self.meaning("delete the snapshot", name, error, Busy::IsProtected))
    }

    fn protect(&self, name: &str, is_protected: bool) -> Result<(), SnapshotError> {
        self.check_writable()?;
        let (action, done) = match is_protected {
            true => ("protect the snapshot", self.image.protect_snapshot(name)),
            false => ("unprotect the snapshot", self.image.unprotect_snapshot(name)),
        };
        match done {
            // It is so already; librbd refuses that in different ways.
            Err(RbdError::Call { error: Errno(libc::EBUSY), .. }) if is_protected => Ok(()),
            Err(RbdError::Call { error: Errno(libc::EINVAL), .. }) if !is_protected => Ok(()),
            done => done.map_err(|error| self.meaning(action, name, error, Busy::HasClones)),
        }
    }
}

/// What librbd means if it says that a snapshot is busy.
#[derive(Clone, Copy)]
enum Busy {
    IsProtected,
    HasClones,
}

impl ImageState {
    fn check_writable(&self) -> Result<(), SnapshotError> {
        if self.first.read_only { Err(SnapshotError::ReadOnly) } else { Ok(()) }
    }

    /// What is known of a snapshot; `None` if it was deleted meanwhile.
    fn info_of(&self, snapshot: &Snapshot) -> Result<Option<SnapshotInfo>, SnapshotError> {
        let is_protected = match self.image.is_snapshot_protected(&snapshot.name) {
            Err(RbdError::Call { error: Errno(libc::ENOENT), .. }) => return Ok(None),
            told => told.map_err(|error| storage("list the snapshots", error))?,
        };
        Ok(Some(SnapshotInfo {
            name: snapshot.name.clone(),
            size: snapshot.size,
            created: self.image.snapshot_time(snapshot).ok(),
            is_protected: Some(is_protected),
            identity: self.image.snapshot_identity(snapshot),
        }))
    }

    /// What an error of librbd means for a snapshot.
    fn meaning(&self, action: &'static str, name: &str, error: RbdError, busy: Busy) -> SnapshotError {
        let RbdError::Call { error: Errno(errno), .. } = error else { return storage(action, error) };
        match (errno, busy) {
            (libc::EEXIST, _) => SnapshotError::Exists(name.to_owned()),
            (libc::ENOENT, _) => SnapshotError::NotFound(name.to_owned()),
            (libc::EBUSY, Busy::IsProtected) => SnapshotError::Protected(name.to_owned()),
            (libc::EBUSY, Busy::HasClones) => SnapshotError::HasClones(name.to_owned()),
            (libc::ESHUTDOWN, _) => {
                self.image.cluster().note_blocklisted();
                storage(action, error)
            }
            _ => storage(action, error),
        }
    }
}

fn storage(action: &'static str, error: RbdError) -> SnapshotError {
    SnapshotError::Storage { action, source: Box::new(error) }
}

/// Checks a name for a new snapshot: Ceph's own programs must be able to name it, and names that
/// begin with a dot are the cluster's.
fn check_name(name: &str) -> Result<(), SnapshotError> {
    let is_bad = |letter: char| letter.is_control() || "@/".contains(letter);
    if name.is_empty() || name.len() > MAX_NAME || name.starts_with('.') || name.contains(is_bad) {
        let advice = "write 1 to 128 bytes without `@`, `/` and control characters, which begin with no dot";
        return Err(SnapshotError::BadName { name: name.to_owned(), advice });
    }
    Ok(())
}

/// Maximum length of the name of a new snapshot, in bytes.
const MAX_NAME: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_ceph_cannot_name_are_refused() {
        for good in ["monday", "2026-11-30T12:00:00Z", "täglich", "a b", &"n".repeat(128)] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", ".mirror.1", "a@b", "a/b", "a\nb", "a\0b", &"n".repeat(129)] {
            let said = check_name(bad).unwrap_err().to_string();
            assert!(said.contains("is no name for a snapshot; write 1 to 128 bytes"), "{said}");
        }
    }
}
