//! Subsystems: namespaces, and who may use them.

use super::ana::{Ana, AnaGroup};
use super::association::Associations;
use super::letters::Letter;
use super::nqn::Nqn;
use super::reservation::notification;
use super::traffic::Traffic;
use crate::exports::VolumeId;
use crate::nvmeof::auth::HostSecrets;
use crate::served::{Change, Gate, Notice, Registrant, Served, Watcher};
use blockmux_volume::VolumeInfo;
use blockmux_wire::nvme::log::AnaState;
use blockmux_wire::nvmeof::fabrics::DISCOVERY_NQN;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// Namespaces under a name, with the controllers that hosts have of it. Shared by all cores.
pub struct Subsystem {
    /// Unique in its node.
    pub nqn: Nqn,
    /// What Identify tells: 20 characters, the same after each restart.
    pub(super) serial: String,
    pub(super) namespaces: Vec<Namespace>,
    /// Who may connect; nobody listed: everybody.
    hosts: Vec<Nqn>,
    /// Who has to prove that it is who it says, by name.
    secrets: BTreeMap<Nqn, Arc<HostSecrets>>,
    pub(crate) associations: Arc<Associations>,
    pub(super) is_discovery: bool,
    pub(crate) traffic: Traffic,
    pub(super) ana: Ana,
    /// Hear of what happens to the namespaces, as long as the subsystem is served.
    _watches: Vec<Arc<NamespaceWatch>>,
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
    pub served: Arc<Served>,
    /// Refuse writes whatever the volume says.
    pub read_only: bool,
    /// Its globally unique identifier.
    pub nguid: [u8; 16],
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
    /// A subsystem that everybody may use if `hosts` is empty, and else who is listed. `machine` tells this machine
    /// from others, whose subsystems must not look like this one.
    ///
    /// Namespaces beyond the first 1,024, or with an identifier that another has, are left out.
    #[must_use]
    pub fn new(nqn: Nqn, machine: &str, namespaces: Vec<Namespace>, hosts: Vec<Nqn>) -> Subsystem {
        let mut namespaces = namespaces;
        namespaces.sort_by_key(|namespace| namespace.nsid);
        namespaces.dedup_by_key(|namespace| namespace.nsid);
        namespaces.truncate(MAX_NAMESPACES);
        let serial =
            unique(&format!("{nqn}\n{machine}")).iter().take(10).map(|b| format!("{b:02x}")).collect();
        let associations = Arc::<Associations>::default();
        let watches =
            namespaces.iter().map(|namespace| NamespaceWatch::begin(namespace, &associations)).collect();
        Subsystem {
            nqn,
            serial,
            namespaces,
            hosts,
            secrets: BTreeMap::new(),
            associations,
            is_discovery: false,
            traffic: Traffic::default(),
            ana: Ana::default(),
            _watches: watches,
        }
    }

    /// The same whose namespaces are reached through ports as these groups say; `ports` are all that lead here.
    #[must_use]
    pub fn with_ana(mut self, groups: Vec<AnaGroup>, ports: &[u16]) -> Subsystem {
        self.ana = Ana::new(groups, ports, &mut self.namespaces);
        self
    }

    /// The same where these hosts have to prove who they are.
    #[must_use]
    pub fn with_secrets(mut self, secrets: BTreeMap<Nqn, HostSecrets>) -> Subsystem {
        self.secrets = secrets.into_iter().map(|(host, secrets)| (host, Arc::new(secrets))).collect();
        self
    }

    /// What that host has to prove, if it has to.
    pub(crate) fn secrets_of(&self, host: &Nqn) -> Option<&Arc<HostSecrets>> {
        self.secrets.get(host)
    }

    /// Sets how a group of namespaces is reached through a port; hosts that came by it are told.
    pub fn set_ana_state(&self, group: u32, port: u16, state: AnaState) {
        if self.ana.set(group, port, state) {
            self.associations.announce(|| Letter::AnaChanged { port });
        }
    }

    /// The way to the volumes for a new queue of host `who`.
    pub(crate) fn gate(&self, who: &Registrant) -> Gate {
        let volumes = self.namespaces.iter().map(|namespace| (namespace.volume, &namespace.served));
        Gate::new(volumes, Some(who))
    }

    /// The discovery subsystem of a node.
    pub(crate) fn discovery(machine: &str) -> Subsystem {
        let nqn = Nqn::new(DISCOVERY_NQN).expect("the well-known name is a name");
        Subsystem { is_discovery: true, ..Subsystem::new(nqn, machine, Vec::new(), Vec::new()) }
    }

    /// Whether that host may connect.
    #[must_use]
    pub fn admits(&self, host: &Nqn) -> bool {
        self.hosts.is_empty() || self.hosts.contains(host)
    }

    /// The namespace of that identifier.
    #[inline]
    pub(super) fn namespace(&self, nsid: u32) -> Option<&Namespace> {
        // Mostly they are numbered from 1 on.
        let at = (nsid as usize).checked_sub(1)?;
        if let Some(namespace) = self.namespaces.get(at)
            && namespace.nsid == nsid
        {
            return Some(namespace);
        }
        self.namespaces.iter().find(|namespace| namespace.nsid == nsid)
    }
}

impl Namespace {
    /// A volume under that identifier; `name` and `machine` make its globally unique identifier, which is the same
    /// after each restart.
    #[must_use]
    pub fn new(
        nsid: u32,
        volume: VolumeId,
        served: Arc<Served>,
        read_only: bool,
        (name, machine): (&str, &str),
    ) -> Namespace {
        let info = served.volume().info();
        Namespace {
            nsid,
            volume,
            read_only: read_only || info.read_only,
            nguid: unique(&format!("{name}\n{machine}")),
            block_shift: info.logical_block.trailing_zeros(),
            zeroes_deallocated: info.fast_zeroes,
            has_cache: info.write_cache,
            ana_group: 0,
            served,
        }
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
            Change::Size => all.announce(|| Letter::NamespaceChanged(nsid)),
            Change::Reservations { notices, aborts } => {
                for (who, notice) in *notices {
                    let Some(host) = who.nvme_host() else { continue };
                    all.tell_host(&host, || Letter::Reservation { nsid, kind: notification(*notice) });
                    if *aborts && *notice == Notice::RegistrationsPreempted {
                        all.tell_queues(&host, || Letter::Preempted(self.volume));
                    }
                }
            }
        }
    }
}

/// Sixteen bytes that only this text has, for all that anybody will see.
fn unique(text: &str) -> [u8; 16] {
    let hash = Sha256::digest(text.as_bytes());
    let mut id = [0; 16];
    id.iter_mut().zip(hash).for_each(|(to, from)| *to = from);
    id
}

/// Namespaces of one subsystem: what one list of identifiers holds.
pub const MAX_NAMESPACES: usize = 1024;
