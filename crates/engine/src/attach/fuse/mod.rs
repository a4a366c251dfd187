//! Volumes as files by FUSE, Linux's driver of file systems in user space: for machines without a
//! driver of block devices in user space, and for users without privileges.
//!
//! ```text
//!   mount(2) or fusermount3 ◀── FuseDisk: mount, first read, unmount
//!   /dev/fuse               ◀── FuseTask (a core): requests with their data, replies
//!   MOUNT_POINT/FILE        ──▶ the volume
//! ```
//! | file | contains |
//! |---|---|
//! | `disk` | the life of a mounted volume |
//! | `mount` | mounting and unmounting, also without privileges, and dead mounts |
//! | `mount_point` | where that is done, and which mount is there |
//! | `fuse_task` | the task of the file system |
//!
//! See `docs/decisions/0098-attached-volumes-without-ublk.md`.

mod disk;
mod fuse_task;
mod mount;
mod mount_point;

pub use disk::{FuseDisk, FuseOptions, forget};
pub use mount::{FuseError, probe};
