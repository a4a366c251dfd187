//! A core whose connections are of RoCEv2.

use super::accepted::ArrivedRequest;
use super::core_port::CorePort;
use super::group::{RoceGroup, is_of_this_machine};
use super::login::LoginFlow;
use super::path::{RocePath, local_to};
use super::port_in_use;
use super::stream::{RoceStream, RoceWatch};
use crate::carrier::connection::LocalObstacle;
use crate::core::reactor::EngineCore;
use crate::fabric::connector::{Connector, ConnectorHost};
use crate::net::host::Host;
use crate::net::login_stream::LoginStream;
use blockmux_proto::names::rdma::TCP_TARGET_QUERY;
use blockmux_verbs::survey::has_software_roce;
use blockmux_volume::{Core, Waker};
use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

/// A core as the host of connections of RoCEv2.
pub type RoceHost = ConnectorHost<RoceConnector>;

/// Opens connections of RoCEv2.
pub struct RoceConnector {
    ports: Rc<PortsOfCore>,
}

/// The core's ports, by their groups' addresses. A port may outlive all users of its host.
#[derive(Default)]
struct PortsOfCore(RefCell<Vec<(SocketAddr, Weak<RefCell<CorePort>>)>>);

impl RoceHost {
    /// Opens a connection for a request that has arrived; `None` if it has one already, or its
    /// sender or all have as many as they may.
    ///
    /// # Errors
    /// If the core has no port there and gets none.
    pub(super) fn accept(
        &self,
        group: &Arc<RoceGroup>,
        request: &ArrivedRequest,
    ) -> io::Result<Option<RoceStream>> {
        Ok(request.open_at(&self.connector.port(&self.core, group)?, self.core.now()))
    }
}

impl RoceConnector {
    /// The core's port of this group.
    fn port(&self, core: &Rc<EngineCore>, group: &Arc<RoceGroup>) -> io::Result<Rc<RefCell<CorePort>>> {
        let mut ports = self.ports.0.borrow_mut();
        ports.retain(|(_, port)| port.strong_count() > 0);
        let known = ports.iter().find(|(address, _)| *address == group.address);
        if let Some(port) = known.and_then(|(_, port)| port.upgrade()).filter(|port| !port.borrow().is_over) {
            return Ok(port);
        }
        let port = CorePort::spawn(core, group.share()?)?;
        ports.retain(|(address, _)| *address != group.address);
        ports.push((group.address, Rc::downgrade(&port)));
        Ok(port)
    }
}

impl Connector for RoceConnector {
    type Stream = RoceStream;

    fn new(core: &EngineCore) -> RoceConnector {
        RoceConnector { ports: core.local(PortsOfCore::default) }
    }

    fn connect(&self, core: &Rc<EngineCore>, service: SocketAddr) -> io::Result<RoceStream> {
        let (path, group) = way_to(&service)?;
        let port = self.port(core, &group)?;
        let opened = port.borrow_mut().connect(path, service, core.now())?;
        Ok(RoceStream::new(&port, opened))
    }

    fn log_in(service: SocketAddr, _timeout: Duration) -> io::Result<Box<dyn LoginStream>> {
        let (path, group) = way_to(&service)?;
        Ok(Box::new(LoginFlow::open(group.share()?, path, service)?))
    }

    fn watch(core: &EngineCore, waker: &Waker) -> RoceWatch {
        RoceWatch { waker: waker.clone(), socket: core.watch(waker) }
    }
}

/// The way to a service, and the port to use.
fn way_to(service: &SocketAddr) -> io::Result<(RocePath, Arc<RoceGroup>)> {
    let local = local_to(*service)?;
    let group = RoceGroup::of_initiator(local, *service).map_err(|error| match error.kind() {
        kind @ io::ErrorKind::AddrInUse => LocalObstacle::error(kind, in_use(local.ip(), *service)),
        _ => error,
    })?;
    // A group at all addresses leaves the choice to the route.
    let bound = group.address.ip();
    let local = if bound.is_unspecified() { local.ip() } else { bound };
    Ok((RocePath::back(local, *service), group))
}

/// Says why the UDP port of `local`, from which packets to `peer` leave, cannot be had, and what to
/// do.
fn in_use(local: IpAddr, peer: SocketAddr) -> String {
    if !is_of_this_machine(peer) {
        return port_in_use(
            &local.to_string(),
            &format!("connect with {TCP_TARGET_QUERY}"),
            has_software_roce(),
        );
    }
    let place = if peer.is_ipv4() { "all addresses" } else { "this address" };
    let advice = format!("connect with {TCP_TARGET_QUERY}, or let the target listen at one IPv4 address");
    port_in_use(place, &advice, has_software_roce())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::reactor::{PollPolicy, Reactor};
    use blockmux_rdma::roce::bytes::UDP_PORT;
    use std::net::Ipv4Addr;

    /// A port stays open for a while without connections. It is the only one of its core then, too.
    #[test]
    fn a_core_has_one_port_of_an_address_whichever_host_opens_it() {
        let (reactor, _inbox) = Reactor::new(PollPolicy::Never, 1 << 20).unwrap();
        let core = reactor.core();
        let [.., high, low] = std::process::id().to_be_bytes();
        let group = RoceGroup::at((Ipv4Addr::new(127, 188, high, low), UDP_PORT).into()).unwrap();
        let port = || RoceHost::on(core).connector.port(core, &group).unwrap();
        let first = port();
        assert!(Rc::ptr_eq(&first, &port()));
        first.borrow_mut().is_over = true;
        assert!(!Rc::ptr_eq(&first, &port()));
    }
}
