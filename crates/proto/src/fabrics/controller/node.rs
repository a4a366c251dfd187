//! What is served: subsystems, and the ports that lead to them.

use super::unconnected::{ConnectPermit, UnconnectedQueues};
use crate::fabrics::keyring::Keyring;
use crate::nvme::HangUp;
use crate::nvme::event_queue::QueueEvent;
use crate::nvme::hosts::{HostAccess, OpenToAll};
use crate::nvme::nqn::Nqn;
use crate::nvme::subsystem::{Subsystem, unique_discovery_nqn, well_known_discovery_nqn};
use blockmux_wire::nvmeof::fabrics::DISCOVERY_NQN;
use blockmux_wire::nvmeof::tcp::NVME_DISCOVERY_PORT;
use core::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// All subsystems that are reached through the same ports, and their discovery subsystem. Shared by
/// all cores.
pub struct NvmeNode {
    subsystems: RwLock<Vec<Arc<Subsystem>>>,
    pub(crate) discovery: Arc<Subsystem>,
    /// GENCTR of the discovery log: grows with each change of what it says.
    generation: AtomicU64,
    pub(crate) ports: Vec<FabricsPort>,
    /// Where else hosts may ask.
    pub(crate) referrals: Vec<Referral>,
    /// Data that a command's capsule on an I/O queue may have, in bytes.
    pub(crate) in_capsule: usize,
    /// Keys of hosts that come by TLS.
    pub(crate) keyring: Arc<Keyring>,
    secure_channel: RwLock<SecureChannel>,
    /// Connections that have not connected a queue yet.
    unconnected: Arc<UnconnectedQueues>,
}

/// Where a node listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FabricsPort {
    /// From 1, unique in its node.
    pub id: u16,
    /// What listeners are bound to: with no certain IP address it is the one that a host has
    /// reached.
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

/// Another discovery subsystem that hosts are told of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Referral {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its name; the well-known one fits all.
    pub nqn: Nqn,
}

impl NvmeNode {
    /// A node of these subsystems on these ports. `machine` is as for [`Subsystem::new`].
    #[must_use]
    pub fn new(subsystems: Vec<Arc<Subsystem>>, ports: Vec<FabricsPort>, machine: &str) -> NvmeNode {
        NvmeNode {
            subsystems: RwLock::new(subsystems),
            // As Linux's target by default: `nvme disconnect -n` finds the controller by the name
            // that Identify tells.
            discovery: Arc::new(Subsystem::discovery(well_known_discovery_nqn(), machine)),
            generation: AtomicU64::new(1),
            ports,
            referrals: Vec::new(),
            in_capsule: IN_CAPSULE,
            keyring: Arc::default(),
            secure_channel: RwLock::default(),
            unconnected: Arc::default(),
        }
    }

    /// Lets hosts come by TLS, on every port, with these keys.
    #[must_use]
    pub fn with_tls(mut self, keyring: Arc<Keyring>, secure_channel: SecureChannel) -> NvmeNode {
        (self.keyring, self.secure_channel) = (keyring, RwLock::new(secure_channel));
        self
    }

    /// Calls the discovery subsystem by the unique name of this machine, by which hosts tell it
    /// from those of others.
    #[must_use]
    pub fn with_unique_discovery_nqn(mut self, machine: &str) -> NvmeNode {
        self.discovery = Arc::new(Subsystem::discovery(unique_discovery_nqn(machine), machine));
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
        *self.secure_channel.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on connections have to be secured so; who discovers is told if that is news.
    pub fn set_secure_channel(&self, secure_channel: SecureChannel) {
        let mut own = self.secure_channel.write().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *own, secure_channel) != secure_channel {
            drop(own);
            self.announce_change();
        }
    }

    /// Lets a host connect to a subsystem, or changes what holds for it there; it is told if it
    /// discovers.
    ///
    /// # Errors
    /// If every host may connect.
    pub fn set_host(&self, subsystem: &Subsystem, host: &Nqn, access: HostAccess) -> Result<(), OpenToAll> {
        subsystem.set_host(host, access)?;
        self.announce_change_to(host);
        Ok(())
    }

    /// Lets a host connect to a subsystem no more: its controllers end, and it is told if it
    /// discovers. Answers whether it was listed there.
    pub fn remove_host(&self, subsystem: &Subsystem, host: &Nqn) -> bool {
        let was_listed = subsystem.remove_host(host);
        if was_listed {
            self.announce_change_to(host);
        }
        was_listed
    }

    fn announce_change_to(&self, host: &Nqn) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.discovery.associations.notify_named(host, || QueueEvent::DiscoveryChanged);
    }

    /// Tells hosts of these other discovery subsystems.
    #[must_use]
    pub fn with_referrals(mut self, referrals: Vec<Referral>) -> NvmeNode {
        self.referrals = referrals;
        self
    }

    /// Takes so many bytes of data in a command's capsule on an I/O queue: rounded down to 16, and
    /// at most [`MAX_IN_CAPSULE`]. 0: data is always asked for.
    #[must_use]
    pub fn with_in_capsule(mut self, bytes: usize) -> NvmeNode {
        self.in_capsule = bytes.min(MAX_IN_CAPSULE) & !15;
        self
    }

    /// Serves one more subsystem; who discovers is told. Answers whether its name was free.
    pub fn add(&self, subsystem: Arc<Subsystem>) -> bool {
        let mut subsystems = self.subsystems.write().unwrap_or_else(PoisonError::into_inner);
        if subsystems.iter().any(|other| other.nqn == subsystem.nqn) {
            return false;
        }
        subsystems.push(subsystem);
        drop(subsystems);
        self.announce_change();
        true
    }

    /// Serves a subsystem no more: its controllers lose their connections, and who discovers is
    /// told. Answers whether there was one of that name.
    pub fn remove(&self, nqn: &Nqn) -> bool {
        let mut subsystems = self.subsystems.write().unwrap_or_else(PoisonError::into_inner);
        let Some(place) = subsystems.iter().position(|subsystem| subsystem.nqn == *nqn) else { return false };
        let gone = subsystems.remove(place);
        drop(subsystems);
        gone.associations.close();
        self.announce_change();
        true
    }

    /// All subsystems with namespaces, as they are now.
    #[must_use]
    pub fn subsystems(&self) -> Vec<Arc<Subsystem>> {
        self.subsystems.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// GENCTR of the discovery log.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn announce_change(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.discovery.associations.announce(|| QueueEvent::DiscoveryChanged);
    }

    /// Leave for one more connection to connect its queue, from that address and cut by `hang_up`;
    /// whether another one was cut for it, as too many are at it.
    #[must_use]
    pub fn begin_connect(&self, peer: Option<IpAddr>, hang_up: HangUp) -> (ConnectPermit, bool) {
        self.unconnected.begin(peer, hang_up)
    }

    /// The subsystem of that name.
    #[must_use]
    pub fn find(&self, nqn: &Nqn) -> Option<Arc<Subsystem>> {
        if *nqn == self.discovery.nqn || nqn.as_str() == DISCOVERY_NQN {
            return Some(self.discovery.clone());
        }
        let subsystems = self.subsystems.read().unwrap_or_else(PoisonError::into_inner);
        subsystems.iter().find(|subsystem| subsystem.nqn == *nqn).cloned()
    }

    /// Ports that hosts are told lead to a subsystem with namespaces: those that it is at. Where it
    /// is at all of them, the port of discovery is for that alone, unless there is no other.
    pub(crate) fn ports_of<'a>(&'a self, subsystem: &'a Subsystem) -> impl Iterator<Item = &'a FabricsPort> {
        let is_discovery = |port: &FabricsPort| port.address.port() == NVME_DISCOVERY_PORT;
        let takes_discovery = subsystem.ports().is_some() || self.ports.iter().all(is_discovery);
        let is_told = move |port: &&FabricsPort| takes_discovery || !is_discovery(port);
        self.ports.iter().filter(|port| subsystem.is_at(port.id)).filter(is_told)
    }
}

impl FabricsPort {
    /// Where a host reaches it that has reached `local` of this machine.
    pub(crate) fn reached_at(&self, local: Option<IpAddr>) -> IpAddr {
        let own = self.address.ip();
        if own.is_unspecified() { local.unwrap_or(own) } else { own }
    }
}

/// The most data in a capsule, in bytes: it has to be whole in the buffer that it is received into.
pub const MAX_IN_CAPSULE: usize = 32 << 10;
/// As the Linux target has it: a page of data and the entries of Dataset Management go along with
/// their commands.
const IN_CAPSULE: usize = 8192;
