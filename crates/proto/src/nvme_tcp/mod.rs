//! NVMe over TCP: PDUs, digests and data transfer (TCP Transport 1.0 and 1.1). [`crate::fabrics`]
//! interprets the commands.

pub mod client;
mod pdu;
pub mod server;
