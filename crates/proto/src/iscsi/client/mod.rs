//! The iSCSI initiator: accesses one logical unit of a target (RFC 7143).
//!
//! ```text
//!   Login ──FullFeaturePhase──▶ Full: bring-up ──▶ I/O ──on_stop, all complete──▶ logout ──▶ Over
//!     └──────── refused ─────────────┴───────────────────────────────────────────────────────▶ Over
//! ```
//! [`crate::driver::session`] describes how a driver uses [`IscsiInitiatorSession`]. `login`
//! negotiates the parameters, [`crate::scsi::initiator`] identifies the unit and splits I/O into
//! commands, and this module numbers commands, transfers data and processes responses (`full`,
//! `burst`,
//! `receive`). [`IscsiDiscoverySession`] lists the targets of a portal.
//!
//! *Limits of a session*: 30 seconds for login and bring-up; 1024 I/O requests of up to four
//! commands each; as many commands as the target's window permits; one outstanding ping, after
//! which the connection fails if nothing arrives for 10 seconds.
//!
//! # Multiple connections and error recovery
//!
//! A session may have several connections if both sides agree (`MaxConnections`): one queue of
//! commands with one CmdSN sequence. Each burst of commands uses one connection, which also carries
//! their data and status (RFC 7143 §4.2.2.1, connection allegiance). `connection` is one of them.
//! The driver handles them through [`crate::driver::session::Connections`]: the session requests
//! further connections, and each is a stream session.
//!
//! At error recovery level 0, any error below SCSI ends the session with all its connections, and a
//! new session replays the I/O. At level 1, damaged PDUs are retransmitted; at level 2, a lost
//! connection is replaced and its commands continue (`recovery`, `statuses`). A command without a
//! response is aborted; if the abort is not answered either, the unit is reset (`abort`).
//!
//! # Over RDMA
//! [`IscsiInitiatorSession::over_rdma`] runs the session over a queue pair (iSER, RFC 7145), always
//! with one connection and at error recovery level 0. A command registers the memory of its I/O and
//! advertises it to the target; Data-In, R2T and Data-Out PDUs do not occur (`full`, `datamover`).
//! All other PDUs are messages (`iser`).

mod abort;
mod address;
mod burst;
mod config;
mod connection;
mod datamover;
mod discovery;
mod full;
mod immediate;
mod iser;
mod login;
mod receive;
mod recovery;
mod statuses;
mod user;

#[cfg(test)]
mod tests;

pub use crate::iscsi::login::refused::IscsiRefused;
pub use crate::scsi::initiator::{SenseCode, UnitInfo, UnitRefused, UnmapLimits};
pub use address::TargetAddress;
pub use blockmux_wire::iscsi::scsi::{Function, FunctionResponse};
pub use blockmux_wire::iscsi::session::LoginStatus;
pub use config::{BurstSize, IscsiInitiatorConfig, MAX_CONNECTIONS, SessionPurpose, default_proposal};
pub use discovery::{FoundTarget, IscsiDiscoverySession};

use super::login::chap::SEED_LEN;
use super::login::initiator::{FIRST_CID, InitiatorLoginProgress, InitiatorLoginResult, LoginIdentity};
use super::login::operational::{OperationalKey, OperationalParameters};
use crate::driver::outbox::Outbox;
use crate::driver::session::{Demand, ProtocolError, RetryRules, StreamConnections, StreamSession, Timed};
use crate::scsi::Lun;
use blockmux_volume::{Chunk, Completion, Pool};
use connection::{ConnectionPhase, InitiatorConnection};
use full::FullFeatureSession;
use login::{LoginExchange, LoginTemplate};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A session with a target, over one or several connections, from the start of its login.
pub struct IscsiInitiatorSession {
    /// The first entry is the leading connection.
    connections: Vec<InitiatorConnection>,
    /// Outbox for connection indexes without a connection.
    unused_outbox: Outbox,
    /// `None` until the first login has succeeded.
    full: Option<Box<FullFeatureSession>>,
    logins: LoginTemplate,
    pool: Pool,
    lun: Lun,
    burst: BurstSize,
    purpose: SessionPurpose,
    /// Deadline of login and bring-up.
    deadline: Instant,
    is_stopping: bool,
    retries: RetryRules,
    refused: Option<IscsiRefused>,
    unit: Option<UnitInfo>,
    luns: Vec<Lun>,
    parameters: Option<OperationalParameters>,
    /// Completions of requests that were submitted without a session.
    failed: VecDeque<Completion>,
}

impl IscsiInitiatorSession {
    /// A session on a new connection. `pool` provides memory for reads without a buffer whose data
    /// cannot be borrowed. `seed` must be random and unique to this session.
    #[must_use]
    pub fn new(
        config: IscsiInitiatorConfig,
        pool: Pool,
        seed: [u8; SEED_LEN],
        now: Instant,
    ) -> IscsiInitiatorSession {
        IscsiInitiatorSession::build(config, pool, seed, now, false)
    }

    fn build(
        config: IscsiInitiatorConfig,
        pool: Pool,
        seed: [u8; SEED_LEN],
        now: Instant,
        is_over_rdma: bool,
    ) -> IscsiInitiatorSession {
        let IscsiInitiatorConfig { initiator, target, lun, purpose, chap, proposal, isid, burst } = config;
        let identity = LoginIdentity { initiator, target: Some(target), isid };
        let mut logins = LoginTemplate::new(identity, chap, proposal, seed);
        if is_over_rdma {
            logins = logins.over_rdma();
        }
        let mut first = InitiatorConnection::new(FIRST_CID, ConnectionPhase::Connecting, is_over_rdma, now);
        let login = LoginExchange::start(logins.next(), &mut first.sender);
        first.phase = ConnectionPhase::Login(Box::new(login));
        IscsiInitiatorSession {
            connections: vec![first],
            unused_outbox: Outbox::default(),
            full: None,
            logins,
            pool,
            lun,
            burst,
            purpose,
            deadline: now.checked_add(LOGIN_TIMEOUT).unwrap_or(now),
            is_stopping: false,
            retries: RetryRules::default(),
            refused: None,
            unit: None,
            luns: Vec::new(),
            parameters: None,
            failed: VecDeque::new(),
        }
    }

    /// Sets how I/O is retried that this target port cannot execute now.
    #[must_use]
    pub fn with_retries(mut self, retries: RetryRules) -> IscsiInitiatorSession {
        self.retries = retries;
        self
    }

    /// The logical unit, once it is known.
    #[must_use]
    pub fn unit(&self) -> Option<&UnitInfo> {
        self.unit.as_ref()
    }

    /// The logical units that the target listed, at most 256; also available if the configured one
    /// does not exist.
    #[must_use]
    pub fn luns(&self) -> &[Lun] {
        &self.luns
    }

    /// The negotiated parameters of the first login, once it is over.
    #[must_use]
    pub fn parameters(&self) -> Option<&OperationalParameters> {
        self.parameters.as_ref()
    }

    /// Why the session failed to provide what its purpose requires, if it did.
    #[must_use]
    pub fn refused(&self) -> Option<&IscsiRefused> {
        self.refused.as_ref()
    }

    /// Whether the session has ended: its purpose is fulfilled or refused, or it was stopped.
    #[must_use]
    pub fn is_over(&self) -> bool {
        match &self.full {
            Some(full) => full.is_over(),
            None => !self.is_logging_in(),
        }
    }

    /// The response to the function of a [`SessionPurpose::Manage`] session, once it has arrived.
    #[must_use]
    pub fn function_response(&self) -> Option<FunctionResponse> {
        self.full.as_ref()?.aborts.response
    }

    fn is_logging_in(&self) -> bool {
        self.connections
            .first()
            .is_some_and(|connection| matches!(connection.phase, ConnectionPhase::Login(_)))
    }

    /// Processes login responses of a connection in the login phase; returns the number of consumed
    /// bytes.
    #[inline]
    fn on_login_bytes(&mut self, index: usize, bytes: &[u8], now: Instant) -> Result<usize, ProtocolError> {
        let Some(connection) = self.connections.get_mut(index) else { return Ok(0) };
        let ConnectionPhase::Login(login) = &mut connection.phase else { return Ok(0) };
        let (taken, progress) = login.on_bytes(bytes, &mut connection.sender)?;
        match progress {
            InitiatorLoginProgress::Continues => {}
            InitiatorLoginProgress::Refused(refused) => {
                connection.phase = ConnectionPhase::Over;
                // A refused further connection does not end the session.
                if self.full.is_none() {
                    self.refused = Some(refused);
                }
            }
            InitiatorLoginProgress::Established(established) => self.on_established(index, &established, now),
        }
        Ok(taken)
    }

    fn on_established(&mut self, index: usize, established: &InitiatorLoginResult, now: Instant) {
        if let Some(full) = &mut self.full {
            if let Some(connection) = self.connections.get_mut(index) {
                full.join(connection, established);
            }
            return;
        }
        self.parameters = Some(established.parameters);
        let max_connections = if self.purpose == SessionPurpose::Use {
            established.parameters.get(OperationalKey::MaxConnections)
        } else {
            1
        };
        self.logins.tsih = established.tsih;
        let times = (now, self.deadline);
        let mut full = FullFeatureSession::new((self.lun, self.burst), established, self.pool.clone(), times);
        full.queue.retries = self.retries;
        if let Some(first) = self.connections.first_mut() {
            first.open(&established.parameters, established.exp_stat_sn, now);
        }
        let most = max_connections.min(MAX_CONNECTIONS) as u16;
        let scheduled = || ConnectionPhase::Scheduled { at: now };
        let connection = |cid| InitiatorConnection::new(cid, scheduled(), false, now);
        self.connections.extend((1..most).map(connection));
        let full = self.full.insert(Box::new(full));
        if let SessionPurpose::Manage(function) = self.purpose {
            // The unit is not accessed: it may not be responding.
            full.queue.drain();
            full.manage(function, &mut self.connections);
        }
        if self.is_stopping {
            full.stop(&mut self.connections);
        }
    }

    /// Records the result of the bring-up.
    #[inline]
    fn check_bring_up(&mut self) {
        if self.unit.is_some() || self.refused.is_some() {
            return;
        }
        let Some(full) = &mut self.full else { return };
        if matches!(self.purpose, SessionPurpose::Manage(_)) {
            if full.aborts.response.is_some() {
                full.stop(&mut self.connections);
            }
            return;
        }
        let (unit, refused) = full.bring_up();
        if unit.is_none() && refused.is_none() {
            return;
        }
        self.refused = refused.map(IscsiRefused::Unit);
        self.unit = unit.cloned();
        self.luns = full.luns().to_vec();
        if self.refused.is_some() || self.purpose == SessionPurpose::Describe {
            full.stop(&mut self.connections);
        }
    }
}

/// One connection of a session, as a stream session.
struct SessionConnection<'a> {
    session: &'a mut IscsiInitiatorSession,
    index: usize,
}

impl SessionConnection<'_> {
    #[inline]
    fn connection(&self) -> Option<&InitiatorConnection> {
        self.session.connections.get(self.index)
    }
}

impl StreamConnections for IscsiInitiatorSession {
    #[inline]
    fn connection(&mut self, index: usize) -> impl StreamSession {
        SessionConnection { session: self, index }
    }
}

impl Timed for SessionConnection<'_> {
    fn poll_timeout(&self) -> Option<Instant> {
        let connection = self.connection()?;
        match (&self.session.full, &connection.phase) {
            (None, ConnectionPhase::Login(_)) => Some(self.session.deadline),
            (Some(_), ConnectionPhase::Login(_)) => connection.keep_alive.next.checked_add(LOGIN_TIMEOUT),
            (Some(full), _) => full.poll_timeout(connection),
            _ => None,
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.take_pending_error()?;
        let session = &mut *self.session;
        let Some(full) = &mut session.full else {
            return if session.is_logging_in() && now >= session.deadline {
                Err(LOGIN_TIMED_OUT)
            } else {
                Ok(())
            };
        };
        if full.is_over() {
            full.set_now(now);
            return Ok(());
        }
        full.on_timeout(now, &mut session.connections)?;
        let Some(connection) = session.connections.get_mut(self.index) else { return Ok(()) };
        if connection.is_connected() {
            return full.on_tick(now, connection);
        }
        let is_late = connection.keep_alive.next.checked_add(LOGIN_TIMEOUT).is_some_and(|late| now >= late);
        if is_late { Err(LOGIN_TIMED_OUT) } else { Ok(()) }
    }
}

impl StreamSession for SessionConnection<'_> {
    #[inline]
    fn demand(&self) -> Demand {
        let Some(connection) = self.connection() else { return Demand::Close };
        match (&self.session.full, &connection.phase) {
            (_, ConnectionPhase::Over) => Demand::Close,
            (None, ConnectionPhase::Login(login)) => Demand::Bytes(login.need),
            (Some(full), ConnectionPhase::Login(login)) if !full.is_over() => Demand::Bytes(login.need),
            (Some(full), _) => full.demand(connection),
            _ => Demand::Nothing,
        }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        let session = &mut *self.session;
        let mut taken = session.on_login_bytes(self.index, input.unread(), now)?;
        let Some(connection) = session.connections.get_mut(self.index) else {
            return Ok(input.unread().len());
        };
        if matches!(connection.phase, ConnectionPhase::Over) {
            // Bytes after the end of the connection are dropped.
            return Ok(input.unread().len());
        }
        if let Some(full) = &mut session.full {
            full.set_now(now);
            if connection.is_connected() {
                taken = full.on_bytes(connection, input, taken)?;
            }
            full.advance(&mut session.connections);
        }
        session.check_bring_up();
        Ok(taken)
    }

    fn on_placed(&mut self, now: Instant) -> Result<(), ProtocolError> {
        let IscsiInitiatorSession { full: Some(full), connections, .. } = &mut *self.session else {
            return Ok(());
        };
        let Some(connection) = connections.get_mut(self.index) else { return Ok(()) };
        full.set_now(now);
        full.on_placed(connection)?;
        full.advance(connections);
        Ok(())
    }

    /// Without commands in flight, the target may close the connection, for example at shutdown;
    /// the driver reconnects unless it stopped the session itself. With several connections,
    /// closing one is a lost connection at any time.
    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        let IscsiInitiatorSession { full, connections, .. } = &mut *self.session;
        let is_allowed = match (full, connections.get(self.index)) {
            (Some(full), Some(connection)) if connections.len() == 1 && !full.recovers_connections() => {
                full.on_end(connection)
            }
            (Some(_), _) => true,
            (None, connection) => {
                connection.is_none_or(|connection| matches!(connection.phase, ConnectionPhase::Over))
            }
        };
        if is_allowed {
            return Ok(());
        }
        Err(ProtocolError {
            what: "closed the connection during a login or commands",
            reference: "RFC 7143 §6.3, §4.2.5",
        })
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        match self.session.connections.get_mut(self.index) {
            Some(connection) => connection.sender.outbox(),
            None => &mut self.session.unused_outbox,
        }
    }
}

const LOGIN_TIMED_OUT: ProtocolError = ProtocolError {
    what: "did not finish login and bring-up within 30 seconds",
    reference: "RFC 7143 §6.3, Login Phase",
};

/// Time limit of login and bring-up. Some targets open their backing store only when it is first
/// accessed.
pub const LOGIN_TIMEOUT: Duration = Duration::from_secs(30);
