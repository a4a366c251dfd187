//! Queue pairs: reliable connections in the model of the verbs, of which a peer reads and writes
//! registered memory.
//!
//! [`Provider`] is what iSER, and later SRP and NVMe/RDMA, run on; its words are those of
//! [`blockmux_proto::rdma`]. A provider is a state machine without I/O, as a session is: software
//! iWARP takes bytes of a stream, and the loopback has both ends in one thread. [`Regions`] is how
//! providers grant memory, and take it back.
#![forbid(unsafe_code)]
#![warn(clippy::indexing_slicing, clippy::unwrap_used, clippy::arithmetic_side_effects)]

#[cfg(any(test, feature = "conformance"))]
#[allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "a suite for tests: what is out of bounds fails the test"
)]
pub mod conformance;
mod driven;
pub mod iwarp;
#[cfg(any(test, feature = "conformance"))]
pub mod loopback;
mod queue_pair;
mod regions;

pub use driven::Driven;
pub use queue_pair::{Caps, Fault, Provider, Violation};
pub use regions::{MAX_REGIONS, Refusal, Regions, Seed, Unregistrable};
