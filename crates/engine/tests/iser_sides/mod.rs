//! Target and initiator of iSER on iWARP, for tests.

use crate::iscsi_dialer::IscsiDialer;
use blockmux_engine::net::socket::Address;
use blockmux_engine::remote::{Dialer, Opening, Paths};
use blockmux_proto::driver::session::{CoreHandle, NoControl};
use blockmux_proto::iscsi::client::{IscsiInitiatorSession, SessionPurpose};
use blockmux_proto::iscsi::login::operational::OperationalParameters;
use blockmux_proto::iscsi::node::IscsiNode;
use blockmux_proto::iscsi::server::{IscsiTargetSession, IserTargetSession, LocalSessions};
use blockmux_proto::rdma::{RdmaConnections, RdmaSession};
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{self, Iwarp};
use blockmux_volume::Pool;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// The sessions of one core of a target.
pub(crate) fn local_sessions() -> Rc<LocalSessions> {
    LocalSessions::new(CoreHandle::new(()))
}

/// A target's session on a new connection.
pub(crate) fn target(
    local: &Rc<LocalSessions>,
    node: &Arc<IscsiNode>,
    pool: Pool,
    now: Instant,
) -> Driven<Iwarp, IserTargetSession> {
    let session = IscsiTargetSession::among(local, node.clone(), 1, pool.clone(), [3; 32], now);
    let session = IserTargetSession::new(session);
    let queue_pair = Iwarp::passive(&session.endpoint(), iwarp::IwarpConfig::default(), pool, [4; 32], now);
    Driven::new(session, queue_pair, now)
}

/// Connects to the target of one export.
pub(crate) struct IserDialer {
    over_tcp: IscsiDialer,
    config: iwarp::IwarpConfig,
}

impl IserDialer {
    pub(crate) fn new(
        address: &Address,
        export: &'static str,
        proposal: OperationalParameters,
        config: iwarp::IwarpConfig,
    ) -> IserDialer {
        IserDialer { over_tcp: IscsiDialer::new(address, export, proposal), config }
    }
}

impl Dialer for IserDialer {
    type Session = Driven<Iwarp, IscsiInitiatorSession>;
    type Control = NoControl;

    fn paths(&self) -> &Paths {
        self.over_tcp.paths()
    }

    fn session(&self, opening: &Opening<'_, NoControl>) -> Self::Session {
        let (pool, now) = (opening.pool, opening.now);
        let config = self.over_tcp.config(SessionPurpose::Use, opening.link);
        let session = IscsiInitiatorSession::over_rdma(config, pool.clone(), [7; 32], now);
        let (config, pool) = (self.config.clone(), pool.clone());
        let queue_pair = Iwarp::active(&session.endpoint(), config, pool, [8; 32], now);
        Driven::new(session, queue_pair, now)
    }

    fn check(&self, session: &Self::Session) -> Result<(), String> {
        self.over_tcp.check(session.session())
    }

    fn refusal(&self, session: &Self::Session) -> Option<String> {
        self.over_tcp.refusal(session.session())
    }
}
