//! A vhost-user front end with a guest whose driver does what a test says.

use blockmux_wire::virtio::ring::{Desc, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};
use blockmux_wire::virtio::vhost_user::{
    FrontendRequest, MESSAGE_F_NEED_REPLY, MESSAGE_F_REPLY, MESSAGE_VERSION, MemoryRegion, MemoryTableHeader,
    MessageHeader, VringAddr,
};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use zerocopy::{FromBytes, IntoBytes};

/// The connection of a front end.
pub(crate) struct FrontEnd {
    pub(crate) socket: UnixStream,
    /// Flags of all requests, beside the version.
    pub(crate) flags: u32,
}

impl FrontEnd {
    pub(crate) fn connect(path: &Path) -> FrontEnd {
        FrontEnd { socket: UnixStream::connect(path).unwrap(), flags: 0 }
    }

    /// Sends a request.
    pub(crate) fn tell(&self, request: FrontendRequest, payload: &[u8]) {
        self.send(request, 0, payload, None);
    }

    /// Sends a request with a descriptor.
    pub(crate) fn tell_with(&self, request: FrontendRequest, payload: &[u8], fd: impl AsFd) {
        self.send(request, 0, payload, Some(fd.as_fd()));
    }

    /// Sends a request that the back end has to acknowledge, and waits for that.
    pub(crate) fn have_acknowledged(
        &self,
        request: FrontendRequest,
        payload: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) {
        self.send(request, MESSAGE_F_NEED_REPLY, payload, fd);
        assert_eq!(self.receive(request).0, [0; 8], "{request}");
    }

    /// Sends a request, and returns the payload of its reply and its descriptor.
    pub(crate) fn ask(&self, request: FrontendRequest, payload: &[u8]) -> (Vec<u8>, Option<OwnedFd>) {
        self.tell(request, payload);
        self.receive(request)
    }

    /// Sends a request whose reply is a number.
    pub(crate) fn ask_number(&self, request: FrontendRequest) -> u64 {
        u64::read_from_bytes(&self.ask(request, &[]).0).unwrap()
    }

    /// Whether the front end is still connected, and all its messages are handled.
    pub(crate) fn is_served(&self) -> bool {
        self.tell(FrontendRequest::GET_FEATURES, &[]);
        (&self.socket).read_exact(&mut [0; 20]).is_ok()
    }

    fn send(&self, request: FrontendRequest, flags: u32, payload: &[u8], fd: Option<BorrowedFd<'_>>) {
        let message = message(request, MESSAGE_VERSION | self.flags | flags, payload);
        let Some(fd) = fd else { return (&self.socket).write_all(&message).unwrap() };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [fd];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&self.socket, &[IoSlice::new(&message)], &mut control, SendFlags::empty()).unwrap();
    }

    fn receive(&self, request: FrontendRequest) -> (Vec<u8>, Option<OwnedFd>) {
        let mut head = [0; size_of::<MessageHeader>()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(&mut head)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
        let received = recvmsg(&self.socket, slices, &mut control, flags).unwrap();
        assert_eq!(received.bytes, size_of::<MessageHeader>(), "{request}");
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let header = MessageHeader::read_from_bytes(&head).unwrap();
        assert_eq!((header.request, header.flags), (request.0, MESSAGE_VERSION | MESSAGE_F_REPLY));
        let mut payload = vec![0; header.size as usize];
        (&self.socket).read_exact(&mut payload).unwrap();
        (payload, fd)
    }
}

pub(crate) fn message(request: FrontendRequest, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = MessageHeader { request: request.0, flags, size: payload.len() as u32 };
    [header.as_bytes(), payload].concat()
}

/// A table of one region at address 0.
pub(crate) fn memory_table(len: u64) -> Vec<u8> {
    let region = MemoryRegion { guest_addr: 0, size: len, user_addr: 0, mmap_offset: 0 };
    [MemoryTableHeader { num_regions: 1, padding: 0 }.as_bytes(), region.as_bytes()].concat()
}

/// The memory of a guest, with two virtqueues, and places for their requests.
pub(crate) struct Guest {
    pub(crate) memory: File,
}

impl Guest {
    pub(crate) fn new() -> Guest {
        let memory = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(MEMORY).unwrap();
        Guest { memory }
    }

    /// Where a virtqueue is.
    pub(crate) fn place(index: u32) -> VringAddr {
        let start = u64::from(index) * QUEUE_SPACE;
        let (descriptor, available, used) = (start, start + AVAILABLE, start + USED);
        VringAddr { index, flags: 0, descriptor, available, used, log: 0 }
    }

    /// The driver begins anew with a virtqueue.
    pub(crate) fn reset(&self, queue: u32) {
        self.memory.write_all_at(&[0; HEADERS as usize], Guest::place(queue).descriptor).unwrap();
    }

    /// Makes a request of a sector available, number `nth` of its virtqueue, which reads or writes
    /// the sector at its place in the memory.
    pub(crate) fn request(&self, queue: u32, nth: u16, writes: bool, sector: u64) {
        self.request_with(queue, nth, writes, sector, Guest::data(queue, nth));
    }

    /// Makes a request available whose sector is at `data` in the guest's memory.
    pub(crate) fn request_with(&self, queue: u32, nth: u16, writes: bool, sector: u64, data: u64) {
        let (place, at) = (Guest::place(queue), u64::from(nth));
        let (header, status) = (place.descriptor + HEADERS + 16 * at, place.descriptor + STATUSES + at);
        let desc = |addr: u64, len: u32, flags: u16, next: u16| Desc {
            addr: addr.into(),
            len: len.into(),
            flags: flags.into(),
            next: next.into(),
        };
        let (head, written) = (3 * nth, if writes { 0 } else { VIRTQ_DESC_F_WRITE });
        let chain = [
            desc(header, 16, VIRTQ_DESC_F_NEXT, head + 1),
            desc(data, SECTOR as u32, VIRTQ_DESC_F_NEXT | written, head + 2),
            desc(status, 1, VIRTQ_DESC_F_WRITE, 0),
        ];
        let words = [u64::from(writes), sector].map(u64::to_le_bytes).concat();
        self.memory.write_all_at(&words, header).unwrap();
        self.memory.write_all_at(&[0xff], status).unwrap();
        self.memory.write_all_at(chain.as_bytes(), place.descriptor + 16 * u64::from(head)).unwrap();
        self.memory.write_all_at(&head.to_le_bytes(), place.available + 4 + 2 * at).unwrap();
        self.memory.write_all_at(&(nth + 1).to_le_bytes(), place.available + 2).unwrap();
    }

    /// Where the data of a request is.
    pub(crate) fn data(queue: u32, nth: u16) -> u64 {
        Guest::place(queue).descriptor + SECTORS + SECTOR * u64::from(nth)
    }

    /// The status of a request; 255 until it is answered.
    pub(crate) fn status(&self, queue: u32, nth: u16) -> u8 {
        let mut status = [0];
        let at = Guest::place(queue).descriptor + STATUSES + u64::from(nth);
        self.memory.read_exact_at(&mut status, at).unwrap();
        status[0]
    }

    /// Number of answers.
    pub(crate) fn answered(&self, queue: u32) -> u16 {
        self.word(Guest::place(queue).used + 2)
    }

    /// Number of requests that were made available.
    pub(crate) fn available(&self, queue: u32) -> u16 {
        self.word(Guest::place(queue).available + 2)
    }

    fn word(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        self.memory.read_exact_at(&mut bytes, at).unwrap();
        u16::from_le_bytes(bytes)
    }
}

/// Length of a guest's memory in bytes.
pub(crate) const MEMORY: u64 = 2 * QUEUE_SPACE;
/// Number of descriptors of a virtqueue.
pub(crate) const QUEUE: u32 = 16;
/// Length of a sector in bytes.
pub(crate) const SECTOR: u64 = 512;
/// The memory for a virtqueue and its requests, and where its parts are.
const QUEUE_SPACE: u64 = 0x8000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const HEADERS: u64 = 0x4000;
const STATUSES: u64 = 0x5000;
const SECTORS: u64 = 0x6000;
