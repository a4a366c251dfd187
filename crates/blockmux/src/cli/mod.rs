//! The commands, apart from `serve`: clients of a daemon or of other servers.

pub(crate) mod bench;
pub(crate) mod command_docs;
pub(crate) mod copy;
pub(crate) mod ctl;
pub(crate) mod discover;
pub(crate) mod info;
pub(crate) mod rdma;
pub(crate) mod report;
pub(crate) mod reset;
mod show;
pub(crate) mod top;
