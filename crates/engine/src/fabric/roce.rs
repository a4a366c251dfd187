//! Software RoCEv2 over UDP.

use super::{Fabric, Setup, StreamFabric};
use crate::net::roce::RoceHost;
use blockmux_proto::rdma::Endpoint;
use blockmux_rdma::roce::records::RoceRecords;

/// The initiator's side of software RoCEv2.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoceFabric;

impl Fabric for RoceFabric {
    type QueuePair = RoceRecords;
    type Host = RoceHost;

    fn connect(&self, endpoint: &Endpoint, setup: Setup) -> RoceRecords {
        RoceRecords::active(endpoint, setup.transport.flow, setup.pool, setup.seed, setup.now)
    }

    fn accept(endpoint: &Endpoint, setup: Setup) -> RoceRecords {
        RoceRecords::passive(endpoint, setup.transport.flow, setup.pool, setup.seed, setup.now)
    }
}

impl StreamFabric for RoceFabric {}
