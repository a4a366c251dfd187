//! Volumes over files and block devices, by the core's io_uring.
//!
//! **Durability.** A flush is `fdatasync`; a write with FUA carries `RWF_DSYNC`, which the kernel
//! turns into a FUA write of the device where it can and into a flush behind the write elsewhere;
//! zeroing and discarding with FUA are followed by `fdatasync`. Once the system has failed to write
//! back, it forgets what it could not write, and the next `fdatasync` succeeds: so after one such
//! failure every flush and FUA of the volume fails until it is opened again. Each channel opens the
//! file for itself, so that each is told of such a failure, and cores share no counter.
//!
//! **Direct I/O** bypasses the page cache, which costs no copy and leaves caching to the clients.
//! It is chosen unless asked otherwise for block devices, and for files where it works in units of
//! at most a logical block, which has 512 bytes by default. On file systems that want more (4Kn
//! disks, btrfs) a file with such blocks is buffered: most disk images and most clients are made
//! for 512-byte blocks, and a volume that reads, changes and writes blocks itself would lose the
//! atomicity of a block that the page cache keeps. Asked for by `direct: Some(true)`, the volume reports the file system's unit as its logical block. Before
//! Linux 6.1, and where a file system does not tell, the unit is that of the block device below, or
//! else 4096. Transfers whose memory is not aligned go through a buffer of the pool.
//!
//! **Registered files and buffers** are not used: 4 KiB random reads at depth 32 by fio's io_uring
//! engine cost 6.5 µs of processor time each without them, 6.0 µs with registered files and 5.8 µs
//! with both, where three runs differed by 1 µs, and from the page cache 2.0 µs in every case
//! (`--registerfiles`, `--fixedbufs`). For that their tables, which belong to a ring that all
//! volumes of a core share, would have to follow every channel and buffer.
//!
//! **Errors.** Reading beyond the end of a file that was cut while it was served is a medium error,
//! not zeroes.

mod bounce;
mod channel;
mod errno;
mod extents;
mod kernel;
mod open;
mod probe;
mod qemu_locks;
mod retry;
mod volume;

pub(crate) use kernel::lock_exclusive;
pub use open::{BlockOptions, FileOptions, OpenError};
pub use volume::FileVolume;
