//! Sans-I/O protocol sessions: bytes, completions and time in; bytes, I/O and deadlines out.
//!
//! A session uses no socket, clock or thread. The engine drives it over real sockets, the simulator
//! over a virtual clock, fuzzers and unit tests by direct calls. Each protocol is a module with a
//! target and an initiator side; [`session`] defines the traits between a session and its driver.
#![forbid(unsafe_code)]
#![warn(clippy::indexing_slicing, clippy::unwrap_used, clippy::arithmetic_side_effects)]

pub mod aoe;
mod backoff;
pub mod computation;
mod coverage;
mod digest;
pub mod event;
pub mod fabrics;
pub mod frames;
mod io_queue;
pub mod iscsi;
mod job;
pub mod nbd;
pub mod networks;
pub mod nvme;
pub mod nvme_rdma;
pub mod nvme_tcp;
pub mod outbox;
pub mod rdma;
mod rdma_cm;
pub mod scsi;
pub mod session;
mod slots;
pub mod srp;
#[cfg(test)]
pub(crate) mod testing;
mod uri;
pub mod volume_state;
pub mod volume_uuid;

pub use volume_state::exports;
