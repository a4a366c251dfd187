//! A core's share of a UDP port: its connections, and the task that receives for all of them.

use super::group::RoceShare;
use super::packets::RecordQueue;
use super::path::RocePath;
use super::socket::{ArrivedPacket, ReceiveBuffers, RecordSender};
use crate::core::reactor::{EngineCore, Progress, Task, cross_thread_waker};
use crate::net::host::{Host, SocketWatch};
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::transport::FlowInfo;
use blockmux_rdma::roce::port::{OpenedConnection, RocePort, RocePortLimits, RoceRequest, Routed};
use blockmux_volume::{Core, Waker};
use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The connections of one core at a UDP port.
pub(super) struct CorePort {
    share: Rc<RoceShare>,
    port: RocePort,
    /// By the number of the queue pair.
    flows: HashMap<u32, Rc<FlowState>>,
    sender: RecordSender,
    /// Wakes the task, from any thread.
    wake: Arc<dyn Fn() + Send + Sync>,
    /// Whether a connection was hung up since the task has last run.
    has_hung_up: Arc<AtomicBool>,
    /// The task has ended.
    is_over: bool,
}

/// What a connection shares with its port.
pub(super) struct FlowState {
    pub(super) arrived: RefCell<RecordQueue>,
    /// The task that waits for packets, or for the end.
    pub(super) reader: RefCell<Option<Waker>>,
    pub(super) is_hung_up: Arc<AtomicBool>,
}

/// A connection that was just opened.
pub(super) struct OpenedFlow {
    pub(super) state: Rc<FlowState>,
    pub(super) path: RocePath,
    pub(super) info: FlowInfo,
    /// The peer in messages.
    pub(super) named: SocketAddr,
}

impl FlowState {
    fn wake(&self) {
        if let Some(reader) = self.reader.borrow_mut().take() {
            reader.wake();
        }
    }
}

impl CorePort {
    /// Opens the port on `core` and starts its task, which lives as long as a connection does.
    pub(super) fn spawn(core: &Rc<EngineCore>, share: RoceShare) -> io::Result<Rc<RefCell<CorePort>>> {
        let port = share.port(LIMITS)?;
        let mut made = None;
        core.spawn(|waker| {
            let port = CorePort {
                share: Rc::new(share),
                port,
                flows: HashMap::new(),
                sender: RecordSender::default(),
                wake: cross_thread_waker(core, waker),
                has_hung_up: Arc::default(),
                is_over: false,
            };
            let port = Rc::new(RefCell::new(port));
            made = Some(port.clone());
            PortTask { port, watch: core.watch(waker), buffers: ReceiveBuffers::new(), core: core.clone() }
        });
        made.ok_or_else(|| io::Error::other("the core runs no task"))
    }

    /// Opens a connection to `service` of a peer.
    pub(super) fn connect(
        &mut self,
        path: RocePath,
        service: SocketAddr,
        now: Instant,
    ) -> io::Result<OpenedFlow> {
        let opened = self.port.connect(path.peer.ip(), now);
        let opened =
            opened.ok_or_else(|| io::Error::other("the UDP port has as many connections as it may"))?;
        Ok(self.open(path, &opened, (service.port(), service)))
    }

    /// Opens a connection for a request, whose packet is its first. `None` if the peer or all peers
    /// have as many as they may.
    pub(super) fn admit(
        &mut self,
        path: RocePath,
        request: &RoceRequest,
        from: SocketAddr,
        now: Instant,
    ) -> Option<OpenedFlow> {
        let opened = self.port.admit(request, now)?;
        if let Some(replaced) = opened.replaced {
            let replaced = self.flows.remove(&replaced);
            replaced.into_iter().for_each(|flow| {
                flow.is_hung_up.store(true, Ordering::Relaxed);
                flow.wake();
            });
        }
        Some(self.open(path, &opened, (request.service.unwrap_or_default(), from)))
    }

    /// `named` is the peer in messages.
    fn open(
        &mut self,
        path: RocePath,
        opened: &OpenedConnection,
        (service, named): (u16, SocketAddr),
    ) -> OpenedFlow {
        let state = Rc::new(FlowState {
            arrived: RefCell::default(),
            reader: RefCell::default(),
            is_hung_up: Arc::default(),
        });
        self.flows.insert(opened.numbers.queue_pair, state.clone());
        OpenedFlow { state, path, info: path.describe(opened, service), named }
    }

    /// Where a datagram belongs.
    pub(super) fn route(&mut self, packet: &ArrivedPacket<'_>, now: Instant) -> Option<Routed> {
        Some(self.port.route(&packet.flow()?, packet.datagram, now))
    }

    /// Gives a datagram to its connection, or answers it.
    pub(super) fn take(&mut self, packet: &ArrivedPacket<'_>, now: Instant) {
        match self.route(packet, now) {
            Some(Routed::Connection(queue_pair)) => {
                self.deliver(queue_pair, packet.datagram, packet.is_marked);
            }
            Some(Routed::Answer(answer)) => self.share.answer(packet.to, packet.from, &answer),
            // Requests arrive at the acceptor.
            Some(Routed::Request(_) | Routed::Dropped(_)) | None => {}
        }
    }

    /// Gives a packet to a connection, which the network may have marked.
    pub(super) fn deliver(&mut self, queue_pair: u32, datagram: &[u8], is_marked: bool) {
        let Some(flow) = self.flows.get(&queue_pair) else { return };
        flow.arrived.borrow_mut().push(datagram, is_marked);
        flow.wake();
    }

    /// Sends the records of a connection.
    pub(super) fn send(&mut self, path: &RocePath, outbox: &mut Outbox) -> io::Result<usize> {
        self.sender.send(self.share.socket(), path, outbox)
    }

    /// Forgets a connection.
    pub(super) fn close(&mut self, queue_pair: u32) {
        self.flows.remove(&queue_pair);
        self.port.close(queue_pair, Instant::now());
        if self.flows.is_empty() {
            (self.wake)();
        }
    }

    /// A function that ends a connection, from any thread.
    pub(super) fn hang_up(&self, flow: &FlowState) -> impl Fn() + Send + Sync + use<> {
        let (flow, port, wake) = (flow.is_hung_up.clone(), self.has_hung_up.clone(), self.wake.clone());
        move || {
            flow.store(true, Ordering::Relaxed);
            port.store(true, Ordering::Release);
            wake();
        }
    }

    /// Whether the task that receives has ended.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    pub(super) fn share(&self) -> &RoceShare {
        &self.share
    }
}

/// Receives for the connections of a [`CorePort`], as long as there are any.
struct PortTask {
    port: Rc<RefCell<CorePort>>,
    watch: SocketWatch,
    buffers: ReceiveBuffers,
    core: Rc<EngineCore>,
}

impl Task for PortTask {
    #[inline]
    fn run(&mut self) -> Progress {
        let mut port = self.port.borrow_mut();
        if port.has_hung_up.swap(false, Ordering::Acquire) {
            port.flows.values().for_each(|flow| flow.wake());
        }
        if port.flows.is_empty() {
            port.is_over = true;
            return Progress::Done;
        }
        let (share, now) = (port.share.clone(), self.core.now());
        let received = share.socket().receive(&mut self.buffers, |packet| port.take(&packet, now));
        match received {
            Ok(true) => Progress::More,
            Ok(false) => Progress::Drained,
            Err(_) => Progress::Idle,
        }
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn park(&mut self) {
        self.watch.wake_when(self.port.borrow().share.socket(), libc::POLLIN);
    }
}

const LIMITS: RocePortLimits = RocePortLimits { connections: 4096, requests: 256, requests_of_address: 64 };
