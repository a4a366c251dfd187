//! RoCEv2 in software.

use super::{FabricLoopback, FabricPort, FabricPorts, FabricState, RdmaFabric};
use blockmux_engine::fabric::FabricListener;
use blockmux_engine::fabric::roce::{RoceListener, RocePortUse, UDP_PORT, port_in_use};
use blockmux_proto::names::rdma::{TCP_TARGET_QUERY, UDP_TARGET_QUERY};
use blockmux_verbs::survey::has_software_roce;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};

pub(super) static ROCE: RdmaFabric = RdmaFabric {
    name: "roce",
    title: "RoCEv2",
    target_check: check_of_target,
    about: "RoCEv2 in software, over UDP; needs no device",
    query: UDP_TARGET_QUERY,
    ports: Some(FabricPorts {
        bind: |address| RoceListener::bind(address).map(FabricPort::Roce),
        explain,
        unserved: "RoCEv2 is not served",
        loopback: Some(FabricLoopback { address: loopback, explain: explain_at_loopback }),
    }),
    state: |_| Ok(state_of(RocePortUse::of_this_machine()?, has_software_roce())),
};

fn explain(address: SocketAddr, error: &io::Error) -> String {
    let ip = address.ip();
    let reason = match error.kind() {
        io::ErrorKind::AddrInUse if ip.is_unspecified() => reason_in_use("some addresses"),
        io::ErrorKind::AddrInUse => reason_in_use(&ip.to_string()),
        _ => format!("{error}; remove rdma=roce"),
    };
    format!("cannot listen on {ip} for RoCEv2: {reason}")
}

fn check_of_target(what: &str) -> String {
    format!(
        "check that an {what} target listens there with {UDP_TARGET_QUERY}, and that UDP port {UDP_PORT} passes; or \
         use {TCP_TARGET_QUERY}"
    )
}

/// The address is one that nobody has chosen, so it is not named, and no other helps.
fn explain_at_loopback(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => port_in_use("loopback", "measure without RoCEv2", has_software_roce()),
        _ => format!("cannot listen for RoCEv2 on loopback: {error}; measure without it"),
    }
}

/// Why the port cannot be had at `place`, and what to do.
fn reason_in_use(place: &str) -> String {
    let port_use = RocePortUse::of_this_machine().unwrap_or(RocePortUse::AtSomeAddresses);
    match port_use {
        RocePortUse::AtAllAddresses => state_of(port_use, has_software_roce()).reason.unwrap_or_default(),
        RocePortUse::AtSomeAddresses | RocePortUse::Free => port_in_use(place, OTHER_ADDRESS, false),
    }
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
        RocePortUse::AtSomeAddresses => {
            (FabricState::WORKS.name, port_in_use("some addresses", OTHER_ADDRESS, false))
        }
        RocePortUse::AtAllAddresses => {
            let advice = "have it listen at one address";
            ("port in use", port_in_use("all addresses", advice, has_software_roce))
        }
    };
    FabricState { name, reason: Some(reason) }
}

/// What to do where other addresses are free.
const OTHER_ADDRESS: &str = "listen at another address";

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

    #[test]
    fn who_cannot_choose_an_address_does_without_rocev2() {
        for kind in [io::ErrorKind::AddrInUse, io::ErrorKind::PermissionDenied] {
            let said = explain_at_loopback(&kind.into());
            assert!(said.contains("; measure without") || has_software_roce(), "{said}");
        }
    }
}
