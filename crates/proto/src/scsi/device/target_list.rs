//! The targets of one protocol that are reached through the same listeners.

use super::target::{ScsiTarget, UnitChange, UnitSource, UnitWatcher};
use super::unit::LogicalUnit;
use crate::exports::VolumeId;
use crate::names::named_list::NamedList;
use crate::names::networks::AllowedNetworks;
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A target with access rules, each of which leads to a view of its logical units.
pub trait ListedTarget {
    /// What initiators name the target by.
    type Name: Ord + Clone + ToString + Send + Sync;

    /// Unique in its list.
    fn name(&self) -> &Self::Name;

    /// Networks from which initiators may log in.
    fn networks(&self) -> &AllowedNetworks;

    /// The view of each access rule, and whether every initiator gets it without authentication.
    fn views(&self) -> impl Iterator<Item = (&Arc<ScsiTarget>, bool)>;
}

/// Targets that all cores share. They can be added, replaced and removed while sessions use them;
/// sessions keep the view that they got at login.
pub struct TargetList<T: ListedTarget> {
    targets: RwLock<NamedTargets<T>>,
    watcher: OnceLock<UnitWatcher>,
}

/// Targets in the order of their addition.
pub type NamedTargets<T> = NamedList<<T as ListedTarget>::Name, Arc<T>>;

impl<T: ListedTarget> TargetList<T> {
    /// A list of these targets.
    #[must_use]
    pub fn new(targets: Vec<T>) -> Arc<TargetList<T>> {
        let named = targets.into_iter().map(|target| (target.name().clone(), Arc::new(target)));
        Arc::new(TargetList { targets: RwLock::new(named.collect()), watcher: OnceLock::new() })
    }

    /// Adds a target; returns whether its name was free.
    pub fn add(&self, target: T) -> bool {
        self.write().add(target.name().clone(), Arc::new(target))
    }

    /// Adds a target, or replaces the one with its name.
    pub fn replace(&self, target: T) {
        self.write().set(target.name().clone(), Arc::new(target));
    }

    /// Removes a target from discovery and login. Existing sessions stay until its units are
    /// removed.
    pub fn remove(&self, name: &T::Name) {
        drop(self.write().remove(name));
    }

    /// Removes the logical units of volumes. Their targets stay, so that units can be added to them
    /// again.
    pub fn remove_volumes(&self, volumes: &BTreeSet<VolumeId>) {
        for (view, _) in self.all().iter().flat_map(|target| target.views()) {
            view.remove(|_, other| volumes.contains(&other));
        }
        volumes.iter().for_each(|volume| self.notify(UnitChange::Removed(*volume)));
    }

    /// All current targets, in order.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<T>> {
        self.read().values().cloned().collect()
    }

    /// All current targets, by name.
    #[must_use]
    pub fn by_name(&self) -> NamedTargets<T> {
        self.read().clone()
    }

    /// The target with this name.
    #[must_use]
    pub fn find(&self, name: &T::Name) -> Option<Arc<T>> {
        self.read().get(name).cloned()
    }

    /// Notifies the watcher of an added or removed unit.
    pub fn notify(&self, change: UnitChange<'_>) {
        if let Some(watcher) = self.watcher.get() {
            watcher(change);
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, NamedTargets<T>> {
        self.targets.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, NamedTargets<T>> {
        self.targets.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ListedTarget + Send + Sync> UnitSource for TargetList<T> {
    fn watch_units(&self, watcher: UnitWatcher) {
        // All watchers of a list do the same, so the first one is enough.
        let _ = self.watcher.set(watcher);
    }

    fn units(&self) -> Vec<(VolumeId, Arc<LogicalUnit>)> {
        let targets = self.all();
        let units = targets.iter().flat_map(|target| target.views()).flat_map(|(view, _)| view.units());
        units.map(|(_, volume, unit)| (volume, unit)).collect()
    }
}
