//! SRP on sockets: serving target ports.

use crate::fabric::{self, FabricOfDevices, FabricOfTcpPorts, FabricOfUdpPorts, Setup, StreamFabric};
use crate::net::host::{ByteStream, NetworkHost};
use crate::net::roce::RoceHost;
use crate::net::verbs::VerbsHost;
use crate::serve::background::Background;
use crate::serve::listener::Serve;
use crate::serve::moves::ArrivedConnection;
use crate::serve::target_task::{NewSession, StreamOptions, TargetTask};
use crate::sys;
use blockmux_proto::exports::Exports;
use blockmux_proto::srp::node::SrpNode;
use blockmux_proto::srp::server::SrpTargetSession;
use std::sync::Arc;
use tracing::warn;

/// Serves the node's target ports to connections accepted at a TCP port, with [`serve_roce`] at a
/// UDP port, and with [`serve_verbs`] at one of RDMA devices. Their logical units map to indices of
/// `exports`. The channels of one initiator port may be on different cores.
#[must_use]
pub fn serve(node: &Arc<SrpNode>, exports: &Exports) -> Serve {
    serve_over::<FabricOfTcpPorts>(node, exports)
}

/// [`serve`] for connections of RoCEv2.
#[must_use]
pub fn serve_roce(node: &Arc<SrpNode>, exports: &Exports) -> Serve<RoceHost> {
    serve_over::<FabricOfUdpPorts>(node, exports)
}

/// [`serve`] for connections over RDMA devices.
#[must_use]
pub fn serve_verbs(node: &Arc<SrpNode>, exports: &Exports) -> Serve<VerbsHost> {
    serve_over::<FabricOfDevices>(node, exports)
}

fn serve_over<F: StreamFabric<Host: NetworkHost>>(node: &Arc<SrpNode>, exports: &Exports) -> Serve<F::Host> {
    let background = Background::new(node.targets.clone(), exports);
    let (node, exports) = (node.clone(), exports.clone());
    Arc::new(move |core, stream, permit| {
        background.begin_on(&core.engine_core());
        let seed = match sys::random_bytes() {
            Ok(seed) => seed,
            Err(error) => {
                warn!(peer = stream.peer(), "refused: no random numbers for its memory keys: {error}");
                return;
            }
        };
        let peer_ip = F::Host::peer_ip(&stream);
        let setup = Setup::for_peer(&**core, &stream, peer_ip, seed);
        let (pool, hang_up) = (setup.pool.clone(), F::Host::hang_up(&stream));
        let session = SrpTargetSession::new(node.clone(), pool.clone(), hang_up, setup.now);
        let session = session.with_client(peer_ip);
        let session = fabric::accept::<F, _>(session, setup);
        let arrival = ArrivedConnection::new(stream, permit);
        let session = NewSession { session, pool, exports: exports.clone() };
        TargetTask::spawn(core, arrival, session, StreamOptions::default());
    })
}
