//! The TCP transport (TCP Transport 1.0 and 1.1).

mod pdu;
pub mod target;
