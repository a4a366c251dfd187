//! The parts of the daemon's HTTP API that server and client share: addresses, errors and bodies.
//! The server is in `daemon/api/`, the client in [`client`].

pub(crate) mod action;
mod address;
pub(crate) mod bodies;
pub(crate) mod client;
pub(crate) mod cluster;
pub(crate) mod distinct_keys;
pub(crate) mod edit;
mod error;
pub(crate) mod fragment;
pub(crate) mod history;
pub(crate) mod limits;
mod peer;
pub(crate) mod plan;
pub(crate) mod request;
pub(crate) mod status;
mod tls;

pub(crate) use address::{ApiAddress, ControlPath};
pub(crate) use error::{ApiError, ErrorBody, ErrorCode};
pub(crate) use peer::check_peer;
pub(crate) use tls::tls_error;

/// Maximum length of a response's body, in bytes: the status of tens of thousands of volumes.
pub(crate) const MAX_ANSWER: u64 = 16 << 20;
