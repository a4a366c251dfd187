//! The HTTP API of a daemon, as both sides know it: addresses, errors and bodies.
//!
//! The daemon serves it in `serve/api/`, and [`client`] speaks it.

mod address;
pub(crate) mod bodies;
pub(crate) mod client;
mod error;
mod peer;

pub(crate) use address::{ApiAddress, ControlPath};
pub(crate) use error::{ApiError, ErrorBody, ErrorCode};
pub(crate) use peer::check_peer;

/// The longest body of an answer, in bytes: the status of tens of thousands of volumes.
pub(crate) const MAX_ANSWER: u64 = 16 << 20;
