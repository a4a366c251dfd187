//! A port that serves one protocol over TCP and over RDMA, detected by a connection's first bytes.
//!
//! A connection that does not begin as the fabric's requests do is passed to the session over TCP.

use super::{FabricOfTcpPorts, OverFabric, REQUEST_LEN, Setup, accept, is_request};
use blockmux_proto::driver::audit_event::AuditEvent;
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{Demand, ProtocolError, SecuredBy, StreamSession, Timed};
use blockmux_proto::driver::target::{Charge, IoSource, SessionStage, TargetLifecycle};
use blockmux_proto::exports::VolumeId;
use blockmux_proto::rdma::RdmaSession;
use blockmux_proto::volume_state::NotAdmitted;
use blockmux_volume::{Chunk, Completion, Io, IoError, Tag, Waker};
use std::time::{Duration, Instant};

/// A connection to a port.
pub(crate) enum PortSession<F: SessionFactory> {
    /// No bytes were received yet.
    Detecting(Box<Detecting<F>>),
    Tcp(F::Tcp),
    Rdma(Box<OverFabric<F::Rdma>>),
}

/// Makes the session of one connection when its transport is known.
pub(crate) trait SessionFactory {
    /// The session over TCP.
    type Tcp: StreamSession + IoSource + TargetLifecycle;
    /// The session over RDMA.
    type Rdma: RdmaSession + IoSource + TargetLifecycle;

    /// Makes the session over TCP.
    fn over_tcp(self) -> Self::Tcp;

    /// Makes the session over RDMA; also returns what its queue pair gets.
    fn over_rdma(self) -> (Self::Rdma, Setup);
}

pub(crate) struct Detecting<F> {
    /// `None` only during the transition.
    factory: Option<F>,
    waker: Waker,
    /// Empty: the peer sends first.
    outbox: Outbox,
    deadline: Instant,
}

impl<F: SessionFactory> PortSession<F> {
    /// A connection accepted at `now`.
    pub(crate) fn new(factory: F, now: Instant) -> PortSession<F> {
        let (waker, outbox) = (Waker::idle(), Outbox::default());
        let deadline = now + FIRST_BYTES_TIMEOUT;
        PortSession::Detecting(Box::new(Detecting { factory: Some(factory), waker, outbox, deadline }))
    }

    /// The session, if the connection is known to be TCP.
    pub(crate) fn tcp(&self) -> Option<&F::Tcp> {
        match self {
            PortSession::Tcp(session) => Some(session),
            PortSession::Detecting(_) | PortSession::Rdma(_) => None,
        }
    }

    /// Makes the session if there is none: over RDMA if the first bytes are a request of the
    /// fabric. The one over TCP also handles TLS, and a connection that ends before any bytes.
    #[cold]
    fn make_session(&mut self, first_bytes: &[u8], now: Instant) {
        let PortSession::Detecting(detecting) = self else { return };
        let Some(factory) = detecting.factory.take() else { return };
        let waker = detecting.waker.clone();
        *self = if is_request(first_bytes) {
            let (session, setup) = factory.over_rdma();
            PortSession::Rdma(Box::new(accept::<FabricOfTcpPorts, _>(session, setup)))
        } else {
            PortSession::Tcp(factory.over_tcp())
        };
        self.on_start(&waker, now);
    }
}

/// Calls the session over TCP or RDMA. The last expression is the result while the transport is not
/// detected.
macro_rules! delegate {
    ($port:expr, $session:ident => $call:expr, $detecting:pat => $meanwhile:expr) => {
        match $port {
            PortSession::Detecting($detecting) => $meanwhile,
            PortSession::Tcp($session) => $call,
            PortSession::Rdma($session) => $call,
        }
    };
}

/// Calls the source of the session over TCP or RDMA. The last expression is the result while the
/// transport is not detected.
macro_rules! source {
    ($port:expr, $source:ident => $call:expr, $meanwhile:expr) => {
        match $port {
            PortSession::Detecting(_) => $meanwhile,
            PortSession::Tcp($source) => $call,
            PortSession::Rdma(driven) => {
                let $source = driven.session_mut();
                $call
            }
        }
    };
}

impl<F: SessionFactory> Timed for PortSession<F> {
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        delegate!(self, session => session.poll_timeout(), detecting => Some(detecting.deadline))
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.make_session(&[], now);
        delegate!(self, session => session.on_timeout(now), _ => Ok(()))
    }
}

impl<F: SessionFactory> StreamSession for PortSession<F> {
    #[inline]
    fn demand(&self) -> Demand {
        delegate!(self, session => session.demand(), _ => Demand::Bytes(REQUEST_LEN))
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        delegate!(self, session => session.on_bytes(input, now), _ => {
            self.make_session(input.unread(), now);
            Ok(0)
        })
    }

    fn on_secured(&mut self, by: SecuredBy<'_>, now: Instant) -> Result<(), ProtocolError> {
        self.make_session(&[], now);
        delegate!(self, session => session.on_secured(by, now), _ => Ok(()))
    }

    #[inline]
    fn on_placed(&mut self, now: Instant) -> Result<(), ProtocolError> {
        delegate!(self, session => session.on_placed(now), _ => Ok(()))
    }

    #[inline]
    fn is_mostly_placed(&self) -> bool {
        delegate!(self, session => session.is_mostly_placed(), _ => false)
    }

    fn on_end(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.make_session(&[], now);
        delegate!(self, session => session.on_end(now), _ => Ok(()))
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        delegate!(self, session => session.outbox(), detecting => &mut detecting.outbox)
    }
}

impl<F: SessionFactory> IoSource for PortSession<F> {
    #[inline]
    fn depth(&self) -> u32 {
        match self {
            PortSession::Detecting(_) => 0,
            PortSession::Tcp(session) => session.depth(),
            PortSession::Rdma(driven) => driven.session().depth(),
        }
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        source!(self, session => session.poll_io(), None)
    }

    #[inline]
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        source!(self, session => session.poll_cancel(), None)
    }

    #[inline]
    fn on_io(&mut self, done: Completion, now: Instant) {
        source!(self, session => session.on_io(done, now), {})
    }

    fn charge(&mut self, io: &Io) -> Charge {
        let none = Charge { cost: None, station: None };
        source!(self, session => session.charge(io), none)
    }

    #[inline]
    fn begin(&mut self, volume: VolumeId, io: &Io, is_late: bool) -> Result<(), NotAdmitted<IoError>> {
        let none = Err(NotAdmitted::Denied(IoError::Aborted));
        source!(self, session => session.begin(volume, io, is_late), none)
    }
}

impl<F: SessionFactory> TargetLifecycle for PortSession<F> {
    type Source = Self;

    #[inline]
    fn source(&mut self) -> &mut Self {
        self
    }

    fn protocol(&self) -> Option<&'static str> {
        delegate!(self, session => session.protocol(), _ => None)
    }

    fn on_start(&mut self, waker: &Waker, now: Instant) {
        delegate!(self, session => session.on_start(waker, now), detecting => detecting.waker = waker.clone())
    }

    #[inline]
    fn on_turn(&mut self, now: Instant) {
        delegate!(self, session => session.on_turn(now), _ => {})
    }

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        delegate!(self, session => session.poll_event(), _ => None)
    }

    fn owed(&self) -> Option<u64> {
        delegate!(self, session => session.owed(), _ => None)
    }

    #[inline]
    fn stage(&self) -> SessionStage {
        delegate!(self, session => session.stage(), _ => SessionStage::Handshake)
    }

    fn on_stop(&mut self, now: Instant) {
        self.make_session(&[], now);
        delegate!(self, session => session.on_stop(now), _ => {});
    }
}

/// Time limit for the first bytes; sessions limit the login in the same way.
const FIRST_BYTES_TIMEOUT: Duration = Duration::from_secs(30);
