//! The NVMe/TCP initiator: an admin queue, and I/O queues of one namespace (TCP Transport 1.0).
//!
//! ```text
//!   AdminSession: ICReq ▶ bring-up ▶ ready: Keep Alive, until it is stopped
//!         └ Controller ▶ QueueSession: for each I/O queue ICReq ▶ Connect ▶ I/O, until it is stopped
//! ```
//! Each queue is one connection. `line` is what both have: PDUs as they come and go, with their digests, data
//! to its place and data that the controller asks for. [`crate::fabrics::host`] has what the commands mean. An
//! admin queue holds the association: when its connection ends, the controller and all its I/O queues are gone.
//!
//! What bounds a session: 30 seconds until the bring-up is over and CAP.TO for the controller to become ready; 1024
//! I/O of a queue, four commands each, not more commands than the queue has entries; each byte of a command's data once; a Keep
//! Alive that is not answered until the next is due. Whatever goes wrong below commands ends the connection with a
//! termination that names the field, and other sessions replay.

mod admin;
mod lane;
mod line;
mod pdu;
mod queue;
mod receive;
mod send;

#[cfg(test)]
mod tests;

pub use crate::fabrics::host::{
    AdminConfig, Ask, ControllerInfo, FoundSubsystem, HostId, Names, NamespaceInfo, Refused,
};
pub use admin::AdminSession;
pub use queue::{QueueConfig, QueueSession};

/// What to agree on for one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    /// CRC-32C over headers.
    pub header: bool,
    /// CRC-32C over data.
    pub data: bool,
}
