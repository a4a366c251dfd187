//! Messages between the two processes of a takeover, some with a socket.
//!
//! A message is its length, the length of its attachment, JSON, and the attachment. The socket
//! travels with the first byte.

use crate::serve::offer::{ListenerOffer, VolumeOffer};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// What the two processes tell each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(super) enum Message {
    /// A listening socket, which comes with it.
    Listener(ListenerOffer),
    /// All listeners were sent. What is served.
    Offer(Offer),
    /// Nothing is handed over, and the daemon goes on.
    Refused { reason: String },
    /// The config is right: the daemon may stop and release its volumes.
    Ready,
    /// Reservations of a volume, which are attached.
    Volume { name: String },
    /// A connection between two requests, which comes with it. The session's state and the bytes
    /// that were received and not parsed are attached.
    Session(SessionOffer),
    /// All volumes are released.
    Released,
    /// Volumes could not be released, and the daemon has ended its sessions.
    Failed { reason: String },
    /// The new process serves.
    Serving,
}

/// What the process that serves has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Offer {
    pub(super) volumes: Vec<VolumeOffer>,
    /// Directory of reservations.
    pub(super) state: Option<PathBuf>,
}

/// A connection of the process that served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SessionOffer {
    pub(super) protocol: String,
    /// The address of the listener that it came by.
    pub(super) listener: String,
    pub(super) peer: String,
    /// Length of the state in the attachment, in bytes.
    pub(super) state_len: usize,
}

/// A message as it came.
pub(super) struct Received {
    pub(super) message: Message,
    pub(super) attachment: Vec<u8>,
    pub(super) socket: Option<OwnedFd>,
}

/// One end of the connection between the two processes.
pub(super) struct Channel(UnixStream);

impl Channel {
    /// Takes a connection, which may be one that does not block.
    ///
    /// # Errors
    /// If it is closed already.
    pub(super) fn new(stream: UnixStream) -> io::Result<Channel> {
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(WRITE_TIME))?;
        Ok(Channel(stream))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// If the other process is gone, or does not receive.
    pub(super) fn send(&self, message: &Message) -> io::Result<()> {
        self.send_with(message, &[], None)
    }

    /// Sends a message with an attachment, a socket or both.
    ///
    /// # Errors
    /// As for [`Channel::send`].
    pub(super) fn send_with(
        &self,
        message: &Message,
        attachment: &[u8],
        socket: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let json = serde_json::to_vec(message)?;
        let mut head = Vec::with_capacity(HEAD);
        head.extend((json.len() as u32).to_be_bytes());
        head.extend((attachment.len() as u32).to_be_bytes());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let sockets = socket.map(|socket| [socket]);
        if let Some(sockets) = &sockets {
            control.push(SendAncillaryMessage::ScmRights(sockets));
        }
        let sent = loop {
            match sendmsg(&self.0, &[IoSlice::new(&head)], &mut control, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                sent => break sent?,
            }
        };
        let mut stream = &self.0;
        stream.write_all(&head[sent..])?;
        stream.write_all(&json)?;
        stream.write_all(attachment)
    }

    /// Receives a message within that time; `None`: however long it takes.
    ///
    /// # Errors
    /// If the other process is gone or silent, or what came is no message.
    pub(super) fn receive(&self, within: Option<Duration>) -> io::Result<Received> {
        self.0.set_read_timeout(within)?;
        let mut sockets = Vec::new();
        let head = self.take(HEAD, &mut sockets)?;
        let len = |at: usize| {
            let bytes = head.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).unwrap_or_default();
            u32::from_be_bytes(bytes) as usize
        };
        let (json_len, attachment_len) = (len(0), len(4));
        if json_len > MAX_JSON || attachment_len > MAX_ATTACHMENT {
            return Err(invalid("a message is too long"));
        }
        let message = serde_json::from_slice(&self.take(json_len, &mut sockets)?).map_err(invalid)?;
        let attachment = self.take(attachment_len, &mut sockets)?;
        if sockets.len() > 1 {
            return Err(invalid("a message has several sockets"));
        }
        Ok(Received { message, attachment, socket: sockets.pop() })
    }

    /// Waits until the other process has closed the connection.
    pub(super) fn wait_for_end(&self, within: Duration) {
        // There is nothing more to be told.
        let _ = self.receive(Some(within));
    }

    /// Receives so many bytes, and sockets that come with them.
    fn take(&self, len: usize, sockets: &mut Vec<OwnedFd>) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let mut at = 0;
        while at < len {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let slices = &mut [IoSliceMut::new(&mut bytes[at..])];
            let received = match recvmsg(&self.0, slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                received => received?,
            };
            if received.bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            at += received.bytes;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    sockets.extend(fds);
                }
            }
        }
        Ok(bytes)
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// `Upgrade` of the request that begins a takeover; the number is the version of the messages.
pub(in crate::serve) const UPGRADE: &str = "blockmux-takeover/1";
/// Path of that request.
pub(in crate::serve) const PATH: &str = "/v1/takeover";
/// Two lengths.
const HEAD: usize = 8;
/// The longest message: names and specs of tens of thousands of volumes, in bytes.
const MAX_JSON: usize = 16 << 20;
/// The longest attachment: a volume's registrations, or what one connection has received.
const MAX_ATTACHMENT: usize = 64 << 20;
/// How long the other process may not receive.
const WRITE_TIME: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn pair() -> (Channel, Channel) {
        let (one, other) = UnixStream::pair().unwrap();
        one.set_nonblocking(true).unwrap();
        (Channel::new(one).unwrap(), Channel::new(other).unwrap())
    }

    #[test]
    fn messages_come_in_order_each_with_its_attachment_and_its_socket() {
        let (one, other) = pair();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let volume = Message::Volume { name: "a".to_owned() };
        let sender = std::thread::spawn({
            let listener = listener.try_clone().unwrap();
            let volume = volume.clone();
            move || {
                one.send(&Message::Ready).unwrap();
                one.send_with(&volume, &[7; 1 << 20], Some(listener.as_fd())).unwrap();
                one.send_with(&volume, &[], Some(listener.as_fd())).unwrap();
                one.send(&Message::Released).unwrap();
            }
        });
        let within = Some(Duration::from_secs(60));
        let receive = || other.receive(within).unwrap();
        let first = receive();
        assert_eq!((first.message, first.socket.is_some()), (Message::Ready, false));
        let second = receive();
        assert_eq!((second.message, second.attachment.len()), (volume.clone(), 1 << 20));
        let socket = std::net::TcpListener::from(second.socket.unwrap());
        assert_eq!(socket.local_addr().unwrap(), listener.local_addr().unwrap());
        let third = receive();
        assert_eq!((third.message, third.attachment.len(), third.socket.is_some()), (volume, 0, true));
        assert_eq!(receive().message, Message::Released);
        sender.join().unwrap();
        assert!(other.receive(within).is_err(), "the other end is closed");
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        for bytes in [
            &b"\0\0\0\x02\0\0\0\0{}"[..],
            b"\xff\xff\xff\xff\0\0\0\0",
            b"\0\0\0\x02\xff\xff\xff\xff{}",
            b"\0\0\0\x01",
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
        ] {
            let (one, other) = pair();
            (&one.0).write_all(bytes).unwrap();
            drop(one);
            assert!(other.receive(None).is_err(), "{}", bytes.escape_ascii());
        }
    }
}
