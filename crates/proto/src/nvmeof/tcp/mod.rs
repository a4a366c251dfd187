//! The TCP transport (TCP Transport 1.0 and 1.1).

pub mod initiator;
mod pdu;
pub mod target;
