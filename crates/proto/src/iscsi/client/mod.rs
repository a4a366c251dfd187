//! The iSCSI initiator: reaches one logical unit of a target (RFC 7143).
//!
//! ```text
//!   Login ──FullFeaturePhase──▶ Full: bring-up ──▶ I/O ──on_stop, all complete──▶ logout ──▶ Over
//!     └──────── refused ─────────────┴───────────────────────────────────────────────────────▶ Over
//! ```
//! [`InitiatorSession`] is driven as [`crate::session`] says: `login` agrees on everything,
//! [`crate::scsi::initiator`] learns what the unit is like and cuts I/O into commands, and what is
//! here numbers them, moves their data and reads what comes back (`full`, `burst`, `receive`).
//! [`IscsiDiscoverySession`] asks what targets there are.
//!
//! What bounds a session: 30 seconds for login and bring-up; 1024 I/O, four commands each; as many
//! commands as the target's window has; one ping, and the connection is given up when it stays
//! silent for 10 seconds more.
//!
//! # Several connections, and what goes wrong
//!
//! A session may have several connections, if both sides agree on it (`MaxConnections`): one queue
//! of commands with one sequence of numbers, each burst of commands on one connection, where their
//! data and their status come, too (RFC 7143 §4.2.2.1, command connection allegiance). `connection`
//! is one of them. The driver sees them through the calls of [`crate::session::Connections`]: the
//! session says when it wants one more, and each is a stream session of its own.
//!
//! At error recovery level 0 whatever goes wrong below SCSI ends the session with all its
//! connections, and another session replays. At level 1 what came damaged is sent again, and at
//! level 2 a connection that is lost is replaced, and its commands go on (`recovery`, `statuses`).
//! A command that gets no answer is aborted, and if that gets none, the unit is reset (`abort`).
//!
//! # Over RDMA
//! [`InitiatorSession::over_rdma`] makes the same session over queue pairs (iSER, RFC 7145), always
//! at error recovery level 0. A command opens the memory of its I/O to the target and names it;
//! Data-In, R2T and Data-Out do not occur (`full`, `datamover`). Everything else leaves by the
//! sender and comes as a PDU, as it does over TCP (`iser`).

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
pub use config::{BurstSize, Config, MAX_CONNECTIONS, Mode, wishes};
pub use discovery::{FoundTarget, IscsiDiscoverySession};

use super::login::chap::SEED_LEN;
use super::login::initiator::{FIRST_CID, InitiatorLoginProgress, InitiatorLoginResult, LoginIdentity};
use super::login::operational::{OperationalKey, OperationalParameters};
use crate::outbox::Outbox;
use crate::scsi::Lun;
use crate::session::{Demand, ProtocolError, StreamConnections, StreamSession, Timed};
use blockmux_volume::{Chunk, Completion, Pool, VolumeInfo};
use connection::{ConnectionPhase, InitiatorConnection};
use full::FullFeatureSession;
use login::{LoginPhase, Logins};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// One session with a target, over one connection or several, from its first byte on.
pub struct InitiatorSession {
    /// The first is the one that begins the session.
    connections: Vec<InitiatorConnection>,
    /// What a connection sends that there is not.
    nobodys: Outbox,
    /// `None` before the first login has ended, and where it was refused.
    full: Option<Box<FullFeatureSession>>,
    logins: Logins,
    pool: Pool,
    lun: Lun,
    burst: BurstSize,
    mode: Mode,
    /// When the unit has to be known.
    deadline: Instant,
    is_stopping: bool,
    has_other_paths: bool,
    refused: Option<IscsiRefused>,
    unit: Option<UnitInfo>,
    luns: Vec<Lun>,
    parameters: Option<OperationalParameters>,
    /// What was submitted without a session to do it.
    failed: VecDeque<Completion>,
}

impl InitiatorSession {
    /// A session on a fresh connection. Reads without a buffer take memory from `pool` where
    /// nothing can be lent; `seed` is random and used for this session alone.
    #[must_use]
    pub fn new(config: Config, pool: Pool, seed: [u8; SEED_LEN], now: Instant) -> InitiatorSession {
        InitiatorSession::build(config, pool, seed, now, false)
    }

    fn build(
        config: Config,
        pool: Pool,
        seed: [u8; SEED_LEN],
        now: Instant,
        is_over_rdma: bool,
    ) -> InitiatorSession {
        let Config { initiator, target, lun, mode, chap, wishes, isid, burst } = config;
        let identity = LoginIdentity { initiator, target: Some(target), isid };
        let mut logins = Logins::new(identity, chap, wishes, seed);
        if is_over_rdma {
            logins = logins.over_rdma();
        }
        let mut first = InitiatorConnection::new(FIRST_CID, ConnectionPhase::Dialing, is_over_rdma, now);
        let login = LoginPhase::start(logins.next(), &mut first.sender);
        first.phase = ConnectionPhase::Login(Box::new(login));
        InitiatorSession {
            connections: vec![first],
            nobodys: Outbox::default(),
            full: None,
            logins,
            pool,
            lun,
            burst,
            mode,
            deadline: now.checked_add(LOGIN_TIMEOUT).unwrap_or(now),
            is_stopping: false,
            has_other_paths: false,
            refused: None,
            unit: None,
            luns: Vec::new(),
            parameters: None,
            failed: VecDeque::new(),
        }
    }

    /// Says that other sessions lead to the unit as well: what a target port does not do now is
    /// handed back ([`Initiator::poll_returned`](crate::session::Initiator::poll_returned)).
    #[must_use]
    pub fn with_other_paths(mut self) -> InitiatorSession {
        self.has_other_paths = true;
        self
    }

    /// The logical unit, once it is known.
    #[must_use]
    pub fn unit(&self) -> Option<&UnitInfo> {
        self.unit.as_ref()
    }

    /// The logical unit as a volume, once it is known.
    #[must_use]
    pub fn volume_info(&self) -> Option<VolumeInfo> {
        self.unit.as_ref().map(UnitInfo::volume_info)
    }

    /// The logical units that the target listed, at most 256; known even where the one that was
    /// asked for is not there.
    #[must_use]
    pub fn luns(&self) -> &[Lun] {
        &self.luns
    }

    /// What the first login agreed on, once it is over.
    #[must_use]
    pub fn parameters(&self) -> Option<&OperationalParameters> {
        self.parameters.as_ref()
    }

    /// Why the session does not do what was asked, if it does not.
    #[must_use]
    pub fn refused(&self) -> Option<&IscsiRefused> {
        self.refused.as_ref()
    }

    /// Whether the session has come to its end: everything asked for was told, or refused, or it
    /// was stopped.
    #[must_use]
    pub fn is_over(&self) -> bool {
        match &self.full {
            Some(full) => full.is_over(),
            None => !self.is_logging_in(),
        }
    }

    /// How the target has answered what a session of [`Mode::Manage`] asks for, once it has.
    #[must_use]
    pub fn managed(&self) -> Option<FunctionResponse> {
        self.full.as_ref()?.aborts.answer()
    }

    fn is_logging_in(&self) -> bool {
        self.connections
            .first()
            .is_some_and(|connection| matches!(connection.phase, ConnectionPhase::Login(_)))
    }

    /// Takes responses to a connection's login, if that is not over.
    #[inline]
    fn on_login_bytes(&mut self, index: usize, bytes: &[u8], now: Instant) -> Result<usize, ProtocolError> {
        let Some(connection) = self.connections.get_mut(index) else { return Ok(0) };
        let ConnectionPhase::Login(login) = &mut connection.phase else { return Ok(0) };
        let (taken, progress) = login.on_bytes(bytes, &mut connection.sender)?;
        match progress {
            InitiatorLoginProgress::Continues => {}
            InitiatorLoginProgress::Refused(refused) => {
                connection.phase = ConnectionPhase::Over;
                // Of a further connection: the session goes on without it.
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
        let max_connections = if self.mode == Mode::Use {
            established.parameters.get(OperationalKey::MaxConnections)
        } else {
            1
        };
        self.logins.tsih = established.tsih;
        let times = (now, self.deadline);
        let mut full = FullFeatureSession::new((self.lun, self.burst), established, self.pool.clone(), times);
        if self.has_other_paths {
            full.queue.set_other_paths();
        }
        if let Some(first) = self.connections.first_mut() {
            first.open(&established.parameters, established.exp_stat_sn, now);
        }
        let most = max_connections.min(MAX_CONNECTIONS) as u16;
        let wanted = || ConnectionPhase::Wanted { at: now };
        let is_over_rdma = self.connections.first().is_some_and(|connection| connection.mover.is_some());
        let connection = |cid| InitiatorConnection::new(cid, wanted(), is_over_rdma, now);
        self.connections.extend((1..most).map(connection));
        let full = self.full.insert(Box::new(full));
        if let Mode::Manage(function) = self.mode {
            // Nothing is asked of the unit, which may owe answers to everybody.
            full.queue.drain();
            full.manage(function, &mut self.connections);
        }
        if self.is_stopping {
            full.stop(&mut self.connections);
        }
    }

    /// Notes what the bring-up has come to.
    #[inline]
    fn look_at_unit(&mut self) {
        if self.unit.is_some() || self.refused.is_some() {
            return;
        }
        let Some(full) = &mut self.full else { return };
        if matches!(self.mode, Mode::Manage(_)) {
            if full.aborts.answer().is_some() {
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
        if self.refused.is_some() || self.mode == Mode::Describe {
            full.stop(&mut self.connections);
        }
    }
}

/// One connection of a session, as its driver has it.
struct SessionConnection<'a> {
    session: &'a mut InitiatorSession,
    index: usize,
}

impl SessionConnection<'_> {
    #[inline]
    fn connection(&self) -> Option<&InitiatorConnection> {
        self.session.connections.get(self.index)
    }
}

impl StreamConnections for InitiatorSession {
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
            (Some(_), ConnectionPhase::Login(_)) => connection.ticks.next.checked_add(LOGIN_TIMEOUT),
            (Some(full), _) => full.poll_timeout(connection),
            _ => None,
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.take_broken()?;
        let session = &mut *self.session;
        let Some(full) = &mut session.full else {
            return if session.is_logging_in() && now >= session.deadline { Err(LATE) } else { Ok(()) };
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
        let is_late = connection.ticks.next.checked_add(LOGIN_TIMEOUT).is_some_and(|late| now >= late);
        if is_late { Err(LATE) } else { Ok(()) }
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
            // What comes after the end is of no interest.
            return Ok(input.unread().len());
        }
        if let Some(full) = &mut session.full {
            full.set_now(now);
            if connection.is_connected() {
                taken = full.on_bytes(connection, input, taken)?;
            }
            full.advance(&mut session.connections);
        }
        session.look_at_unit();
        Ok(taken)
    }

    fn on_placed(&mut self, now: Instant) -> Result<(), ProtocolError> {
        let InitiatorSession { full: Some(full), connections, .. } = &mut *self.session else {
            return Ok(());
        };
        let Some(connection) = connections.get_mut(self.index) else { return Ok(()) };
        full.set_now(now);
        full.on_placed(connection)?;
        full.advance(connections);
        Ok(())
    }

    /// Without anything under way the target may leave, as one does that is shut down; the driver,
    /// who knows whether it had asked for the end, reconnects. One of several connections it may
    /// leave at any time: that is a loss.
    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        let InitiatorSession { full, connections, .. } = &mut *self.session;
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
            what: "closed the connection in the middle of a login or of commands",
            reference: "RFC 7143 §6.3, §4.2.5",
        })
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        match self.session.connections.get_mut(self.index) {
            Some(connection) => connection.sender.outbox(),
            None => &mut self.session.nobodys,
        }
    }
}

const LATE: ProtocolError = ProtocolError {
    what: "did not finish login and bring-up within 30 seconds",
    reference: "RFC 7143 §6.3, Login Phase",
};

/// For login and bring-up: some targets open what they serve only when asked for it.
pub const LOGIN_TIMEOUT: Duration = Duration::from_secs(30);
