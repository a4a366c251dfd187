//! Announces listeners to the local network by multicast DNS (RFC 6762 and RFC 6763), if the config
//! says so: NVMe hosts find the discovery service by it (TP 8009), and other clients what they
//! browse for.
//!
//! A service stands for a listener that other machines reach, and has no names of volumes: those
//! who may see them ask the listener. See docs/decisions/0110-mdns-by-a-library-off-by-default.md.

use crate::process::machine::own_addresses;
use crate::protocol::ServiceType;
use crate::protocol::policy::PolicyListener;
use mdns_sd::{Receiver, ServiceDaemon, ServiceInfo, UnregisterStatus};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{debug, warn};

/// What is announced.
#[derive(Default)]
pub(super) struct MdnsAnnouncer(Mutex<AnnouncerState>);

#[derive(Default)]
struct AnnouncerState {
    is_on: bool,
    /// There is one while something is announced.
    running: Option<Responder>,
}

/// The library's thread, and the services that it announces with their full names.
struct Responder {
    daemon: ServiceDaemon,
    announced: BTreeMap<MdnsService, String>,
}

/// A service at a port of this machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct MdnsService {
    /// Its type, as `_nbd._tcp`.
    kind: &'static str,
    /// What people see; unique among services of the type.
    name: String,
    /// The name that has the addresses.
    host: String,
    addresses: Vec<IpAddr>,
    port: u16,
    /// The keys and values of its TXT record.
    properties: &'static [(&'static str, &'static str)],
}

impl MdnsAnnouncer {
    /// Whether [`MdnsAnnouncer::announce`] announces anything from now on.
    pub(super) fn turn(&self, is_on: bool) {
        self.state().is_on = is_on;
    }

    /// Announces these listeners, and withdraws what was announced of others before.
    pub(super) fn announce<'a>(&self, listeners: impl Iterator<Item = &'a PolicyListener>) {
        let mut state = self.state();
        let wanted = if state.is_on { services(listeners) } else { BTreeSet::new() };
        if wanted.is_empty() {
            // The network is told in moments; the caller may hold a lock.
            return drop(state.stop());
        }
        if let Err(error) = state.follow(wanted) {
            warn!("mdns: cannot announce all listeners: {error}; set mdns = false if nobody needs them");
        }
    }

    /// Withdraws everything, and waits until the network has been told.
    pub(super) fn withdraw(&self) {
        let (asked, deadline) = (self.state().stop(), Instant::now() + GOODBYE_TIMEOUT);
        for told in asked {
            // Clients forget one that is not withdrawn in time when its lifetime ends.
            let _ = told.recv_deadline(deadline);
        }
    }

    fn state(&self) -> MutexGuard<'_, AnnouncerState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AnnouncerState {
    /// Begins to withdraw everything; the receivers say when the network has been told.
    fn stop(&mut self) -> Vec<Receiver<UnregisterStatus>> {
        let Some(Responder { daemon, announced }) = self.running.take() else { return Vec::new() };
        let asked = announced.values().filter_map(|name| daemon.unregister(name).ok()).collect();
        if let Err(error) = daemon.shutdown() {
            debug!("mdns: {error}");
        }
        asked
    }

    /// Withdraws what is announced and not in `wanted`, and announces the rest of `wanted`.
    fn follow(&mut self, wanted: BTreeSet<MdnsService>) -> Result<(), mdns_sd::Error> {
        let running = match self.running.take() {
            Some(running) => running,
            None => Responder { daemon: ServiceDaemon::new()?, announced: BTreeMap::new() },
        };
        let Responder { daemon, announced } = self.running.insert(running);
        let gone: Vec<_> = announced.keys().filter(|own| !wanted.contains(own)).cloned().collect();
        for name in gone.iter().filter_map(|own| announced.remove(own)) {
            // Nobody waits until the network has been told, which takes moments.
            daemon.unregister(&name)?;
        }
        for service in wanted {
            if let Entry::Vacant(entry) = announced.entry(service) {
                let info = entry.key().info()?;
                let name = info.get_fullname().to_owned();
                daemon.register(info)?;
                entry.insert(name);
            }
        }
        Ok(())
    }
}

impl MdnsService {
    fn info(&self) -> Result<ServiceInfo, mdns_sd::Error> {
        let MdnsService { kind, name, host, addresses, port, properties } = self;
        ServiceInfo::new(&format!("{kind}.local."), name, host, &addresses[..], *port, *properties)
    }
}

/// The services of listeners. One on the unspecified address has the machine's addresses of now.
fn services<'a>(listeners: impl Iterator<Item = &'a PolicyListener>) -> BTreeSet<MdnsService> {
    let machine = label(&rustix::system::uname().nodename().to_string_lossy());
    let mut services: BTreeMap<(&str, String), MdnsService> = BTreeMap::new();
    for listener in listeners {
        let Some(ServiceType { name: kind, properties }) = listener.protocol.service_type else { continue };
        let place = listener.advertised_address().or_else(|| listener.place.tcp());
        let Some(place) = place.filter(|place| !place.ip().is_loopback()) else { continue };
        let (ip, port) = (place.ip(), place.port());
        // Other programs announce the machine's own name, with addresses that have no listener. The
        // library answers no questions about a name with a dot.
        let (at, of, addresses) = match ip.is_unspecified() {
            true => (format!(":{port}"), machine.clone(), own_addresses(ip.is_ipv4())),
            false => (format!(" {}:{port}", label(&ip.to_string())), label(&ip.to_string()), vec![ip]),
        };
        let name = machine.chars().take(MAX_LABEL.saturating_sub(at.len())).collect::<String>() + &at;
        let host = format!("{}.local.", format!("blockmux-{of}").chars().take(MAX_LABEL).collect::<String>());
        let service = MdnsService { kind, name: name.clone(), host, addresses: Vec::new(), port, properties };
        services.entry((kind, name)).or_insert(service).addresses.extend(addresses);
    }
    services.into_values().filter(|service| !service.addresses.is_empty()).collect()
}

/// The first part of a host name, or an address, as a label of a host name.
fn label(text: &str) -> String {
    let is_address = text.parse::<IpAddr>().is_ok();
    let part = if is_address { text } else { text.split('.').next().unwrap_or_default() };
    part.replace(|char: char| !char.is_ascii_alphanumeric(), "-")
}

/// Maximum length of a label of a DNS name (RFC 1035 §2.3.4).
const MAX_LABEL: usize = 63;
/// Time in which the network is told that services are gone.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::address::ListenerAddress;
    use crate::protocol::nvme_tcp::NVME_RDMA;
    use crate::protocol::{AOE, ISCSI, NBD, Protocol};
    use blockmux_engine::net::socket::Address;

    fn listener(protocol: &'static Protocol, place: ListenerAddress) -> PolicyListener {
        PolicyListener::at(protocol, place)
    }

    fn tcp(protocol: &'static Protocol, address: &str) -> PolicyListener {
        listener(protocol, ListenerAddress::Socket(Address::Tcp(address.parse().unwrap())))
    }

    #[test]
    fn listeners_that_other_machines_reach_are_services_of_their_type() {
        let unix = listener(&NBD, ListenerAddress::Socket(Address::Unix("/s".into())));
        let frames = listener(&AOE, ListenerAddress::Interface("eth0".to_owned()));
        let own = [tcp(&NBD, "127.0.0.1:1"), tcp(&ISCSI, "[::1]:2"), unix, frames];
        assert_eq!(services(own.iter()), BTreeSet::new());
        let own =
            [tcp(&NBD, "192.0.2.1:10809"), tcp(&ISCSI, "[2001:db8::1]:3260"), tcp(&NVME_RDMA, "192.0.2.1:7")];
        let services = services(own.iter());
        let found: Vec<_> = services.iter().map(|own| (own.kind, own.host.as_str(), own.port)).collect();
        let expected = [
            ("_iscsi._tcp", "blockmux-2001-db8--1.local.", 3260),
            ("_nbd._tcp", "blockmux-192-0-2-1.local.", 10809),
            ("_nvme-disc._tcp", "blockmux-192-0-2-1.local.", 7),
        ];
        assert_eq!(found, expected);
        let discovery = services.last().unwrap().info().unwrap();
        assert_eq!(discovery.get_property_val_str("p"), Some("tcp"));
        assert_eq!(discovery.get_property_val_str("nqn"), Some("nqn.2014-08.org.nvmexpress.discovery"));
    }

    #[test]
    fn nothing_is_started_without_a_service() {
        let announcer = MdnsAnnouncer::default();
        announcer.announce([tcp(&NBD, "192.0.2.1:10809")].iter());
        assert!(announcer.state().running.is_none(), "it is off");
        announcer.turn(true);
        announcer.announce([tcp(&NBD, "127.0.0.1:10809")].iter());
        assert!(announcer.state().running.is_none(), "only this machine reaches it");
    }
}
