//! One connection of a UDP port, as a stream of records.

use super::core_port::{CorePort, FlowState, OpenedFlow};
use super::path::RocePath;
use crate::net::host::{ByteStream, NetworkStream, SocketWatch, StreamEnd};
use crate::net::socket::Address;
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{ConnectionControl, ConnectionHandle, HangUp};
use blockmux_proto::driver::transport::{FlowInfo, TransportInfo};
use blockmux_volume::{Chunk, SgList, Waker};
use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The packets of one connection: what has arrived for it, and the way to its peer. The connection
/// is closed when its last owner drops it; the queue pair tells the peer before.
pub struct RoceStream {
    end: Rc<FlowEnd>,
    state: Rc<FlowState>,
    peer: Arc<str>,
}

/// Wakes a task for its stream.
pub struct RoceWatch {
    pub(super) waker: Waker,
    pub(super) socket: SocketWatch,
}

/// What all owners of a connection share.
struct FlowEnd {
    port: Rc<RefCell<CorePort>>,
    path: RocePath,
    info: FlowInfo,
    /// Whether the connection was hung up, or is closed.
    has_ended: Arc<AtomicBool>,
}

/// Ends a connection from any thread, and tells whether it has ended.
struct RoceHandle {
    hang_up: HangUp,
    has_ended: Arc<AtomicBool>,
}

impl ConnectionControl for RoceHandle {
    fn hang_up(&self) {
        (self.hang_up)();
    }

    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }
}

impl RoceStream {
    pub(super) fn new(port: &Rc<RefCell<CorePort>>, opened: OpenedFlow) -> RoceStream {
        let OpenedFlow { state, path, info, named } = opened;
        let has_ended = state.is_hung_up.clone();
        let end = Rc::new(FlowEnd { port: port.clone(), path, info, has_ended });
        RoceStream { end, state, peer: Address::Tcp(named).to_string().into() }
    }

    /// Moves what is queued into `chunk`, at most `most` bytes.
    fn take_queued(&self, chunk: &mut Chunk, most: usize) -> usize {
        let most = chunk.room().min(most);
        self.state.arrived.borrow_mut().take(most, |bytes| chunk.extend(bytes))
    }

    /// Gives the connection a packet that has arrived elsewhere.
    pub(super) fn deliver(&self, datagram: &[u8]) {
        self.end.port.borrow_mut().deliver(self.end.info.queue_pair, datagram, false);
    }
}

impl Drop for FlowEnd {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Relaxed);
        self.port.borrow_mut().close(self.info.queue_pair);
    }
}

impl NetworkStream for RoceStream {
    fn peer_ip(&self) -> Option<IpAddr> {
        Some(self.end.path.peer.ip())
    }

    fn local_address(&self) -> Option<SocketAddr> {
        Some((self.end.path.local, self.end.info.service).into())
    }

    fn hang_up(&self) -> HangUp {
        Arc::new(self.end.port.borrow().hang_up(&self.state))
    }

    fn control(&self) -> ConnectionHandle {
        Arc::new(RoceHandle { hang_up: self.hang_up(), has_ended: self.end.has_ended.clone() })
    }
}

impl ByteStream for RoceStream {
    const TELLS_END: bool = false;

    type Watch = RoceWatch;

    fn share(&self) -> RoceStream {
        RoceStream { end: self.end.clone(), state: self.state.clone(), peer: self.peer.clone() }
    }

    fn close(&self) {
        self.hang_up()();
    }

    fn peer(&self) -> &str {
        &self.peer
    }

    fn shared_peer(&self) -> Arc<str> {
        self.peer.clone()
    }

    fn transport(&self) -> TransportInfo {
        TransportInfo { segment_len: None, flow: Some(self.end.info) }
    }

    /// The queue pair requests the connection, so there is nothing to wait for here.
    fn connect_result(&self) -> Option<io::Result<()>> {
        Some(Ok(()))
    }

    #[inline]
    fn receive(&mut self, chunk: &mut Chunk, most: usize) -> io::Result<usize> {
        let mut len = self.take_queued(chunk, most);
        if len == 0 && self.ended() == StreamEnd::Not {
            len = self.end.port.borrow_mut().receive_for(self.end.info.queue_pair, chunk, most);
            if len == 0 {
                // It may have come together with packets of others.
                len = self.take_queued(chunk, most);
            }
        }
        match len {
            0 if self.ended() == StreamEnd::Both => Ok(0),
            0 => Err(io::ErrorKind::WouldBlock.into()),
            len => Ok(len),
        }
    }

    fn waiting(&self) -> usize {
        self.state.arrived.borrow().len()
    }

    /// Sessions over records place no payload.
    fn receive_placed(&mut self, _list: &SgList, _at: usize, _chunk: &mut Chunk) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    #[inline]
    fn send(&mut self, outbox: &mut Outbox) -> io::Result<usize> {
        self.end.port.borrow().share.socket().send(&self.end.path, outbox)
    }

    fn wake_when_readable(&self, watch: &RoceWatch) {
        if self.waiting() > 0 || self.ended() == StreamEnd::Both {
            watch.waker.wake();
        } else {
            *self.state.reader.borrow_mut() = Some(watch.waker.clone());
        }
    }

    fn wake_when_writable(&self, watch: &RoceWatch) {
        watch.socket.wake_when(self.end.port.borrow().share.socket(), libc::POLLOUT);
    }

    fn ended(&self) -> StreamEnd {
        match self.state.is_hung_up.load(Ordering::Relaxed) {
            true => StreamEnd::Both,
            false => StreamEnd::Not,
        }
    }

    fn wake_when_ended(&self, _so_far: StreamEnd, watch: &RoceWatch) {
        *self.state.reader.borrow_mut() = Some(watch.waker.clone());
    }
}
