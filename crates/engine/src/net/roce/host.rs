//! A core whose connections are of RoCEv2.

use super::accepted::ArrivedRequest;
use super::core_port::CorePort;
use super::group::RoceGroup;
use super::login::LoginFlow;
use super::path::{RocePath, local_to};
use super::stream::{RoceStream, RoceWatch};
use crate::core::reactor::{EngineCore, Task};
use crate::net::host::{Host, NetworkHost};
use crate::net::login_stream::LoginStream;
use crate::net::socket::Address;
use blockmux_proto::driver::session::HangUp;
use blockmux_rdma::roce::bytes::UDP_PORT;
use blockmux_volume::{Core, Pool, Waker};
use std::any::Any;
use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A core as the host of connections of RoCEv2. It is the engine's core in everything but its
/// streams.
pub struct RoceHost {
    core: Rc<EngineCore>,
    /// The core's ports, by their groups' addresses.
    ports: RefCell<Vec<(SocketAddr, Weak<RefCell<CorePort>>)>>,
}

/// The host of a core, as long as anything uses it.
#[derive(Default)]
struct HostOfCore(RefCell<Weak<RoceHost>>);

impl RoceHost {
    /// The host of this core.
    #[must_use]
    pub fn on(core: &Rc<EngineCore>) -> Rc<RoceHost> {
        let known = core.local(HostOfCore::default);
        let mut known = known.0.borrow_mut();
        known.upgrade().unwrap_or_else(|| {
            let host = Rc::new(RoceHost { core: core.clone(), ports: RefCell::default() });
            *known = Rc::downgrade(&host);
            host
        })
    }

    /// Opens a connection for a request that has arrived; `None` if it has one already, or its
    /// sender or all have as many as they may.
    ///
    /// # Errors
    /// If the core has no port there and gets none.
    pub(crate) fn accept(
        &self,
        group: &Arc<RoceGroup>,
        request: &ArrivedRequest,
    ) -> io::Result<Option<RoceStream>> {
        Ok(request.open_at(&self.port(group)?, self.core.now()))
    }

    /// The core's port of this group.
    fn port(&self, group: &Arc<RoceGroup>) -> io::Result<Rc<RefCell<CorePort>>> {
        let mut ports = self.ports.borrow_mut();
        ports.retain(|(_, port)| port.strong_count() > 0);
        let known = ports.iter().find(|(address, _)| *address == group.address());
        if let Some(port) = known.and_then(|(_, port)| port.upgrade()).filter(|port| !port.borrow().is_over())
        {
            return Ok(port);
        }
        let port = CorePort::spawn(&self.core, group.share()?)?;
        ports.retain(|(address, _)| *address != group.address());
        ports.push((group.address(), Rc::downgrade(&port)));
        Ok(port)
    }
}

impl Core for RoceHost {
    fn now(&self) -> Instant {
        self.core.now()
    }

    fn pool(&self) -> &Pool {
        self.core.pool()
    }

    fn wake_at(&self, when: Instant, waker: &Waker) {
        self.core.wake_at(when, waker);
    }

    /// The engine's core, which volumes look for.
    fn as_any(&self) -> &dyn Any {
        self.core.as_any()
    }
}

impl Host for RoceHost {
    type Stream = RoceStream;
    type Watch = RoceWatch;

    fn from_core(core: &Rc<dyn Core>) -> Option<Rc<RoceHost>> {
        EngineCore::from_core(core).map(|core| RoceHost::on(&core))
    }

    fn spawn<T: Task + 'static>(&self, make: impl FnOnce(&Waker) -> T) {
        self.core.spawn(make);
    }

    fn try_spawn<T: Task + 'static, E>(&self, make: impl FnOnce(&Waker) -> Result<T, E>) {
        Host::try_spawn(&*self.core, make);
    }

    fn connect(&self, address: &Address) -> io::Result<RoceStream> {
        let (service, path, group) = way_to(address)?;
        let port = self.port(&group)?;
        let opened = port.borrow_mut().connect(path, service, self.core.now())?;
        Ok(RoceStream::new(&port, opened))
    }

    fn log_in(address: &Address, _timeout: Duration) -> io::Result<Box<dyn LoginStream>> {
        let (service, path, group) = way_to(address)?;
        Ok(Box::new(LoginFlow::open(group.share()?, path, service)?))
    }

    fn watch(&self, waker: &Waker) -> RoceWatch {
        RoceWatch { waker: waker.clone(), socket: self.core.watch(waker) }
    }

    fn is_stopping(&self) -> bool {
        self.core.is_stopping()
    }

    fn spins(&self) -> bool {
        Host::spins(&*self.core)
    }
}

impl NetworkHost for RoceHost {
    fn engine_core(self: &Rc<Self>) -> Rc<EngineCore> {
        self.core.clone()
    }

    fn peer_ip(stream: &RoceStream) -> Option<IpAddr> {
        Some(stream.peer_ip())
    }

    fn local_address(stream: &RoceStream) -> Option<SocketAddr> {
        Some(stream.local_address())
    }

    fn hang_up(stream: &RoceStream) -> HangUp {
        Arc::new(stream.hang_up())
    }
}

/// The service that an address names, the way there, and the port to use.
fn way_to(address: &Address) -> io::Result<(SocketAddr, RocePath, Arc<RoceGroup>)> {
    let Address::Tcp(service) = address else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "RoCEv2 needs an IP address"));
    };
    let local = local_to(*service)?;
    let group = RoceGroup::of_initiator(local).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => {
            let what = format!(
                "another program has UDP port {UDP_PORT} of {}; stop it, or unload the module rdma_rxe",
                local.ip()
            );
            io::Error::new(io::ErrorKind::AddrInUse, what)
        }
        _ => error,
    })?;
    // A group at all addresses leaves the choice to the route.
    let bound = group.address().ip();
    let local = if bound.is_unspecified() { local.ip() } else { bound };
    Ok((*service, RocePath::back(local, *service), group))
}
