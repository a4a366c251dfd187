//! Login phase of both sides (RFC 7143 §6).

pub mod chap;
mod declarations;
pub(super) mod failure;
pub(super) mod initiator;
mod initiator_security;
pub(super) mod joinable;
mod keys;
pub mod operational;
pub mod rdma;
pub(super) mod refused;
mod security;
pub(super) mod target;
