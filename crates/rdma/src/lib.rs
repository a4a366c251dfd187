//! Queue pairs: reliable connections in the model of the verbs, whose peers read and write
//! registered memory.
//!
//! iSER, SRP and NVMe/RDMA run on [`Provider`], with the types of [`blockmux_proto::rdma`]. A
//! provider is a state machine without I/O, as a session is: software iWARP runs over a byte
//! stream, and the loopback has both ends in one thread. [`Regions`] is the table by which
//! providers register memory for the peer and check its accesses.
#![forbid(unsafe_code)]
#![warn(clippy::indexing_slicing, clippy::unwrap_used, clippy::arithmetic_side_effects)]

#[cfg(any(test, feature = "conformance"))]
#[allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "a suite for tests: what is out of bounds fails the test"
)]
pub mod conformance;
pub mod device;
mod driven;
pub mod iwarp;
#[cfg(any(test, feature = "conformance"))]
pub mod loopback;
mod queue_pair;
mod regions;
pub mod roce;
mod unpredictable;

pub use driven::Driven;
pub use queue_pair::{Caps, Fault, Provider, Violation};
pub use regions::{MAX_REGIONS, Refusal, Regions, RegisterError, Seed};
