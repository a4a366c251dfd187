//! The SCSI application client: a logical unit of another device as a queue of I/O, the same for
//! every transport (SAM-5, SPC-5, SBC-4).
//!
//! ```text
//!   submit ──▶ Job ──cut into commands──▶ next ──Request──▶ transport ──▶ target
//!   poll_done ◀── Job ◀── verdict on status and sense ◀── finish ◀── transport ◀──
//! ```
//! A `Queue` begins by learning what the unit is like (`bring_up`), with commands of its own. From
//! then on it cuts I/O into commands that the unit takes, and makes completions of how they ended.
//! A transport asks for the next command whenever it may send one, moves the data that the queue
//! names, and tells how the command ended. Commands that met a unit attention are sent again at
//! once, after what it says has changed was asked for (`news`), those that met a busy unit a little
//! later.

mod access;
mod bring_up;
mod changes;
mod command;
mod completion_class;
mod extents;
mod plan;
mod queue;
mod retries;
mod sense;
mod unit;

#[cfg(test)]
mod tests;

pub use bring_up::UnitRefused;
pub use sense::SenseCode;
pub use unit::{UnitInfo, UnmapLimits};

pub(crate) use crate::io_queue::DataTransfer;

pub(crate) use queue::{ScsiOutcome, ScsiQueue, ScsiRequest};
pub(crate) use retries::QueueTimers;
