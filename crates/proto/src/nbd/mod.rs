//! NBD, target and initiator.

mod errno;
pub mod initiator;
pub mod target;
pub mod uri;
