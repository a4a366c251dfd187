//! The listeners of the access rule, with indexes: thousands of them export thousands of volumes.

use super::Protocol;
use super::address::{ListenAddress, ListenerAddress};
use super::fabric::RdmaFabric;
use crate::failure::Failure;
use blockmux_proto::names::networks::AllowedNetworks;
use std::collections::HashMap;
use std::net::SocketAddr;

/// A listener of a protocol.
#[derive(Clone, Debug)]
pub(crate) struct PolicyListener {
    pub(crate) protocol: &'static Protocol,
    pub(crate) place: ListenerAddress,
    /// The listener's list of volumes (`?volumes=`); `None` without a list.
    pub(crate) volumes: Option<Vec<String>>,
    /// Networks from which clients may connect.
    pub(crate) networks: AllowedNetworks,
    /// Whether the listener is configured; otherwise it is the default listener of its protocol.
    pub(crate) is_asked: bool,
    /// The fabric whose connections it accepts, beside those over TCP.
    pub(crate) fabric: Option<&'static RdmaFabric>,
    pub(crate) advertised: Option<AdvertisedAddress>,
}

/// The address that clients are told instead of that of a listener.
#[derive(Clone, Debug)]
pub(crate) struct AdvertisedAddress {
    pub(crate) written: ListenAddress,
    /// Its IP address, once the name was looked up; port 0 stands for the listener's own port.
    pub(crate) found: Option<SocketAddr>,
}

impl PolicyListener {
    /// A configured listener of the protocol for all volumes and clients.
    pub(crate) fn at(protocol: &'static Protocol, place: ListenerAddress) -> PolicyListener {
        let (networks, is_asked) = (AllowedNetworks::default(), true);
        PolicyListener { protocol, place, volumes: None, networks, is_asked, fabric: None, advertised: None }
    }

    /// The TCP address that clients are told instead of the listener's own, if there is one.
    pub(crate) fn advertised_address(&self) -> Option<SocketAddr> {
        let found = self.advertised.as_ref().and_then(|advertised| advertised.found);
        let (mut advertised, own) = found.zip(self.place.tcp())?;
        if advertised.port() == 0 {
            advertised.set_port(own.port());
        }
        Some(advertised)
    }

    /// Looks up the name that it advertises, if there is one. That may hang, so a plan does not.
    ///
    /// # Errors
    /// If no host has this name.
    pub(crate) fn look_up(&mut self) -> Result<(), Failure> {
        if let Some(AdvertisedAddress { written, found }) = &mut self.advertised {
            let (protocol, place) = (self.protocol.name, &self.place);
            let wrong = |what| Failure::request(format!("--{protocol} {place}: {what}"));
            *found = written.find_advertised().map_err(wrong)?;
        }
        Ok(())
    }

    /// Takes over the address of a listener before it that has advertised the same name.
    pub(crate) fn keep_found(&mut self, before: &PolicyListener) {
        if let Some((own, before)) = self.advertised.as_mut().zip(before.advertised.as_ref())
            && own.written == before.written
        {
            own.found = before.found;
        }
    }

    /// Whether the name that it advertises was looked up, if there is one.
    pub(crate) fn is_looked_up(&self) -> bool {
        self.advertised.as_ref().is_none_or(|own| own.found.is_some())
    }
}

impl PolicyListener {
    pub(super) fn title(&self) -> String {
        format!("{} at {}", self.protocol.key(), self.place)
    }

    pub(crate) fn is_of(&self, protocol: &str) -> bool {
        self.protocol.served_as() == protocol
    }

    pub(super) fn names(&self, volume: &str) -> bool {
        self.volumes.iter().flatten().any(|name| name == volume)
    }
}

/// All listeners in their order, and what the rule asks about them.
#[derive(Debug, Default)]
pub(super) struct PolicyListeners {
    all: Vec<PolicyListener>,
    /// By the protocol that serves them.
    of_protocol: HashMap<&'static str, ProtocolListeners>,
    at_place: HashMap<(&'static str, ListenerAddress), usize>,
    /// By their addresses as text.
    at_address: HashMap<String, Vec<usize>>,
    /// Those whose lists name a volume, by the volume.
    naming: HashMap<String, Vec<usize>>,
    /// The addresses that clients are told, by those of the listeners that advertise them.
    advertised: HashMap<SocketAddr, SocketAddr>,
}

/// The listeners that one protocol serves, as indexes.
#[derive(Debug, Default)]
struct ProtocolListeners {
    all: Vec<usize>,
    /// The first one without a list of volumes, and the first of those that is configured: the
    /// others export what they do.
    unlisted: Option<usize>,
    unlisted_asked: Option<usize>,
    /// Those with a list of volumes.
    listed: Vec<usize>,
}

impl From<Vec<PolicyListener>> for PolicyListeners {
    fn from(all: Vec<PolicyListener>) -> PolicyListeners {
        let mut own = PolicyListeners::default();
        for (at, listener) in all.iter().enumerate() {
            let name = listener.protocol.served_as();
            let of_protocol = own.of_protocol.entry(name).or_default();
            of_protocol.all.push(at);
            match &listener.volumes {
                Some(_) => of_protocol.listed.push(at),
                None => {
                    of_protocol.unlisted.get_or_insert(at);
                    if listener.is_asked {
                        of_protocol.unlisted_asked.get_or_insert(at);
                    }
                }
            }
            own.at_place.entry((name, listener.place.clone())).or_insert(at);
            own.at_address.entry(listener.place.to_string()).or_default().push(at);
            for volume in listener.volumes.iter().flatten() {
                let naming = own.naming.entry(volume.clone()).or_default();
                if naming.last() != Some(&at) {
                    naming.push(at);
                }
            }
            own.advertised.extend(listener.place.tcp().zip(listener.advertised_address()));
        }
        PolicyListeners { all, ..own }
    }
}

impl PolicyListeners {
    /// All listeners, in their order.
    pub(super) fn all(&self) -> &[PolicyListener] {
        &self.all
    }

    /// Those that a protocol serves, in their order.
    pub(super) fn of(&self, protocol: &str) -> impl Iterator<Item = &PolicyListener> {
        self.at(self.of_protocol.get(protocol).map(|own| &own.all))
    }

    /// Those that a protocol serves and that have a list of volumes, in their order.
    pub(super) fn listed_of(&self, protocol: &str) -> impl Iterator<Item = &PolicyListener> {
        self.at(self.of_protocol.get(protocol).map(|own| &own.listed))
    }

    /// The one that a protocol serves at a place.
    pub(super) fn at_place(
        &self,
        protocol: &'static str,
        place: &ListenerAddress,
    ) -> Option<&PolicyListener> {
        self.all.get(*self.at_place.get(&(protocol, place.clone()))?)
    }

    /// Those with this address as text.
    pub(super) fn at_address(&self, address: &str) -> impl Iterator<Item = &PolicyListener> {
        self.at(self.at_address.get(address))
    }

    /// Those whose lists name a volume, in their order.
    pub(super) fn naming(&self, volume: &str) -> impl Iterator<Item = &PolicyListener> {
        self.at(self.naming.get(volume))
    }

    /// The first one of each protocol that has no list of volumes, or that in addition is
    /// configured. For the rule it stands for the others.
    pub(super) fn unlisted(&self, is_asked: bool) -> impl Iterator<Item = &PolicyListener> {
        let first = move |own: &ProtocolListeners| if is_asked { own.unlisted_asked } else { own.unlisted };
        self.of_protocol.values().filter_map(move |own| self.all.get(first(own)?))
    }

    /// The address that clients are told instead of that of the listener at `own`, if there is one.
    pub(super) fn advertised_for(&self, own: SocketAddr) -> Option<SocketAddr> {
        self.advertised.get(&own).copied()
    }

    fn at<'a>(&'a self, places: Option<&'a Vec<usize>>) -> impl Iterator<Item = &'a PolicyListener> {
        places.into_iter().flatten().filter_map(|at| self.all.get(*at))
    }

    /// Sorts listeners of these as they are here, and leaves out those that occur twice.
    pub(super) fn in_order<'a>(
        &'a self,
        listeners: impl Iterator<Item = &'a PolicyListener>,
    ) -> Vec<&'a PolicyListener> {
        let place = |own: &&PolicyListener| std::ptr::from_ref::<PolicyListener>(own).addr();
        let mut sorted: Vec<_> = listeners.collect();
        sorted.sort_by_key(place);
        sorted.dedup_by_key(|own| place(own));
        sorted
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ISCSI, NBD};
    use super::*;
    use blockmux_engine::net::socket::Address;

    #[test]
    fn listeners_are_found_by_protocol_place_and_volume() {
        let place =
            |port: u16| ListenerAddress::Socket(Address::Tcp(SocketAddr::from(([127, 0, 0, 1], port))));
        let listener = |protocol, port, volumes: Option<&[&str]>| PolicyListener {
            volumes: volumes.map(|names| names.iter().map(|name| (*name).to_owned()).collect()),
            ..PolicyListener::at(protocol, place(port))
        };
        let usual = PolicyListener { is_asked: false, ..listener(&NBD, 1, None) };
        let all = vec![
            usual,
            listener(&NBD, 2, Some(&["a", "b", "a"])),
            listener(&ISCSI, 3, Some(&["b"])),
            listener(&NBD, 4, None),
            listener(&NBD, 5, None),
        ];
        let listeners = PolicyListeners::from(all);
        let port = |own: &PolicyListener| own.place.tcp().map_or(0, |tcp| tcp.port());
        let ports = |found: Vec<&PolicyListener>| found.into_iter().map(port).collect::<Vec<_>>();
        assert_eq!(ports(listeners.of("nbd").collect()), [1, 2, 4, 5]);
        assert_eq!(ports(listeners.listed_of("nbd").collect()), [2]);
        assert_eq!(ports(listeners.naming("a").collect()), [2]);
        assert_eq!(ports(listeners.naming("b").collect()), [2, 3]);
        assert_eq!(ports(listeners.unlisted(false).collect()), [1]);
        assert_eq!(ports(listeners.unlisted(true).collect()), [4]);
        assert_eq!(ports(listeners.at_address("127.0.0.1:3").collect()), [3]);
        assert_eq!(listeners.at_place("iscsi", &place(3)).map(port), Some(3));
        assert!(listeners.at_place("nbd", &place(3)).is_none() && listeners.at_address("").next().is_none());
        let both = listeners.naming("b").chain(listeners.unlisted(true)).chain(listeners.naming("a"));
        assert_eq!(ports(listeners.in_order(both)), [2, 3, 4]);
    }
}
