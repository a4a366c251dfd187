//! Configuration of a target node: names, portals, and access to logical units.
//!
//! All cores share an [`IscsiNode`]. Targets and logical units can be added and removed while it is
//! in use; other changes require a new node.

use super::login::chap::{ChapAlgorithm, ChapCredentials};
use super::login::operational::{CRC32C, OperationalKey, OperationalParameters};
use super::name::Name;
use super::sessions::{LoginPermit, SessionTable};
use crate::names::networks::AllowedNetworks;
use crate::scsi::{ListedTarget, ScsiTarget, TargetList, TargetPort};
use core::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};

/// All targets that share a set of portals.
pub struct IscsiNode {
    /// The targets.
    pub targets: Arc<TargetList<TargetNode>>,
    discovery: RwLock<Option<Chap>>,
    pub(super) sessions: Arc<SessionTable>,
}

/// One target.
#[derive(Clone)]
pub struct TargetNode {
    /// The target's name, unique in its node.
    pub name: Name,
    /// Human-readable name; may be empty.
    pub alias: String,
    /// Portals of the target.
    pub portals: Vec<Portal>,
    /// Access rules; the first one that matches the initiator applies.
    pub access: Vec<IscsiAccess>,
    /// Networks from which initiators may log in and discover the target.
    pub networks: AllowedNetworks,
    /// Redirection of logins, if the target has moved.
    pub redirect: Option<Redirect>,
    /// Operational parameters that the target offers.
    pub offer: OperationalParameters,
}

/// A network portal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Portal {
    /// Address that initiators are told. An unspecified IP address stands for the one that an
    /// initiator connected to.
    pub address: SocketAddr,
    /// Number of the listener, by which its connections find the portal.
    pub listener: u16,
    /// Portal group tag in this target; the portals of a group can share a session.
    pub group_tag: u16,
}

/// An access rule: which initiators may log in, with which credentials, to which units.
#[derive(Clone)]
pub struct IscsiAccess {
    /// Name of the initiator; `None` matches every initiator.
    pub initiator: Option<Name>,
    /// Required credentials; `None` requires no authentication.
    pub chap: Option<Chap>,
    /// The logical units that these initiators can access.
    pub target: Arc<ScsiTarget>,
}

/// CHAP credentials and algorithms.
#[derive(Clone, Debug)]
pub struct Chap {
    /// Credentials of the initiator.
    pub initiator: ChapCredentials,
    /// Credentials of the target for mutual authentication; the secret differs from the
    /// initiator's.
    pub target: Option<ChapCredentials>,
    /// Accepted algorithms, in any order.
    pub algorithms: Vec<ChapAlgorithm>,
}

/// Redirection of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirect {
    /// Address in the form of [`Portal::address`].
    pub address: String,
    /// The target has moved permanently.
    pub permanent: bool,
}

impl IscsiNode {
    /// A node with these targets, and discovery without authentication.
    #[must_use]
    pub fn new(targets: Vec<TargetNode>) -> IscsiNode {
        let (discovery, sessions) = Default::default();
        IscsiNode { targets: TargetList::new(targets), discovery, sessions }
    }

    /// Changes the credentials that discovery requires, from the next login on.
    pub fn set_discovery_chap(&self, chap: Option<Chap>) {
        *self.discovery.write().unwrap_or_else(PoisonError::into_inner) = chap;
    }

    /// CHAP credentials for discovery, if required.
    #[must_use]
    pub fn discovery_chap(&self) -> Option<Chap> {
        self.discovery.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The target with this name that has a portal at this listener, and the portal group tag.
    #[must_use]
    pub fn find(&self, name: &Name, listener: u16) -> Option<(Arc<TargetNode>, u16)> {
        let target = self.targets.find(name)?;
        let group_tag = target.group_at(listener)?;
        Some((target, group_tag))
    }

    /// Permission for one more login; `None` if too many are in progress.
    #[must_use]
    pub fn begin_login(&self) -> Option<LoginPermit> {
        self.sessions.begin_login()
    }
}

impl ListedTarget for TargetNode {
    type Name = Name;

    fn name(&self) -> &Name {
        &self.name
    }

    fn networks(&self) -> &AllowedNetworks {
        &self.networks
    }

    fn views(&self) -> impl Iterator<Item = (&Arc<ScsiTarget>, bool)> {
        self.access.iter().map(|access| (&access.target, access.initiator.is_none() && access.chap.is_none()))
    }
}

impl TargetNode {
    /// A target with the parameters of [`offer`].
    #[must_use]
    pub fn new(name: Name, portals: Vec<Portal>, access: Vec<IscsiAccess>) -> TargetNode {
        let networks = AllowedNetworks::default();
        TargetNode { name, alias: String::new(), portals, access, networks, redirect: None, offer: offer() }
    }

    /// The access rule of an initiator; `None` if it may not log in.
    #[must_use]
    pub fn access_of(&self, initiator: &Name) -> Option<&IscsiAccess> {
        self.access.iter().find(|access| access.initiator.as_ref().is_none_or(|name| name == initiator))
    }

    /// The tag of the portal group that the portal at this listener is in.
    #[must_use]
    pub fn group_at(&self, listener: u16) -> Option<u16> {
        self.portals.iter().find(|portal| portal.listener == listener).map(|portal| portal.group_tag)
    }

    /// The SCSI port name of a portal group (RFC 7143 §4.4), which ends with the group's tag.
    #[must_use]
    pub fn port_name(&self, group_tag: u16) -> String {
        format!("{},t,0x{group_tag:04x}", self.name.prepared())
    }

    /// The SCSI port of a portal group.
    #[must_use]
    pub fn port(&self, access: &IscsiAccess, group_tag: u16) -> TargetPort {
        let name = self.port_name(group_tag);
        let known = access.target.ports().into_iter().find(|port| *port.name == *name);
        known.unwrap_or_else(|| TargetPort { relative_id: group_tag, group: group_tag, name: name.into() })
    }
}

/// Default parameters of a target: unsolicited data, long bursts, digests if the initiator requests
/// them.
#[must_use]
pub fn offer() -> OperationalParameters {
    OperationalParameters::standard()
        .with(OperationalKey::HeaderDigest, CRC32C)
        .with(OperationalKey::DataDigest, CRC32C)
        .with(OperationalKey::InitialR2T, 0)
        .with(OperationalKey::MaxRecvDataSegmentLength, 256 << 10)
        .with(OperationalKey::MaxBurstLength, 1 << 20)
        .with(OperationalKey::FirstBurstLength, 256 << 10)
        // Session reinstatement: a new login of the same initiator port ends its old session.
        .with(OperationalKey::DefaultTime2Wait, 0)
        .with(OperationalKey::DefaultTime2Retain, 20)
        .with(OperationalKey::MaxOutstandingR2T, 8)
        .with(OperationalKey::ErrorRecoveryLevel, 2)
        .with(OperationalKey::MaxConnections, 8)
        .with(OperationalKey::iSCSIProtocolLevel, 2)
}
