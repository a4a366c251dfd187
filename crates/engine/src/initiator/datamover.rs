//! How iSCSI moves between us and a target (RFC 5047): over TCP alone, or over RDMA.

pub use crate::rdma::OverIwarp;
use crate::rdma::Setup;
use blockmux_proto::iscsi::client::{Config, InitiatorSession, IscsiDiscoverySession};
use blockmux_proto::iscsi::login::chap::SEED_LEN;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::Chap;
use blockmux_proto::session::{Initiator, Overdue, StreamConnections, StreamSession};
use blockmux_rdma::iwarp::Iwarp;
use blockmux_rdma::{Driven, Seed};
use blockmux_volume::Pool;
use std::time::Instant;

/// What an initiator's sessions go over.
pub trait Datamover: Clone + Send + Sync + 'static {
    /// A session with a target.
    type Session: Initiator + Overdue + StreamConnections + 'static;
    /// A session with a portal.
    type Discovery: StreamSession;

    /// A session that logs in.
    fn session(&self, config: Config, has_other_paths: bool, with: With) -> Self::Session;

    /// A session that asks for a portal's targets.
    fn discovery(&self, initiator: Name, chap: Option<Chap>, isid: [u8; 6], with: With) -> Self::Discovery;

    /// What any such session is.
    fn iscsi(session: &Self::Session) -> &InitiatorSession;

    /// What any such session is.
    fn found(session: &Self::Discovery) -> &IscsiDiscoverySession;

    /// This datamover in the oldest way that there is, for a target that knows no other; `None`:
    /// this is it.
    fn older(&self) -> Option<Self> {
        None
    }

    /// Whether a session that came to nothing may have met such a target.
    fn is_misunderstood(_session: &Self::Session) -> bool {
        false
    }

    /// Whether a discovery session that came to nothing may have met a target that knows only the
    /// oldest way.
    fn is_discovery_misunderstood(_session: &Self::Discovery) -> bool {
        false
    }
}

/// What a session is made with. Both seeds are random, and no other session has them.
pub struct With {
    /// The core's.
    pub pool: Pool,
    /// For the login.
    pub seed: [u8; SEED_LEN],
    /// For the names of memory.
    pub region_seed: Seed,
    /// How many bytes the connection's segments have, where that is known.
    pub segment_len: Option<usize>,
    /// Now.
    pub now: Instant,
}

impl With {
    fn for_rdma(self) -> (Setup, [u8; SEED_LEN]) {
        let With { pool, seed, region_seed, segment_len, now } = self;
        (Setup { pool, seed: region_seed, segment_len, now }, seed)
    }
}

/// TCP alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct OverTcp;

impl Datamover for OverTcp {
    type Session = InitiatorSession;
    type Discovery = IscsiDiscoverySession;

    fn session(&self, config: Config, has_other_paths: bool, with: With) -> InitiatorSession {
        let session = InitiatorSession::new(config, with.pool, with.seed, with.now);
        if has_other_paths { session.with_other_paths() } else { session }
    }

    fn discovery(
        &self,
        initiator: Name,
        chap: Option<Chap>,
        isid: [u8; 6],
        with: With,
    ) -> IscsiDiscoverySession {
        IscsiDiscoverySession::new(initiator, chap, isid, with.seed, with.now)
    }

    fn iscsi(session: &InitiatorSession) -> &InitiatorSession {
        session
    }

    fn found(session: &IscsiDiscoverySession) -> &IscsiDiscoverySession {
        session
    }
}

impl Datamover for OverIwarp {
    type Session = Driven<Iwarp, InitiatorSession>;
    type Discovery = Driven<Iwarp, IscsiDiscoverySession>;

    fn session(&self, config: Config, has_other_paths: bool, with: With) -> Self::Session {
        let (setup, seed) = with.for_rdma();
        let session = InitiatorSession::over_rdma(config, setup.pool.clone(), seed, setup.now);
        let session = if has_other_paths { session.with_other_paths() } else { session };
        self.connect_several(session, setup)
    }

    fn discovery(&self, initiator: Name, chap: Option<Chap>, isid: [u8; 6], with: With) -> Self::Discovery {
        let (setup, seed) = with.for_rdma();
        self.connect(IscsiDiscoverySession::over_rdma(initiator, chap, isid, seed, setup.now), setup)
    }

    fn iscsi(session: &Self::Session) -> &InitiatorSession {
        session.session()
    }

    fn found(session: &Self::Discovery) -> &IscsiDiscoverySession {
        session.session()
    }

    fn older(&self) -> Option<OverIwarp> {
        OverIwarp::older(*self)
    }

    fn is_misunderstood(session: &Self::Session) -> bool {
        session.queue_pair().is_misunderstood()
    }

    fn is_discovery_misunderstood(session: &Self::Discovery) -> bool {
        session.queue_pair().is_misunderstood()
    }
}
