//! The running NVMe subsystems.

use super::config::{ConfiguredSubsystem, Treq};
use super::hosts::LiveHosts;
use super::namespaces::ConfiguredNamespace;
use super::{NvmeTcp, default_nqn, of_volume};
use crate::protocol::address::ListenerAddress;
use crate::protocol::address::matches_listener;
use crate::protocol::configured::HasVolumes;
use crate::protocol::fabric::{AcceptRdma, FabricPort};
use crate::protocol::frontend::{Frontend, LiveFrontend, Service, TargetsByVolume, VolumeNames};
use crate::protocol::policy::{LiveAccess, Policy, PublicAccess};
use blockmux_engine::protocol::nvme::target::{self, NvmeListener};
use blockmux_engine::serve::listener::Serve;
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_engine::sys::random_bytes;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::fabrics::controller::node::{FabricsPort, NvmeNode};
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::nvme::identity::NamespaceIdentity;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::{Namespace, Subsystem, is_discovery_nqn};
use blockmux_wire::nvme::log::AnaState;
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Creates namespaces and subsystems from volumes.
pub(super) struct NamespaceFactory {
    pub(super) exports: Exports,
    /// Identifier of this daemon.
    pub(super) node: String,
    pub(super) identities: ConfiguredIdentities,
}

/// What the identifiers of namespaces depend on.
pub(super) struct ConfiguredIdentities {
    /// No subsystem is configured: each volume has its own subsystem.
    pub(super) has_default_targets: bool,
    /// The configured namespaces, by subsystem and NSID.
    pub(super) namespaces: BTreeMap<(Nqn, u32), ConfiguredNamespace>,
    /// The first configured subsystem of each volume.
    pub(super) first_of: BTreeMap<String, Nqn>,
}

/// The running frontend of NVMe.
pub(super) struct LiveSubsystems {
    pub(super) node: Arc<NvmeNode>,
    pub(super) hosts: LiveHosts,
    pub(super) policy: Policy,
    /// Whether to use kernel TLS where possible.
    pub(super) ktls: bool,
    state: Mutex<NvmeState>,
}

/// The parts of the state that depend on the config.
struct NvmeState {
    volumes: NamespaceFactory,
    ports: Vec<FabricsPort>,
    /// The current config of each subsystem.
    configured: BTreeMap<Nqn, ConfiguredSubsystem>,
    /// Removed subsystems and hosts that may still have controllers.
    disconnecting: Vec<PendingDisconnect>,
    /// NQNs of subsystem and host, for hosts that must authenticate since the last config change.
    newly_authenticated: BTreeSet<(Nqn, Nqn)>,
}

/// Controllers that are disconnected if they do not end by themselves.
enum PendingDisconnect {
    AllHosts(Arc<Subsystem>),
    Host(Arc<Subsystem>, Nqn),
}

impl NvmeState {
    /// The id of a listener's port.
    fn port_at(&self, place: &ListenerAddress) -> u16 {
        self.ports.iter().find(|port| place.tcp() == Some(port.address)).map_or(0, |port| port.id)
    }
}

impl NamespaceFactory {
    /// Creates the namespace of a volume in a subsystem. A volume in two subsystems has two
    /// namespaces. A volume that was removed and added again gets its configured identifiers.
    fn namespace(&self, nqn: &Nqn, nsid: u32, volume: VolumeId) -> Option<Namespace> {
        let (export, volume_state) = self.exports.get(volume).zip(self.exports.volume_state(volume))?;
        let configured = self.identities.namespaces.get(&(nqn.clone(), nsid));
        let uuid = volume_state.uuid().unwrap_or_else(|| VolumeUuid::of_texts(&[&self.node, &export.name]));
        let names = VolumeNames::of(&self.exports, volume);
        let has_volume_uuid = names.is_some_and(|names| self.identities.has_volume_uuid(nqn, &names));
        let uuid = if has_volume_uuid { uuid } else { uuid.within(nqn.as_str()) };
        let namespace = Namespace::new(nsid, volume, volume_state, export.read_only, uuid);
        Some(match configured.filter(|configured| configured.volume == export.name) {
            Some(ConfiguredNamespace { identity, .. }) => namespace.with_identity(identity),
            None => namespace,
        })
    }

    /// Whether a subsystem would have ANA if it were made now: hosts ask for that only when they
    /// connect, and a volume that several daemons serve in turns needs it.
    fn lacks_ana(&self, subsystem: &Subsystem, wanted: &ConfiguredSubsystem) -> bool {
        let is_in_turns = |volume: &str| {
            let found = self.exports.find(volume).and_then(|(id, _)| self.exports.volume_state(id));
            found.is_some_and(|state| state.ownership().is_some())
        };
        !subsystem.has_ana() && wanted.volumes().any(is_in_turns)
    }

    /// Creates a configured subsystem with those of its volumes that exist.
    pub(super) fn subsystem(&self, configured: ConfiguredSubsystem, ports: &[FabricsPort]) -> Arc<Subsystem> {
        // TLS keys belong to the node.
        let at = configured.ports(ports);
        let ConfiguredSubsystem {
            nqn, namespaces, is_open, hosts, masks, ana_groups, secrets, networks, ..
        } = configured;
        let namespaces = namespaces.iter().filter_map(|(nsid, namespace)| {
            let (volume, _) = self.exports.find(&namespace.volume)?;
            self.namespace(&nqn, *nsid, volume)
        });
        let namespaces: Vec<Namespace> = namespaces.collect();
        let uuids: Vec<_> =
            namespaces.iter().map(|namespace| VolumeUuid::from_bytes(namespace.identity.uuid)).collect();
        let serial = (!uuids.is_empty()).then(|| VolumeUuid::subsystem_serial(nqn.as_str(), &uuids));
        let groups = ana_groups.iter().map(|group| group.at(ports)).collect();
        // Listeners may be added later.
        let port_ids: Vec<u16> = (1..=MAX_PORTS).collect();
        let mut subsystem = Subsystem::new(nqn, &self.node, namespaces, hosts).with_networks(networks);
        if let Ok([high, low]) = random_bytes() {
            subsystem = subsystem.with_first_controller(u16::from_be_bytes([high, low]));
        }
        if !is_open {
            subsystem = subsystem.closed();
        }
        if let Some(at) = at {
            subsystem = subsystem.with_ports(at);
        }
        if let Some(serial) = configured.serial_number.or(serial) {
            subsystem = subsystem.with_serial_number(serial);
        }
        if let Some(model) = configured.model_number {
            subsystem = subsystem.with_model_number(model);
        }
        Arc::new(subsystem.with_ana(groups, &port_ids).with_masks(masks).with_secrets(secrets))
    }
}

impl ConfiguredIdentities {
    /// Whether the volume's namespace in this subsystem has the volume's UUID: the subsystem is the
    /// volume's own; if that does not have it, the first one of the config, so that a further one
    /// behind it changes nothing. Namespaces of different subsystems must have different UUIDs.
    fn has_volume_uuid(&self, nqn: &Nqn, names: &VolumeNames) -> bool {
        let Some(own) = Nqn::new(&default_nqn(&names.target)) else { return false };
        if *nqn == own {
            return true;
        }
        let mut in_own = self.namespaces.range((own.clone(), 0)..=(own, u32::MAX));
        !self.has_default_targets
            && !in_own.any(|(_, namespace)| namespace.volume == names.export)
            && self.first_of.get(&names.export) == Some(nqn)
    }

    /// The subsystems with a namespace that `after` has, too, but with other identifiers.
    fn changed_in(&self, after: &ConfiguredIdentities, exports: &Exports) -> BTreeSet<String> {
        let kept = self.namespaces.iter().filter(|(place, own)| after.namespaces.get(place) == Some(own));
        let changed = kept.filter(|((nqn, _), namespace)| {
            let found = exports.find(&namespace.volume).and_then(|(id, _)| VolumeNames::of(exports, id));
            let is_given = namespace.identity.nguid.is_some() || namespace.identity.uuid.is_some();
            let is_changed =
                |names: VolumeNames| self.has_volume_uuid(nqn, &names) != after.has_volume_uuid(nqn, &names);
            !is_given && found.is_some_and(is_changed)
        });
        changed.map(|((nqn, _), _)| nqn.as_str().to_owned()).collect()
    }
}

impl LiveSubsystems {
    /// Creates a frontend without subsystems; [`LiveFrontend::reconfigure`] adds those of a config.
    pub(super) fn new(
        node: NvmeNode,
        hosts: LiveHosts,
        volumes: NamespaceFactory,
        policy: Policy,
        ktls: bool,
    ) -> Self {
        let (ports, configured, disconnecting) = (Vec::new(), BTreeMap::new(), Vec::new());
        let state =
            NvmeState { volumes, ports, configured, disconnecting, newly_authenticated: BTreeSet::new() };
        LiveSubsystems { node: Arc::new(node), hosts, policy, ktls, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, NvmeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a new config to a running subsystem; its controllers stay connected.
    fn update(&self, state: &mut NvmeState, subsystem: &Arc<Subsystem>, wanted: &ConfiguredSubsystem) {
        let NvmeState { volumes, ports, configured, disconnecting, newly_authenticated } = state;
        let nqn = &subsystem.nqn;
        let before = configured.get(nqn);
        for host in &wanted.hosts {
            let authenticates =
                |own: &ConfiguredSubsystem| own.secrets.contains_key(host) || own.tls_keys.contains_key(host);
            if authenticates(wanted) && before.is_some_and(|before| !authenticates(before)) {
                newly_authenticated.insert((nqn.clone(), host.clone()));
            }
        }
        let gone = self.hosts.reconfigure(&self.node, subsystem, (before, wanted));
        disconnecting.extend(gone.into_iter().map(|host| PendingDisconnect::Host(subsystem.clone(), host)));
        self.node.set_ports_of(subsystem, wanted.ports(ports));
        self.node.set_networks_of(subsystem, wanted.networks.clone());
        let namespaces = wanted.namespaces.iter().filter_map(|(nsid, namespace)| {
            let (volume, _) = volumes.exports.find(&namespace.volume)?;
            volumes.namespace(nqn, *nsid, volume)
        });
        let namespaces: BTreeMap<u32, Namespace> = namespaces.map(|one| (one.nsid, one)).collect();
        let there = subsystem.attached();
        let is_right = |(nsid, volume, identity): &(u32, VolumeId, NamespaceIdentity)| {
            namespaces.get(nsid).is_some_and(|own| own.volume == *volume && own.identity == *identity)
        };
        let right: BTreeSet<u32> = there.iter().filter(|one| is_right(one)).map(|(nsid, ..)| *nsid).collect();
        subsystem.detach(|namespace| !right.contains(&namespace.nsid));
        for (nsid, namespace) in namespaces.into_iter().filter(|(nsid, _)| !right.contains(nsid)) {
            // This cannot fail: NSID and group are validated, and the identity is unique.
            let _ = subsystem.attach(namespace, wanted.ana_group_of(nsid));
        }
        for group in wanted.ana_groups.iter().map(|group| group.at(ports)) {
            for port in ports.iter() {
                let state = group.states.get(&port.id).copied().unwrap_or(AnaState::OPTIMIZED);
                subsystem.set_ana_state(group.id, port.id, state);
            }
        }
    }
}

/// The ports of a service's listeners. Ports in `before` keep their identifiers.
fn ports_of(service: &Service<'_>, before: &[FabricsPort]) -> Vec<FabricsPort> {
    let known = |address: SocketAddr| before.iter().find(|port| port.address == address).map(|port| port.id);
    let tcp: Vec<SocketAddr> = service.places.iter().filter_map(ListenerAddress::tcp).collect();
    let taken: BTreeSet<u16> = tcp.iter().filter_map(|address| known(*address)).collect();
    let mut free = (1..=u16::MAX).filter(|id| !taken.contains(id));
    let port = |address| FabricsPort {
        id: known(address).or_else(|| free.next()).unwrap_or(u16::MAX),
        address,
        advertised: service.policy.advertised_for(address).unwrap_or(address),
    };
    tcp.into_iter().map(port).collect()
}

fn live_access(subsystem: &Subsystem) -> LiveAccess {
    let networks = subsystem.networks();
    let public = PublicAccess::all_if(subsystem.is_open() && networks.is_everyone());
    LiveAccess { target: subsystem.nqn.as_str().to_owned(), public, networks }
}

impl LiveFrontend for LiveSubsystems {
    fn serve(&self, place: &ListenerAddress) -> Serve {
        let state = self.state();
        target::serve(&self.node, state.port_at(place), &state.volumes.exports, self.ktls)
    }

    fn serve_rdma(&self, place: &ListenerAddress, port: FabricPort) -> Option<AcceptRdma> {
        let state = self.state();
        Some(port.serving(NvmeListener::new(&self.node, state.port_at(place), &state.volumes.exports)))
    }

    fn reconfigure(&self, desired: &dyn Frontend, service: &Service<'_>) {
        let Some(own) = (desired as &dyn Any).downcast_ref::<NvmeTcp>() else { return };
        let mut state = self.state();
        let state = &mut *state;
        state.ports = ports_of(service, &state.ports);
        state.newly_authenticated.clear();
        self.node.set_places(state.ports.clone(), own.referrals.clone());
        state.volumes.identities = own.identities();
        let wanted: Vec<ConfiguredSubsystem> = if own.subsystems.is_empty() {
            let all = VolumeNames::all(&state.volumes.exports);
            all.iter().filter_map(|named| of_volume(&self.policy, &state.ports, named)).collect()
        } else {
            own.subsystems.iter().cloned().map(|own| own.allowed_by(service.policy)).collect()
        };
        let has_keys = wanted.iter().any(|own| !own.tls_keys.is_empty() || !own.secrets.is_empty());
        self.hosts.set_treq(own.nvme_tcp_treq);
        if has_keys || own.nvme_tcp_treq == Treq::Required {
            self.node.set_secure_channel(own.nvme_tcp_treq.secure_channel(has_keys));
        }
        let by_name: BTreeMap<&Nqn, &ConfiguredSubsystem> =
            wanted.iter().map(|wanted| (&wanted.nqn, wanted)).collect();
        let served = self.node.subsystems();
        for subsystem in &served {
            let same = by_name.get(&subsystem.nqn).zip(state.configured.get(&subsystem.nqn));
            if !same.is_some_and(|(wanted, before)| wanted.has_same_identity(before)) {
                self.node.withdraw(&subsystem.nqn);
                self.hosts.remove_all(&self.node, subsystem);
                state.disconnecting.push(PendingDisconnect::AllHosts(subsystem.clone()));
            } else if same.is_some_and(|(wanted, _)| state.volumes.lacks_ana(subsystem, wanted)) {
                // At once, because the volume may have come only after sessions were ended. Hosts
                // connect again to the one that is made below.
                self.node.remove(&subsystem.nqn);
                self.hosts.remove_all(&self.node, subsystem);
            }
        }
        let served: BTreeMap<Nqn, Arc<Subsystem>> =
            self.node.subsystems().into_iter().map(|one| (one.nqn.clone(), one)).collect();
        state.configured.retain(|nqn, _| served.contains_key(nqn));
        let of_removed = |disconnecting: &PendingDisconnect| match disconnecting {
            PendingDisconnect::AllHosts(own) => Some(own.nqn.clone()),
            PendingDisconnect::Host(..) => None,
        };
        let left: BTreeSet<Nqn> = state.disconnecting.iter().filter_map(of_removed).collect();
        for wanted in wanted {
            let nqn = wanted.nqn.clone();
            match served.get(&nqn) {
                Some(subsystem) => self.update(state, subsystem, &wanted),
                // A removed subsystem with this name still has controllers.
                None if left.contains(&nqn) => continue,
                None => {
                    let subsystem = state.volumes.subsystem(wanted.clone(), &state.ports);
                    self.hosts.insert_all(&self.node, &subsystem, &wanted);
                    self.node.add(subsystem);
                }
            }
            state.configured.insert(nqn, wanted);
        }
        if !has_keys && own.nvme_tcp_treq == Treq::NotRequired && self.node.keyring().is_empty() {
            self.node.set_secure_channel(own.nvme_tcp_treq.secure_channel(false));
        }
    }

    fn targets_with_other_identities(&self, desired: &dyn Frontend) -> BTreeSet<String> {
        let Some(own) = (desired as &dyn Any).downcast_ref::<NvmeTcp>() else { return BTreeSet::new() };
        let state = self.state();
        let mut changed = state.volumes.identities.changed_in(&own.identities(), &state.volumes.exports);
        let is_remade = |wanted: &&ConfiguredSubsystem| {
            self.node.find(&wanted.nqn).is_some_and(|now| state.volumes.lacks_ana(&now, wanted))
        };
        let remade = own.subsystems.iter().filter(is_remade);
        changed.extend(remade.map(|wanted| wanted.nqn.as_str().to_owned()));
        changed
    }

    fn may_continue(&self, session: &SessionInfo) -> bool {
        let state = self.state();
        let login = &session.login;
        let (Some(nqn), Some(host)) = (Nqn::new(&login.target), Nqn::new(&login.initiator)) else {
            return true;
        };
        let is_of = |disconnecting: &PendingDisconnect| match disconnecting {
            PendingDisconnect::AllHosts(own) => own.nqn == nqn,
            PendingDisconnect::Host(own, gone) => own.nqn == nqn && *gone == host,
        };
        if state.disconnecting.iter().any(is_of)
            || state.newly_authenticated.contains(&(nqn.clone(), host.clone()))
        {
            return false;
        }
        // The discovery subsystem is not configured.
        let Some(configured) = state.configured.get(&nqn) else { return true };
        let is_listed = (configured.is_open || configured.hosts.contains(&host))
            && configured.networks.admits(session.peer_ip());
        let leads = session.listener.parse().is_ok_and(|at| {
            state.ports.iter().any(|port| matches_listener(&port.address, &at)) && configured.is_at(&at)
        });
        is_listed && (leads || session.listener.is_empty())
    }

    fn disconnect_remaining(&self) {
        for disconnecting in self.state().disconnecting.drain(..) {
            match disconnecting {
                PendingDisconnect::AllHosts(subsystem) => subsystem.close(),
                PendingDisconnect::Host(subsystem, host) if !subsystem.admits(&host) => {
                    subsystem.disconnect_host(&host)
                }
                PendingDisconnect::Host(..) => {}
            }
        }
    }

    fn remove(&self, volumes: &BTreeSet<VolumeId>) {
        let state = self.state();
        let own = volumes.iter().filter_map(|volume| VolumeNames::of(&state.volumes.exports, *volume));
        let own = own.filter_map(|named| Nqn::new(&default_nqn(&named.target)));
        for nqn in own.filter(|_| state.volumes.identities.has_default_targets) {
            self.node.remove(&nqn);
        }
        for subsystem in self.node.subsystems() {
            subsystem.detach(|namespace| volumes.contains(&namespace.volume));
        }
    }

    fn access_of(&self, target: &str) -> Option<LiveAccess> {
        let subsystem = self.node.find(&Nqn::new(target)?)?;
        (subsystem.nqn.as_str() == target && !is_discovery_nqn(target)).then(|| live_access(&subsystem))
    }

    fn targets_by_volume(&self) -> TargetsByVolume {
        let mut all = TargetsByVolume::new();
        for subsystem in self.node.subsystems() {
            let volumes: BTreeSet<_> = subsystem.attached().iter().map(|(_, volume, _)| *volume).collect();
            for volume in volumes {
                all.entry(volume).or_default().push(live_access(&subsystem));
            }
        }
        all
    }
}

/// Maximum number of NVMe listeners with ANA states.
pub(super) const MAX_PORTS: u16 = 64;

#[cfg(test)]
mod tests {
    use super::super::config::SubsystemEntry;
    use super::*;
    use crate::protocol::units::LogicalUnits;
    use crate::turns_storage::TestStorage;
    use blockmux_engine::core::cores::{Cores, CoresConfig};
    use blockmux_engine::serve::sessions::Sessions;
    use blockmux_proto::exports::Export;
    use blockmux_proto::volume_state::VolumeState;
    use blockmux_volume::MemVolume;

    #[test]
    fn a_subsystem_is_made_anew_with_ana_for_a_volume_that_is_served_in_turns() {
        let volume = Arc::new(MemVolume::new(1 << 20));
        let export = |name: &str| {
            let (name, description) = (name.to_owned(), String::new());
            Export { name, description, read_only: false, volume: volume.clone() }
        };
        let (_storage, owned) = TestStorage::standby();
        let plain = (export("plain"), VolumeState::new(volume.clone()));
        let exports = Exports::with_states(vec![plain]);
        let (units, policy, sessions) = (LogicalUnits::new(&exports), Policy::default(), Sessions::default());
        let cores = Cores::start(&CoresConfig::default()).unwrap();
        let service = Service {
            exports: &exports,
            units: &units,
            places: &[],
            policy: &policy,
            cores: &cores,
            sessions: &sessions,
        };
        let config = |namespaces: &str| {
            let entry = format!("nqn = 'nqn.a'\nnamespaces = {{ {namespaces} }}");
            let entry: SubsystemEntry = toml::from_str(&entry).unwrap();
            let subsystem = ConfiguredSubsystem::prepare(entry).unwrap();
            NvmeTcp { subsystems: [subsystem].into_iter().collect(), ..NvmeTcp::default() }
        };
        let (before, after) = (config("1 = 'plain'"), config("1 = 'plain', 2 = 'image'"));
        let (node, hosts) =
            (NvmeNode::new(Vec::new(), Vec::new(), "machine"), LiveHosts::new(Treq::default(), "machine"));
        let volumes = NamespaceFactory {
            exports: exports.clone(),
            node: "machine".to_owned(),
            identities: before.identities(),
        };
        let live = LiveSubsystems::new(node, hosts, volumes, policy.clone(), false);
        live.reconfigure(&before, &service);
        let served = || live.node.subsystems().remove(0);
        let first = served();
        // The volume comes between the two calls of one change of the config.
        live.reconfigure(&after, &service);
        assert!(Arc::ptr_eq(&served(), &first) && !first.has_ana());
        assert!(live.targets_with_other_identities(&after).is_empty());
        exports.add(export("image"), owned).unwrap();
        assert!(live.targets_with_other_identities(&after).contains("nqn.a"));
        live.reconfigure(&after, &service);
        let second = served();
        assert!(second.has_ana() && second.attached().len() == 2);
        live.reconfigure(&after, &service);
        assert!(Arc::ptr_eq(&served(), &second));
    }
}
