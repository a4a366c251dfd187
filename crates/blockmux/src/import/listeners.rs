//! Addresses at which a foreign config listens, as our listeners.

use blockmux_proto::names::networks::Network;
use blockmux_proto::names::rdma::DEVICE_TARGET_QUERY;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A network as our `allow` names it; an IPv6 address may be in brackets.
pub(super) fn network(text: &str) -> Option<String> {
    let plain: String = text.trim().chars().filter(|c| !"[]".contains(*c)).collect();
    plain.parse::<Network>().ok().map(|network| network.to_string())
}

/// The listeners of all protocols.
#[derive(Default)]
pub(super) struct Listeners {
    all: Vec<ImportedListener>,
    /// Addresses that another listener covers, with the address of that one.
    covered: BTreeMap<String, String>,
}

/// One listener.
struct ImportedListener {
    /// The key of the list, as `iscsi`.
    key: &'static str,
    place: ListenPlace,
    /// It also accepts connections over RDMA devices.
    has_rdma: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ListenPlace {
    Tcp(String, u16),
    Unix(String),
}

impl ListenPlace {
    fn ip(&self) -> Option<(IpAddr, u16)> {
        match self {
            ListenPlace::Tcp(host, port) => Some((host.parse().ok()?, *port)),
            ListenPlace::Unix(_) => None,
        }
    }

    fn text(&self) -> String {
        match self {
            ListenPlace::Tcp(host, port) if host.contains(':') => format!("[{host}]:{port}"),
            ListenPlace::Tcp(host, port) => format!("{host}:{port}"),
            ListenPlace::Unix(path) => format!("unix:{path}"),
        }
    }

    /// Whether a socket at this address receives what is sent to `other`. A socket of `[::]` also
    /// receives IPv4.
    fn covers(&self, other: &ListenPlace) -> bool {
        let (Some((own, own_port)), Some((other, port))) = (self.ip(), other.ip()) else { return false };
        let is_wildcard =
            own == IpAddr::V6(Ipv6Addr::UNSPECIFIED) || own == Ipv4Addr::UNSPECIFIED && other.is_ipv4();
        own_port == port && own != other && is_wildcard
    }
}

impl Listeners {
    /// Adds a TCP listener; returns its address as targets name it. `None` if `host` is none that a
    /// config may contain.
    pub(super) fn add(&mut self, key: &'static str, host: &str, port: u16, has_rdma: bool) -> Option<String> {
        let host = host.trim_matches(['[', ']']);
        let host = match host.parse::<IpAddr>() {
            Ok(ip) => ip.to_string(),
            Err(_) if host == "*" || host == "ALL" => Ipv4Addr::UNSPECIFIED.to_string(),
            Err(_) => {
                let is_part = |c: char| c.is_ascii_alphanumeric() || "-_.:%".contains(c);
                let is_name = !host.is_empty() && host.chars().all(is_part) && !host.contains(':');
                let is_linked = host.contains('%') && host.contains(':') && host.chars().all(is_part);
                (is_name && !host.contains('%') || is_linked).then(|| host.to_owned())?
            }
        };
        Some(self.push(ImportedListener { key, place: ListenPlace::Tcp(host, port), has_rdma }))
    }

    /// Adds a Unix socket.
    pub(super) fn add_unix(&mut self, key: &'static str, path: &str) -> String {
        self.push(ImportedListener { key, place: ListenPlace::Unix(path.to_owned()), has_rdma: false })
    }

    fn push(&mut self, listener: ImportedListener) -> String {
        let text = listener.place.text();
        let same = |other: &&mut ImportedListener| other.key == listener.key && other.place == listener.place;
        match self.all.iter_mut().find(same) {
            Some(other) => other.has_rdma |= listener.has_rdma,
            None => self.all.push(listener),
        }
        text
    }

    /// Leaves out listeners that a wildcard address covers.
    pub(super) fn settle(&mut self) {
        let (mut all, mut at) = (std::mem::take(&mut self.all), 0);
        while let Some(one) = all.get(at) {
            let same_port = |other: &ImportedListener| other.key == one.key && other.place.covers(&one.place);
            match all.iter().position(same_port) {
                None => at += 1,
                Some(wildcard) => {
                    let rdma = one.has_rdma;
                    self.covered.insert(one.place.text(), all[wildcard].place.text());
                    all[wildcard].has_rdma |= rdma;
                    all.remove(at);
                }
            }
        }
        self.all = all;
    }

    /// The listener's address for an address that was added.
    pub(super) fn settled(&self, address: &str) -> String {
        let mut address = address;
        // 192.0.2.1 may be covered by 0.0.0.0, and that by [::].
        while let Some(by) = self.covered.get(address) {
            address = by;
        }
        address.to_owned()
    }

    /// Addresses by key, as lists of a config.
    pub(super) fn lists(&self) -> BTreeMap<&'static str, Vec<String>> {
        let mut lists: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
        for listener in &self.all {
            let query = if listener.has_rdma { DEVICE_TARGET_QUERY } else { "" };
            lists.entry(listener.key).or_default().push(listener.place.text() + query);
        }
        lists
    }

    /// The addresses of one key, as targets name them.
    pub(super) fn of(&self, key: &str) -> Vec<String> {
        let own = self.all.iter().filter(|listener| listener.key == key);
        own.map(|listener| listener.place.text()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wildcard_address_covers_the_others_of_its_port() {
        let mut listeners = Listeners::default();
        let specific = listeners.add("iscsi", "192.0.2.1", 3260, true).unwrap();
        listeners.add("iscsi", "0.0.0.0", 3260, false).unwrap();
        listeners.add("iscsi", "::0", 3260, false).unwrap();
        let other = listeners.add("iscsi", "192.0.2.1", 3261, false).unwrap();
        listeners.add("nbd", "192.0.2.1", 3260, false).unwrap();
        listeners.add_unix("nbd", "/run/nbd.sock");
        listeners.settle();
        let lists = listeners.lists();
        assert_eq!(lists["iscsi"], ["[::]:3260?rdma=verbs", "192.0.2.1:3261"]);
        assert_eq!(lists["nbd"], ["192.0.2.1:3260", "unix:/run/nbd.sock"]);
        assert_eq!((listeners.settled(&specific).as_str(), listeners.settled(&other)), ("[::]:3260", other));
    }

    #[test]
    fn a_network_may_be_in_brackets() {
        assert_eq!(network("[2001:db8::]/32").as_deref(), Some("2001:db8::/32"));
        assert_eq!(network("192.0.2.1").as_deref(), Some("192.0.2.1"));
        assert_eq!(network("storage.example.com"), None);
    }

    #[test]
    fn a_host_that_a_config_cannot_name_is_refused() {
        let mut listeners = Listeners::default();
        for host in ["", "a b", "a?volumes=x", "x:y", "1.2.3.4\n", "a/b"] {
            assert_eq!(listeners.add("nbd", host, 1, false), None, "{host}");
        }
        assert_eq!(listeners.add("nbd", "storage.example.com", 1, false).unwrap(), "storage.example.com:1");
        assert_eq!(listeners.add("nbd", "[fe80::1%eth0]", 1, false).unwrap(), "[fe80::1%eth0]:1");
    }
}
