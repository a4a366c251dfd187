//! The SCSI RDMA Protocol (T10 SRP revision 16a): information units as messages of a queue pair,
//! and data by RDMA.
//!
//! ```text
//!   initiator                                       target
//!   connection request: SRP_LOGIN_REQ ────────────▶ SRP_LOGIN_RSP or SRP_LOGIN_REJ
//!   Send: SRP_CMD [, immediate data] ─────────────▶ RDMA Read of data-out
//!                                     ◀──────────── RDMA Write of data-in, then
//!                                     ◀──────────── Send: SRP_RSP, which gives the credit back
//! ```
//! This is a thin transport. `scsi::task_set` executes the commands, and
//! [`crate::rdma::QueuePair`] carries the messages over any provider. This module has the rest: the
//! login in the private data of a connection, descriptors of the initiator's memory, and credits.
//! Decision 56 has the reasons.
//!
//! SRP has no discovery over RDMA/CM: the user gives the initiator the 16-byte identifier of the
//! target port. Each queue pair is one RDMA channel. An initiator port may open several channels to
//! one target port; each has its own task set, as in Linux's target.

pub mod client;
mod information_unit;
mod login;
pub mod node;
pub mod server;
pub mod url;
