//! Login: who talks to whom, and how (RFC 7143 §6).

pub mod chap;
mod declarations;
pub(super) mod failure;
pub(super) mod initiator;
pub(super) mod invitation;
mod keys;
pub mod operational;
mod prover;
pub mod rdma;
pub(super) mod refused;
mod security;
pub(super) mod target;
