//! Listening sockets that the service manager passes (socket activation, sd_listen_fds(3)), and
//! those of a daemon from which this process takes over.
//!
//! A listener of the command line or the config file uses the passed socket that is bound to its
//! address. A passed socket with any other address becomes a listener of the protocol in its name
//! (`FileDescriptorName=nbd`). One without a name is of an NBD client that starts its own server,
//! as libnbd does (`nbdinfo [ blockmux serve ... ]`).

use crate::failure::Failure;
use crate::protocol::address::{ListenAddress, ListenerEntry, is_same_path};
use crate::protocol::policy::PolicyListener;
use crate::protocol::{Carrier, ConfiguredListener, PROTOCOLS, Protocol};
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::net::zone;
use listenfd::ListenFd;
use std::env;

/// The inherited listeners. A listener stays in the list when its socket is taken, so that a reload
/// finds the same listeners.
#[derive(Default)]
pub(super) struct InheritedListeners {
    /// Passed by the service manager.
    passed: Vec<InheritedListener>,
    /// Offered by the daemon from which this process takes over.
    offered: Vec<InheritedOffer>,
}

/// A listener that a daemon offers in a takeover.
struct InheritedOffer {
    /// Name of its protocol, or [`CONTROL`](super::offer::CONTROL) or [`API`](super::offer::API).
    kind: String,
    /// The configured address; its port may be 0.
    asked: String,
    listener: Listener,
}

impl InheritedOffer {
    fn is_at(&self, kind: &str, asked: &str) -> bool {
        // The other daemon may have been told a relative path, or this one.
        let paths = self.asked.strip_prefix("unix:").zip(asked.strip_prefix("unix:"));
        let is_same_socket = paths.is_some_and(|(own, other)| is_same_path(own.as_ref(), other.as_ref()));
        self.kind == kind && (self.asked == asked || is_same_socket)
    }
}

struct InheritedListener {
    /// `FileDescriptorName=` of the socket unit.
    name: String,
    address: Address,
    /// `None` after [`InheritedListeners::take`].
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

    /// Whether a socket without a name was passed, as by an NBD client that starts its own server.
    pub(super) fn has_unnamed(&self) -> bool {
        self.passed.iter().any(|passed| is_unnamed(&passed.name))
    }

    /// Adds a listener that a daemon offers in a takeover. With a `manager_name`, the service
    /// manager had passed the socket to the daemon, and it counts as passed to this process.
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
            None => self.offered.push(InheritedOffer { kind, asked, listener }),
        }
    }

    /// The names and addresses of the passed sockets, without the sockets: all that reading a
    /// config needs.
    pub(super) fn addresses(&self) -> InheritedListeners {
        let address = |passed: &InheritedListener| InheritedListener {
            name: passed.name.clone(),
            address: passed.address.clone(),
            listener: None,
        };
        InheritedListeners { passed: self.passed.iter().map(address).collect(), offered: Vec::new() }
    }

    /// Takes the inherited socket of a listener; `None` if there is none.
    pub(super) fn take_for(&mut self, listener: &PolicyListener) -> Option<Listener> {
        let address = listener.place.socket()?;
        let offered = self.take_offered(listener.protocol.name, &listener.place.to_string());
        offered.or_else(|| self.take(address))
    }

    /// Takes the offered listener of this kind with the same configured address; `None` if there is
    /// none.
    pub(super) fn take_offered(&mut self, kind: &str, asked: &str) -> Option<Listener> {
        let at = self.offered.iter().position(|offered| offered.is_at(kind, asked))?;
        Some(self.offered.remove(at).listener)
    }

    /// Whether there is an offered listener of this kind and configured address.
    pub(super) fn is_offered(&self, kind: &str, asked: &str) -> bool {
        self.offered.iter().any(|offered| offered.is_at(kind, asked))
    }

    /// Closes the offered listeners that were not taken, because this process's config lacks them.
    pub(super) fn close_offered(&mut self) {
        self.offered.clear();
    }

    /// The name of the passed socket with this address.
    pub(super) fn name_of(&self, address: &Address) -> Option<&str> {
        self.passed.iter().find(|passed| passed.address == *address).map(|passed| passed.name.as_str())
    }

    /// The listeners for passed sockets whose addresses no listener of `named` has.
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
            let protocol = protocol_named(if is_unnamed(name) { UNNAMED } else { name });
            let protocol = protocol.ok_or_else(|| {
                let known: Vec<_> = stream_protocols().map(|protocol| protocol.name).collect();
                Failure::request(format!(
                    "the service manager passes a socket at {address}, which is not a configured listener, with the \
                     name `{name}`; set FileDescriptorName= to one of {}",
                    known.join(", ")
                ))
            })?;
            let address = match address {
                Address::Tcp(tcp) => {
                    ListenAddress::Tcp { host: zone::host_text(tcp), port: Some(tcp.port()) }
                }
                Address::Unix(path) => ListenAddress::Unix(path.clone()),
            };
            Ok((protocol, ListenerEntry::at(address)))
        });
        listening.collect()
    }

    /// Takes the passed socket with this address; `None` if there is none.
    fn take(&mut self, address: &Address) -> Option<Listener> {
        self.passed.iter_mut().find(|inherited| inherited.address == *address)?.listener.take()
    }
}

fn stream_protocols() -> impl Iterator<Item = &'static Protocol> {
    PROTOCOLS.iter().copied().filter(|protocol| protocol.carrier != Carrier::Frames)
}

/// Whether the socket was passed without a name. sd_listen_fds_with_names(3) has the word for it.
fn is_unnamed(name: &str) -> bool {
    name.is_empty() || name == "unknown"
}

fn protocol_named(name: &str) -> Option<&'static Protocol> {
    stream_protocols().find(|protocol| protocol.name == name)
}

/// The protocol of a socket without a name.
const UNNAMED: &str = "nbd";
