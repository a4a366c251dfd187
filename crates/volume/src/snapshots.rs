//! Snapshots of volumes whose storage has them.

use std::time::SystemTime;

/// The snapshots of a volume. All calls may block for as long as the storage does not answer, so
/// cores do not make them. I/O goes on meanwhile. Calls may overlap.
pub trait Snapshots {
    /// All snapshots that have a name, oldest first.
    ///
    /// # Errors
    /// If the storage does not tell them.
    fn list(&self) -> Result<Vec<SnapshotInfo>, SnapshotError>;

    /// Creates a snapshot. It has all writes that were stable before the call, and no write that is
    /// submitted after it.
    ///
    /// # Errors
    /// If the name is taken or invalid, or the storage refuses it.
    fn create(&self, name: &str) -> Result<SnapshotInfo, SnapshotError>;

    /// Deletes a snapshot; its data is lost. Those who still read it get errors.
    ///
    /// # Errors
    /// If there is none, it is protected, or the storage refuses it.
    fn delete(&self, name: &str) -> Result<(), SnapshotError>;

    /// Protects a snapshot from being deleted, or ends that. Nothing happens if it is so already.
    ///
    /// # Errors
    /// If there is none, or the storage cannot protect snapshots, or refuses it.
    fn protect(&self, _name: &str, _is_protected: bool) -> Result<(), SnapshotError> {
        Err(SnapshotError::CannotProtect)
    }
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Its name.
    pub name: String,
    /// The size of the volume then, in bytes.
    pub size: u64,
    /// When it was created, if the storage knows that.
    pub created: Option<SystemTime>,
    /// It cannot be deleted; `None` if the storage cannot protect snapshots.
    pub is_protected: Option<bool>,
    /// Identifies its data, for every volume that has it ([`crate::Volume::snapshots_in_use`]).
    pub identity: String,
}

/// Why a snapshot cannot be created, found or deleted, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The name is no name for a snapshot.
    #[error("`{name}` is no name for a snapshot; {advice}")]
    BadName {
        /// The name.
        name: String,
        /// What names may be.
        advice: &'static str,
    },
    /// There is a snapshot with this name.
    #[error("there is a snapshot `{0}` already; choose another name, or delete that one first")]
    Exists(String),
    /// There is no snapshot with this name.
    #[error("there is no snapshot `{0}`; 'blockmux ctl snapshot list' shows all")]
    NotFound(String),
    /// The snapshot is protected.
    #[error("snapshot `{0}` is protected; 'blockmux ctl snapshot unprotect' permits to delete it")]
    Protected(String),
    /// Other volumes of the storage are based on the snapshot.
    #[error("snapshot `{0}` has clones, which need its data; flatten or delete them first")]
    HasClones(String),
    /// The volume is read-only.
    #[error("is opened read-only, so that its snapshots stay as they are; use a writable volume")]
    ReadOnly,
    /// The storage cannot protect snapshots.
    #[error("its snapshots cannot be protected")]
    CannotProtect,
    /// The storage refuses, or does not answer.
    #[error("cannot {action}: {source}")]
    Storage {
        /// What was attempted.
        action: &'static str,
        /// The storage's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
