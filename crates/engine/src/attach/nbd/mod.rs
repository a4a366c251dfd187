//! Volumes as disks by the kernel's NBD client, without a network and without `nbd-client`.
//!
//! ```text
//!   netlink         ◀── NbdNetlink ◀── NbdDisk: connect, replace sockets, disconnect
//!   pairs of sockets ◀─ sessions of the NBD target on the cores, one for each connection
//!   /dev/nbdN       ──▶ the disk, for everybody
//! ```
//! | file | contains |
//! |---|---|
//! | `connections` | the sockets of a disk: made, watched, replaced |
//! | `disk` | the life of a disk |
//! | `netlink` | commands to the driver |
//!
//! See `docs/decisions/0098-attached-volumes-without-ublk.md`.

mod connections;
mod disk;
mod netlink;

pub use disk::{NbdDisk, disk_of, forget};
pub use netlink::{NetlinkError, probe};
