//! What is served: subsystems, and the ports that lead to them.

use super::keyring::Keyring;
use crate::nvme::nqn::Nqn;
use crate::nvme::subsystem::Subsystem;
use blockmux_wire::nvmeof::tcp::NVME_DISCOVERY_PORT;
use core::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// All subsystems that are reached through the same ports, and their discovery subsystem. Shared by all cores.
pub struct Node {
    pub(super) subsystems: Vec<Arc<Subsystem>>,
    pub(super) discovery: Arc<Subsystem>,
    pub(super) ports: Vec<Port>,
    /// Data that a command's capsule on an I/O queue may have, in bytes.
    pub(super) in_capsule: usize,
    /// Keys of hosts that come by TLS.
    pub(super) keyring: Arc<Keyring>,
    pub(super) secure_channel: SecureChannel,
    /// How many connections have not connected a queue yet.
    unconnected: AtomicUsize,
}

/// Where a node listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// From 1, unique in its node.
    pub id: u16,
    /// What listeners are bound to: with no certain IP address it is the one that a host has reached.
    pub address: SocketAddr,
}

/// Whether connections have to be secured (Base 2.0 §5.16.1.23, TREQ and SECTYPE).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SecureChannel {
    /// It has no TLS.
    #[default]
    None,
    /// TLS is not required: hosts with a key come by TLS, and others without.
    NotRequired,
    /// TLS is required.
    Required,
}

/// A connection's leave to connect a queue, held until it has.
pub struct ConnectPermit(Arc<Node>);

impl Node {
    /// A node of these subsystems on these ports. `machine` is as for [`Subsystem::new`].
    #[must_use]
    pub fn new(subsystems: Vec<Arc<Subsystem>>, ports: Vec<Port>, machine: &str) -> Node {
        let discovery = Arc::new(Subsystem::discovery(machine));
        Node {
            subsystems,
            discovery,
            ports,
            in_capsule: IN_CAPSULE,
            keyring: Arc::default(),
            secure_channel: SecureChannel::None,
            unconnected: AtomicUsize::new(0),
        }
    }

    /// The same with hosts that come by TLS, on every port, with these keys.
    #[must_use]
    pub fn with_tls(mut self, keyring: Arc<Keyring>, secure_channel: SecureChannel) -> Node {
        (self.keyring, self.secure_channel) = (keyring, secure_channel);
        self
    }

    /// The keys of hosts.
    #[must_use]
    pub fn keyring(&self) -> &Arc<Keyring> {
        &self.keyring
    }

    /// Whether hosts come by TLS.
    #[must_use]
    pub fn secure_channel(&self) -> SecureChannel {
        self.secure_channel
    }

    /// Leave for one more connection to connect its queue; `None` if too many are at it.
    #[must_use]
    pub fn begin_connect(self: &Arc<Node>) -> Option<ConnectPermit> {
        if self.unconnected.fetch_add(1, Ordering::Relaxed) >= MAX_UNCONNECTED {
            self.unconnected.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(ConnectPermit(self.clone()))
    }

    /// The subsystem of that name.
    pub(super) fn find(&self, nqn: &Nqn) -> Option<&Arc<Subsystem>> {
        if *nqn == self.discovery.nqn {
            return Some(&self.discovery);
        }
        self.subsystems.iter().find(|subsystem| subsystem.nqn == *nqn)
    }

    /// Ports that lead to subsystems with namespaces. The port of discovery is for that alone, unless there is no
    /// other.
    pub(super) fn io_ports(&self) -> impl Iterator<Item = &Port> {
        let is_discovery = |port: &Port| port.address.port() == NVME_DISCOVERY_PORT;
        let only_discovery = self.ports.iter().all(is_discovery);
        self.ports.iter().filter(move |port| only_discovery || !is_discovery(port))
    }
}

impl Port {
    /// Where a host reaches it that has reached `local` of this machine.
    pub(super) fn reached_at(&self, local: Option<IpAddr>) -> IpAddr {
        let own = self.address.ip();
        if own.is_unspecified() { local.unwrap_or(own) } else { own }
    }
}

impl Drop for ConnectPermit {
    fn drop(&mut self) {
        self.0.unconnected.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Connections that have not connected a queue at a time.
pub const MAX_UNCONNECTED: usize = 1024;
/// As the Linux target has it: a page of data and the entries of Dataset Management go along with their commands.
const IN_CAPSULE: usize = 8192;
