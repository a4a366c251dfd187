//! Zones of link-local IPv6 addresses (RFC 4007), and the addresses that a server names in its
//! answers.
//!
//! A zone is an interface of this machine, so no answer can contain it: a link-local address in
//! one belongs to the interface of the connection. An unspecified address, which servers list that
//! listen on all addresses, means the one that the client asked.

use crate::sys;
use rustix::net::netdevice::index_to_name;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::sync::{Mutex, PoisonError};

/// The IP address in a text that is one, or one with a port; `None` in other texts.
#[must_use]
pub fn ip_in(text: &str) -> Option<IpAddr> {
    let plain = || text.parse::<SocketAddr>().map(|address| address.ip()).or_else(|_| text.parse()).ok();
    let zoned = || text.strip_prefix('[')?.split_once('%')?.0.parse().ok().map(IpAddr::V6);
    plain().or_else(zoned)
}

/// Parses the IP address in an answer; `None` for a host name. A zone of the server is dropped.
#[must_use]
pub fn answered_ip(text: &str) -> Option<IpAddr> {
    match text.split_once('%') {
        Some((address, _)) => address.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
        None => text.parse().ok(),
    }
}

/// The address that `named` means in an answer to a connection to `asked`.
#[must_use]
pub fn complete(named: SocketAddr, asked: &SocketAddr) -> SocketAddr {
    match named.ip() {
        ip if ip.is_unspecified() => {
            let mut same = *asked;
            same.set_port(named.port());
            same
        }
        IpAddr::V6(ip) if ip.is_unicast_link_local() => {
            let zone = zone_of(asked).or_else(|| interface_to(asked)).unwrap_or(0);
            SocketAddrV6::new(ip, named.port(), 0, zone).into()
        }
        _ => named,
    }
}

/// The index of the interface that an address belongs to; `None` for an address without a zone.
#[must_use]
pub fn zone_of(address: &SocketAddr) -> Option<u32> {
    match address {
        SocketAddr::V6(address) => Some(address.scope_id()).filter(|zone| *zone != 0),
        SocketAddr::V4(_) => None,
    }
}

/// Whether the address cannot be used because its interface is unknown.
#[must_use]
pub fn lacks_zone(address: &SocketAddr) -> bool {
    matches!(address, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0)
}

/// The IP address as text, with the name of its interface, if it has one: `fe80::1%eth0`.
#[must_use]
pub fn host_text(address: &SocketAddr) -> String {
    match zone_of(address) {
        None => address.ip().to_string(),
        Some(zone) => {
            format!("{}%{}", address.ip(), interface_name(zone).unwrap_or_else(|| zone.to_string()))
        }
    }
}

/// The IP address as the host of a URL (RFC 6874): `192.0.2.1`, `[fe80::1%25eth0]`.
#[must_use]
pub fn url_host(address: &SocketAddr) -> String {
    match address {
        SocketAddr::V4(_) => address.ip().to_string(),
        SocketAddr::V6(_) => format!("[{}]", host_text(address).replace('%', "%25")),
    }
}

/// Address and port as text: `192.0.2.1:3260`, `[fe80::1%eth0]:3260`.
#[must_use]
pub fn address_text(address: &SocketAddr) -> String {
    match address {
        SocketAddr::V4(_) => address.to_string(),
        SocketAddr::V6(_) => format!("[{}]:{}", host_text(address), address.port()),
    }
}

/// Address and port as [`address_text`] writes them, but with the name that the interface had when
/// it was first asked for: the text identifies listeners, so it outlasts the interface.
pub(super) fn lasting_text(address: &SocketAddr) -> String {
    static NAMES: Mutex<BTreeMap<u32, String>> = Mutex::new(BTreeMap::new());
    let Some(zone) = zone_of(address) else { return address.to_string() };
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let name = match names.get(&zone) {
        Some(name) => name.clone(),
        None => {
            let Some(name) = interface_name(zone) else { return address.to_string() };
            if names.len() < MAX_NAMES {
                names.insert(zone, name.clone());
            }
            name
        }
    };
    format!("[{}%{name}]:{}", address.ip(), address.port())
}

/// The name of an interface; `None` if there is none with this index.
fn interface_name(index: u32) -> Option<String> {
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).ok()?;
    index_to_name(socket, index).ok()
}

/// The interface through which packets to an address leave. No packet is sent.
fn interface_to(address: &SocketAddr) -> Option<u32> {
    let any: IpAddr =
        if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(address).ok()?;
    sys::interface_with(socket.local_addr().ok()?.ip())
}

/// Number of interfaces whose names are kept.
const MAX_NAMES: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::namespace::Network;
    use std::process::Command;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn completed(named: &str, asked: &str) -> String {
        complete(named.parse().unwrap(), &at(asked)).to_string()
    }

    #[test]
    fn an_address_of_an_answer_is_completed_from_the_connection() {
        for (named, asked, meant) in [
            ("192.0.2.1:1", "192.0.2.2:2", "192.0.2.1:1"),
            ("0.0.0.0:1", "192.0.2.2:2", "192.0.2.2:1"),
            ("[::]:1", "192.0.2.2:2", "192.0.2.2:1"),
            ("[::]:1", "[fe80::2%7]:2", "[fe80::2%7]:1"),
            ("0.0.0.0:1", "[2001:db8::2]:2", "[2001:db8::2]:1"),
            ("[fe80::1]:1", "[fe80::2%7]:2", "[fe80::1%7]:1"),
            ("[fe80::1%3]:1", "[fe80::2%7]:2", "[fe80::1%7]:1"),
            ("[2001:db8::1]:1", "[fe80::2%7]:2", "[2001:db8::1]:1"),
        ] {
            assert_eq!(completed(named, asked), meant, "{named} {asked}");
        }
        assert_eq!(answered_ip("fe80::1%eth0"), "fe80::1".parse().ok());
        assert_eq!((answered_ip("192.0.2.1%a"), answered_ip("host")), (None, None));
        let global = "[2001:db8::1]:7".parse().unwrap();
        assert_eq!(
            (address_text(&global).as_str(), url_host(&global).as_str()),
            ("[2001:db8::1]:7", "[2001:db8::1]")
        );
        assert_eq!(url_host(&"[fe80::1%4294967295]:7".parse().unwrap()), "[fe80::1%254294967295]");
        let lo = lasting_text(&at("[::1%1]:7"));
        assert_eq!((lo.as_str(), ip_in(&lo)), ("[::1%lo]:7", "::1".parse().ok()));
        assert_eq!(lasting_text(&at("[fe80::1%4294967295]:7")), "[fe80::1%4294967295]:7", "it has no name");
        for (text, ip) in [("192.0.2.1:7", "192.0.2.1"), ("[::1]:7", "::1"), ("::1", "::1")] {
            assert_eq!(ip_in(text), ip.parse().ok());
        }
        assert_eq!(ip_in("unix socket of process 7"), None);
        assert!(
            lacks_zone(&"[fe80::1]:1".parse().unwrap()) && !lacks_zone(&"[fe80::1%1]:1".parse().unwrap())
        );
    }

    #[test]
    fn the_interface_of_a_connection_is_that_of_its_local_address() {
        let network = match Network::new() {
            Ok(network) => network,
            Err(error) => return println!("skipped: cannot create a network namespace: {error}"),
        };
        let said = network.within(|| {
            for words in [
                "link set lo up",
                "link add zone0 type veth peer name zone1",
                "link set zone0 up",
                "addr add 192.0.2.1/24 dev zone0",
            ] {
                let ran = Command::new("ip").args(words.split(' ')).output();
                match ran {
                    Ok(output) if output.status.success() => {}
                    other => return Err(format!("ip {words}: {other:?}")),
                }
            }
            Ok(address_text(&complete("[fe80::1]:7".parse().unwrap(), &at("192.0.2.9:1"))))
        });
        match said.unwrap() {
            Ok(text) => assert_eq!(text, "[fe80::1%zone0]:7"),
            Err(why) => println!("skipped: {why}"),
        }
    }
}
