//! NVMe/TCP and NVMe/RDMA on sockets: serving subsystems, both at the same ports.
//!
//! The initiator is in [`crate::protocol::nvme::initiator`].

use crate::carrier::tls::Secure;
use crate::core::helpers;
use crate::core::reactor::cross_thread_waker;
use crate::fabric::{self, Setup};
use crate::serve::listener::Serve;
use crate::serve::moves::ArrivedConnection;
use crate::serve::port_session::PortSession;
use crate::serve::target_task::{NewSession, StreamOptions, TargetTask};
use crate::sys;
use blockmux_proto::exports::Exports;
use blockmux_proto::fabrics::controller::node::{NvmeNode, SecureChannel};
use blockmux_proto::fabrics::controller::unconnected::MAX_UNCONNECTED;
use blockmux_proto::nvme::auth::psk::{PskHash, TlsPsk};
use blockmux_proto::nvme_rdma::server::NvmeRdmaTargetSession;
use blockmux_proto::nvme_tcp::server::NvmeTcpTargetSession;
use blockmux_tls::{Hash, Psk, ServerCredentials};
use blockmux_volume::Core;
use std::sync::Arc;
use std::time::Instant;
use tracing::warn;

/// Serves the node's subsystems to connections accepted at port `port`. Their namespaces map to
/// indices of `exports`. The connections of one controller may be on different cores. With `ktls`,
/// the kernel processes the TLS records where possible.
#[must_use]
pub fn serve(node: &Arc<NvmeNode>, port: u16, exports: &Exports, ktls: bool) -> Serve {
    let (node, exports) = (node.clone(), exports.clone());
    let credentials = credentials(&node);
    helpers::prepare();
    Arc::new(move |core, stream, permit| {
        let (local, hang_up) = (stream.local_address(), Arc::new(stream.hang_up()));
        let (connect, is_crowded) = node.begin_connect(stream.peer_ip(), hang_up.clone());
        if is_crowded {
            let peer = stream.peer();
            warn!(
                peer,
                "{MAX_UNCONNECTED} connections have no queue yet; the oldest of the address that has most of them is closed"
            );
        }
        let (seed, region_seed) = match (sys::random_bytes(), sys::random_bytes()) {
            (Ok(seed), Ok(region_seed)) => (seed, region_seed),
            (Err(error), _) | (_, Err(error)) => {
                warn!(peer = stream.peer(), "refused: no random numbers for its challenges: {error}");
                return;
            }
        };
        let pool = core.pool().for_peer_at(stream.peer_ip());
        let session = NvmeTcpTargetSession::new(node.clone(), pool.clone(), core.now())
            .admitted(connect, local, hang_up)
            .at_port(port)
            .with_seed(seed)
            .computing_by(helpers::for_peer(stream.peer_ip()))
            .with_notifier({
                let core = core.clone();
                Box::new(move |waker| cross_thread_waker(&core, waker))
            });
        let session =
            if stream.paces_here() { session.fetching_at_most(REQUESTED_OF_PACED) } else { session };
        let setup = Setup {
            pool: pool.clone(),
            seed: region_seed,
            segment_len: stream.segment_len(),
            now: core.now(),
        };
        let accept = |session| fabric::accept(NvmeRdmaTargetSession::from_other_transport(session), setup);
        let session = PortSession::new(session, Box::new(accept), 0);
        let secure = match node.secure_channel() {
            SecureChannel::None => None,
            SecureChannel::NotRequired => Some(Secure::if_asked(credentials.clone())),
            SecureChannel::Required => Some(Secure::server(credentials.clone())),
        };
        let secure = secure.map(|secure| secure.by_kernel(ktls));
        let arrival = ArrivedConnection::new(stream, permit);
        let session = NewSession { session, pool, exports: exports.clone() };
        TargetTask::spawn(core, arrival, session, StreamOptions { secure, ..StreamOptions::default() });
    })
}

/// Maximum data in flight for a host on loopback whose congestion control paces, in bytes. More
/// would be slower: see decision 36.
const REQUESTED_OF_PACED: usize = 640 << 10;

/// Converts a key to its TLS form.
pub(crate) fn tls_key(key: &TlsPsk) -> Psk {
    let hash = match key.hash {
        PskHash::Sha256 => Hash::Sha256,
        PskHash::Sha384 => Hash::Sha384,
    };
    Psk { identity: key.identity.clone().into_bytes(), secret: key.secret().to_vec().into(), hash }
}

fn credentials(node: &Arc<NvmeNode>) -> ServerCredentials {
    let keyring = node.keyring().clone();
    let lookup = move |identity: &[u8]| keyring.find_lasting(identity, Instant::now()).as_ref().map(tls_key);
    ServerCredentials::Psks(Arc::new(lookup))
}
