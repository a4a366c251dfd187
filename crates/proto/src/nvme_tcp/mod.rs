//! NVMe over TCP: PDUs, digests and how data moves (TCP Transport 1.0 and 1.1). What commands mean
//! is in [`crate::fabrics`].

pub mod client;
mod pdu;
pub mod server;
