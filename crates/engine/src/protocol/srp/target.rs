//! SRP on sockets: serving target ports.

use crate::fabric::{RdmaTarget, Setup};
use crate::net::host::{ByteStream, NetworkHost, NetworkStream};
use crate::serve::background::Background;
use crate::sys;
use blockmux_proto::exports::Exports;
use blockmux_proto::srp::node::SrpNode;
use blockmux_proto::srp::server::SrpTargetSession;
use std::rc::Rc;
use std::sync::Arc;
use tracing::warn;

/// The node's target ports at one listener. The channels of one initiator port may be on different
/// cores.
pub struct SrpListener {
    node: Arc<SrpNode>,
    exports: Exports,
    background: Background,
}

impl SrpListener {
    /// The node's logical units map to indices of `exports`.
    #[must_use]
    pub fn new(node: &Arc<SrpNode>, exports: &Exports) -> SrpListener {
        let background = Background::new(node.targets.clone(), exports);
        SrpListener { node: node.clone(), exports: exports.clone(), background }
    }
}

impl RdmaTarget for SrpListener {
    type Session = SrpTargetSession;

    fn exports(&self) -> &Exports {
        &self.exports
    }

    fn session<H: NetworkHost>(&self, core: &Rc<H>, stream: &H::Stream) -> Option<(SrpTargetSession, Setup)> {
        self.background.begin_on(&core.engine_core());
        let refused = |error| {
            warn!(peer = stream.peer(), "refused: no random numbers for its memory keys: {error}");
        };
        let seed = sys::random_bytes().map_err(refused).ok()?;
        let peer_ip = stream.peer_ip();
        let setup = Setup::for_peer(&**core, stream, peer_ip, seed);
        let session =
            SrpTargetSession::new(self.node.clone(), setup.pool.clone(), stream.hang_up(), setup.now);
        Some((session.with_client(peer_ip), setup))
    }
}
