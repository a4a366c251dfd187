//! From volumes and settings to targets that are served.

use super::config::{Acl, ConfiguredTarget};
use super::{PREFIX, default_target, name};
use crate::machine::machine_id;
use crate::protocol::Service;
use blockmux_engine::iscsi;
use blockmux_engine::listener::Serve;
use blockmux_engine::socket::Address;
use blockmux_proto::exports::VolumeId;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{Access, Node, Portal, TargetNode};
use blockmux_proto::scsi::{self, Identity, LogicalUnit, TargetPort};
use std::net::SocketAddr;
use std::sync::Arc;
use tracing::warn;

/// A volume as a logical unit; whatever target leads to it, it is the same one.
type Unit = (VolumeId, Arc<LogicalUnit>);

/// Serves to accepted connections: one for each address, in order.
pub(super) fn serve(service: &Service<'_>) -> Vec<Serve> {
    let Service { exports, addresses, settings } = service;
    let machine = machine_id();
    let units: Vec<(&str, Unit)> = exports
        .iter()
        .map(|(id, export)| {
            let mut targets = settings.iscsi.iter().filter(|target| target.removable);
            let identity = Identity {
                read_only: export.read_only,
                removable: targets.any(|target| target.luns.values().any(|volume| *volume == export.name)),
                ..Identity::of(&format!("{PREFIX}{}\n{machine}", export.name))
            };
            let served = exports.served(id).expect("it is one of the exports");
            (export.name.as_str(), (id, LogicalUnit::over(identity, served)))
        })
        .collect();
    let portals = Portals::new(addresses, &settings.iscsi);
    let targets = if settings.iscsi.is_empty() {
        let of_export = exports.iter().zip(&units).map(|((_, export), (_, unit))| {
            let target = TargetNode::new(name(&default_target(&export.name)), portals.all(), Vec::new());
            let view = view(&target.name, &target.portals, 0).with_unit(0, unit.0, unit.1.clone());
            let access = vec![Access { initiator: None, chap: None, target: Arc::new(view) }];
            TargetNode { alias: export.description.clone(), access, ..target }
        });
        of_export.collect()
    } else {
        let mut ports = 0;
        let of_entry = settings.iscsi.iter().map(|target| {
            let portals = portals.of(target);
            if portals.is_empty() {
                warn!(target = %target.name, "is at none of the listeners, and so out of reach: see its portals");
            }
            let first = ports;
            ports += groups(&portals).len();
            configured(target, &units, portals, first)
        });
        of_entry.collect()
    };
    let node = Node::new(targets);
    let node = Arc::new(match &settings.iscsi_discovery {
        Some(chap) => node.with_discovery_chap(chap.clone()),
        None => node,
    });
    portals.groups().map(|group_tag| iscsi::serve(&node, exports, group_tag)).collect()
}

fn configured(
    configured: &ConfiguredTarget,
    units: &[(&str, Unit)],
    portals: Vec<Portal>,
    ports_before: usize,
) -> TargetNode {
    let access = configured.acl.iter().map(|Acl { initiator, chap, luns }| {
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
