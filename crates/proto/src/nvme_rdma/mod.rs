//! NVMe/RDMA (NVMe RDMA Transport 1.0): capsules as messages of a queue pair, and data by RDMA.
//!
//! ```text
//!   host                                              controller
//!   RDMA_CM_REQUEST: QID, sizes of its queues ──────▶ RDMA_CM_ACCEPT, or RDMA_CM_REJECT with the reason
//!   Send: command [, data in the capsule] ──────────▶ RDMA Read of data that is in the host's memory
//!                                          ◀────────── RDMA Write of data for the host, then
//!                                          ◀────────── Send (with Invalidate): completion
//! ```
//! This is a thin transport. [`crate::fabrics`] interprets the commands, and
//! [`crate::rdma::QueuePair`] carries the messages over any provider. This module has the rest:
//! private data of connections, keyed SGLs, ownership of receive buffers, and the order of data and
//! completion. Decision 55 has the reasons.

pub mod client;
mod cm;
pub mod server;
