//! The trait of a queue-pair provider, in the terms of the verbs and of RFC 5040.

use crate::regions::Refusal;
use blockmux_proto::driver::session::Timed;
#[cfg(doc)]
use blockmux_proto::rdma::WorkRequest;
use blockmux_proto::rdma::{Event, QueuePair};

/// One end of a reliable connection, from its creation until all of its work is flushed.
///
/// It is created with an [`Endpoint`](blockmux_proto::rdma::Endpoint), whose numbers bound
/// everything below. The trait does not depend on the transport: software iWARP, for instance, is a
/// stream session too.
///
/// # Connecting
/// The active side requests the connection by itself and reports [`Event::Connected`], or
/// [`Event::Refused`] instead of [`Event::Disconnected`]. The passive side reports
/// [`Event::Requested`] and continues with [`QueuePair::accept`] (then [`Event::Connected`], once
/// the peer has shown that it receives what is sent to its address) or [`QueuePair::reject`] (then
/// [`Event::Disconnected`], once the reject was sent). If the peer goes away before that,
/// [`Event::Disconnected`] is reported. Sends, reads and writes may be posted from `Connected` on;
/// receives and registrations at any time, also before. Private data may arrive with zeroes behind
/// it: the messages of InfiniBand's connection manager have fixed lengths.
///
/// # Order
/// Sends, reads and writes begin in the order in which they were posted, and messages arrive in
/// that order; written data is in place before a later message arrives (RFC 5040 §5.5). A read that
/// would exceed the limit of reads in flight waits, and everything posted after it waits too. Reads
/// complete in their own order, but possibly after work that was posted behind them. A session that
/// sends a message which depends on the data of a read therefore waits for that read first.
///
/// A registration or invalidation takes effect before the call returns: from then on the peer can
/// use the granted memory, or can no longer use the invalidated memory. The rest of a write that is
/// just arriving is discarded. Data that the peer requested earlier may still be in transit to it.
///
/// # Completion
/// Each send, read, write and registration that was posted as [`WorkRequest`] completes exactly
/// once: with [`Event::Done`], or [`Event::Registered`]. Work requested by a method may have been
/// executed by the call, as [`QueuePair`] says. Work of one kind completes in the order of posting.
/// `Done` of a send or a write means that its memory may be reused, and nothing more; `Done` of a
/// read means that all its data is in place, and all messages that had arrived before are reported
/// before it. Accepts, rejects, receives, [`QueuePair::invalidate`] and [`QueuePair::disconnect`]
/// have no completion.
///
/// The provider holds posted memory until its completion, and registered memory until it is
/// invalidated, and no longer.
///
/// A provider whose device reaches only registered memory asks each piece of memory for its local
/// key ([`Seg::local_key`](blockmux_volume::Seg::local_key)) when work is posted. Work on memory
/// that the device cannot register fails with
/// [`WorkError::Local`](blockmux_proto::rdma::WorkError::Local).
///
/// # Messages
/// Each message consumes one receive buffer. There are
/// [`Endpoint::receives`](blockmux_proto::rdma::Endpoint::receives) of them, and as many more as
/// [`QueuePair::receive`] posts. A message that invalidates memory is reported together with the
/// invalidated key. If that key was not valid, the message is not reported and the connection ends.
///
/// # Errors
/// Every error ends the connection, as with the reliable service of the verbs. An access or message
/// of the peer that breaks the protocol is refused before any memory is touched; the provider
/// reports it to the peer in the protocol's own terms where it can, and retains it for
/// [`Provider::fault`]. Work that the queue pair cannot do fails with
/// [`WorkError::Local`](blockmux_proto::rdma::WorkError::Local); a read that the peer refuses fails
/// with [`WorkError::RemoteAccess`](blockmux_proto::rdma::WorkError::RemoteAccess), while a refused
/// send or write may have completed successfully by then, if the provider does not wait for
/// acknowledgements. All remaining work then completes as flushed, in the order of posting,
/// followed by one last [`Event::Disconnected`]. All registrations are invalidated before that.
/// Work posted later is flushed too, without another `Disconnected`.
///
/// [`QueuePair::disconnect`] is not an error: work posted before it is done first, and what the
/// peer sent before it learned of the disconnect still arrives; then both sides report
/// `Disconnected`.
pub trait Provider: QueuePair + Timed {
    /// Capabilities of the queue pair. They are final once the connection is established.
    fn caps(&self) -> Caps;

    /// Returns the next event, or `None` if there is none at present.
    fn poll(&mut self) -> Option<Event>;

    /// The protocol violation that ended the connection, if one of the two sides committed one.
    fn fault(&self) -> Option<Fault>;
}

/// Capabilities of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Longest private data of a connection request or reply, in bytes; at least
    /// [`blockmux_proto::rdma::MAX_PRIVATE_DATA`].
    pub private_data: usize,
    /// Longest RDMA Read or Write, in bytes.
    pub max_transfer: u32,
    /// RDMA Reads of this side that may be in flight (ORD); 0 if it cannot read.
    pub reads: u32,
    /// RDMA Reads of the peer that may be in flight (IRD).
    pub peer_reads: u32,
    /// Whether a message can invalidate memory of the peer (Send with Invalidate).
    pub invalidates: bool,
}

/// The side that violated the protocol, and the violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The peer violated the protocol, and the violation was reported to it.
    Peer(Violation),
    /// The peer reports a violation by this side.
    Ours(Violation),
}

/// A protocol violation. The Terminate message of RFC 5040 and RFC 5041 has an error code for each;
/// InfiniBand's negative acknowledgement has fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// An access to memory that was not granted, or not for this kind of access.
    #[error("{0}")]
    Refused(#[from] Refusal),
    /// An access to memory that was not granted, by what a peer reports which does not say why
    /// (InfiniBand: remote access error).
    #[error("an access to memory that was not granted")]
    Access,
    /// A message found no receive buffer (RFC 5041: invalid MSN, no buffer available).
    #[error("a message without a receive buffer")]
    NoReceive,
    /// A message was longer than its receive buffer (RFC 5041: DDP message too long for available
    /// buffer).
    #[error("a message longer than its receive buffer")]
    TooLong,
    /// The peer had more RDMA Reads in flight than negotiated.
    #[error("more RDMA Reads in flight than negotiated")]
    TooManyReads,
    /// Another violation of the provider's protocol, or one for which the peer has no closer error
    /// code.
    #[error("another protocol violation")]
    Other,
}
