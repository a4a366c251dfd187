//! A core whose connections are of RDMA devices.

use super::login::LoginQueues;
use super::queues::ConnectionQueues;
use super::signal::EndSignals;
use super::stream::{VerbsStream, VerbsWatch};
use crate::core::reactor::{EngineCore, Task};
use crate::net::host::{Host, NetworkHost};
use crate::net::login_stream::LoginStream;
use crate::net::socket::Address;
use blockmux_proto::driver::session::HangUp;
use blockmux_verbs::connection::IncomingConnection;
use blockmux_volume::{Core, Pool, Waker};
use std::any::Any;
use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A core as the host of connections over devices. It is the engine's core in everything but its
/// streams.
pub struct VerbsHost {
    core: Rc<EngineCore>,
    signals: Rc<EndSignals>,
}

/// The host of a core, as long as anything uses it.
#[derive(Default)]
struct VerbsHostOfCore(RefCell<Weak<VerbsHost>>);

impl VerbsHost {
    /// The host of this core.
    #[must_use]
    pub fn on(core: &Rc<EngineCore>) -> Rc<VerbsHost> {
        let known = core.local(VerbsHostOfCore::default);
        let mut known = known.0.borrow_mut();
        known.upgrade().unwrap_or_else(|| {
            let signals = core.local(EndSignals::default);
            let host = Rc::new(VerbsHost { core: core.clone(), signals });
            *known = Rc::downgrade(&host);
            host
        })
    }

    /// Takes a connection that a peer requests; `None` if its address is not known.
    pub(crate) fn accept(&self, incoming: IncomingConnection) -> Option<VerbsStream> {
        let peer = incoming.peer_address()?;
        Some(self.stream(ConnectionQueues::accept(incoming), peer))
    }

    fn stream(&self, queues: ConnectionQueues, peer: SocketAddr) -> VerbsStream {
        let signal = self.signals.open(self.core.inbox());
        VerbsStream::new(queues, signal, peer)
    }
}

impl Core for VerbsHost {
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

impl Host for VerbsHost {
    type Stream = VerbsStream;
    type Watch = VerbsWatch;

    fn from_core(core: &Rc<dyn Core>) -> Option<Rc<VerbsHost>> {
        EngineCore::from_core(core).map(|core| VerbsHost::on(&core))
    }

    fn spawn<T: Task + 'static>(&self, make: impl FnOnce(&Waker) -> T) {
        self.core.spawn(make);
    }

    fn try_spawn<T: Task + 'static, E>(&self, make: impl FnOnce(&Waker) -> Result<T, E>) {
        Host::try_spawn(&*self.core, make);
    }

    fn connect(&self, address: &Address) -> io::Result<VerbsStream> {
        let peer = ip_address(address)?;
        Ok(self.stream(ConnectionQueues::connect(peer)?, peer))
    }

    fn log_in(address: &Address, timeout: Duration) -> io::Result<Box<dyn LoginStream>> {
        Ok(Box::new(LoginQueues::connect(ip_address(address)?, timeout)?))
    }

    fn watch(&self, waker: &Waker) -> VerbsWatch {
        VerbsWatch {
            waker: waker.clone(),
            events: self.core.watch(waker),
            completions: self.core.watch(waker),
        }
    }

    fn is_stopping(&self) -> bool {
        self.core.is_stopping()
    }

    fn spins(&self) -> bool {
        Host::spins(&*self.core)
    }
}

impl NetworkHost for VerbsHost {
    fn engine_core(self: &Rc<Self>) -> Rc<EngineCore> {
        self.core.clone()
    }

    fn peer_ip(stream: &VerbsStream) -> Option<IpAddr> {
        Some(stream.peer_ip())
    }

    fn local_address(stream: &VerbsStream) -> Option<SocketAddr> {
        stream.local_address()
    }

    fn hang_up(stream: &VerbsStream) -> HangUp {
        Arc::new(stream.hang_up())
    }
}

fn ip_address(address: &Address) -> io::Result<SocketAddr> {
    match address {
        Address::Tcp(address) => Ok(*address),
        Address::Unix(_) => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "RDMA devices need an IP address"))
        }
    }
}
