//! Subsystems that are served, and namespaces that come and go.

use super::config::{ConfiguredSubsystem, Treq};
use super::hosts::LiveHosts;
use super::namespaces::ConfiguredNamespace;
use super::{NvmeTcp, Order, default_nqn, of_volume};
use crate::address::means;
use crate::protocol::frontend::{Frontend, Live, Service, TargetPlace, VolumeNames};
use crate::protocol::policy::{ListenerAddress, LiveAccess, Policy};
use blockmux_engine::listener::Serve;
use blockmux_engine::nvme_tcp;
use blockmux_engine::sessions::SessionInfo;
use blockmux_engine::sys::random_bytes;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::fabrics::controller::node::{FabricsPort, NvmeNode};
use blockmux_proto::nvme::identity::NamespaceIdentity;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::{Namespace, Subsystem};
use blockmux_proto::volume_uuid::VolumeUuid;
use blockmux_wire::nvme::log::AnaState;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    pub(super) hosts: LiveHosts,
    pub(super) policy: Policy,
    /// Whether the kernel makes the records of TLS where it can.
    pub(super) ktls: bool,
    state: Mutex<State>,
}

/// What follows the config.
struct State {
    volumes: Volumes,
    ports: Vec<FabricsPort>,
    /// What each subsystem was made of, or is as.
    configured: BTreeMap<Nqn, ConfiguredSubsystem>,
    /// What is not served any more, and may have controllers.
    leaving: Vec<Leaving>,
    /// Hosts that have to prove now who they are.
    asked: BTreeSet<(Nqn, Nqn)>,
}

/// Whose controllers may not stay.
enum Leaving {
    Everybody(Arc<Subsystem>),
    Host(Arc<Subsystem>, Nqn),
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
        // Ports may come later.
        let port_ids: Vec<u16> = (1..=MAX_PORTS).collect();
        let mut made = Subsystem::new(nqn, &self.node, namespaces, hosts).with_networks(networks);
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
    /// Nothing yet: what a config wants comes with [`Live::follow`].
    pub(super) fn new(
        node: NvmeNode,
        hosts: LiveHosts,
        volumes: Volumes,
        policy: Policy,
        ktls: bool,
    ) -> Self {
        let (ports, configured, leaving) = (Vec::new(), BTreeMap::new(), Vec::new());
        let state = State { volumes, ports, configured, leaving, asked: BTreeSet::new() };
        LiveSubsystems { node: Arc::new(node), hosts, policy, ktls, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn subsystem(&self, name: &str) -> Result<Arc<Subsystem>, String> {
        let found = self.node.subsystems().into_iter().find(|subsystem| subsystem.nqn.as_str() == name);
        found.ok_or_else(|| format!("there is no subsystem `{name}`"))
    }

    /// Has a subsystem that is served be as it is wanted. Its controllers stay.
    fn change_to(&self, state: &mut State, subsystem: &Arc<Subsystem>, wanted: &ConfiguredSubsystem) {
        let State { volumes, ports, configured, leaving, asked } = state;
        let nqn = &subsystem.nqn;
        let before = configured.get(nqn);
        for host in &wanted.hosts {
            let asks =
                |own: &ConfiguredSubsystem| own.secrets.contains_key(host) || own.tls_keys.contains_key(host);
            if asks(wanted) && before.is_some_and(|before| !asks(before)) {
                asked.insert((nqn.clone(), host.clone()));
            }
        }
        let gone = self.hosts.follow(&self.node, subsystem, (before, wanted));
        leaving.extend(gone.into_iter().map(|host| Leaving::Host(subsystem.clone(), host)));
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
            // Its number and its group were checked, and no other has its identity.
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

/// The ports of a service. One that was there before keeps its identifier.
fn ports_of(places: &[ListenerAddress], before: &[FabricsPort]) -> Vec<FabricsPort> {
    let known = |address: SocketAddr| before.iter().find(|port| port.address == address).map(|port| port.id);
    let tcp: Vec<SocketAddr> = places.iter().filter_map(ListenerAddress::tcp).collect();
    let taken: BTreeSet<u16> = tcp.iter().filter_map(|address| known(*address)).collect();
    let mut free = (1..=u16::MAX).filter(|id| !taken.contains(id));
    let port =
        |address| FabricsPort { id: known(address).or_else(|| free.next()).unwrap_or(u16::MAX), address };
    tcp.into_iter().map(port).collect()
}

fn live_access(subsystem: &Subsystem) -> LiveAccess {
    let networks = subsystem.networks();
    let is_open = subsystem.is_open() && networks.is_everyone();
    LiveAccess { target: subsystem.nqn.as_str().to_owned(), is_open, networks }
}

impl Live for LiveSubsystems {
    fn serve(&self, place: &ListenerAddress) -> Serve {
        let state = self.state();
        let port =
            state.ports.iter().find(|port| place.tcp() == Some(port.address)).map_or(0, |port| port.id);
        nvme_tcp::serve(&self.node, port, &state.volumes.exports, self.ktls)
    }

    fn follow(&self, desired: &dyn Frontend, service: &Service<'_>) {
        let Some(own) = desired.as_any().downcast_ref::<NvmeTcp>() else { return };
        let mut state = self.state();
        let state = &mut *state;
        state.ports = ports_of(service.places, &state.ports);
        state.asked.clear();
        self.node.set_places(state.ports.clone(), own.referrals.clone());
        state.volumes.has_own = own.subsystems.is_empty();
        state.volumes.configured = own.namespaces();
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
            if !same.is_some_and(|(wanted, before)| wanted.is_same_at_heart(before)) {
                self.node.withdraw(&subsystem.nqn);
                self.hosts.remove_all(&self.node, subsystem);
                state.leaving.push(Leaving::Everybody(subsystem.clone()));
            }
        }
        let served: BTreeMap<Nqn, Arc<Subsystem>> =
            self.node.subsystems().into_iter().map(|one| (one.nqn.clone(), one)).collect();
        state.configured.retain(|nqn, _| served.contains_key(nqn));
        for wanted in wanted {
            let nqn = wanted.nqn.clone();
            let is_left = |leaving: &Leaving| matches!(leaving, Leaving::Everybody(own) if own.nqn == nqn);
            match served.get(&nqn) {
                Some(subsystem) => self.change_to(state, subsystem, &wanted),
                // Not before the controllers of the one of that name are gone.
                None if state.leaving.iter().any(is_left) => continue,
                None => {
                    let made = state.volumes.subsystem(wanted.clone(), &state.ports);
                    self.hosts.insert_all(&self.node, &made, &wanted);
                    self.node.add(made);
                }
            }
            state.configured.insert(nqn, wanted);
        }
        if !has_keys && own.nvme_tcp_treq == Treq::NotRequired && self.node.keyring().is_empty() {
            self.node.set_secure_channel(own.nvme_tcp_treq.secure_channel(false));
        }
    }

    fn keeps(&self, session: &SessionInfo) -> bool {
        let state = self.state();
        let login = &session.login;
        let (Some(nqn), Some(host)) = (Nqn::new(&login.target), Nqn::new(&login.initiator)) else {
            return true;
        };
        let is_of = |leaving: &Leaving| match leaving {
            Leaving::Everybody(own) => own.nqn == nqn,
            Leaving::Host(own, gone) => own.nqn == nqn && *gone == host,
        };
        if state.leaving.iter().any(is_of) || state.asked.contains(&(nqn.clone(), host.clone())) {
            return false;
        }
        // Discovery is none of these.
        let Some(configured) = state.configured.get(&nqn) else { return true };
        let is_listed = (configured.is_open || configured.hosts.contains(&host))
            && configured.networks.admits(session.peer_ip());
        let leads = session.listener.parse().is_ok_and(|at| {
            state.ports.iter().any(|port| means(&port.address, &at)) && configured.is_at(&at)
        });
        is_listed && (leads || session.listener.is_empty())
    }

    fn settle(&self) {
        for leaving in self.state().leaving.drain(..) {
            match leaving {
                Leaving::Everybody(subsystem) => subsystem.close(),
                Leaving::Host(subsystem, host) if !subsystem.admits(&host) => subsystem.cut(&host),
                Leaving::Host(..) => {}
            }
        }
    }

    fn add(&self, volume: VolumeId) {
        let mut state = self.state();
        let state = &mut *state;
        let named = VolumeNames::of(&state.volumes.exports, volume).filter(|_| state.volumes.has_own);
        if let Some(named) = named {
            let Some(configured) = of_volume(&self.policy, &state.ports, &named) else { return };
            state.configured.insert(configured.nqn.clone(), configured.clone());
            self.node.add(state.volumes.subsystem(configured, &state.ports));
        }
    }

    fn remove(&self, volume: VolumeId) {
        let state = self.state();
        let own = VolumeNames::of(&state.volumes.exports, volume).filter(|_| state.volumes.has_own);
        if let Some(nqn) = own.and_then(|named| Nqn::new(&default_nqn(&named.target))) {
            self.node.remove(&nqn);
        }
        for subsystem in self.node.subsystems() {
            subsystem.detach(|namespace| namespace.volume == volume);
        }
    }

    fn access_of(&self, target: &str) -> Option<LiveAccess> {
        let found = self.subsystem(target).ok()?;
        Some(live_access(&found))
    }

    fn targets_of(&self, volume: VolumeId) -> Vec<LiveAccess> {
        let subsystems = self.node.subsystems().into_iter().filter(|subsystem| subsystem.has_volume(volume));
        subsystems.map(|subsystem| live_access(&subsystem)).collect()
    }

    fn attach(&self, target: &str, volume: VolumeId, place: &TargetPlace) -> Result<u32, String> {
        let subsystem = self.subsystem(target)?;
        let nsid = place.number.or_else(|| subsystem.free_nsid());
        let nsid = nsid.ok_or_else(|| format!("{target}: every number is taken"))?;
        let namespace = self.state().volumes.namespace(&subsystem.nqn, nsid, volume);
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
                let ports = self.state().ports.clone();
                let own: Vec<&FabricsPort> =
                    ports.iter().filter(|port| at.is_none_or(|at| at == port.address)).collect();
                if own.is_empty() {
                    let all: Vec<String> = ports.iter().map(|port| port.address.to_string()).collect();
                    return Err(format!("no such listener; there is {}", all.join(", ")));
                }
                own.iter().for_each(|port| subsystem.set_ana_state(group, port.id, state.word()));
            }
        }
        Ok(None)
    }
}

/// Ports that ANA states are kept of: as many as one daemon may listen at for NVMe.
pub(super) const MAX_PORTS: u16 = 64;
