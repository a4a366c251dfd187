//! iSCSI over TCP (RFC 7143, RFC 7144) and over RDMA (iSER, RFC 7145): text keys, login, target
//! sessions and initiator sessions.

pub mod client;
mod digests;
mod iser;
pub mod login;
pub use crate::scsi::iscsi_name as name;
pub mod node;
mod pdu;
mod sender;
pub mod server;
pub mod sessions;
pub mod text;
mod unexpected;
pub mod url;
