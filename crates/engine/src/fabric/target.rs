//! Serves the targets of a protocol over RDMA, whichever the fabric.

use super::{Setup, StreamFabric, accept};
use crate::net::host::NetworkHost;
use crate::serve::listener::Serve;
use crate::serve::moves::ArrivedConnection;
use crate::serve::target_task::{NewSession, StreamOptions, TargetTask};
use blockmux_proto::driver::target::TargetLifecycle;
use blockmux_proto::exports::Exports;
use blockmux_proto::rdma::RdmaSession;
use std::rc::Rc;
use std::sync::Arc;

/// A protocol's targets at one listener, for connections over RDMA on every core.
pub trait RdmaTarget: Send + Sync + 'static {
    /// A session with an initiator.
    type Session: RdmaSession + TargetLifecycle + 'static;

    /// The volumes to which the targets' units map.
    fn exports(&self) -> &Exports;

    /// Makes the session of a connection; also returns what its queue pair gets. `None` if the
    /// connection is refused, which is logged.
    fn session<H: NetworkHost>(&self, core: &Rc<H>, stream: &H::Stream) -> Option<(Self::Session, Setup)>;
}

/// Serves targets to the connections of a fabric.
#[must_use]
pub fn serve<F: StreamFabric<Host: NetworkHost>>(target: impl RdmaTarget) -> Serve<F::Host> {
    Arc::new(move |core, stream, permit| {
        let Some((session, setup)) = target.session(core, &stream) else { return };
        let (pool, exports) = (setup.pool.clone(), target.exports().clone());
        let session = NewSession { session: accept::<F, _>(session, setup), pool, exports };
        TargetTask::spawn(core, ArrivedConnection::new(stream, permit), session, StreamOptions::default());
    })
}
