//! The controller side of NVMe over Fabrics, for any transport.
//!
//! ```text
//!   transport ──command──▶ queue ──Connect──▶ connect ──▶ an admin or I/O queue of a Subsystem
//!        ▲                 │   │                 ▲
//!        │                 │   │                 └── node: subsystems and ports
//!        └─data, completion┘   └──▶ control_commands, nvme::admin, nvme::io
//! ```
//! A connection is one queue: its first command is Connect, which makes it an admin or an I/O
//! queue. A host that has to authenticate does so before any other command. Fused commands wait for
//! each other (`fused.rs`). Events from other cores are read at each turn.
//!
//! Bounds of a queue: 30 seconds until it is connected and its host is authenticated; then as many
//! commands as it has entries, at most 1,024, and 4 Asynchronous Event Requests. Every command for
//! which the queue has an entry is accepted, because data of earlier commands may follow it in the
//! same stream. At most 64 MiB of data are in flight or unsent; further commands wait before they
//! begin or their data is fetched. A host that sends nothing for longer than its Keep Alive Timeout
//! loses all of its queues, on all cores (decision 13).
//!
//! `FabricsTransport` in `transport.rs` is the interface to a transport (decision 37).

mod aborts;
mod audit;
mod commands;
mod connect;
mod control_commands;
mod discovery;
mod fused;
mod keep_alive;
pub mod node;
mod queue;
#[cfg(test)]
pub(crate) mod testing;
mod timers;
mod transport;
pub mod unconnected;
mod unstarted;

#[cfg(test)]
mod tests;

pub(crate) use commands::CommandSlot;
pub use queue::{ControllerQueue, MakeNotifier};
pub use transport::FabricsTransport;
pub(crate) use transport::{DataPlace, Descriptor};
