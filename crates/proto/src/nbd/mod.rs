//! NBD, target and initiator.

pub mod client;
mod errno;
pub mod server;
pub mod uri;
