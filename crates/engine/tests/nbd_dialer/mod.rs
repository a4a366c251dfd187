//! Dials the export `disk0` in the form that features lead to.

use blockmux_engine::initiator::{Dialer, Paths};
use blockmux_engine::socket::Address;
use blockmux_proto::nbd::client::{Config, Features, InitiatorSession, Mode};
use blockmux_proto::session::NoControl;
use blockmux_volume::Pool;
use std::time::{Duration, Instant};

pub(crate) struct NbdDialer {
    pub(crate) address: Address,
    pub(crate) features: Features,
    pub(crate) timeout: Option<Duration>,
}

impl Paths for NbdDialer {
    fn address(&self) -> &Address {
        &self.address
    }

    fn timeout(&self) -> Option<Duration> {
        self.timeout
    }
}

impl Dialer for NbdDialer {
    type Session = InitiatorSession;
    type Control = NoControl;

    fn session(
        &self,
        _link: u32,
        _control: Option<&NoControl>,
        pool: &Pool,
        now: Instant,
    ) -> InitiatorSession {
        let config = Config { export: "disk0".to_owned(), mode: Mode::Go, features: self.features };
        InitiatorSession::new(config, pool.clone(), now)
    }

    fn check(&self, session: &InitiatorSession) -> Result<(), String> {
        session.volume_info().map(|_| ()).ok_or_else(|| "the export was not described".to_owned())
    }

    fn refusal(&self, session: &InitiatorSession) -> Option<String> {
        session.refused().filter(|refused| !refused.may_pass()).map(ToString::to_string)
    }
}
