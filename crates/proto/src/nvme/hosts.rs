//! The hosts of a subsystem: which may connect, which namespaces they see, and how they
//! authenticate.
//!
//! All of that may change while the subsystem is served. It is read when a queue connects and when
//! a queue refreshes its view of the namespaces, never for a command.

use super::nqn::Nqn;
use crate::nvme::auth::HostSecrets;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The access of one host.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct HostAccess {
    /// Visible namespaces; `None` for all.
    pub namespaces: Option<BTreeSet<u32>>,
    /// Secrets for authentication, if the host has to authenticate.
    pub secrets: Option<Arc<HostSecrets>>,
}

/// Error: the subsystem is open to every host, and adding one to its list would exclude all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("every host may connect; list the permitted hosts in the config file, or write hosts = []")]
pub struct OpenToAll;

/// The hosts of a subsystem.
pub(super) struct SubsystemHosts(RwLock<HostList>);

#[derive(Default)]
pub(super) struct HostList {
    /// Whether hosts that are not listed may connect.
    pub(super) is_open: bool,
    hosts: BTreeMap<Nqn, HostAccess>,
}

impl HostAccess {
    /// Whether a namespace is visible.
    pub(super) fn shows(&self, nsid: u32) -> bool {
        self.namespaces.as_ref().is_none_or(|namespaces| namespaces.contains(&nsid))
    }
}

impl SubsystemHosts {
    /// Creates the list; an empty one is open to every host.
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

    /// Whether a mask limits the namespaces of the host.
    pub(super) fn has_mask(&self, host: &Nqn) -> bool {
        self.hosts.get(host).is_some_and(|access| access.namespaces.is_some())
    }

    pub(super) fn secrets_of(&self, host: &Nqn) -> Option<Arc<HostSecrets>> {
        self.hosts.get(host)?.secrets.clone()
    }

    /// Sets the access of a host; returns its previous access, if it was listed.
    pub(super) fn set(&mut self, host: &Nqn, access: HostAccess) -> Option<HostAccess> {
        self.hosts.insert(host.clone(), access)
    }

    /// The access of a host, which is added if it is not listed.
    pub(super) fn of(&mut self, host: Nqn) -> &mut HostAccess {
        self.hosts.entry(host).or_default()
    }

    /// The hosts that are listed.
    pub(super) fn listed(&self) -> Vec<Nqn> {
        self.hosts.keys().cloned().collect()
    }

    /// Removes a host; returns whether it was listed.
    pub(super) fn remove(&mut self, host: &Nqn) -> bool {
        self.hosts.remove(host).is_some()
    }
}
