//! The owner of a connection's queues: posts the work of records, and makes records of what has
//! happened.

use crate::carrier::connection::LocalObstacle;
use crate::fabric::byte_queue::ByteQueue;
use blockmux_proto::driver::outbox::{Outbox, OutboxPiece};
use blockmux_rdma::device::records::{
    DeviceEvent, DeviceFailure, DeviceQueues, DeviceRemote, WORK_LEN, WorkRecord, WorkVerb,
};
use blockmux_verbs::connection::{
    Connection, ConnectionEvent, ConnectionOffer, ConnectionRequest, IncomingConnection,
};
use blockmux_verbs::error::VerbsError;
use blockmux_verbs::queue_pair::{
    Completion, QueuePair, QueueSizes, RemoteMemory, WindowAccess, WorkFailure,
};
use blockmux_verbs::survey::obstacle_at;
use blockmux_volume::Seg;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use tracing::warn;

/// A connection with its queues, once it has them.
pub(super) struct ConnectionQueues {
    phase: Phase,
    /// Records for the session.
    pub(super) events: ByteQueue,
    /// RDMA Reads that each side may have in flight, as requested.
    reads: DeviceReads,
    /// The connection has ended, and its queues are destroyed.
    pub(super) has_ended: bool,
    /// Why, if something has failed.
    failure: Option<io::Error>,
    /// Looks for completions since the descriptor of events was read last.
    looks: u32,
    /// Memory of the record that is being posted.
    memory: Vec<Seg>,
    address: Option<SocketAddr>,
}

enum Phase {
    /// The address of the peer is being resolved.
    Resolving(Connection),
    /// Active: the device is known. Passive: the request has arrived.
    Known(Connection),
    Open(Box<QueuePair>),
    Over,
}

#[derive(Clone, Copy, Default)]
struct DeviceReads {
    own: u32,
    peers: u32,
}

impl ConnectionQueues {
    /// Starts to connect to an address.
    pub(super) fn connect(address: SocketAddr) -> io::Result<ConnectionQueues> {
        let connection = Connection::resolve(address).map_err(explained)?;
        let many = DeviceReads { own: u32::from(u8::MAX), peers: u32::from(u8::MAX) };
        Ok(ConnectionQueues::new(Phase::Resolving(connection), many, None))
    }

    /// Takes a connection that a peer requests, and reports the request.
    pub(super) fn accept(incoming: IncomingConnection) -> ConnectionQueues {
        let (connection, request) = incoming.open();
        let reads = DeviceReads { own: request.reads.into(), peers: request.peer_reads.into() };
        let address = connection.local_address();
        // A device that cannot be used is an error of `open`.
        let is_confined = QueuePair::is_confined(&connection).unwrap_or(false);
        let mut queues = ConnectionQueues::new(Phase::Known(connection), reads, address);
        let event = DeviceEvent::Requested { reads: reads.own, is_confined };
        queues.events.push_event(event, &[&request.private_data]);
        queues
    }

    fn new(phase: Phase, reads: DeviceReads, address: Option<SocketAddr>) -> ConnectionQueues {
        ConnectionQueues {
            phase,
            events: ByteQueue::default(),
            reads,
            has_ended: false,
            failure: None,
            looks: 0,
            memory: Vec::new(),
            address,
        }
    }

    /// Passive: the address of this side.
    pub(super) fn local_address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Whether the device is known, and work can be posted.
    pub(super) fn is_known(&self) -> bool {
        !matches!(self.phase, Phase::Resolving(_))
    }

    /// Ends the connection. After that the device does not touch its memory.
    pub(super) fn end(&mut self) {
        self.phase = Phase::Over;
        self.has_ended = true;
    }

    /// Makes records of what has happened. Without `looks_at_all`, events of the connection are
    /// looked for only now and then: that takes a system call.
    ///
    /// # Errors
    /// Why the connection has ended, with each call.
    pub(super) fn look(&mut self, looks_at_all: bool) -> io::Result<()> {
        if !self.has_ended
            && let Err(error) = self.try_look(looks_at_all)
        {
            self.fail(error);
        }
        match &self.failure {
            Some(error) => Err(io::Error::new(error.kind(), error.to_string())),
            None => Ok(()),
        }
    }

    fn fail(&mut self, error: io::Error) {
        self.end();
        self.failure = Some(error);
    }

    fn try_look(&mut self, looks_at_all: bool) -> io::Result<()> {
        self.looks = self.looks.wrapping_add(1);
        let has_any = self.take_completions()?;
        let is_due = looks_at_all || (!has_any && self.looks.is_multiple_of(LOOKS_PER_EVENT));
        if is_due || !matches!(self.phase, Phase::Open(_)) {
            self.take_events()?;
        }
        Ok(())
    }

    /// Has the descriptors become readable when something happens, and looks once more.
    pub(super) fn notify(&mut self) -> io::Result<()> {
        if let Phase::Open(queue_pair) = &mut self.phase
            && let Err(error) = queue_pair.notify()
        {
            self.fail(explained(error));
        }
        self.look(true)
    }

    /// The queue pair, once it is made and until it is destroyed.
    pub(super) fn queue_pair(&self) -> Option<&QueuePair> {
        match &self.phase {
            Phase::Open(queue_pair) => Some(queue_pair),
            Phase::Resolving(_) | Phase::Known(_) | Phase::Over => None,
        }
    }

    /// The descriptors of events and of completions.
    pub(super) fn descriptors(&self) -> (Option<BorrowedFd<'_>>, Option<BorrowedFd<'_>>) {
        match &self.phase {
            Phase::Resolving(connection) | Phase::Known(connection) => (Some(connection.as_fd()), None),
            Phase::Open(queue_pair) => {
                (Some(queue_pair.connection().as_fd()), Some(queue_pair.completion_fd()))
            }
            Phase::Over => (None, None),
        }
    }

    fn take_completions(&mut self) -> io::Result<bool> {
        let ConnectionQueues { phase: Phase::Open(queue_pair), events, .. } = self else { return Ok(false) };
        let mut is_broken = false;
        let polled = queue_pair.poll(|completion| match completion {
            Completion::Done { work, result } => {
                is_broken |= result.is_err();
                let result = result.map_err(DeviceFailure::from_status);
                events.push_event(DeviceEvent::Done { id: work, result }, &[]);
            }
            Completion::Received { message, invalidated } => {
                events.push_message(DeviceEvent::Received { invalidated }, message);
            }
            Completion::Closed { window, key } => events.push_event(DeviceEvent::Closed { window, key }, &[]),
            Completion::Broken(failure) => {
                is_broken = true;
                events.push_event(DeviceEvent::Broken(DeviceFailure::from_status(failure)), &[]);
            }
        });
        let has_any = polled.map_err(explained)?;
        if is_broken {
            self.end();
        }
        Ok(has_any)
    }

    fn take_events(&mut self) -> io::Result<()> {
        loop {
            let connection = match &self.phase {
                Phase::Resolving(connection) | Phase::Known(connection) => connection,
                Phase::Open(queue_pair) => queue_pair.connection(),
                Phase::Over => return Ok(()),
            };
            let Some(event) = connection.next_event().map_err(explained)? else { return Ok(()) };
            self.on_connection_event(event)?;
        }
    }

    fn on_connection_event(&mut self, event: ConnectionEvent) -> io::Result<()> {
        match event {
            ConnectionEvent::RouteResolved => {
                self.phase = match std::mem::replace(&mut self.phase, Phase::Over) {
                    Phase::Resolving(connection) => {
                        let is_confined = QueuePair::is_confined(&connection).map_err(explained)?;
                        self.events.push_event(DeviceEvent::Resolved { is_confined }, &[]);
                        Phase::Known(connection)
                    }
                    other => other,
                };
            }
            ConnectionEvent::Established(accepted) => self.on_established(&accepted),
            ConnectionEvent::Rejected { private_data, is_by_program: true } => {
                self.events.push_event(DeviceEvent::Refused, &[&private_data]);
                self.end();
            }
            ConnectionEvent::Rejected { is_by_program: false, .. } => {
                self.end();
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            ConnectionEvent::Disconnected => {
                // What the peer has sent before has arrived.
                self.take_completions()?;
                self.end();
            }
            ConnectionEvent::DeviceRemoved => {
                self.end();
                return Err(VerbsError::Removed.into());
            }
            ConnectionEvent::Failed { event, error } => {
                self.end();
                return Err(io::Error::new(error.kind(), format!("{event}: {error}")));
            }
        }
        Ok(())
    }

    fn on_established(&mut self, accepted: &ConnectionRequest) {
        let Phase::Open(queue_pair) = &self.phase else { return };
        let keys: Vec<u8> = queue_pair.window_keys().flat_map(u32::to_be_bytes).collect();
        let windows = u32::try_from(keys.len() / 4).unwrap_or(0);
        let event = DeviceEvent::Connected { windows, reads: self.reads.own };
        self.events.push_event(event, &[&keys, &accepted.private_data]);
    }

    /// Posts all records of an outbox.
    pub(super) fn post_all(&mut self, outbox: &mut Outbox) -> io::Result<usize> {
        let len = outbox.len();
        let mut posted = Ok(());
        let mut pieces = outbox.pieces();
        let mut heads: &[u8] = &[];
        loop {
            if heads.is_empty() {
                match pieces.next() {
                    Some(OutboxPiece::Head(bytes)) => heads = bytes,
                    Some(OutboxPiece::Payload(_)) => posted = Err(io::Error::other("memory without work")),
                    None => break,
                }
            }
            let (record, rest) = heads.split_at_checked(WORK_LEN).unwrap_or_default();
            let Some(record) = WorkRecord::from_bytes(record) else {
                posted = posted.and(Err(io::Error::other("work that is no record")));
                break;
            };
            let (bytes, rest) = rest.split_at_checked(record.bytes.into()).unwrap_or_default();
            heads = rest;
            self.memory.clear();
            let mut left = record.memory as usize;
            while left > 0
                && let Some(OutboxPiece::Payload(seg)) = pieces.next()
            {
                left = left.saturating_sub(seg.len());
                self.memory.push(seg.clone());
            }
            if let Err(error) = self.post(&record, bytes) {
                if matches!(error, VerbsError::Unsupported(_)) {
                    warn!("a connection over an RDMA device has ended: {error}");
                }
                posted = Err(explained(error));
                break;
            }
        }
        drop(pieces);
        self.memory.clear();
        outbox.consume(len);
        if posted.is_err() {
            self.end();
        }
        posted.map(|()| len)
    }

    fn post(&mut self, record: &WorkRecord, bytes: &[u8]) -> Result<(), VerbsError> {
        match record.verb {
            WorkVerb::Connect(sizes) => return self.open(sizes, bytes, Connection::connect),
            WorkVerb::Accept(sizes) => return self.open(sizes, bytes, Connection::accept),
            WorkVerb::Reject => {
                let rejected = match &self.phase {
                    Phase::Known(connection) => connection.reject(bytes),
                    _ => Ok(()),
                };
                self.end();
                return rejected;
            }
            _ => {}
        }
        // Work behind the end was flushed by the session's queue pair.
        let ConnectionQueues { phase: Phase::Open(queue_pair), memory, events, .. } = self else {
            return Ok(());
        };
        match record.verb {
            WorkVerb::Connect(_) | WorkVerb::Accept(_) | WorkVerb::Reject => Ok(()),
            WorkVerb::Receive(count) => queue_pair.receive(count),
            WorkVerb::Send { invalidate, is_solicited } => {
                queue_pair.send(record.id, bytes, memory, invalidate, is_solicited)
            }
            WorkVerb::Read(remote) => queue_pair.read(record.id, memory, remote_memory(remote)),
            WorkVerb::Write(remote) => queue_pair.write(record.id, memory, remote_memory(remote)),
            WorkVerb::Bind { window, key, is_write } => {
                let access = if is_write { WindowAccess::Write } else { WindowAccess::Read };
                let whole = memory.first().cloned().unwrap_or_else(|| Seg::from_slice(&[]));
                queue_pair.bind(window, key, &whole, access)
            }
            WorkVerb::Close { window } => queue_pair.close(window),
            WorkVerb::Expose { number } => {
                let Some(whole) = memory.first() else { return Ok(()) };
                let key = queue_pair.expose(number, whole)?;
                events.push_event(DeviceEvent::Exposed { number, key }, &[]);
                Ok(())
            }
            WorkVerb::Conceal { number } => {
                queue_pair.conceal(number);
                Ok(())
            }
            WorkVerb::Disconnect => queue_pair.connection().disconnect(),
        }
    }

    /// Makes the queue pair, and requests or accepts the connection.
    fn open(
        &mut self,
        sizes: DeviceQueues,
        private_data: &[u8],
        offer: impl FnOnce(&Connection, ConnectionOffer<'_>) -> Result<(), VerbsError>,
    ) -> Result<(), VerbsError> {
        let connection = match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Known(connection) => connection,
            other => {
                self.phase = other;
                return Ok(());
            }
        };
        let DeviceQueues { sends, receives, receive_len, windows, reads } = sizes;
        let queue_pair = QueuePair::new(connection, QueueSizes { sends, receives, receive_len, windows })?;
        let attributes = queue_pair.domain().attributes();
        let number = |count: u32| u8::try_from(count).unwrap_or(u8::MAX);
        self.reads.own = reads.min(self.reads.own).min(attributes.reads);
        let peers = reads.min(self.reads.peers).min(attributes.peer_reads);
        let offered =
            ConnectionOffer { private_data, reads: number(self.reads.own), peer_reads: number(peers) };
        let result = offer(queue_pair.connection(), offered);
        self.phase = Phase::Open(Box::new(queue_pair));
        result
    }
}

fn remote_memory(remote: DeviceRemote) -> RemoteMemory {
    RemoteMemory { address: remote.address, key: remote.key }
}

/// A failure in the terms of records.
trait FromStatus {
    fn from_status(failure: WorkFailure) -> DeviceFailure;
}

impl FromStatus for DeviceFailure {
    fn from_status(failure: WorkFailure) -> DeviceFailure {
        match failure {
            WorkFailure::Local => DeviceFailure::Local,
            WorkFailure::TooLong => DeviceFailure::TooLong,
            WorkFailure::RemoteAccess => DeviceFailure::RemoteAccess,
            WorkFailure::NoReceive => DeviceFailure::NoReceive,
            WorkFailure::Unreachable | WorkFailure::Flushed | WorkFailure::Other(_) => DeviceFailure::Flushed,
        }
    }
}

/// An error of rdma-core, with what to do where that is known.
pub(super) fn explained(error: VerbsError) -> io::Error {
    let advice = match &error {
        VerbsError::Library(library) => library.to_string(),
        VerbsError::Call { call: "rdma_create_event_channel", .. } => {
            let obstacle = obstacle_at(Ipv4Addr::UNSPECIFIED.into());
            obstacle
                .unwrap_or_else(|| "load the module with `modprobe rdma_ucm`; see `blockmux rdma`".to_owned())
        }
        VerbsError::Call { call: "rdma_bind_addr" | "rdma_resolve_addr", error }
            if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EADDRNOTAVAIL)) =>
        {
            "no RDMA device has this address; see `blockmux rdma`".to_owned()
        }
        VerbsError::Call { call: "ibv_post_send" | "ibv_post_recv", error }
            if error.raw_os_error() == Some(libc::EACCES) =>
        {
            "rxe takes work only with the privileges with which it was opened; start the daemon with \
             --keep-privileges"
                .to_owned()
        }
        _ => return error.into(),
    };
    LocalObstacle::error(io::Error::from(error).kind(), advice)
}

/// Looks without completions for each that asks the kernel for events of the connection.
const LOOKS_PER_EVENT: u32 = 256;
