//! iSCSI on sockets: serving targets over TCP and over RDMA (iSER) at the same portals.
//!
//! A session with all its connections lives on one core. A connection accepted on another core is
//! moved there as soon as its first login request names the session. Over RDMA a session has one
//! connection, which stays where it was accepted.
//!
//! The initiator is in [`crate::protocol::iscsi::initiator`].

use crate::core::reactor::{EngineCore, Inbox};
use crate::fabric::{self, Fabric, FabricOfTcpPorts, OverFabric, Setup, StreamFabric};
use crate::net::host::{ByteStream, NetworkHost, NetworkStream};
use crate::net::socket::Stream;
use crate::serve::audit::AUDIT;
use crate::serve::background::Background;
use crate::serve::listener::{MAX_HALF_OPEN, Serve};
use crate::serve::moves::{ArrivedConnection, Elsewhere, Relocate};
use crate::serve::port_session::{PortSession, SessionFactory};
use crate::serve::target_task::{NewSession, StreamOptions, TargetTask};
use crate::sys;
use blockmux_proto::driver::session::{ConnectionHandle, CoreHandle};
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::login::chap::SEED_LEN;
use blockmux_proto::iscsi::node::IscsiNode;
use blockmux_proto::iscsi::server::{IscsiTargetSession, IserTargetSession, LocalSessions};
use blockmux_proto::iscsi::sessions::{LoginPermit, MAX_LOGINS};
use blockmux_rdma::Driven;
use blockmux_volume::Core;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use tracing::warn;

/// Serves the node's targets that have a portal at the listener with this number to the
/// connections that it accepts. Their logical units map to indices of `exports`.
#[must_use]
pub fn serve(node: &Arc<IscsiNode>, exports: &Exports, listener: u16) -> Serve {
    let background = Background::new(node.targets.clone(), exports);
    let (node, exports) = (node.clone(), exports.clone());
    Arc::new(move |core, stream, permit| {
        background.begin_on(core);
        let portal = Portal { node: node.clone(), exports: exports.clone(), listener };
        portal.serve(core, ArrivedConnection::new(stream, permit));
    })
}

/// Serves iSER as [`serve`] does, to connections of a fabric that are not accepted at a TCP port.
#[must_use]
pub fn serve_rdma<F: StreamFabric<Host: NetworkHost>>(
    node: &Arc<IscsiNode>,
    exports: &Exports,
    listener: u16,
) -> Serve<F::Host> {
    let background = Background::new(node.targets.clone(), exports);
    let portal = Portal { node: node.clone(), exports: exports.clone(), listener };
    Arc::new(move |core, stream, permit| {
        background.begin_on(&core.engine_core());
        let Some(connection) = portal.connection(core, &stream) else { return };
        let pool = connection.setup.pool.clone();
        let session = connection.accept::<F>();
        let session = NewSession { session, pool, exports: portal.exports.clone() };
        TargetTask::spawn(core, ArrivedConnection::new(stream, permit), session, StreamOptions::default());
    })
}

// Logins that the listener has closed may not have ended yet. Even with them, a new connection
// finds a free place.
const _: () = assert!(MAX_HALF_OPEN <= MAX_LOGINS / 2);

/// State of one listener on every core.
#[derive(Clone)]
struct Portal {
    node: Arc<IscsiNode>,
    exports: Exports,
    listener: u16,
}

impl Portal {
    /// `None` if it cannot log in now, which is logged.
    fn connection<H: NetworkHost>(&self, core: &Rc<H>, stream: &H::Stream) -> Option<IscsiConnection> {
        let Some(login) = self.node.begin_login() else {
            warn!(target: AUDIT, protocol = "iscsi", peer = stream.peer(), "login refused: {MAX_LOGINS} logins are under way already");
            return None;
        };
        let (seed, region_seed) = match (sys::random_bytes(), sys::random_bytes()) {
            (Ok(seed), Ok(region_seed)) => (seed, region_seed),
            (Err(error), _) | (_, Err(error)) => {
                warn!(target: AUDIT, protocol = "iscsi", peer = stream.peer(), "login refused: no random numbers for its login: {error}");
                return None;
            }
        };
        let (peer_ip, engine) = (stream.peer_ip(), core.engine_core());
        let sessions = engine.local(|| LocalSessions::new(CoreHandle::new(engine.inbox().clone())));
        Some(IscsiConnection {
            sessions: (*sessions).clone(),
            node: self.node.clone(),
            listener: self.listener,
            permit: login,
            local: stream.local_address(),
            peer_ip,
            control: stream.control(),
            seed,
            setup: Setup::for_peer(&**core, stream, peer_ip, region_seed),
        })
    }

    fn serve(&self, core: &Rc<EngineCore>, arrival: ArrivedConnection<Stream>) {
        let stream = &arrival.stream;
        let Some(connection) = self.connection(core, stream) else { return };
        let pool = connection.setup.pool.clone();
        let session = PortSession::new(connection, core.now());
        let portal = self.clone();
        let hand_over = Box::new(move |owner_core: &CoreHandle, arrival| {
            let portal = portal.clone();
            if let Some(inbox) = owner_core.downcast::<Inbox>() {
                inbox.send(move |core| portal.serve(core, arrival));
            }
        });
        let moves_to = |session: &PortSession<IscsiConnection>| session.tcp()?.moves_to();
        let elsewhere = Elsewhere::Core(Box::new(Relocate { moves_to, hand_over }));
        let session = NewSession { session, pool, exports: self.exports.clone() };
        let options = StreamOptions { secure: None, elsewhere: Some(elsewhere) };
        TargetTask::spawn(core, arrival, session, options);
    }
}

/// An initiator's connection, for the session over its transport.
struct IscsiConnection {
    /// Sessions of this core.
    sessions: Rc<LocalSessions>,
    node: Arc<IscsiNode>,
    listener: u16,
    permit: LoginPermit,
    local: Option<SocketAddr>,
    peer_ip: Option<IpAddr>,
    control: ConnectionHandle,
    seed: [u8; SEED_LEN],
    setup: Setup,
}

impl SessionFactory for IscsiConnection {
    type Tcp = IscsiTargetSession;
    type Rdma = IserTargetSession;

    fn over_tcp(self) -> IscsiTargetSession {
        self.session().0
    }

    fn over_rdma(self) -> OverFabric<IserTargetSession> {
        self.accept::<FabricOfTcpPorts>()
    }
}

impl IscsiConnection {
    fn accept<F: Fabric>(self) -> Driven<F::QueuePair, IserTargetSession> {
        let (session, setup) = self.session();
        fabric::accept::<F, _>(IserTargetSession::new(session), setup)
    }

    fn session(self) -> (IscsiTargetSession, Setup) {
        let (pool, now) = (self.setup.pool.clone(), self.setup.now);
        let session =
            IscsiTargetSession::among(&self.sessions, self.node, self.listener, pool, self.seed, now)
                .admitted(self.permit, self.local, self.control)
                .with_client(self.peer_ip);
        (session, self.setup)
    }
}
