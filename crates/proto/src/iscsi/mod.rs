//! iSCSI over TCP (RFC 7143, RFC 7144) and over RDMA (iSER, RFC 7145): text and its keys, login, the target's sessions and the initiator's.

mod digests;
mod hello;
pub mod initiator;
mod iser;
pub mod login;
pub mod name;
pub mod node;
mod pdu;
pub mod sessions;
pub mod target;
pub mod text;
mod unexpected;
pub mod url;
