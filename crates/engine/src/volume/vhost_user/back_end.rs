//! The connection to a back end: what it is, and how its virtqueues are started.

use crate::net::fd_socket::{receive_exactly, send_with_fds};
use crate::remote::format_duration;
use blockmux_proto::virtio::wire::Features;
use blockmux_proto::virtio::wire::blk::Config;
use blockmux_proto::virtio::wire::vhost_user::{
    BackendRequest, ConfigHeader, FrontendRequest, MESSAGE_F_NEED_REPLY, MESSAGE_F_REPLY, MESSAGE_VERSION,
    MemoryRegion, MemoryTableHeader, MessageHeader, ProtocolFeatures, VringState,
};
use blockmux_proto::virtio::{BlkDriver, MAX_PAYLOAD, MAX_QUEUES, RemoteDisk, RemoteDiskError};
use socket2::{Domain, SockAddr, Socket, Type};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// Why a back end cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BackEndError {
    /// It cannot be reached.
    #[error("cannot connect: {0}; is the back end running?")]
    Connect(io::Error),
    /// It does not answer.
    #[error(
        "does not answer; another front end may be connected, disconnect that one first, or the back end hangs"
    )]
    NoAnswer,
    /// It has not answered a request of a queue in time.
    #[error("the back end has not answered a request for {}", format_duration(*.0))]
    Overdue(Duration),
    /// The connection has failed.
    #[error("the connection is lost: {0}")]
    Lost(io::Error),
    /// Its device cannot be used.
    #[error(transparent)]
    Disk(#[from] RemoteDiskError),
    /// It has no configuration space.
    #[error("is no block device (no VHOST_USER_PROTOCOL_F_CONFIG)")]
    NoConfig,
    /// It has sent another message than a reply.
    #[error("has answered {0} with another message")]
    Reply(FrontendRequest),
    /// It has refused a request.
    #[error("refuses {0}")]
    Refused(FrontendRequest),
    /// There is no memory for its virtqueues.
    #[error("no memory can be shared: {0}")]
    Memory(io::Error),
    /// It is another device than before.
    #[error("is another device than before: {0}")]
    Changed(String),
}

/// A connection to a back end.
pub(super) struct BackEnd {
    /// The socket, which is readable when the back end has disconnected.
    pub(super) socket: UnixStream,
    /// The time in which the back end takes a message, and answers it.
    answer_time: Duration,
    offered: Features,
    protocol: ProtocolFeatures,
    /// The device.
    pub(super) disk: RemoteDisk,
    /// Largest number of virtqueues.
    pub(super) queues: usize,
    /// Where the back end sends requests.
    pub(super) requests: Option<UnixStream>,
}

impl BackEnd {
    /// Connects to the back end that listens at `path`. A message has as long as a request, within
    /// limits.
    ///
    /// # Errors
    /// If it cannot be used.
    pub(super) fn connect(path: &Path, request_timeout: Option<Duration>) -> Result<BackEnd, BackEndError> {
        let answer_time = request_timeout.unwrap_or(ANSWER_TIME).clamp(MIN_ANSWER_TIME, ANSWER_TIME);
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(BackEndError::Connect)?;
        // It holds for connecting, which waits if the back end accepts nobody.
        socket.set_write_timeout(Some(answer_time)).map_err(BackEndError::Lost)?;
        let address = SockAddr::unix(path).map_err(BackEndError::Connect)?;
        socket.connect(&address).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => BackEndError::NoAnswer,
            _ => BackEndError::Connect(error),
        })?;
        let socket = UnixStream::from(OwnedFd::from(socket));
        let disk = RemoteDisk::new(Features::VERSION_1, Config::default().as_bytes())?;
        let mut back_end = BackEnd {
            socket,
            answer_time,
            offered: Features::empty(),
            protocol: ProtocolFeatures::empty(),
            disk,
            queues: 1,
            requests: None,
        };
        back_end.negotiate()?;
        Ok(back_end)
    }

    fn negotiate(&mut self) -> Result<(), BackEndError> {
        self.offered = Features::from_bits_retain(self.number(FrontendRequest::GET_FEATURES)?);
        if !self.offered.contains(Features::VHOST_USER_PROTOCOL_FEATURES) {
            return Err(BackEndError::NoConfig);
        }
        let found = self.number(FrontendRequest::GET_PROTOCOL_FEATURES)?;
        let protocol = ProtocolFeatures::from_bits_retain(found) & PROTOCOL_FEATURES;
        if !protocol.contains(ProtocolFeatures::CONFIG) {
            return Err(BackEndError::NoConfig);
        }
        self.tell(FrontendRequest::SET_PROTOCOL_FEATURES, protocol.bits().as_bytes(), &[])?;
        self.protocol = protocol;
        if protocol.contains(ProtocolFeatures::MQ) {
            let queues = self.number(FrontendRequest::GET_QUEUE_NUM)?;
            self.queues = usize::try_from(queues).unwrap_or(1).clamp(1, MAX_QUEUES.into());
        }
        if protocol.contains(ProtocolFeatures::BACKEND_REQ) {
            let (own, other) = UnixStream::pair().map_err(BackEndError::Memory)?;
            self.tell(FrontendRequest::SET_BACKEND_REQ_FD, &[], &[other.as_fd()])?;
            self.requests = Some(own);
        }
        self.tell(FrontendRequest::SET_OWNER, &[], &[])?;
        self.read_config()?;
        self.tell(FrontendRequest::SET_FEATURES, self.disk.accepted.bits().as_bytes(), &[])
    }

    /// Reads the configuration again, which may have changed.
    ///
    /// # Errors
    /// If the device can no longer be used.
    pub(super) fn read_config(&mut self) -> Result<(), BackEndError> {
        let size = size_of::<Config>() as u32;
        let asked = ConfigHeader { offset: 0, size, flags: 0 };
        let payload = [asked.as_bytes(), Config::default().as_bytes()].concat();
        let answer = self.ask(FrontendRequest::GET_CONFIG, &payload)?;
        let config = answer.get(size_of::<ConfigHeader>()..).unwrap_or_default();
        self.disk = RemoteDisk::new(self.offered, config)?;
        Ok(())
    }

    /// Shares memory, which has the address [`MEMORY_ADDR`].
    ///
    /// # Errors
    /// If the back end does not take it.
    pub(super) fn share(&self, file: &OwnedFd, len: usize) -> Result<(), BackEndError> {
        let region = MemoryRegion {
            guest_addr: MEMORY_ADDR,
            size: len as u64,
            user_addr: MEMORY_ADDR,
            mmap_offset: 0,
        };
        let header = MemoryTableHeader { num_regions: 1, padding: 0 };
        let payload = [header.as_bytes(), region.as_bytes()].concat();
        self.tell(FrontendRequest::SET_MEM_TABLE, &payload, &[file.as_fd()])
    }

    /// Starts the virtqueue number `index`, which is at `addr`.
    ///
    /// # Errors
    /// If the back end does not take it.
    pub(super) fn start_queue(
        &self,
        index: usize,
        addr: u64,
        kick: &OwnedFd,
        call: &OwnedFd,
    ) -> Result<(), BackEndError> {
        let index = index as u32;
        let state = |num: u32| VringState { index, num };
        self.tell(FrontendRequest::SET_VRING_NUM, state(BlkDriver::RING_SIZE.into()).as_bytes(), &[])?;
        self.tell(FrontendRequest::SET_VRING_BASE, state(0).as_bytes(), &[])?;
        let place = BlkDriver::vring_addr(index, addr);
        self.tell(FrontendRequest::SET_VRING_ADDR, place.as_bytes(), &[])?;
        let event = u64::from(index);
        self.tell(FrontendRequest::SET_VRING_CALL, event.as_bytes(), &[call.as_fd()])?;
        self.tell(FrontendRequest::SET_VRING_KICK, event.as_bytes(), &[kick.as_fd()])?;
        self.tell(FrontendRequest::SET_VRING_ENABLE, state(1).as_bytes(), &[])
    }

    /// Stops the virtqueue number `index`.
    ///
    /// # Errors
    /// If the back end does not answer.
    pub(super) fn stop_queue(&self, index: usize) -> Result<(), BackEndError> {
        let state = VringState { index: index as u32, num: 0 };
        self.ask(FrontendRequest::GET_VRING_BASE, state.as_bytes()).map(drop)
    }

    /// Handles a request of the back end; returns whether the configuration may have changed.
    ///
    /// # Errors
    /// If the back end has disconnected.
    pub(super) fn handle_request(&self) -> Result<bool, BackEndError> {
        let Some(socket) = &self.requests else { return Ok(false) };
        let mut head = [0; size_of::<MessageHeader>()];
        let (mut fds, deadline) = (Vec::new(), self.deadline());
        receive_exactly(socket, &mut head, &mut fds, deadline).map_err(BackEndError::Lost)?;
        let header = MessageHeader::read_from_bytes(&head).unwrap_or_default();
        let mut payload = vec![0; (header.size as usize).min(MAX_PAYLOAD)];
        receive_exactly(socket, &mut payload, &mut fds, deadline).map_err(BackEndError::Lost)?;
        if header.flags & MESSAGE_F_NEED_REPLY != 0 {
            let reply = MessageHeader { flags: MESSAGE_VERSION | MESSAGE_F_REPLY, size: 8, ..header };
            let reply = [reply.as_bytes(), 0_u64.as_bytes()].concat();
            send_with_fds(socket, &reply, &[], deadline).map_err(BackEndError::Lost)?;
        }
        Ok(BackendRequest(header.request) == BackendRequest::CONFIG_CHANGE_MSG)
    }

    /// Sends a request that has no reply of its own, and waits for its acknowledgement if the back
    /// end supports that.
    fn tell(
        &self,
        request: FrontendRequest,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), BackEndError> {
        let is_acknowledged = self.protocol.contains(ProtocolFeatures::REPLY_ACK);
        self.send(request, payload, fds, is_acknowledged)?;
        if is_acknowledged && self.receive(request)?.iter().any(|byte| *byte != 0) {
            return Err(BackEndError::Refused(request));
        }
        Ok(())
    }

    /// Sends a request and returns the payload of its reply.
    fn ask(&self, request: FrontendRequest, payload: &[u8]) -> Result<Vec<u8>, BackEndError> {
        self.send(request, payload, &[], false)?;
        self.receive(request)
    }

    fn number(&self, request: FrontendRequest) -> Result<u64, BackEndError> {
        let answer = self.ask(request, &[])?;
        u64::read_from_bytes(&answer).map_err(|_| BackEndError::Reply(request))
    }

    fn send(
        &self,
        request: FrontendRequest,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        wants_reply: bool,
    ) -> Result<(), BackEndError> {
        let flags = MESSAGE_VERSION | if wants_reply { MESSAGE_F_NEED_REPLY } else { 0 };
        let header = MessageHeader { request: request.0, flags, size: payload.len() as u32 };
        let message = [header.as_bytes(), payload].concat();
        send_with_fds(&self.socket, &message, fds, self.deadline()).map_err(BackEndError::Lost)
    }

    fn receive(&self, request: FrontendRequest) -> Result<Vec<u8>, BackEndError> {
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::TimedOut => BackEndError::NoAnswer,
            _ => BackEndError::Lost(error),
        };
        let (mut head, deadline) = ([0; size_of::<MessageHeader>()], self.deadline());
        receive_exactly(&self.socket, &mut head, &mut Vec::new(), deadline).map_err(failed)?;
        let header = MessageHeader::read_from_bytes(&head).unwrap_or_default();
        let is_reply = header.request == request.0 && header.flags & MESSAGE_F_REPLY != 0;
        if !is_reply || header.size as usize > MAX_PAYLOAD {
            return Err(BackEndError::Reply(request));
        }
        let mut payload = vec![0; header.size as usize];
        receive_exactly(&self.socket, &mut payload, &mut Vec::new(), deadline).map_err(failed)?;
        Ok(payload)
    }

    /// When a message that begins now has to be complete.
    fn deadline(&self) -> Instant {
        Instant::now() + self.answer_time
    }
}

const PROTOCOL_FEATURES: ProtocolFeatures = ProtocolFeatures::MQ
    .union(ProtocolFeatures::REPLY_ACK)
    .union(ProtocolFeatures::BACKEND_REQ)
    .union(ProtocolFeatures::CONFIG);
/// The address of the shared memory, the same for both sides: any but 0.
pub(super) const MEMORY_ADDR: u64 = 1 << 32;
/// The time in which a back end answers a message.
const ANSWER_TIME: Duration = Duration::from_secs(10);
const MIN_ANSWER_TIME: Duration = Duration::from_secs(1);
