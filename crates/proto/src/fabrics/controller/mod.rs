//! The controller side of NVMe over Fabrics, for any transport.
//!
//! ```text
//!   transport ──command──▶ queue ──Connect──▶ connect ──▶ an admin or I/O queue of a Subsystem
//!        ▲                 │   │                 ▲
//!        │                 │   │                 └── node: which subsystems there are, and where
//!        └─data, completion┘   └──▶ control_commands, nvme::admin, nvme::io
//! ```
//! A connection is one queue: its first command is Connect, which makes it an admin or an I/O
//! queue. A host that has to prove who it is does so before anything else. Two commands that are
//! fused wait for each other (`fused.rs`). What other cores tell a queue is read at each turn.
//!
//! What bounds a queue: 30 seconds until it is connected and its host has proved who it is; then as
//! many commands as it has entries, at most 1,024, and 4 that wait for events. Every command that
//! the queue has an entry for is taken, for the data of those before it may lie behind it in the
//! same stream; but only 64 MiB of data are in flight and unsent, and the commands of more wait
//! before they are begun or their data is fetched. A host whose controller has a Keep Alive Timeout
//! and that is silent for longer loses all of its queues, whatever cores they are on (decision 13).
//!
//! What a transport has to do, and no more, is `Transport` in `transport.rs` (decision 37).

mod audit;
mod change_transport;
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
pub(crate) use transport::{DataPlace, Descriptor, FabricsTransport};
