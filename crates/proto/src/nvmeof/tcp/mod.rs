//! The TCP transport (TCP Transport 1.0 and 1.1).

pub mod client;
mod pdu;
pub mod server;
