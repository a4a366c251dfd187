//! From volumes and settings to targets that are served.

use super::config::{Acl, ConfiguredTarget};
use super::live::{LiveTargets, Unit, Units};
use super::{default_target, name};
use crate::protocol::{Service, Started};
use blockmux_engine::iscsi;
use blockmux_engine::socket::Address;
use blockmux_proto::exports::Export;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{Access, Node, Portal, TargetNode};
use blockmux_proto::scsi::{self, TargetPort};
use std::net::SocketAddr;
use std::sync::Arc;
use tracing::warn;

/// Serves to accepted connections: one for each address, in order.
pub(super) fn serve(service: &Service<'_>) -> Started {
    let Service { exports, addresses, settings } = service;
    let units = Units::new(exports, settings);
    let all: Vec<(String, Unit)> =
        exports.iter().filter_map(|(id, export)| Some((export.name.clone(), units.of(id)?))).collect();
    let portals = Portals::new(addresses, &settings.iscsi);
    let targets = if settings.iscsi.is_empty() {
        let of_export = exports.iter().zip(&all);
        of_export.map(|((_, export), (_, unit))| default(&export, unit, portals.all())).collect()
    } else {
        let mut ports = 0;
        let of_entry = settings.iscsi.iter().map(|target| {
            let portals = portals.of(target);
            if portals.is_empty() {
                warn!(target = %target.name, "is at none of the listeners, and so out of reach: see its portals");
            }
            let first = ports;
            ports += groups(&portals).len();
            configured(target, &all, portals, first)
        });
        of_entry.collect()
    };
    let node = Node::new(targets);
    let node = Arc::new(match &settings.iscsi_discovery {
        Some(chap) => node.with_discovery_chap(chap.clone()),
        None => node,
    });
    let serve = portals.groups().map(|group_tag| iscsi::serve(&node, exports, group_tag)).collect();
    let own_portals = settings.iscsi.is_empty().then(|| portals.all());
    Started { serve, live: Some(Box::new(LiveTargets { node, units, own_portals })) }
}

/// The target that a volume is where none are configured.
pub(super) fn default(export: &Export, (id, unit): &Unit, portals: Vec<Portal>) -> TargetNode {
    let target = TargetNode::new(name(&default_target(&export.name)), portals, Vec::new());
    let view = view(&target.name, &target.portals, 0).with_unit(0, *id, unit.clone());
    let access = vec![Access { initiator: None, chap: None, target: Arc::new(view) }];
    TargetNode { alias: export.description.clone(), access, ..target }
}

fn configured(
    configured: &ConfiguredTarget,
    units: &[(String, Unit)],
    portals: Vec<Portal>,
    ports_before: usize,
) -> TargetNode {
    let access = configured.acl.iter().map(|Acl { initiator, chap, luns, .. }| {
        let seen =
            configured.luns.iter().filter(|(lun, _)| luns.as_ref().is_none_or(|luns| luns.contains(lun)));
        let view =
            seen.fold(view(&configured.name, &portals, ports_before), |view, (lun, volume)| {
                match units.iter().find(|(name, _)| name == volume) {
                    Some((_, (id, unit))) => view.with_unit(*lun, *id, unit.clone()),
                    None => view,
                }
            });
        Access { initiator: initiator.clone(), chap: chap.clone(), target: Arc::new(view) }
    });
    let access = access.collect();
    let target = TargetNode::new(configured.name.clone(), portals, access);
    let (alias, redirect) = (configured.alias.clone(), configured.redirect.clone());
    TargetNode { alias, redirect, offer: configured.offer, ..target }
}

/// A target's logical units as some initiators see them, without any yet. Each portal group is a port; no two ports of
/// targets that share a unit have one number, so `ports_before` are of other targets.
fn view(name: &Name, portals: &[Portal], ports_before: usize) -> scsi::Target {
    let port = |(nth, group_tag): (usize, u16)| TargetPort {
        relative_id: u16::try_from(ports_before + nth + 1).unwrap_or(u16::MAX),
        group: group_tag,
        name: format!("{name},t,0x{group_tag:04x}").into(),
    };
    scsi::Target::new(name.as_str(), groups(portals).into_iter().enumerate().map(port).collect())
}

/// The portal groups of portals that are in order.
fn groups(portals: &[Portal]) -> Vec<u16> {
    let mut groups: Vec<u16> = portals.iter().map(|portal| portal.group_tag).collect();
    groups.dedup();
    groups
}

/// The listeners as portals. They are one portal group, so that a session may use any of them, unless some lead to
/// other targets than others.
struct Portals {
    portals: Vec<(SocketAddr, Portal)>,
}

impl Portals {
    fn new(addresses: &[Address], targets: &[ConfiguredTarget]) -> Portals {
        let tcp = addresses.iter().filter_map(|address| match address {
            Address::Tcp(tcp) => Some(*tcp),
            Address::Unix(_) => None,
        });
        let is_one_group = addresses.iter().all(|address| match address {
            Address::Tcp(tcp) => targets.iter().all(|target| target.is_at(tcp)),
            Address::Unix(_) => true,
        });
        let portal = |(group_tag, tcp): (u16, SocketAddr)| {
            let port = tcp.port();
            // A listener on all addresses is reached at the one that the initiator has found.
            let address = if tcp.ip().is_unspecified() { format!(":{port}") } else { tcp.to_string() };
            (tcp, Portal { address, group_tag: if is_one_group { 1 } else { group_tag } })
        };
        Portals { portals: (1..).zip(tcp).map(portal).collect() }
    }

    fn all(&self) -> Vec<Portal> {
        self.portals.iter().map(|(_, portal)| portal.clone()).collect()
    }

    fn of(&self, target: &ConfiguredTarget) -> Vec<Portal> {
        let own = self.portals.iter().filter(|(tcp, _)| target.is_at(tcp));
        own.map(|(_, portal)| portal.clone()).collect()
    }

    /// The group of each listener, in order.
    fn groups(&self) -> impl Iterator<Item = u16> {
        self.portals.iter().map(|(_, portal)| portal.group_tag)
    }
}
