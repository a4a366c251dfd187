//! NVMe over Fabrics independent of the transport: Connect, discovery, authentication, and both
//! sides of a queue.
//!
//! ```text
//!   transport ──command──▶ controller: Connect, authentication, nvme::admin, nvme::io ──data, completion──▶ transport
//!   transport ◀──command── host: admin commands, I/O of one namespace ◀──data, completion── transport
//!
//!   TLS handshake ──▶ keyring: the key of an identity
//! ```
//! A transport carries commands, data and completions, and nothing else. [`crate::nvme_tcp`] and
//! [`crate::nvme_rdma`] are transports.

pub mod controller;
pub mod host;
pub mod keyring;
pub mod url;
