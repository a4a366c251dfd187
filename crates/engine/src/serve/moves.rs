//! Connections that continue elsewhere: on the core that their session belongs to, or in the
//! process that takes over from this one.

use crate::carrier::Carrier;
use crate::serve::handover::{HANDSHAKE_TIME, HandedOverConnection, SecuredConnection, SessionHandover};
use crate::serve::listener::Permit;
use crate::serve::served_session::ServedSession;
use blockmux_proto::driver::session::CoreHandle;
use blockmux_proto::driver::target::{SessionStage, TargetLifecycle};
use blockmux_volume::{Core, Waker};
use std::time::Instant;

/// A connection handed to a core.
pub struct ArrivedConnection<T> {
    /// The socket.
    pub stream: T,
    /// Bytes received on another core and not parsed.
    pub unread: Vec<u8>,
    /// The connection's share of the process's connection limit.
    pub permit: Permit,
}

impl<T> ArrivedConnection<T> {
    /// A connection that was just accepted.
    pub fn new(stream: T, permit: Permit) -> ArrivedConnection<T> {
        ArrivedConnection { stream, unread: Vec::new(), permit }
    }
}

/// Where the connection of a session `S` may continue; `T` is what the owner there needs.
pub enum Elsewhere<S: 'static, T: 'static> {
    /// On the core that its session belongs to.
    Core(Box<Relocate<S, T>>),
    /// In the process that takes over from this one.
    Process(&'static ProcessHandover<S, T>),
}

/// How a connection moves to another core, for protocols that need it.
pub struct Relocate<S, T> {
    /// The core that the session belongs to, if not this one. Called until the session is
    /// established.
    pub moves_to: fn(&S) -> Option<CoreHandle>,
    /// Hands the connection over.
    pub hand_over: HandToCore<T>,
}

/// Hands a connection over to a core.
pub type HandToCore<T> = Box<dyn Fn(&CoreHandle, ArrivedConnection<T>)>;

/// How a connection moves to the process that takes over from this one, for sessions whose peers
/// would not reconnect; see [`crate::serve::handover`].
pub struct ProcessHandover<S, T> {
    /// Makes the session accept no further request; returns its state once nothing is in flight.
    pub hand_over: fn(&mut S) -> Option<Vec<u8>>,
    /// Stores the connection for the other process.
    pub store: fn(&SessionHandover, HandedOverConnection<T>),
}

/// The moves of one connection.
pub(crate) struct Moves<S: 'static, T: 'static> {
    elsewhere: Option<Elsewhere<S, T>>,
    process: ProcessState,
}

/// What keeps a connection that moves to processes from moving.
enum ProcessState {
    Nothing,
    /// Its handshake, which is given up then.
    HandshakeUntil(Instant),
    /// It uses TLS.
    Secured {
        _count: SecuredConnection,
    },
}

impl<S: TargetLifecycle + 'static, T: 'static> Moves<S, T> {
    pub(crate) fn new(elsewhere: Option<Elsewhere<S, T>>) -> Moves<S, T> {
        Moves { elsewhere, process: ProcessState::Nothing }
    }

    /// The handshake is complete: the connection stays on its core.
    pub(crate) fn on_established(&mut self, carrier: &impl Carrier<S, Handle = T>, permit: Option<&Permit>) {
        self.elsewhere.take_if(|elsewhere| matches!(elsewhere, Elsewhere::Core(_)));
        if let Some(permit) = permit
            && self.to_process().is_some()
            && carrier.is_secured()
        {
            self.process = ProcessState::Secured { _count: permit.session_handover().count_secured() };
        }
    }

    /// Hands the connection to the core that its session belongs to, if that is another one and the
    /// session is not established; returns whether it did.
    #[inline]
    pub(crate) fn to_owner_core(
        &self,
        session: &S,
        carrier: &mut impl Carrier<S, Handle = T>,
        permit: &mut Option<Permit>,
    ) -> bool {
        let Some(Elsewhere::Core(relocate)) = &self.elsewhere else { return false };
        let Some(owner_core) = (relocate.moves_to)(session) else { return false };
        let Some(permit) = permit.take() else { return false };
        let (stream, unread) = carrier.hand_over();
        (relocate.hand_over)(&owner_core, ArrivedConnection { stream, unread, permit });
        true
    }

    /// Whether the connection should move to another process instead of ending.
    #[cold]
    pub(crate) fn is_due_in_process(
        &mut self,
        session: &S,
        carrier: &impl Carrier<S, Handle = T>,
        permit: Option<&Permit>,
        core: &impl Core,
        waker: &Waker,
    ) -> bool {
        let is_requested = permit.is_some_and(|permit| permit.session_handover().is_requested());
        if self.to_process().is_none() || !is_requested || carrier.is_secured() {
            return false;
        }
        if session.stage() != SessionStage::Handshake {
            return true;
        }
        let now = core.now();
        if let ProcessState::HandshakeUntil(until) = self.process {
            return now < until;
        }
        core.wake_at(now + HANDSHAKE_TIME, waker);
        self.process = ProcessState::HandshakeUntil(now + HANDSHAKE_TIME);
        true
    }

    /// Hands the connection to another process once nothing is in flight; returns whether it did.
    #[cold]
    pub(crate) fn hand_to_process(
        &self,
        served: &mut ServedSession<S>,
        carrier: &mut impl Carrier<S, Handle = T>,
        permit: Option<&Permit>,
    ) -> bool {
        let Some((process, permit)) = self.to_process().zip(permit) else { return false };
        let Some(state) = (process.hand_over)(&mut served.session) else {
            served.channels.lift_limits();
            return false;
        };
        let (stream, unread) = carrier.hand_over();
        let handed_over = HandedOverConnection {
            protocol: permit.protocol(),
            listener: permit.origin().listener.to_string(),
            peer: carrier.peer().to_string(),
            stream,
            unread,
            state,
        };
        (process.store)(permit.session_handover(), handed_over);
        true
    }

    /// How the connection moves to another process.
    fn to_process(&self) -> Option<&ProcessHandover<S, T>> {
        match &self.elsewhere {
            Some(Elsewhere::Process(process)) => Some(process),
            _ => None,
        }
    }
}
