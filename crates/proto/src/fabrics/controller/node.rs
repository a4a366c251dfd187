//! The NVMe node: its subsystems, and the ports that lead to them.

use super::unconnected::{ConnectPermit, UnconnectedQueues};
use crate::fabrics::keyring::Keyring;
use crate::names::named_list::NamedList;
use crate::names::networks::AllowedNetworks;
use crate::nvme::HangUp;
use crate::nvme::event_queue::QueueEvent;
use crate::nvme::hosts::{HostAccess, OpenToAll};
use crate::nvme::nqn::Nqn;
use crate::nvme::subsystem::{Subsystem, unique_discovery_nqn, well_known_discovery_nqn};
use blockmux_wire::nvmeof::fabrics::DISCOVERY_NQN;
use blockmux_wire::nvmeof::tcp::NVME_DISCOVERY_PORT;
use core::net::{IpAddr, SocketAddr};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// All subsystems that are reachable through the same ports, and their discovery subsystem. Shared
/// by all cores.
pub struct NvmeNode {
    subsystems: RwLock<NamedList<Nqn, Arc<Subsystem>>>,
    pub(crate) discovery: Arc<Subsystem>,
    /// GENCTR of the discovery log; incremented by each change of its content.
    generation: AtomicU64,
    ports: RwLock<Vec<FabricsPort>>,
    /// Further discovery subsystems, which the log refers hosts to.
    referrals: RwLock<Vec<Referral>>,
    /// Longest in-capsule data on I/O queues, in bytes.
    pub(crate) in_capsule: usize,
    /// TLS PSKs of hosts.
    pub(crate) keyring: Arc<Keyring>,
    secure_channel: RwLock<SecureChannel>,
    /// Connections that have not connected a queue yet.
    unconnected: Arc<UnconnectedQueues>,
}

/// A port: an address that the node listens on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FabricsPort {
    /// Port identifier, from 1, unique in its node.
    pub id: u16,
    /// Address that the listener is bound to.
    pub address: SocketAddr,
    /// Address that hosts are told. An unspecified IP address stands for the one that a host
    /// connected to.
    pub advertised: SocketAddr,
}

impl FabricsPort {
    /// A port whose address is the one that hosts are told.
    #[must_use]
    pub fn new(id: u16, address: SocketAddr) -> FabricsPort {
        FabricsPort { id, address, advertised: address }
    }
}

/// Secure channel requirement of a port (Base 2.0 §5.16.1.23, TREQ and SECTYPE).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SecureChannel {
    /// The port has no TLS.
    #[default]
    None,
    /// TLS is optional: hosts with a key use TLS, others do not.
    NotRequired,
    /// TLS is required.
    Required,
}

/// A referral to another discovery subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Referral {
    /// Address of the discovery subsystem.
    pub address: SocketAddr,
    /// NQN of the discovery subsystem; the well-known one fits all.
    pub nqn: Nqn,
}

impl NvmeNode {
    /// Creates a node with these subsystems and ports. `machine` is as for [`Subsystem::new`].
    #[must_use]
    pub fn new(subsystems: Vec<Arc<Subsystem>>, ports: Vec<FabricsPort>, machine: &str) -> NvmeNode {
        let named = subsystems.into_iter().map(|subsystem| (subsystem.nqn.clone(), subsystem));
        NvmeNode {
            subsystems: RwLock::new(named.collect()),
            // As by default in Linux's target: `nvme disconnect -n` finds the controller by the
            // name in Identify.
            discovery: Arc::new(Subsystem::discovery(well_known_discovery_nqn(), machine)),
            generation: AtomicU64::new(1),
            ports: RwLock::new(ports),
            referrals: RwLock::default(),
            in_capsule: IN_CAPSULE,
            keyring: Arc::default(),
            secure_channel: RwLock::default(),
            unconnected: Arc::default(),
        }
    }

    /// Enables TLS on every port, with these keys.
    #[must_use]
    pub fn with_tls(mut self, keyring: Arc<Keyring>, secure_channel: SecureChannel) -> NvmeNode {
        (self.keyring, self.secure_channel) = (keyring, RwLock::new(secure_channel));
        self
    }

    /// Names the discovery subsystem with the unique NQN of this machine, so that hosts can
    /// distinguish it from those of other machines.
    #[must_use]
    pub fn with_unique_discovery_nqn(mut self, machine: &str) -> NvmeNode {
        self.discovery = Arc::new(Subsystem::discovery(unique_discovery_nqn(machine), machine));
        self
    }

    /// The TLS PSKs of hosts.
    #[must_use]
    pub fn keyring(&self) -> &Arc<Keyring> {
        &self.keyring
    }

    /// The secure channel requirement.
    #[must_use]
    pub fn secure_channel(&self) -> SecureChannel {
        *self.secure_channel.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the secure channel requirement; discovery hosts are notified if it differs.
    pub fn set_secure_channel(&self, secure_channel: SecureChannel) {
        let mut own = self.secure_channel.write().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *own, secure_channel) != secure_channel {
            drop(own);
            self.announce_change();
        }
    }

    /// Allows a host to connect to a subsystem, or changes its access there; the host is notified
    /// if it is connected for discovery.
    ///
    /// # Errors
    /// If the subsystem is open to every host.
    pub fn set_host(&self, subsystem: &Subsystem, host: &Nqn, access: HostAccess) -> Result<(), OpenToAll> {
        subsystem.set_host(host, access)?;
        self.announce_change_to(host);
        Ok(())
    }

    fn announce_change_to(&self, host: &Nqn) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.discovery.associations.notify_named(host, || QueueEvent::DiscoveryChanged);
    }

    /// Sets the referrals to other discovery subsystems.
    #[must_use]
    pub fn with_referrals(self, referrals: Vec<Referral>) -> NvmeNode {
        *self.referrals.write().unwrap_or_else(PoisonError::into_inner) = referrals;
        self
    }

    /// Changes the node's ports and the referrals; discovery hosts are notified of a change. A port
    /// keeps its identifier as long as it is listed.
    pub fn set_places(&self, ports: Vec<FabricsPort>, referrals: Vec<Referral>) {
        let old = std::mem::replace(
            &mut *self.ports.write().unwrap_or_else(PoisonError::into_inner),
            ports.clone(),
        );
        let mut own = self.referrals.write().unwrap_or_else(PoisonError::into_inner);
        let old_referrals = std::mem::replace(&mut *own, referrals.clone());
        drop(own);
        if old != ports || old_referrals != referrals {
            self.announce_change();
        }
    }

    /// The ports on which the node listens.
    pub(crate) fn ports(&self) -> Vec<FabricsPort> {
        self.ports.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Further discovery subsystems, which the log refers hosts to.
    pub(crate) fn referrals(&self) -> Vec<Referral> {
        self.referrals.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the longest in-capsule data on I/O queues, in bytes: rounded down to 16, and at most
    /// [`MAX_IN_CAPSULE`]. With 0, all data is fetched.
    #[must_use]
    pub fn with_in_capsule(mut self, bytes: usize) -> NvmeNode {
        self.in_capsule = bytes.min(MAX_IN_CAPSULE) & !15;
        self
    }

    /// Adds a subsystem and notifies discovery hosts. Returns whether its NQN was free.
    pub fn add(&self, subsystem: Arc<Subsystem>) -> bool {
        let mut subsystems = self.subsystems.write().unwrap_or_else(PoisonError::into_inner);
        let is_free = subsystems.add(subsystem.nqn.clone(), subsystem);
        drop(subsystems);
        if is_free {
            self.announce_change();
        }
        is_free
    }

    /// Removes a subsystem: its controllers lose their connections, and discovery hosts are
    /// notified. Returns whether it existed.
    pub fn remove(&self, nqn: &Nqn) -> bool {
        self.withdraw(nqn).inspect(|gone| gone.close()).is_some()
    }

    /// Removes a subsystem for new hosts, and notifies discovery hosts. Its controllers stay until
    /// [`Subsystem::close`].
    pub fn withdraw(&self, nqn: &Nqn) -> Option<Arc<Subsystem>> {
        let mut subsystems = self.subsystems.write().unwrap_or_else(PoisonError::into_inner);
        let gone = subsystems.remove(nqn)?;
        drop(subsystems);
        self.announce_change();
        Some(gone)
    }

    /// Changes the ports of a subsystem, `None` for all; discovery hosts are notified of a change.
    /// Controllers stay connected through the ports on which they were created.
    pub fn set_ports_of(&self, subsystem: &Subsystem, ports: Option<BTreeSet<u16>>) {
        if subsystem.set_ports(ports) {
            self.announce_change();
        }
    }

    /// Changes the networks from which hosts may connect to a subsystem; discovery hosts are
    /// notified of a change. Controllers stay connected.
    pub fn set_networks_of(&self, subsystem: &Subsystem, networks: AllowedNetworks) {
        if subsystem.set_networks(networks) {
            self.announce_change();
        }
    }

    /// Opens a subsystem to all hosts, or restricts it to those that are listed; discovery hosts
    /// are notified of a change.
    pub fn set_open(&self, subsystem: &Subsystem, is_open: bool) {
        if subsystem.set_open(is_open) {
            self.announce_change();
        }
    }

    /// Removes a host from the allow-list of a subsystem, but keeps the controllers that it has;
    /// returns whether it was listed.
    pub fn withdraw_host(&self, subsystem: &Subsystem, host: &Nqn) -> bool {
        let was_listed = subsystem.withdraw_host(host);
        if was_listed {
            self.announce_change_to(host);
        }
        was_listed
    }

    /// All subsystems except the discovery subsystem.
    #[must_use]
    pub fn subsystems(&self) -> Vec<Arc<Subsystem>> {
        let subsystems = self.subsystems.read().unwrap_or_else(PoisonError::into_inner);
        subsystems.values().cloned().collect()
    }

    /// GENCTR of the discovery log.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn announce_change(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.discovery.associations.announce(|| QueueEvent::DiscoveryChanged);
    }

    /// Registers a new connection from address `peer`, which has to connect a queue; `hang_up`
    /// closes it. Returns its permit, and whether another connection was closed because there were
    /// too many.
    #[must_use]
    pub fn begin_connect(&self, peer: Option<IpAddr>, hang_up: HangUp) -> (ConnectPermit, bool) {
        self.unconnected.begin(peer, hang_up)
    }

    /// The subsystem with this NQN.
    #[must_use]
    pub fn find(&self, nqn: &Nqn) -> Option<Arc<Subsystem>> {
        if *nqn == self.discovery.nqn || nqn.as_str() == DISCOVERY_NQN {
            return Some(self.discovery.clone());
        }
        let subsystems = self.subsystems.read().unwrap_or_else(PoisonError::into_inner);
        subsystems.get(nqn).cloned()
    }

    /// The ports of a subsystem in the discovery log. A subsystem that is available on all ports is
    /// not listed on the discovery port, unless there is no other.
    pub(crate) fn ports_of(&self, subsystem: &Subsystem) -> Vec<FabricsPort> {
        let ports = self.ports();
        let is_discovery = |port: &FabricsPort| port.address.port() == NVME_DISCOVERY_PORT;
        let takes_discovery = !subsystem.is_at_all_ports() || ports.iter().all(is_discovery);
        let is_told = |port: &FabricsPort| takes_discovery || !is_discovery(port);
        ports.into_iter().filter(|port| subsystem.is_at(port.id) && is_told(port)).collect()
    }
}

/// Longest in-capsule data, in bytes: a capsule has to fit the receive buffer as a whole.
pub const MAX_IN_CAPSULE: usize = 32 << 10;
/// Default in-capsule data length, in bytes, as in Linux's target: enough for a page of data and
/// for the ranges of Dataset Management.
const IN_CAPSULE: usize = 8192;
