//! Target and initiator of NBD.

use blockmux_engine::carrier::tls::ClientTls;
use blockmux_engine::net::socket::Address;
use blockmux_engine::remote::{Dialer, Opening, Paths, TlsKeys};
use blockmux_proto::driver::session::NoControl;
use blockmux_proto::exports::Exports;
use blockmux_proto::nbd::client::{NbdFeatures, NbdInitiatorConfig, NbdInitiatorSession, NbdSessionMode};
use blockmux_proto::nbd::server::NbdTargetSession;
use blockmux_volume::Pool;
use std::time::{Duration, Instant};

/// Makes a target's sessions.
pub(crate) fn sessions(exports: &Exports) -> impl Fn(Pool, Instant) -> NbdTargetSession + use<> {
    let exports = exports.clone();
    move |pool, now| NbdTargetSession::new(exports.clone(), pool, now)
}

/// Connects to the export `disk0` with these features.
pub(crate) struct NbdDialer {
    pub(crate) paths: Paths,
    pub(crate) features: NbdFeatures,
    /// TLS credentials, if TLS is required.
    pub(crate) tls: Option<ClientTls>,
}

impl NbdDialer {
    pub(crate) fn new(address: &Address, features: NbdFeatures, timeout: Option<Duration>) -> NbdDialer {
        NbdDialer { paths: Paths { timeout, ..Paths::to(address) }, features, tls: None }
    }
}

impl TlsKeys for NbdDialer {
    fn keys(&self) -> Option<ClientTls> {
        self.tls.clone()
    }
}

impl Dialer for NbdDialer {
    type Session = NbdInitiatorSession;
    type Control = NoControl;

    fn paths(&self) -> &Paths {
        &self.paths
    }

    fn session(&self, opening: &Opening<'_, NoControl>) -> NbdInitiatorSession {
        let (pool, now) = (opening.pool, opening.now);
        let config = NbdInitiatorConfig {
            export: "disk0".to_owned(),
            mode: NbdSessionMode::Go,
            features: self.features,
        };
        let session = NbdInitiatorSession::new(config, pool.clone(), now);
        if self.tls.is_some() { session.with_tls() } else { session }
    }

    fn tls(&self) -> Option<&dyn TlsKeys> {
        Some(self)
    }

    fn check(&self, session: &NbdInitiatorSession) -> Result<(), String> {
        session.export().map(|_| ()).ok_or_else(|| "the server has not described the export".to_owned())
    }

    fn refusal(&self, session: &NbdInitiatorSession) -> Option<String> {
        session.refusal().filter(|refused| !refused.is_retryable()).map(ToString::to_string)
    }
}
