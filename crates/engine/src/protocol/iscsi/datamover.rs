//! iSCSI's datamovers (RFC 5047): TCP, or RDMA (iSER).

use crate::core::reactor::EngineCore;
use crate::fabric::{self, Setup, StreamFabric};
use crate::net::host::Host;
use blockmux_proto::driver::session::{Initiator, Overdue, RetryRules, StreamConnections, StreamSession};
use blockmux_proto::iscsi::client::{IscsiDiscoverySession, IscsiInitiatorConfig, IscsiInitiatorSession};
use blockmux_proto::iscsi::login::chap::SEED_LEN;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::Chap;
use blockmux_rdma::Driven;

/// The transport of an initiator's sessions.
pub trait Datamover: Clone + Send + Sync + 'static {
    /// The core that makes its connections.
    type Host: Host;
    /// A session with a target.
    type Session: Initiator + Overdue + StreamConnections + 'static;
    /// A session with a portal.
    type Discovery: StreamSession;

    /// Makes a session that logs in.
    fn session(&self, config: IscsiInitiatorConfig, retries: RetryRules, with: IscsiSetup) -> Self::Session;

    /// Makes a discovery session.
    fn discovery(
        &self,
        initiator: Name,
        chap: Option<Chap>,
        isid: [u8; 6],
        with: IscsiSetup,
    ) -> Self::Discovery;

    /// The iSCSI session inside a transport's session.
    fn iscsi(session: &Self::Session) -> &IscsiInitiatorSession;

    /// The iSCSI discovery session inside a transport's session.
    fn found(session: &Self::Discovery) -> &IscsiDiscoverySession;

    /// Whether to log in again after the target has closed the connection: see
    /// [`crate::fabric::Fabric::retries`].
    fn retries(&self, _closed: &Self::Session) -> bool {
        false
    }

    /// [`Datamover::retries`] for discovery.
    fn retries_discovery(&self, _closed: &Self::Discovery) -> bool {
        false
    }
}

/// Parameters of a session.
pub struct IscsiSetup {
    /// Those of its connection.
    pub connection: Setup,
    /// Seed for the login: random and unique.
    pub seed: [u8; SEED_LEN],
}

/// iSCSI over TCP, without RDMA.
#[derive(Clone, Copy, Debug, Default)]
pub struct OverTcp;

impl Datamover for OverTcp {
    type Host = EngineCore;
    type Session = IscsiInitiatorSession;
    type Discovery = IscsiDiscoverySession;

    fn session(
        &self,
        config: IscsiInitiatorConfig,
        retries: RetryRules,
        with: IscsiSetup,
    ) -> IscsiInitiatorSession {
        let session =
            IscsiInitiatorSession::new(config, with.connection.pool, with.seed, with.connection.now);
        session.with_retries(retries)
    }

    fn discovery(
        &self,
        initiator: Name,
        chap: Option<Chap>,
        isid: [u8; 6],
        with: IscsiSetup,
    ) -> IscsiDiscoverySession {
        IscsiDiscoverySession::new(initiator, chap, isid, with.seed, with.connection.now)
    }

    fn iscsi(session: &IscsiInitiatorSession) -> &IscsiInitiatorSession {
        session
    }

    fn found(session: &IscsiDiscoverySession) -> &IscsiDiscoverySession {
        session
    }
}

/// iSER.
impl<F: StreamFabric> Datamover for F {
    type Host = F::Host;
    type Session = Driven<F::QueuePair, IscsiInitiatorSession>;
    type Discovery = Driven<F::QueuePair, IscsiDiscoverySession>;

    fn session(&self, config: IscsiInitiatorConfig, retries: RetryRules, with: IscsiSetup) -> Self::Session {
        let IscsiSetup { connection: setup, seed } = with;
        let session = IscsiInitiatorSession::over_rdma(config, setup.pool.clone(), seed, setup.now);
        let session = session.with_retries(retries);
        fabric::connect_several(self, session, setup)
    }

    fn discovery(
        &self,
        initiator: Name,
        chap: Option<Chap>,
        isid: [u8; 6],
        with: IscsiSetup,
    ) -> Self::Discovery {
        let IscsiSetup { connection: setup, seed } = with;
        let session = IscsiDiscoverySession::over_rdma(initiator, chap, isid, seed, setup.now);
        fabric::connect(self, session, setup)
    }

    fn iscsi(session: &Self::Session) -> &IscsiInitiatorSession {
        session.session()
    }

    fn found(session: &Self::Discovery) -> &IscsiDiscoverySession {
        session.session()
    }

    fn retries(&self, closed: &Self::Session) -> bool {
        fabric::Fabric::retries(self, closed.queue_pair())
    }

    fn retries_discovery(&self, closed: &Self::Discovery) -> bool {
        fabric::Fabric::retries(self, closed.queue_pair())
    }
}
