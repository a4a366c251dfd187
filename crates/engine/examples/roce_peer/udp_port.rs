//! The connections of one UDP socket at the port of RoCEv2: receives, sends, and waits for timers.

use blockmux_engine::sys::set_option;
use blockmux_proto::driver::session::Timed;
use blockmux_proto::rdma::{Endpoint, Event, QueuePair};
use blockmux_rdma::roce::port::{RocePort, RocePortLimits, RoceRequest, Routed};
use blockmux_rdma::roce::{Roce, RoceConfig, RoceNumbers};
use blockmux_rdma::{Provider, Seed};
use blockmux_volume::{Chunk, Pool};
use blockmux_wire::roce::UDP_PORT;
use blockmux_wire::roce::cm::RejectReason;
use blockmux_wire::roce::icrc::{Fragmentation, RoceAddresses, RoceFlow};
use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// What runs on a connection.
pub(crate) trait Application {
    fn endpoint(&self) -> Endpoint;

    /// Handles an event; what it fails with ends the connection.
    fn on_event(&mut self, event: Event, queue_pair: &mut Roce) -> Result<(), String>;

    /// What has been done, for the line at the end; or why that is too little.
    fn result(&self) -> Result<String, String>;
}

/// Which application a port has.
pub(crate) trait RequestedService {
    /// The application of a new connection to this port; `None`: nobody listens.
    fn application(&mut self, service: u16) -> Option<Box<dyn Application>>;
}

/// A socket with its connections.
pub(crate) struct UdpPort {
    socket: UdpSocket,
    is_blocking: bool,
    /// Whether there may be more to send at once.
    is_busy: bool,
    local: IpAddr,
    mtu: u16,
    port: RocePort,
    pool: Pool,
    /// By the number of the queue pair.
    connections: BTreeMap<u32, OpenConnection>,
    datagram: Vec<u8>,
}

struct OpenConnection {
    peer: IpAddr,
    queue_pair: Roce,
    application: Box<dyn Application>,
    failure: Option<String>,
}

/// A connection that has ended.
pub(crate) struct EndedConnection {
    peer: IpAddr,
    done: String,
    pub(crate) failure: Option<String>,
}

impl std::fmt::Display for EndedConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.failure {
            None => write!(f, "{}: {}", self.peer, self.done),
            Some(failure) => write!(f, "{}: failed: {failure}", self.peer),
        }
    }
}

impl UdpPort {
    pub(crate) fn bind(local: IpAddr, mtu: u16) -> io::Result<UdpPort> {
        let socket = UdpSocket::bind(SocketAddr::new(local, UDP_PORT))?;
        // Packets are never fragmented. Over IPv4, Linux gives such packets of a socket that is not
        // connected the identification 0, and others one that nobody could predict.
        match local {
            IpAddr::V4(_) => set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::PROBE)?,
            IpAddr::V6(_) => {
                set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::PROBE)?;
                // Peers send no UDP checksum, which IPv6 drops unless it is told to.
                let is_on = 1_i32.to_ne_bytes();
                set_option(socket.as_raw_fd(), libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, &is_on)?;
            }
        }
        let limits = RocePortLimits {
            connections: 64,
            requests: 16,
            requests_of_address: 8,
            requests_per_second: 1000,
            request_burst: 64,
        };
        Ok(UdpPort {
            socket,
            is_blocking: true,
            is_busy: true,
            local,
            mtu,
            port: RocePort::new(limits, random()?),
            pool: Pool::new(POOL_LEN),
            connections: BTreeMap::new(),
            datagram: vec![0; usize::from(u16::MAX)],
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// Requests a connection.
    pub(crate) fn connect(
        &mut self,
        peer: IpAddr,
        service: u16,
        application: Box<dyn Application>,
    ) -> io::Result<()> {
        let now = Instant::now();
        let Some(opened) = self.port.connect(peer, now) else { return Ok(()) };
        self.open(Roce::active, peer, service, opened.numbers, application, now)
    }

    fn open(
        &mut self,
        create: CreateEnd,
        peer: IpAddr,
        service: u16,
        numbers: RoceNumbers,
        application: Box<dyn Application>,
        now: Instant,
    ) -> io::Result<()> {
        let (local, mtu) = (self.local, self.mtu);
        let config = RoceConfig {
            local,
            peer,
            service,
            source_port: SOURCE_PORT,
            mtu,
            window: WINDOW,
            keep_alive: Some(KEEP_ALIVE),
        };
        let pool = self.pool.clone();
        let queue_pair = create(&application.endpoint(), config, numbers, pool, random()?, now);
        let connection = OpenConnection { peer, queue_pair, application, failure: None };
        self.connections.insert(numbers.queue_pair, connection);
        Ok(())
    }

    /// Receives what has arrived, or waits until something arrives or a timer is due; then handles
    /// events and sends. Returns the connections that have ended.
    pub(crate) fn turn(&mut self, services: &mut dyn RequestedService) -> io::Result<Vec<EndedConnection>> {
        for nth in 0..BATCH {
            if !self.receive(nth == 0 && !self.is_busy, services)? {
                break;
            }
        }
        let now = Instant::now();
        self.connections.values_mut().for_each(|connection| connection.work(now));
        // A few at a time, since the peer's packets wait in a buffer meanwhile.
        self.is_busy = self.send(BATCH)?;
        let mut ended = Vec::new();
        for (number, connection) in &self.connections {
            if connection.queue_pair.is_drained() {
                self.port.close(*number, now);
                ended.push(*number);
            }
        }
        let ended = ended.into_iter().filter_map(|number| self.connections.remove(&number));
        Ok(ended.map(OpenConnection::end).collect())
    }

    /// Sends up to `count` packets of each connection; returns whether there may be more.
    fn send(&mut self, count: usize) -> io::Result<bool> {
        let (mut packet, mut is_busy) = (Vec::new(), false);
        for connection in self.connections.values_mut() {
            let mut left = count;
            while left > 0 && connection.queue_pair.poll_transmit(Instant::now(), &mut packet) {
                send(&self.socket, self.local, connection.peer, &mut packet)?;
                left -= 1;
            }
            is_busy |= left == 0;
        }
        Ok(is_busy)
    }

    /// Receives a datagram; returns `false` if there was none.
    fn receive(&mut self, may_wait: bool, services: &mut dyn RequestedService) -> io::Result<bool> {
        if may_wait {
            let timeout = self.connections.values().filter_map(|open| open.queue_pair.poll_timeout()).min();
            let wait = timeout.map(|timeout| timeout.saturating_duration_since(Instant::now()));
            self.socket.set_read_timeout(wait.map(|wait| wait.max(SHORTEST_WAIT)))?;
        }
        if may_wait != self.is_blocking {
            self.socket.set_nonblocking(!may_wait)?;
            self.is_blocking = may_wait;
        }
        let (len, from) = match self.socket.recv_from(&mut self.datagram) {
            Ok(received) => received,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Ok(false);
            }
            // A peer without this port; the connection's timers notice it.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Ok(true),
            Err(error) => return Err(error),
        };
        let Some(flow) = flow(from.ip(), self.local, from.port()) else { return Ok(true) };
        let (now, datagram) = (Instant::now(), Chunk::from_slice(&self.datagram[..len]));
        match self.port.route(&flow, datagram.unread(), now) {
            Routed::Connection(number) => self.deliver(number, &datagram, now),
            Routed::Request(request) => self.on_request(request, &datagram, services, now)?,
            Routed::Answer(mut packet) => send(&self.socket, self.local, from.ip(), &mut packet)?,
            Routed::Dropped(_) => {}
        }
        Ok(true)
    }

    fn on_request(
        &mut self,
        request: RoceRequest,
        datagram: &Chunk,
        services: &mut dyn RequestedService,
        now: Instant,
    ) -> io::Result<()> {
        let Some(application) = request.service.and_then(|service| services.application(service)) else {
            let reason = RejectReason::INVALID_SERVICE_ID;
            return match self.port.refuse(datagram.unread(), reason, now) {
                Some(mut packet) => send(&self.socket, self.local, request.peer, &mut packet),
                None => Ok(()),
            };
        };
        let Some(opened) = self.port.admit(&request, now) else { return Ok(()) };
        if let Some(replaced) = opened.replaced {
            self.connections.remove(&replaced);
        }
        self.open(Roce::passive, request.peer, 0, opened.numbers, application, now)?;
        self.deliver(opened.numbers.queue_pair, datagram, now);
        Ok(())
    }

    fn deliver(&mut self, number: u32, datagram: &Chunk, now: Instant) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        // This socket does not ask for the ECN codepoint.
        let result = connection.queue_pair.on_packet(datagram, false, now).map_err(|error| error.to_string());
        connection.note(result);
    }
}

impl OpenConnection {
    fn work(&mut self, now: Instant) {
        if self.queue_pair.poll_timeout().is_some_and(|timeout| timeout <= now) {
            let result = self.queue_pair.on_timeout(now).map_err(|error| error.to_string());
            self.note(result);
        }
        while let Some(event) = self.queue_pair.poll() {
            let result = self.application.on_event(event, &mut self.queue_pair);
            if result.is_err() {
                self.queue_pair.disconnect();
            }
            self.note(result);
        }
    }

    /// Keeps the first failure.
    fn note(&mut self, result: Result<(), String>) {
        if let Err(failure) = result {
            self.failure.get_or_insert(failure);
        }
    }

    fn end(self) -> EndedConnection {
        let refused = self.queue_pair.rejection().map(|reason| format!("the peer refuses: {reason:?}"));
        let failure = self.failure.or(refused);
        let (done, failure) = match (self.application.result(), failure) {
            (Ok(done), failure) => (done, failure),
            (Err(short), failure) => (String::new(), failure.or(Some(short))),
        };
        EndedConnection { peer: self.peer, done, failure }
    }
}

/// [`Roce::active`] or [`Roce::passive`].
type CreateEnd = fn(&Endpoint, RoceConfig, RoceNumbers, Pool, Seed, Instant) -> Roce;

/// Appends the ICRC and sends the packet, which is empty afterwards.
fn send(socket: &UdpSocket, local: IpAddr, peer: IpAddr, packet: &mut Vec<u8>) -> io::Result<()> {
    if let Some(flow) = flow(local, peer, UDP_PORT) {
        // See [`UdpPort::bind`].
        let fragmentation = Fragmentation { identification: 0, dont_fragment: true };
        packet.extend_from_slice(&flow.icrc(fragmentation, packet));
        match socket.send_to(packet, SocketAddr::new(peer, UDP_PORT)) {
            // As if it was lost on the way: the transport sends it again.
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionRefused) => {}
            result => drop(result?),
        }
    }
    packet.clear();
    Ok(())
}

fn flow(source: IpAddr, destination: IpAddr, source_port: u16) -> Option<RoceFlow> {
    let addresses = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => RoceAddresses::V4 { source, destination },
        (IpAddr::V6(source), IpAddr::V6(destination)) => RoceAddresses::V6 { source, destination },
        _ => return None,
    };
    Some(RoceFlow { addresses, source_port })
}

fn random() -> io::Result<Seed> {
    let mut seed = Seed::default();
    File::open("/dev/urandom")?.read_exact(&mut seed)?;
    Ok(seed)
}

/// Packets that are received or sent before it is the other direction's turn.
const BATCH: usize = 16;
/// A timeout of zero would mean none.
const SHORTEST_WAIT: Duration = Duration::from_micros(1);
/// Packets in flight of each connection.
const WINDOW: u32 = 64;
/// How long a peer may be silent before it is asked for a sign of life.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// The port that requests of this side are said to come from.
const SOURCE_PORT: u16 = 40_000;
/// Memory for messages, in bytes.
const POOL_LEN: usize = 64 << 20;
