//! The iSCSI initiator: reaches one logical unit of a target (RFC 7143).
//!
//! ```text
//!   Login ──FullFeaturePhase──▶ Full: bring-up ──▶ I/O ──on_stop, all complete──▶ logout ──▶ Over
//!     └──────── refused ─────────────┴───────────────────────────────────────────────────────▶ Over
//! ```
//! [`InitiatorSession`] is driven as [`crate::session`] says: `login` agrees on everything, [`crate::scsi::initiator`]
//! learns what the unit is like and cuts I/O into commands, and what is here numbers them, moves their data and reads
//! what comes back (`full`, `send`, `receive`, `reply`). [`DiscoverySession`] asks what targets there are.
//!
//! What bounds a session: 30 seconds for login and bring-up; 1024 I/O, four commands each; as many commands as the
//! target's window has; one ping, and the session is given up when it stays silent for 10 seconds more. A session has
//! one connection and error recovery level 0: whatever goes wrong below SCSI ends it, and another session replays.

mod address;
mod discovery;
mod full;
mod immediate;
mod receive;
mod refused;
mod reply;
mod send;

#[cfg(test)]
mod tests;

pub use crate::scsi::initiator::{SenseCode, UnitInfo, UnitRefused, UnmapLimits};
pub use address::TargetAddress;
pub use blockmux_wire::iscsi::session::LoginStatus;
pub use discovery::{DiscoverySession, FoundTarget};
pub use refused::Refused;

use super::digest::Digests;
use super::login::chap::SEED_LEN;
use super::login::initiator::{Identity, InitiatorLogin, Progress};
use super::login::operational::{DEFAULT_DATA_SEGMENT_LENGTH, Key, Parameters};
use super::name::Name;
use super::node::Chap;
use super::pdu::{self, Parsed};
use crate::outbox::Outbox;
use crate::scsi::Lun;
use crate::session::{Demand, Initiator, ProtocolError, StreamSession, Timed};
use blockmux_volume::{Chunk, Completion, Io, IoError, Pool, VolumeInfo};
use blockmux_wire::iscsi::session::LoginResponse;
use blockmux_wire::iscsi::{BHS_LEN, Opcode};
use full::FullFeature;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use zerocopy::transmute_ref;

/// What to reach, and how.
#[derive(Clone, Debug)]
pub struct Config {
    /// Our own name.
    pub initiator: Name,
    /// The target's.
    pub target: Name,
    /// Which of its logical units.
    pub lun: Lun,
    /// What for.
    pub mode: Mode,
    /// What to prove, and what the target has to; `None`: nothing.
    pub chap: Option<Chap>,
    /// What to propose; see [`wishes`].
    pub wishes: Parameters,
    /// Unique among the sessions of one initiator with one target: another with the same ends the first.
    pub isid: [u8; 6],
}

/// What a session is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// To read and write the unit.
    Use,
    /// To learn everything about the unit, and leave.
    Describe,
}

/// What an initiator proposes unless it is told otherwise: data at once and in long bursts, no digests.
#[must_use]
pub fn wishes() -> Parameters {
    Parameters::standard()
        .with(Key::InitialR2T, 0)
        .with(Key::MaxRecvDataSegmentLength, 256 << 10)
        .with(Key::MaxBurstLength, 1 << 20)
        .with(Key::FirstBurstLength, 256 << 10)
        .with(Key::DefaultTime2Wait, 0)
        .with(Key::DefaultTime2Retain, 0)
        .with(Key::MaxOutstandingR2T, 8)
}

/// One session with a target, over one connection, from its first byte on.
pub struct InitiatorSession {
    phase: Phase,
    outbox: Outbox,
    pool: Pool,
    lun: Lun,
    mode: Mode,
    /// When the unit has to be known.
    deadline: Instant,
    is_stopping: bool,
    refused: Option<Refused>,
    unit: Option<UnitInfo>,
    luns: Vec<Lun>,
    parameters: Option<Parameters>,
    /// What was submitted without a session to do it.
    failed: VecDeque<Completion>,
}

enum Phase {
    Login(Box<LoginPhase>),
    Full(Box<FullFeature>),
    Over,
}

impl InitiatorSession {
    /// A session on a fresh connection. Reads without a buffer take memory from `pool` where nothing can be lent;
    /// `seed` is random and used for this session alone.
    #[must_use]
    pub fn new(config: Config, pool: Pool, seed: [u8; SEED_LEN], now: Instant) -> InitiatorSession {
        let Config { initiator, target, lun, mode, chap, wishes, isid } = config;
        let mut outbox = Outbox::default();
        let identity = Identity { initiator, target: Some(target), isid };
        let login = LoginPhase::start(InitiatorLogin::new(identity, chap, wishes, seed), &mut outbox);
        InitiatorSession {
            phase: Phase::Login(Box::new(login)),
            outbox,
            pool,
            lun,
            mode,
            deadline: now.checked_add(LOGIN_TIMEOUT).unwrap_or(now),
            is_stopping: false,
            refused: None,
            unit: None,
            luns: Vec::new(),
            parameters: None,
            failed: VecDeque::new(),
        }
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

    /// The logical units that the target listed, at most 256; known even where the one that was asked for is not
    /// there.
    #[must_use]
    pub fn luns(&self) -> &[Lun] {
        &self.luns
    }

    /// What the login agreed on, once it is over.
    #[must_use]
    pub fn parameters(&self) -> Option<&Parameters> {
        self.parameters.as_ref()
    }

    /// Why the session does not do what was asked, if it does not.
    #[must_use]
    pub fn refused(&self) -> Option<&Refused> {
        self.refused.as_ref()
    }

    /// Whether the session has come to its end: everything asked for was told, or refused, or it was stopped.
    #[must_use]
    pub fn is_over(&self) -> bool {
        match &self.phase {
            Phase::Login(_) => false,
            Phase::Full(full) => full.is_over(),
            Phase::Over => true,
        }
    }

    fn on_login_bytes(&mut self, bytes: &[u8]) -> Result<usize, ProtocolError> {
        let Phase::Login(login) = &mut self.phase else { return Ok(0) };
        let (taken, progress) = login.on_bytes(bytes, &mut self.outbox)?;
        match progress {
            Progress::Continues => {}
            Progress::Refused(refused) => {
                self.refused = Some(refused);
                self.phase = Phase::Over;
            }
            Progress::Established(established) => {
                self.parameters = Some(established.parameters);
                let mut full = FullFeature::new(self.lun, established, self.pool.clone(), self.deadline);
                if self.is_stopping {
                    full.stop(&mut self.outbox);
                }
                full.advance(&mut self.outbox);
                self.phase = Phase::Full(Box::new(full));
            }
        }
        Ok(taken)
    }

    /// Notes what the bring-up has come to.
    #[inline]
    fn look_at_unit(&mut self) {
        if self.unit.is_some() || self.refused.is_some() {
            return;
        }
        let Phase::Full(full) = &mut self.phase else { return };
        let (unit, refused) = full.bring_up();
        if unit.is_none() && refused.is_none() {
            return;
        }
        self.refused = refused.map(Refused::Unit);
        self.unit = unit.cloned();
        self.luns = full.luns().to_vec();
        if self.refused.is_some() || self.mode == Mode::Describe {
            full.stop(&mut self.outbox);
        }
    }
}

impl Timed for InitiatorSession {
    fn poll_timeout(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Login(_) => Some(self.deadline),
            Phase::Full(full) => full.poll_timeout(),
            Phase::Over => None,
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        match &mut self.phase {
            Phase::Login(_) if now >= self.deadline => Err(LATE),
            Phase::Full(full) => full.on_timeout(now, &mut self.outbox),
            Phase::Login(_) | Phase::Over => Ok(()),
        }
    }
}

impl StreamSession for InitiatorSession {
    #[inline]
    fn demand(&self) -> Demand {
        match &self.phase {
            Phase::Login(login) => Demand::Bytes(login.need),
            Phase::Full(full) => full.demand(&self.outbox),
            Phase::Over => Demand::Close,
        }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk) -> Result<usize, ProtocolError> {
        let taken = self.on_login_bytes(input.unread())?;
        let taken = match &mut self.phase {
            Phase::Full(full) => full.on_bytes(input, taken, &mut self.outbox)?,
            Phase::Login(_) => taken,
            // What comes after the end is of no interest.
            Phase::Over => input.unread().len(),
        };
        self.look_at_unit();
        Ok(taken)
    }

    fn on_placed(&mut self) -> Result<(), ProtocolError> {
        match &mut self.phase {
            Phase::Full(full) => full.on_placed(&mut self.outbox),
            Phase::Login(_) | Phase::Over => Ok(()),
        }
    }

    /// Without anything under way the target may leave, as one does that is shut down; the driver, who knows whether it
    /// had asked for the end, reconnects.
    fn on_end(&mut self) -> Result<(), ProtocolError> {
        let is_allowed = match &mut self.phase {
            Phase::Login(_) => false,
            Phase::Full(full) => full.on_end(),
            Phase::Over => true,
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
        &mut self.outbox
    }
}

impl Initiator for InitiatorSession {
    fn is_ready(&self) -> bool {
        self.unit.is_some() && self.mode == Mode::Use
    }

    /// Not more than the target's window of commands has room for.
    #[inline]
    fn room(&self) -> usize {
        match &self.phase {
            Phase::Full(full) if self.is_ready() => full.room(),
            _ => 0,
        }
    }

    #[inline]
    fn submit(&mut self, io: Io) {
        match &mut self.phase {
            Phase::Full(full) => full.submit(io, &mut self.outbox),
            Phase::Login(_) | Phase::Over => {
                self.failed.push_back(Completion { tag: io.tag, result: Err(IoError::PathLost) });
            }
        }
    }

    #[inline]
    fn poll_done(&mut self) -> Option<Completion> {
        match &mut self.phase {
            Phase::Full(full) => full.poll_done(),
            Phase::Login(_) | Phase::Over => self.failed.pop_front(),
        }
    }

    /// What has completed and was not polled yet is not among them. When the target asked for a logout, what was not
    /// sent until then is.
    fn take_unfinished(&mut self) -> Vec<Io> {
        self.outbox.clear();
        match &mut self.phase {
            Phase::Full(full) => full.take_unfinished(),
            Phase::Login(_) | Phase::Over => Vec::new(),
        }
    }

    fn poll_size(&mut self) -> Option<u64> {
        let Phase::Full(full) = &mut self.phase else { return None };
        let size = full.queue.poll_size()?;
        self.unit = full.queue.unit().cloned();
        Some(size)
    }

    fn resize(&mut self, size: u64) {
        if let Phase::Full(full) = &mut self.phase {
            full.queue.resize(size);
        }
    }

    fn on_stop(&mut self) {
        self.is_stopping = true;
        match &mut self.phase {
            // Nothing is agreed on that could be ended in order.
            Phase::Login(_) => self.phase = Phase::Over,
            Phase::Full(full) => full.stop(&mut self.outbox),
            Phase::Over => {}
        }
    }
}

/// The frame of login responses.
struct LoginPhase {
    login: InitiatorLogin,
    /// Bytes in one piece that it needs to go on.
    need: usize,
}

impl LoginPhase {
    fn start(mut login: InitiatorLogin, outbox: &mut Outbox) -> LoginPhase {
        login.start(outbox);
        LoginPhase { login, need: BHS_LEN }
    }

    /// Takes responses until there are no more or the login is over; returns how many bytes that were.
    fn on_bytes(&mut self, bytes: &[u8], outbox: &mut Outbox) -> Result<(usize, Progress), ProtocolError> {
        let mut at: usize = 0;
        loop {
            let rest = bytes.get(at..).unwrap_or_default();
            let head = match pdu::parse(rest, Digests::default())? {
                Parsed::Needs(need) => {
                    self.need = need;
                    return Ok((at, Progress::Continues));
                }
                Parsed::Head(head) => head,
            };
            let fault = |what| Err(ProtocolError { what, reference: "RFC 7143 §6.3, Login Phase" });
            if head.bhs.opcode() != Opcode::LOGIN_RESPONSE {
                return fault("sent something else than a login response during login");
            }
            if head.data_len > DEFAULT_DATA_SEGMENT_LENGTH as usize {
                return fault("sent more than 8192 bytes in a login response");
            }
            let (text, whole) = match head.segment(rest, Digests::default()) {
                Ok(found) => found,
                Err(whole) => {
                    self.need = whole;
                    return Ok((at, Progress::Continues));
                }
            };
            let response: &LoginResponse = transmute_ref!(&head.bhs);
            at = at.saturating_add(whole);
            self.need = BHS_LEN;
            match self.login.on_response(response, text, outbox)? {
                Progress::Continues => {}
                end => return Ok((at, end)),
            }
        }
    }
}

const LATE: ProtocolError = ProtocolError {
    what: "did not finish login and bring-up within 30 seconds",
    reference: "RFC 7143 §6.3, Login Phase",
};

/// For login and bring-up: some targets open what they serve only when asked for it.
pub const LOGIN_TIMEOUT: Duration = Duration::from_secs(30);
