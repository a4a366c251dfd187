//! A vhost-user back end without a device: it answers messages as a test says.

use blockmux_proto::virtio::BlkDevice;
use blockmux_volume::VolumeInfo;
use blockmux_wire::virtio::Features;
use blockmux_wire::virtio::vhost_user::{
    ConfigHeader, FrontendRequest, MESSAGE_F_NEED_REPLY, MESSAGE_F_REPLY, MESSAGE_VERSION, MessageHeader,
    ProtocolFeatures, VringState,
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use zerocopy::{FromBytes, IntoBytes};

/// A message of a front end.
pub(crate) struct FakeMessage {
    /// Number of its connection, from 0 on.
    pub(crate) connection: u32,
    pub(crate) request: FrontendRequest,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl FakeMessage {
    /// Whether this enables the virtqueue number `index`.
    pub(crate) fn enables(&self, index: u32) -> bool {
        let state = VringState { index, num: 1 };
        self.request == FrontendRequest::SET_VRING_ENABLE && self.payload == state.as_bytes()
    }
}

/// What a back end does about a message.
pub(crate) enum Reaction {
    /// It answers as a device of 1 MiB with one virtqueue.
    Usual,
    /// It answers with this number.
    Number(u64),
    /// It closes the connection.
    Disconnect,
}

/// A back end that listens until it is dropped.
pub(crate) struct FakeBackEnd {
    path: PathBuf,
    is_stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FakeBackEnd {
    pub(crate) fn listen(
        path: &Path,
        mut react: impl FnMut(&FakeMessage) -> Reaction + Send + 'static,
    ) -> FakeBackEnd {
        let listener = UnixListener::bind(path).unwrap();
        let is_stopping = Arc::new(AtomicBool::new(false));
        let stops = is_stopping.clone();
        let serve = move || {
            for (connection, socket) in (0..).zip(listener.incoming()) {
                if stops.load(Ordering::Relaxed) {
                    return;
                }
                serve(&mut socket.unwrap(), connection, &mut react);
            }
        };
        FakeBackEnd { path: path.to_owned(), is_stopping, thread: Some(thread::spawn(serve)) }
    }
}

impl Drop for FakeBackEnd {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        // It may have ended already.
        let _ = UnixStream::connect(&self.path);
        let ended = self.thread.take().map(JoinHandle::join);
        let _ = std::fs::remove_file(&self.path);
        assert!(thread::panicking() || ended.is_none_or(|ended| ended.is_ok()));
    }
}

/// Serves a front end until either side disconnects.
fn serve(socket: &mut UnixStream, connection: u32, react: &mut impl FnMut(&FakeMessage) -> Reaction) {
    while let Some((header, fds)) = receive_header(socket) {
        let mut payload = vec![0; header.size as usize];
        if socket.read_exact(&mut payload).is_err() {
            return;
        }
        let message = FakeMessage { connection, request: FrontendRequest(header.request), payload, fds };
        let answer = match react(&message) {
            Reaction::Usual => usual_answer(&message),
            Reaction::Number(number) => Some(number.as_bytes().to_vec()),
            Reaction::Disconnect => return,
        };
        let acknowledgement = (header.flags & MESSAGE_F_NEED_REPLY != 0).then(|| vec![0; 8]);
        let Some(answer) = answer.or(acknowledgement) else { continue };
        let flags = MESSAGE_VERSION | MESSAGE_F_REPLY;
        let reply = MessageHeader { request: header.request, flags, size: answer.len() as u32 };
        if socket.write_all(&[reply.as_bytes(), &answer].concat()).is_err() {
            return;
        }
    }
}

/// The header of the next message with its descriptors; `None` at the end of the connection.
fn receive_header(socket: &UnixStream) -> Option<(MessageHeader, Vec<OwnedFd>)> {
    let mut head = [0; size_of::<MessageHeader>()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let slices = &mut [IoSliceMut::new(&mut head)];
    let received = recvmsg(socket, slices, &mut control, RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL);
    received.ok().filter(|received| received.bytes == size_of::<MessageHeader>())?;
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fds = rights.flatten().collect();
    Some((MessageHeader::read_from_bytes(&head).unwrap(), fds))
}

/// The answer of a device of 1 MiB; `None` if the message has none of its own.
fn usual_answer(message: &FakeMessage) -> Option<Vec<u8>> {
    let device = BlkDevice::new(&VolumeInfo::new(1 << 20), 1, "");
    let number = match message.request {
        FrontendRequest::GET_FEATURES => (device.offered() | Features::VHOST_USER_PROTOCOL_FEATURES).bits(),
        FrontendRequest::GET_PROTOCOL_FEATURES => {
            (ProtocolFeatures::MQ | ProtocolFeatures::REPLY_ACK | ProtocolFeatures::CONFIG).bits()
        }
        FrontendRequest::GET_QUEUE_NUM => 1,
        FrontendRequest::GET_VRING_BASE => {
            return Some(message.payload.clone());
        }
        FrontendRequest::GET_CONFIG => {
            let (access, _) = ConfigHeader::read_from_prefix(&message.payload).unwrap();
            let bytes = device.config(access.offset as usize, access.size as usize);
            return Some([access.as_bytes(), &bytes].concat());
        }
        _ => return None,
    };
    Some(number.as_bytes().to_vec())
}
