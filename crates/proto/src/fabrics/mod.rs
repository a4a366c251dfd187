//! NVMe over Fabrics without a transport: how hosts connect, what discovery tells, and both sides
//! of a queue.
//!
//! ```text
//!   transport ──command──▶ controller: Connect, authentication, nvme::admin, nvme::io ──data, completion──▶ transport
//!   transport ◀──command── host: an admin queue's questions, I/O of one namespace ◀──data, completion── transport
//!
//!   bytes of TLS ──▶ keyring: which key a connection has, and whose it is
//! ```
//! A transport moves commands, data and completions, and nothing else; [`crate::nvme_tcp`] is one.

pub mod controller;
pub mod host;
pub mod keyring;
pub mod url;
