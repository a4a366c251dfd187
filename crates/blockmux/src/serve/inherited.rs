//! Listening sockets that the service manager passes (socket activation, sd_listen_fds(3)), and
//! those of the process that this one takes over from.
//!
//! A listener of the command line or the config file uses the passed socket with its address. A
//! passed socket with any other address becomes a listener of the protocol that its name gives
//! (`FileDescriptorName=nbd`).

use crate::address::{ListenAddress, ListenerEntry};
use crate::failure::Failure;
use crate::protocol::{Carrier, ConfiguredListener, PROTOCOLS, Protocol};
use blockmux_engine::socket::{Address, Listener};
use listenfd::ListenFd;
use std::env;

/// Inherited listeners. Taken ones stay in the list without their socket, so that a reload finds
/// the same listeners.
#[derive(Default)]
pub(super) struct InheritedListeners {
    /// From the service manager.
    passed: Vec<InheritedListener>,
    /// From the process that served before.
    offered: Vec<Offered>,
}

/// A listener of the process that served before.
struct Offered {
    /// Its protocol's name, or which listener of the API it is.
    kind: String,
    /// The address as it was asked for.
    asked: String,
    listener: Listener,
}

struct InheritedListener {
    /// `FileDescriptorName=` of the socket unit.
    name: String,
    address: Address,
    /// `None` once it is taken.
    listener: Option<Listener>,
}

impl InheritedListeners {
    /// The sockets that the service manager passed; empty without socket activation.
    ///
    /// # Errors
    /// If one of them is not a listening stream socket.
    pub(super) fn from_service_manager() -> Result<InheritedListeners, Failure> {
        let mut passed = ListenFd::from_env();
        let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
        let mut names = names.split(':');
        let mut all = Vec::new();
        for nth in 0..passed.len() {
            let name = names.next().unwrap_or_default().to_owned();
            let refuse = |reason: String| {
                Failure::request(format!(
                    "socket {nth} of the service manager (`{name}`): {reason}; pass listening stream sockets"
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
            all.push(InheritedListener {
                name,
                address: listener.address().clone(),
                listener: Some(listener),
            });
        }
        Ok(InheritedListeners { passed: all, offered: Vec::new() })
    }

    /// Adds a listener of the process that served before. One that the service manager had passed
    /// to that process by a name is as if it were passed to this one.
    pub(super) fn offer(
        &mut self,
        kind: String,
        asked: String,
        manager_name: Option<String>,
        listener: Listener,
    ) {
        match manager_name {
            Some(name) if self.passed.iter().all(|passed| passed.address != *listener.address()) => {
                let address = listener.address().clone();
                self.passed.push(InheritedListener { name, address, listener: Some(listener) });
            }
            Some(_) => {}
            None => self.offered.push(Offered { kind, asked, listener }),
        }
    }

    /// Takes the listener of the process that served before which that process was asked for by the
    /// same words, if there is one.
    pub(super) fn take_offered(&mut self, kind: &str, asked: &str) -> Option<Listener> {
        let at = self.offered.iter().position(|offered| offered.kind == kind && offered.asked == asked)?;
        Some(self.offered.remove(at).listener)
    }

    /// Closes the listeners of the process that served before which this one does not have.
    pub(super) fn close_offered(&mut self) {
        self.offered.clear();
    }

    /// The name by which the service manager has passed the socket at an address.
    pub(super) fn name_of(&self, address: &Address) -> Option<&str> {
        self.passed.iter().find(|passed| passed.address == *address).map(|passed| passed.name.as_str())
    }

    /// The inherited listeners at addresses that no listener of `named` has.
    ///
    /// # Errors
    /// If the name of one of them is not the name of a protocol.
    pub(super) fn further(&self, named: &[ConfiguredListener]) -> Result<Vec<ConfiguredListener>, Failure> {
        let is_named = |address: &Address| {
            named.iter().any(|(protocol, entry)| {
                entry.address.resolve(protocol.port).is_ok_and(|place| place.socket() == Some(address))
            })
        };
        let further = self.passed.iter().filter(|inherited| !is_named(&inherited.address));
        let listening = further.map(|InheritedListener { name, address, .. }| {
            let protocol = protocol_named(name).ok_or_else(|| {
                let known: Vec<_> = stream_protocols().map(|protocol| protocol.name).collect();
                Failure::request(format!(
                    "the service manager passes a socket at {address}, which is not a configured listener, with the \
                     name `{name}`; set FileDescriptorName= to one of {}",
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

    /// Takes the socket with this address, if one was passed.
    pub(super) fn take(&mut self, address: &Address) -> Option<Listener> {
        self.passed.iter_mut().find(|inherited| inherited.address == *address)?.listener.take()
    }
}

fn stream_protocols() -> impl Iterator<Item = &'static Protocol> {
    PROTOCOLS.iter().copied().filter(|protocol| protocol.carrier != Carrier::Frames)
}

fn protocol_named(name: &str) -> Option<&'static Protocol> {
    stream_protocols().find(|protocol| protocol.name == name)
}
