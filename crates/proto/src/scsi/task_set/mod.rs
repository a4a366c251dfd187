//! Transport-independent task management (SAM-5 §5 to §8), from the arrival of a command to its
//! response.
//!
//! ```text
//!                             ┌── fetch ──▶ Data ───┐
//!   transport ──▶ start ──▶ drive ◀── deliver_data ─┘
//!                             ├── I/O queue ──▶ Io ──▶ on_volume_io ──▶ drive
//!                             ├── Wait, Pause ──▶ Wait ──▶ resume_waiting, resume_paused ──▶ drive
//!                             └── complete, when no data is in flight ──▶ the transport's response
//! ```
//! A [`TaskSet`] holds the tasks of one I_T nexus and its device server. Several drivers may share
//! it, as the connections of an iSCSI session do; each has a [`TaskQueue`] for the I/O that it
//! submits. A driver that aborts a task of another one marks the task and posts a [`TaskEvent`]. A
//! [`ScsiTransport`] provides access to both, and [`TaskRouter`] executes tasks on top of it, with
//! static dispatch.
//!
//! A task management function is answered when the I/O of every aborted task has completed, so none
//! of it can reach the volume afterwards. Aborted tasks of this nexus are counted. Tasks of other
//! nexuses, which CLEAR TASK SET and resets abort as well, end with their next step; the function
//! waits for all I/O that was in flight at the volume.

mod background;
mod functions;
mod router;
mod tasks;
mod transport;

#[cfg(test)]
mod tests;

pub use background::BackgroundWork;
pub(crate) use functions::FunctionDone;
pub(crate) use router::TaskRouter;
pub(crate) use tasks::{TaskEntry, TaskQueue, TaskSet, TaskState};
pub(crate) use transport::{ScsiTransport, TaskEvent, TransportParts};
