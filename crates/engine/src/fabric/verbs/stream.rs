//! One connection over a device, as a stream of records.

use super::device_watch::{self, DeviceMembership};
use super::queues::ConnectionQueues;
use super::signal::LocalSignal;
use crate::core::reactor::EngineCore;
use crate::net::host::{ByteStream, NetworkStream, SocketWatch, StreamEnd};
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{ConnectionControl, ConnectionHandle, HangUp};
use blockmux_verbs::error::VerbsError;
use blockmux_verbs::queue_pair::QueuePair;
use blockmux_volume::{Chunk, SgList, Waker};
use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;

/// The queues of one connection, and what has happened there. The connection is closed when its
/// last owner drops it.
pub struct VerbsStream(Rc<VerbsEnd>);

/// What all owners of a connection share.
struct VerbsEnd {
    core: Rc<EngineCore>,
    queues: RefCell<ConnectionQueues>,
    /// Once there is a queue pair.
    membership: RefCell<Option<DeviceMembership>>,
    signal: LocalSignal,
    peer: Arc<str>,
    peer_ip: IpAddr,
}

/// Wakes a task for its stream.
pub struct VerbsWatch {
    pub(super) waker: Waker,
    pub(super) events: SocketWatch,
    pub(super) completions: SocketWatch,
}

impl VerbsStream {
    pub(super) fn new(
        core: &Rc<EngineCore>,
        queues: ConnectionQueues,
        signal: LocalSignal,
        peer: SocketAddr,
    ) -> VerbsStream {
        VerbsStream(Rc::new(VerbsEnd {
            core: core.clone(),
            queues: RefCell::new(queues),
            membership: RefCell::default(),
            signal,
            peer: peer.to_string().into(),
            peer_ip: peer.ip(),
        }))
    }

    /// Has events of the device end the connection.
    fn join_device(&self, queue_pair: &QueuePair) -> Result<DeviceMembership, VerbsError> {
        let (device, identity) = (queue_pair.device()?, queue_pair.identity()?);
        let end = &self.0;
        Ok(device_watch::join(&end.core, device, identity, (end.signal.signal.clone(), &end.peer)))
    }

    /// Wakes the task if something has happened, or else when it does. `is_connecting`: the task
    /// waits for the address to be resolved.
    fn wait(&self, watch: &VerbsWatch, is_connecting: bool) {
        let mut queues = self.0.queues.borrow_mut();
        // The task finds the error when it receives.
        let has_failed = queues.notify().is_err();
        let is_known = is_connecting && queues.is_known();
        if has_failed || is_known || queues.events.len() > 0 || queues.has_ended || self.is_hung_up() {
            return watch.waker.wake();
        }
        let (events, completions) = queues.descriptors();
        if let Some(events) = events {
            watch.events.wake_when(&events, libc::POLLIN);
        }
        if let Some(completions) = completions {
            watch.completions.wake_when(&completions, libc::POLLIN);
        }
        self.0.signal.wake_when_set(&watch.waker);
    }

    fn is_hung_up(&self) -> bool {
        self.0.signal.signal.has_ended()
    }
}

impl Drop for VerbsEnd {
    fn drop(&mut self) {
        self.queues.get_mut().end();
    }
}

impl NetworkStream for VerbsStream {
    fn peer_ip(&self) -> Option<IpAddr> {
        Some(self.0.peer_ip)
    }

    fn local_address(&self) -> Option<SocketAddr> {
        self.0.queues.borrow().local_address()
    }

    fn hang_up(&self) -> HangUp {
        let signal = self.0.signal.signal.clone();
        Arc::new(move || signal.hang_up())
    }

    fn control(&self) -> ConnectionHandle {
        Arc::new(self.0.signal.signal.clone())
    }
}

impl ByteStream for VerbsStream {
    type Watch = VerbsWatch;

    fn share(&self) -> VerbsStream {
        VerbsStream(self.0.clone())
    }

    fn close(&self) {
        self.0.signal.signal.hang_up();
    }

    fn peer(&self) -> &str {
        &self.0.peer
    }

    fn shared_peer(&self) -> Arc<str> {
        self.0.peer.clone()
    }

    /// The address and the route are resolved; the queue pair requests the connection.
    fn connect_result(&self) -> Option<io::Result<()>> {
        let mut queues = self.0.queues.borrow_mut();
        match queues.look(true) {
            Ok(()) => queues.is_known().then_some(Ok(())),
            Err(error) => Some(Err(error)),
        }
    }

    #[inline]
    fn receive(&mut self, chunk: &mut Chunk, most: usize) -> io::Result<usize> {
        let mut queues = self.0.queues.borrow_mut();
        let looked = queues.look(false);
        if self.is_hung_up() {
            queues.end();
        }
        if queues.has_ended {
            // Another queue pair may get the number of this one.
            self.0.membership.take();
        }
        let most = chunk.room().min(most);
        // What has happened before an error is reported before it.
        match queues.events.take(most, |bytes| chunk.extend(bytes)) {
            0 if most == 0 => Err(io::ErrorKind::WouldBlock.into()),
            0 => {
                looked?;
                if queues.has_ended { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) }
            }
            len => Ok(len),
        }
    }

    fn waiting(&self) -> usize {
        self.0.queues.borrow().events.len()
    }

    /// Sessions over records place no payload.
    fn receive_placed(&mut self, _list: &SgList, _at: usize, _chunk: &mut Chunk) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    #[inline]
    fn send(&mut self, outbox: &mut Outbox) -> io::Result<usize> {
        let mut queues = self.0.queues.borrow_mut();
        let posted = queues.post_all(outbox);
        let mut membership = self.0.membership.borrow_mut();
        if membership.is_none()
            && let Some(queue_pair) = queues.queue_pair()
        {
            *membership = Some(self.join_device(queue_pair)?);
        }
        posted
    }

    fn wake_when_readable(&self, watch: &VerbsWatch) {
        self.wait(watch, false);
    }

    /// While the address is being resolved; later all work has room.
    fn wake_when_writable(&self, watch: &VerbsWatch) {
        self.wait(watch, true);
    }

    fn ended(&self) -> StreamEnd {
        match self.is_hung_up() || self.0.queues.borrow().has_ended {
            true => StreamEnd::Both,
            false => StreamEnd::Not,
        }
    }

    fn wake_when_ended(&self, so_far: StreamEnd, watch: &VerbsWatch) {
        let queues = self.0.queues.borrow();
        if so_far == StreamEnd::Not && queues.has_ended {
            return watch.waker.wake();
        }
        if let (Some(events), _) = queues.descriptors() {
            watch.events.wake_when(&events, libc::POLLIN);
        }
        self.0.signal.wake_when_set(&watch.waker);
    }
}
