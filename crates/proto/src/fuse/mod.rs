//! FUSE: volumes as files of this machine's Linux, without I/O of its own.
//!
//! [`FuseQueue`] is a file system with one directory, which has a file for each volume. Requests of
//! the kernel go in, I/O of the volumes and replies come out. It is one more client of each volume:
//! it has no identity, so a reservation of another client excludes it, as an NBD client.
//!
//! ```text
//!   kernel ──request, data──▶ on_request ─┬▶ poll_io ─▶ volume ─▶ on_io ─┬▶ poll_reply ──▶ kernel
//!                                         └───── names, attributes ──────┘
//! ```
//! Reads, writes and zeroes may have any alignment, as those of NBD clients.
//!
//! See `docs/decisions/0098-attached-volumes-without-ublk.md`.

mod directory;
mod queue;
mod reply;

pub use blockmux_wire::fuse as wire;
pub use directory::{FileAccess, FuseFile};
pub use queue::{FuseLimits, FuseQueue, HEAD_LEN, MAX_BYTES, MAX_MESSAGE, data_len};
pub use reply::FuseReply;
