//! NBD, target and initiator.

pub mod initiator;
pub mod uri;
