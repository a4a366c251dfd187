//! What connections need of the core that they live on, so that the same tasks run on sockets and
//! in the simulator.
//!
//! [`EngineCore`] with [`Stream`] is the real one; `crate::sim` has the other, for tests.
//! Everything is resolved when compiled, so the seam costs nothing.

use crate::ktls;
use crate::reactor::{EngineCore, PollPolicy, Task, WakeOnEvent};
use crate::ring::Registration;
use crate::socket::{Address, Stream};
use crate::sys;
use blockmux_proto::outbox::Outbox;
use blockmux_tls::RecordKeys;
use blockmux_volume::{Chunk, Core, SgList, Waker};
use std::io;
use std::os::fd::AsRawFd;
use std::rc::Rc;

/// A core that connections live on.
pub trait Host: Core + Sized + 'static {
    /// A connected, or connecting, byte stream.
    type Stream: ByteStream<Watch = Self::Watch>;
    /// Tells one parked task of its stream.
    type Watch;

    /// The host behind a core, if it is one of this kind.
    fn from_core(core: &Rc<dyn Core>) -> Option<Rc<Self>>;

    /// Starts a task; `make` gets what wakes it. It runs for the first time soon.
    fn spawn<T: Task + 'static>(&self, make: impl FnOnce(&Waker) -> T);

    /// Starts a task if it can be made; if not, nothing is left behind.
    fn try_spawn<T: Task + 'static, E>(&self, make: impl FnOnce(&Waker) -> Result<T, E>);

    /// Begins to connect.
    ///
    /// # Errors
    /// If it fails at once.
    fn connect(&self, address: &Address) -> io::Result<Self::Stream>;

    /// A watch that wakes `waker`.
    fn watch(&self, waker: &Waker) -> Self::Watch;

    /// Whether tasks are asked to finish.
    fn is_stopping(&self) -> bool;

    /// Whether tasks run over and over for a while before they are parked.
    fn spins(&self) -> bool;
}

/// A byte stream that never blocks: what cannot be done now fails with
/// [`io::ErrorKind::WouldBlock`].
pub trait ByteStream: Sized {
    /// Tells a parked task that the stream can move again; dropping it withdraws the wish.
    type Watch;

    /// Another handle of the stream, for another owner; this one is to be dropped.
    #[must_use]
    fn share(&self) -> Self;

    /// Closes it for every owner: both sides see the end.
    fn close(&self);

    /// The peer's address, for messages.
    fn peer(&self) -> &str;

    /// How many bytes one segment of it holds, where it has segments.
    fn segment_len(&self) -> Option<usize> {
        None
    }

    /// `None` while connecting goes on.
    fn connect_result(&self) -> Option<io::Result<()>>;

    /// Receives once, at most `most` bytes, into the spare part of `chunk`; 0 at the end of the
    /// stream.
    ///
    /// # Errors
    /// If nothing is there, or the connection is gone.
    fn receive(&mut self, chunk: &mut Chunk, most: usize) -> io::Result<usize>;

    /// How many bytes could be received now, as far as that is known.
    fn waiting(&self) -> usize;

    /// Receives once into `list` from byte `at` on, then into `chunk`, which is told of its share.
    /// Returns how many bytes came in all.
    ///
    /// # Errors
    /// As for [`ByteStream::receive`].
    fn receive_placed(&mut self, list: &SgList, at: usize, chunk: &mut Chunk) -> io::Result<usize>;

    /// Sends once what it can of `outbox` and removes that there.
    ///
    /// # Errors
    /// If there is no room, or the connection is gone.
    fn send(&mut self, outbox: &mut Outbox) -> io::Result<usize>;

    /// Asks the system to make records of TLS of what is sent, and to open those that come, once it
    /// is given keys; until then nothing changes.
    ///
    /// # Errors
    /// If it cannot.
    fn attach_tls(&mut self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Gives it the keys for one direction, at a border between records. From then on only data is
    /// sent and received as ever: receiving fails with `EIO` where a record of another type is
    /// next.
    ///
    /// # Errors
    /// If it does not take them; some systems take them only once.
    fn set_tls_keys(&mut self, _direction: Direction, _keys: &RecordKeys) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The system has done one half of it and not the other: it is not asked again.
    fn forgo_tls(&self) {}

    /// Sends one record of another content type than data, whole.
    ///
    /// # Errors
    /// If there is no room, or the connection is gone.
    fn send_record(&mut self, _content_type: u8, _bytes: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Receives what the next record has, or several of one type, as far as there is room: their
    /// content type, and how many bytes.
    ///
    /// # Errors
    /// As for [`ByteStream::receive`].
    fn receive_record(&mut self, _bytes: &mut [u8]) -> io::Result<(u8, usize)> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// How many bytes that were sent the peer has not acknowledged, as far as that is known.
    fn unacknowledged(&self) -> usize {
        0
    }

    /// Has the task woken once when there is something to receive, the end included.
    fn wake_when_readable(&self, watch: &Self::Watch);

    /// Has the task woken once when something can be sent, or connecting has ended.
    fn wake_when_writable(&self, watch: &Self::Watch);

    /// What has ended, as far as that is known without receiving.
    fn ended(&self) -> StreamEnd;

    /// Has the task woken once when more has ended than `so_far`, whatever there is to receive.
    fn wake_when_ended(&self, so_far: StreamEnd, watch: &Self::Watch);
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the peer.
    Sending,
    /// From it.
    Receiving,
}

/// What has ended of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamEnd {
    /// Nothing.
    Not,
    /// The peer sends nothing any more; of what it has sent, something may be unread.
    Input,
    /// Both directions: the connection was reset, or hung up by another owner.
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
        // Whoever makes it keeps the reason.
        let _ = EngineCore::try_spawn(self, make);
    }

    fn connect(&self, address: &Address) -> io::Result<Stream> {
        Stream::connect_with(address, self.congestion())
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
}

impl SocketWatch {
    /// Wakes the task once when a socket is ready for input or output, or, with other events, has
    /// ended.
    pub(crate) fn wake_when(&self, socket: &impl AsRawFd, events: i16) {
        let token = match events {
            libc::POLLIN => TOKEN_INPUT,
            libc::POLLOUT => TOKEN_OUTPUT,
            _ => TOKEN_END,
        };
        self.readiness.arm(&self.registration, socket.as_raw_fd(), events, token);
    }
}

impl ByteStream for Stream {
    type Watch = SocketWatch;

    fn share(&self) -> Stream {
        Stream::share(self)
    }

    fn close(&self) {
        Stream::hang_up(self)();
    }

    fn peer(&self) -> &str {
        Stream::peer(self)
    }

    fn segment_len(&self) -> Option<usize> {
        Stream::segment_len(self)
    }

    fn connect_result(&self) -> Option<io::Result<()>> {
        Stream::connect_result(self)
    }

    #[inline]
    fn receive(&mut self, chunk: &mut Chunk, most: usize) -> io::Result<usize> {
        sys::recv_chunk(self.as_raw_fd(), chunk, most)
    }

    fn waiting(&self) -> usize {
        sys::waiting(self)
    }

    #[inline]
    fn receive_placed(&mut self, list: &SgList, at: usize, chunk: &mut Chunk) -> io::Result<usize> {
        sys::recv_placed(self.as_raw_fd(), list, at, chunk)
    }

    #[inline]
    fn send(&mut self, outbox: &mut Outbox) -> io::Result<usize> {
        sys::send_outbox(self.as_raw_fd(), outbox)
    }

    fn attach_tls(&mut self) -> io::Result<()> {
        ktls::attach(self.as_raw_fd())
    }

    fn set_tls_keys(&mut self, direction: Direction, keys: &RecordKeys) -> io::Result<()> {
        ktls::set_keys(self.as_raw_fd(), direction, keys)
    }

    fn forgo_tls(&self) {
        ktls::forgo();
    }

    fn send_record(&mut self, content_type: u8, bytes: &[u8]) -> io::Result<()> {
        sys::send_record(self.as_raw_fd(), content_type, bytes)
    }

    fn receive_record(&mut self, bytes: &mut [u8]) -> io::Result<(u8, usize)> {
        sys::recv_record(self.as_raw_fd(), bytes)
    }

    fn unacknowledged(&self) -> usize {
        sys::unacknowledged(self.as_raw_fd())
    }

    fn wake_when_readable(&self, watch: &SocketWatch) {
        watch.wake_when(self, libc::POLLIN);
    }

    fn wake_when_writable(&self, watch: &SocketWatch) {
        watch.wake_when(self, libc::POLLOUT);
    }

    fn ended(&self) -> StreamEnd {
        sys::ended(self)
    }

    fn wake_when_ended(&self, so_far: StreamEnd, watch: &SocketWatch) {
        // The end of both directions is told of without being asked for.
        watch.wake_when(self, if so_far == StreamEnd::Not { libc::POLLRDHUP } else { 0 });
    }
}

impl Drop for SocketWatch {
    fn drop(&mut self) {
        self.readiness.disarm(&self.registration);
    }
}

const TOKEN_INPUT: u32 = 0;
const TOKEN_OUTPUT: u32 = 1;
const TOKEN_END: u32 = 2;
