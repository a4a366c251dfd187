//! Sans-I/O protocol sessions: bytes, completions and time in; bytes, I/O and deadlines out.
//!
//! A session uses no socket, clock or thread. The engine drives it over real sockets, the simulator
//! over a virtual clock, fuzzers and unit tests by direct calls. Each protocol is a module with a
//! target and an initiator side; [`driver`] defines the traits between a session and its driver.
#![forbid(unsafe_code)]
#![warn(clippy::indexing_slicing, clippy::unwrap_used, clippy::arithmetic_side_effects)]

pub mod aoe;
mod digest;
pub mod driver;
pub mod fabrics;
pub mod fuse;
mod initiator;
pub mod iscsi;
pub mod kernel_disk;
mod multi_step;
pub mod names;
pub mod nbd;
pub mod nvme;
pub mod nvme_rdma;
pub mod nvme_tcp;
pub mod rdma;
pub mod scsi;
mod slots;
pub mod srp;
#[cfg(test)]
pub(crate) mod testing;
pub mod ublk;
pub mod virtio;
pub mod volume_state;

pub use volume_state::exports;
