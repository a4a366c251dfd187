//! The host side of NVMe over Fabrics, for any transport: initialization of a controller by the
//! admin queue, and I/O to a namespace over I/O queues (Base 2.0 §3.3, NVM Command Set 1.0).
//!
//! ```text
//!   HostAdmin:  AdminCommands: Connect, properties, Identify ... ──Request──▶ transport ──▶ controller
//!   HostQueues: each NamespaceQueue: submit ──▶ Job ──split into commands──▶ next ──Request──▶ transport
//!                  poll_done ◀── Job ◀── class of the status ◀── finish ◀── transport
//! ```
//! A queue passes commands to its transport whenever the transport may send; the transport
//! transfers the data that `Commands` provides, and returns the completions (`transport.rs`,
//! decision 37). Commands that failed for a transient reason are sent again after a delay. I/O that
//! failed on the path to the namespace is handed back, for another path or for later.

mod access;
mod admin;
mod authenticate;
mod bring_up;
mod changes;
mod command;
mod completion_class;
mod delayed;
mod discovery;
mod host_queue;
mod host_queues;
mod info;
mod namespace_queue;
mod plan;
mod refused;
#[cfg(test)]
pub(crate) mod testing;
mod transport;

#[cfg(test)]
mod tests;

pub use admin::{AdminConfig, AdminResults, ControllerQuery, HostAdmin};
pub use command::HostId;
pub use discovery::FoundSubsystem;
pub use host_queue::HostQueue;
pub use host_queue::QueueConfig;
pub use host_queues::HostQueues;
pub use info::{ControllerInfo, NamespaceInfo, uuid_text};
pub use refused::NvmeRefused;

pub use crate::initiator::command_queue::DEPTH;
pub(crate) use crate::initiator::command_queue::DataTransfer;
pub(crate) use bring_up::ADMIN_ENTRIES;
pub(crate) use host_queue::QueueShape;
pub(crate) use transport::{Commands, HostTransport, NvmeRequest};

use crate::nvme::nqn::Nqn;

/// Names of the host and of the subsystem that it connects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    /// Host NQN.
    pub host: Nqn,
    /// Host identifier, which owns reservations.
    pub host_id: HostId,
    /// Subsystem NQN.
    pub subsystem: Nqn,
}
