//! The snapshots of an open image.

use super::Image;
use crate::cluster::c_string;
use crate::error::RbdError;
use crate::library::{RBD_SNAP_NAMESPACE_TYPE_USER, RbdFunctions, rbd_image_t, rbd_snap_info_t};
use std::ffi::{CStr, c_char, c_int};
use std::time::{Duration, SystemTime};

/// A snapshot of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its number.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// The size of the image then, in bytes.
    pub size: u64,
}

impl Image {
    /// The image's snapshots that users have made, by their numbers.
    ///
    /// # Errors
    /// If the cluster does not tell them.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>, RbdError> {
        let mut all = self.snapshots_of_all_kinds()?;
        let mut users = Vec::with_capacity(all.len());
        all.sort_by_key(|snapshot| snapshot.id);
        for snapshot in all {
            if self.is_made_by_user(&snapshot)? {
                users.push(snapshot);
            }
        }
        Ok(users)
    }

    fn snapshots_of_all_kinds(&self) -> Result<Vec<Snapshot>, RbdError> {
        let (handles, rbd) = self.parts();
        let mut room: c_int = 64;
        loop {
            let none = rbd_snap_info_t { id: 0, size: 0, name: std::ptr::null() };
            let mut found = vec![none; usize::try_from(room).unwrap_or(0)];
            // SAFETY: the image is open, and the count is that of the memory.
            let listed = unsafe { (rbd.rbd_snap_list)(handles.image, found.as_mut_ptr(), &raw mut room) };
            if listed == -libc::ERANGE {
                continue;
            }
            let count = RbdError::check("rbd_snap_list", listed)?;
            found.truncate(usize::try_from(count).unwrap_or(0));
            let copy = |found: &rbd_snap_info_t| Snapshot {
                id: found.id,
                size: found.size,
                // SAFETY: librbd has filled it with a text that it has allocated.
                name: unsafe { CStr::from_ptr(found.name) }.to_string_lossy().into_owned(),
            };
            let snapshots = found.iter().map(copy).collect();
            if count > 0 {
                // SAFETY: what it has allocated is freed once, and not used again.
                unsafe { (rbd.rbd_snap_list_end)(found.as_mut_ptr()) };
            }
            return Ok(snapshots);
        }
    }

    /// Whether it was made by a user, not by the cluster for a mirror, a group or its trash.
    fn is_made_by_user(&self, snapshot: &Snapshot) -> Result<bool, RbdError> {
        let (handles, rbd) = self.parts();
        let mut kind = 0;
        // SAFETY: the image is open, and there is a place for the number.
        let told = unsafe { (rbd.rbd_snap_get_namespace_type)(handles.image, snapshot.id, &raw mut kind) };
        match told {
            // It was deleted meanwhile.
            missing if missing == -libc::ENOENT => Ok(false),
            told => RbdError::check("rbd_snap_get_namespace_type", told)
                .map(|_| kind == RBD_SNAP_NAMESPACE_TYPE_USER),
        }
    }

    /// Identifies a snapshot for every program that opens it.
    #[must_use]
    pub fn snapshot_identity(&self, snapshot: &Snapshot) -> String {
        snapshot_identity(&self.details().identity, snapshot.id)
    }

    /// When a snapshot was created.
    ///
    /// # Errors
    /// If the cluster does not tell it.
    pub fn snapshot_time(&self, snapshot: &Snapshot) -> Result<SystemTime, RbdError> {
        let (handles, rbd) = self.parts();
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the image is open, and there is a place for the time.
        let told = unsafe { (rbd.rbd_snap_get_timestamp)(handles.image, snapshot.id, &raw mut time) };
        RbdError::check("rbd_snap_get_timestamp", told)?;
        let seconds = Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0));
        Ok(SystemTime::UNIX_EPOCH + seconds + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or(0)))
    }

    /// Whether a snapshot is protected from being deleted.
    ///
    /// # Errors
    /// If there is none, or the cluster does not tell it.
    pub fn is_snapshot_protected(&self, name: &str) -> Result<bool, RbdError> {
        let (handles, rbd) = self.parts();
        let (name, mut is_protected) = (c_string("the snapshot", name)?, 0);
        // SAFETY: the image is open; a text, and a place for the number.
        let told =
            unsafe { (rbd.rbd_snap_is_protected)(handles.image, name.as_ptr(), &raw mut is_protected) };
        RbdError::check("rbd_snap_is_protected", told).map(|_| is_protected != 0)
    }

    /// Creates a snapshot. It has all requests that have completed.
    ///
    /// # Errors
    /// If there is one with this name, or the cluster refuses it.
    pub fn create_snapshot(&self, name: &str) -> Result<(), RbdError> {
        self.on_snapshot("rbd_snap_create", name, |rbd| rbd.rbd_snap_create)
    }

    /// Deletes a snapshot. Other clients may have it open; their reads fail.
    ///
    /// # Errors
    /// If there is none, it is protected, or the cluster refuses it.
    pub fn delete_snapshot(&self, name: &str) -> Result<(), RbdError> {
        self.on_snapshot("rbd_snap_remove", name, |rbd| rbd.rbd_snap_remove)
    }

    /// Protects a snapshot from being deleted.
    ///
    /// # Errors
    /// If there is none, it is protected already, or the cluster refuses it.
    pub fn protect_snapshot(&self, name: &str) -> Result<(), RbdError> {
        self.on_snapshot("rbd_snap_protect", name, |rbd| rbd.rbd_snap_protect)
    }

    /// Permits to delete a snapshot.
    ///
    /// # Errors
    /// If there is none, it is not protected or has clones, or the cluster refuses it.
    pub fn unprotect_snapshot(&self, name: &str) -> Result<(), RbdError> {
        self.on_snapshot("rbd_snap_unprotect", name, |rbd| rbd.rbd_snap_unprotect)
    }

    /// Calls a function that does something with a snapshot.
    fn on_snapshot(
        &self,
        call: &'static str,
        name: &str,
        function: impl Fn(&RbdFunctions) -> unsafe extern "C" fn(rbd_image_t, *const c_char) -> c_int,
    ) -> Result<(), RbdError> {
        let (handles, rbd) = self.parts();
        let name = c_string("the snapshot", name)?;
        // SAFETY: the image is open; a text.
        RbdError::check(call, unsafe { function(rbd)(handles.image, name.as_ptr()) }).map(drop)
    }
}

/// Identifies a snapshot of an image. A name may be used again, but the number is its own.
pub(super) fn snapshot_identity(image: &str, number: u64) -> String {
    format!("{image} snapshot {number}")
}
