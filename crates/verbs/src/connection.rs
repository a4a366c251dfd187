//! Connections of librdmacm: listeners, identifiers, and the events by which they are made and end.
//!
//! ```text
//!   connect ──▶ ADDR_RESOLVED ──▶ ROUTE_RESOLVED ──▶ ESTABLISHED ──▶ DISCONNECTED
//!   Listener ──▶ CONNECT_REQUEST = IncomingConnection ──▶ ESTABLISHED ──▶ DISCONNECTED
//! ```
//! Each connection has an event channel of its own, so its file descriptor wakes exactly one task,
//! and a connection that a listener got can go to another thread. No call here blocks: descriptors
//! are non-blocking, and events are acknowledged once they are copied, because an identifier that
//! is destroyed waits for its unacknowledged events.
#![expect(unsafe_code, reason = "calls librdmacm, and owns what it allocates")]

use crate::abi::*;
use crate::error::VerbsError;
use crate::library::Library;
use rustix::fs::OFlags;
use std::ffi::c_int;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null, null_mut};

/// A listener, on all devices that have its address.
pub struct Listener {
    id: ConnectionId,
}

impl Listener {
    /// Listens at an address. A port of 0 chooses a free one.
    ///
    /// # Errors
    /// If rdma-core is not installed, no device has the address, or the port is in use.
    pub fn bind(address: SocketAddr) -> Result<Listener, VerbsError> {
        let id = ConnectionId::new(EventChannel::new()?)?;
        id.bind(address)?;
        // SAFETY: the identifier is bound.
        let failed = unsafe { (id.library.cm.rdma_listen)(id.raw(), BACKLOG) };
        VerbsError::check_errno("rdma_listen", failed)?;
        Ok(Listener { id })
    }

    /// Takes the next connection request; `None` if there is none now. One that is dropped is
    /// rejected.
    ///
    /// # Errors
    /// If the system has no room for another connection, and [`VerbsError::Removed`] once, after
    /// which nothing listens here now.
    pub fn accept(&self) -> Result<Option<IncomingConnection>, VerbsError> {
        while let Some(event) = self.id.channel.next()? {
            if event.kind == RDMA_CM_EVENT_DEVICE_REMOVAL {
                return Err(VerbsError::Removed);
            }
            if event.kind != RDMA_CM_EVENT_CONNECT_REQUEST {
                continue;
            }
            let Some(id) = NonNull::new(event.id) else { continue };
            // The new identifier reports to this listener's channel until it has its own.
            let id = RawId { library: self.id.library, id };
            let channel = EventChannel::new()?;
            // SAFETY: both are valid, and no event of the identifier is unacknowledged.
            let failed = unsafe { (id.library.cm.rdma_migrate_id)(id.id.as_ptr(), channel.channel.as_ptr()) };
            VerbsError::check_errno("rdma_migrate_id", failed)?;
            let id = ConnectionId { raw: id, library: self.id.library, channel };
            return Ok(Some(IncomingConnection { id, request: event.into_request() }));
        }
        Ok(None)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.id.channel.as_fd()
    }
}

/// A connection that a peer requests. It can go to another thread.
pub struct IncomingConnection {
    id: ConnectionId,
    request: ConnectionRequest,
}

impl IncomingConnection {
    /// The request, and the connection to accept or reject.
    #[must_use]
    pub fn open(self) -> (Connection, ConnectionRequest) {
        (Connection { id: self.id }, self.request)
    }

    /// The address of the peer.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.id.peer_address()
    }
}

/// What a peer requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionRequest {
    /// Its private data, possibly with zeroes behind it.
    pub private_data: Vec<u8>,
    /// RDMA Reads that this side may have in flight.
    pub reads: u8,
    /// RDMA Reads that the peer wants to have in flight.
    pub peer_reads: u8,
}

/// What one side offers to the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionOffer<'a> {
    /// Private data: at most 56 bytes of a request, 196 of an acceptance.
    pub private_data: &'a [u8],
    /// RDMA Reads that this side has in flight.
    pub reads: u8,
    /// RDMA Reads of the peer that this side executes at a time.
    pub peer_reads: u8,
}

/// One end of a connection: its identifier and its events.
pub struct Connection {
    pub(crate) id: ConnectionId,
}

impl Connection {
    /// Starts to connect to `address`; [`ConnectionEvent::RouteResolved`] follows, after which the
    /// device is known and a queue pair can be made.
    ///
    /// # Errors
    /// If rdma-core is not installed, or there is no way to the address.
    pub fn resolve(address: SocketAddr) -> Result<Connection, VerbsError> {
        let id = ConnectionId::new(EventChannel::new()?)?;
        let mut address = RawAddress::from(address);
        // SAFETY: the address is valid for the call, and the source may be null.
        let failed = unsafe {
            (id.library.cm.rdma_resolve_addr)(id.raw(), null_mut(), address.as_mut_ptr(), RESOLVE_TIMEOUT_MS)
        };
        VerbsError::check_errno("rdma_resolve_addr", failed)?;
        Ok(Connection { id })
    }

    /// Requests the connection. The queue pair exists.
    ///
    /// # Errors
    /// As `rdma_connect(3)`.
    pub fn connect(&self, offer: ConnectionOffer<'_>) -> Result<(), VerbsError> {
        let mut parameters = offer.parameters();
        // SAFETY: the private data that it points to is valid for the call.
        let failed = unsafe { (self.id.library.cm.rdma_connect)(self.id.raw(), &raw mut parameters) };
        VerbsError::check_errno("rdma_connect", failed)
    }

    /// Accepts the request. The queue pair exists.
    ///
    /// # Errors
    /// As `rdma_accept(3)`.
    pub fn accept(&self, offer: ConnectionOffer<'_>) -> Result<(), VerbsError> {
        let mut parameters = offer.parameters();
        // SAFETY: the private data that it points to is valid for the call.
        let failed = unsafe { (self.id.library.cm.rdma_accept)(self.id.raw(), &raw mut parameters) };
        VerbsError::check_errno("rdma_accept", failed)
    }

    /// Rejects the request.
    ///
    /// # Errors
    /// As `rdma_reject(3)`.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), VerbsError> {
        let len = u8::try_from(private_data.len()).unwrap_or(u8::MAX);
        // SAFETY: the private data is valid for the call, and at least `len` bytes.
        let failed =
            unsafe { (self.id.library.cm.rdma_reject)(self.id.raw(), private_data.as_ptr().cast(), len) };
        VerbsError::check_errno("rdma_reject", failed)
    }

    /// Ends the connection, or answers the peer that has; the queue pair flushes its work.
    ///
    /// # Errors
    /// If there is no connection.
    pub fn disconnect(&self) -> Result<(), VerbsError> {
        // SAFETY: the identifier is valid.
        let failed = unsafe { (self.id.library.cm.rdma_disconnect)(self.id.raw()) };
        VerbsError::check_errno("rdma_disconnect", failed)
    }

    /// The next event; `None` if there is none now.
    ///
    /// # Errors
    /// As `rdma_get_cm_event(3)`, and if the route cannot be requested.
    pub fn next_event(&self) -> Result<Option<ConnectionEvent>, VerbsError> {
        while let Some(event) = self.id.channel.next()? {
            if event.kind == RDMA_CM_EVENT_ADDR_RESOLVED {
                // SAFETY: the address of this identifier is resolved.
                let failed =
                    unsafe { (self.id.library.cm.rdma_resolve_route)(self.id.raw(), RESOLVE_TIMEOUT_MS) };
                VerbsError::check_errno("rdma_resolve_route", failed)?;
            } else if let Some(event) = event.into_event() {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    /// The address of this side.
    #[must_use]
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.id.local_address()
    }
}

impl AsFd for Connection {
    /// Readable when there are events.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.id.channel.as_fd()
    }
}

/// An event of a connection.
#[derive(Debug)]
pub enum ConnectionEvent {
    /// The device and the way to the peer are known.
    RouteResolved,
    /// The connection is established. The private data is that of the accepting peer.
    Established(ConnectionRequest),
    /// The peer has rejected the connection.
    Rejected {
        /// Its private data, possibly with zeroes behind it.
        private_data: Vec<u8>,
        /// Whether the peer's program has done so; otherwise nothing listens there.
        is_by_program: bool,
    },
    /// The connection has ended.
    Disconnected,
    /// The connection could not be made.
    Failed {
        /// The event's name, of `rdma_get_cm_event(3)`.
        event: &'static str,
        /// Its error.
        error: io::Error,
    },
    /// The device was removed; what belongs to it has to be destroyed.
    DeviceRemoved,
}

/// An identifier of librdmacm with its event channel.
pub(crate) struct ConnectionId {
    raw: RawId,
    pub(crate) library: &'static Library,
    channel: EventChannel,
}

/// Destroys the identifier, before its channel.
struct RawId {
    library: &'static Library,
    id: NonNull<rdma_cm_id>,
}

// SAFETY: any thread may call the functions of librdmacm. An identifier has one owner, which is the
// only one that looks at its fields.
unsafe impl Send for RawId {}

impl Drop for RawId {
    fn drop(&mut self) {
        // An identifier that is connected disconnects, and one that is requested is rejected.
        // SAFETY: destroyed once. Its queue pair, if any, was destroyed before, and its events are
        // acknowledged.
        unsafe { (self.library.cm.rdma_destroy_id)(self.id.as_ptr()) };
    }
}

impl ConnectionId {
    fn new(channel: EventChannel) -> Result<ConnectionId, VerbsError> {
        let library = channel.library;
        let mut id = null_mut();
        // SAFETY: the channel outlives the identifier.
        let failed = unsafe {
            (library.cm.rdma_create_id)(channel.channel.as_ptr(), &raw mut id, null_mut(), RDMA_PS_TCP)
        };
        VerbsError::check_errno("rdma_create_id", failed)?;
        let id = NonNull::new(id).ok_or_else(|| VerbsError::last("rdma_create_id"))?;
        Ok(ConnectionId { raw: RawId { library, id }, library, channel })
    }

    /// An identifier that does nothing but keep the device of `address` open.
    pub(crate) fn bound_to(address: SocketAddr) -> Result<ConnectionId, VerbsError> {
        let id = ConnectionId::new(EventChannel::new()?)?;
        id.bind(SocketAddr::new(address.ip(), 0).with_scope_of(address))?;
        Ok(id)
    }

    fn bind(&self, address: SocketAddr) -> Result<(), VerbsError> {
        if address.is_ipv6() {
            // As sockets of this program do: IPv4 has listeners of its own.
            let mut only: c_int = 1;
            // SAFETY: the option takes an integer of this size.
            let failed = unsafe {
                (self.library.cm.rdma_set_option)(
                    self.raw(),
                    RDMA_OPTION_ID,
                    RDMA_OPTION_ID_AFONLY,
                    (&raw mut only).cast(),
                    size_of::<c_int>(),
                )
            };
            VerbsError::check_errno("rdma_set_option", failed)?;
        }
        let mut address = RawAddress::from(address);
        // SAFETY: the address is valid for the call.
        let failed = unsafe { (self.library.cm.rdma_bind_addr)(self.raw(), address.as_mut_ptr()) };
        VerbsError::check_errno("rdma_bind_addr", failed)
    }

    pub(crate) fn raw(&self) -> *mut rdma_cm_id {
        self.raw.id.as_ptr()
    }

    /// The open device; `None` before the address is resolved or bound to one.
    pub(crate) fn device(&self) -> Option<NonNull<ibv_context>> {
        // SAFETY: the identifier is valid, and changed by calls of its owner only.
        NonNull::new(unsafe { (*self.raw()).verbs })
    }

    pub(crate) fn local_address(&self) -> Option<SocketAddr> {
        // SAFETY: as in `device`.
        socket_address(unsafe { &(*self.raw()).route.addr.src_storage })
    }

    fn peer_address(&self) -> Option<SocketAddr> {
        // SAFETY: as in `device`.
        socket_address(unsafe { &(*self.raw()).route.addr.dst_storage })
    }
}

/// The file descriptor of events.
struct EventChannel {
    library: &'static Library,
    channel: NonNull<rdma_event_channel>,
}

// SAFETY: any thread may call the functions of librdmacm, and a channel has one owner.
unsafe impl Send for EventChannel {}

impl EventChannel {
    fn new() -> Result<EventChannel, VerbsError> {
        let library = Library::load()?;
        // SAFETY: it has no arguments.
        let channel = unsafe { (library.cm.rdma_create_event_channel)() };
        let channel = NonNull::new(channel).ok_or_else(|| VerbsError::last("rdma_create_event_channel"))?;
        let channel = EventChannel { library, channel };
        set_nonblocking(channel.as_fd())?;
        Ok(channel)
    }

    /// Copies and acknowledges the next event.
    fn next(&self) -> Result<Option<CmEvent>, VerbsError> {
        let mut event = null_mut();
        // SAFETY: the channel is valid, and does not block.
        let failed = unsafe { (self.library.cm.rdma_get_cm_event)(self.channel.as_ptr(), &raw mut event) };
        if failed != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(VerbsError::Call { call: "rdma_get_cm_event", error }),
            };
        }
        // SAFETY: an event of the library, which is valid until it is acknowledged.
        let copy = unsafe { CmEvent::copy(&*event) };
        // SAFETY: acknowledged once.
        unsafe { (self.library.cm.rdma_ack_cm_event)(event) };
        Ok(Some(copy))
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel owns its descriptor, and `self` the channel.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: destroyed once, after its identifier.
        unsafe { (self.library.cm.rdma_destroy_event_channel)(self.channel.as_ptr()) }
    }
}

/// A copy of an event.
struct CmEvent {
    kind: c_int,
    status: c_int,
    id: *mut rdma_cm_id,
    private_data: Vec<u8>,
    reads: u8,
    peer_reads: u8,
}

impl CmEvent {
    /// # Safety
    /// The private data of the event is valid.
    unsafe fn copy(event: &rdma_cm_event) -> CmEvent {
        let has_parameters = matches!(
            event.event,
            RDMA_CM_EVENT_CONNECT_REQUEST | RDMA_CM_EVENT_ESTABLISHED | RDMA_CM_EVENT_REJECTED
        );
        let data = event.conn.private_data.cast::<u8>();
        let private_data = match has_parameters && !data.is_null() {
            // SAFETY: the event has that many bytes.
            true => unsafe { std::slice::from_raw_parts(data, event.conn.private_data_len.into()) }.to_vec(),
            false => Vec::new(),
        };
        CmEvent {
            kind: event.event,
            status: event.status,
            id: event.id,
            private_data,
            reads: event.conn.initiator_depth,
            peer_reads: event.conn.responder_resources,
        }
    }

    fn into_request(self) -> ConnectionRequest {
        ConnectionRequest { private_data: self.private_data, reads: self.reads, peer_reads: self.peer_reads }
    }

    /// `None` for events that need nothing.
    fn into_event(self) -> Option<ConnectionEvent> {
        let failed = |event| {
            let error = io::Error::from_raw_os_error(self.status.abs());
            Some(ConnectionEvent::Failed { event, error })
        };
        match self.kind {
            RDMA_CM_EVENT_ROUTE_RESOLVED => Some(ConnectionEvent::RouteResolved),
            RDMA_CM_EVENT_ESTABLISHED => Some(ConnectionEvent::Established(self.into_request())),
            RDMA_CM_EVENT_REJECTED => Some(ConnectionEvent::Rejected {
                // InfiniBand has reasons. iWARP has none, and no zeroes behind the private data, of
                // which a reset of the TCP connection has none.
                is_by_program: self.status == CONSUMER_REJECT
                    || (self.status < 0 && !self.private_data.is_empty()),
                private_data: self.private_data,
            }),
            RDMA_CM_EVENT_DISCONNECTED => Some(ConnectionEvent::Disconnected),
            RDMA_CM_EVENT_DEVICE_REMOVAL => Some(ConnectionEvent::DeviceRemoved),
            RDMA_CM_EVENT_ADDR_ERROR => failed("RDMA_CM_EVENT_ADDR_ERROR"),
            RDMA_CM_EVENT_ROUTE_ERROR => failed("RDMA_CM_EVENT_ROUTE_ERROR"),
            RDMA_CM_EVENT_CONNECT_ERROR => failed("RDMA_CM_EVENT_CONNECT_ERROR"),
            RDMA_CM_EVENT_UNREACHABLE => failed("RDMA_CM_EVENT_UNREACHABLE"),
            _ => None,
        }
    }
}

impl ConnectionOffer<'_> {
    fn parameters(&self) -> rdma_conn_param {
        let private_data = match self.private_data {
            [] => null(),
            data => data.as_ptr().cast(),
        };
        rdma_conn_param {
            private_data,
            private_data_len: u8::try_from(self.private_data.len()).unwrap_or(u8::MAX),
            responder_resources: self.peer_reads,
            initiator_depth: self.reads,
            flow_control: 0,
            retry_count: RETRIES,
            rnr_retry_count: RETRIES,
            srq: 0,
            qp_num: 0,
        }
    }
}

/// An address in the form of the C library.
enum RawAddress {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

impl RawAddress {
    fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        match self {
            RawAddress::V4(address) => (&raw mut *address).cast(),
            RawAddress::V6(address) => (&raw mut *address).cast(),
        }
    }
}

impl From<SocketAddr> for RawAddress {
    fn from(address: SocketAddr) -> RawAddress {
        match address {
            SocketAddr::V4(address) => RawAddress::V4(libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                sin_zero: [0; 8],
            }),
            SocketAddr::V6(address) => RawAddress::V6(libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            }),
        }
    }
}

/// The address in a field that is large enough for any.
fn socket_address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let place: *const libc::sockaddr_storage = storage;
    match c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that it is one, and the field has its alignment and length.
            let address = unsafe { &*place.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(address.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddr::new(IpAddr::V4(ip), u16::from_be(address.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let address = unsafe { &*place.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
            let port = u16::from_be(address.sin6_port);
            Some(SocketAddrV6::new(ip, port, address.sin6_flowinfo, address.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// Takes the zone of another address.
trait WithScopeOf {
    fn with_scope_of(self, other: SocketAddr) -> Self;
}

impl WithScopeOf for SocketAddr {
    fn with_scope_of(mut self, other: SocketAddr) -> SocketAddr {
        if let (SocketAddr::V6(own), SocketAddr::V6(other)) = (&mut self, other) {
            own.set_scope_id(other.scope_id());
        }
        self
    }
}

/// Has calls that would block fail with `EAGAIN`.
pub(crate) fn set_nonblocking(descriptor: BorrowedFd<'_>) -> Result<(), VerbsError> {
    let set = rustix::fs::fcntl_getfl(descriptor)
        .and_then(|flags| rustix::fs::fcntl_setfl(descriptor, flags | OFlags::NONBLOCK));
    set.map_err(|error| VerbsError::Call { call: "fcntl", error: error.into() })
}

/// Connection requests that may wait.
const BACKLOG: c_int = 128;
/// How long an address or a route may take.
const RESOLVE_TIMEOUT_MS: c_int = 5000;
/// Repetitions of a packet without an acknowledgement, and of a message without a receive buffer,
/// where this number has no end.
const RETRIES: u8 = 7;
/// The reason of a rejection by a program (InfiniBand Architecture Specification, volume 1, table
/// 111).
const CONSUMER_REJECT: c_int = 28;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_their_form_in_c() {
        for address in ["192.0.2.1:4420", "[2001:db8::1]:4420", "[fe80::1%3]:7"] {
            let address: SocketAddr = address.parse().unwrap();
            // SAFETY: all fields are integers.
            let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
            let place = &raw mut storage;
            match RawAddress::from(address) {
                // SAFETY: the field is large enough for both.
                RawAddress::V4(raw) => unsafe { place.cast::<libc::sockaddr_in>().write(raw) },
                // SAFETY: as above.
                RawAddress::V6(raw) => unsafe { place.cast::<libc::sockaddr_in6>().write(raw) },
            }
            assert_eq!(socket_address(&storage), Some(address));
        }
    }

    #[test]
    fn an_address_that_is_not_set_is_none() {
        // SAFETY: all fields are integers.
        assert_eq!(socket_address(&unsafe { std::mem::zeroed() }), None);
    }

    #[test]
    fn rejections_of_a_program_are_told_from_those_of_the_kernel() {
        let event = |status, private_data| CmEvent {
            kind: RDMA_CM_EVENT_REJECTED,
            status,
            id: null_mut(),
            private_data,
            reads: 0,
            peer_reads: 0,
        };
        let iwarp = -libc::ECONNREFUSED;
        for (status, said, expected) in [
            (CONSUMER_REJECT, vec![], true),
            (8, vec![7], false),
            (iwarp, vec![7], true),
            (iwarp, vec![], false),
        ] {
            let found = event(status, said.clone()).into_event();
            let Some(ConnectionEvent::Rejected { private_data, is_by_program }) = found else {
                panic!("not a rejection")
            };
            assert_eq!((private_data, is_by_program), (said, expected), "{status}");
        }
    }
}
