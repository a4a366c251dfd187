//! Target and initiator of iSER on iWARP.

use super::iscsi::{self, IscsiDialer};
use blockmux_engine::net::socket::Address;
use blockmux_engine::remote::{Dialer, Opening, Paths};
use blockmux_proto::driver::session::NoControl;
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::client::{IscsiInitiatorSession, SessionPurpose};
use blockmux_proto::iscsi::login::operational::OperationalParameters;
use blockmux_proto::iscsi::server::IserTargetSession;
use blockmux_proto::rdma::{RdmaConnections, RdmaSession};
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{self, Iwarp};
use blockmux_volume::Pool;
use std::time::Instant;

/// Makes a target's sessions, all on one core.
pub(crate) fn sessions(
    exports: &Exports,
) -> impl Fn(Pool, Instant) -> Driven<Iwarp, IserTargetSession> + use<> {
    let sessions = iscsi::sessions(exports);
    move |pool, now| {
        let session = IserTargetSession::new(sessions(pool.clone(), now));
        let config = iwarp::IwarpConfig::default();
        let queue_pair = Iwarp::passive(&session.endpoint(), config, pool, [4; 32], now);
        Driven::new(session, queue_pair, now)
    }
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
