//! Carries the bytes of a session over a byte stream, with or without TLS.

pub mod blocking;
mod broken;
pub mod connection;
pub mod tls;
