//! NVMe subsystems, controllers and commands, independent of how commands and data are transported.
//!
//! ```text
//!   transport ──command──▶ AdminQueue::execute ──▶ Outcome            (at once, or held: asynchronous events)
//!   transport ──command──▶ IoCommand::parse ─▶ begin ─▶ Step ─▶ on_io ─▶ ... ─▶ Outcome
//! ```
//! | file | has |
//! |---|---|
//! | `subsystem.rs` | subsystems and namespaces, shared by all cores |
//! | `association.rs` | the registry of controllers and their queues; not accessed by commands |
//! | `auth/` | authentication: secrets, keys, DH-HMAC-CHAP |
//! | `hosts.rs` | which hosts may connect, and what they see |
//! | `identity.rs` | globally unique identifiers of namespaces |
//! | `ana.rs` | ANA groups and their states at each port |
//! | `event_queue.rs` | events from other cores to a queue: changes, and commands to abort |
//! | `admin.rs` | the admin queue: features, properties; `identify.rs` and `log_page.rs` fill its pages |
//! | `errors.rs` | the error information log |
//! | `events.rs` | asynchronous events and their logs |
//! | `io.rs` | commands of I/O queues, step by step; `reservation.rs` and `fused.rs` have those that need more than I/O, `ranges.rs` the range lists |
//! | `traffic.rs` | I/O counters of queues |
//! | `status.rs` | the status for each error of a volume |
//!
//! A controller lives on the core of its admin queue, and I/O takes no lock on it. The state that
//! other cores need, its existence and its queues, is in its `association`.

pub(crate) mod admin;
pub mod ana;
pub(crate) mod association;
pub mod auth;
pub(crate) mod errors;
pub(crate) mod event_queue;
mod events;
mod fused;
pub mod hosts;
mod identify;
pub mod identity;
pub(crate) mod io;
mod log_page;
pub mod nqn;
mod outcome;
pub(crate) mod property;
mod ranges;
mod reservation;
mod status;
pub mod subsystem;
mod temperature;
#[cfg(test)]
mod tests;
pub(crate) mod traffic;

pub use crate::driver::session::HangUp;
pub use event_queue::Notifier;
pub(crate) use outcome::NvmeOutcome;

/// MDTS: longest data of one command, in bytes.
pub(crate) const MAX_DATA: usize = 4096 << MDTS;
/// MDTS as in Identify Controller: log2, in units of 4 KiB.
const MDTS: u8 = 8;
/// CAP.MQES: most entries of a queue, 0's based.
pub(crate) const MQES: u16 = 1023;
/// Most I/O queues of a controller.
pub(crate) const MAX_IO_QUEUES: u16 = 128;
/// Most pending Aborts of commands on I/O queues.
pub(crate) const MAX_ABORTS: usize = 4;
/// Most outstanding Asynchronous Event Requests of a controller.
pub(crate) const MAX_EVENT_REQUESTS: usize = 4;
