//! QEMU's image locks (`raw_apply_lock_bytes` in its `block/file-posix.c`).
//!
//! Each permission has two bytes. A program that uses the permission holds a shared lock on the
//! first byte; one that does not let others use it holds a shared lock on the second. A conflict is
//! another program's lock on the second byte of a permission that we use, or on the first of one
//! that we do not share.

use super::kernel;
use std::fs::File;
use std::io;

/// Takes a reader's or writer's locks until the file is closed; `false` if another program's locks
/// conflict.
pub(super) fn take(file: &File, read_only: bool) -> io::Result<bool> {
    let (used, unshared): (&[i64], &[i64]) = if read_only {
        (&[CONSISTENT_READ], &[])
    } else {
        (&[CONSISTENT_READ, WRITE, RESIZE], &[WRITE, RESIZE])
    };
    // All locks are taken before any is tested: if two programs start at once, at least one of them
    // then sees the other.
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
/// Bit numbers of QEMU's BLK_PERM_CONSISTENT_READ, BLK_PERM_WRITE and BLK_PERM_RESIZE.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;
