//! Connections over RDMA devices, each as a stream of records ([`blockmux_rdma::device`]).
//!
//! ```text
//!   session ── DeviceQueuePair ──WorkRecord──▶ VerbsStream ──▶ DeviceQueues ──▶ device
//!                              ◀─EventRecord──             ◀──             ◀──
//! ```
//! Each connection has two file descriptors: of its events and of its completions. A hot task polls
//! the completion queue in memory; a parked one is woken through the core's ring by either
//! descriptor. There is no thread, and beside the session's only one task for each device, which
//! watches its asynchronous events (decision 103).

mod device_events;
mod device_watch;
mod event_queue;
mod host;
mod login;
mod queues;
mod signal;
mod stream;

pub use host::VerbsHost;
pub(crate) use queues::explained;
pub use stream::VerbsStream;
