//! iSCSI over TCP (RFC 7143, RFC 7144): text and its keys, login, and the target's sessions.

mod digest;
pub mod login;
pub mod name;
pub mod node;
mod pdu;
pub mod sessions;
pub mod target;
pub mod text;
