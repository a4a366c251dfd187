//! SRP on sockets: serving target ports.

use crate::fabric::{self, Setup, StreamFabric};
use crate::net::host::{ByteStream, NetworkHost, NetworkStream};
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

/// Serves the node's target ports to connections of a fabric. Their logical units map to indices of
/// `exports`. The channels of one initiator port may be on different cores.
#[must_use]
pub fn serve<F: StreamFabric<Host: NetworkHost>>(node: &Arc<SrpNode>, exports: &Exports) -> Serve<F::Host> {
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
        let peer_ip = stream.peer_ip();
        let setup = Setup::for_peer(&**core, &stream, peer_ip, seed);
        let (pool, hang_up) = (setup.pool.clone(), stream.hang_up());
        let session = SrpTargetSession::new(node.clone(), pool.clone(), hang_up, setup.now);
        let session = session.with_client(peer_ip);
        let session = fabric::accept::<F, _>(session, setup);
        let arrival = ArrivedConnection::new(stream, permit);
        let session = NewSession { session, pool, exports: exports.clone() };
        TargetTask::spawn(core, arrival, session, StreamOptions::default());
    })
}
