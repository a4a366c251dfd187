//! The session with one front end: its messages in, virtqueues started, changed and stopped.

use super::message_socket::{MessageReceiver, ReceiveError, ReceivedRequest, send};
use super::shared::DiskShared;
use super::vring::{InUse, Machine, SharedRecords, SharedRegion, Vring, VringPart};
use crate::net::fd_socket::send_with_fds;
use crate::sys::lost_memory::{MappingOwner, MemoryLoss};
use crate::sys::shared_event::SharedEvent;
use crate::sys::shared_memory::{map_shared, new_shared};
use blockmux_proto::virtio::wire::Features;
use blockmux_proto::virtio::wire::vhost_user::{
    BackendRequest, ConfigHeader, FrontendRequest, Inflight, MESSAGE_F_REPLY, MESSAGE_VERSION, MemoryRegion,
    MessageHeader, ProtocolFeatures, VringState,
};
use blockmux_proto::virtio::{
    FrontendMessage, MAX_QUEUES, MAX_REGIONS, MessageError, RingError, inflight_len,
};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;
use tracing::{debug, warn};
use zerocopy::IntoBytes;

/// Why a session ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    /// Nothing was received.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// A message is refused.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A virtqueue makes no sense.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// A message lacks its descriptor, or has too many.
    #[error("{0} has {1} descriptors")]
    Descriptors(FrontendRequest, usize),
    /// The driver has accepted what was not offered.
    #[error("it accepts features {0:#x}, which were not offered")]
    Features(u64),
    /// A virtqueue that takes requests cannot be described anew.
    #[error("{0} is for virtqueue {1}, which takes requests; it must be stopped or disabled first")]
    InUse(FrontendRequest, usize),
    /// A region of memory cannot be used.
    #[error("memory cannot be mapped: {0}")]
    Memory(io::Error),
    /// There are too many regions.
    #[error("it has more than {MAX_REGIONS} memory regions")]
    Regions,
    /// The guest's memory is lost.
    #[error("its guest's memory is lost: the file was made shorter, or there are too few huge pages")]
    MemoryLost,
    /// A queue cannot be served.
    #[error("a virtqueue cannot be served: {0}")]
    Queue(io::Error),
    /// A descriptor cannot be used for notifications.
    #[error("it cannot be notified: {0}")]
    Event(io::Error),
    /// The descriptor for requests of this side is no socket.
    #[error("its descriptor for requests of the back end is no Unix socket")]
    NoSocket,
    /// A reply cannot be sent.
    #[error("a reply cannot be sent: {0}")]
    Send(io::Error),
}

/// The answer to a message.
enum Reply {
    /// None of its own.
    Done,
    /// A payload, and a descriptor with it.
    Payload(Vec<u8>, Option<OwnedFd>),
}

/// A front end that is connected.
pub(super) struct FrontEndSession<'a> {
    shared: &'a DiskShared,
    /// The socket.
    pub(super) socket: Arc<UnixStream>,
    receiver: MessageReceiver,
    accepted: Features,
    protocol: ProtocolFeatures,
    regions: Vec<SharedRegion>,
    records: Option<SharedRecords>,
    vrings: Vec<Vring>,
    backend_requests: Option<UnixStream>,
    /// The size in bytes that the front end has read, or was told to read.
    known_size: Option<u64>,
    /// Whether the guest's memory is lost.
    pub(super) loss: Arc<MemoryLoss>,
}

impl<'a> FrontEndSession<'a> {
    /// A session over a socket, without any virtqueue. `wake` is signalled if the guest's memory is
    /// lost.
    pub(super) fn new(
        shared: &'a DiskShared,
        socket: UnixStream,
        wake: &Arc<OwnedFd>,
    ) -> FrontEndSession<'a> {
        let vrings = std::iter::repeat_with(Vring::default).take(MAX_QUEUES.into()).collect();
        FrontEndSession {
            shared,
            socket: Arc::new(socket),
            receiver: MessageReceiver::default(),
            accepted: Features::empty(),
            protocol: ProtocolFeatures::empty(),
            regions: Vec::new(),
            records: None,
            vrings,
            backend_requests: None,
            known_size: None,
            loss: MemoryLoss::new(wake.clone()),
        }
    }

    /// When a message that has begun has to be complete.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.receiver.deadline
    }

    /// Receives what has come of a message; once it is complete, handles it and replies.
    ///
    /// # Errors
    /// If the session is to end.
    pub(super) fn handle_message(&mut self) -> Result<(), SessionError> {
        let Some(received) = self.receiver.receive(&*self.socket)? else { return Ok(()) };
        let ReceivedRequest { request, wants_reply, payload, fds } = received;
        let wants_reply = wants_reply && self.protocol.contains(ProtocolFeatures::REPLY_ACK);
        debug!("{request} of {} bytes with {} descriptors", payload.len(), fds.len());
        let parsed = FrontendMessage::parse(request, &payload).map_err(SessionError::from);
        match parsed.and_then(|message| self.handle(request, message, fds)) {
            Ok(Reply::Payload(payload, fd)) => self.reply(request, &payload, fd.as_ref())?,
            Ok(Reply::Done) if wants_reply => self.reply(request, &0_u64.to_ne_bytes(), None)?,
            Ok(Reply::Done) => {}
            Err(error) if wants_reply => {
                warn!("{}: the front end's request is refused: {error}", self.shared.path.display());
                self.reply(request, &1_u64.to_ne_bytes(), None)?;
            }
            Err(error) => return Err(error),
        }
        self.tell_size();
        Ok(())
    }

    /// Tells the front end that the configuration has changed, if it may not know the size of the
    /// volume. One that is connected again does not read it, and keeps what an earlier process
    /// has told. Before its first queue starts, QEMU ignores the message.
    pub(super) fn tell_size(&mut self) {
        let size = self.shared.size();
        let Some(socket) = &self.backend_requests else { return };
        if self.known_size == Some(size) || !self.vrings.iter().any(Vring::is_running) {
            return;
        }
        self.known_size = Some(size);
        let header =
            MessageHeader { request: BackendRequest::CONFIG_CHANGE_MSG.0, flags: MESSAGE_VERSION, size: 0 };
        // A front end that does not receive must not block this thread.
        if let Err(error) = send_with_fds(socket, header.as_bytes(), &[], Instant::now()) {
            warn!("{}: the front end cannot be told of the new size: {error}", self.shared.path.display());
        }
    }

    /// Stops all queues: requests in flight are answered.
    pub(super) fn stop(&mut self) {
        for vring in &mut self.vrings {
            vring.stop(self.shared);
        }
    }

    /// Ends all queues of a front end that is gone, without answers.
    pub(super) fn lose(&mut self) {
        for vring in &mut self.vrings {
            vring.lose(self.shared);
        }
    }

    fn reply(
        &self,
        request: FrontendRequest,
        payload: &[u8],
        fd: Option<&OwnedFd>,
    ) -> Result<(), SessionError> {
        let flags = MESSAGE_VERSION | MESSAGE_F_REPLY;
        let header = MessageHeader { request: request.0, flags, size: payload.len() as u32 };
        let bytes = [header.as_bytes(), payload].concat();
        send(&*self.socket, &bytes, fd).map_err(SessionError::Send)
    }

    fn handle(
        &mut self,
        request: FrontendRequest,
        message: FrontendMessage,
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, SessionError> {
        let number = |number: u64| Ok(Reply::Payload(number.to_ne_bytes().to_vec(), None));
        match message {
            FrontendMessage::GetFeatures => return number(self.offered().bits()),
            FrontendMessage::GetProtocolFeatures => return number(PROTOCOL_FEATURES.bits()),
            FrontendMessage::GetQueueNum => return number(MAX_QUEUES.into()),
            FrontendMessage::GetMaxMemSlots => return number(MAX_REGIONS as u64),
            FrontendMessage::SetFeatures(features) => {
                if !self.offered().contains(features) {
                    return Err(SessionError::Features(features.bits()));
                }
                self.accepted = features;
            }
            FrontendMessage::SetProtocolFeatures(features) => {
                if !PROTOCOL_FEATURES.contains(features) {
                    return Err(SessionError::Features(features.bits()));
                }
                self.protocol = features;
            }
            FrontendMessage::SetOwner | FrontendMessage::SetConfig => {}
            FrontendMessage::ResetOwner => self.vrings.iter_mut().for_each(|vring| vring.enable(false)),
            FrontendMessage::ResetDevice => {
                self.stop();
                self.vrings.iter_mut().for_each(|vring| *vring = Vring::default());
            }
            FrontendMessage::SetMemTable(regions) => self.set_memory(request, &regions, &fds)?,
            FrontendMessage::AddMemReg(region) => self.add_region(region, &one(request, fds)?)?,
            FrontendMessage::RemMemReg(region) => self.remove_region(&region)?,
            FrontendMessage::SetBackendReqFd => {
                self.backend_requests = Some(unix_stream(request, fds)?);
            }
            FrontendMessage::GetConfig(access) => return Ok(self.config(access)),
            FrontendMessage::GetInflightFd(wanted) => return self.new_records(wanted),
            FrontendMessage::SetInflightFd(records) => self.set_records(&records, &one(request, fds)?)?,
            message => return self.handle_vring(request, message, fds),
        }
        Ok(Reply::Done)
    }

    fn handle_vring(
        &mut self,
        request: FrontendRequest,
        message: FrontendMessage,
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, SessionError> {
        let unsupported = || SessionError::from(MessageError::Unsupported(request));
        let event = |has_fd: bool, fds: Vec<OwnedFd>| {
            let event = if has_fd { Some(SharedEvent::new(one(request, fds)?)) } else { None };
            event.transpose().map_err(SessionError::Event)
        };
        let shared = self.shared;
        let mut describe = |index: usize, part| {
            let vring = self.vrings.get_mut(index).ok_or_else(unsupported)?;
            vring.describe(part, shared).map_err(|InUse| SessionError::InUse(request, index))?;
            Ok::<_, SessionError>(index)
        };
        let index = match message {
            FrontendMessage::SetVringNum { index, size } => describe(index, VringPart::Size(size))?,
            FrontendMessage::SetVringAddr { index, addr } => describe(index, VringPart::Addr(addr))?,
            FrontendMessage::SetVringBase { index, next_avail } => {
                describe(index, VringPart::Base(next_avail))?
            }
            FrontendMessage::GetVringBase(index) => {
                let next_avail = self.vring(index).ok_or_else(unsupported)?.stop(shared);
                let state = VringState { index: index as u32, num: next_avail.into() };
                return Ok(Reply::Payload(state.as_bytes().to_vec(), None));
            }
            FrontendMessage::SetVringEnable { index, is_enabled } => {
                self.vring(index).ok_or_else(unsupported)?.enable(is_enabled);
                index
            }
            FrontendMessage::SetVringKick(fd) => {
                let kick = event(fd.has_fd, fds)?;
                self.vring(fd.index).ok_or_else(unsupported)?.set_kick(kick);
                fd.index
            }
            FrontendMessage::SetVringCall(fd) => {
                let call = event(fd.has_fd, fds)?.map(|call| call.sender()).transpose();
                let call = call.map_err(SessionError::Event)?;
                self.vring(fd.index).ok_or_else(unsupported)?.set_call(call);
                fd.index
            }
            FrontendMessage::SetVringErr(fd) => {
                let error = event(fd.has_fd, fds)?;
                self.vring(fd.index).ok_or_else(unsupported)?.set_error(error);
                fd.index
            }
            _ => return Err(unsupported()),
        };
        self.start(index)?;
        Ok(Reply::Done)
    }

    fn vring(&mut self, index: usize) -> Option<&mut Vring> {
        self.vrings.get_mut(index)
    }

    /// Serves a virtqueue if it was described completely.
    fn start(&mut self, index: usize) -> Result<(), SessionError> {
        let machine = Machine {
            shared: self.shared,
            connection: &self.socket,
            device: self.shared.device().state(self.accepted),
            regions: &self.regions,
            records: self.records.as_ref(),
            is_enabled: !self.accepted.contains(Features::VHOST_USER_PROTOCOL_FEATURES),
        };
        let Some(vring) = self.vrings.get_mut(index) else { return Ok(()) };
        vring.start(index, &machine).map_err(SessionError::Queue)
    }

    fn offered(&self) -> Features {
        self.shared.device().offered() | Features::VHOST_USER_PROTOCOL_FEATURES
    }

    fn set_memory(
        &mut self,
        request: FrontendRequest,
        regions: &[MemoryRegion],
        fds: &[OwnedFd],
    ) -> Result<(), SessionError> {
        if regions.len() != fds.len() {
            return Err(SessionError::Descriptors(request, fds.len()));
        }
        let mapped = regions.iter().zip(fds).map(|(region, file)| self.map(region, file));
        self.regions = mapped.collect::<Result<_, _>>()?;
        self.apply_memory()
    }

    fn add_region(&mut self, region: MemoryRegion, file: &OwnedFd) -> Result<(), SessionError> {
        if self.regions.len() >= MAX_REGIONS {
            return Err(SessionError::Regions);
        }
        self.regions.push(self.map(&region, file)?);
        self.apply_memory()
    }

    fn remove_region(&mut self, region: &MemoryRegion) -> Result<(), SessionError> {
        let before = self.regions.len();
        self.regions.retain(|found| {
            let is_same = (found.guest_addr, found.user_addr) == (region.guest_addr, region.user_addr);
            !is_same || found.pages.len() as u64 != region.size
        });
        if self.regions.len() == before {
            return Err(SessionError::Memory(io::ErrorKind::NotFound.into()));
        }
        self.apply_memory()
    }

    fn apply_memory(&self) -> Result<(), SessionError> {
        Ok(self.vrings.iter().try_for_each(|vring| vring.set_memory(&self.regions))?)
    }

    fn config(&mut self, access: ConfigHeader) -> Reply {
        // The size is at the beginning.
        if access.offset == 0 && access.size as usize >= size_of::<u64>() {
            self.known_size = Some(self.shared.size());
        }
        let bytes = self.shared.device().config(access.offset as usize, access.size as usize);
        Reply::Payload([access.as_bytes(), &bytes].concat(), None)
    }

    /// New memory for the records of requests in flight.
    fn new_records(&mut self, wanted: Inflight) -> Result<Reply, SessionError> {
        let len = inflight_len(&wanted).max(1);
        let (file, pages) = new_shared("blockmux-inflight", len).map_err(SessionError::Memory)?;
        self.records = Some(SharedRecords { pages, queue_size: wanted.queue_size });
        let records = Inflight { mmap_size: len as u64, mmap_offset: 0, ..wanted };
        Ok(Reply::Payload(records.as_bytes().to_vec(), Some(file)))
    }

    fn set_records(&mut self, records: &Inflight, file: &OwnedFd) -> Result<(), SessionError> {
        let pages = map_shared(file.as_fd(), records.mmap_offset, records.mmap_size, Some(self.owner()));
        let pages = pages.map_err(SessionError::Memory)?;
        self.records = Some(SharedRecords { pages, queue_size: records.queue_size });
        Ok(())
    }

    fn map(&self, region: &MemoryRegion, file: &OwnedFd) -> Result<SharedRegion, SessionError> {
        let pages = map_shared(file.as_fd(), region.mmap_offset, region.size, Some(self.owner()));
        let pages = pages.map_err(SessionError::Memory)?;
        Ok(SharedRegion { guest_addr: region.guest_addr, user_addr: region.user_addr, pages })
    }

    fn owner(&self) -> MappingOwner<'_> {
        MappingOwner { loss: &self.loss, quota: &self.shared.mappings }
    }
}

/// The only descriptor of a message.
fn one(request: FrontendRequest, fds: Vec<OwnedFd>) -> Result<OwnedFd, SessionError> {
    let [fd] = <[OwnedFd; 1]>::try_from(fds).map_err(|fds| SessionError::Descriptors(request, fds.len()))?;
    Ok(fd)
}

/// The only descriptor of a message, which has to be a socket.
fn unix_stream(request: FrontendRequest, fds: Vec<OwnedFd>) -> Result<UnixStream, SessionError> {
    let fd = one(request, fds)?;
    let is_socket =
        socket_domain(&fd) == Ok(AddressFamily::UNIX) && socket_type(&fd) == Ok(SocketType::STREAM);
    if is_socket { Ok(fd.into()) } else { Err(SessionError::NoSocket) }
}

const PROTOCOL_FEATURES: ProtocolFeatures = ProtocolFeatures::MQ
    .union(ProtocolFeatures::REPLY_ACK)
    .union(ProtocolFeatures::BACKEND_REQ)
    .union(ProtocolFeatures::CONFIG)
    .union(ProtocolFeatures::INFLIGHT_SHMFD)
    .union(ProtocolFeatures::RESET_DEVICE)
    .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS);
