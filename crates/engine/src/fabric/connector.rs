//! Cores whose connections are not stream sockets: the engine's core in everything but its streams.

use crate::core::reactor::{EngineCore, Task};
use crate::net::host::{ByteStream, Host, NetworkHost, NetworkStream};
use crate::net::login_stream::LoginStream;
use crate::net::socket::Address;
use blockmux_volume::{Core, Pool, Waker};
use std::any::Any;
use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

/// How connections of one kind are opened on a core, and what the core shares between them.
pub trait Connector: Sized + 'static {
    /// A connection.
    type Stream: NetworkStream;

    /// The connector of a core, which lives as long as anything uses its host.
    fn new(core: &EngineCore) -> Self;

    /// Starts to connect.
    ///
    /// # Errors
    /// If it fails at once.
    fn connect(&self, core: &Rc<EngineCore>, peer: SocketAddr) -> io::Result<Self::Stream>;

    /// Connects on an ordinary thread, for a login. Connecting takes at most `timeout`.
    ///
    /// # Errors
    /// If it fails.
    fn log_in(peer: SocketAddr, timeout: Duration) -> io::Result<Box<dyn LoginStream>>;

    /// A watch that wakes `waker`.
    fn watch(core: &EngineCore, waker: &Waker) -> <Self::Stream as ByteStream>::Watch;
}

/// A core as the host of the connections that a connector opens.
pub struct ConnectorHost<C> {
    pub(super) core: Rc<EngineCore>,
    pub(super) connector: C,
}

/// The host of a core, as long as anything uses it.
struct HostOfCore<C>(RefCell<Weak<ConnectorHost<C>>>);

impl<C: Connector> ConnectorHost<C> {
    /// The host of this core.
    #[must_use]
    pub fn on(core: &Rc<EngineCore>) -> Rc<ConnectorHost<C>> {
        let known = core.local(|| HostOfCore::<C>(RefCell::default()));
        let mut known = known.0.borrow_mut();
        known.upgrade().unwrap_or_else(|| {
            let host = Rc::new(ConnectorHost { core: core.clone(), connector: C::new(core) });
            *known = Rc::downgrade(&host);
            host
        })
    }
}

impl<C: Connector> Core for ConnectorHost<C> {
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

impl<C: Connector> Host for ConnectorHost<C> {
    type Stream = C::Stream;
    type Watch = <C::Stream as ByteStream>::Watch;

    fn from_core(core: &Rc<dyn Core>) -> Option<Rc<ConnectorHost<C>>> {
        EngineCore::from_core(core).map(|core| ConnectorHost::on(&core))
    }

    fn spawn<T: Task + 'static>(&self, make: impl FnOnce(&Waker) -> T) {
        self.core.spawn(make);
    }

    fn try_spawn<T: Task + 'static, E>(&self, make: impl FnOnce(&Waker) -> Result<T, E>) {
        Host::try_spawn(&*self.core, make);
    }

    fn connect(&self, address: &Address) -> io::Result<C::Stream> {
        self.connector.connect(&self.core, ip_address(address)?)
    }

    fn log_in(address: &Address, timeout: Duration) -> io::Result<Box<dyn LoginStream>> {
        C::log_in(ip_address(address)?, timeout)
    }

    fn watch(&self, waker: &Waker) -> Self::Watch {
        C::watch(&self.core, waker)
    }

    fn is_stopping(&self) -> bool {
        self.core.is_stopping()
    }

    fn spins(&self) -> bool {
        Host::spins(&*self.core)
    }
}

impl<C: Connector> NetworkHost for ConnectorHost<C> {
    fn engine_core(self: &Rc<Self>) -> Rc<EngineCore> {
        self.core.clone()
    }
}

fn ip_address(address: &Address) -> io::Result<SocketAddr> {
    match address {
        Address::Tcp(address) => Ok(*address),
        Address::Unix(_) => Err(io::Error::new(io::ErrorKind::InvalidInput, "RDMA needs an IP address")),
    }
}
