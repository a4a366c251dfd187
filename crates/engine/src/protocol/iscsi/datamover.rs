//! iSCSI's datamovers (RFC 5047): TCP, or RDMA (iSER).

pub use crate::fabric::OverIwarp;
use crate::fabric::Setup;
use blockmux_proto::driver::session::{Initiator, Overdue, RetryRules, StreamConnections, StreamSession};
use blockmux_proto::iscsi::client::{IscsiDiscoverySession, IscsiInitiatorConfig, IscsiInitiatorSession};
use blockmux_proto::iscsi::login::chap::SEED_LEN;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::Chap;
use blockmux_rdma::iwarp::Iwarp;
use blockmux_rdma::{Driven, Seed};
use blockmux_volume::Pool;
use std::time::Instant;

/// The transport of an initiator's sessions.
pub trait Datamover: Clone + Send + Sync + 'static {
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

    /// The transport in its oldest variant, for targets that support no other. `None` if this is
    /// the oldest variant.
    fn older(&self) -> Option<Self> {
        None
    }

    /// Whether the session may have failed because the target supports only the oldest variant.
    fn may_require_revision_1(_session: &Self::Session) -> bool {
        false
    }

    /// Whether the discovery session may have failed because the target supports only the oldest
    /// variant.
    fn is_discovery_misunderstood(_session: &Self::Discovery) -> bool {
        false
    }
}

/// Parameters of a session. Both seeds are random and unique.
pub struct IscsiSetup {
    /// The core's pool.
    pub pool: Pool,
    /// Seed for the login.
    pub seed: [u8; SEED_LEN],
    /// Seed for memory region keys.
    pub region_seed: Seed,
    /// Maximum segment size of the connection in bytes, if known.
    pub segment_len: Option<usize>,
    /// The current time.
    pub now: Instant,
}

impl IscsiSetup {
    fn for_rdma(self) -> (Setup, [u8; SEED_LEN]) {
        let IscsiSetup { pool, seed, region_seed, segment_len, now } = self;
        (Setup { pool, seed: region_seed, segment_len, now }, seed)
    }
}

/// iSCSI over TCP, without RDMA.
#[derive(Clone, Copy, Debug, Default)]
pub struct OverTcp;

impl Datamover for OverTcp {
    type Session = IscsiInitiatorSession;
    type Discovery = IscsiDiscoverySession;

    fn session(
        &self,
        config: IscsiInitiatorConfig,
        retries: RetryRules,
        with: IscsiSetup,
    ) -> IscsiInitiatorSession {
        let session = IscsiInitiatorSession::new(config, with.pool, with.seed, with.now);
        session.with_retries(retries)
    }

    fn discovery(
        &self,
        initiator: Name,
        chap: Option<Chap>,
        isid: [u8; 6],
        with: IscsiSetup,
    ) -> IscsiDiscoverySession {
        IscsiDiscoverySession::new(initiator, chap, isid, with.seed, with.now)
    }

    fn iscsi(session: &IscsiInitiatorSession) -> &IscsiInitiatorSession {
        session
    }

    fn found(session: &IscsiDiscoverySession) -> &IscsiDiscoverySession {
        session
    }
}

impl Datamover for OverIwarp {
    type Session = Driven<Iwarp, IscsiInitiatorSession>;
    type Discovery = Driven<Iwarp, IscsiDiscoverySession>;

    fn session(&self, config: IscsiInitiatorConfig, retries: RetryRules, with: IscsiSetup) -> Self::Session {
        let (setup, seed) = with.for_rdma();
        let session = IscsiInitiatorSession::over_rdma(config, setup.pool.clone(), seed, setup.now);
        let session = session.with_retries(retries);
        self.connect_several(session, setup)
    }

    fn discovery(
        &self,
        initiator: Name,
        chap: Option<Chap>,
        isid: [u8; 6],
        with: IscsiSetup,
    ) -> Self::Discovery {
        let (setup, seed) = with.for_rdma();
        self.connect(IscsiDiscoverySession::over_rdma(initiator, chap, isid, seed, setup.now), setup)
    }

    fn iscsi(session: &Self::Session) -> &IscsiInitiatorSession {
        session.session()
    }

    fn found(session: &Self::Discovery) -> &IscsiDiscoverySession {
        session.session()
    }

    fn older(&self) -> Option<OverIwarp> {
        OverIwarp::older(*self)
    }

    fn may_require_revision_1(session: &Self::Session) -> bool {
        session.queue_pair().may_require_revision_1()
    }

    fn is_discovery_misunderstood(session: &Self::Discovery) -> bool {
        session.queue_pair().may_require_revision_1()
    }
}
