//! Builds the running iSCSI targets from volumes and settings, at the start and when the config
//! changes.

use super::access::{AccessStates, GroupTags};
use super::config::{Acl, ConfiguredTarget};
use super::live::LiveTargets;
use super::{ISCSI, Iscsi, default_target, name};
use crate::protocol::address::ListenerAddress;
use crate::protocol::configured::HasVolumes;
use crate::protocol::frontend::{LiveFrontend, Service, VolumeNames};
use crate::protocol::lun_map::WantedLuns;
use crate::protocol::policy::Policy;
use crate::protocol::units::{LogicalUnits, VolumeUnit};
use blockmux_engine::net::socket::Address;
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::login::operational::OperationalParameters;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{Chap, IscsiAccess, IscsiNode, Portal, Redirect, TargetNode, offer};
use blockmux_proto::names::networks::AllowedNetworks;
use blockmux_proto::scsi::{AccessState, PortGroupStates, ScsiTarget, TargetPort};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

/// Creates the running frontend.
pub(super) fn serve(own: &Iscsi, service: &Service<'_>) -> Box<dyn LiveFrontend> {
    let node = IscsiNode::new(Vec::new());
    let live = LiveTargets::new(service, node);
    live.reconfigure(own, service);
    Box::new(live)
}

/// A target as the config describes it.
pub(super) struct WantedTarget {
    pub(super) name: Name,
    alias: String,
    portals: Vec<Portal>,
    redirect: Option<Redirect>,
    offer: OperationalParameters,
    access: Vec<WantedAccess>,
    /// Networks from which initiators may log in.
    networks: AllowedNetworks,
    /// Configured access states of portal groups; others are active/optimized.
    states: Vec<(u16, AccessState)>,
}

/// Initiators that may log in, and the units that they see.
struct WantedAccess {
    initiator: Option<Name>,
    chap: Option<Chap>,
    luns: WantedLuns,
}

/// All targets that a config describes.
pub(super) fn wanted(
    own: &Iscsi,
    exports: &Exports,
    units: &LogicalUnits,
    portals: &Portals,
) -> Vec<WantedTarget> {
    if own.targets.is_empty() {
        let all = VolumeNames::all(exports);
        return all.iter().filter_map(|named| of_volume(named, exports, units, portals)).collect();
    }
    let all: BTreeMap<String, VolumeUnit> =
        exports.iter().filter_map(|(id, export)| Some((export.name.clone(), units.of(id)?))).collect();
    own.targets.iter().map(|target| configured(target, &all, portals)).collect()
}

/// A volume's own target, if no targets are configured; `None` if no listener exports the volume.
pub(super) fn of_volume(
    named: &VolumeNames,
    exports: &Exports,
    units: &LogicalUnits,
    portals: &Portals,
) -> Option<WantedTarget> {
    let (export, unit) = exports.get(named.volume).zip(units.of(named.volume))?;
    let own = Some(portals.of_volume(&named.export)).filter(|own| !own.is_empty())?;
    let luns = WantedLuns::one(unit);
    Some(WantedTarget {
        name: name(&default_target(&named.target)),
        alias: export.description.clone(),
        portals: own,
        redirect: None,
        offer: offer(),
        access: vec![WantedAccess { initiator: None, chap: None, luns }],
        networks: portals.policy.networks_of(&named.export),
        states: Vec::new(),
    })
}

fn configured(
    target: &ConfiguredTarget,
    all: &BTreeMap<String, VolumeUnit>,
    portals: &Portals,
) -> WantedTarget {
    let access = target.acl.iter().map(|Acl { initiator, chap, luns, .. }| WantedAccess {
        initiator: initiator.clone(),
        chap: chap.clone(),
        luns: luns.wanted(&target.luns, |volume| all.get(volume).cloned()),
    });
    WantedTarget {
        name: target.name.clone(),
        alias: target.alias.clone(),
        portals: portals.of(target),
        redirect: target.redirect.clone(),
        offer: target.offer,
        access: access.collect(),
        networks: target.volumes().fold(target.networks.clone(), |networks, volume| {
            networks.and(&portals.policy.networks_of(volume))
        }),
        states: portals.states(target).collect(),
    }
}

impl WantedTarget {
    /// Creates the running target. Equal parts of the previous target `before` are reused, so that
    /// logged-in initiators keep their units and ports.
    pub(super) fn make(self, before: Option<&TargetNode>, node: &IscsiNode, portals: &Portals) -> TargetNode {
        let WantedTarget { name, alias, portals: own, redirect, offer, access, networks, states } = self;
        let made = TargetNode::new(name, own, Vec::new());
        let first = before.and_then(|before| before.access.first()).map(|access| &access.target);
        let ports = portals.ports(&made, &first.map(|view| view.ports()).unwrap_or_default());
        let known = first.map_or_else(Arc::<PortGroupStates>::default, |view| view.states());
        let changed: Vec<_> = ports
            .iter()
            .map(|port| {
                let own = states.iter().find(|(group_tag, _)| made.port_name(*group_tag) == *port.name);
                (port.group, own.map_or(AccessState::ACTIVE_OPTIMIZED, |(_, state)| *state))
            })
            .filter(|(group, state)| known.get(*group) != *state)
            .collect();
        changed.iter().for_each(|(group, state)| known.set(*group, *state));
        let access = access.into_iter().map(|WantedAccess { initiator, chap, luns }| {
            let same = before.into_iter().flat_map(|before| &before.access);
            let same = same.into_iter().find(|access| access.initiator == initiator);
            let view = same.map_or_else(
                || Arc::new(ScsiTarget::new(made.name.prepared(), ports.clone()).with_states(&known)),
                |same| same.target.clone(),
            );
            if view.ports() != ports {
                view.set_ports(ports.clone());
            }
            luns.show_in(&view, |change| node.targets.notify(change));
            changed.iter().for_each(|(group, state)| view.set_access_state(*group, *state));
            IscsiAccess { initiator, chap, target: view }
        });
        let access = access.collect();
        TargetNode { alias, redirect, access, networks, offer, ..made }
    }
}

/// The portal group tag of a portal in a target.
fn tag_in(target: &ConfiguredTarget, listener: &SocketAddr, portal: &Portal) -> u16 {
    let own = target.group_tags.as_ref().and_then(|tags: &GroupTags| tags.of(listener));
    own.unwrap_or(portal.group_tag)
}

/// The listeners as portals. They form one portal group, so that a session can use all of them,
/// unless they differ in their targets or access states.
pub(super) struct Portals {
    /// Each listener with its portal. The tag is that in targets without `TargetPortalGroupTag`.
    portals: Vec<(SocketAddr, Portal)>,
    /// The number of the next new listener. It is not reused, because connections keep it.
    next_listener: u16,
    policy: Policy,
    /// The highest relative port identifier in use.
    numbered: Arc<AtomicU16>,
}

impl Portals {
    /// The portals of a service's listeners. A listener keeps its portal group from `before` as
    /// long as it is alone in the group, or all listeners are in one group.
    pub(super) fn new(
        service: &Service<'_>,
        targets: &[ConfiguredTarget],
        before: Option<&Portals>,
    ) -> Portals {
        let policy = service.policy;
        let tcp: Vec<SocketAddr> = service.places.iter().filter_map(ListenerAddress::tcp).collect();
        let is_one_group = tcp
            .iter()
            .all(|tcp| targets.iter().all(|target| target.is_at(tcp) && !target.has_states_by_listener()));
        let is_one_group = is_one_group && !policy.has_lists(&ISCSI);
        let known = |tcp: &SocketAddr| before.and_then(|before| before.portal_at(*tcp));
        let (mut groups, mut taken) = (BTreeMap::new(), BTreeSet::new());
        for tcp in &tcp {
            let tag = known(tcp).map(|portal| portal.group_tag).filter(|tag| taken.insert(*tag));
            groups.extend(tag.map(|tag| (*tcp, tag)));
        }
        let mut free = (1..).filter(|tag| !taken.contains(tag));
        let mut next_listener = before.map_or(0, |before| before.next_listener);
        let portal = |tcp: SocketAddr| {
            let listener = known(&tcp).map_or_else(
                || {
                    let number = next_listener;
                    next_listener = number.wrapping_add(1);
                    number
                },
                |portal| portal.listener,
            );
            let own = groups.get(&tcp).copied().or_else(|| free.next());
            let group_tag = own.filter(|_| !is_one_group).unwrap_or(1);
            let address = policy.advertised_for(tcp).unwrap_or(tcp);
            (tcp, Portal { address, listener, group_tag })
        };
        let portals: Vec<(SocketAddr, Portal)> = tcp.iter().copied().map(portal).collect();
        let numbered = before.map(|before| before.numbered.clone()).unwrap_or_default();
        Portals { portals, next_listener, policy: policy.clone(), numbered }
    }

    fn portal_at(&self, listener: SocketAddr) -> Option<&Portal> {
        self.portals.iter().find(|(tcp, _)| *tcp == listener).map(|(_, portal)| portal)
    }

    /// The number of a listener; `None` if the address is not a listener.
    pub(super) fn number_of(&self, listener: SocketAddr) -> Option<u16> {
        self.portal_at(listener).map(|portal| portal.listener)
    }

    /// The portals of a volume's own target.
    fn of_volume(&self, volume: &str) -> Vec<Portal> {
        let leads = |tcp: SocketAddr| {
            let place = ListenerAddress::Socket(Address::Tcp(tcp));
            self.policy.serves(&ISCSI, &place, volume)
        };
        self.portals.iter().filter(|(tcp, _)| leads(*tcp)).map(|(_, portal)| portal.clone()).collect()
    }

    fn of(&self, target: &ConfiguredTarget) -> Vec<Portal> {
        let own = self.portals.iter().filter(|(tcp, _)| target.is_at(tcp));
        own.map(|(tcp, portal)| Portal { group_tag: tag_in(target, tcp, portal), ..portal.clone() }).collect()
    }

    /// The SCSI target ports of a target: each portal group is one port and its own target port
    /// group. Ports in `before` keep their numbers. Numbers are unique in the daemon, because
    /// targets may share units.
    fn ports(&self, target: &TargetNode, before: &[TargetPort]) -> Vec<TargetPort> {
        let tags: BTreeSet<u16> = target.portals.iter().map(|portal| portal.group_tag).collect();
        let port = |group_tag: u16| {
            let name = target.port_name(group_tag);
            if let Some(known) = before.iter().find(|port| *port.name == *name) {
                return known.clone();
            }
            let number = self.numbered.fetch_add(1, Ordering::Relaxed).wrapping_add(1).max(1);
            TargetPort { relative_id: number, group: number, name: name.into() }
        };
        tags.into_iter().map(port).collect()
    }

    /// The configured access state of each portal group of a target.
    fn states(&self, target: &ConfiguredTarget) -> impl Iterator<Item = (u16, AccessState)> {
        let own = move || self.portals.iter().filter(|(tcp, _)| target.is_at(tcp));
        let of_portal = |states: &AccessStates, (tcp, portal): &(SocketAddr, Portal)| {
            (tag_in(target, tcp, portal), states.of(tcp))
        };
        let states = target.access_states.iter();
        states.flat_map(move |states| own().map(move |portal| of_portal(states, portal)))
    }
}
