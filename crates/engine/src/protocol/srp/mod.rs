//! SRP on sockets.

pub mod initiator;
pub mod target;
