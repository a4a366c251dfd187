//! Subsystems: namespaces under a name.

use super::ana::{AnaGroup, AnaGroups};
use super::association::Associations;
use super::event_queue::QueueEvent;
use super::hosts::{HostAccess, OpenToAll, SubsystemHosts};
use super::identity::{GivenIdentity, NamespaceIdentity, unique};
use super::nqn::Nqn;
use super::reservation::notification;
use super::traffic::SubsystemTraffic;
use crate::exports::VolumeId;
use crate::nvme::auth::HostSecrets;
use crate::volume_state::{Change, Notice, VolumeState, Watcher};
use crate::volume_uuid::VolumeUuid;
use blockmux_volume::VolumeInfo;
use blockmux_wire::nvme::log::AnaState;
use blockmux_wire::nvmeof::fabrics::DISCOVERY_NQN;
use data_encoding::HEXLOWER;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

/// Namespaces under a name, with the controllers that hosts have of it. Shared by all cores.
pub struct Subsystem {
    /// Unique in its node.
    pub nqn: Nqn,
    /// What Identify tells: 20 characters, the same after each restart.
    pub(super) serial: String,
    /// What Identify tells: up to 40 characters.
    pub(super) model: String,
    /// Ports that lead here; `None`: all.
    ports: Option<BTreeSet<u16>>,
    /// In order of their identifiers.
    namespaces: RwLock<Vec<AttachedNamespace>>,
    /// Grows with each change of the namespaces.
    generation: AtomicU64,
    hosts: SubsystemHosts,
    pub(crate) associations: Arc<Associations>,
    pub(super) is_discovery: bool,
    pub(crate) traffic: SubsystemTraffic,
    pub(super) ana: AnaGroups,
}

/// A namespace as long as it is attached.
struct AttachedNamespace {
    namespace: Namespace,
    /// Hears of what happens to it.
    _watch: Arc<NamespaceWatch>,
}

/// The namespaces that a host sees, as they are at one time. Queues look at one of their own, so
/// that no command takes a lock, and look again when [`Subsystem::is_current`] says so.
#[derive(Default)]
pub(crate) struct NamespaceView {
    /// In order of their identifiers.
    namespaces: Vec<Namespace>,
    /// The generation that it was made of.
    seen: u64,
}

/// Why a namespace cannot be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// Another one has the identifier.
    #[error("there is a namespace {0} already; take another number")]
    Taken(u32),
    /// The identifier is none.
    #[error("namespace {0} is not from 1 to {MAX_NAMESPACES}")]
    Number(u32),
    /// There is no such ANA group.
    #[error("there is no ana_group {0}")]
    NoGroup(u32),
    /// Another one has an identifier of its: hosts would take both for one.
    #[error(
        "namespace {0} has the same NGUID, EUI64 or UUID, as it has for the same volume; give one its own in a config file"
    )]
    Twin(u32),
}

/// Passes what happens to a volume on to the controllers.
struct NamespaceWatch {
    nsid: u32,
    volume: VolumeId,
    associations: Arc<Associations>,
}

/// A volume as a namespace.
#[derive(Clone)]
pub struct Namespace {
    /// From 1, unique in its subsystem.
    pub nsid: u32,
    /// Its place among the exports.
    pub volume: VolumeId,
    /// What all protocols share of the volume.
    pub served: Arc<VolumeState>,
    /// Refuse writes whatever the volume says.
    pub read_only: bool,
    /// What names it wherever it is.
    pub identity: NamespaceIdentity,
    /// log2 of a logical block's size in bytes, which does not change.
    pub(super) block_shift: u32,
    /// Whether deallocated blocks read as zeroes.
    pub(super) zeroes_deallocated: bool,
    /// Whether a read with FUA has to flush before.
    pub(super) has_cache: bool,
    /// ANAGRPID; 0 without groups.
    pub(super) ana_group: u32,
}

impl Subsystem {
    /// A subsystem that everybody may use if `hosts` is empty, and else who is listed. `machine`
    /// tells this machine from others, whose subsystems must not look like this one.
    ///
    /// Namespaces beyond the first 1,024, or with a number or identifier that another has, are left
    /// out.
    #[must_use]
    pub fn new(nqn: Nqn, machine: &str, namespaces: Vec<Namespace>, hosts: Vec<Nqn>) -> Subsystem {
        let serial = HEXLOWER.encode(&unique(&format!("{nqn}\n{machine}"))).chars().take(20).collect();
        let subsystem = Subsystem {
            nqn,
            serial,
            model: MODEL.to_owned(),
            ports: None,
            namespaces: RwLock::default(),
            generation: AtomicU64::new(0),
            hosts: SubsystemHosts::new(hosts),
            associations: Arc::default(),
            is_discovery: false,
            traffic: SubsystemTraffic::default(),
            ana: AnaGroups::default(),
        };
        for namespace in namespaces {
            // What cannot be attached is left out, as was said.
            let _ = subsystem.attach(namespace, None);
        }
        subsystem
    }

    /// Has namespaces reached through ports as these groups say; `ports` are all that lead here.
    #[must_use]
    pub fn with_ana(mut self, groups: Vec<AnaGroup>, ports: &[u16]) -> Subsystem {
        let mut attached = self.write();
        let ana = AnaGroups::new(groups, ports, attached.iter_mut().map(|attached| &mut attached.namespace));
        drop(attached);
        self.ana = ana;
        self
    }

    /// Limits the subsystem to these ports.
    #[must_use]
    pub fn with_ports(self, ports: BTreeSet<u16>) -> Subsystem {
        Subsystem { ports: Some(ports), ..self }
    }

    /// The ports that lead here, if not all do.
    pub(crate) fn ports(&self) -> Option<&BTreeSet<u16>> {
        self.ports.as_ref()
    }

    /// Whether that port leads here.
    pub(crate) fn is_at(&self, port: u16) -> bool {
        self.ports.as_ref().is_none_or(|ports| ports.contains(&port))
    }

    /// With this serial number, of up to 20 characters.
    #[must_use]
    pub fn with_serial_number(self, serial: String) -> Subsystem {
        Subsystem { serial, ..self }
    }

    /// A subsystem whose controllers are numbered from there on. Hosts take two controllers of one
    /// number for one, so that subsystems of one name in several processes begin at random.
    #[must_use]
    pub fn with_first_controller(self, cntlid: u16) -> Subsystem {
        self.associations.begin_at(cntlid);
        self
    }

    /// With this model number, of up to 40 characters.
    #[must_use]
    pub fn with_model_number(self, model: String) -> Subsystem {
        Subsystem { model, ..self }
    }

    /// Limits these hosts to these namespaces.
    #[must_use]
    pub fn with_masks(self, masks: BTreeMap<Nqn, BTreeSet<u32>>) -> Subsystem {
        let mut hosts = self.hosts.write();
        masks.into_iter().for_each(|(host, mask)| hosts.of(host).namespaces = Some(mask));
        drop(hosts);
        self
    }

    /// Closes the subsystem to every host that is not listed, even if none is.
    #[must_use]
    pub fn closed(self) -> Subsystem {
        self.hosts.write().is_open = false;
        self
    }

    /// Requires these hosts to prove who they are with these secrets.
    #[must_use]
    pub fn with_secrets(self, secrets: BTreeMap<Nqn, impl Into<Arc<HostSecrets>>>) -> Subsystem {
        let mut hosts = self.hosts.write();
        secrets.into_iter().for_each(|(host, own)| hosts.of(host).secrets = Some(own.into()));
        drop(hosts);
        self
    }

    /// Lets a host connect, or changes what holds for it: what it has to prove, from its next
    /// connection on, and the namespaces that it sees, of which it is told.
    ///
    /// # Errors
    /// If every host may connect.
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

    /// Lets a host connect no more, and ends its controllers; answers whether it was listed.
    pub(crate) fn remove_host(&self, host: &Nqn) -> bool {
        let mut hosts = self.hosts.write();
        let was_listed = !hosts.is_open && hosts.remove(host);
        drop(hosts);
        if was_listed {
            // Who connects at this moment looks once more whether it may when its controller is
            // among these.
            self.associations.cut(host);
        }
        was_listed
    }

    /// Whether every host may connect.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.hosts.read().is_open
    }

    /// What that host has to prove, if it has to.
    pub(crate) fn secrets_of(&self, host: &Nqn) -> Option<Arc<HostSecrets>> {
        self.hosts.read().secrets_of(host)
    }

    /// Whether there is such an ANA group.
    #[must_use]
    pub fn has_ana_group(&self, group: u32) -> bool {
        self.ana.has(group)
    }

    /// Sets how a group of namespaces is reached through a port; hosts that came by it are told.
    pub fn set_ana_state(&self, group: u32, port: u16, state: AnaState) {
        if self.ana.set(group, port, state) {
            self.associations.announce(|| QueueEvent::AnaChanged { port });
        }
    }

    /// Attaches a namespace, in that ANA group or else, where there are groups, in the last one.
    /// Hosts that see it are told.
    ///
    /// # Errors
    /// If its number is taken or none, there is no such group, or another has one of its
    /// identifiers.
    pub fn attach(&self, mut namespace: Namespace, group: Option<u32>) -> Result<(), AttachError> {
        let nsid = namespace.nsid;
        if !(1..=MAX_NAMESPACES as u32).contains(&nsid) {
            return Err(AttachError::Number(nsid));
        }
        namespace.ana_group = match group {
            Some(group) if !self.ana.has(group) => return Err(AttachError::NoGroup(group)),
            Some(group) => group,
            None => self.ana.count_and_last().1,
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

    /// Detaches the namespaces that these words are true of; hosts that saw them are told. Commands
    /// under way end, and those that come later find no such namespace. Answers their identifiers.
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

    /// Whether one of its namespaces is that volume.
    #[must_use]
    pub fn has_volume(&self, volume: VolumeId) -> bool {
        self.read().iter().any(|attached| attached.namespace.volume == volume)
    }

    /// The lowest identifier from 1 that no namespace has and no mask names: a mask promises its
    /// host the namespace that had it.
    #[must_use]
    pub fn free_nsid(&self) -> Option<u32> {
        let attached = self.read();
        let hosts = self.hosts.read();
        let is_free = |nsid: &u32| {
            attached.binary_search_by_key(nsid, |one| one.namespace.nsid).is_err() && !hosts.is_named(*nsid)
        };
        (1..=MAX_NAMESPACES as u32).find(is_free)
    }

    fn announce_change(&self, attached: RwLockWriteGuard<'_, Vec<AttachedNamespace>>, nsid: u32) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        drop(attached);
        self.associations.announce(|| QueueEvent::NamespaceChanged(nsid));
    }

    /// What a host sees.
    pub(crate) fn view(&self, host: &Nqn) -> NamespaceView {
        let attached = self.read();
        let seen = self.generation.load(Ordering::SeqCst);
        let hosts = self.hosts.read();
        let own = attached.iter().map(|attached| &attached.namespace);
        let namespaces = own.filter(|namespace| hosts.shows(host, namespace.nsid)).cloned().collect();
        NamespaceView { namespaces, seen }
    }

    /// Whether nothing has changed since that view was made.
    #[inline]
    pub(crate) fn is_current(&self, view: &NamespaceView) -> bool {
        self.generation.load(Ordering::SeqCst) == view.seen
    }

    /// Whether a host would see a namespace of that identifier.
    pub(super) fn shows(&self, host: &Nqn, nsid: u32) -> bool {
        self.hosts.read().shows(host, nsid)
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<AttachedNamespace>> {
        self.namespaces.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<AttachedNamespace>> {
        self.namespaces.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The discovery subsystem of a node, which Identify and the log call `nqn`. Hosts may connect
    /// to the well-known name whatever it is called.
    pub(crate) fn discovery(nqn: Nqn, machine: &str) -> Subsystem {
        Subsystem { is_discovery: true, ..Subsystem::new(nqn, machine, Vec::new(), Vec::new()) }
    }

    /// Whether that host may connect.
    #[must_use]
    pub fn admits(&self, host: &Nqn) -> bool {
        self.hosts.read().admits(host)
    }
}

impl NamespaceView {
    /// The namespace of that identifier.
    #[inline]
    pub(crate) fn namespace(&self, nsid: u32) -> Option<&Namespace> {
        // Mostly they are numbered from 1 on.
        let at = (nsid as usize).checked_sub(1)?;
        if let Some(namespace) = self.namespaces.get(at)
            && namespace.nsid == nsid
        {
            return Some(namespace);
        }
        self.namespaces.iter().find(|namespace| namespace.nsid == nsid)
    }

    /// All of them, in order of their identifiers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Namespace> {
        self.namespaces.iter()
    }
}

impl Namespace {
    /// A volume under that number, with the identifiers that follow from the UUID.
    #[must_use]
    pub fn new(
        nsid: u32,
        volume: VolumeId,
        served: Arc<VolumeState>,
        read_only: bool,
        uuid: VolumeUuid,
    ) -> Namespace {
        let info = served.volume().info();
        Namespace {
            nsid,
            volume,
            read_only: read_only || info.read_only,
            identity: NamespaceIdentity::of(uuid),
            block_shift: info.logical_block.trailing_zeros(),
            zeroes_deallocated: info.fast_zeroes,
            has_cache: info.write_cache,
            ana_group: 0,
            served,
        }
    }

    /// With the identifiers that it was given.
    #[must_use]
    pub fn with_identity(self, given: &GivenIdentity) -> Namespace {
        Namespace { identity: self.identity.given(given), ..self }
    }

    pub(super) fn info(&self) -> VolumeInfo {
        self.served.volume().info()
    }
}

impl NamespaceWatch {
    fn begin(namespace: &Namespace, associations: &Arc<Associations>) -> Arc<NamespaceWatch> {
        let (nsid, volume) = (namespace.nsid, namespace.volume);
        let watch = Arc::new(NamespaceWatch { nsid, volume, associations: associations.clone() });
        let watcher: Weak<NamespaceWatch> = Arc::downgrade(&watch);
        namespace.served.watch(watcher);
        watch
    }
}

impl Watcher for NamespaceWatch {
    fn on_change(&self, change: &Change<'_>) {
        let (nsid, all) = (self.nsid, &self.associations);
        match change {
            Change::Size => all.announce(|| QueueEvent::NamespaceChanged(nsid)),
            Change::Reservations { notices, aborts } => {
                for (who, notice) in *notices {
                    let Some(host) = who.nvme_host() else { continue };
                    all.notify_host(&host, || QueueEvent::Reservation { nsid, kind: notification(*notice) });
                    if *aborts && *notice == Notice::RegistrationsPreempted {
                        all.notify_io_queues(&host, || QueueEvent::Preempted(self.volume));
                    }
                }
            }
        }
    }
}

/// The well-known name of discovery subsystems.
///
/// # Panics
/// Never: the specification's own name is one.
#[must_use]
pub fn well_known_discovery_nqn() -> Nqn {
    Nqn::new(DISCOVERY_NQN).expect("the specification's own name is one")
}

/// The unique name of a machine's discovery subsystem.
#[must_use]
pub fn unique_discovery_nqn(machine: &str) -> Nqn {
    let id = HEXLOWER.encode(&unique(&format!("discovery\n{machine}")));
    Nqn::new(&format!("nqn.2026-11.blockmux:discovery.{id}")).expect("this is a name")
}

/// The model number of a subsystem that has no other.
const MODEL: &str = "Blockmux";
/// Namespaces of one subsystem, and the greatest identifier: what one list of identifiers holds.
pub const MAX_NAMESPACES: usize = 1024;
