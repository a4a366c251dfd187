//! iSCSI on sockets: serving targets over TCP and over RDMA (iSER) at the same portals.
//!
//! A session with all its connections lives on one core. A connection accepted on another core is
//! moved there as soon as its first login request names the session. Over RDMA a session has one
//! connection, which stays where it was accepted.
//!
//! The initiator is in [`crate::protocol::iscsi::initiator`].

use crate::core::reactor::{EngineCore, Inbox};
use crate::fabric::port_session::{PortSession, SessionFactory};
use crate::fabric::{RdmaTarget, Setup};
use crate::net::host::{ByteStream, NetworkHost, NetworkStream};
use crate::net::socket::Stream;
use crate::serve::audit::AUDIT;
use crate::serve::background::Background;
use crate::serve::listener::{MAX_HALF_OPEN, Serve};
use crate::serve::moves::{ArrivedConnection, Elsewhere, Relocate};
use crate::serve::target_task::{NewSession, StreamOptions, TargetTask};
use crate::sys;
use blockmux_proto::driver::session::{ConnectionHandle, CoreHandle};
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::login::chap::SEED_LEN;
use blockmux_proto::iscsi::node::IscsiNode;
use blockmux_proto::iscsi::server::{IscsiTargetSession, IserTargetSession, LocalSessions};
use blockmux_proto::iscsi::sessions::{LoginPermit, MAX_LOGINS};
use blockmux_volume::Core;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use tracing::warn;

/// Serves an [`IscsiListener`] at a TCP port.
#[must_use]
pub fn serve(node: &Arc<IscsiNode>, exports: &Exports, listener: u16) -> Serve {
    let listener = IscsiListener::new(node, exports, listener);
    Arc::new(move |core, stream, permit| listener.serve(core, ArrivedConnection::new(stream, permit)))
}

// Logins that the listener has closed may not have ended yet. Even with them, a new connection
// finds a free place.
const _: () = assert!(MAX_HALF_OPEN <= MAX_LOGINS / 2);

/// The node's targets that have a portal at one listener, on every core.
#[derive(Clone)]
pub struct IscsiListener {
    node: Arc<IscsiNode>,
    exports: Exports,
    number: u16,
    background: Arc<Background>,
}

impl IscsiListener {
    /// The listener with this number. Logical units map to indices of `exports`.
    #[must_use]
    pub fn new(node: &Arc<IscsiNode>, exports: &Exports, number: u16) -> IscsiListener {
        let background = Arc::new(Background::new(node.targets.clone(), exports));
        IscsiListener { node: node.clone(), exports: exports.clone(), number, background }
    }

    /// `None` if it cannot log in now, which is logged.
    fn connection<H: NetworkHost>(&self, core: &Rc<H>, stream: &H::Stream) -> Option<IscsiConnection> {
        let engine = core.engine_core();
        self.background.begin_on(&engine);
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
        let peer_ip = stream.peer_ip();
        let sessions = engine.local(|| LocalSessions::new(CoreHandle::new(engine.inbox().clone())));
        Some(IscsiConnection {
            sessions: (*sessions).clone(),
            node: self.node.clone(),
            listener: self.number,
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
        let listener = self.clone();
        let hand_over = Box::new(move |owner_core: &CoreHandle, arrival| {
            let listener = listener.clone();
            if let Some(inbox) = owner_core.downcast::<Inbox>() {
                inbox.send(move |core| listener.serve(core, arrival));
            }
        });
        let moves_to = |session: &PortSession<IscsiConnection>| session.tcp()?.moves_to();
        let elsewhere = Elsewhere::Core(Box::new(Relocate { moves_to, hand_over }));
        let session = NewSession { session, pool, exports: self.exports.clone() };
        let options = StreamOptions { secure: None, elsewhere: Some(elsewhere) };
        TargetTask::spawn(core, arrival, session, options);
    }
}

impl RdmaTarget for IscsiListener {
    type Session = IserTargetSession;

    fn exports(&self) -> &Exports {
        &self.exports
    }

    fn session<H: NetworkHost>(
        &self,
        core: &Rc<H>,
        stream: &H::Stream,
    ) -> Option<(IserTargetSession, Setup)> {
        self.connection(core, stream).map(IscsiConnection::over_rdma)
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
        let (pool, now) = (self.setup.pool, self.setup.now);
        IscsiTargetSession::among(&self.sessions, self.node, self.listener, pool, self.seed, now)
            .admitted(self.permit, self.local, self.control)
            .with_client(self.peer_ip)
    }

    fn over_rdma(self) -> (IserTargetSession, Setup) {
        let setup = self.setup.clone();
        (IserTargetSession::new(self.over_tcp()), setup)
    }
}
