//! Task management without a transport (SAM-5 §5 to §8): what becomes of a command between its
//! arrival and its response.
//!
//! ```text
//!                            ┌── fetch ──▶ Data ──┐          ┌─ on_volume_io ─┐
//!   transport ──▶ start ──▶ drive ◀─ deliver_data ──┘          │                │
//!                            ├── I/O queue ──▶ Io ───────────┘                ▼
//!                            ├── Wait, Pause ──▶ Wait ── resume_waiting, resume_paused ──▶ drive
//!                            └── complete, once no data is on its way ──▶ the transport's response
//! ```
//! A [`TaskSet`] has the tasks of one I_T nexus and its device server. Several drivers may have
//! parts in it, as the connections of an iSCSI session do: each has a [`TaskQueue`] for the I/O
//! that it submits. Where one aborts a task of another's, the task is marked and the other gets a
//! [`TaskEvent`]. A [`Transport`] has both at hand, and what [`TaskRouter`] adds to it drives them;
//! everything is dispatched statically.
//!
//! Functions are answered when the I/O of every task that they aborted has completed: afterwards
//! nothing of them reaches the volume. Tasks of this nexus are counted for that. Tasks of other
//! nexuses, which CLEAR TASK SET and resets abort too, end with their next step; for their I/O, the
//! function waits until all is over that was in flight at the volume.

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
pub(crate) use transport::{Parts, ScsiTransport, TaskEvent};
