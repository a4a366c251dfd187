//! ublk: a volume as a block device of this machine's Linux, without I/O of its own.
//!
//! [`UblkQueue`] is one queue of a device. Requests of the kernel go in, I/O of the volume and
//! replies come out; it does not know how they travel. A disk is one more client of the volume: it
//! has no identity, so a reservation of another client excludes it, as an NBD client.
//!
//! ```text
//!   kernel ──IoDesc──▶ on_request ──▶ poll_io ──▶ volume ──▶ on_io ──▶ poll_reply ──▶ kernel
//!   data of a write ─▶ on_data ───────┘
//! ```
//! The data of a request may instead be a buffer that the driver has registered with the core's
//! ring, for volumes that take it ([`blockmux_volume::VolumeInfo::registered_alignment`]).

mod params;
mod queue;

pub use blockmux_wire::ublk as wire;
pub use params::{MAX_BYTES, aligns_for, describes, disk_params, sectors};
pub use queue::{NewRequest, Reply, UblkQueue};
