//! What a portal has for a connection: an iSCSI session over TCP, or over RDMA. The first bytes tell.
//!
//! Over iWARP a connection begins with an MPA request, whose key is text (RFC 5044 §7.1); over TCP alone with a Login
//! request. So one port serves both. Whatever is no MPA request is for the session over TCP to judge.

use crate::target::Relocation;
use blockmux_proto::event::AuditEvent;
use blockmux_proto::exports::VolumeId;
use blockmux_proto::iscsi::server::{IserTargetSession, TargetSession};
use blockmux_proto::outbox::Outbox;
use blockmux_proto::rdma::{Endpoint, RdmaSession};
use blockmux_proto::session::{Demand, ProtocolError, SessionStage, StreamSession, Target, Timed};
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::Iwarp;
use blockmux_volume::{Chunk, Completion, Io, Tag, Waker};
use std::time::Instant;

/// A connection to a portal, over TCP or over RDMA.
#[expect(clippy::large_enum_variant, reason = "a session spends its life in the largest one")]
pub(super) enum PortalSession {
    /// Nothing has come yet.
    Looking(Box<Looking>),
    Tcp(TargetSession),
    Rdma(Box<OverRdma>),
}

pub(super) struct Looking {
    /// Of a session that is to be; `None` only while it becomes one.
    next: Option<(TargetSession, Connect)>,
    waker: Waker,
    /// Nothing is said before the peer has.
    outbox: Outbox,
    depth: u32,
    /// Bytes that were sent on another core.
    sent: u64,
}

/// A connection over RDMA.
///
/// That of a session on another core goes there. A queue pair is no thing that can be handed over; but until the first
/// login request all that it has done follows from what has come. So that is shown to another one there, which says the
/// same once more, to nobody.
pub(super) struct OverRdma {
    driven: Driven<Iwarp, IserTargetSession>,
    /// What has come; `None` once it is known that the connection stays.
    begun: Option<Vec<u8>>,
    /// Of what is said, so much was sent on another core.
    unsaid: usize,
}

impl OverRdma {
    fn on_bytes(&mut self, input: &Chunk) -> Result<usize, ProtocolError> {
        let taken = self.driven.on_bytes(input);
        if let Some(begun) = &mut self.begun {
            let took = taken.as_ref().map_or(0, |taken| *taken);
            begun.extend_from_slice(&input.unread()[..took]);
            if self.driven.stage() != SessionStage::Handshake || begun.len() > LONGEST_BEGIN {
                self.begun = None;
            }
        }
        taken
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        let outbox = self.driven.outbox();
        if self.unsaid > 0 {
            let said = outbox.len().min(self.unsaid);
            outbox.consume(said);
            self.unsaid -= said;
        }
        outbox
    }
}

/// Makes the queue pair of a connection.
pub(super) type Connect = Box<dyn FnOnce(&Endpoint) -> Iwarp>;

impl PortalSession {
    /// A connection that `session` serves if it is over TCP, and a queue pair by `connect` with it if over RDMA; of what
    /// that one says, `sent` bytes were sent on another core.
    pub(super) fn new(session: TargetSession, connect: Connect, sent: u64) -> PortalSession {
        let depth = session.depth();
        let next = Some((session, connect));
        let looking = Looking { next, waker: Waker::idle(), outbox: Outbox::default(), depth, sent };
        PortalSession::Looking(Box::new(looking))
    }

    /// The core that the connection belongs on, if it is not this one, and what its session there is to repeat.
    pub(super) fn moves_to(&mut self) -> Option<Relocation> {
        match self {
            PortalSession::Looking(_) => None,
            PortalSession::Tcp(session) => {
                Some(Relocation { home: session.moves_to()?, replayed: Vec::new(), sent: 0 })
            }
            PortalSession::Rdma(session) => {
                let home = session.driven.session().moves_to()?;
                let replayed = session.begun.take().unwrap_or_default();
                Some(Relocation { home, replayed, sent: session.driven.queue_pair().sent() })
            }
        }
    }

    /// Becomes what a connection is that begins like this.
    #[cold]
    fn decide(&mut self, begin: &[u8]) {
        let PortalSession::Looking(looking) = self else { return };
        let Some((session, connect)) = looking.next.take() else { return };
        let (waker, sent) = (looking.waker.clone(), looking.sent);
        *self = if begin.starts_with(MPA_REQUEST) {
            let session = IserTargetSession::new(session);
            let queue_pair = connect(&session.endpoint());
            let driven = Driven::new(session, queue_pair);
            // It is the answer to the first few hundred bytes.
            PortalSession::Rdma(Box::new(OverRdma { driven, begun: Some(Vec::new()), unsaid: sent as usize }))
        } else {
            PortalSession::Tcp(session)
        };
        self.on_start(&waker);
    }
}

impl Looking {
    fn session(&mut self) -> Option<&mut TargetSession> {
        self.next.as_mut().map(|(session, _)| session)
    }
}

impl Timed for PortalSession {
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        match self {
            PortalSession::Looking(looking) => looking.next.as_ref()?.0.poll_timeout(),
            PortalSession::Tcp(session) => session.poll_timeout(),
            PortalSession::Rdma(session) => session.driven.poll_timeout(),
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        match self {
            PortalSession::Looking(looking) => {
                looking.session().map_or(Ok(()), |session| session.on_timeout(now))
            }
            PortalSession::Tcp(session) => session.on_timeout(now),
            PortalSession::Rdma(session) => session.driven.on_timeout(now),
        }
    }
}

impl StreamSession for PortalSession {
    #[inline]
    fn demand(&self) -> Demand {
        match self {
            PortalSession::Looking(looking) => match &looking.next {
                // The session may have ended before anything came.
                Some((session, _)) if !matches!(session.demand(), Demand::Close) => {
                    Demand::Bytes(MPA_REQUEST.len())
                }
                _ => Demand::Close,
            },
            PortalSession::Tcp(session) => session.demand(),
            PortalSession::Rdma(session) => session.driven.demand(),
        }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk) -> Result<usize, ProtocolError> {
        match self {
            PortalSession::Looking(_) => {
                self.decide(input.unread());
                Ok(0)
            }
            PortalSession::Tcp(session) => session.on_bytes(input),
            PortalSession::Rdma(session) => session.on_bytes(input),
        }
    }

    #[inline]
    fn on_placed(&mut self) -> Result<(), ProtocolError> {
        match self {
            PortalSession::Looking(_) => Ok(()),
            PortalSession::Tcp(session) => session.on_placed(),
            PortalSession::Rdma(session) => session.driven.on_placed(),
        }
    }

    #[inline]
    fn is_mostly_placed(&self) -> bool {
        match self {
            PortalSession::Looking(_) => false,
            PortalSession::Tcp(session) => session.is_mostly_placed(),
            PortalSession::Rdma(session) => session.driven.is_mostly_placed(),
        }
    }

    fn on_end(&mut self) -> Result<(), ProtocolError> {
        match self {
            PortalSession::Looking(looking) => looking.session().map_or(Ok(()), StreamSession::on_end),
            PortalSession::Tcp(session) => session.on_end(),
            PortalSession::Rdma(session) => session.driven.on_end(),
        }
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        match self {
            PortalSession::Looking(looking) => &mut looking.outbox,
            PortalSession::Tcp(session) => session.outbox(),
            PortalSession::Rdma(session) => session.outbox(),
        }
    }
}

impl Target for PortalSession {
    #[inline]
    fn depth(&self) -> u32 {
        match self {
            PortalSession::Looking(looking) => looking.depth,
            PortalSession::Tcp(session) => session.depth(),
            PortalSession::Rdma(session) => session.driven.depth(),
        }
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        match self {
            PortalSession::Looking(_) => None,
            PortalSession::Tcp(session) => session.poll_io(),
            PortalSession::Rdma(session) => session.driven.poll_io(),
        }
    }

    #[inline]
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        match self {
            PortalSession::Looking(_) => None,
            PortalSession::Tcp(session) => session.poll_cancel(),
            PortalSession::Rdma(session) => session.driven.poll_cancel(),
        }
    }

    #[inline]
    fn on_io(&mut self, done: Completion) {
        match self {
            PortalSession::Looking(_) => {}
            PortalSession::Tcp(session) => session.on_io(done),
            PortalSession::Rdma(session) => session.driven.on_io(done),
        }
    }

    fn on_start(&mut self, waker: &Waker) {
        match self {
            PortalSession::Looking(looking) => looking.waker = waker.clone(),
            PortalSession::Tcp(session) => session.on_start(waker),
            PortalSession::Rdma(session) => session.driven.on_start(waker),
        }
    }

    #[inline]
    fn on_turn(&mut self) {
        match self {
            PortalSession::Looking(_) => {}
            PortalSession::Tcp(session) => session.on_turn(),
            PortalSession::Rdma(session) => session.driven.on_turn(),
        }
    }

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        match self {
            PortalSession::Looking(_) => None,
            PortalSession::Tcp(session) => session.poll_event(),
            PortalSession::Rdma(session) => session.driven.poll_event(),
        }
    }

    fn owed(&self) -> Option<u64> {
        match self {
            PortalSession::Looking(_) => None,
            PortalSession::Tcp(session) => session.owed(),
            PortalSession::Rdma(session) => session.driven.owed(),
        }
    }

    #[inline]
    fn stage(&self) -> SessionStage {
        match self {
            PortalSession::Looking(_) => SessionStage::Handshake,
            PortalSession::Tcp(session) => session.stage(),
            PortalSession::Rdma(session) => session.driven.stage(),
        }
    }

    fn on_stop(&mut self) {
        match self {
            PortalSession::Looking(looking) => looking.session().into_iter().for_each(Target::on_stop),
            PortalSession::Tcp(session) => session.on_stop(),
            PortalSession::Rdma(session) => session.driven.on_stop(),
        }
    }
}

/// In bytes, more than any set-up and first login request take, in the shortest frames: 8 KiB of text in frames with room
/// for 108 bytes.
const LONGEST_BEGIN: usize = 16 << 10;

/// The key of an MPA request (RFC 5044 §7.1.1).
const MPA_REQUEST: &[u8] = b"MPA ID Req Frame";
