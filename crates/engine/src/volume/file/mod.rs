//! Volumes over files and block devices, by the core's io_uring.
//!
//! **Durability.** A flush is `fdatasync`. A write with FUA carries `RWF_DSYNC`, which the kernel
//! turns into a FUA write of the device if possible, and otherwise into a write and a flush.
//! Zeroing and discarding with FUA are followed by `fdatasync`. After a failed write-back the
//! kernel forgets the unwritten data, and the next `fdatasync` succeeds. So after one such failure
//! every flush and FUA of the volume fails until the volume is opened again. Each channel opens the
//! file itself, so each receives the error, and cores share no counter.
//!
//! **Direct I/O** bypasses the page cache: it saves a copy and leaves caching to the clients. It is
//! the default for block devices, and for files where it works in units of at most a logical block,
//! 512 bytes by default. On file systems with larger units (4Kn disks, btrfs) files with such
//! blocks are buffered by default: most disk images and clients use 512-byte blocks, and
//! read-modify-write in the volume would lose the atomicity of a block that the page cache
//! preserves. With `direct: Some(true)`, the volume reports the file system's unit as its logical
//! block. Before Linux 6.1, and on file systems that do not report the unit, it is that of the
//! block device below, or else 4096. Transfers with unaligned memory use a bounce buffer of the
//! pool.
//!
//! **Files of any length.** The last block of a file that is not whole blocks reads as zeroes where
//! the file has ended. Only a write of anything else there makes the file longer, see
//! `docs/decisions/0084-a-file-of-any-length-is-whole-blocks-and-keeps-its-length.md`. Such a file
//! uses the page cache by default.
//!
//! **Registered files and buffers** are not used. With fio's io_uring engine, 4 KiB random reads at
//! depth 32 cost 6.5 µs of CPU time each without them, 6.0 µs with registered files and 5.8 µs with
//! both, while three runs differed by 1 µs; from the page cache they cost 2.0 µs in every case
//! (`--registerfiles`, `--fixedbufs`). Their tables belong to a ring that all volumes of a core
//! share, and would have to be updated with every channel and buffer.
//!
//! **Errors.** Reading beyond the end of a file that was truncated while it was served is a medium
//! error, and does not return zeroes.

mod bounce;
mod channel;
mod disk;
mod errno;
mod extents;
mod holder;
mod kernel;
mod open;
mod probe;
mod qemu_locks;
mod volume;

pub use holder::{LockHolder, lock_holder};
pub(crate) use kernel::lock_exclusive;
pub use open::{BlockOptions, FileOptions, OpenError};
pub use volume::FileVolume;
