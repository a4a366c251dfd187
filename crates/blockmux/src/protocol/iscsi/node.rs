//! From volumes and settings to targets that are served.

use super::config::{Acl, ConfiguredTarget};
use super::live::LiveTargets;
use super::{ISCSI, Iscsi, default_target, name};
use crate::protocol::frontend::{Service, Started, VolumeNames};
use crate::protocol::policy::{ListenerAddress, Policy};
use crate::protocol::units::Unit;
use blockmux_engine::iscsi;
use blockmux_engine::socket::Address;
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::iscsi::node::{IscsiAccess, IscsiNode, Portal, TargetNode};
use blockmux_proto::scsi::{self, AccessState, PortGroupStates, TargetPort};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

/// Serves to accepted connections: one for each address, in order.
pub(super) fn serve(own: &Iscsi, service: &Service<'_>) -> Started {
    let (exports, configured_targets) = (service.exports, &own.targets);
    let units = service.units.clone();
    let removable = configured_targets.iter().filter(|target| target.removable);
    units.set_removable(removable.flat_map(|target| target.luns.values().cloned()));
    let all: Vec<(String, Unit)> =
        exports.iter().filter_map(|(id, export)| Some((export.name.clone(), units.of(id)?))).collect();
    let portals = Portals::new(service, configured_targets);
    let targets = if configured_targets.is_empty() {
        let of_export = exports.iter().zip(&all);
        of_export.filter_map(|((_, export), (_, unit))| default(&export, unit, exports, &portals)).collect()
    } else {
        configured_targets.iter().map(|target| configured(target, &all, &portals)).collect()
    };
    let node = IscsiNode::new(targets);
    let node = Arc::new(match &own.discovery {
        Some(chap) => node.with_discovery_chap(chap.clone()),
        None => node,
    });
    let serve = portals.group_tags().map(|group_tag| iscsi::serve(&node, exports, group_tag)).collect();
    let has_own = configured_targets.is_empty();
    Started {
        serve,
        live: Some(Box::new(LiveTargets { exports: exports.clone(), node, units, portals, has_own })),
    }
}

/// The target that a volume is where none are configured; `None` if no listener may lead to it.
pub(super) fn default(
    export: &Export,
    (id, unit): &Unit,
    exports: &Exports,
    portals: &Portals,
) -> Option<TargetNode> {
    let own = Some(portals.of_volume(&export.name)).filter(|own| !own.is_empty())?;
    let called = VolumeNames::of(exports, *id).map_or_else(|| export.name.clone(), |named| named.target);
    let target = TargetNode::new(name(&default_target(&called)), own, Vec::new());
    let ports = portals.ports(&target);
    let view = scsi::ScsiTarget::new(target.name.as_str(), ports).with_unit(0, *id, unit.clone());
    let access = vec![IscsiAccess { initiator: None, chap: None, target: Arc::new(view) }];
    Some(TargetNode { alias: export.description.clone(), access, ..target })
}

fn configured(configured: &ConfiguredTarget, units: &[(String, Unit)], portals: &Portals) -> TargetNode {
    let target = TargetNode::new(configured.name.clone(), portals.of(configured), Vec::new());
    let (ports, states) = (portals.ports(&target), Arc::new(PortGroupStates::default()));
    for (group_tag, state) in portals.states(configured) {
        let name = target.port_name(group_tag);
        ports.iter().filter(|port| *port.name == *name).for_each(|port| states.set(port.group, state));
    }
    let access = configured.acl.iter().map(|Acl { initiator, chap, luns, .. }| {
        let empty = scsi::ScsiTarget::new(target.name.as_str(), ports.clone()).with_states(&states);
        let view = match luns {
            Some(luns) => empty.with_mask(luns.iter().copied().collect()),
            None => empty,
        };
        for (lun, volume) in &configured.luns {
            if let Some((_, (id, unit))) = units.iter().find(|(name, _)| name == volume) {
                view.add(*lun, *id, unit.clone());
            }
        }
        IscsiAccess { initiator: initiator.clone(), chap: chap.clone(), target: Arc::new(view) }
    });
    let access = access.collect();
    let (alias, redirect) = (configured.alias.clone(), configured.redirect.clone());
    TargetNode { alias, redirect, access, offer: configured.offer, ..target }
}

/// The listeners as portals. They are one portal group, so that a session may use any of them,
/// unless some lead to other targets than others, or less well.
pub(super) struct Portals {
    portals: Vec<(SocketAddr, Portal)>,
    policy: Policy,
    /// How many target ports have a number already.
    numbered: AtomicU16,
}

impl Portals {
    fn new(service: &Service<'_>, targets: &[ConfiguredTarget]) -> Portals {
        let policy = service.policy;
        let tcp: Vec<SocketAddr> = service.places.iter().filter_map(ListenerAddress::tcp).collect();
        let is_one_group = tcp
            .iter()
            .all(|tcp| targets.iter().all(|target| target.is_at(tcp) && target.access_states.is_none()));
        let is_one_group = is_one_group && !policy.has_lists(&ISCSI);
        let portal = |(group_tag, tcp): (u16, SocketAddr)| {
            let port = tcp.port();
            // A listener on all addresses is reached at the one that the initiator has found.
            let address = if tcp.ip().is_unspecified() { format!(":{port}") } else { tcp.to_string() };
            (tcp, Portal { address, group_tag: if is_one_group { 1 } else { group_tag } })
        };
        let portals = (1..).zip(tcp).map(portal).collect();
        Portals { portals, policy: policy.clone(), numbered: AtomicU16::new(0) }
    }

    /// Those that lead to the target that a volume is by itself.
    fn of_volume(&self, volume: &str) -> Vec<Portal> {
        let leads = |tcp: SocketAddr| {
            let place = ListenerAddress::Socket(Address::Tcp(tcp));
            self.policy.serves(&ISCSI, &place, volume)
        };
        self.portals.iter().filter(|(tcp, _)| leads(*tcp)).map(|(_, portal)| portal.clone()).collect()
    }

    fn of(&self, target: &ConfiguredTarget) -> Vec<Portal> {
        let own = self.portals.iter().filter(|(tcp, _)| target.is_at(tcp));
        own.map(|(_, portal)| portal.clone()).collect()
    }

    /// The group of each listener, in order.
    fn group_tags(&self) -> impl Iterator<Item = u16> {
        self.portals.iter().map(|(_, portal)| portal.group_tag)
    }

    /// The ports of a target: each portal group is one, and a target port group of its own. No two
    /// ports of this daemon have one number, for units may be shared by targets.
    fn ports(&self, target: &TargetNode) -> Vec<TargetPort> {
        let mut tags: Vec<u16> = target.portals.iter().map(|portal| portal.group_tag).collect();
        tags.dedup();
        let port = |group_tag: u16| {
            let number = self.numbered.fetch_add(1, Ordering::Relaxed).wrapping_add(1).max(1);
            TargetPort { relative_id: number, group: number, name: target.port_name(group_tag).into() }
        };
        tags.into_iter().map(port).collect()
    }

    /// How well each group leads to a target's units at first, where its config says so.
    fn states(&self, target: &ConfiguredTarget) -> impl Iterator<Item = (u16, AccessState)> {
        let states = target.access_states.iter();
        states.flat_map(|states| self.portals.iter().map(|(tcp, portal)| (portal.group_tag, states.of(tcp))))
    }

    /// The portal group that a listener is in, and whether it is alone there; `None` if it is no
    /// listener.
    pub(super) fn group_of(&self, listener: SocketAddr) -> Option<(u16, bool)> {
        let (_, own) = self.portals.iter().find(|(tcp, _)| *tcp == listener)?;
        let in_group = self.group_tags().filter(|tag| *tag == own.group_tag).count();
        Some((own.group_tag, in_group == 1))
    }

    /// The addresses of all, for people.
    pub(super) fn in_words(&self) -> String {
        let all: Vec<_> = self.portals.iter().map(|(tcp, _)| tcp.to_string()).collect();
        all.join(", ")
    }
}
