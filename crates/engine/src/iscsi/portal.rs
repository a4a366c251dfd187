//! What a portal has for a connection: an iSCSI session over TCP, or over RDMA. The first bytes tell.
//!
//! Over iWARP a connection begins with an MPA request, whose key is text (RFC 5044 §7.1); over TCP alone with a Login
//! request. So one port serves both. Whatever is no MPA request is for the session over TCP to judge.

use blockmux_proto::exports::VolumeId;
use blockmux_proto::iscsi::target::{IserTargetSession, TargetSession};
use blockmux_proto::outbox::Outbox;
use blockmux_proto::rdma::Endpoint;
use blockmux_proto::session::{Demand, Home, ProtocolError, StreamSession, Target, Timed};
use blockmux_rdma::{Driven, QueuePair};
use blockmux_volume::{Chunk, Completion, Io, Tag, Waker};
use std::time::Instant;

/// A connection to a portal, over TCP or over RDMA with queue pairs of the kind `Q`.
pub(super) enum PortalSession<Q> {
    /// Nothing has come yet.
    Looking(Box<Looking<Q>>),
    Tcp(TargetSession),
    Rdma(Driven<Q, IserTargetSession>),
}

pub(super) struct Looking<Q> {
    /// Of a session that is to be; `None` only while it becomes one.
    next: Option<(TargetSession, Connect<Q>)>,
    waker: Waker,
    /// Nothing is said before the peer has.
    outbox: Outbox,
    depth: u32,
}

/// Makes the queue pair of a connection.
pub(super) type Connect<Q> = Box<dyn FnOnce(&Endpoint) -> Q>;

impl<Q: QueuePair + StreamSession> PortalSession<Q> {
    /// A connection that `session` serves if it is over TCP, and a queue pair by `connect` with it if over RDMA.
    pub(super) fn new(session: TargetSession, connect: Connect<Q>) -> PortalSession<Q> {
        let depth = session.depth();
        let next = Some((session, connect));
        let looking = Looking { next, waker: Waker::idle(), outbox: Outbox::default(), depth };
        PortalSession::Looking(Box::new(looking))
    }

    /// Becomes what a connection is that begins like this.
    #[cold]
    fn decide(&mut self, begin: &[u8]) {
        let PortalSession::Looking(looking) = self else { return };
        let Some((session, connect)) = looking.next.take() else { return };
        let waker = looking.waker.clone();
        *self = if begin.starts_with(MPA_REQUEST) {
            PortalSession::Rdma(Driven::new(IserTargetSession::new(session), connect))
        } else {
            PortalSession::Tcp(session)
        };
        self.on_start(&waker);
    }
}

impl<Q> Looking<Q> {
    fn session(&mut self) -> Option<&mut TargetSession> {
        self.next.as_mut().map(|(session, _)| session)
    }
}

impl<Q: QueuePair> Timed for PortalSession<Q> {
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        match self {
            PortalSession::Looking(looking) => looking.next.as_ref()?.0.poll_timeout(),
            PortalSession::Tcp(session) => session.poll_timeout(),
            PortalSession::Rdma(session) => session.poll_timeout(),
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        match self {
            PortalSession::Looking(looking) => {
                looking.session().map_or(Ok(()), |session| session.on_timeout(now))
            }
            PortalSession::Tcp(session) => session.on_timeout(now),
            PortalSession::Rdma(session) => session.on_timeout(now),
        }
    }
}

impl<Q: QueuePair + StreamSession> StreamSession for PortalSession<Q> {
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
            PortalSession::Rdma(session) => session.demand(),
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
            PortalSession::Rdma(session) => session.on_placed(),
        }
    }

    fn on_end(&mut self) -> Result<(), ProtocolError> {
        match self {
            PortalSession::Looking(looking) => looking.session().map_or(Ok(()), StreamSession::on_end),
            PortalSession::Tcp(session) => session.on_end(),
            PortalSession::Rdma(session) => session.on_end(),
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

impl<Q: QueuePair> Target for PortalSession<Q> {
    #[inline]
    fn depth(&self) -> u32 {
        match self {
            PortalSession::Looking(looking) => looking.depth,
            PortalSession::Tcp(session) => session.depth(),
            PortalSession::Rdma(session) => session.depth(),
        }
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        match self {
            PortalSession::Looking(_) => None,
            PortalSession::Tcp(session) => session.poll_io(),
            PortalSession::Rdma(session) => session.poll_io(),
        }
    }

    #[inline]
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        match self {
            PortalSession::Looking(_) => None,
            PortalSession::Tcp(session) => session.poll_cancel(),
            PortalSession::Rdma(session) => session.poll_cancel(),
        }
    }

    #[inline]
    fn on_io(&mut self, done: Completion) {
        match self {
            PortalSession::Looking(_) => {}
            PortalSession::Tcp(session) => session.on_io(done),
            PortalSession::Rdma(session) => session.on_io(done),
        }
    }

    fn on_start(&mut self, waker: &Waker) {
        match self {
            PortalSession::Looking(looking) => looking.waker = waker.clone(),
            PortalSession::Tcp(session) => session.on_start(waker),
            PortalSession::Rdma(session) => session.on_start(waker),
        }
    }

    #[inline]
    fn on_turn(&mut self) {
        match self {
            PortalSession::Looking(_) => {}
            PortalSession::Tcp(session) => session.on_turn(),
            PortalSession::Rdma(session) => session.on_turn(),
        }
    }

    fn moves_to(&self) -> Option<Home> {
        match self {
            PortalSession::Looking(_) => None,
            PortalSession::Tcp(session) => session.moves_to(),
            PortalSession::Rdma(session) => session.moves_to(),
        }
    }

    fn owed(&self) -> Option<u64> {
        match self {
            PortalSession::Looking(_) => None,
            PortalSession::Tcp(session) => session.owed(),
            PortalSession::Rdma(session) => session.owed(),
        }
    }

    #[inline]
    fn is_established(&self) -> bool {
        match self {
            PortalSession::Looking(_) => false,
            PortalSession::Tcp(session) => session.is_established(),
            PortalSession::Rdma(session) => session.is_established(),
        }
    }

    #[inline]
    fn lingers(&self) -> bool {
        match self {
            PortalSession::Looking(_) => false,
            PortalSession::Tcp(session) => session.lingers(),
            PortalSession::Rdma(session) => session.lingers(),
        }
    }

    fn on_stop(&mut self) {
        match self {
            PortalSession::Looking(looking) => looking.session().into_iter().for_each(Target::on_stop),
            PortalSession::Tcp(session) => session.on_stop(),
            PortalSession::Rdma(session) => session.on_stop(),
        }
    }
}

/// The key of an MPA request (RFC 5044 §7.1.1).
const MPA_REQUEST: &[u8] = b"MPA ID Req Frame";
