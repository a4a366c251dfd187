//! What a target serves: its names, portals, and who may see which logical units.
//!
//! A [`IscsiNode`] is shared by all cores. Targets and logical units come and go while it is
//! served; whatever else changes is a new one.

use super::login::chap::{Algorithm, ChapCredentials};
use super::login::operational::{CRC32C, OperationalKey, OperationalParameters};
use super::name::Name;
use super::sessions::{LoginPermit, Sessions};
use crate::exports::VolumeId;
use crate::scsi::{self, LogicalUnit, TargetPort, UnitChange, UnitSource, UnitWatcher};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// All targets that are reached through the same portals.
pub struct IscsiNode {
    targets: RwLock<Vec<Arc<TargetNode>>>,
    discovery: RwLock<Option<Chap>>,
    pub(super) sessions: Arc<Sessions>,
    /// Who is told of units that come and go.
    watcher: OnceLock<UnitWatcher>,
}

/// One target.
#[derive(Clone)]
pub struct TargetNode {
    /// Unique in its node.
    pub name: Name,
    /// For people; may be empty.
    pub alias: String,
    /// Where it is reached.
    pub portals: Vec<Portal>,
    /// Who may log in; the first that fits counts.
    pub access: Vec<IscsiAccess>,
    /// Where it went, if it is not here.
    pub redirect: Option<Redirect>,
    /// What it wants of each session.
    pub offer: OperationalParameters,
}

/// An address that initiators connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Portal {
    /// `HOST:PORT`; an IPv6 address is in brackets. Without host, as `:3260`: wherever the
    /// initiator has connected to.
    pub address: String,
    /// Portals of one group can share a session.
    pub group_tag: u16,
}

/// Who may log in to a target, how they prove it, and what they see.
#[derive(Clone)]
pub struct IscsiAccess {
    /// `None`: every initiator.
    pub initiator: Option<Name>,
    /// `None`: no proof is asked for.
    pub chap: Option<Chap>,
    /// The logical units that these initiators see.
    pub target: Arc<scsi::ScsiTarget>,
}

/// What CHAP asks for.
#[derive(Clone, Debug)]
pub struct Chap {
    /// What the initiator has to know.
    pub initiator: ChapCredentials,
    /// What the target proves to an initiator that asks; of another secret than the initiator's.
    pub target: Option<ChapCredentials>,
    /// What is accepted, in any order.
    pub algorithms: Vec<Algorithm>,
}

/// Where a target went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirect {
    /// As a portal's.
    pub address: String,
    /// For good.
    pub permanent: bool,
}

impl IscsiNode {
    /// A node with these targets; discovery is free for all.
    #[must_use]
    pub fn new(targets: Vec<TargetNode>) -> IscsiNode {
        let targets = RwLock::new(targets.into_iter().map(Arc::new).collect());
        IscsiNode {
            targets,
            discovery: RwLock::default(),
            sessions: Arc::default(),
            watcher: OnceLock::new(),
        }
    }

    /// Serves one more target; answers whether its name was free.
    pub fn add(&self, target: TargetNode) -> bool {
        let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
        if targets.iter().any(|other| other.name == target.name) {
            return false;
        }
        targets.push(Arc::new(target));
        true
    }

    /// Serves a target no more: nobody finds it to log in. Who is logged in stays until its units
    /// are taken away, too.
    pub fn remove(&self, name: &Name) {
        let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
        targets.retain(|target| target.name != *name);
    }

    /// Serves a target in the place of the one that has its name, if there is one. Who is logged in
    /// keeps the units of the access that it was given.
    pub fn replace(&self, target: TargetNode) {
        let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
        match targets.iter_mut().find(|other| other.name == target.name) {
            Some(own) => *own = Arc::new(target),
            None => targets.push(Arc::new(target)),
        }
    }

    /// Changes what discovery asks for, from the next login on.
    pub fn set_discovery_chap(&self, chap: Option<Chap>) {
        *self.discovery.write().unwrap_or_else(PoisonError::into_inner) = chap;
    }

    /// Says that a unit has come or gone.
    pub fn tell(&self, change: UnitChange<'_>) {
        if let Some(watcher) = self.watcher.get() {
            watcher(change);
        }
    }

    /// Who discovers has to prove itself, too.
    #[must_use]
    pub fn with_discovery_chap(self, chap: Chap) -> IscsiNode {
        self.set_discovery_chap(Some(chap));
        self
    }

    /// Every target that there is now, in order.
    #[must_use]
    pub fn targets(&self) -> Vec<Arc<TargetNode>> {
        self.targets.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What discovery asks for.
    #[must_use]
    pub fn discovery_chap(&self) -> Option<Chap> {
        self.discovery.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The target of that name that is reached through that portal group.
    #[must_use]
    pub fn find(&self, name: &Name, group_tag: u16) -> Option<Arc<TargetNode>> {
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        targets.iter().find(|target| target.name == *name && target.is_in_group(group_tag)).cloned()
    }

    /// Leave for one more connection to log in; `None` if too many are at it.
    #[must_use]
    pub fn begin_login(&self) -> Option<LoginPermit> {
        self.sessions.begin_login()
    }
}

impl UnitSource for IscsiNode {
    fn watch_units(&self, watcher: UnitWatcher) {
        // Everybody who asks would do the same.
        let _ = self.watcher.set(watcher);
    }

    fn units(&self) -> Vec<(VolumeId, Arc<LogicalUnit>)> {
        let targets = self.targets();
        let units = targets.iter().flat_map(|target| &target.access).flat_map(|access| access.target.units());
        units.map(|(_, volume, unit)| (volume, unit)).collect()
    }
}

impl TargetNode {
    /// A target with the defaults of [`offer`].
    #[must_use]
    pub fn new(name: Name, portals: Vec<Portal>, access: Vec<IscsiAccess>) -> TargetNode {
        TargetNode { name, alias: String::new(), portals, access, redirect: None, offer: offer() }
    }

    /// What holds for that initiator; `None` if it may not log in.
    #[must_use]
    pub fn access_of(&self, initiator: &Name) -> Option<&IscsiAccess> {
        self.access.iter().find(|access| access.initiator.as_ref().is_none_or(|name| name == initiator))
    }

    /// Whether one of its portals is in that group.
    #[must_use]
    pub fn is_in_group(&self, group_tag: u16) -> bool {
        self.portals.iter().any(|portal| portal.group_tag == group_tag)
    }

    /// The name of the SCSI port that a portal group is (RFC 7143 §4.4): it ends in the group's
    /// tag.
    #[must_use]
    pub fn port_name(&self, group_tag: u16) -> String {
        format!("{},t,0x{group_tag:04x}", self.name)
    }

    /// The SCSI port that a portal group is.
    #[must_use]
    pub fn port(&self, access: &IscsiAccess, group_tag: u16) -> TargetPort {
        let name = self.port_name(group_tag);
        let known = access.target.ports().into_iter().find(|port| *port.name == *name);
        known.unwrap_or_else(|| TargetPort { relative_id: group_tag, group: group_tag, name: name.into() })
    }
}

/// What a target wants unless it is told otherwise: long bursts without waiting, digests if the
/// initiator wants them.
#[must_use]
pub fn offer() -> OperationalParameters {
    OperationalParameters::standard()
        .with(OperationalKey::HeaderDigest, CRC32C)
        .with(OperationalKey::DataDigest, CRC32C)
        .with(OperationalKey::InitialR2T, 0)
        .with(OperationalKey::MaxRecvDataSegmentLength, 256 << 10)
        .with(OperationalKey::MaxBurstLength, 1 << 20)
        .with(OperationalKey::FirstBurstLength, 256 << 10)
        // Who logs in again ends its old session, whenever that is.
        .with(OperationalKey::DefaultTime2Wait, 0)
        .with(OperationalKey::DefaultTime2Retain, 20)
        .with(OperationalKey::MaxOutstandingR2T, 8)
        .with(OperationalKey::ErrorRecoveryLevel, 2)
        .with(OperationalKey::MaxConnections, 8)
        .with(OperationalKey::iSCSIProtocolLevel, 2)
}
