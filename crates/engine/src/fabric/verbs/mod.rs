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
mod listener;
mod login;
mod queues;
mod signal;
mod stream;

pub use host::VerbsHost;
pub use listener::VerbsListener;

use super::{Fabric, Setup, StreamFabric};
use blockmux_proto::rdma::Endpoint;
use blockmux_rdma::device::DeviceQueuePair;

/// The initiator's side of devices.
#[derive(Clone, Copy, Debug, Default)]
pub struct VerbsFabric;

impl Fabric for VerbsFabric {
    type QueuePair = DeviceQueuePair;
    type Host = VerbsHost;

    fn connect(&self, endpoint: &Endpoint, setup: Setup) -> DeviceQueuePair {
        DeviceQueuePair::active(endpoint, setup.now)
    }

    fn accept(endpoint: &Endpoint, setup: Setup) -> DeviceQueuePair {
        DeviceQueuePair::passive(endpoint, setup.now)
    }
}

impl StreamFabric for VerbsFabric {}
