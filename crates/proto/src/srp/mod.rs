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
//! This is a thin transport. `scsi::task_set` knows what becomes of a command, and
//! [`crate::rdma::QueuePair`] carries the messages over whatever provider. What is left is here:
//! the login in the private data of a connection, descriptors of the initiator's memory, and
//! credits. Decision 56 has the reasons.
//!
//! SRP has no discovery over RDMA/CM: an initiator is told the 16 bytes of the target port's
//! identifier. Each queue pair is one RDMA channel; an initiator port may have several to one
//! target port, and each has a task set of its own, as in Linux's target.

pub mod client;
mod information_unit;
mod login;
pub mod node;
pub mod server;
pub mod url;
