//! The iSCSI target: one connection of an initiator's session (RFC 7143).
//!
//! ```text
//!             ┌──────────────┐  FullFeaturePhase  ┌─────────────────────────────────────────────┐
//!   new ────▶ │   Entrance   │ ─────────────────▶ │                FullFeature                  │
//!             │ login_phase.rs  │                    │ receive.rs ──▶ full.rs ──▶ command.rs       │
//!             └──────────────┘                    │      connection_table.rs         ──▶ negotiation.rs    │
//!                     │ refused                   └─────────────────────────────────────────────┘
//!                     ▼                                   │ logged out, reset, stopped
//!                  Closing ──────▶ Demand::Close ◀────────┘
//! ```
//! *Several connections to a session* (MC/S): they live on one core and share what is the session's
//! (`shared`): command numbers, nexus, tasks. A [`TargetSession`] is one of them; its first login
//! request says which session it is for, and `local` where that is
//! (`docs/decisions/0010-several-connections-to-a-session.md`). `links` is what connections do for
//! each other, and how they end.
//!
//! *Error recovery level 1* (RFC 7143 §7): what has a StatSN is kept until it is acknowledged
//! (`kept`), and sent again for SNACK; a request whose data has a wrong digest counts as not
//! received, and those behind it wait (`early`); data-out that is lost is asked for again
//! (`command`, `transfer`). A wrong header digest ends the connection at every level: not even the
//! length of the PDU can be believed, and there is no layer below that would find the next one
//! (§7.8).
//!
//! *Error recovery level 2*: a connection that is lost has *failed*, and its tasks stay with its
//! driver until TASK REASSIGN takes them to another connection, or their time is over (`links`).
//!
//! What bounds a connection: 64 requests, 64 KiB of text and 30 seconds for a login; then 256
//! commands in the window and 16 immediate ones, 64 MiB of data-in and as much memory for data-out,
//! 16 task management functions, 64 KiB of text, and 1 MiB of answers that the initiator leaves
//! unread; with recovery, 544 answers and 32 MiB of data-in that are not acknowledged, and 65 MiB
//! of requests that wait for their turn. Memory for data-out comes from the core's pool; R2Ts are
//! sent only for what has memory, so that asked-for data never waits. Unasked-for data waits for
//! others' memory; if it waits in vain in front of data that was asked for, its command is answered
//! BUSY.
//!
//! # Over RDMA
//! [`IserTargetSession`] is the same session over a queue pair (iSER, RFC 7145). The seam is that
//! of RFC 5047: what has come as a message goes the way of every PDU (`receive`), control PDUs
//! leave as messages (`sender`, `iser`); and where `answer` would make Data-In and `command` R2Ts,
//! the datamover writes and reads the initiator's memory (`datamover`). Sequence and tasks know
//! nothing of it.

mod answer;
mod command;
mod connection;
mod connection_table;
mod datamover;
mod early;
mod full;
mod iser;
mod local;
mod login_phase;
mod negotiation;
mod receive;
mod replies;
mod request;
mod retained;
mod sequence;
mod shared;
mod tasks;
mod transfer;

#[cfg(test)]
mod tests;

use super::login::chap::SEED_LEN;
use super::login::operational::OperationalKey;
use super::login::target::{Session, TargetLogin, TargetLoginResult};
use super::node::IscsiNode;
use super::sender::Sender;
use super::sessions::{ConnectionHandle, LoginPermit};
use crate::event::{AuditEvent, AuditEvents, Login};
use crate::exports::VolumeId;
use crate::outbox::Outbox;
use crate::session::{Demand, Home, ProtocolError, SessionStage, StreamSession, Target, Timed};
use blockmux_volume::{Chunk, Completion, Io, Pool, Tag, Waker};
use datamover::TargetDatamover;
use full::{FullFeatureConnection, Surroundings};
pub use iser::IserTargetSession;
pub use local::LocalSessions;
use login_phase::ConnectionLogin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// One connection of an initiator's session with an iSCSI target.
pub struct TargetSession {
    phase: Phase,
    /// The login's; full feature phase takes it over.
    sender: Sender,
    events: AuditEvents,
    node: Arc<IscsiNode>,
    group_tag: u16,
    pool: Pool,
    /// When the latest call came.
    now: Instant,
    /// The address that the initiator has connected to; empty if nobody said.
    local_ip: String,
    /// The sessions of this core.
    local: Rc<LocalSessions>,
    waker: Waker,
    /// Over RDMA: whether the initiator takes messages that close its memory.
    over_rdma: Option<bool>,
}

enum Phase {
    Login(Box<ConnectionLogin>),
    Full(Box<FullFeatureConnection>),
    /// The login ended without a session.
    Closing,
}

impl TargetSession {
    /// A session for an initiator that has just connected to a portal of the group `group_tag`.
    ///
    /// `pool` is the core's, for data-out. `seed` is random and used for this session alone: CHAP
    /// challenges are made of it. The initiator has 30 seconds from `now` on to log in.
    #[must_use]
    pub fn new(
        node: Arc<IscsiNode>,
        group_tag: u16,
        pool: Pool,
        seed: [u8; SEED_LEN],
        now: Instant,
    ) -> TargetSession {
        let local = LocalSessions::new(Home::new(()));
        TargetSession::among(&local, node, group_tag, pool, seed, now)
    }

    /// A session on a core with these other sessions: the initiator may add its connection to one
    /// of them.
    #[must_use]
    pub fn among(
        local: &Rc<LocalSessions>,
        node: Arc<IscsiNode>,
        group_tag: u16,
        pool: Pool,
        seed: [u8; SEED_LEN],
        now: Instant,
    ) -> TargetSession {
        let login = TargetLogin::new(node.clone(), group_tag, seed, local.home().clone());
        let entrance = ConnectionLogin::new(login, node.clone(), local.clone(), now);
        TargetSession {
            phase: Phase::Login(Box::new(entrance)),
            sender: Sender::default(),
            events: AuditEvents::default(),
            node,
            group_tag,
            pool,
            now,
            local_ip: String::new(),
            local: local.clone(),
            waker: Waker::idle(),
            over_rdma: None,
        }
    }

    /// Takes leave to log in, over a connection to `local_ip` that `hang_up` cuts: when its
    /// initiator logs in again, this session ends. An IPv6 address is in brackets.
    #[must_use]
    pub fn admitted(
        mut self,
        permit: LoginPermit,
        local_ip: String,
        hang_up: ConnectionHandle,
    ) -> TargetSession {
        if let Phase::Login(entrance) = &mut self.phase {
            entrance.admit(permit, hang_up);
        }
        self.local_ip = local_ip;
        self
    }

    /// The core that this connection belongs on, if it is not this one. Then the session has taken
    /// nothing and wants nothing, and the driver hands the stream over with what is unread.
    #[must_use]
    pub fn moves_to(&self) -> Option<Home> {
        match &self.phase {
            Phase::Login(entrance) => entrance.moves_to().cloned(),
            Phase::Full(_) | Phase::Closing => None,
        }
    }

    /// What the session sends by now.
    #[inline]
    fn sender(&mut self) -> &mut Sender {
        match &mut self.phase {
            Phase::Full(full) => full.sender(),
            Phase::Login(_) | Phase::Closing => &mut self.sender,
        }
    }

    fn protocol(&self) -> &'static str {
        if self.over_rdma.is_some() { "iser" } else { "iscsi" }
    }

    fn login_of(&self, established: &TargetLoginResult) -> Login {
        let target = match &established.session {
            Session::Discovery => DISCOVERY,
            Session::Normal { target, .. } => target.name.as_str(),
        };
        let initiator = established.initiator.as_str().to_owned();
        Login { protocol: self.protocol(), initiator, target: target.to_owned() }
    }

    /// What a step of the login came to; a failure is told to whoever audits.
    fn audited<T>(&mut self, result: Result<T, ProtocolError>) -> Result<T, ProtocolError> {
        if let (Err(error), Phase::Login(entrance)) = (&result, &self.phase) {
            let (initiator, target) = entrance.names();
            let login = Login { protocol: self.protocol(), initiator, target };
            self.events.push(AuditEvent::refused_by(error, login));
        }
        result
    }

    fn enter(&mut self, established: TargetLoginResult) {
        let joined = match &self.phase {
            Phase::Login(entrance) => entrance.joined(),
            Phase::Full(_) | Phase::Closing => None,
        };
        let with = Surroundings {
            node: self.node.clone(),
            group_tag: self.group_tag,
            local_ip: std::mem::take(&mut self.local_ip),
            local: self.local.clone(),
            pool: self.pool.clone(),
            waker: self.waker.clone(),
            sender: std::mem::take(&mut self.sender),
        };
        self.events.push(AuditEvent::Login(self.login_of(&established)));
        let is_solicited_only =
            established.parameters.is_on(OperationalKey::TaggedBufferForSolicitedDataOnly);
        let mut full = match joined {
            Some(shared) => FullFeatureConnection::join(with, &shared, established, self.now),
            None => FullFeatureConnection::lead(with, established, self.now),
        };
        if let Some(invalidates) = self.over_rdma {
            full.set_mover(TargetDatamover::new(invalidates, is_solicited_only));
        }
        self.phase = Phase::Full(Box::new(full));
    }
}

impl Timed for TargetSession {
    fn poll_timeout(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Login(entrance) => Some(entrance.deadline()),
            Phase::Full(full) => full.poll_timeout(),
            Phase::Closing => None,
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.now = now;
        match &mut self.phase {
            Phase::Login(entrance) => {
                let result = entrance.on_timeout(now, &mut self.sender);
                if let Some(established) = self.audited(result)? {
                    self.enter(*established);
                }
                Ok(())
            }
            Phase::Full(full) => {
                full.set_now(now);
                full.on_timeout(now)
            }
            Phase::Closing => Ok(()),
        }
    }
}

impl StreamSession for TargetSession {
    fn demand(&self) -> Demand {
        match &self.phase {
            Phase::Login(entrance) => entrance.demand(),
            Phase::Full(full) => full.demand(),
            Phase::Closing => Demand::Close,
        }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        self.now = now;
        let mut taken = 0;
        if let Phase::Login(entrance) = &mut self.phase {
            let established;
            let result = entrance.on_bytes(input.unread(), now, &mut self.sender);
            (taken, established) = self.audited(result)?;
            if let Some(established) = established {
                self.enter(*established);
            }
        }
        match &mut self.phase {
            Phase::Full(full) => {
                full.set_now(now);
                full.on_bytes(input, taken)
            }
            Phase::Login(_) | Phase::Closing => Ok(taken),
        }
    }

    fn on_placed(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if let Phase::Full(full) = &mut self.phase {
            full.set_now(now);
            full.on_placed();
        }
        Ok(())
    }

    fn on_end(&mut self, now: Instant) -> Result<(), ProtocolError> {
        match &mut self.phase {
            Phase::Full(full) => {
                full.set_now(now);
                full.on_end()
            }
            Phase::Login(_) | Phase::Closing => {
                self.phase = Phase::Closing;
                Ok(())
            }
        }
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        self.sender().outbox()
    }
}

impl Target for TargetSession {
    fn depth(&self) -> u32 {
        full::WINDOW.saturating_add(full::MAX_IMMEDIATE as u32)
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        match &mut self.phase {
            Phase::Full(full) => full.poll_io(),
            Phase::Login(_) | Phase::Closing => None,
        }
    }

    #[inline]
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        match &mut self.phase {
            Phase::Full(full) => full.poll_cancel(),
            Phase::Login(_) | Phase::Closing => None,
        }
    }

    #[inline]
    fn on_io(&mut self, done: Completion, now: Instant) {
        if let Phase::Full(full) = &mut self.phase {
            full.set_now(now);
            full.on_io(done);
        }
    }

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        self.events.pop().or_else(|| match &mut self.phase {
            Phase::Full(full) => full.poll_event(),
            Phase::Login(_) | Phase::Closing => None,
        })
    }

    fn on_start(&mut self, waker: &Waker, _now: Instant) {
        self.waker = waker.clone();
    }

    #[inline]
    fn on_turn(&mut self, now: Instant) {
        if let Phase::Full(full) = &mut self.phase {
            full.set_now(now);
            full.on_turn();
        }
    }

    #[inline]
    fn stage(&self) -> SessionStage {
        match &self.phase {
            Phase::Full(full) if full.lingers() => SessionStage::Lingering,
            Phase::Full(_) => SessionStage::Established,
            Phase::Login(_) | Phase::Closing => SessionStage::Handshake,
        }
    }

    fn owed(&self) -> Option<u64> {
        match &self.phase {
            Phase::Full(full) => full.owed(),
            Phase::Login(_) | Phase::Closing => None,
        }
    }

    fn on_stop(&mut self, now: Instant) {
        match &mut self.phase {
            Phase::Login(entrance) => {
                entrance.on_stop(&mut self.sender);
                self.phase = Phase::Closing;
            }
            Phase::Full(full) => {
                full.set_now(now);
                full.on_stop();
            }
            Phase::Closing => {}
        }
    }
}

/// What a discovery session is a login to.
const DISCOVERY: &str = "discovery";
