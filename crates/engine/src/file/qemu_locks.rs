//! The locks by which QEMU's programs see who uses an image (`raw_apply_lock_bytes` in its
//! `block/file-posix.c`).
//!
//! Each permission has two bytes. Who uses it holds a shared lock on the first, who lets nobody
//! else use it on the second. So a conflict is a lock of somebody else on the second byte of what
//! we use, or on the first of what we do not share.

use super::kernel;
use std::fs::File;
use std::io;

/// Takes the locks of a reader or a writer until the file is closed; `false` if somebody else's
/// exclude that.
pub(super) fn take(file: &File, read_only: bool) -> io::Result<bool> {
    let (used, unshared): (&[i64], &[i64]) = if read_only {
        (&[CONSISTENT_READ], &[])
    } else {
        (&[CONSISTENT_READ, WRITE, RESIZE], &[WRITE, RESIZE])
    };
    // All are taken before any is looked at, so that of two who come at once at least one sees the
    // other.
    for permission in used {
        kernel::lock_byte(file, USED + permission)?;
    }
    for permission in unshared {
        kernel::lock_byte(file, UNSHARED + permission)?;
    }
    for permission in used {
        if kernel::is_byte_locked(file, UNSHARED + permission)? {
            return Ok(false);
        }
    }
    for permission in unshared {
        if kernel::is_byte_locked(file, USED + permission)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// QEMU's RAW_LOCK_PERM_BASE and RAW_LOCK_SHARED_BASE.
const USED: i64 = 100;
const UNSHARED: i64 = 200;
/// The numbers of the bits of its BLK_PERM_CONSISTENT_READ, BLK_PERM_WRITE and BLK_PERM_RESIZE.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;
