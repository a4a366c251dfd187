//! Who may connect to a subsystem, what they see of it, and how they prove who they are.
//!
//! That may change while the subsystem is served. It is looked at when a queue connects and when a
//! queue looks which namespaces there are, never for a command.

use super::nqn::Nqn;
use crate::nvme::auth::HostSecrets;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// What holds for one host.
#[derive(Clone, Default)]
pub struct HostAccess {
    /// The namespaces that it sees; `None`: all.
    pub namespaces: Option<BTreeSet<u32>>,
    /// What it has to prove, if it has to.
    pub secrets: Option<Arc<HostSecrets>>,
}

/// A host cannot be named where everybody may connect: that would keep all others out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("every host may connect; name those that may in the config file, or none with hosts = []")]
pub struct OpenToAll;

/// The hosts of a subsystem.
pub(super) struct SubsystemHosts(RwLock<HostList>);

#[derive(Default)]
pub(super) struct HostList {
    /// Others may connect, too.
    pub(super) is_open: bool,
    hosts: BTreeMap<Nqn, HostAccess>,
}

impl HostAccess {
    /// Whether it sees a namespace of that identifier.
    pub(super) fn shows(&self, nsid: u32) -> bool {
        self.namespaces.as_ref().is_none_or(|namespaces| namespaces.contains(&nsid))
    }
}

impl SubsystemHosts {
    /// Those that are listed, or everybody if nobody is.
    pub(super) fn new(listed: Vec<Nqn>) -> SubsystemHosts {
        let is_open = listed.is_empty();
        let hosts = listed.into_iter().map(|host| (host, HostAccess::default())).collect();
        SubsystemHosts(RwLock::new(HostList { is_open, hosts }))
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, HostList> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, HostList> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostList {
    pub(super) fn admits(&self, host: &Nqn) -> bool {
        self.is_open || self.hosts.contains_key(host)
    }

    pub(super) fn shows(&self, host: &Nqn, nsid: u32) -> bool {
        self.hosts.get(host).is_none_or(|access| access.shows(nsid))
    }

    /// Whether a mask names that identifier.
    pub(super) fn is_named(&self, nsid: u32) -> bool {
        let mut masks = self.hosts.values().filter_map(|access| access.namespaces.as_ref());
        masks.any(|mask| mask.contains(&nsid))
    }

    pub(super) fn secrets_of(&self, host: &Nqn) -> Option<Arc<HostSecrets>> {
        self.hosts.get(host)?.secrets.clone()
    }

    /// What holds for a host from now on; what held before, if it was known.
    pub(super) fn set(&mut self, host: &Nqn, access: HostAccess) -> Option<HostAccess> {
        self.hosts.insert(host.clone(), access)
    }

    /// What is said of a host, who is known from now on.
    pub(super) fn of(&mut self, host: Nqn) -> &mut HostAccess {
        self.hosts.entry(host).or_default()
    }

    /// Whether that host was known.
    pub(super) fn remove(&mut self, host: &Nqn) -> bool {
        self.hosts.remove(host).is_some()
    }
}
