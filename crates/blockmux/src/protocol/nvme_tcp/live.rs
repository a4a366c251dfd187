//! Subsystems that are served, and namespaces that come and go.

use super::config::ConfiguredSubsystem;
use super::hosts::LiveHosts;
use super::namespaces::ConfiguredNamespace;
use super::{Order, default_nqn, of_volume};
use crate::protocol::frontend::{Live, TargetPlace, VolumeNames};
use crate::protocol::policy::{LiveAccess, Policy};
use blockmux_engine::sys::random_bytes;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::fabrics::controller::node::{FabricsPort, NvmeNode};
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::{Namespace, Subsystem};
use blockmux_proto::volume_uuid::VolumeUuid;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Makes namespaces of volumes.
pub(super) struct Volumes {
    pub(super) exports: Exports,
    /// What tells this daemon from others.
    pub(super) node: String,
    /// Each volume is a subsystem of its own.
    pub(super) has_own: bool,
    /// As the config file has them, by subsystem and number.
    pub(super) configured: BTreeMap<(Nqn, u32), ConfiguredNamespace>,
}

/// Everything that hosts find.
pub(super) struct LiveSubsystems {
    pub(super) node: Arc<NvmeNode>,
    pub(super) volumes: Volumes,
    pub(super) ports: Vec<FabricsPort>,
    pub(super) hosts: LiveHosts,
    pub(super) policy: Policy,
}

impl Volumes {
    /// A namespace is one subsystem's: a volume in two of them is two namespaces. One that comes
    /// back is called as it was configured.
    fn namespace(&self, nqn: &Nqn, nsid: u32, volume: VolumeId) -> Option<Namespace> {
        let (export, served) = self.exports.get(volume).zip(self.exports.served(volume))?;
        let configured = self.configured.get(&(nqn.clone(), nsid));
        let uuid = served.uuid().unwrap_or_else(|| VolumeUuid::of_texts(&[&self.node, &export.name]));
        let uuid = if self.is_home(nqn, volume) { uuid } else { uuid.within(nqn.as_str()) };
        let namespace = Namespace::new(nsid, volume, served, export.read_only, uuid);
        Some(match configured.filter(|configured| configured.volume == export.name) {
            Some(ConfiguredNamespace { identity, .. }) => namespace.with_identity(identity),
            None => namespace,
        })
    }

    /// Whether the volume's namespace in that subsystem has the volume's UUID: it is the volume's
    /// own subsystem, or the only one that the config file has the volume in. No two subsystems may
    /// have namespaces of one UUID.
    fn is_home(&self, nqn: &Nqn, volume: VolumeId) -> bool {
        let Some(named) = VolumeNames::of(&self.exports, volume) else { return false };
        if self.has_own {
            return nqn.as_str() == default_nqn(&named.target);
        }
        let all = self.configured.iter().filter(|(_, namespace)| namespace.volume == named.export);
        let homes: BTreeSet<&Nqn> = all.map(|((own, _), _)| own).collect();
        homes.len() == 1 && homes.contains(nqn)
    }

    /// A subsystem as it is configured, with those of its volumes that there are.
    pub(super) fn subsystem(&self, configured: ConfiguredSubsystem, ports: &[FabricsPort]) -> Arc<Subsystem> {
        // The keys of TLS are the node's.
        let at = configured.ports(ports);
        let ConfiguredSubsystem { nqn, namespaces, is_open, hosts, masks, ana_groups, secrets, .. } =
            configured;
        let namespaces = namespaces.iter().filter_map(|(nsid, namespace)| {
            let (volume, _) = self.exports.find(&namespace.volume)?;
            self.namespace(&nqn, *nsid, volume)
        });
        let namespaces: Vec<Namespace> = namespaces.collect();
        let uuids: Vec<_> =
            namespaces.iter().map(|namespace| VolumeUuid::from_bytes(namespace.identity.uuid)).collect();
        let serial = (!uuids.is_empty()).then(|| VolumeUuid::subsystem_serial(nqn.as_str(), &uuids));
        let groups = ana_groups.iter().map(|group| group.at(ports)).collect();
        let port_ids: Vec<u16> = ports.iter().map(|port| port.id).collect();
        let mut made = Subsystem::new(nqn, &self.node, namespaces, hosts);
        if let Ok([high, low]) = random_bytes() {
            made = made.with_first_controller(u16::from_be_bytes([high, low]));
        }
        if !is_open {
            made = made.closed();
        }
        if let Some(at) = at {
            made = made.with_ports(at);
        }
        if let Some(serial) = configured.serial_number.or(serial) {
            made = made.with_serial_number(serial);
        }
        if let Some(model) = configured.model_number {
            made = made.with_model_number(model);
        }
        Arc::new(made.with_ana(groups, &port_ids).with_masks(masks).with_secrets(secrets))
    }
}

impl LiveSubsystems {
    fn subsystem(&self, name: &str) -> Result<Arc<Subsystem>, String> {
        let found = self.node.subsystems().into_iter().find(|subsystem| subsystem.nqn.as_str() == name);
        found.ok_or_else(|| format!("there is no subsystem `{name}`"))
    }
}

impl Live for LiveSubsystems {
    fn add(&self, volume: VolumeId) {
        if let Some(named) = VolumeNames::of(&self.volumes.exports, volume).filter(|_| self.volumes.has_own) {
            let Some(configured) = of_volume(&self.policy, &self.ports, &named) else { return };
            self.node.add(self.volumes.subsystem(configured, &self.ports));
        }
    }

    fn remove(&self, volume: VolumeId) {
        let own = VolumeNames::of(&self.volumes.exports, volume).filter(|_| self.volumes.has_own);
        if let Some(nqn) = own.and_then(|named| Nqn::new(&default_nqn(&named.target))) {
            self.node.remove(&nqn);
        }
        for subsystem in self.node.subsystems() {
            subsystem.detach(|namespace| namespace.volume == volume);
        }
    }

    fn access_of(&self, target: &str) -> Option<LiveAccess> {
        let found = self.subsystem(target).ok()?;
        Some(LiveAccess { target: target.to_owned(), is_open: found.is_open() })
    }

    fn targets_of(&self, volume: VolumeId) -> Vec<LiveAccess> {
        let subsystems = self.node.subsystems().into_iter().filter(|subsystem| subsystem.has_volume(volume));
        let access = |subsystem: Arc<Subsystem>| LiveAccess {
            target: subsystem.nqn.as_str().to_owned(),
            is_open: subsystem.is_open(),
        };
        subsystems.map(access).collect()
    }

    fn attach(&self, target: &str, volume: VolumeId, place: &TargetPlace) -> Result<u32, String> {
        let subsystem = self.subsystem(target)?;
        let nsid = place.number.or_else(|| subsystem.free_nsid());
        let nsid = nsid.ok_or_else(|| format!("{target}: every number is taken"))?;
        let namespace = self.volumes.namespace(&subsystem.nqn, nsid, volume);
        let namespace = namespace.ok_or("there is no such volume any more")?;
        subsystem.attach(namespace, place.ana_group).map_err(|error| format!("{target}: {error}"))?;
        Ok(nsid)
    }

    fn detach(&self, target: &str, number: u32) -> Result<(), String> {
        let gone = self.subsystem(target)?.detach(|namespace| namespace.nsid == number);
        if gone.is_empty() { Err(format!("{target}: there is no namespace {number}")) } else { Ok(()) }
    }

    fn change(&self, target: &str, what: &Value) -> Result<Option<String>, String> {
        let subsystem = &*self.subsystem(target)?;
        match Order::deserialize(what).map_err(|error| error.to_string())? {
            Order::AddHost { host, .. } => self.hosts.add(&self.node, subsystem, &host)?,
            Order::RemoveHost { hostnqn, .. } => self.hosts.remove(&self.node, subsystem, &hostnqn)?,
            Order::ReadKeys { hostnqn, .. } => {
                let hosts = self.hosts.read_again(&self.node, subsystem, hostnqn.as_deref())?;
                let hosts = if hosts == 1 { "1 host".to_owned() } else { format!("{hosts} hosts") };
                return Ok(Some(format!("read the files of {hosts}")));
            }
            Order::Ana { group, state, at, .. } => {
                if !subsystem.has_ana_group(group) {
                    return Err(format!(
                        "{target}: there is no ana_group {group}; a config file can name it"
                    ));
                }
                let own: Vec<&FabricsPort> =
                    self.ports.iter().filter(|port| at.is_none_or(|at| at == port.address)).collect();
                if own.is_empty() {
                    let all: Vec<String> = self.ports.iter().map(|port| port.address.to_string()).collect();
                    return Err(format!("no such listener; there is {}", all.join(", ")));
                }
                own.iter().for_each(|port| subsystem.set_ana_state(group, port.id, state.word()));
            }
        }
        Ok(None)
    }
}
