//! Requests of a front end, received with their descriptors.

use crate::net::fd_socket::receive_exactly;
use blockmux_proto::virtio::wire::vhost_user::{FrontendRequest, MessageHeader};
use blockmux_proto::virtio::{MessageError, message_header};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use zerocopy::FromBytes;

/// A request of a front end.
pub(super) struct ReceivedRequest {
    pub(super) request: FrontendRequest,
    pub(super) wants_reply: bool,
    pub(super) payload: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

/// Why no message was received.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReceiveError {
    /// The peer has closed the connection between two messages.
    #[error("it has disconnected")]
    Closed,
    /// The connection has failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The message makes no sense.
    #[error(transparent)]
    Message(#[from] MessageError),
}

/// Receives a request; waits for the rest of one that has begun, but not for ever.
pub(super) fn receive(socket: &impl AsFd) -> Result<ReceivedRequest, ReceiveError> {
    let mut fds = Vec::new();
    let mut head = [0; size_of::<MessageHeader>()];
    match receive_exactly(socket, &mut head, &mut fds) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => return Err(ReceiveError::Closed),
        received => received?,
    }
    let header = MessageHeader::read_from_bytes(&head).unwrap_or_default();
    let (len, wants_reply) = message_header(&header)?;
    let mut payload = vec![0; len];
    receive_exactly(socket, &mut payload, &mut fds)?;
    Ok(ReceivedRequest { request: FrontendRequest(header.request), wants_reply, payload, fds })
}

/// The time in which a message that has begun ends.
pub(super) const MESSAGE_TIME: Duration = Duration::from_secs(5);
