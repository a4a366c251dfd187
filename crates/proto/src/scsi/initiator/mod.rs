//! The SCSI application client: a logical unit as a queue of I/O, for every transport (SAM-5,
//! SPC-5, SBC-4).
//!
//! ```text
//!   submit ──▶ Job ──cut into commands──▶ next ──Request──▶ transport ──▶ target
//!   poll_done ◀── Job ◀── class of status and sense ◀── finish ◀── transport ◀──
//! ```
//! A `ScsiQueue` first identifies the unit with commands of its own (`bring_up`). Then it splits
//! I/O into commands that the unit supports, and completes the I/O from their results. A transport
//! takes the next command when it may send one, transfers the data that the queue refers to, and
//! reports the result. Commands that met a unit attention are sent again at once, after the changed
//! property was queried (`changes`); commands that met a busy unit are sent again after a delay.

mod aborts;
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

pub(crate) use crate::initiator::command_queue::DataTransfer;

pub(crate) use aborts::{AbortLadder, AbortStep, FunctionEnd, FunctionTag};
pub(crate) use queue::{ScsiOutcome, ScsiQueue, ScsiRequest};
pub(crate) use retries::ScsiQueueTimers;
