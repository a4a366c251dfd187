//! NVMe/TCP and NVMe/RDMA on sockets: serving subsystems, both at the same ports.
//!
//! The initiator is in [`crate::protocol::nvme::initiator`].

use crate::carrier::tls::Secure;
use crate::core::helpers;
use crate::core::reactor::{EngineCore, cross_thread_waker};
use crate::fabric::port_session::{PortSession, SessionFactory};
use crate::fabric::{RdmaTarget, Setup};
use crate::net::host::{ByteStream, NetworkHost, NetworkStream};
use crate::serve::listener::Serve;
use crate::serve::moves::ArrivedConnection;
use crate::serve::target_task::{NewSession, StreamOptions, TargetTask};
use crate::sys;
use blockmux_proto::exports::Exports;
use blockmux_proto::fabrics::controller::node::{NvmeNode, SecureChannel};
use blockmux_proto::fabrics::controller::unconnected::{ConnectPermit, MAX_UNCONNECTED};
use blockmux_proto::fabrics::controller::{ControllerQueue, FabricsTransport};
use blockmux_proto::nvme::HangUp;
use blockmux_proto::nvme::auth::psk::{PskHash, TlsPsk};
use blockmux_proto::nvme_rdma::server::NvmeRdmaTargetSession;
use blockmux_proto::nvme_tcp::server::NvmeTcpTargetSession;
use blockmux_tls::{Hash, Psk, ServerCredentials};
use blockmux_volume::{Core, Pool};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;
use tracing::warn;

/// The node's subsystems at one port, on every core. The connections of one controller may be on
/// different cores.
pub struct NvmeListener {
    node: Arc<NvmeNode>,
    port: u16,
    exports: Exports,
}

/// Serves an [`NvmeListener`] at a TCP port. With `ktls`, the kernel processes the TLS records
/// where possible.
#[must_use]
pub fn serve(node: &Arc<NvmeNode>, port: u16, exports: &Exports, ktls: bool) -> Serve {
    let listener = NvmeListener::new(node, port, exports);
    let credentials = credentials(node);
    Arc::new(move |core, stream, permit| {
        let Some(connection) = listener.connection(core, &stream) else { return };
        let connection = NvmeConnection { is_paced: stream.paces_here(), ..connection };
        let pool = connection.setup.pool.clone();
        let session = PortSession::new(connection, core.now());
        let secure = match listener.node.secure_channel() {
            SecureChannel::None => None,
            SecureChannel::NotRequired => Some(Secure::if_asked(credentials.clone())),
            SecureChannel::Required => Some(Secure::server(credentials.clone())),
        };
        let secure = secure.map(|secure| secure.by_kernel(ktls));
        let arrival = ArrivedConnection::new(stream, permit);
        let session = NewSession { session, pool, exports: listener.exports.clone() };
        TargetTask::spawn(core, arrival, session, StreamOptions { secure, ..StreamOptions::default() });
    })
}

/// A host's connection, for the session over its transport.
struct NvmeConnection {
    core: Rc<EngineCore>,
    node: Arc<NvmeNode>,
    port: u16,
    permit: ConnectPermit,
    local: Option<SocketAddr>,
    peer_ip: Option<IpAddr>,
    hang_up: HangUp,
    /// Whether the host's congestion control paces on loopback.
    is_paced: bool,
    seed: [u8; 32],
    setup: Setup,
}

impl NvmeListener {
    /// The port with this identifier. Namespaces map to indices of `exports`.
    #[must_use]
    pub fn new(node: &Arc<NvmeNode>, port: u16, exports: &Exports) -> NvmeListener {
        helpers::prepare();
        NvmeListener { node: node.clone(), port, exports: exports.clone() }
    }

    /// `None` without random numbers, which is logged.
    fn connection<H: NetworkHost>(&self, core: &Rc<H>, stream: &H::Stream) -> Option<NvmeConnection> {
        let (peer_ip, hang_up) = (stream.peer_ip(), stream.hang_up());
        let (permit, is_crowded) = self.node.begin_connect(peer_ip, hang_up.clone());
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
                return None;
            }
        };
        Some(NvmeConnection {
            core: core.engine_core(),
            node: self.node.clone(),
            port: self.port,
            permit,
            local: stream.local_address(),
            peer_ip,
            hang_up,
            is_paced: false,
            seed,
            setup: Setup::for_peer(&**core, stream, peer_ip, region_seed),
        })
    }
}

impl RdmaTarget for NvmeListener {
    type Session = NvmeRdmaTargetSession;

    fn exports(&self) -> &Exports {
        &self.exports
    }

    fn session<H: NetworkHost>(
        &self,
        core: &Rc<H>,
        stream: &H::Stream,
    ) -> Option<(NvmeRdmaTargetSession, Setup)> {
        self.connection(core, stream).map(NvmeConnection::over_rdma)
    }
}

impl NvmeConnection {
    fn queue<T: FabricsTransport>(
        self,
        new: impl FnOnce(Arc<NvmeNode>, Pool, Instant) -> ControllerQueue<T>,
    ) -> (ControllerQueue<T>, Setup) {
        let core = self.core;
        let queue = new(self.node, self.setup.pool.clone(), self.setup.now)
            .admitted(self.permit, self.local, self.hang_up)
            .at_port(self.port)
            .with_seed(self.seed)
            .computing_by(helpers::for_peer(self.peer_ip))
            .with_notifier(Box::new(move |waker| cross_thread_waker(&core, waker)));
        let queue = if self.is_paced { queue.fetching_at_most(REQUESTED_OF_PACED) } else { queue };
        (queue, self.setup)
    }
}

impl SessionFactory for NvmeConnection {
    type Tcp = NvmeTcpTargetSession;
    type Rdma = NvmeRdmaTargetSession;

    fn over_tcp(self) -> NvmeTcpTargetSession {
        self.queue(NvmeTcpTargetSession::new).0
    }

    fn over_rdma(self) -> (NvmeRdmaTargetSession, Setup) {
        self.queue(NvmeRdmaTargetSession::new)
    }
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
    let known = keyring.clone();
    let lookup = move |identity: &[u8]| keyring.find_lasting(identity, Instant::now()).as_ref().map(tls_key);
    let explain = move |identity: &[u8]| known.why_refused(identity).to_owned();
    ServerCredentials::ExplainedPsks(Arc::new(lookup), Arc::new(explain))
}
