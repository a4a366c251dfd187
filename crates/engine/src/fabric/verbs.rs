//! RDMA devices, through rdma-core.

use super::{Fabric, Setup, StreamFabric};
use crate::net::verbs::VerbsHost;
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
