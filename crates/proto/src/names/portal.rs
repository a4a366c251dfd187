//! The address of a portal in answers to discovery.
//!
//! A listener's address may have another meaning for a peer: an unspecified address stands for the
//! one that the peer connected to, and a link-local address is reached only through its own
//! interface (RFC 4007), whose name is different on the peer's machine.

use core::net::{IpAddr, SocketAddr};

/// The address at which a peer that connected to `local` can reach the listener that is bound to
/// `listener`, without a zone; `None` if the connection does not show that there is one.
pub(crate) fn told_to_peer(listener: SocketAddr, local: Option<SocketAddr>) -> Option<SocketAddr> {
    let told = |ip| SocketAddr::new(ip, listener.port());
    match (listener.ip(), local) {
        (ip, Some(local)) if ip.is_unspecified() => {
            (listener.is_ipv4() == local.is_ipv4()).then(|| told(local.ip().to_canonical()))
        }
        (ip, local) if is_link_local(ip) => {
            let link = local.filter(|local| is_link_local(local.ip()));
            link.filter(|local| [0, zone(*local)].contains(&zone(listener))).map(|_| told(ip))
        }
        (ip, _) => Some(told(ip)),
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// The index of the interface; 0 for an address that belongs to none.
fn zone(address: SocketAddr) -> u32 {
    match address {
        SocketAddr::V6(address) => address.scope_id(),
        SocketAddr::V4(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(listener: &str, local: &str) -> Option<String> {
        let local = local.parse().ok();
        told_to_peer(listener.parse().unwrap(), local).map(|address| address.to_string())
    }

    #[test]
    fn a_peer_is_told_the_address_at_which_it_reaches_a_listener() {
        for (listener, local, expected) in [
            ("192.0.2.1:3260", "[fe80::2%7]:1", "192.0.2.1:3260"),
            ("[2001:db8::1]:3260", "192.0.2.2:1", "[2001:db8::1]:3260"),
            ("0.0.0.0:3260", "192.0.2.2:1", "192.0.2.2:3260"),
            ("[::]:3260", "[2001:db8::2]:1", "[2001:db8::2]:3260"),
            ("[::]:3260", "[::ffff:192.0.2.2]:1", "192.0.2.2:3260"),
            ("[::]:3260", "[fe80::2%7]:1", "[fe80::2]:3260"),
            ("[fe80::1%7]:3260", "[fe80::2%7]:1", "[fe80::1]:3260"),
            ("[fe80::1]:3260", "[fe80::2%7]:1", "[fe80::1]:3260"),
            ("0.0.0.0:3260", "a Unix socket", "0.0.0.0:3260"),
        ] {
            assert_eq!(told(listener, local).as_deref(), Some(expected), "{listener} {local}");
        }
    }

    #[test]
    fn a_peer_is_not_told_an_address_that_it_cannot_reach() {
        for (listener, local) in [
            ("[fe80::1%7]:3260", "[fe80::1%8]:3260"),
            ("[fe80::1%7]:3260", "[2001:db8::2]:1"),
            ("[fe80::1%7]:3260", "192.0.2.2:1"),
            ("[fe80::1]:3260", "192.0.2.2:1"),
            ("[fe80::1%7]:3260", "a Unix socket"),
            // Listeners are of one family.
            ("[::]:3260", "192.0.2.2:1"),
            ("0.0.0.0:3260", "[2001:db8::2]:1"),
        ] {
            assert_eq!(told(listener, local), None, "{listener} {local}");
        }
    }
}
