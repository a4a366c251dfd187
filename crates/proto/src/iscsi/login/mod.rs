//! Login: who talks to whom, and how (RFC 7143 §6).

pub mod chap;
pub mod operational;
mod security;
pub(super) mod target;
