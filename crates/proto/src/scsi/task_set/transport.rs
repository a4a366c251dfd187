//! The interface between task management and a transport.

use super::functions::FunctionDone;
use super::tasks::{TaskQueue, TaskSet};
use crate::scsi::{Response, Sense};
use blockmux_volume::{Completion, SgList};
use std::time::Instant;

/// A transport as task management uses it.
///
/// The transport passes commands ([`TaskRouter::start`]), fetched data-out
/// ([`TaskRouter::deliver_data`]) and I/O completions ([`TaskRouter::on_volume_io`]). It must not
/// call these from its own methods, except [`TaskRouter::drop_task`] from
/// [`ScsiTransport::complete`].
///
/// [`TaskRouter::start`]: super::TaskRouter::start
/// [`TaskRouter::deliver_data`]: super::TaskRouter::deliver_data
/// [`TaskRouter::on_volume_io`]: super::TaskRouter::on_volume_io
/// [`TaskRouter::drop_task`]: super::TaskRouter::drop_task
pub(crate) trait ScsiTransport {
    /// Data transfer state of one command.
    type Progress;

    /// The task set and the calling driver's part of it.
    fn parts(&mut self) -> TransportParts<'_, Self::Progress>;

    /// Fetches the next `len` bytes of a task's data-out. Returns data that is already available.
    fn fetch(&mut self, slot: usize, len: usize) -> Option<Result<SgList, Sense>>;

    /// Whether data of the command may still arrive; the response must wait for it.
    fn is_receiving(progress: &Self::Progress) -> bool;

    /// Whether data is being written to the task's memory; an abort must wait for it.
    fn is_fetching(&mut self, slot: usize) -> bool;

    /// Removes the task in this slot, then sends its response.
    fn complete(&mut self, slot: usize, response: &mut Response);

    /// Frees the transport's resources of the task in this slot.
    fn release(&mut self, slot: usize);

    /// Called when a task management function of this driver has completed.
    fn on_function_done(&mut self, done: FunctionDone);

    /// Posts an event to another driver; `false` if that has ended.
    fn post(&mut self, owner: u32, event: TaskEvent) -> bool;
}

/// A task set and one driver's part of it.
pub(crate) struct TransportParts<'a, P> {
    pub(crate) tasks: &'a mut TaskSet<P>,
    pub(crate) queue: &'a mut TaskQueue,
    /// Number of the driver, never 0.
    pub(crate) owner: u32,
    /// Time of the driver's latest call.
    pub(crate) now: Instant,
}

/// An event from one driver of a task set to another.
pub(crate) enum TaskEvent {
    /// The task in this slot was aborted while its I/O is in flight.
    Cancel(usize),
    /// The task in this slot was aborted by the function in this place and waits for nothing.
    Drop(usize, Option<usize>),
    /// A function of this driver has completed.
    FunctionDone(FunctionDone),
    /// Completion of an I/O whose task now belongs to this driver.
    Completed(Completion),
}
