//! NVMe: subsystems, their controllers, and what commands do. Nothing here knows how commands and
//! data travel.
//!
//! ```text
//!   transport ──command──▶ AdminQueue::execute ──▶ Outcome            (at once, or held: asynchronous events)
//!   transport ──command──▶ IoCommand::parse ─▶ begin ─▶ Step ─▶ on_io ─▶ ... ─▶ Outcome
//! ```
//! | file | has |
//! |---|---|
//! | `subsystem.rs` | what is served: namespaces; the same for all cores |
//! | `association.rs` | which controllers there are, and which queues each has; no command looks at it |
//! | `auth/` | how hosts and controllers prove who they are: secrets, keys, DH-HMAC-CHAP |
//! | `hosts.rs` | who may connect, and what they see |
//! | `identity.rs` | what names a namespace wherever it is |
//! | `ana.rs` | how well each port leads to each namespace |
//! | `event_queue.rs` | what other cores tell a queue: changes, and commands to abort |
//! | `admin.rs` | the admin queue: features, properties; `identify.rs` and `log_page.rs` fill its pages |
//! | `errors.rs` | remembers what failed, for the error information log |
//! | `events.rs` | asynchronous events, and what the host has read of them |
//! | `io.rs` | commands of I/O queues, step by step; `reservation.rs` and `fused.rs` have those that are not I/O alone, `ranges.rs` the data of others |
//! | `traffic.rs` | counts what I/O queues have done |
//! | `status.rs` | which status an error of a volume becomes |
//!
//! A controller is where its admin queue is: nothing of it is locked for I/O. What other cores must
//! know of it, that it lives and which queues it has, is its `association`.

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
pub(crate) mod traffic;

pub use crate::session::HangUp;
pub use event_queue::Notifier;
pub(crate) use outcome::NvmeOutcome;

/// MDTS: the most data of one command, in bytes.
pub(crate) const MAX_DATA: usize = 4096 << MDTS;
/// As Identify Controller has it: log2, in units of 4 KiB.
const MDTS: u8 = 8;
/// CAP.MQES: the most entries of a queue, less one.
pub(crate) const MQES: u16 = 1023;
/// The most I/O queues of a controller.
pub(crate) const MAX_IO_QUEUES: u16 = 128;
/// Aborts of commands on I/O queues that may wait at a time.
pub(crate) const MAX_ABORTS: usize = 4;
/// Asynchronous Event Requests of a controller that may wait at a time.
pub(crate) const MAX_EVENT_REQUESTS: usize = 4;
