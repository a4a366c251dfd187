//! A volume that this process serves and accesses, over loopback or a veth pair.

use super::veth::{INITIATOR, TARGET, VethPair};
use crate::failure::Failure;
use crate::protocol::address::ListenerAddress;
use crate::protocol::frontend::{Portal, Service, VolumeNames};
use crate::protocol::policy::Policy;
use crate::protocol::{Carrier, LogicalUnits, Protocol};
use blockmux_engine::core::cores::Cores;
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerTask};
use blockmux_engine::serve::sessions::Sessions;
use blockmux_engine::sys::congestion::Congestion;
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::names::rdma::TCP_TARGET_QUERY;
use blockmux_volume::Volume;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

/// Serves the volume at one end of the veth pair and accesses it from the other, or over loopback.
pub(super) fn reach(
    veth: Option<&VethPair>,
    protocol: &'static Protocol,
    volume: &Arc<dyn Volume>,
    target: &Cores,
    congestion: Option<&Congestion>,
) -> Result<Arc<dyn Volume>, Failure> {
    let open = |url: &str| (protocol.remote)(url)?.open(1);
    match veth {
        None => serve(target, protocol, volume, None, congestion).and_then(|url| open(&url)),
        Some(veth) => {
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
    veth.within(TARGET, || serve(target, protocol, volume, Some(veth), congestion))?
}

/// Serves `volume` with `cores`, on a free port of loopback or at the target's end of the veth
/// pair; returns its URL.
fn serve(
    cores: &Cores,
    protocol: &'static Protocol,
    volume: &Arc<dyn Volume>,
    veth: Option<&VethPair>,
    congestion: Option<&Congestion>,
) -> Result<String, Failure> {
    let at = veth.map_or(Ipv4Addr::LOCALHOST, |veth| veth.address(TARGET));
    let interface = veth.map(|veth| veth.interface(TARGET).to_owned()).unwrap_or_default();
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
        let (serve, inboxes) = (live.serve(&place), cores.inboxes());
        cores
            .ask(0, move |core| {
                ListenerTask::spawn(core, listener, inboxes, serve, ConnectionLimit::new(MAX_CONNECTIONS))
            })
            .ok_or_else(|| Failure::run("a core of the target ended unexpectedly"))?;
    }
    let portal = Portal { listener: place.clone(), reached_at: place, rdma_query: TCP_TARGET_QUERY };
    let infos = VolumeNames::all(&exports)
        .into_iter()
        .flat_map(|named| frontend.connect_info(protocol, &portal, &named));
    infos.map(|info| info.url).next().ok_or_else(|| Failure::run("the protocol does not export the volume"))
}

/// Name of the bench's export.
const EXPORT: &str = "bench";
/// The maximum number of connections, more than the workers of any job.
const MAX_CONNECTIONS: usize = 2048;
