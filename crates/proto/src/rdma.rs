//! The words between a session and a queue pair: iSER, and later SRP and NVMe/RDMA, over any
//! provider.
//!
//! ```text
//!   wire ──▶ queue pair ──Event──▶ RdmaSession::on_event ──▶ Target::poll_io ──▶ channel
//!   wire ◀── queue pair ◀──calls── RdmaSession::work     ◀── Target::on_io  ◀── channel
//! ```
//! A *queue pair* is a reliable connection in the model of the verbs (RFC 5040, InfiniBand):
//! messages arrive whole, once and in order, each in a receive buffer that was posted for it;
//! memory that was registered is read and written by the peer without the session's doing. Software
//! iWARP, RoCEv2 and hardware are providers of it, in the crate `rdma`.
//!
//! The driver's turn: hand in every event, then have the session call the queue pair
//! ([`QueuePair`]); again until neither side has anything. A session thus hears of a registration
//! in the turn in which it asked for it.
//!
//! # Receive buffers
//! There are [`Endpoint::receives`] of them at first, of [`Endpoint::receive_len`] bytes. Each
//! message takes one, and [`QueuePair::receive`] posts more. A message that finds none, or one that
//! is too short, ends the connection: a protocol over queue pairs counts credits so that this does
//! not happen.

pub mod testing;

use crate::session::{Connections, ProtocolError, Timed};
use blockmux_volume::{Seg, SgList};
use smallvec::SmallVec;
use std::time::Instant;

/// The number of a piece of work, chosen by the session; it comes back in [`Event::Done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkId(pub u64);

/// A steering tag (RFC 5040, RFC 5041): the name of registered memory. The verbs' R_Key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stag(pub u32);

/// Memory that one side has opened to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Its name.
    pub stag: Stag,
    /// Where it begins: a tagged offset (RFC 5041), in the verbs a virtual address.
    pub address: u64,
    /// In bytes.
    pub len: u32,
}

/// What the peer may do with registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteRights {
    /// RDMA Read from it.
    RemoteRead,
    /// RDMA Write to it.
    RemoteWrite,
}

/// The head of a message: it is copied, its payload only referred to.
pub type MessageHead = SmallVec<[u8; 128]>;

/// A request that a queue pair keeps until it can carry it out.
///
/// Sends, reads and writes are carried out in the order in which they were posted; a send that
/// follows a write is delivered after the write's data. A read may complete after what was posted
/// behind it.
#[derive(Debug)]
pub enum WorkRequest {
    /// The passive side takes the connection that [`Event::Requested`] was about.
    Accept {
        /// For the peer, at most [`MAX_PRIVATE_DATA`] bytes.
        private_data: Vec<u8>,
    },
    /// The passive side refuses it. The connection is over once the peer has been told.
    Reject {
        /// For the peer, at most [`MAX_PRIVATE_DATA`] bytes.
        private_data: Vec<u8>,
    },
    /// Posts one more receive buffer.
    Receive,
    /// A message.
    Send {
        /// Comes back when the message is on its way and its payload may be used otherwise.
        id: WorkId,
        /// Its beginning.
        head: MessageHead,
        /// What follows it, if anything.
        payload: SgList,
        /// Memory of the peer that is closed as the message arrives.
        invalidate: Option<Stag>,
        /// Whether the peer is to be woken (solicited event).
        is_solicited: bool,
    },
    /// RDMA Read: the peer's memory into ours, of the same length.
    Read {
        /// Comes back when all of it is there.
        id: WorkId,
        /// Where it goes.
        local: SgList,
        /// Where it comes from.
        remote: Remote,
    },
    /// RDMA Write: our memory into the peer's.
    Write {
        /// Comes back when our memory may be used otherwise; that it has arrived is known only from
        /// what follows.
        id: WorkId,
        /// Where it comes from.
        local: SgList,
        /// Where it goes: as many bytes, or more.
        remote: Remote,
    },
    /// Opens memory to the peer. [`Event::Registered`] says under which name.
    Register {
        /// Comes back with the name.
        id: WorkId,
        /// The memory, seen by the peer as one range.
        local: SgList,
        /// What the peer may do.
        access: RemoteRights,
    },
    /// Closes memory to the peer, at once: what the peer does with it later is refused. It need not
    /// be open any more.
    Invalidate {
        /// Its name.
        stag: Stag,
    },
    /// Ends the connection once all that was posted is done.
    Disconnect,
}

/// Why a piece of work has failed. All of these end the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkError {
    /// It is beyond what the queue pair can do, or the lengths do not match.
    #[error("it is not possible on this connection")]
    Local,
    /// The peer does not allow it.
    #[error("the peer does not open that memory")]
    RemoteAccess,
    /// The connection was over first.
    #[error("the connection was over")]
    Flushed,
}

/// What a queue pair tells its session.
#[derive(Debug)]
pub enum Event {
    /// A peer wants to connect; answered by [`QueuePair::accept`] or [`QueuePair::reject`].
    Requested {
        /// From the peer, anything at all.
        private_data: Vec<u8>,
    },
    /// The connection is there.
    Connected {
        /// From the peer that has accepted; empty on the passive side.
        private_data: Vec<u8>,
    },
    /// The peer did not take the connection. It is over.
    Refused {
        /// From the peer, anything at all.
        private_data: Vec<u8>,
    },
    /// A message has come.
    Received {
        /// All of it, in one piece. It may lie in a buffer that many messages share: what is kept
        /// for long is to be copied.
        message: Seg,
        /// Memory of ours that the peer has closed by it; it was open until then.
        invalidated: Option<Stag>,
    },
    /// A piece of work is done, well or not.
    Done {
        /// Which.
        id: WorkId,
        /// How.
        result: Result<(), WorkError>,
    },
    /// Memory has been registered.
    Registered {
        /// By which work.
        id: WorkId,
        /// How the peer reaches it.
        remote: Remote,
    },
    /// The peer has ended the connection, or it is lost; all work is flushed before.
    Disconnected,
}

/// What a session needs of its queue pair, said before the connection is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Receive buffers that are posted at first.
    pub receives: u32,
    /// The length of each in bytes, the longest message that may come.
    pub receive_len: u32,
    /// Sends, reads and writes that may be in flight; a session that is told of [`Event::Done`]
    /// counts for itself.
    pub sends: u32,
    /// RDMA Reads that we would have in flight at a time (ORD), and that we let the peer have
    /// (IRD).
    pub reads: u32,
    /// Registrations that may be open at a time.
    pub regions: u32,
    /// For the peer, on the side that connects: at most [`MAX_PRIVATE_DATA`] bytes.
    pub private_data: Vec<u8>,
}

/// What a session asks of its queue pair.
///
/// Each call takes effect in the order of the calls. [`QueuePair::send`], [`QueuePair::read`] and
/// [`QueuePair::write`] are called only while there is [`QueuePair::room`]: a session keeps what
/// does not fit, and asks in a later turn. By default a call becomes [`WorkRequest`], which the
/// provider takes by `post`; a provider overrides those that it can carry out while it is called,
/// as verbs of hardware do. With I/O of 4 KiB, work and events cost as much as framing does.
pub trait QueuePair {
    /// How many sends, reads and writes it takes now: those that the endpoint allows, without those
    /// that have not come back. None without a connection.
    fn room(&self) -> usize;

    /// Takes work. Sends, reads and writes are posted only while there is room.
    fn post(&mut self, work: WorkRequest);

    /// How many bytes that come back as no event wait to be sent, and hold on to memory meanwhile.
    fn unsent(&self) -> usize {
        0
    }

    /// Takes the connection that [`Event::Requested`] was about; at most [`MAX_PRIVATE_DATA`] bytes
    /// for the peer.
    fn accept(&mut self, private_data: Vec<u8>) {
        self.post(WorkRequest::Accept { private_data });
    }

    /// Refuses it. The connection is over once the peer has been told.
    fn reject(&mut self, private_data: Vec<u8>) {
        self.post(WorkRequest::Reject { private_data });
    }

    /// Posts `count` more receive buffers.
    fn receive(&mut self, count: u32) {
        (0..count).for_each(|_| self.post(WorkRequest::Receive));
    }

    /// Sends a message: `head`, then `payload`, which is held on to until it is sent. It closes the
    /// memory `invalidate` of the peer as it arrives. It may come back as [`Event::Done`] with
    /// [`MESSAGE`].
    fn send(&mut self, head: &[u8], payload: &SgList, invalidate: Option<Stag>) {
        let (head, payload) = (MessageHead::from_slice(head), payload.clone());
        self.post(WorkRequest::Send { id: MESSAGE, head, payload, invalidate, is_solicited: false });
    }

    /// Reads the peer's memory into ours, of the same length. It comes back as [`Event::Done`] when
    /// all of it is there.
    fn read(&mut self, id: WorkId, local: SgList, remote: Remote) {
        self.post(WorkRequest::Read { id, local, remote });
    }

    /// Writes our memory into the peer's. `true`: it comes back as [`Event::Done`] when our memory
    /// may be used otherwise; `false`: it does not, and counts as [`QueuePair::unsent`] until then.
    fn write(&mut self, id: WorkId, local: &SgList, remote: Remote) -> bool {
        self.post(WorkRequest::Write { id, local: local.clone(), remote });
        true
    }

    /// Opens memory to the peer, and takes `local`. Returns its name, or `None` if
    /// [`Event::Registered`] will tell.
    fn register(&mut self, id: WorkId, local: &mut SgList, access: RemoteRights) -> Option<Remote> {
        self.post(WorkRequest::Register { id, local: std::mem::take(local), access });
        None
    }

    /// Closes memory to the peer, before this returns. It need not be open any more.
    fn invalidate(&mut self, stag: Stag) {
        self.post(WorkRequest::Invalidate { stag });
    }

    /// Ends the connection once all that was asked before is done.
    fn disconnect(&mut self) {
        self.post(WorkRequest::Disconnect);
    }
}

/// The number of each message that was sent by [`QueuePair::send`].
pub const MESSAGE: WorkId = WorkId(0);

/// The most private data in bytes that every provider carries (InfiniBand's connection manager has
/// the least room).
pub const MAX_PRIVATE_DATA: usize = 56;

/// A session over a queue pair: iSER, SRP, NVMe/RDMA.
pub trait RdmaSession: Timed {
    /// What it needs. Asking changes nothing.
    fn endpoint(&self) -> Endpoint;

    /// Something has happened.
    ///
    /// # Errors
    /// If the peer broke the protocol: the driver posts what work there is and disconnects.
    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError>;

    /// Asks `queue_pair` for all that is to be done now, as far as it has room. Whether anything
    /// has moved: if so, it is called again.
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool;
}

impl<S: RdmaSession> RdmaSession for &mut S {
    fn endpoint(&self) -> Endpoint {
        (**self).endpoint()
    }

    #[inline]
    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError> {
        (**self).on_event(event, now)
    }

    #[inline]
    fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        (**self).work(queue_pair)
    }
}

/// An initiator's session whose connections are queue pairs.
pub trait RdmaConnections: Connections {
    /// What the first of them needs; of the others [`RdmaSession::endpoint`] tells. Asking changes
    /// nothing.
    fn endpoint(&self) -> Endpoint;

    /// The session of one connection.
    fn connection(&mut self, connection: usize) -> impl RdmaSession;
}
