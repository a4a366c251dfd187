//! The way between two addresses: how packets are addressed, and how long they may be.

use blockmux_proto::driver::transport::FlowInfo;
use blockmux_rdma::roce::bytes::{RoceAddresses, RoceFlow, UDP_PORT};
use blockmux_rdma::roce::port::OpenedConnection;
use rustix::net::sockopt::{ip_mtu, ipv6_mtu};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// The two ends of a connection's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RocePath {
    /// Address of this side.
    pub(super) local: IpAddr,
    /// Address of the peer, with its zone and the UDP port of RoCEv2.
    pub(super) peer: SocketAddr,
}

impl RocePath {
    /// The way back to where a packet came from. The port there is always that of RoCEv2.
    pub(super) fn back(local: IpAddr, from: SocketAddr) -> RocePath {
        let mut peer = from;
        peer.set_port(UDP_PORT);
        RocePath { local, peer }
    }

    /// The packets that this side sends; `None` if the addresses are of two families.
    pub(super) fn outgoing(&self) -> Option<RoceFlow> {
        flow(self.local, self.peer.ip(), UDP_PORT)
    }

    /// Describes a connection to `service`.
    pub(super) fn describe(&self, opened: &OpenedConnection, service: u16) -> FlowInfo {
        let numbers = opened.numbers;
        FlowInfo {
            local: self.local,
            peer: self.peer.ip(),
            service,
            source_port: UDP_PORT,
            mtu: mtu_to(self.peer),
            queue_pair: numbers.queue_pair,
            first_psn: numbers.first_psn,
            comm_id: numbers.comm_id,
            guid: numbers.guid,
        }
    }
}

/// The flow of packets from `source`, which sends from `source_port`.
pub(super) fn flow(source: IpAddr, destination: IpAddr, source_port: u16) -> Option<RoceFlow> {
    let addresses = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => RoceAddresses::V4 { source, destination },
        (IpAddr::V6(source), IpAddr::V6(destination)) => RoceAddresses::V6 { source, destination },
        _ => return None,
    };
    Some(RoceFlow { addresses, source_port })
}

/// The address from which packets to `peer` are sent, with the UDP port of RoCEv2.
pub(super) fn local_to(peer: SocketAddr) -> io::Result<SocketAddr> {
    let mut local = connected(peer)?.local_addr()?;
    local.set_port(UDP_PORT);
    Ok(local)
}

/// Most payload of a packet to `peer`, in bytes.
fn mtu_to(peer: SocketAddr) -> u16 {
    let mtu = connected(peer).and_then(|socket| match peer {
        SocketAddr::V4(_) => Ok(ip_mtu(socket)?),
        SocketAddr::V6(_) => Ok(ipv6_mtu(socket)?),
    });
    let mtu = mtu.unwrap_or(ETHERNET_MTU);
    u16::try_from(mtu.saturating_sub(MAX_HEADERS)).unwrap_or(u16::MAX)
}

/// A socket that has chosen its way to `peer`. Nothing is sent.
fn connected(peer: SocketAddr) -> io::Result<UdpSocket> {
    let any: IpAddr =
        if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    let mut service = peer;
    service.set_port(UDP_PORT);
    socket.connect(service)?;
    Ok(socket)
}

/// MTU of Ethernet, where the path's is not known.
const ETHERNET_MTU: u32 = 1500;
/// Most bytes of a packet beside its payload: IPv6, UDP, base and extended headers, pad and ICRC.
const MAX_HEADERS: u32 = 100;
