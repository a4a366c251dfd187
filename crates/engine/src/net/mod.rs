//! Sockets of byte streams and of raw frames, and what their tasks need from a core.

pub(crate) mod fd_socket;
pub mod frames;
pub mod host;
pub mod ktls;
pub mod login_stream;
pub mod namespace;
pub mod socket;
pub mod zone;
