//! A host's side of NVMe over Fabrics, for any transport: what an admin queue asks, and a namespace
//! as a queue of I/O (Base 2.0 §3.3, NVM Command Set 1.0).
//!
//! ```text
//!   HostAdmin:  AdminCommands: Connect, properties, Identify ... ──Request──▶ transport ──▶ controller
//!   HostQueues: each NamespaceQueue: submit ──▶ Job ──cut into commands──▶ next ──Request──▶ transport
//!                  poll_done ◀── Job ◀── verdict on the status ◀── finish ◀── transport
//! ```
//! A queue has its transport send commands whenever that may send some; the transport moves the
//! data that `Commands` names, and hands in the completion (`transport.rs`, decision 37). Commands
//! that failed for a reason that passes are sent again after a pause; I/O that failed on its way to
//! the namespace is handed back, for another path or for later.

mod access;
mod admin;
mod authenticate;
mod bring_up;
mod changes;
mod command;
mod completion_class;
mod delayed;
mod discovery;
mod info;
mod io_queue;
mod io_queues;
mod plan;
mod queue;
mod refused;
#[cfg(test)]
pub(crate) mod testing;
mod transport;

#[cfg(test)]
mod tests;

pub use admin::{AdminConfig, AdminResults, Ask, HostAdmin};
pub use command::HostId;
pub use discovery::FoundSubsystem;
pub use info::{ControllerInfo, NamespaceInfo, uuid_text};
pub use io_queue::HostQueue;
pub use io_queues::{HostQueues, QueueConfig};
pub use refused::NvmeRefused;

pub use crate::io_queue::DEPTH;
pub(crate) use crate::io_queue::DataTransfer;
pub(crate) use bring_up::ADMIN_ENTRIES;
pub(crate) use io_queue::QueueShape;
pub(crate) use transport::{Commands, HostTransport, NvmeRequest};

use crate::nvme::nqn::Nqn;

/// Who connects, and where to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    /// The host's name.
    pub host: Nqn,
    /// The host's identifier: reservations belong to it.
    pub host_id: HostId,
    /// The subsystem's name.
    pub subsystem: Nqn,
}
