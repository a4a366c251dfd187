//! What connections need from their core, so that tasks run unchanged on sockets and in the
//! simulator.
//!
//! [`EngineCore`] and [`Stream`] are the real core and stream; `crate::sim` has simulated ones.
//! Tasks are generic over them, so dispatch is static.

use crate::core::helpers;
use crate::core::reactor::{EngineCore, PollPolicy, Task, WakeOnEvent, cross_thread_waker};
use crate::core::ring::Registration;
use crate::net::ktls::{self, Direction};
use crate::net::login_stream::{self, LoginStream};
use crate::net::socket::{self, Address, Stream};
use crate::sys;
use blockmux_proto::driver::computation::Helpers;
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{ConnectionControl, ConnectionHandle, HangUp};
use blockmux_proto::driver::transport::TransportInfo;
use blockmux_tls::RecordKeys;
use blockmux_volume::{Chunk, Core, SgList, Waker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::Socket;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// A core that runs connections.
pub trait Host: Core + Sized + 'static {
    /// A byte stream that is connected or connecting.
    type Stream: ByteStream<Watch = Self::Watch>;
    /// A handle by which one parked task is woken for its stream.
    type Watch;

    /// Downcasts a core to this host.
    fn from_core(core: &Rc<dyn Core>) -> Option<Rc<Self>>;

    /// Starts a task; `make` gets its waker. It runs for the first time soon.
    fn spawn<T: Task + 'static>(&self, make: impl FnOnce(&Waker) -> T);

    /// Starts a task if `make` succeeds; otherwise leaves nothing behind.
    fn try_spawn<T: Task + 'static, E>(&self, make: impl FnOnce(&Waker) -> Result<T, E>);

    /// Starts to connect.
    ///
    /// # Errors
    /// If it fails at once.
    fn connect(&self, address: &Address) -> io::Result<Self::Stream>;

    /// Connects on an ordinary thread, for a login. Connecting takes at most `_timeout`.
    ///
    /// # Errors
    /// If it fails, or the host has no such threads.
    fn log_in(_address: &Address, _timeout: Duration) -> io::Result<Box<dyn LoginStream>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// A watch that wakes `waker`.
    fn watch(&self, waker: &Waker) -> Self::Watch;

    /// Whether tasks were asked to finish.
    fn is_stopping(&self) -> bool;

    /// Whether the core polls tasks for a while before it parks them.
    fn spins(&self) -> bool;

    /// Where computations for a peer run, if not on this core; `waker` is woken when one is done.
    fn helpers(_core: &Rc<Self>, _peer: Option<IpAddr>, _waker: &Waker) -> Option<Helpers> {
        None
    }
}

/// A core with connections of a network, for the targets that it serves.
pub trait NetworkHost: Host<Stream: NetworkStream> {
    /// The engine's core.
    fn engine_core(self: &Rc<Self>) -> Rc<EngineCore>;
}

/// A connection of a network.
pub trait NetworkStream: ByteStream {
    /// The peer's address; `None` if it has no IP address.
    fn peer_ip(&self) -> Option<IpAddr>;

    /// The address of this side, with the port that the peer has asked for.
    fn local_address(&self) -> Option<SocketAddr>;

    /// A function that ends the connection, from any thread.
    fn hang_up(&self) -> HangUp;

    /// Control of the connection, from any thread.
    fn control(&self) -> ConnectionHandle;
}

/// A non-blocking byte stream: a call that would block fails with [`io::ErrorKind::WouldBlock`].
pub trait ByteStream: Sized {
    /// Whether the peer learns of the end of a stream that is dropped, as with TCP.
    const TELLS_END: bool = true;

    /// A handle by which a parked task is woken; dropping it cancels the wake-up.
    type Watch;

    /// Another handle for another owner; the caller drops this one.
    #[must_use]
    fn share(&self) -> Self;

    /// Shuts the stream down for every owner, in both directions.
    fn close(&self);

    /// The peer's address, for messages.
    fn peer(&self) -> &str;

    /// The peer's address, shared with the stream.
    fn shared_peer(&self) -> Arc<str>;

    /// Properties of the connection.
    fn transport(&self) -> TransportInfo {
        TransportInfo::default()
    }

    /// Result of connecting; `None` while it is in progress.
    fn connect_result(&self) -> Option<io::Result<()>>;

    /// Receives once, at most `most` bytes, into the spare part of `chunk`; 0 at the end of the
    /// stream.
    ///
    /// # Errors
    /// If nothing can be received, or the connection is lost.
    fn receive(&mut self, chunk: &mut Chunk, most: usize) -> io::Result<usize>;

    /// Number of bytes that can be received now, if known.
    fn waiting(&self) -> usize;

    /// Receives once into `list` from byte `at` on, then into `chunk`, which is advanced by its
    /// share. Returns the total number of bytes.
    ///
    /// # Errors
    /// As for [`ByteStream::receive`].
    fn receive_placed(&mut self, list: &SgList, at: usize, chunk: &mut Chunk) -> io::Result<usize>;

    /// Sends once as much of `outbox` as fits, and removes it from the outbox.
    ///
    /// # Errors
    /// If there is no room, or the connection is lost.
    fn send(&mut self, outbox: &mut Outbox) -> io::Result<usize>;

    /// Attaches kernel TLS (kTLS), which changes nothing until keys are set.
    ///
    /// # Errors
    /// If it is not supported.
    fn attach_tls(&mut self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Sets the keys of one direction, at a record boundary. From then on data is sent and received
    /// as plaintext; receiving fails with `EIO` when a record of another type is next.
    ///
    /// # Errors
    /// If the kernel rejects the keys; some kernels accept only the first.
    fn set_tls_keys(&mut self, _direction: Direction, _keys: &RecordKeys) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Records that the kernel took the keys of one direction only, so that kTLS is not tried
    /// again.
    fn suspend_tls(&self) {}

    /// Sends one whole record of a content type other than data.
    ///
    /// # Errors
    /// If there is no room, or the connection is lost.
    fn send_record(&mut self, _content_type: u8, _bytes: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Receives one record, or several of one type, as far as there is room. Returns content type
    /// and number of bytes.
    ///
    /// # Errors
    /// As for [`ByteStream::receive`].
    fn receive_record(&mut self, _bytes: &mut [u8]) -> io::Result<(u8, usize)> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Number of sent bytes that the peer has not acknowledged, if known.
    fn unacknowledged(&self) -> usize {
        0
    }

    /// Wakes the task once when input or the end of the stream can be received.
    fn wake_when_readable(&self, watch: &Self::Watch);

    /// Wakes the task once when the stream is writable, or connecting has ended.
    fn wake_when_writable(&self, watch: &Self::Watch);

    /// Which directions have ended, as far as known without receiving.
    fn ended(&self) -> StreamEnd;

    /// Wakes the task once when more directions have ended than in `so_far`, even if input is
    /// unread.
    fn wake_when_ended(&self, so_far: StreamEnd, watch: &Self::Watch);
}

/// Which directions of a stream have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamEnd {
    /// Neither.
    Not,
    /// The peer has closed its side; input may still be unread.
    Input,
    /// Both: the connection was reset, or shut down by another owner.
    Both,
}

/// Wakes a task through the core's ring.
pub struct SocketWatch {
    registration: Registration,
    readiness: Rc<WakeOnEvent>,
}

impl Host for EngineCore {
    type Stream = Stream;
    type Watch = SocketWatch;

    fn from_core(core: &Rc<dyn Core>) -> Option<Rc<EngineCore>> {
        EngineCore::from_core(core)
    }

    fn spawn<T: Task + 'static>(&self, make: impl FnOnce(&Waker) -> T) {
        EngineCore::spawn(self, make);
    }

    fn try_spawn<T: Task + 'static, E>(&self, make: impl FnOnce(&Waker) -> Result<T, E>) {
        // `make` reports the error to its caller itself.
        let _ = EngineCore::try_spawn(self, make);
    }

    fn connect(&self, address: &Address) -> io::Result<Stream> {
        Stream::connect_with(address, self.congestion())
    }

    fn log_in(address: &Address, timeout: Duration) -> io::Result<Box<dyn LoginStream>> {
        login_stream::connect(address, timeout)
    }

    fn watch(&self, waker: &Waker) -> SocketWatch {
        let readiness = WakeOnEvent::new(waker);
        SocketWatch { registration: self.register(readiness.clone()), readiness }
    }

    #[inline]
    fn is_stopping(&self) -> bool {
        EngineCore::is_stopping(self)
    }

    fn spins(&self) -> bool {
        self.policy() != PollPolicy::Never
    }

    fn helpers(core: &Rc<Self>, peer: Option<IpAddr>, waker: &Waker) -> Option<Helpers> {
        Some(Helpers { run: helpers::for_peer(peer), notify: cross_thread_waker(core, waker) })
    }
}

impl NetworkHost for EngineCore {
    fn engine_core(self: &Rc<Self>) -> Rc<EngineCore> {
        self.clone()
    }
}

impl NetworkStream for Stream {
    fn peer_ip(&self) -> Option<IpAddr> {
        socket::peer_address(&self.socket).map(|peer| peer.ip())
    }

    fn local_address(&self) -> Option<SocketAddr> {
        socket::local_address(&self.socket)
    }

    fn hang_up(&self) -> HangUp {
        let socket = self.socket.clone();
        Arc::new(move || shut_down(&socket))
    }

    fn control(&self) -> ConnectionHandle {
        Arc::new(SocketControl(self.share()))
    }
}

/// A socket as other threads see it.
struct SocketControl(Stream);

impl ConnectionControl for SocketControl {
    fn hang_up(&self) {
        self.0.close();
    }

    fn has_ended(&self) -> bool {
        self.0.ended() != StreamEnd::Not
    }
}

impl SocketWatch {
    /// Wakes the task once for these poll events of a socket.
    pub(crate) fn wake_when(&self, socket: &impl AsFd, events: i16) {
        let token = match events {
            libc::POLLIN => TOKEN_INPUT,
            libc::POLLOUT => TOKEN_OUTPUT,
            _ => TOKEN_END,
        };
        self.readiness.arm(&self.registration, socket.as_fd().as_raw_fd(), events, token);
    }
}

impl ByteStream for Stream {
    type Watch = SocketWatch;

    fn share(&self) -> Stream {
        Stream { socket: self.socket.clone(), peer: self.peer.clone() }
    }

    fn close(&self) {
        shut_down(&self.socket);
    }

    fn peer(&self) -> &str {
        &self.peer
    }

    fn shared_peer(&self) -> Arc<str> {
        self.peer.clone()
    }

    fn transport(&self) -> TransportInfo {
        TransportInfo { segment_len: self.segment_len(), flow: None }
    }

    fn connect_result(&self) -> Option<io::Result<()>> {
        match self.socket.take_error() {
            Ok(Some(error)) | Err(error) => Some(Err(error)),
            Ok(None) => match self.socket.peer_addr() {
                Ok(_) => Some(Ok(())),
                Err(error) if error.kind() == io::ErrorKind::NotConnected => None,
                Err(error) => Some(Err(error)),
            },
        }
    }

    #[inline]
    fn receive(&mut self, chunk: &mut Chunk, most: usize) -> io::Result<usize> {
        sys::recv_chunk(self.socket.as_raw_fd(), chunk, most)
    }

    fn waiting(&self) -> usize {
        sys::waiting(self)
    }

    #[inline]
    fn receive_placed(&mut self, list: &SgList, at: usize, chunk: &mut Chunk) -> io::Result<usize> {
        sys::recv_placed(self.socket.as_raw_fd(), list, at, chunk)
    }

    #[inline]
    fn send(&mut self, outbox: &mut Outbox) -> io::Result<usize> {
        sys::send_outbox(self.socket.as_raw_fd(), outbox)
    }

    fn attach_tls(&mut self) -> io::Result<()> {
        ktls::attach(self.socket.as_raw_fd())
    }

    fn set_tls_keys(&mut self, direction: Direction, keys: &RecordKeys) -> io::Result<()> {
        ktls::set_keys(self.socket.as_raw_fd(), direction, keys)
    }

    fn suspend_tls(&self) {
        ktls::suspend();
    }

    fn send_record(&mut self, content_type: u8, bytes: &[u8]) -> io::Result<()> {
        sys::send_record(self.socket.as_raw_fd(), content_type, bytes)
    }

    fn receive_record(&mut self, bytes: &mut [u8]) -> io::Result<(u8, usize)> {
        sys::recv_record(self.socket.as_raw_fd(), bytes)
    }

    fn unacknowledged(&self) -> usize {
        sys::unacknowledged(self.socket.as_raw_fd())
    }

    fn wake_when_readable(&self, watch: &SocketWatch) {
        watch.wake_when(self, libc::POLLIN);
    }

    fn wake_when_writable(&self, watch: &SocketWatch) {
        watch.wake_when(self, libc::POLLOUT);
    }

    fn ended(&self) -> StreamEnd {
        ended(self)
    }

    fn wake_when_ended(&self, so_far: StreamEnd, watch: &SocketWatch) {
        // POLLHUP is always reported.
        watch.wake_when(self, if so_far == StreamEnd::Not { libc::POLLRDHUP } else { 0 });
    }
}

impl Drop for SocketWatch {
    fn drop(&mut self) {
        self.readiness.disarm(&self.registration);
    }
}

fn shut_down(socket: &Socket) {
    // The connection may have ended just now.
    let _ = socket.shutdown(Shutdown::Both);
}

/// Which directions of a stream socket have ended, even if input is unread.
fn ended(socket: &impl AsFd) -> StreamEnd {
    let mut polled = [PollFd::new(socket, PollFlags::RDHUP)];
    // The poll does not wait; if it fails, nothing has ended.
    let _ = poll(&mut polled, Some(&Timespec::default()));
    let found = polled[0].revents();
    if found.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
        StreamEnd::Both
    } else if found.contains(PollFlags::RDHUP) {
        StreamEnd::Input
    } else {
        StreamEnd::Not
    }
}

const TOKEN_INPUT: u32 = 0;
const TOKEN_OUTPUT: u32 = 1;
const TOKEN_END: u32 = 2;
