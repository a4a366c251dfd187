//! A port that serves one protocol over TCP and over RDMA, detected by a connection's first bytes.
//!
//! An iWARP connection begins with an MPA request, whose key is text (RFC 5044 §7.1). Anything else
//! is passed to the session over TCP.

use crate::serve::moves::Relocation;
use blockmux_proto::driver::audit_event::AuditEvent;
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{CoreHandle, Demand, ProtocolError, SecuredBy, StreamSession, Timed};
use blockmux_proto::driver::target::{Charge, IoSource, SessionStage, TargetLifecycle};
use blockmux_proto::exports::VolumeId;
use blockmux_proto::rdma::RdmaSession;
use blockmux_proto::volume_state::NotAdmitted;
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{Iwarp, KEY_REQUEST};
use blockmux_volume::{Chunk, Completion, Io, IoError, Tag, Waker};
use std::time::Instant;

/// A connection to a port: a session `S` over TCP, or `R` over RDMA.
pub(crate) enum PortSession<S, R> {
    /// No bytes were received yet.
    Detecting(Box<Detecting<S, R>>),
    Tcp(S),
    Rdma(Box<Driven<Iwarp, R>>, Replay),
}

pub(crate) struct Detecting<S, R> {
    /// How to make the session; `None` only during the transition.
    next: Option<(S, Accept<S, R>)>,
    waker: Waker,
    /// Empty: the peer sends first.
    outbox: Outbox,
    depth: u32,
    /// The connection uses TLS, so it is not RDMA.
    is_secured: bool,
    /// Reply bytes that were sent on another core.
    sent: u64,
}

/// Makes the session over RDMA, with its queue pair.
pub(crate) type Accept<S, R> = Box<dyn FnOnce(S) -> Driven<Iwarp, R>>;

/// Moves an RDMA connection to its session's core.
///
/// A queue pair cannot be handed over. But until the session is established, all its output follows
/// from its input. So the input is replayed to a new queue pair there, and output already sent is
/// dropped.
pub(crate) struct Replay {
    /// The input so far; `None` once the connection is known to stay.
    input: Option<Vec<u8>>,
    /// Output bytes that another core has sent.
    already_sent: usize,
}

impl Replay {
    fn record(&mut self, received: &[u8], stage: SessionStage) {
        let Some(input) = &mut self.input else { return };
        input.extend_from_slice(received);
        if stage != SessionStage::Handshake || input.len() > MAX_REPLAYED {
            self.input = None;
        }
    }

    #[inline]
    fn skip_sent(&mut self, outbox: &mut Outbox) {
        if self.already_sent > 0 {
            let skipped = outbox.len().min(self.already_sent);
            outbox.consume(skipped);
            self.already_sent -= skipped;
        }
    }
}

impl<S: StreamSession + IoSource + TargetLifecycle, R: RdmaSession + IoSource + TargetLifecycle>
    PortSession<S, R>
{
    /// A connection that `session` serves if it is TCP. If it is RDMA, `accept` makes the session
    /// that serves it, and another core has already sent the first `sent` bytes of that session's
    /// output.
    pub(crate) fn new(session: S, accept: Accept<S, R>, sent: u64) -> PortSession<S, R> {
        let depth = session.depth();
        let next = Some((session, accept));
        let detecting = Detecting {
            next,
            waker: Waker::idle(),
            outbox: Outbox::default(),
            depth,
            is_secured: false,
            sent,
        };
        PortSession::Detecting(Box::new(detecting))
    }

    /// The core that the session belongs to, if not this one, with the bytes to replay there.
    pub(crate) fn moves_to(
        &mut self,
        of_tcp: impl FnOnce(&S) -> Option<CoreHandle>,
        of_rdma: impl FnOnce(&R) -> Option<CoreHandle>,
    ) -> Option<Relocation> {
        match self {
            PortSession::Detecting(_) => None,
            PortSession::Tcp(session) => {
                Some(Relocation { owner_core: of_tcp(session)?, replayed: Vec::new(), sent: 0 })
            }
            PortSession::Rdma(driven, replay) => {
                let home = of_rdma(driven.session())?;
                let replayed = replay.input.take().unwrap_or_default();
                Some(Relocation { owner_core: home, replayed, sent: driven.queue_pair().sent() })
            }
        }
    }

    /// Chooses the session by the first bytes.
    #[cold]
    fn decide(&mut self, begin: &[u8], now: Instant) {
        let PortSession::Detecting(detecting) = self else { return };
        let Some((session, accept)) = detecting.next.take() else { return };
        let (waker, sent) = (detecting.waker.clone(), detecting.sent);
        *self = if begin.starts_with(&KEY_REQUEST) && !detecting.is_secured {
            // Another core has sent at most the few hundred bytes of the connection setup.
            let replay = Replay { input: Some(Vec::new()), already_sent: sent as usize };
            PortSession::Rdma(Box::new(accept(session)), replay)
        } else {
            PortSession::Tcp(session)
        };
        self.on_start(&waker, now);
    }
}

impl<S, R> Detecting<S, R> {
    fn session(&mut self) -> Option<&mut S> {
        self.next.as_mut().map(|(session, _)| session)
    }
}

/// Calls the session over TCP or RDMA. The last expression is the result while the transport is not
/// detected.
macro_rules! delegate {
    ($port:expr, $session:ident => $call:expr, $detecting:pat => $meanwhile:expr) => {
        match $port {
            PortSession::Detecting($detecting) => $meanwhile,
            PortSession::Tcp($session) => $call,
            PortSession::Rdma($session, _) => $call,
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
            PortSession::Rdma(driven, _) => {
                let $source = driven.session_mut();
                $call
            }
        }
    };
}

impl<S: StreamSession + IoSource + TargetLifecycle, R: RdmaSession + IoSource + TargetLifecycle> Timed
    for PortSession<S, R>
{
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        delegate!(self, session => session.poll_timeout(), detecting => detecting.next.as_ref()?.0.poll_timeout())
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        delegate!(self, session => session.on_timeout(now), detecting => {
            detecting.session().map_or(Ok(()), |session| session.on_timeout(now))
        })
    }
}

impl<S: StreamSession + IoSource + TargetLifecycle, R: RdmaSession + IoSource + TargetLifecycle> StreamSession
    for PortSession<S, R>
{
    #[inline]
    fn demand(&self) -> Demand {
        delegate!(self, session => session.demand(), detecting => match &detecting.next {
            // The session may have ended before any input.
            Some((session, _)) if !matches!(session.demand(), Demand::Close) => {
                Demand::Bytes(KEY_REQUEST.len())
            }
            _ => Demand::Close,
        })
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
        match self {
            PortSession::Detecting(_) => {
                self.decide(input.unread(), now);
                Ok(0)
            }
            PortSession::Tcp(session) => session.on_bytes(input, now),
            PortSession::Rdma(driven, replay) => {
                let parsed = driven.on_bytes(input, now);
                if replay.input.is_some() {
                    let len = parsed.as_ref().map_or(0, |parsed| *parsed);
                    replay.record(&input.unread()[..len], driven.stage());
                }
                parsed
            }
        }
    }

    fn on_secured(&mut self, by: SecuredBy<'_>, now: Instant) -> Result<(), ProtocolError> {
        delegate!(self, session => session.on_secured(by, now), detecting => {
            detecting.is_secured = true;
            detecting.session().map_or(Ok(()), |session| session.on_secured(by, now))
        })
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
        delegate!(self, session => session.on_end(now), detecting => {
            detecting.session().map_or(Ok(()), |session| session.on_end(now))
        })
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        match self {
            PortSession::Detecting(detecting) => &mut detecting.outbox,
            PortSession::Tcp(session) => session.outbox(),
            PortSession::Rdma(driven, replay) => {
                let outbox = driven.outbox();
                replay.skip_sent(outbox);
                outbox
            }
        }
    }
}

impl<S: StreamSession + IoSource + TargetLifecycle, R: RdmaSession + IoSource + TargetLifecycle> IoSource
    for PortSession<S, R>
{
    #[inline]
    fn depth(&self) -> u32 {
        match self {
            PortSession::Detecting(detecting) => detecting.depth,
            PortSession::Tcp(session) => session.depth(),
            PortSession::Rdma(driven, _) => driven.session().depth(),
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

impl<S: StreamSession + IoSource + TargetLifecycle, R: RdmaSession + IoSource + TargetLifecycle>
    TargetLifecycle for PortSession<S, R>
{
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
        delegate!(self, session => session.on_stop(now), detecting => {
            detecting.session().into_iter().for_each(|session| session.on_stop(now));
        })
    }
}

/// Maximum number of replayed bytes: more than any connection setup and first login request needs,
/// even in the shortest frames (8 KiB of text in frames with room for 108 bytes).
const MAX_REPLAYED: usize = 16 << 10;
