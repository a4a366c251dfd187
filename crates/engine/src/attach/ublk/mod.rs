//! Volumes as block devices by ublk, Linux's driver of block devices in user space.
//!
//! ```text
//!   /dev/ublk-control ◀── UblkControl (a thread, a ring) ◀── UblkDisk: add, start, recover, stop, delete
//!   /dev/ublkcN       ◀── QueueTask (a core, its ring): requests, data, results
//!   /dev/ublkbN       ──▶ the disk, for everybody
//! ```
//! | file | contains |
//! |---|---|
//! | `announced_writes` | writes whose data the driver copies |
//! | `control` | control commands, each with a timeout |
//! | `disk` | the life of a disk |
//! | `kernel` | the calls that give addresses to the kernel |
//! | `node` | the nodes of its devices in `/dev` |
//! | `queue_task` | a queue's task |
//! | `size` | the disk follows the size of its volume |
//!
//! See `docs/decisions/0096-attached-disks-use-ublk-without-a-library.md`.

mod announced_writes;
mod control;
mod disk;
mod kernel;
mod node;
mod queue_task;
mod size;

pub use control::{ControlError, driver_features};
pub use disk::{UblkDisk, disk_of, forget, owner};
