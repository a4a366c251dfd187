//! RoCEv2 over UDP: the port that all connections of an address share, and each connection as a
//! stream of records ([`blockmux_rdma::roce::records`]).
//!
//! ```text
//!                  ┌─ socket 0 ──▶ acceptor: requests for new connections
//!   UDP port 4791 ─┼─ socket 1 ──▶ CorePort of a core ──▶ RoceStream ──▶ task of a session
//!    (RoceGroup)   ├─ socket 2 ──▶ CorePort of another ──▶ RoceStream ──▶ ...
//!                  └─ socket 3 ──▶ a login on an ordinary thread
//! ```
//! The standard has one UDP port, and the peers do not choose which core a packet arrives at: the
//! number of the queue pair does. Each core draws only numbers that belong to its own socket, and a
//! filter of the port has the kernel deliver each packet there (`group.rs`). So cores share
//! nothing, and nothing is passed between them but requests for connections (decision 102).

mod accepted;
mod core_port;
mod group;
mod host;
mod listener;
mod login;
mod packets;
mod path;
mod socket;
mod stream;

pub use group::RocePortUse;
pub use host::RoceHost;
pub use listener::RoceListener;

use super::{Fabric, Setup, StreamFabric};
use blockmux_proto::rdma::Endpoint;
pub use blockmux_rdma::roce::bytes::UDP_PORT;
use blockmux_rdma::roce::records::RoceRecords;

/// Says who has the UDP port of RoCEv2 at `place`, and what to do: `advice`, or to stop it.
/// `has_software_roce`: whether the kernel's software RoCEv2 is loaded, which has the port.
#[must_use]
pub fn port_in_use(place: &str, advice: &str, has_software_roce: bool) -> String {
    match has_software_roce {
        true => format!(
            "Linux's rdma_rxe has UDP port {UDP_PORT} of all addresses; use its device by rdma=verbs, or unload it \
             with `modprobe -r rdma_rxe`"
        ),
        false => format!(
            "another program has UDP port {UDP_PORT} of {place}; {advice}, or stop it (`ss -lunp` names it)"
        ),
    }
}

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
