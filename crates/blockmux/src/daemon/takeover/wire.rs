//! Messages between the two processes of a takeover, some with a socket.
//!
//! A message is the length of its JSON and the length of its attachment, each a big-endian `u32`,
//! then the JSON and the attachment. The socket (SCM_RIGHTS) travels with the first byte.

use crate::daemon::offer::{ListenerOffer, VolumeOffer};
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

/// A message between the two processes of a takeover.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(super) enum TakeoverMessage {
    /// A listener; its socket comes with the message.
    Listener(ListenerOffer),
    /// The volumes of the daemon. All listeners have been sent.
    Offer(Offer),
    /// Nothing is handed over; the daemon continues to serve.
    Refused { reason: String },
    /// The new process has checked its config: the daemon may stop and release its volumes.
    Ready,
    /// A volume; its persistent reservations are attached.
    Volume {
        name: String,
        /// Of an image that one daemon owns at a time: the generations of its stored reservations,
        /// of which one is found if nobody has owned it since; none if the daemon was standby.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        generations: Option<Vec<u64>>,
    },
    /// A session between two requests; its socket comes with the message. The session's state and
    /// the bytes that were received and not parsed are attached.
    Session(SessionOffer),
    /// All volumes are released.
    Released,
    /// The volumes could not be released, although the daemon has ended its sessions.
    Failed { reason: String },
    /// The new process serves.
    Serving,
}

/// The daemon's volumes and disks, and its directory of reservations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Offer {
    pub(super) volumes: Vec<VolumeOffer>,
    /// The volumes that are attached as disks, which wait for the new process.
    #[serde(default)]
    pub(super) attachments: Vec<String>,
    /// Directory of persistent reservations.
    pub(super) state: Option<PathBuf>,
}

/// A session of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SessionOffer {
    pub(super) protocol: String,
    /// Address of the listener that accepted the connection.
    pub(super) listener: String,
    pub(super) peer: String,
    /// Length of the state in the attachment, in bytes.
    pub(super) state_len: usize,
}

/// A received message with its attachment and its socket.
pub(super) struct Received {
    pub(super) message: TakeoverMessage,
    pub(super) attachment: Vec<u8>,
    pub(super) socket: Option<OwnedFd>,
}

/// One end of the connection between the two processes.
pub(super) struct TakeoverConnection(UnixStream);

impl TakeoverConnection {
    /// Makes the connection blocking, with a timeout for writes.
    ///
    /// # Errors
    /// The errors of fcntl(2) and setsockopt(2).
    pub(super) fn new(stream: UnixStream) -> io::Result<TakeoverConnection> {
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(WRITE_TIME))?;
        Ok(TakeoverConnection(stream))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// If the peer has closed the connection, or does not receive for [`WRITE_TIME`].
    pub(super) fn send(&self, message: &TakeoverMessage) -> io::Result<()> {
        self.send_with(message, &[], None)
    }

    /// Sends a message with an attachment, a socket or both.
    ///
    /// # Errors
    /// The errors of [`TakeoverConnection::send`].
    pub(super) fn send_with(
        &self,
        message: &TakeoverMessage,
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

    /// Receives a message. Each read waits at most for `within`, or without limit if it is `None`.
    ///
    /// # Errors
    /// If the peer has closed the connection, the timeout expires, or the message is invalid.
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

    /// Waits until the peer has closed the connection, at most for `within`.
    pub(super) fn wait_for_end(&self, within: Duration) {
        // The peer sends nothing more; its end closes the connection.
        let _ = self.receive(Some(within));
    }

    /// Receives `len` bytes; adds the sockets that come with them to `sockets`.
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

/// `Upgrade` field of the request that begins a takeover; the number is the version of the
/// messages.
pub(in crate::daemon) const UPGRADE: &str = "blockmux-takeover/1";
/// Path of the request that begins a takeover.
pub(in crate::daemon) const PATH: &str = "/v1/takeover";
/// Length of the two length fields, in bytes.
const HEAD: usize = 8;
/// Maximum length of a message's JSON, in bytes: names and specs of tens of thousands of volumes.
const MAX_JSON: usize = 16 << 20;
/// Maximum length of an attachment, in bytes: a volume's registrations, or the unparsed bytes of
/// one connection.
const MAX_ATTACHMENT: usize = 64 << 20;
/// Timeout of a write to the peer.
const WRITE_TIME: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn pair() -> (TakeoverConnection, TakeoverConnection) {
        let (one, other) = UnixStream::pair().unwrap();
        one.set_nonblocking(true).unwrap();
        (TakeoverConnection::new(one).unwrap(), TakeoverConnection::new(other).unwrap())
    }

    #[test]
    fn messages_arrive_in_order_each_with_its_attachment_and_its_socket() {
        let (one, other) = pair();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let volume = TakeoverMessage::Volume { name: "a".to_owned(), generations: None };
        let sender = std::thread::spawn({
            let listener = listener.try_clone().unwrap();
            let volume = volume.clone();
            move || {
                one.send(&TakeoverMessage::Ready).unwrap();
                one.send_with(&volume, &[7; 1 << 20], Some(listener.as_fd())).unwrap();
                one.send_with(&volume, &[], Some(listener.as_fd())).unwrap();
                one.send(&TakeoverMessage::Released).unwrap();
            }
        });
        let within = Some(Duration::from_secs(60));
        let receive = || other.receive(within).unwrap();
        let first = receive();
        assert_eq!((first.message, first.socket.is_some()), (TakeoverMessage::Ready, false));
        let second = receive();
        assert_eq!((second.message, second.attachment.len()), (volume.clone(), 1 << 20));
        let socket = std::net::TcpListener::from(second.socket.unwrap());
        assert_eq!(socket.local_addr().unwrap(), listener.local_addr().unwrap());
        let third = receive();
        assert_eq!((third.message, third.attachment.len(), third.socket.is_some()), (volume, 0, true));
        assert_eq!(receive().message, TakeoverMessage::Released);
        sender.join().unwrap();
        assert!(other.receive(within).is_err(), "the other end is closed");
    }

    #[test]
    fn invalid_messages_are_refused() {
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
