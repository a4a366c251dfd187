//! The interface between a session (iSER, SRP, NVMe/RDMA) and a queue pair of any provider.
//!
//! ```text
//!   wire ──▶ queue pair ──Event──▶ RdmaSession::on_event ──▶ IoSource::poll_io ──▶ channel
//!   wire ◀── queue pair ◀──calls── RdmaSession::work     ◀── IoSource::on_io   ◀── channel
//! ```
//! A *queue pair* is a reliable RDMA connection as in the verbs (RFC 5040, InfiniBand). Messages
//! arrive complete, once and in order, each in a posted receive buffer. The peer reads and writes
//! registered memory without involving the session. Providers (software iWARP, RoCEv2, hardware)
//! are in the crate `rdma`.
//!
//! In each turn, the driver passes all events to the session and calls [`RdmaSession::work`], in
//! which the session calls [`QueuePair`], until neither makes progress. So a session gets the
//! result of a registration in the turn of its request.
//!
//! # Receive buffers
//! Initially [`Endpoint::receives`] buffers of [`Endpoint::receive_len`] bytes are posted. Each
//! message consumes one, and [`QueuePair::receive`] posts more. A message without a buffer, or with
//! a buffer that is too short, ends the connection; protocols prevent this with credits.

pub(crate) mod cm;
pub(crate) mod exposure;
pub(crate) mod progress_watchdog;
pub(crate) mod target_mover;
pub(crate) mod target_phase;
pub mod testing;

use crate::driver::session::{Connections, ProtocolError, Timed};
use blockmux_volume::{Seg, SgList};
use smallvec::SmallVec;
use std::time::Instant;

/// Identifies a work request; the session chooses it, and [`Event::Done`] returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkId(pub u64);

/// A steering tag (RFC 5040, RFC 5041), which identifies registered memory: the R_Key of the verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stag(pub u32);

/// Registered memory that the other side may access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Steering tag of the memory.
    pub stag: Stag,
    /// Start of the memory: a tagged offset (RFC 5041), in the verbs a virtual address.
    pub address: u64,
    /// Length in bytes.
    pub len: u32,
}

impl Remote {
    /// Whether a read of all of this memory fills `local`, which may be written.
    #[inline]
    #[must_use]
    pub fn fills(&self, local: &SgList) -> bool {
        usize::try_from(self.len).is_ok_and(|len| len == local.len()) && local.is_writable()
    }

    /// Whether this memory has room for all of `local`.
    #[inline]
    #[must_use]
    pub fn has_room_for(&self, local: &SgList) -> bool {
        usize::try_from(self.len).is_ok_and(|len| len >= local.len())
    }
}

/// Remote access rights of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteRights {
    /// RDMA Read from it.
    RemoteRead,
    /// RDMA Write to it.
    RemoteWrite,
}

/// The head of a message, which is copied; the payload is passed by reference.
pub type MessageHead = SmallVec<[u8; 128]>;

/// A work request, which a queue pair holds until it can carry it out.
///
/// Sends, reads and writes are started in the order of posting; a send after a write is delivered
/// after the write's data. A read may complete after later work requests.
#[derive(Debug)]
pub enum WorkRequest {
    /// The passive side accepts the connection of [`Event::Requested`].
    Accept {
        /// Private data for the peer, at most [`MAX_PRIVATE_DATA`] bytes.
        private_data: Vec<u8>,
    },
    /// The passive side rejects the connection. It ends once the rejection is sent.
    Reject {
        /// Private data for the peer, at most [`MAX_PRIVATE_DATA`] bytes.
        private_data: Vec<u8>,
    },
    /// Posts another receive buffer.
    Receive,
    /// Sends a message.
    Send {
        /// Returned when the message is sent and its payload may be reused.
        id: WorkId,
        /// Head of the message.
        head: MessageHead,
        /// Payload after the head; may be empty.
        payload: SgList,
        /// Registration of the peer that the message invalidates on arrival.
        invalidate: Option<Stag>,
        /// Whether the message is a solicited event.
        is_solicited: bool,
    },
    /// RDMA Read: reads the peer's memory into local memory of the same length.
    Read {
        /// Returned when all data has arrived.
        id: WorkId,
        /// Local destination.
        local: SgList,
        /// Source in the peer's memory.
        remote: Remote,
    },
    /// RDMA Write: writes local memory to the peer's memory.
    Write {
        /// Returned when the local memory may be reused. Only a later message of the peer shows
        /// that the data has arrived.
        id: WorkId,
        /// Local source.
        local: SgList,
        /// Destination in the peer's memory, of the same length or longer.
        remote: Remote,
    },
    /// Registers memory for access by the peer. [`Event::Registered`] returns its steering tag.
    Register {
        /// Returned with the steering tag.
        id: WorkId,
        /// The memory, which is one contiguous range for the peer.
        local: SgList,
        /// Remote access rights.
        access: RemoteRights,
    },
    /// Invalidates a registration at once: later accesses of the peer fail. It may be invalid
    /// already.
    Invalidate {
        /// Steering tag of the memory.
        stag: Stag,
    },
    /// Ends the connection after all posted work requests.
    Disconnect,
}

/// Reason for which a work request failed. Each of them ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkError {
    /// It exceeds the limits of the queue pair, or the lengths do not match.
    #[error("it is not possible on this connection")]
    Local,
    /// The peer's access rights do not allow it.
    #[error("the peer does not open that memory")]
    RemoteAccess,
    /// The connection ended first.
    #[error("the connection was over")]
    Flushed,
}

/// An event of a queue pair.
#[derive(Debug)]
pub enum Event {
    /// A connection request; the session calls [`QueuePair::accept`] or [`QueuePair::reject`].
    Requested {
        /// Private data of the peer, not validated.
        private_data: Vec<u8>,
        /// The RDMA Reads that this side may have in flight if it accepts: at most
        /// [`Endpoint::reads`], or fewer if the peer supports fewer.
        reads: u32,
    },
    /// The connection is established. On the passive side, the peer has shown that it receives what
    /// is sent to its address: by the handshake of TCP, or by an answer to the acceptance. What a
    /// request takes from others, it takes only now, since its sender's address may be forged.
    Connected {
        /// Private data of the accepting peer; empty on the passive side.
        private_data: Vec<u8>,
    },
    /// The peer rejected the connection, which has ended.
    Refused {
        /// Private data of the peer, not validated.
        private_data: Vec<u8>,
    },
    /// A message has arrived.
    Received {
        /// The complete message, contiguous. It may be part of a buffer that many messages share,
        /// so data that is held for long should be copied.
        message: Seg,
        /// The local registration that the message has invalidated.
        invalidated: Option<Stag>,
        /// What the peer had written to it, if it was registered without memory
        /// ([`QueuePair::register_unbacked`]).
        written: Option<Seg>,
    },
    /// A work request has completed.
    Done {
        /// The work request.
        id: WorkId,
        /// Its result.
        result: Result<(), WorkError>,
    },
    /// Memory has been registered.
    Registered {
        /// The work request of the registration.
        id: WorkId,
        /// The registered memory, to send to the peer.
        remote: Remote,
    },
    /// The peer has ended the connection, or it is lost. All work requests are flushed before.
    Disconnected,
}

/// Requirements of a session for its queue pair, given before connecting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Number of receive buffers that are posted initially.
    pub receives: u32,
    /// Length of each receive buffer in bytes: the maximum length of a received message.
    pub receive_len: u32,
    /// The maximum number of sends, reads and writes in flight. A session that receives
    /// [`Event::Done`] counts them itself.
    pub sends: u32,
    /// The maximum number of RDMA Reads in flight in each direction: ORD and IRD.
    pub reads: u32,
    /// The maximum number of valid registrations.
    pub regions: u32,
    /// Private data of the connecting side, at most [`MAX_PRIVATE_DATA`] bytes.
    pub private_data: Vec<u8>,
    /// Private data instead, if it is other, where [`QueuePair::is_invalidated_by_peers`] is not
    /// so.
    pub without_invalidation: Option<Vec<u8>>,
}

/// The calls of a session to its queue pair.
///
/// Calls take effect in their order. [`QueuePair::send`], [`QueuePair::read`] and
/// [`QueuePair::write`] may be called only while [`QueuePair::room`] is not 0; a session retries in
/// a later turn. By default, a call is converted to a [`WorkRequest`] and passed to `post`. A
/// provider overrides the calls that it can carry out immediately, as hardware verbs do: with 4 KiB
/// I/O, work requests and events cost as much as framing.
pub trait QueuePair {
    /// The number of sends, reads and writes that may be posted now: the limit of the endpoint
    /// minus those in flight. 0 without a connection.
    fn room(&self) -> usize;

    /// Posts a work request. Sends, reads and writes may be posted only while there is room.
    fn post(&mut self, work: WorkRequest);

    /// The number of unsent bytes that hold memory and cause no completion event.
    fn unsent(&self) -> usize {
        0
    }

    /// Whether messages of the peer should invalidate memory of this side (Send with Invalidate).
    /// Where they do nevertheless, the connection may end.
    fn is_invalidated_by_peers(&self) -> bool {
        true
    }

    /// Accepts the connection of [`Event::Requested`], with at most [`MAX_PRIVATE_DATA`] bytes for
    /// the peer.
    fn accept(&mut self, private_data: Vec<u8>) {
        self.post(WorkRequest::Accept { private_data });
    }

    /// Rejects the connection of [`Event::Requested`]. It ends once the rejection is sent.
    fn reject(&mut self, private_data: Vec<u8>) {
        self.post(WorkRequest::Reject { private_data });
    }

    /// Posts `count` further receive buffers.
    fn receive(&mut self, count: u32) {
        (0..count).for_each(|_| self.post(WorkRequest::Receive));
    }

    /// Sends a message: `head`, then `payload`, which is held until it is sent. On arrival it
    /// invalidates the peer's registration `invalidate`. It may complete with [`Event::Done`] and
    /// [`MESSAGE`].
    fn send(&mut self, head: &[u8], payload: &SgList, invalidate: Option<Stag>) {
        let (head, payload) = (MessageHead::from_slice(head), payload.clone());
        self.post(WorkRequest::Send { id: MESSAGE, head, payload, invalidate, is_solicited: false });
    }

    /// Reads the peer's memory into local memory of the same length. [`Event::Done`] follows when
    /// all data has arrived.
    fn read(&mut self, id: WorkId, local: SgList, remote: Remote) {
        self.post(WorkRequest::Read { id, local, remote });
    }

    /// Writes local memory, which is held until it is sent, to the peer's memory. `true`:
    /// [`Event::Done`] follows when the local memory may be reused. `false`: no event follows, and
    /// the data counts in [`QueuePair::unsent`] until it is sent.
    fn write(&mut self, id: WorkId, local: SgList, remote: Remote) -> bool {
        self.post(WorkRequest::Write { id, local, remote });
        true
    }

    /// Registers memory for access by the peer, and takes `local`. Returns the registered memory,
    /// or `None` if [`Event::Registered`] will return it.
    fn register(&mut self, id: WorkId, local: &mut SgList, access: RemoteRights) -> Option<Remote> {
        self.post(WorkRequest::Register { id, local: std::mem::take(local), access });
        None
    }

    /// Registers `len` bytes for one RDMA Write of the peer, without memory: the queue pair borrows
    /// what arrives from its receive buffer, which saves the copy to other memory. The data is
    /// returned when the registration is invalidated, in its whole length; what the peer has not
    /// written of it is zero. With the connection, registration and data are lost. `None` if this
    /// queue pair would have to copy: the session then registers memory of its own.
    fn register_unbacked(&mut self, _len: u32) -> Option<Remote> {
        None
    }

    /// Invalidates a registration before it returns. The registration may be invalid already.
    /// Returns what the peer has written to one without memory.
    fn invalidate(&mut self, stag: Stag) -> Option<Seg> {
        self.post(WorkRequest::Invalidate { stag });
        None
    }

    /// Ends the connection after all previous calls have been carried out.
    fn disconnect(&mut self) {
        self.post(WorkRequest::Disconnect);
    }
}

/// The id of all messages of [`QueuePair::send`].
pub const MESSAGE: WorkId = WorkId(0);

/// The maximum private data in bytes that every provider supports; InfiniBand's connection manager
/// has the lowest limit.
pub const MAX_PRIVATE_DATA: usize = 56;

/// A session over a queue pair: iSER, SRP, NVMe/RDMA.
pub trait RdmaSession: Timed {
    /// The requirements for the queue pair. The call has no side effect.
    fn endpoint(&self) -> Endpoint;

    /// Handles an event.
    ///
    /// # Errors
    /// If the peer violated the protocol: the driver posts the pending work and disconnects.
    fn on_event(&mut self, event: Event, now: Instant) -> Result<(), ProtocolError>;

    /// Passes all pending work to `queue_pair`, as far as it has room. Returns whether there was
    /// progress; then the driver calls it again.
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
    /// The requirements of the first connection; those of the others are in
    /// [`RdmaSession::endpoint`]. The call has no side effect.
    fn endpoint(&self) -> Endpoint;

    /// The session of one connection.
    fn connection(&mut self, connection: usize) -> impl RdmaSession;
}
