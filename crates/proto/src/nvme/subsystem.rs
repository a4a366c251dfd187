//! Subsystems and their namespaces.

use super::ana::{AnaGroup, AnaGroups};
use super::association::Associations;
use super::event_queue::QueueEvent;
use super::hosts::{HostAccess, OpenToAll, SubsystemHosts};
use super::identity::{GivenIdentity, NamespaceIdentity, unique};
use super::nqn::Nqn;
use super::reservation::notification;
use super::traffic::SubsystemTraffic;
use crate::exports::VolumeId;
use crate::names::networks::AllowedNetworks;
use crate::names::volume_uuid::VolumeUuid;
use crate::nvme::auth::HostSecrets;
use crate::volume_state::{Change, Notice, ServingState, VolumeState, Watcher};
use blockmux_volume::VolumeInfo;
use blockmux_wire::nvme::log::AnaState;
use blockmux_wire::nvmeof::fabrics::DISCOVERY_NQN;
use core::net::IpAddr;
use data_encoding::HEXLOWER;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

/// A subsystem: namespaces under an NQN, with the controllers of its hosts. Shared by all cores.
pub struct Subsystem {
    /// NQN, unique in its node.
    pub nqn: Nqn,
    /// Serial number: 20 characters, the same after each restart.
    pub(super) serial: String,
    /// Model number: up to 40 characters.
    pub(super) model: String,
    /// Ports on which the subsystem is available; `None` for all.
    ports: RwLock<Option<BTreeSet<u16>>>,
    /// Networks from which hosts may connect.
    networks: RwLock<AllowedNetworks>,
    /// Sorted by namespace identifier.
    namespaces: RwLock<Vec<AttachedNamespace>>,
    /// Incremented by each change of the namespaces.
    generation: AtomicU64,
    /// The latest namespaces of each mask, while a queue has them.
    views: Mutex<BTreeMap<Option<Nqn>, SharedNamespaces>>,
    hosts: SubsystemHosts,
    pub(crate) associations: Arc<Associations>,
    pub(crate) is_discovery: bool,
    pub(crate) traffic: SubsystemTraffic,
    pub(super) ana: AnaGroups,
}

/// Namespaces that queues share, of this generation.
type SharedNamespaces = (u64, Weak<[Namespace]>);

/// An attached namespace.
struct AttachedNamespace {
    namespace: Namespace,
    /// Forwards changes of the volume.
    _watch: Arc<NamespaceWatch>,
}

/// A snapshot of the namespaces that are visible to a host, so that no command takes a lock. Each
/// queue refreshes its own when [`Subsystem::is_current`] returns `false`.
#[derive(Default)]
pub(crate) struct NamespaceView {
    /// Sorted by namespace identifier; shared by all queues of hosts that see the same.
    namespaces: Arc<[Namespace]>,
    /// The generation of the snapshot.
    seen: u64,
}

/// Reason for not attaching a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// The namespace identifier is in use.
    #[error("there is a namespace {0} already; take another number")]
    Taken(u32),
    /// The namespace identifier is out of range.
    #[error("namespace {0} is not from 1 to {MAX_NAMESPACES}")]
    Number(u32),
    /// The ANA group does not exist.
    #[error("there is no ana_group {0}")]
    NoGroup(u32),
    /// Another namespace has the same NGUID, EUI64 or UUID; hosts would take both for one.
    #[error(
        "namespace {0} has the same NGUID, EUI64 or UUID, which derive from the volume; set others for one of the two in a config file"
    )]
    Twin(u32),
}

/// Forwards changes of a volume to the controllers.
struct NamespaceWatch {
    nsid: u32,
    volume: VolumeId,
    associations: Arc<Associations>,
}

/// A volume as a namespace.
#[derive(Clone)]
pub struct Namespace {
    /// Namespace identifier, from 1, unique in its subsystem.
    pub nsid: u32,
    /// Index of the volume among the exports.
    pub volume: VolumeId,
    /// Volume state that all protocols share.
    pub volume_state: Arc<VolumeState>,
    /// Whether writes are refused regardless of the volume.
    pub read_only: bool,
    /// Globally unique identifiers.
    pub identity: NamespaceIdentity,
    /// log2 of the logical block size in bytes, which does not change.
    pub(super) block_shift: u32,
    /// Whether deallocated blocks read as zeroes.
    pub(super) zeroes_deallocated: bool,
    /// Whether a read with FUA has to flush before.
    pub(super) has_cache: bool,
    /// ANAGRPID; 0 without groups.
    pub(super) ana_group: u32,
    /// Several processes export the volume, and one at a time serves it.
    in_turns: bool,
}

impl Subsystem {
    /// Creates a subsystem that is open to every host if `hosts` is empty, and otherwise to those
    /// listed. `machine` identifies this machine, so that serial numbers differ between machines.
    ///
    /// Namespaces beyond the first 1,024, or with an identifier that is in use, are left out.
    #[must_use]
    pub fn new(nqn: Nqn, machine: &str, namespaces: Vec<Namespace>, hosts: Vec<Nqn>) -> Subsystem {
        let serial = HEXLOWER.encode(&unique(&format!("{nqn}\n{machine}"))).chars().take(20).collect();
        let subsystem = Subsystem {
            nqn,
            serial,
            model: MODEL.to_owned(),
            ports: RwLock::default(),
            networks: RwLock::default(),
            namespaces: RwLock::default(),
            generation: AtomicU64::new(0),
            views: Mutex::default(),
            hosts: SubsystemHosts::new(hosts),
            associations: Arc::default(),
            is_discovery: false,
            traffic: SubsystemTraffic::default(),
            ana: AnaGroups::default(),
        };
        for namespace in namespaces {
            // Namespaces that cannot be attached are left out, as documented.
            let _ = subsystem.attach(namespace, None);
        }
        subsystem
    }

    /// Enables ANA with these groups; `ports` are all ports of the node. Without groups, ANA is
    /// enabled if several processes export one of the volumes in turns: each namespace is a group.
    #[must_use]
    pub fn with_ana(mut self, groups: Vec<AnaGroup>, ports: &[u16]) -> Subsystem {
        let mut attached = self.write();
        let in_turns = groups.is_empty() && attached.iter().any(|one| one.namespace.in_turns);
        let namespaces = attached.iter_mut().map(|attached| &mut attached.namespace);
        let ana = match in_turns {
            true => AnaGroups::of_namespaces(namespaces),
            false => AnaGroups::new(groups, ports, namespaces),
        };
        drop(attached);
        self.ana = ana;
        self
    }

    /// Whether hosts are told the ANA states of the namespaces. That does not change.
    #[must_use]
    pub fn has_ana(&self) -> bool {
        self.ana.is_there()
    }

    /// Limits the subsystem to these ports.
    #[must_use]
    pub fn with_ports(self, ports: BTreeSet<u16>) -> Subsystem {
        Subsystem { ports: RwLock::new(Some(ports)), ..self }
    }

    /// Limits the subsystem to hosts in these networks.
    #[must_use]
    pub fn with_networks(self, networks: AllowedNetworks) -> Subsystem {
        Subsystem { networks: RwLock::new(networks), ..self }
    }

    /// Whether a host with this address may connect; `None` is a host without an IP address.
    pub(crate) fn admits_address(&self, host: Option<IpAddr>) -> bool {
        self.networks.read().unwrap_or_else(PoisonError::into_inner).admits(host)
    }

    /// The networks from which hosts may connect.
    #[must_use]
    pub fn networks(&self) -> AllowedNetworks {
        self.networks.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes the networks from which hosts may connect; returns whether they differ.
    pub(crate) fn set_networks(&self, networks: AllowedNetworks) -> bool {
        let mut own = self.networks.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *own, networks.clone()) != networks
    }

    /// Whether the subsystem is available on all ports.
    pub(crate) fn is_at_all_ports(&self) -> bool {
        self.ports.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Whether the subsystem is available on this port.
    pub(crate) fn is_at(&self, port: u16) -> bool {
        let ports = self.ports.read().unwrap_or_else(PoisonError::into_inner);
        ports.as_ref().is_none_or(|ports| ports.contains(&port))
    }

    /// Changes the ports on which the subsystem is available; returns whether they differ.
    pub(crate) fn set_ports(&self, ports: Option<BTreeSet<u16>>) -> bool {
        let mut own = self.ports.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *own, ports.clone()) != ports
    }

    /// Opens the subsystem to all hosts, or restricts it to those that are listed; returns whether
    /// that is a change.
    pub(crate) fn set_open(&self, is_open: bool) -> bool {
        std::mem::replace(&mut self.hosts.write().is_open, is_open) != is_open
    }

    /// The hosts that are listed.
    #[must_use]
    pub fn listed_hosts(&self) -> Vec<Nqn> {
        self.hosts.read().listed()
    }

    /// The namespaces: identifier, volume, and the namespace's globally unique identifiers.
    #[must_use]
    pub fn attached(&self) -> Vec<(u32, VolumeId, NamespaceIdentity)> {
        let of = |one: &AttachedNamespace| (one.namespace.nsid, one.namespace.volume, one.namespace.identity);
        self.read().iter().map(of).collect()
    }

    /// Refuses further hosts, and disconnects all controllers.
    pub fn close(&self) {
        self.associations.close();
    }

    /// Disconnects the controllers of a host.
    pub fn disconnect_host(&self, host: &Nqn) {
        self.associations.disconnect_host(host);
    }

    /// Sets the serial number, of up to 20 characters.
    #[must_use]
    pub fn with_serial_number(self, serial: String) -> Subsystem {
        Subsystem { serial, ..self }
    }

    /// Sets the first controller identifier. A host takes two controllers with the same identifier
    /// for one, so processes that serve the same NQN begin at random identifiers.
    #[must_use]
    pub fn with_first_controller(self, cntlid: u16) -> Subsystem {
        self.associations.begin_at(cntlid);
        self
    }

    /// Sets the model number, of up to 40 characters.
    #[must_use]
    pub fn with_model_number(self, model: String) -> Subsystem {
        Subsystem { model, ..self }
    }

    /// Limits the visible namespaces of these hosts.
    #[must_use]
    pub fn with_masks(self, masks: BTreeMap<Nqn, BTreeSet<u32>>) -> Subsystem {
        let mut hosts = self.hosts.write();
        masks.into_iter().for_each(|(host, mask)| hosts.of(host).namespaces = Some(mask));
        drop(hosts);
        self
    }

    /// Closes the subsystem to hosts that are not listed, even if none is.
    #[must_use]
    pub fn closed(self) -> Subsystem {
        self.hosts.write().is_open = false;
        self
    }

    /// Requires these hosts to authenticate with these secrets.
    #[must_use]
    pub fn with_secrets(self, secrets: BTreeMap<Nqn, impl Into<Arc<HostSecrets>>>) -> Subsystem {
        let mut hosts = self.hosts.write();
        secrets.into_iter().for_each(|(host, own)| hosts.of(host).secrets = Some(own.into()));
        drop(hosts);
        self
    }

    /// Adds a host to the allow-list, or changes its access: its secrets apply to its next
    /// authentication; it is notified of changes of its visible namespaces.
    ///
    /// # Errors
    /// If the subsystem is open to every host.
    pub(crate) fn set_host(&self, host: &Nqn, access: HostAccess) -> Result<(), OpenToAll> {
        let mut hosts = self.hosts.write();
        if hosts.is_open {
            return Err(OpenToAll);
        }
        let before = hosts.set(host, access.clone());
        self.generation.fetch_add(1, Ordering::SeqCst);
        drop(hosts);
        let Some(before) = before else { return Ok(()) };
        let attached = self.read();
        let all = attached.iter().map(|attached| attached.namespace.nsid);
        let changed: Vec<u32> = all.filter(|nsid| before.shows(*nsid) != access.shows(*nsid)).collect();
        drop(attached);
        for nsid in changed {
            self.associations.notify_named(host, || QueueEvent::NamespaceShown(nsid));
        }
        Ok(())
    }

    /// Admits no further connections of a host; returns whether it was listed.
    pub(crate) fn withdraw_host(&self, host: &Nqn) -> bool {
        let mut hosts = self.hosts.write();
        !hosts.is_open && hosts.remove(host)
    }

    /// Whether every host may connect.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.hosts.read().is_open
    }

    /// The secrets of a host, if it has to authenticate.
    pub(crate) fn secrets_of(&self, host: &Nqn) -> Option<Arc<HostSecrets>> {
        self.hosts.read().secrets_of(host)
    }

    /// Sets the ANA state of a group at a port; hosts that connected through the port are notified.
    pub fn set_ana_state(&self, group: u32, port: u16, state: AnaState) {
        if self.ana.set(group, port, state) {
            self.associations.announce(|| QueueEvent::AnaChanged { port: Some(port) });
        }
    }

    /// Attaches a namespace, in this ANA group or, if there are groups, in the last one. Hosts that
    /// can see it are notified.
    ///
    /// # Errors
    /// If its identifier is in use or out of range, the group does not exist, or another namespace
    /// has one of its unique identifiers.
    pub fn attach(&self, mut namespace: Namespace, group: Option<u32>) -> Result<(), AttachError> {
        let nsid = namespace.nsid;
        if !(1..=MAX_NAMESPACES as u32).contains(&nsid) {
            return Err(AttachError::Number(nsid));
        }
        namespace.ana_group = match group {
            Some(group) if !self.ana.has(group) => return Err(AttachError::NoGroup(group)),
            Some(group) => group,
            None => self.ana.of_new(nsid),
        };
        let mut attached = self.write();
        let Err(place) = attached.binary_search_by_key(&nsid, |other| other.namespace.nsid) else {
            return Err(AttachError::Taken(nsid));
        };
        let is_twin = |other: &&AttachedNamespace| other.namespace.identity.clashes_with(&namespace.identity);
        if let Some(twin) = attached.iter().find(is_twin) {
            return Err(AttachError::Twin(twin.namespace.nsid));
        }
        self.ana.on_member(namespace.ana_group);
        let watch = NamespaceWatch::begin(&namespace, &self.associations);
        attached.insert(place, AttachedNamespace { namespace, _watch: watch });
        self.announce_change(attached, nsid);
        Ok(())
    }

    /// Detaches the namespaces for which `is_meant` returns `true`, and notifies hosts that could
    /// see them. Outstanding commands end; later commands fail with Invalid Namespace or Format.
    /// Returns the identifiers of the detached namespaces.
    pub fn detach(&self, is_meant: impl Fn(&Namespace) -> bool) -> Vec<u32> {
        let mut gone = Vec::new();
        loop {
            let mut attached = self.write();
            let Some(place) = attached.iter().position(|one| is_meant(&one.namespace)) else { return gone };
            let Namespace { nsid, ana_group, .. } = attached.remove(place).namespace;
            self.ana.on_member(ana_group);
            gone.push(nsid);
            self.announce_change(attached, nsid);
        }
    }

    fn announce_change(&self, attached: RwLockWriteGuard<'_, Vec<AttachedNamespace>>, nsid: u32) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        drop(attached);
        self.associations.announce(|| QueueEvent::NamespaceChanged(nsid));
    }

    /// Creates the view of a host.
    pub(crate) fn view(&self, host: &Nqn) -> NamespaceView {
        let attached = self.read();
        let seen = self.generation.load(Ordering::SeqCst);
        let hosts = self.hosts.read();
        let mask = hosts.has_mask(host).then(|| host.clone());
        let mut views = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        let known = views.get(&mask).filter(|(generation, _)| *generation == seen);
        if let Some(namespaces) = known.and_then(|(_, namespaces)| namespaces.upgrade()) {
            return NamespaceView { namespaces, seen };
        }
        let own = attached.iter().map(|attached| &attached.namespace);
        let namespaces: Arc<[Namespace]> =
            own.filter(|namespace| hosts.shows(host, namespace.nsid)).cloned().collect();
        views.retain(|_, (generation, _)| *generation == seen);
        views.insert(mask, (seen, Arc::downgrade(&namespaces)));
        NamespaceView { namespaces, seen }
    }

    /// Whether the namespaces have not changed since this view was created.
    #[inline]
    pub(crate) fn is_current(&self, view: &NamespaceView) -> bool {
        self.generation.load(Ordering::SeqCst) == view.seen
    }

    /// Whether a namespace with this identifier would be visible to a host.
    pub(super) fn shows(&self, host: &Nqn, nsid: u32) -> bool {
        self.hosts.read().shows(host, nsid)
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<AttachedNamespace>> {
        self.namespaces.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<AttachedNamespace>> {
        self.namespaces.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The discovery subsystem of a node, which Identify and the log page name `nqn`. Hosts may
    /// also connect to the well-known name.
    pub(crate) fn discovery(nqn: Nqn, machine: &str) -> Subsystem {
        Subsystem { is_discovery: true, ..Subsystem::new(nqn, machine, Vec::new(), Vec::new()) }
    }

    /// Whether this host may connect.
    #[must_use]
    pub fn admits(&self, host: &Nqn) -> bool {
        self.hosts.read().admits(host)
    }
}

impl NamespaceView {
    /// The namespace with this identifier.
    #[inline]
    pub(crate) fn namespace(&self, nsid: u32) -> Option<&Namespace> {
        // Namespaces are usually numbered from 1 without gaps.
        let at = (nsid as usize).checked_sub(1)?;
        if let Some(namespace) = self.namespaces.get(at)
            && namespace.nsid == nsid
        {
            return Some(namespace);
        }
        let at = self.namespaces.binary_search_by_key(&nsid, |namespace| namespace.nsid).ok()?;
        self.namespaces.get(at)
    }

    /// All namespaces, sorted by identifier.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Namespace> {
        self.namespaces.iter()
    }
}

impl Namespace {
    /// Creates a namespace of a volume, with identifiers derived from the UUID.
    #[must_use]
    pub fn new(
        nsid: u32,
        volume: VolumeId,
        volume_state: Arc<VolumeState>,
        read_only: bool,
        uuid: VolumeUuid,
    ) -> Namespace {
        let info = volume_state.volume().info();
        Namespace {
            nsid,
            volume,
            read_only: read_only || info.read_only,
            identity: NamespaceIdentity::of(uuid),
            block_shift: info.logical_block.trailing_zeros(),
            zeroes_deallocated: info.fast_zeroes,
            has_cache: info.write_cache,
            ana_group: 0,
            in_turns: volume_state.ownership().is_some(),
            volume_state,
        }
    }

    /// Replaces identifiers by configured ones.
    #[must_use]
    pub fn with_identity(self, given: &GivenIdentity) -> Namespace {
        Namespace { identity: self.identity.given(given), ..self }
    }

    pub(super) fn info(&self) -> VolumeInfo {
        self.volume_state.volume().info()
    }

    /// Whether this process serves the volume now.
    #[inline]
    pub(super) fn is_served(&self) -> bool {
        !self.in_turns || self.volume_state.serving() == ServingState::Active
    }
}

impl NamespaceWatch {
    fn begin(namespace: &Namespace, associations: &Arc<Associations>) -> Arc<NamespaceWatch> {
        let (nsid, volume) = (namespace.nsid, namespace.volume);
        let watch = Arc::new(NamespaceWatch { nsid, volume, associations: associations.clone() });
        let watcher: Weak<NamespaceWatch> = Arc::downgrade(&watch);
        namespace.volume_state.watch(watcher);
        watch
    }
}

impl Watcher for NamespaceWatch {
    fn on_change(&self, change: &Change<'_>) {
        let (nsid, all) = (self.nsid, &self.associations);
        match change {
            Change::Size => all.announce(|| QueueEvent::NamespaceChanged(nsid)),
            Change::Serving(_) => all.announce(|| QueueEvent::AnaChanged { port: None }),
            Change::Reservations { notices, aborts } => {
                for (who, notice) in *notices {
                    all.notify_host(who, || QueueEvent::Reservation { nsid, kind: notification(*notice) });
                    if *aborts && *notice == Notice::RegistrationsPreempted {
                        all.notify_io_queues(who, || QueueEvent::Preempted(self.volume));
                    }
                }
            }
        }
    }
}

/// The well-known discovery NQN.
///
/// # Panics
/// Never: the specification's name is valid.
#[must_use]
pub fn well_known_discovery_nqn() -> Nqn {
    Nqn::new(DISCOVERY_NQN).expect("the specification's own name is one")
}

/// Whether a subsystem of this daemon's with that NQN is a discovery subsystem, by its well-known
/// or its unique name.
#[must_use]
pub fn is_discovery_nqn(nqn: &str) -> bool {
    nqn == DISCOVERY_NQN || nqn.starts_with(UNIQUE_DISCOVERY)
}

/// How the unique NQN of a discovery subsystem begins.
const UNIQUE_DISCOVERY: &str = "nqn.2026-11.blockmux:discovery.";

/// The unique NQN of a machine's discovery subsystem.
#[must_use]
pub fn unique_discovery_nqn(machine: &str) -> Nqn {
    let id = HEXLOWER.encode(&unique(&format!("discovery\n{machine}")));
    Nqn::new(&format!("{UNIQUE_DISCOVERY}{id}")).expect("this is a name")
}

/// The default model number.
const MODEL: &str = "Blockmux";
/// Most namespaces of one subsystem, and the greatest identifier: the size of one identifier list.
pub const MAX_NAMESPACES: usize = 1024;
