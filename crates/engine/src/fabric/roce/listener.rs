//! Accepts connections of RoCEv2. A request names its service by a port number, so that several
//! protocols share the UDP port of an address.

use super::RoceFabric;
use super::accepted::ArrivedRequest;
use super::group::{RoceGroup, RoceShare};
use super::host::RoceHost;
use super::socket::{ArrivedPacket, ReceiveBuffers};
use crate::core::reactor::{EngineCore, Inbox, Progress, Task};
use crate::fabric::FabricListener;
use crate::net::host::{Host, SocketWatch};
use crate::net::socket::Address;
use crate::serve::listener::{ConnectionLimit, ListenerEnd, Serve};
use blockmux_rdma::roce::bytes::RejectReason;
use blockmux_rdma::roce::port::{RocePort, RocePortLimits, RoceRequest, Routed};
use blockmux_volume::Core;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;
use tracing::warn;

/// A UDP port that is open, at which one service listens.
pub struct RoceListener {
    group: Arc<RoceGroup>,
    /// Where the service listens: the UDP port may be open at all addresses, for another service.
    service: SocketAddr,
}

impl FabricListener for RoceListener {
    type Fabric = RoceFabric;

    /// Listens at this IP address for requests that name this port number. The UDP port is always
    /// that of RoCEv2.
    ///
    /// # Errors
    /// If another program has the UDP port, or the address is not local.
    fn bind(address: SocketAddr) -> io::Result<RoceListener> {
        Ok(RoceListener { group: RoceGroup::at(address)?, service: address })
    }

    /// # Errors
    /// If the system has no random numbers.
    fn accept(
        self,
        core: &Rc<EngineCore>,
        end: ListenerEnd,
        cores: Vec<Inbox>,
        serve: Serve<RoceHost>,
        limit: ConnectionLimit,
    ) -> io::Result<()> {
        let RoceListener { group, service: listens_at } = self;
        let (cores, passed) = (cores.into(), Arc::default());
        let service = Service { group: group.clone(), listens_at, end, cores, serve, limit, passed };
        let mut all = lock(&SERVICES);
        all.retain(|services| services.strong_count() > 0);
        let Some(share) = group.acceptor() else {
            let known = all.iter().filter_map(Weak::upgrade);
            for services in known.filter(|services| services.address == group.address) {
                lock(&services.list).push(service.clone());
            }
            return Ok(());
        };
        let port = share.port(RocePortLimits::NONE)?;
        let services = Arc::new(Services { address: group.address, list: Mutex::new(vec![service]) });
        all.push(Arc::downgrade(&services));
        core.spawn(|waker| RoceListenerTask {
            services,
            share: Some(share),
            port,
            buffers: ReceiveBuffers::new(),
            watch: core.watch(waker),
            core: core.clone(),
        });
        Ok(())
    }
}

/// What listens at one UDP port.
struct Services {
    address: SocketAddr,
    list: Mutex<Vec<Service>>,
}

/// A service of a protocol.
#[derive(Clone)]
struct Service {
    group: Arc<RoceGroup>,
    listens_at: SocketAddr,
    end: ListenerEnd,
    cores: Arc<[Inbox]>,
    serve: Serve<RoceHost>,
    limit: ConnectionLimit,
    /// Requests on their way to a core.
    passed: Arc<AtomicUsize>,
}

/// The UDP ports of this process at which something listens.
static SERVICES: Mutex<Vec<Weak<Services>>> = Mutex::new(Vec::new());

/// Passes requests for connections to the cores of their services.
struct RoceListenerTask {
    services: Arc<Services>,
    /// The socket of requests, until the last service has ended.
    share: Option<RoceShare>,
    /// It has no connections, and only tells what a packet is.
    port: RocePort,
    buffers: ReceiveBuffers,
    watch: SocketWatch,
    core: Rc<EngineCore>,
}

impl RoceListenerTask {
    /// Removes services that have ended; returns whether any is left. The socket is released with
    /// the last one.
    fn has_services(&mut self) -> bool {
        // Under this lock no service is added, so none is added to a list that nobody looks at.
        let _all = lock(&SERVICES);
        let mut list = lock(&self.services.list);
        if self.core.is_stopping() {
            list.clear();
        }
        list.retain(|service| !service.end.is_due());
        if list.is_empty() {
            self.share = None;
        }
        !list.is_empty()
    }
}

/// Answers a packet, or passes it on.
fn on_packet(
    packet: &ArrivedPacket<'_>,
    port: &mut RocePort,
    share: &RoceShare,
    services: &Services,
    now: Instant,
) {
    let Some(flow) = packet.flow() else { return };
    match port.route(&flow, packet.datagram, now) {
        Routed::Request(request) => {
            let list = lock(&services.list);
            let is_asked = |service: &&Service| is_asked(service.listens_at, packet.to, request.service);
            let service = list.iter().find(is_asked).cloned();
            drop(list);
            let refused = match service {
                Some(service) => service.pass(packet, &request).err(),
                None => Some(RejectReason::INVALID_SERVICE_ID),
            };
            let answer = refused.and_then(|reason| port.refuse(packet.datagram, reason, now));
            if let Some(answer) = answer {
                share.answer(packet.to, packet.from, &answer);
            }
        }
        Routed::Answer(answer) => share.answer(packet.to, packet.from, &answer),
        Routed::Connection(_) | Routed::Dropped(_) => {}
    }
}

/// Whether a request to this address of the machine, for the service with this port, is for what
/// listens there.
fn is_asked(listens_at: SocketAddr, to: IpAddr, port: Option<u16>) -> bool {
    let is_there = listens_at.ip() == to || listens_at.ip().is_unspecified();
    is_there && port == Some(listens_at.port())
}

impl Service {
    /// Passes a request to its core. A request that finds too many under way is dropped: its sender
    /// repeats it.
    fn pass(&self, packet: &ArrivedPacket<'_>, request: &RoceRequest) -> Result<(), RejectReason> {
        let from = Address::Tcp(packet.from).to_string();
        if !self.limit.accepts((Some(request.peer), &from)) {
            return Err(RejectReason::CONSUMER);
        }
        if self.passed.fetch_add(1, Ordering::Relaxed) >= MAX_PASSED {
            self.passed.fetch_sub(1, Ordering::Relaxed);
            return Ok(());
        }
        let core = ArrivedRequest::core_of(request, self.cores.len());
        if let Some(core) = self.cores.get(core) {
            let (service, request) = (self.clone(), ArrivedRequest::new(packet));
            core.send(move |core| {
                service.passed.fetch_sub(1, Ordering::Relaxed);
                service.accept(core, &request);
            });
        }
        Ok(())
    }

    /// Opens the connection of a request on its core.
    fn accept(&self, core: &Rc<EngineCore>, request: &ArrivedRequest) {
        let host = RoceHost::on(core);
        let flow = match host.accept(&self.group, request) {
            Ok(Some(flow)) => flow,
            Ok(None) => return,
            Err(error) => return warn!("a connection of RoCEv2 is refused: {error}"),
        };
        if let Some(permit) = self.limit.admit_or_log(&flow) {
            (self.serve)(&host, flow, permit);
        }
    }
}

impl Task for RoceListenerTask {
    fn run(&mut self) -> Progress {
        if !self.has_services() {
            return Progress::Done;
        }
        let RoceListenerTask { services, share, port, buffers, core, watch } = self;
        let (now, Some(share)) = (core.now(), share) else { return Progress::Done };
        let received =
            share.socket().receive(buffers, |packet| on_packet(&packet, port, share, services, now));
        if received.is_ok() {
            return Progress::More;
        }
        watch.wake_when(share.socket(), libc::POLLIN);
        Progress::Idle
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Requests of one service that may be on their way to cores.
const MAX_PASSED: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    /// A listener at all addresses opens the UDP port at all of them, also for listeners at one.
    #[test]
    fn a_service_at_one_address_is_not_reached_at_another() {
        let asks = |listens_at: &str, to: &str, port| {
            is_asked(listens_at.parse().unwrap(), to.parse().unwrap(), port)
        };
        for (listens_at, to, other) in
            [("192.0.2.1:3260", "192.0.2.1", "192.0.2.2"), ("[fe80::1%1]:3260", "fe80::1", "2001:db8::1")]
        {
            assert!(asks(listens_at, to, Some(3260)));
            assert!(!asks(listens_at, other, Some(3260)));
            assert!(!asks(listens_at, to, Some(3261)) && !asks(listens_at, to, None));
        }
        for (listens_at, to) in [("0.0.0.0:3260", "192.0.2.1"), ("[::]:3260", "2001:db8::1")] {
            assert!(asks(listens_at, to, Some(3260)) && !asks(listens_at, to, Some(3261)));
        }
    }
}
