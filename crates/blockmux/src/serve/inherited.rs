//! Listening sockets that this process was started with (socket activation, sd_listen_fds(3)).
//!
//! A listener of the command line or the config file whose address such a socket has takes that
//! socket. A socket at another address is a listener of the protocol that its name says
//! (`FileDescriptorName=nbd`).

use crate::address::{ListenAddress, ListenerEntry};
use crate::failure::Failure;
use crate::protocol::{Carrier, Listening, PROTOCOLS, Protocol};
use blockmux_engine::socket::{Address, Listener};
use listenfd::ListenFd;
use std::env;

/// Inherited listeners. Those that were taken stay listed, so that a reload serves the same.
#[derive(Default)]
pub(super) struct InheritedListeners(Vec<Named>);

struct Named {
    /// `FileDescriptorName=` of the socket unit.
    name: String,
    address: Address,
    /// Until it is taken.
    listener: Option<Listener>,
}

impl InheritedListeners {
    /// Those of the service manager; none if this process was started otherwise.
    ///
    /// # Errors
    /// If one of them is no stream socket that listens.
    pub(super) fn from_service_manager() -> Result<InheritedListeners, Failure> {
        let mut passed = ListenFd::from_env();
        let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
        let mut names = names.split(':');
        let mut inherited = Vec::new();
        for nth in 0..passed.len() {
            let name = names.next().unwrap_or_default().to_owned();
            let refuse = |reason: String| {
                Failure::request(format!(
                    "socket {nth} of the service manager (`{name}`): {reason}; pass stream sockets that listen"
                ))
            };
            let tcp = passed.take_tcp_listener(nth);
            let listener = match tcp {
                Ok(Some(tcp)) => Listener::inherited(tcp.into()),
                Ok(None) => continue,
                Err(_) => match passed.take_unix_listener(nth) {
                    Ok(Some(unix)) => Listener::inherited(unix.into()),
                    Ok(None) => continue,
                    Err(error) => Err(error),
                },
            };
            let listener = listener.map_err(|error| refuse(error.to_string()))?;
            inherited.push(Named { name, address: listener.address().clone(), listener: Some(listener) });
        }
        Ok(InheritedListeners(inherited))
    }

    /// The listeners that are served because they were inherited: those at no address of `named`.
    ///
    /// # Errors
    /// If the name of one is no protocol's.
    pub(super) fn further(&self, named: &[Listening]) -> Result<Vec<Listening>, Failure> {
        let is_named = |address: &Address| {
            named.iter().any(|(protocol, entry)| {
                entry.address.resolve(protocol.port).is_ok_and(|place| place.socket() == Some(address))
            })
        };
        let further = self.0.iter().filter(|inherited| !is_named(&inherited.address));
        let listening = further.map(|Named { name, address, .. }| {
            let protocol = of_name(name).ok_or_else(|| {
                let known: Vec<_> = over_streams().map(|protocol| protocol.name).collect();
                Failure::request(format!(
                    "the service manager passes {address}, which is no configured listener, by the name `{name}`; \
                     set FileDescriptorName= to one of {}",
                    known.join(", ")
                ))
            })?;
            let address = match address {
                Address::Tcp(tcp) => {
                    ListenAddress::Tcp { host: tcp.ip().to_string(), port: Some(tcp.port()) }
                }
                Address::Unix(path) => ListenAddress::Unix(path.clone()),
            };
            Ok((protocol, ListenerEntry::at(address)))
        });
        listening.collect()
    }

    /// Takes the socket at an address, if there is one.
    pub(super) fn take(&mut self, address: &Address) -> Option<Listener> {
        self.0.iter_mut().find(|inherited| inherited.address == *address)?.listener.take()
    }
}

fn over_streams() -> impl Iterator<Item = &'static Protocol> {
    PROTOCOLS.iter().copied().filter(|protocol| protocol.carrier != Carrier::Frames)
}

fn of_name(name: &str) -> Option<&'static Protocol> {
    over_streams().find(|protocol| protocol.name == name)
}
