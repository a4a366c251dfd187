//! NVMe over Fabrics: how hosts connect, what discovery tells, and the transports.
//!
//! ```text
//!   tcp::server ──Connect──▶ connect ──▶ AdminQueue or I/O queue of a Subsystem
//!        │                      ▲
//!        │                      └── Node: which subsystems there are, and where
//!        ├──messages──▶ auth: DH-HMAC-CHAP
//!        └──commands──▶ nvme::admin, nvme::io
//!
//!   bytes of TLS ──▶ keyring, psk: which key a connection has, and whose it is
//!
//!   tcp::client ◀──commands── initiator: an admin queue's questions, I/O of one namespace
//! ```

pub mod auth;
mod connect;
mod discovery;
pub mod initiator;
pub mod keyring;
pub mod node;
mod printed;
pub mod psk;
pub mod tcp;
pub mod unconnected;
pub mod url;
