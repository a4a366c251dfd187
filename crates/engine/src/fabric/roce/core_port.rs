//! A core's share of a UDP port: its connections, and the task that receives for all of them.

use super::group::RoceShare;
use super::path::RocePath;
use super::socket::{ArrivedPacket, MAX_DATAGRAM, ReceiveBuffers};
use crate::core::reactor::{EngineCore, Progress, Task, cross_thread_waker};
use crate::fabric::byte_queue::ByteQueue;
use crate::net::host::{Host, SocketWatch};
use blockmux_proto::driver::transport::FlowInfo;
use blockmux_rdma::roce::port::{
    OpenedConnection, RETIREMENT, RocePort, RocePortLimits, RoceRequest, Routed,
};
use blockmux_rdma::roce::record::{HEAD_LEN, RecordHead};
use blockmux_volume::{Chunk, Core, Waker};
use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The connections of one core at a UDP port.
pub(super) struct CorePort {
    pub(super) share: Rc<RoceShare>,
    port: RocePort,
    /// By the number of the queue pair.
    flows: HashMap<u32, Rc<FlowState>>,
    /// Wakes the task, from any thread.
    wake: Arc<dyn Fn() + Send + Sync>,
    /// Whether a connection was hung up since the task has last run.
    has_hung_up: Arc<AtomicBool>,
    /// What connections have found since the task has last run.
    looked: Looked,
    /// Without connections: until when the task goes on.
    lingers_until: Option<Instant>,
    core: Rc<EngineCore>,
    /// The task has ended.
    pub(super) is_over: bool,
}

/// What connections that receive for themselves have found at the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Looked {
    /// None has looked.
    Not,
    Packets,
    Nothing,
}

/// What a connection shares with its port.
pub(super) struct FlowState {
    pub(super) arrived: RefCell<ByteQueue>,
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
    /// Opens the port on `core` and starts its task, which lives as long as a connection does, and
    /// [`CorePort::lingers`] after that.
    pub(super) fn spawn(core: &Rc<EngineCore>, share: RoceShare) -> io::Result<Rc<RefCell<CorePort>>> {
        let port = share.port(LIMITS)?;
        let mut made = None;
        core.spawn(|waker| {
            let port = CorePort {
                share: Rc::new(share),
                port,
                flows: HashMap::new(),
                wake: cross_thread_waker(core, waker),
                has_hung_up: Arc::default(),
                looked: Looked::Not,
                lingers_until: None,
                core: core.clone(),
                is_over: false,
            };
            let port = Rc::new(RefCell::new(port));
            made = Some(port.clone());
            let waker = waker.clone();
            PortTask {
                port,
                watch: core.watch(&waker),
                waker,
                looks_at: None,
                buffers: ReceiveBuffers::new(),
            }
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
        self.lingers_until = None;
        OpenedFlow { state, path, info: path.describe(opened, service), named }
    }

    /// Where a datagram belongs.
    pub(super) fn route(&mut self, packet: &ArrivedPacket<'_>, now: Instant) -> Option<Routed> {
        Some(self.port.route(&packet.flow()?, packet.datagram, now))
    }

    /// Receives on behalf of a connection that has nothing queued: its records into `chunk`, at
    /// most `most` bytes, and packets of others into their queues. Packets of both that have
    /// arrived joined go into the queues, too. Returns the number of bytes in `chunk`.
    pub(super) fn receive_for(&mut self, own: u32, chunk: &mut Chunk, most: usize) -> usize {
        let mut filled = 0;
        while self.looked != Looked::Nothing && filled + MAX_RECORD <= most && MAX_RECORD <= chunk.room() {
            let len = self.receive_record(own, chunk.spare());
            if len == 0 {
                break;
            }
            chunk.fill(len);
            filled += len;
        }
        filled
    }

    /// Receives once into `spare`. Returns the length of the record there; 0 if there is none.
    fn receive_record(&mut self, own: u32, spare: &mut [u8]) -> usize {
        let (share, now) = (self.share.clone(), self.core.now());
        let Some((head, place)) = spare.split_first_chunk_mut::<HEAD_LEN>() else { return 0 };
        let received = share.socket().receive_into(place);
        self.looked = if received.is_ok() { Looked::Packets } else { Looked::Nothing };
        let Ok(Some(arrived)) = received else { return 0 };
        // The number of packets so far, as long as all are for this connection.
        let mut own_count = Some(0);
        for packet in arrived.packets() {
            let routed = self.route(&packet, now);
            match own_count {
                Some(count) if routed == Some(Routed::Connection(own)) => own_count = Some(count + 1),
                Some(count) => {
                    own_count = None;
                    for packet in arrived.packets().take(count) {
                        self.deliver(own, packet.datagram, packet.is_marked);
                    }
                    self.deliver_routed(&packet, routed);
                }
                None => self.deliver_routed(&packet, routed),
            }
        }
        if own_count.is_none_or(|count| count == 0) {
            return 0;
        }
        // At most `MAX_DATAGRAM`.
        let (len, packet_len) = (arrived.bytes.len(), arrived.packet_len as u16);
        *head = RecordHead { len: len as u32, packet_len, is_marked: arrived.is_marked }.to_bytes();
        HEAD_LEN + len
    }

    /// Gives a datagram to its connection, or answers it.
    pub(super) fn take(&mut self, packet: &ArrivedPacket<'_>, now: Instant) {
        let routed = self.route(packet, now);
        self.deliver_routed(packet, routed);
    }

    fn deliver_routed(&mut self, packet: &ArrivedPacket<'_>, routed: Option<Routed>) {
        match routed {
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
        flow.arrived.borrow_mut().push_packet(datagram, is_marked);
        flow.wake();
    }

    /// Forgets a connection.
    pub(super) fn close(&mut self, queue_pair: u32) {
        self.flows.remove(&queue_pair);
        self.port.close(queue_pair, Instant::now());
        if self.flows.is_empty() {
            (self.wake)();
        }
    }

    /// Whether the port stays open without connections: the peer of the last one may not have got
    /// the answer to its release, and repeats that, and any port answers it. So as long as numbers
    /// rest, unless nobody listens, so that other programs may have the UDP port.
    fn lingers(&mut self, now: Instant) -> bool {
        let until = *self.lingers_until.get_or_insert_with(|| now + RETIREMENT);
        now < until && self.share.is_listened_at() && !self.core.is_stopping()
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
}

/// Receives for the connections of a [`CorePort`], as long as there are any.
struct PortTask {
    port: Rc<RefCell<CorePort>>,
    watch: SocketWatch,
    waker: Waker,
    /// When it looks next whether a port without connections is still needed.
    looks_at: Option<Instant>,
    buffers: ReceiveBuffers,
}

impl Task for PortTask {
    #[inline]
    fn run(&mut self) -> Progress {
        let mut port = self.port.borrow_mut();
        if port.has_hung_up.swap(false, Ordering::Acquire) {
            port.flows.values().for_each(|flow| flow.wake());
        }
        let (share, now) = (port.share.clone(), port.core.now());
        if port.flows.is_empty() {
            if !port.lingers(now) {
                port.is_over = true;
                return Progress::Done;
            }
            if self.looks_at.is_none_or(|at| at <= now) {
                let at = now + LINGER_TICK;
                self.looks_at = Some(at);
                port.core.wake_at(at, &self.waker);
            }
        }
        if std::mem::replace(&mut port.looked, Looked::Not) != Looked::Not {
            return Progress::Idle;
        }
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
        let mut port = self.port.borrow_mut();
        port.looked = Looked::Not;
        self.watch.wake_when(port.share.socket(), libc::POLLIN);
    }
}

/// How often a port without connections looks whether it is still needed.
const LINGER_TICK: Duration = Duration::from_secs(1);
/// The longest record that one receive call makes.
const MAX_RECORD: usize = HEAD_LEN + MAX_DATAGRAM;
const LIMITS: RocePortLimits = RocePortLimits {
    connections: 4096,
    requests: 256,
    requests_of_address: 64,
    requests_per_second: 1000,
    request_burst: 256,
};

#[cfg(test)]
mod tests {
    use super::super::group::RoceGroup;
    use super::*;
    use crate::core::reactor::{PollPolicy, Reactor};
    use blockmux_proto::driver::outbox::Outbox;
    use blockmux_rdma::roce::bytes::UDP_PORT;
    use blockmux_volume::Memory;
    use std::net::{IpAddr, Ipv4Addr};

    /// Acknowledgements to these queue pairs, as one record.
    fn record(queue_pairs: &[u32]) -> Outbox {
        let mut outbox = Outbox::default();
        let len = 20 * queue_pairs.len() as u32;
        outbox.push_head(&RecordHead { len, packet_len: 20, is_marked: false }.to_bytes());
        for queue_pair in queue_pairs {
            outbox.push_heads([
                &[0x11, 0, 0xff, 0xff],
                &queue_pair.to_be_bytes(),
                &[0, 0, 0, 1, 31],
                &[0; 7],
            ]);
        }
        outbox
    }

    #[test]
    fn a_port_without_connections_stays_open_for_a_while_if_something_listens() {
        let (reactor, _inbox) = Reactor::new(PollPolicy::Never, 1 << 20).unwrap();
        let core = reactor.core();
        let [.., high, low] = std::process::id().to_be_bytes();
        let group = RoceGroup::at((Ipv4Addr::new(127, 189, high, low), UDP_PORT).into()).unwrap();
        let path = RocePath::back(group.address.ip(), group.address);
        let port = CorePort::spawn(core, group.share().unwrap()).unwrap();
        let mut port = port.borrow_mut();
        let now = core.now();
        assert!(!port.lingers(now), "nobody listens");
        port.lingers_until = None;
        let acceptor = group.acceptor().unwrap();
        let last = now + RETIREMENT - Duration::from_nanos(1);
        assert!(port.lingers(now) && port.lingers(last) && !port.lingers(now + RETIREMENT));
        // A connection begins another while.
        let opened = port.connect(path, group.address, now).unwrap();
        port.close(opened.info.queue_pair);
        assert!(port.lingers(now + RETIREMENT));
        drop(acceptor);
        assert!(!port.lingers(now + RETIREMENT));
        let _acceptor = group.acceptor().unwrap();
        core.stop();
        assert!(!port.lingers(now + RETIREMENT));
    }

    /// The kernel joins what comes from one address, whichever connections it is for.
    #[test]
    fn packets_that_arrive_joined_reach_their_connections() {
        let (reactor, _inbox) = Reactor::new(PollPolicy::Never, 1 << 20).unwrap();
        let core = reactor.core();
        let [.., high, low] = std::process::id().to_be_bytes();
        let ip = IpAddr::from(Ipv4Addr::new(127, 195, high, low));
        let group = RoceGroup::at((ip, UDP_PORT).into()).unwrap();
        let path = RocePath::back(ip, group.address);
        let port = CorePort::spawn(core, group.share().unwrap()).unwrap();
        let mut port = port.borrow_mut();
        let [own, other] = [(); 2].map(|()| port.connect(path, group.address, core.now()).unwrap());
        let [a, b] = [&own, &other].map(|flow| flow.info.queue_pair);
        let mut chunk = Chunk::new(Memory::from_heap(3 * MAX_RECORD));
        for (queue_pairs, direct, queued) in
            [(&[a, a, a][..], 3, [0, 0]), (&[a, b, a], 0, [2, 1]), (&[b], 0, [0, 1]), (&[a], 1, [0, 0])]
        {
            group.share().unwrap().socket().send(&path, &mut record(queue_pairs)).unwrap();
            port.looked = Looked::Not;
            let len = port.receive_for(a, &mut chunk, usize::MAX);
            assert_eq!(len, if direct > 0 { HEAD_LEN + direct * 20 } else { 0 }, "{queue_pairs:?}");
            for (flow, count) in [&own, &other].into_iter().zip(queued) {
                let mut arrived = flow.state.arrived.borrow_mut();
                assert_eq!(arrived.take(usize::MAX, |_| {}), count * (HEAD_LEN + 20), "{queue_pairs:?}");
            }
            chunk.take(len);
        }
        assert_eq!((port.receive_for(a, &mut chunk, usize::MAX), port.looked), (0, Looked::Nothing));
    }
}
