//! A core whose connections are of RDMA devices.

use super::login::LoginQueues;
use super::queues::ConnectionQueues;
use super::signal::EndSignals;
use super::stream::{VerbsStream, VerbsWatch};
use crate::core::reactor::EngineCore;
use crate::fabric::connector::{Connector, ConnectorHost};
use crate::net::host::Host;
use crate::net::login_stream::LoginStream;
use blockmux_verbs::connection::IncomingConnection;
use blockmux_volume::Waker;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// A core as the host of connections over devices.
pub type VerbsHost = ConnectorHost<VerbsConnector>;

/// Opens connections over devices.
pub struct VerbsConnector {
    signals: Rc<EndSignals>,
}

impl VerbsHost {
    /// Takes a connection that a peer requests; `None` if its address is not known.
    pub(super) fn accept(&self, incoming: IncomingConnection) -> Option<VerbsStream> {
        let peer = incoming.peer_address()?;
        Some(self.connector.stream(&self.core, ConnectionQueues::accept(incoming), peer))
    }
}

impl VerbsConnector {
    fn stream(&self, core: &Rc<EngineCore>, queues: ConnectionQueues, peer: SocketAddr) -> VerbsStream {
        VerbsStream::new(core, queues, self.signals.open(core.inbox()), peer)
    }
}

impl Connector for VerbsConnector {
    type Stream = VerbsStream;

    fn new(core: &EngineCore) -> VerbsConnector {
        VerbsConnector { signals: core.local(EndSignals::default) }
    }

    fn connect(&self, core: &Rc<EngineCore>, peer: SocketAddr) -> io::Result<VerbsStream> {
        Ok(self.stream(core, ConnectionQueues::connect(peer)?, peer))
    }

    fn log_in(peer: SocketAddr, timeout: Duration) -> io::Result<Box<dyn LoginStream>> {
        Ok(Box::new(LoginQueues::connect(peer, timeout)?))
    }

    fn watch(core: &EngineCore, waker: &Waker) -> VerbsWatch {
        VerbsWatch { waker: waker.clone(), events: core.watch(waker), completions: core.watch(waker) }
    }
}
