//! What a provider of queue pairs does, in the words of the verbs and of RFC 5040.

use crate::regions::Refusal;
#[cfg(doc)]
use blockmux_proto::rdma::WorkRequest;
use blockmux_proto::rdma::{Event, QueuePair};
use blockmux_proto::session::Timed;

/// One end of a reliable connection, from before it is made until all of its work is flushed.
///
/// It is made with an [`Endpoint`](blockmux_proto::rdma::Endpoint), which bounds everything below.
/// Of whatever carries it the trait says nothing: software iWARP is a stream session too.
///
/// # Connecting
/// The active side asks for the connection by itself and tells [`Event::Connected`], or
/// [`Event::Refused`] in the place of [`Event::Disconnected`]. The passive side tells
/// [`Event::Requested`], and goes on with [`QueuePair::accept`] (then [`Event::Connected`]) or
/// [`QueuePair::reject`] (then [`Event::Disconnected`], once the peer has been told). A peer that
/// goes away before that makes it [`Event::Disconnected`]. Sends, reads and writes may be posted
/// from `Connected` on; receives and registrations at any time, also before.
///
/// # Order
/// Sends, reads and writes begin in the order in which they were posted, and messages arrive in
/// that order; what was written is there before a later message arrives (RFC 5040 §5.5). A read
/// that would be one too many on its way waits, and with it all that was posted behind it; reads
/// end in their own order, but later than what stands behind them. So whoever sends a message that
/// depends on data read waits for the read.
///
/// A registration, and its end, count at once: by the time that the call returns, the peer can do
/// what was granted, and can do no more what was taken back: the rest of a write that was just
/// arriving goes nowhere. Data that the peer has asked for before may still be on its way out.
///
/// # Completion
/// Each send, read, write and registration that was posted as [`WorkRequest`] comes back exactly
/// once: as [`Event::Done`], or [`Event::Registered`]. Those that were called may have been carried
/// out by the call, as [`QueuePair`] says. Those of one kind come back in the order in which they
/// were posted. `Done` of a send or a write means that its memory is free again, and nothing more;
/// `Done` of a read that all its data is there, and all messages that had arrived before are told
/// before it. Accepting, rejecting, receives, [`QueuePair::invalidate`] and
/// [`QueuePair::disconnect`] come back as nothing.
///
/// Memory that was posted or registered is held on to until then, or until the grant ends, and no
/// longer.
///
/// A provider whose device reaches only registered memory asks each piece of it for its local key
/// ([`Seg::local_key`](blockmux_volume::Seg::local_key)) when work is posted. Work on memory that
/// the device cannot register fails with
/// [`WorkError::Local`](blockmux_proto::rdma::WorkError::Local).
///
/// # Messages
/// Each takes one receive buffer, of which there are
/// [`Endpoint::receives`](blockmux_proto::rdma::Endpoint::receives) and as many more as
/// [`QueuePair::receive`] posts. A message that closes memory is told together with what it closed;
/// if that was not open, it is not told at all and ends the connection.
///
/// # Errors
/// There is none that a connection survives, as with the reliable service of the verbs. Whatever
/// the peer does wrong is refused before any memory was touched, told to it in the protocol's own
/// words as far as there is a way, and kept for [`Provider::fault`]. Work that the queue pair
/// cannot do fails with [`WorkError::Local`](blockmux_proto::rdma::WorkError::Local), a read that
/// the peer refuses with
/// [`WorkError::RemoteAccess`](blockmux_proto::rdma::WorkError::RemoteAccess); a send or write may
/// have come back well by then. Everything else that had not come back does so now, flushed, in the
/// order in which it was posted, and then comes [`Event::Disconnected`]: once, and last. All memory
/// is closed to the peer before that is told. What is posted later is flushed too, and without
/// another `Disconnected`.
///
/// [`QueuePair::disconnect`] is no error: what was posted before is done first, and what the peer
/// had sent before it learned of it still arrives; then both sides tell `Disconnected`.
pub trait Provider: QueuePair + Timed {
    /// What it can do. The numbers are final once the connection is there.
    fn caps(&self) -> Caps;

    /// What has happened next.
    fn poll(&mut self) -> Option<Event>;

    /// What broke the connection, where it was one of the two sides that did something wrong.
    fn fault(&self) -> Option<Fault>;
}

/// What a queue pair can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Private data in bytes that it carries when connecting, at least
    /// [`blockmux_proto::rdma::MAX_PRIVATE_DATA`].
    pub private_data: usize,
    /// The longest read or write in bytes.
    pub max_transfer: u32,
    /// RDMA Reads of ours that are on their way at a time (ORD). 0 if there can be none.
    pub reads: u32,
    /// RDMA Reads of the peer that may be on their way at a time (IRD).
    pub peer_reads: u32,
    /// Whether a message can close memory of the peer (Send with Invalidate).
    pub invalidates: bool,
}

/// Who broke a connection, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The peer did, and was told.
    Peer(Violation),
    /// We did, says the peer.
    Ours(Violation),
}

/// What was done wrong. RFC 5040 and 5041 have a code for each in their Terminate message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Memory that was not granted, or not for this.
    #[error("{0}")]
    Refused(#[from] Refusal),
    /// There was no receive buffer for a message (RFC 5041: invalid MSN, no buffer available).
    #[error("a message for which there was no receive buffer")]
    NoReceive,
    /// A message was longer than its receive buffer (RFC 5041: DDP message too long for available
    /// buffer).
    #[error("a message longer than its receive buffer")]
    TooLong,
    /// More RDMA Reads on their way than were agreed on.
    #[error("more RDMA Reads at a time than were agreed on")]
    TooManyReads,
    /// Something else that the provider's own protocol forbids, or that the peer has no nearer word
    /// for.
    #[error("something that the protocol forbids")]
    Other,
}
