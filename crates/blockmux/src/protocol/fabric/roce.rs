//! RoCEv2 in software.

use super::{FabricLoopback, FabricPort, FabricPorts, FabricState, RdmaFabric};
use blockmux_engine::fabric::FabricListener;
use blockmux_engine::fabric::roce::{RoceListener, RocePortUse, UDP_PORT};
use blockmux_proto::names::rdma::UDP_TARGET_QUERY;
use blockmux_verbs::survey::has_software_roce;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};

pub(super) static ROCE: RdmaFabric = RdmaFabric {
    name: "roce",
    title: "RoCEv2",
    about: "RoCEv2 in software, over UDP; needs no device",
    query: UDP_TARGET_QUERY,
    ports: Some(FabricPorts {
        bind: |address| RoceListener::bind(address).map(FabricPort::Roce),
        explain,
        unserved: "RoCEv2 is not served",
        loopback: Some(FabricLoopback {
            address: loopback,
            advice: "stop what has the UDP port of RoCEv2, or unload the module rdma_rxe",
        }),
    }),
    state: |_| Ok(state_of(RocePortUse::of_this_machine()?, has_software_roce())),
};

fn explain(address: SocketAddr, error: &io::Error) -> String {
    let advice = match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!("another program has UDP port {UDP_PORT}; stop it, or unload the module rdma_rxe")
        }
        _ => format!("{error}; remove rdma=roce"),
    };
    format!("cannot listen on {} for RoCEv2: {advice}", address.ip())
}

/// All programs of an address share the UDP port of RoCEv2, so this process has an address of its
/// own.
fn loopback() -> Ipv4Addr {
    let [_, high, mid, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 128 | high, mid, low)
}

/// `has_software_roce`: whether the kernel's software RoCEv2 is loaded.
fn state_of(port: RocePortUse, has_software_roce: bool) -> FabricState {
    let (name, reason) = match port {
        RocePortUse::Free => return FabricState::WORKS,
        RocePortUse::AtSomeAddresses => (
            FabricState::WORKS.name,
            format!(
                "another program has UDP port {UDP_PORT} of some addresses, which `ss -lun` shows; listen at \
                 another address, or stop it"
            ),
        ),
        RocePortUse::AtAllAddresses if has_software_roce => (
            "port in use",
            format!(
                "Linux's rdma_rxe has UDP port {UDP_PORT} of all addresses; use its device by rdma=verbs, or unload \
                 it with `modprobe -r rdma_rxe`"
            ),
        ),
        RocePortUse::AtAllAddresses => (
            "port in use",
            format!(
                "another program has UDP port {UDP_PORT} of all addresses; stop it, or have it listen at one \
                 address (`ss -lunp` names it)"
            ),
        ),
    };
    FabricState { name, reason: Some(reason) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_in_use_says_what_to_do() {
        let state = |port, has_software_roce| {
            let state = state_of(port, has_software_roce);
            (state.name, state.reason.unwrap_or_default())
        };
        assert_eq!(state(RocePortUse::Free, true), ("works", String::new()));
        let (name, reason) = state(RocePortUse::AtAllAddresses, true);
        assert_eq!(name, "port in use");
        assert!(reason.contains("; use its device by rdma=verbs, or unload it with `modprobe -r rdma_rxe`"));
        let (name, reason) = state(RocePortUse::AtAllAddresses, false);
        assert_eq!(name, "port in use");
        assert!(reason.starts_with("another program has UDP port 4791 of all"));
        let (name, reason) = state(RocePortUse::AtSomeAddresses, false);
        assert_eq!(name, "works");
        assert!(reason.contains("; listen at another address, or stop it"));
    }
}
