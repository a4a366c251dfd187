//! The iSCSI target: one connection of an initiator's session (RFC 7143).
//!
//! ```text
//!             ┌──────────────┐  FullFeaturePhase  ┌─────────────────────────────────────────────┐
//!   new ────▶ │  login phase │ ─────────────────▶ │                FullFeature                  │
//!             │login_phase.rs│                    │ receive.rs ──▶ full.rs ──▶ command.rs       │
//!             └──────────────┘                    │ connection_table.rs   └─▶ negotiation.rs    │
//!                     │ refused                   └─────────────────────────────────────────────┘
//!                     ▼                                   │ logged out, reset, stopped
//!                  Closing ──────▶ Demand::Close ◀────────┘
//! ```
//! *Multiple connections per session* (MC/S): all connections of a session live on one core and
//! share its command numbers, I_T nexus and tasks (`shared`). An [`IscsiTargetSession`] is one
//! connection; its first login request names the session, and `local` finds the core of that
//! session (`docs/decisions/0010-an-iscsi-target-session-runs-on-one-core.md`). `connection_table`
//! describes how connections end and what they do for each other.
//!
//! *Error recovery level 1* (RFC 7143 §7): every PDU with a StatSN is retained until it is
//! acknowledged (`retained`) and sent again for SNACK. A request with a wrong data digest counts as
//! not received, and later ones wait (`early`). Lost data-out is requested again (`command`,
//! `transfer`). A wrong header digest ends the connection at every level: the length of the PDU is
//! unknown, and no sync layer finds the next PDU (§7.8).
//!
//! *Error recovery level 2*: a lost connection has *failed*. Its tasks stay with its driver until
//! TASK REASSIGN moves them to another connection or they time out (`connection_table`).
//!
//! *Limits of a connection.* Login: 64 requests, 64 KiB of text, 30 seconds. Full feature phase:
//! 256 commands in the window, 16 immediate commands, 64 MiB of data-in, 64 MiB of data-out memory,
//! 16 task management functions, 64 KiB of text, 1 MiB of unread responses. With error recovery:
//! 544 unacknowledged responses, 32 MiB of unacknowledged data-in, 65 MiB of early requests.
//! Data-out memory comes from the core's pool. R2Ts are sent only for allocated memory, so
//! solicited data never waits. Unsolicited data waits until other connections return memory. If the
//! memory may be held by an earlier command of this connection whose data follows in the stream,
//! waiting would never end, so the later command ends with BUSY.
//!
//! # Over RDMA
//! [`IserTargetSession`] runs this session over a queue pair (iSER, RFC 7145). The boundary is the
//! datamover interface of RFC 5047: received messages take the path of every PDU (`receive`),
//! control PDUs leave as messages (`sender`, `iser`), and instead of Data-In and R2T PDUs the
//! datamover writes and reads the initiator's memory (`datamover`).

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
use super::login::target::{TargetLogin, TargetLoginResult, TargetSessionKind};
use super::node::IscsiNode;
use super::sender::Sender;
use super::sessions::LoginPermit;
use crate::driver::audit_event::{AuditEvent, AuditEvents, Login};
use crate::driver::outbox::Outbox;
use crate::driver::session::{ConnectionHandle, CoreHandle, Demand, ProtocolError, StreamSession, Timed};
use crate::driver::target::{Charge, IoSource, SessionStage, TargetLifecycle};
use crate::exports::VolumeId;
use crate::volume_state::NotAdmitted;
use blockmux_volume::{Chunk, Completion, Io, IoError, Pool, Tag, Waker};
use connection::ConnectionAddresses;
use core::net::{IpAddr, SocketAddr};
use datamover::{RdmaPeer, TargetDatamover};
use full::{ConnectionResources, FullFeatureConnection};
pub use iser::IserTargetSession;
pub use local::LocalSessions;
use login_phase::ConnectionLogin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// One connection of an initiator's session with an iSCSI target.
pub struct IscsiTargetSession {
    phase: IscsiPhase,
    /// Sender of the login phase; full feature phase takes it over.
    sender: Sender,
    events: AuditEvents,
    node: Arc<IscsiNode>,
    pool: Pool,
    /// Time of the latest call.
    now: Instant,
    addresses: ConnectionAddresses,
    /// Sessions of this core.
    local: Rc<LocalSessions>,
    waker: Waker,
    /// Over RDMA: what the initiator supports.
    over_rdma: Option<RdmaPeer>,
    /// It is a discovery session of an initiator that was not authenticated.
    is_open_discovery: bool,
}

enum IscsiPhase {
    Login(Box<ConnectionLogin>),
    Full(Box<FullFeatureConnection>),
    /// The login ended without a session.
    Closing,
}

impl IscsiTargetSession {
    /// Creates a connection that the listener with this number accepted, on a core without other
    /// sessions.
    ///
    /// `pool` provides data-out memory. `seed` must be random and unique to this connection: CHAP
    /// challenges are derived from it. The login must complete within 30 seconds of `now`.
    #[must_use]
    pub fn new(
        node: Arc<IscsiNode>,
        listener: u16,
        pool: Pool,
        seed: [u8; SEED_LEN],
        now: Instant,
    ) -> IscsiTargetSession {
        let local = LocalSessions::new(CoreHandle::new(()));
        IscsiTargetSession::among(&local, node, listener, pool, seed, now)
    }

    /// Creates a connection on a core with the sessions `local`, which the initiator may join
    /// (MC/S).
    #[must_use]
    pub fn among(
        local: &Rc<LocalSessions>,
        node: Arc<IscsiNode>,
        listener: u16,
        pool: Pool,
        seed: [u8; SEED_LEN],
        now: Instant,
    ) -> IscsiTargetSession {
        let login = TargetLogin::new(node.clone(), listener, seed, local.core.clone());
        let login = ConnectionLogin::new(login, node.clone(), local.clone(), now);
        IscsiTargetSession {
            phase: IscsiPhase::Login(Box::new(login)),
            sender: Sender::default(),
            events: AuditEvents::default(),
            node,
            pool,
            now,
            addresses: ConnectionAddresses::default(),
            local: local.clone(),
            waker: Waker::idle(),
            over_rdma: None,
            is_open_discovery: false,
        }
    }

    /// Admits the connection to login. `local` is the address that the initiator connected to;
    /// `None` if it is no IP address. `hang_up` closes the connection when its initiator reinstates
    /// the session.
    #[must_use]
    pub fn admitted(
        mut self,
        permit: LoginPermit,
        local: Option<SocketAddr>,
        hang_up: ConnectionHandle,
    ) -> IscsiTargetSession {
        if let IscsiPhase::Login(login) = &mut self.phase {
            login.admit(permit, hang_up);
        }
        self.addresses.local = local;
        self
    }

    /// Sets the initiator's IP address, which targets and discovery check against their networks.
    /// Without it, the initiator counts as one without an address, which all networks admit.
    #[must_use]
    pub fn with_client(mut self, client: Option<IpAddr>) -> IscsiTargetSession {
        if let IscsiPhase::Login(login) = &mut self.phase {
            login.login.set_client(client);
        }
        self.addresses.client = client;
        self
    }

    /// The core that this connection must move to, if its session lives on another core. The
    /// session has then consumed nothing, and the driver hands over the stream with its unread
    /// bytes.
    #[must_use]
    pub fn moves_to(&self) -> Option<CoreHandle> {
        match &self.phase {
            IscsiPhase::Login(login) => login.moves_to.as_ref().cloned(),
            IscsiPhase::Full(_) | IscsiPhase::Closing => None,
        }
    }

    /// The sender of the current phase.
    #[inline]
    fn sender(&mut self) -> &mut Sender {
        match &mut self.phase {
            IscsiPhase::Full(full) => full.sender(),
            IscsiPhase::Login(_) | IscsiPhase::Closing => &mut self.sender,
        }
    }

    fn protocol(&self) -> &'static str {
        if self.over_rdma.is_some() { "iser" } else { "iscsi" }
    }

    fn login_of(&self, established: &TargetLoginResult) -> Login {
        let target = match &established.session {
            TargetSessionKind::Discovery => DISCOVERY,
            TargetSessionKind::Normal { target, .. } => target.name.as_str(),
        };
        let initiator = established.initiator.as_str().to_owned();
        let (target, is_authenticated) = (target.to_owned(), established.is_authenticated);
        Login { protocol: self.protocol(), initiator, target, is_authenticated }
    }

    /// Passes a login result on; records a failure as an audit event.
    fn with_audit<T>(&mut self, result: Result<T, ProtocolError>) -> Result<T, ProtocolError> {
        if let (Err(error), IscsiPhase::Login(login)) = (&result, &self.phase) {
            let (initiator, target) = login.login.names();
            let login = Login { protocol: self.protocol(), initiator, target, is_authenticated: false };
            self.events.push(AuditEvent::refused_by(error, login));
        }
        result
    }

    fn enter_full_feature(&mut self, established: TargetLoginResult) {
        let joined = match &self.phase {
            IscsiPhase::Login(login) => login.joined(),
            IscsiPhase::Full(_) | IscsiPhase::Closing => None,
        };
        let resources = ConnectionResources {
            node: self.node.clone(),
            addresses: std::mem::take(&mut self.addresses),
            local: self.local.clone(),
            pool: self.pool.clone(),
            waker: self.waker.clone(),
            sender: std::mem::take(&mut self.sender),
        };
        self.events.push(AuditEvent::Login(self.login_of(&established)));
        let is_discovery = matches!(established.session, TargetSessionKind::Discovery);
        self.is_open_discovery = is_discovery && !established.is_authenticated;
        let is_solicited_only =
            established.parameters.is_on(OperationalKey::TaggedBufferForSolicitedDataOnly);
        let mut full = match joined {
            Some(shared) => FullFeatureConnection::join(resources, &shared, established, self.now),
            None => FullFeatureConnection::lead(resources, established, self.now),
        };
        if let Some(peer) = self.over_rdma {
            full.set_mover(TargetDatamover::new(peer, is_solicited_only));
        }
        self.phase = IscsiPhase::Full(Box::new(full));
    }
}

impl Timed for IscsiTargetSession {
    fn poll_timeout(&self) -> Option<Instant> {
        match &self.phase {
            IscsiPhase::Login(login) => Some(login.deadline()),
            IscsiPhase::Full(full) => full.connection.poll_timeout(),
            IscsiPhase::Closing => None,
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.now = now;
        match &mut self.phase {
            IscsiPhase::Login(login) => {
                let result = login.on_timeout(now, &mut self.sender);
                if let Some(established) = self.with_audit(result)? {
                    self.enter_full_feature(*established);
                }
                Ok(())
            }
            IscsiPhase::Full(full) => full.turn_at(now, |turn| turn.on_timeout(now)),
            IscsiPhase::Closing => Ok(()),
        }
    }
}

impl StreamSession for IscsiTargetSession {
    fn demand(&self) -> Demand {
        match &self.phase {
            IscsiPhase::Login(login) => login.demand(),
            IscsiPhase::Full(full) => full.connection.demand(),
            IscsiPhase::Closing => Demand::Close,
        }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        self.now = now;
        let mut taken = 0;
        if let IscsiPhase::Login(login) = &mut self.phase {
            let established;
            let result = login.on_bytes(input.unread(), now, &mut self.sender);
            (taken, established) = self.with_audit(result)?;
            if let Some(established) = established {
                self.enter_full_feature(*established);
            }
        }
        match &mut self.phase {
            IscsiPhase::Full(full) => full.turn_at(now, |turn| turn.on_bytes(input, taken)),
            IscsiPhase::Login(_) | IscsiPhase::Closing => Ok(taken),
        }
    }

    fn on_placed(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if let IscsiPhase::Full(full) = &mut self.phase {
            full.turn_at(now, |turn| {
                turn.on_placed();
                turn.deliver_early();
            });
        }
        Ok(())
    }

    fn on_end(&mut self, now: Instant) -> Result<(), ProtocolError> {
        match &mut self.phase {
            IscsiPhase::Full(full) => {
                full.set_now(now);
                full.on_end()
            }
            IscsiPhase::Login(_) | IscsiPhase::Closing => {
                self.phase = IscsiPhase::Closing;
                Ok(())
            }
        }
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        self.sender().outbox()
    }
}

impl IoSource for IscsiTargetSession {
    fn depth(&self) -> u32 {
        full::WINDOW.saturating_add(full::MAX_IMMEDIATE as u32)
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        match &mut self.phase {
            IscsiPhase::Full(full) => full.connection.queue.poll_io(),
            IscsiPhase::Login(_) | IscsiPhase::Closing => None,
        }
    }

    #[inline]
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        match &mut self.phase {
            IscsiPhase::Full(full) => full.connection.queue.poll_cancel(),
            IscsiPhase::Login(_) | IscsiPhase::Closing => None,
        }
    }

    #[inline]
    fn on_io(&mut self, done: Completion, now: Instant) {
        if let IscsiPhase::Full(full) = &mut self.phase {
            full.turn_at(now, |turn| turn.on_io(done));
        }
    }

    fn charge(&mut self, io: &Io) -> Charge {
        match &mut self.phase {
            IscsiPhase::Full(full) => full.shared.borrow_mut().tasks.charge(io),
            IscsiPhase::Login(_) | IscsiPhase::Closing => Charge { cost: None, station: None },
        }
    }

    #[inline]
    fn begin(&mut self, volume: VolumeId, io: &Io, is_late: bool) -> Result<(), NotAdmitted<IoError>> {
        match &mut self.phase {
            IscsiPhase::Full(full) => full.turn(|turn| turn.begin(volume, io, is_late)),
            IscsiPhase::Login(_) | IscsiPhase::Closing => Err(NotAdmitted::Denied(IoError::Aborted)),
        }
    }
}

impl TargetLifecycle for IscsiTargetSession {
    type Source = Self;

    #[inline]
    fn source(&mut self) -> &mut Self {
        self
    }

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        self.events.pop().or_else(|| match &mut self.phase {
            IscsiPhase::Full(full) => full.connection.events.pop(),
            IscsiPhase::Login(_) | IscsiPhase::Closing => None,
        })
    }

    fn on_start(&mut self, waker: &Waker, _now: Instant) {
        self.waker = waker.clone();
    }

    #[inline]
    fn on_turn(&mut self, now: Instant) {
        if let IscsiPhase::Full(full) = &mut self.phase {
            full.turn_at(now, |turn| turn.on_turn());
        }
    }

    #[inline]
    fn stage(&self) -> SessionStage {
        match &self.phase {
            IscsiPhase::Full(full) if full.lingers() => SessionStage::Lingering,
            IscsiPhase::Full(_) if self.is_open_discovery => SessionStage::Discovery,
            IscsiPhase::Full(_) => SessionStage::Established,
            IscsiPhase::Login(_) | IscsiPhase::Closing => SessionStage::Handshake,
        }
    }

    fn owed(&self) -> Option<u64> {
        match &self.phase {
            IscsiPhase::Full(full) => full.shared.borrow().tasks.owed(full.connection.key),
            IscsiPhase::Login(_) | IscsiPhase::Closing => None,
        }
    }

    fn on_stop(&mut self, now: Instant) {
        match &mut self.phase {
            IscsiPhase::Login(login) => {
                login.on_stop(&mut self.sender);
                self.phase = IscsiPhase::Closing;
            }
            IscsiPhase::Full(full) => full.turn_at(now, |turn| turn.on_stop()),
            IscsiPhase::Closing => {}
        }
    }
}

/// Target name of a discovery session in audit events.
const DISCOVERY: &str = "discovery";
