//! What task management asks of the transport that carries it.

use super::functions::FunctionDone;
use super::tasks::{TaskQueue, TaskSet};
use crate::scsi::{Response, Sense};
use blockmux_volume::{Completion, SgList};
use std::time::Instant;

/// A transport, as the tasks of a nexus drive it.
///
/// The transport hands commands in ([`TaskRouter::start`]), data-out that it was to fetch
/// ([`TaskRouter::deliver_data`]) and completions of I/O ([`TaskRouter::on_volume_io`]). It calls
/// back from none of its own methods, but for [`TaskRouter::drop_task`] in [`Transport::complete`].
///
/// [`TaskRouter::start`]: super::TaskRouter::start
/// [`TaskRouter::deliver_data`]: super::TaskRouter::deliver_data
/// [`TaskRouter::on_volume_io`]: super::TaskRouter::on_volume_io
/// [`TaskRouter::drop_task`]: super::TaskRouter::drop_task
pub(crate) trait ScsiTransport {
    /// How far the data of one command has come.
    type Progress;

    /// The task set, and the part in it of the driver that calls.
    fn parts(&mut self) -> Parts<'_, Self::Progress>;

    /// Fetches the next `len` bytes of a task's data-out. What is here already is returned at once.
    fn fetch(&mut self, slot: usize, len: usize) -> Option<Result<SgList, Sense>>;

    /// Whether data of the command may still come, for which its response has to wait.
    fn is_receiving(progress: &Self::Progress) -> bool;

    /// Whether data of the task in this slot is being written to its memory, which an abort has to
    /// wait for.
    fn is_fetching(&mut self, slot: usize) -> bool;

    /// Drops the task in this slot, and then sends its response.
    fn complete(&mut self, slot: usize, response: &mut Response);

    /// The task in this slot goes: frees what the transport holds for it.
    fn release(&mut self, slot: usize);

    /// A task management function that this driver brought is done.
    fn on_function_done(&mut self, done: FunctionDone);

    /// Leaves an event for another driver; `false`: it is gone.
    fn post(&mut self, owner: u32, event: TaskEvent) -> bool;
}

/// A task set, and one driver's part in it.
pub(crate) struct Parts<'a, P> {
    pub(crate) tasks: &'a mut TaskSet<P>,
    pub(crate) queue: &'a mut TaskQueue,
    /// The driver's number, never 0.
    pub(crate) owner: u32,
    /// When the driver's latest call came.
    pub(crate) now: Instant,
}

/// What one driver of a task set leaves for another.
pub(crate) enum TaskEvent {
    /// The task in that slot was aborted while its I/O is in flight.
    Cancel(usize),
    /// The task in that slot was aborted, by the function in that place, and waits for nothing.
    Drop(usize, Option<usize>),
    /// A function that this driver brought is done.
    FunctionDone(FunctionDone),
    /// I/O of a task that was another driver's.
    Completed(Completion),
}
