//! A volume that this process serves and accesses, over loopback or a veth pair.

use super::fabric::BenchFabric;
use super::veth::{INITIATOR, TARGET, VethPair};
use crate::failure::Failure;
use crate::protocol::address::ListenerAddress;
use crate::protocol::frontend::{Portal, Service, VolumeNames};
use crate::protocol::policy::Policy;
use crate::protocol::{Carrier, LogicalUnits, Protocol};
use blockmux_engine::core::cores::Cores;
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerEnd, ListenerTask};
use blockmux_engine::serve::sessions::Sessions;
use blockmux_engine::sys::congestion::Congestion;
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::Volume;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// Where a volume is served.
#[derive(Clone, Copy)]
pub(super) enum ServedAt<'a> {
    /// On loopback, over this fabric if the protocol is one over RDMA.
    Loopback(BenchFabric),
    /// At the target's end of a veth pair.
    Link(&'a VethPair),
}

/// Serves the volume at one end of the veth pair and accesses it from the other, or over loopback.
pub(super) fn reach(
    place: ServedAt<'_>,
    protocol: &'static Protocol,
    volume: &Arc<dyn Volume>,
    target: &Cores,
    congestion: Option<&Congestion>,
) -> Result<Arc<dyn Volume>, Failure> {
    let open = |url: &str| (protocol.remote)(url)?.open(1);
    match place {
        ServedAt::Loopback(_) => {
            serve(target, protocol, volume, place, congestion).and_then(|url| open(&url))
        }
        ServedAt::Link(veth) => {
            let url = serve_at(veth, protocol, volume, target, congestion)?;
            veth.within(INITIATOR, || open(&url))?
        }
    }
}

/// Serves the volume at the target's end of the veth pair; returns its URL.
pub(super) fn serve_at(
    veth: &VethPair,
    protocol: &'static Protocol,
    volume: &Arc<dyn Volume>,
    target: &Cores,
    congestion: Option<&Congestion>,
) -> Result<String, Failure> {
    veth.within(TARGET, || serve(target, protocol, volume, ServedAt::Link(veth), congestion))?
}

/// Serves `volume` with `cores` at a free port; returns its URL.
fn serve(
    cores: &Cores,
    protocol: &'static Protocol,
    volume: &Arc<dyn Volume>,
    place: ServedAt<'_>,
    congestion: Option<&Congestion>,
) -> Result<String, Failure> {
    let (fabric, at, interface) = match place {
        ServedAt::Loopback(fabric) => (fabric, fabric.loopback(), String::new()),
        ServedAt::Link(veth) => {
            (BenchFabric::default(), veth.address(TARGET), veth.interface(TARGET).to_owned())
        }
    };
    let listener = match protocol.carrier {
        Carrier::Stream => {
            let address = Address::Tcp(SocketAddr::new(IpAddr::V4(at), 0));
            Some(Listener::bind_with(&address, congestion).map_err(Failure::run)?)
        }
        Carrier::Frames => None,
    };
    let address = listener.as_ref().map(|listener| listener.address().clone());
    let place = address.map_or(ListenerAddress::Interface(interface), ListenerAddress::Socket);
    let exports = Exports::new(vec![Export {
        name: EXPORT.to_owned(),
        description: String::new(),
        read_only: false,
        volume: volume.clone(),
    }]);
    let policy = &Policy::of_one_volume(protocol, place.clone(), EXPORT);
    let mut frontend = (protocol.frontend)();
    frontend.check(&[EXPORT]).map_err(Failure::run)?;
    let (places, sessions) = (std::slice::from_ref(&place), Sessions::default());
    let units = LogicalUnits::new(&exports);
    let service = Service { exports: &exports, units: &units, places, policy, cores, sessions: &sessions };
    let live = frontend.serve(&service)?;
    for (listener, live) in listener.into_iter().zip(&live) {
        let (serve, inboxes, limit) =
            (live.serve(&place), cores.inboxes(), ConnectionLimit::new(MAX_CONNECTIONS));
        let port = place.tcp().map_or(Ok(None), |address| fabric.listen(address.port()))?;
        if let Some(accept) = port.and_then(|port| live.serve_rdma(&place, port)) {
            let (until, inboxes, limit) = (ListenerEnd::default(), inboxes.clone(), limit.clone());
            cores
                .ask(0, move |core| accept(core, until, inboxes, limit))
                .ok_or_else(ended)?
                .map_err(Failure::run)?;
        }
        cores
            .ask(0, move |core| ListenerTask::spawn(core, listener, inboxes, serve, limit))
            .ok_or_else(ended)?;
    }
    let portal = Portal { listener: place.clone(), reached_at: place, rdma_query: fabric.query() };
    let infos = VolumeNames::all(&exports)
        .into_iter()
        .flat_map(|named| frontend.connect_info(protocol, &portal, &named));
    infos.map(|info| info.url).next().ok_or_else(|| Failure::run("the protocol does not export the volume"))
}

fn ended() -> Failure {
    Failure::run("a core of the target ended unexpectedly")
}

/// Name of the bench's export.
const EXPORT: &str = "bench";
/// The maximum number of connections, more than the workers of any job.
const MAX_CONNECTIONS: usize = 2048;
