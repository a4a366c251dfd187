//! Access by network: lists of networks in CIDR notation that a client's IP address has to be in.
//!
//! An IPv4-mapped IPv6 address (RFC 4291 §2.5.5.2) counts as the IPv4 address, in a list as well as
//! of a client: sockets that accept both families report IPv4 clients that way.

use core::fmt;
use core::net::IpAddr;
use core::str::FromStr;
use ipnet::{IpNet, Ipv4Net};
use std::sync::Arc;

/// A network in CIDR notation, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Network(IpNet);

/// The networks that clients may have their addresses in. The default admits every client.
///
/// Several lists may apply, such as those of a target and of its volumes: an address has to be in
/// one network of each list. A clone shares the lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedNetworks(Vec<Arc<[Network]>>);

/// Reason why a text is no network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetworkError {
    /// Neither an address nor a network.
    #[error("`{0}` is no network; write it as 10.0.0.0/8, 2001:db8::/32, or an address")]
    Malformed(String),
    /// Bits beyond the prefix are set.
    #[error("`{0}` has bits beyond its prefix; write {1}")]
    HostBits(String, Network),
}

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Network, NetworkError> {
        let written = match text.parse::<IpAddr>() {
            Ok(address) => IpNet::from(address),
            Err(_) => text.parse::<IpNet>().map_err(|_| NetworkError::Malformed(text.to_owned()))?,
        };
        let network = Network(canonical(written.trunc()));
        if written.addr() != written.trunc().addr() {
            return Err(NetworkError::HostBits(text.to_owned(), network));
        }
        Ok(network)
    }
}

/// An IPv4-mapped network as the IPv4 network.
fn canonical(network: IpNet) -> IpNet {
    let (address, prefix_len) = (network.addr().to_canonical(), network.prefix_len());
    match (network, address) {
        (IpNet::V6(_), IpAddr::V4(address)) => {
            let mapped = prefix_len.checked_sub(MAPPED_PREFIX_LEN);
            mapped.and_then(|len| Ipv4Net::new(address, len).ok()).map_or(network, IpNet::V4)
        }
        _ => network,
    }
}

impl fmt::Display for Network {
    /// Writes an address without a prefix.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.prefix_len() == self.0.max_prefix_len() { self.0.addr().fmt(f) } else { self.0.fmt(f) }
    }
}

impl AllowedNetworks {
    /// Admits addresses in these networks, and none if there are no networks.
    #[must_use]
    pub fn only(networks: &[Network]) -> AllowedNetworks {
        AllowedNetworks(vec![networks.into()])
    }

    /// Whether a client with this address is admitted; `None` is a client without an IP address,
    /// which no list concerns.
    #[must_use]
    pub fn admits(&self, client: Option<IpAddr>) -> bool {
        let Some(client) = client.map(|address| address.to_canonical()) else { return true };
        self.0.iter().all(|list| list.iter().any(|network| network.0.contains(&client)))
    }

    /// Whether every client is admitted, because there is no list.
    #[must_use]
    pub fn is_everyone(&self) -> bool {
        self.0.is_empty()
    }

    /// Combines two sets of lists: a client is admitted only if both admit it.
    #[must_use]
    pub fn and(mut self, other: &AllowedNetworks) -> AllowedNetworks {
        let new: Vec<_> = other.0.iter().filter(|list| !self.0.contains(list)).cloned().collect();
        self.0.extend(new);
        self
    }

    /// The networks of all lists.
    pub fn networks(&self) -> impl Iterator<Item = Network> {
        self.0.iter().flat_map(|list| list.iter().copied())
    }
}

/// Length of the prefix of IPv4-mapped addresses, `::ffff:0:0/96`.
const MAPPED_PREFIX_LEN: u8 = 96;

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(networks: &[&str]) -> AllowedNetworks {
        let networks: Vec<Network> = networks.iter().map(|text| text.parse().unwrap()).collect();
        AllowedNetworks::only(&networks)
    }

    fn admits(allowed: &AllowedNetworks, client: &str) -> bool {
        allowed.admits(Some(client.parse().unwrap()))
    }

    #[test]
    fn an_address_is_admitted_by_one_network_of_each_list() {
        let both = allowed(&["10.0.0.0/8", "::1"]);
        assert!(admits(&both, "10.255.0.1") && admits(&both, "::1"));
        assert!(!admits(&both, "11.0.0.1") && !admits(&both, "::2"));
        let each = both.clone().and(&allowed(&["10.1.0.0/16"]));
        assert!(admits(&each, "10.1.0.1") && !admits(&each, "10.2.0.1") && !admits(&each, "::1"));
        assert_eq!(each.clone().and(&both), each, "a list counts once");
    }

    #[test]
    fn no_list_admits_everyone_and_an_empty_list_no_address() {
        let (everyone, nobody) = (AllowedNetworks::default(), allowed(&[]));
        assert!(admits(&everyone, "192.0.2.1") && everyone.is_everyone());
        assert!(!admits(&nobody, "127.0.0.1") && !nobody.is_everyone());
        assert!(nobody.admits(None), "a Unix socket has no address");
    }

    #[test]
    fn an_ipv4_mapped_address_is_the_ipv4_address() {
        let ipv4 = allowed(&["192.0.2.0/24"]);
        assert!(admits(&ipv4, "::ffff:192.0.2.7") && !admits(&ipv4, "::ffff:192.0.3.7"));
        let mapped = allowed(&["::ffff:192.0.2.0/120"]);
        assert!(admits(&mapped, "192.0.2.7") && !admits(&mapped, "192.0.3.7"));
        assert_eq!(mapped, ipv4);
        assert!(!admits(&allowed(&["::/0"]), "::ffff:192.0.2.7"), "that is every IPv6 address");
        assert!(admits(&allowed(&["::ffff:192.0.2.7"]), "192.0.2.7"));
    }

    #[test]
    fn a_network_is_formatted_as_parsed_and_errors_say_what_to_write() {
        for text in ["10.0.0.0/8", "192.0.2.1", "2001:db8::/32", "::1", "0.0.0.0/0"] {
            assert_eq!(text.parse::<Network>().unwrap().to_string(), text);
        }
        for (text, expected) in [
            ("10.0.0.1/8", "`10.0.0.1/8` has bits beyond its prefix; write 10.0.0.0/8"),
            (
                "10.0.0.0/33",
                "`10.0.0.0/33` is no network; write it as 10.0.0.0/8, 2001:db8::/32, or an address",
            ),
            (
                "example.com",
                "`example.com` is no network; write it as 10.0.0.0/8, 2001:db8::/32, or an address",
            ),
            ("", "`` is no network; write it as 10.0.0.0/8, 2001:db8::/32, or an address"),
        ] {
            assert_eq!(text.parse::<Network>().unwrap_err().to_string(), expected);
        }
    }
}
