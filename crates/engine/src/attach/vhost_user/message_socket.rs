//! Requests of a front end, received with their descriptors, and replies to them.

use crate::net::fd_socket::{MESSAGE_TIME, receive_some, send_with_fds};
use blockmux_proto::virtio::wire::vhost_user::{FrontendRequest, MessageHeader};
use blockmux_proto::virtio::{MessageError, message_header};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;
use zerocopy::FromBytes;

/// A request of a front end.
#[derive(Debug)]
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
    /// A message that has begun was not complete in time.
    #[error("it has not completed a message within {} seconds", MESSAGE_TIME.as_secs())]
    Overdue,
    /// The connection has failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The message makes no sense.
    #[error(transparent)]
    Message(#[from] MessageError),
}

/// Assembles requests as their bytes arrive. It never waits, so the thread that polls the socket
/// can do other work meanwhile.
#[derive(Default)]
pub(super) struct MessageReceiver {
    /// What has come of a message.
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// When a message that has begun has to be complete.
    pub(super) deadline: Option<Instant>,
}

impl MessageReceiver {
    /// Receives the rest of a request; `None` if not all of it has come. No byte of the next one is
    /// taken, because its descriptors would come with it.
    pub(super) fn receive(&mut self, socket: &impl AsFd) -> Result<Option<ReceivedRequest>, ReceiveError> {
        loop {
            let header = MessageHeader::read_from_prefix(&self.bytes).ok().map(|(header, _)| header);
            let (len, wants_reply) = header.as_ref().map(message_header).transpose()?.unwrap_or_default();
            let missing = (size_of::<MessageHeader>() + len).saturating_sub(self.bytes.len());
            if let Some(header) = header.filter(|_| missing == 0) {
                let payload = self.bytes.split_off(size_of::<MessageHeader>());
                let fds = std::mem::take(&mut self.fds);
                *self = MessageReceiver::default();
                let request = FrontendRequest(header.request);
                return Ok(Some(ReceivedRequest { request, wants_reply, payload, fds }));
            }
            let at = self.bytes.len();
            self.bytes.resize(at + missing, 0);
            let received = receive_some(socket, self.bytes.get_mut(at..).unwrap_or_default(), &mut self.fds);
            self.bytes.truncate(at + received.as_ref().copied().unwrap_or_default());
            match received {
                Ok(0) if at == 0 => return Err(ReceiveError::Closed),
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(_) => {
                    self.deadline.get_or_insert_with(|| Instant::now() + MESSAGE_TIME);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Sends a message; all of it has to be taken within [`MESSAGE_TIME`].
pub(super) fn send(socket: &impl AsFd, bytes: &[u8], fd: Option<&OwnedFd>) -> io::Result<()> {
    let fds = fd.map(|fd| [fd.as_fd()]);
    let fds = fds.as_ref().map_or(&[][..], |fds| fds);
    send_with_fds(socket, bytes, fds, Instant::now() + MESSAGE_TIME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use zerocopy::IntoBytes;

    fn message(request: FrontendRequest, payload: &[u8]) -> Vec<u8> {
        let header = MessageHeader { request: request.0, flags: 1, size: payload.len() as u32 };
        [header.as_bytes(), payload].concat()
    }

    #[test]
    fn a_request_comes_byte_by_byte_and_its_deadline_stays() {
        let (mut peer, own) = UnixStream::pair().unwrap();
        let mut receiver = MessageReceiver::default();
        assert!(receiver.receive(&own).unwrap().is_none() && receiver.deadline.is_none());
        let bytes = message(FrontendRequest::SET_FEATURES, &[7; 8]);
        let (last, others) = bytes.split_last().unwrap();
        let mut deadlines = Vec::new();
        for byte in others {
            peer.write_all(&[*byte]).unwrap();
            assert!(receiver.receive(&own).unwrap().is_none());
            deadlines.push(receiver.deadline.unwrap());
        }
        assert!(deadlines.iter().all(|deadline| *deadline == deadlines[0]));
        peer.write_all(&[*last]).unwrap();
        let received = receiver.receive(&own).unwrap().unwrap();
        assert_eq!((received.request, received.payload), (FrontendRequest::SET_FEATURES, vec![7; 8]));
        assert!(receiver.deadline.is_none(), "the next message has its own");
    }

    #[test]
    fn a_request_takes_its_own_descriptors_and_leaves_those_of_the_next_one() {
        let (peer, own) = UnixStream::pair().unwrap();
        let fd = OwnedFd::from(peer.try_clone().unwrap());
        send(&peer, &message(FrontendRequest::GET_FEATURES, &[]), None).unwrap();
        send(&peer, &message(FrontendRequest::SET_VRING_CALL, &[0; 8]), Some(&fd)).unwrap();
        let mut receiver = MessageReceiver::default();
        let mut next = || receiver.receive(&own).unwrap().unwrap().fds.len();
        assert_eq!((next(), next()), (0, 1));
    }

    #[test]
    fn a_connection_ends_between_two_messages_or_within_one() {
        let (mut peer, own) = UnixStream::pair().unwrap();
        peer.write_all(&message(FrontendRequest::GET_FEATURES, &[])[..5]).unwrap();
        drop(peer);
        let mut receiver = MessageReceiver::default();
        assert!(matches!(receiver.receive(&own), Err(ReceiveError::Io(_))));
        assert!(matches!(MessageReceiver::default().receive(&own), Err(ReceiveError::Closed)));
    }
}
