//! NBD, target and initiator.

mod errno;
pub mod target;
