//! Exports: the named volumes of a target.

use super::VolumeState;
use blockmux_volume::{Volume, VolumeInfo};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Identifies a volume of a target: its index in [`Exports`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeId(pub u32);

/// A volume with a name, from which each protocol derives its own names.
#[derive(Clone)]
pub struct Export {
    /// Unique among the exports; not empty, without NUL.
    pub name: String,
    /// Description for people; may be empty.
    pub description: String,
    /// Whether to refuse writes even if the volume is writable.
    pub read_only: bool,
    /// The exported volume.
    pub volume: Arc<dyn Volume>,
}

impl Export {
    /// The properties of the volume, which is also read-only if the export is.
    #[must_use]
    pub fn info(&self) -> VolumeInfo {
        let info = self.volume.info();
        VolumeInfo { read_only: info.read_only || self.read_only, ..info }
    }
}

/// All volumes of a target; clones share the list.
///
/// Volumes can be added and removed at run time. The id of a removed volume is never used again.
#[derive(Clone)]
pub struct Exports {
    shared: Arc<SharedExports>,
    /// Selects the exports that this handle finds; `None`: all.
    selection: Option<Arc<dyn ExportSelection>>,
}

/// Selects exports, as those for one client.
pub trait ExportSelection: Send + Sync {
    /// The access to the export with this name.
    fn access(&self, name: &str) -> ExportAccess;

    /// Why the export with this name is hidden, if that is known: for the log, not for clients.
    fn why_hidden(&self, _name: &str) -> Option<String> {
        None
    }
}

impl<F: Fn(&str) -> ExportAccess + Send + Sync> ExportSelection for F {
    fn access(&self, name: &str) -> ExportAccess {
        self(name)
    }
}

/// Access of clients to an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportAccess {
    /// It is listed and can be used.
    Offered,
    /// It is not listed, and its use is refused for the client's address.
    Refused,
    /// It does not exist for the client.
    Hidden,
}

struct SharedExports {
    list: RwLock<ExportTable>,
    /// Number of removed volumes.
    changes: AtomicU64,
}

#[derive(Default)]
struct ExportTable {
    /// The volumes by id; `None` for removed ones.
    entries: Vec<Option<ExportEntry>>,
    /// The ids by name.
    ids: BTreeMap<String, VolumeId>,
}

#[derive(Clone)]
struct ExportEntry {
    export: Arc<Export>,
    volume_state: Arc<VolumeState>,
}

/// A volume that was removed from the list.
pub struct Removed {
    /// Its id, which is not used again.
    pub volume: VolumeId,
    /// The removed export.
    pub export: Arc<Export>,
    /// Its shared volume state.
    pub volume_state: Arc<VolumeState>,
}

impl Exports {
    /// A list in the order given; the first is the default where a protocol has one.
    #[must_use]
    pub fn new(exports: Vec<Export>) -> Exports {
        let volume_state = exports.into_iter().map(|export| {
            let volume_state = VolumeState::new(export.volume.clone());
            (export, volume_state)
        });
        Exports::with_states(volume_state.collect())
    }

    /// Exports of volumes with an existing shared state.
    #[must_use]
    pub fn with_states(exports: Vec<(Export, Arc<VolumeState>)>) -> Exports {
        let mut list = ExportTable::default();
        for (export, volume_state) in exports {
            list.push(export, volume_state);
        }
        let list = RwLock::new(list);
        Exports { shared: Arc::new(SharedExports { list, changes: AtomicU64::new(0) }), selection: None }
    }

    /// Another handle to this list, which finds only exports to which `selection` currently gives
    /// [`ExportAccess::Offered`]. Ids are valid with every handle.
    #[must_use]
    pub fn offering(&self, selection: impl ExportSelection + 'static) -> Exports {
        Exports { shared: self.shared.clone(), selection: Some(Arc::new(selection)) }
    }

    /// Another handle to this list, which finds all exports.
    #[must_use]
    pub fn all(&self) -> Exports {
        Exports { shared: self.shared.clone(), selection: None }
    }

    /// Why the export with this name is hidden; `None` if it is not, or there is none.
    #[must_use]
    pub fn why_hidden(&self, name: &str) -> Option<String> {
        let selection = self.selection.as_ref().filter(|_| self.access(name) == ExportAccess::Hidden)?;
        self.has(name).then(|| selection.why_hidden(name))?
    }

    /// Whether the export with this name exists and is refused for the client's address. The empty
    /// name stands for the first export.
    #[must_use]
    pub fn is_refused(&self, name: &str) -> bool {
        if name.is_empty() {
            return self
                .first()
                .is_some_and(|(_, export)| self.access(&export.name) == ExportAccess::Refused);
        }
        self.access(name) == ExportAccess::Refused && self.has(name)
    }

    fn access(&self, name: &str) -> ExportAccess {
        self.selection.as_ref().map_or(ExportAccess::Offered, |selection| selection.access(name))
    }

    /// Whether there is an export with this name, for anybody.
    fn has(&self, name: &str) -> bool {
        self.read().ids.contains_key(name)
    }

    fn read(&self) -> RwLockReadGuard<'_, ExportTable> {
        self.shared.list.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, ExportTable> {
        self.shared.list.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first export that is not hidden.
    fn first(&self) -> Option<(VolumeId, Arc<Export>)> {
        self.entries().find(|(_, export)| self.access(&export.name) != ExportAccess::Hidden)
    }

    /// Adds a volume; `None` if the name is in use or the list is full ([`MAX_VOLUMES`]).
    #[must_use]
    pub fn add(&self, export: Export, volume_state: Arc<VolumeState>) -> Option<VolumeId> {
        let mut list = self.write();
        if list.ids.contains_key(&export.name) || list.entries.len() >= MAX_VOLUMES {
            return None;
        }
        Some(list.push(export, volume_state))
    }

    /// Removes a volume by name: it is no longer found, and no further I/O on it is admitted.
    #[must_use]
    pub fn remove(&self, name: &str) -> Option<Removed> {
        let (volume, _) = self.find(name)?;
        let mut list = self.write();
        let ExportEntry { export, volume_state } = list.entries.get_mut(volume.0 as usize)?.take()?;
        list.ids.remove(name);
        drop(list);
        volume_state.retire();
        self.shared.changes.fetch_add(1, Ordering::Release);
        Some(Removed { volume, export, volume_state })
    }

    /// Changes the description of an export; returns whether it exists.
    pub fn describe(&self, id: VolumeId, description: &str) -> bool {
        let mut list = self.write();
        let Some(Some(entry)) = list.entries.get_mut(id.0 as usize) else { return false };
        let export = Export { description: description.to_owned(), ..Export::clone(&entry.export) };
        entry.export = Arc::new(export);
        true
    }

    /// The shared state of the volume with this id.
    #[must_use]
    pub fn volume_state(&self, id: VolumeId) -> Option<Arc<VolumeState>> {
        self.entry(id).map(|entry| entry.volume_state)
    }

    /// The export with this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<(VolumeId, Arc<Export>)> {
        if self.access(name) != ExportAccess::Offered {
            return None;
        }
        let list = self.read();
        let id = *list.ids.get(name)?;
        let entry = list.entries.get(id.0 as usize)?.as_ref()?;
        Some((id, entry.export.clone()))
    }

    /// The export with this id.
    #[must_use]
    pub fn get(&self, id: VolumeId) -> Option<Arc<Export>> {
        self.entry(id).map(|entry| entry.export)
    }

    /// All exports that are currently offered, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (VolumeId, Arc<Export>)> + use<> {
        let handle = self.clone();
        self.entries().filter(move |(_, export)| handle.access(&export.name) == ExportAccess::Offered)
    }

    /// All exports, in order.
    fn entries(&self) -> impl DoubleEndedIterator<Item = (VolumeId, Arc<Export>)> + use<> {
        let list = self.read();
        let entries = (0..).map(VolumeId).zip(list.entries.iter());
        let there: Vec<_> =
            entries.filter_map(|(id, entry)| Some((id, entry.as_ref()?.export.clone()))).collect();
        drop(list);
        there.into_iter()
    }

    /// The first export; `None` if there is none, or it is refused: a client must not get another
    /// volume because of its address.
    #[must_use]
    pub fn default_export(&self) -> Option<(VolumeId, Arc<Export>)> {
        self.first().filter(|(_, export)| self.access(&export.name) == ExportAccess::Offered)
    }

    /// Changes with each removal, so that a session can close its access to removed volumes.
    #[inline]
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.shared.changes.load(Ordering::Acquire)
    }

    fn entry(&self, id: VolumeId) -> Option<ExportEntry> {
        self.read().entries.get(id.0 as usize)?.clone()
    }
}

impl ExportTable {
    /// Appends a volume. There are fewer than [`MAX_VOLUMES`], so its place fits an id.
    fn push(&mut self, export: Export, volume_state: Arc<VolumeState>) -> VolumeId {
        let id = VolumeId(self.entries.len() as u32);
        // The first one of a name is the one that is found.
        self.ids.entry(export.name.clone()).or_insert(id);
        self.entries.push(Some(ExportEntry { export: Arc::new(export), volume_state }));
        id
    }
}

/// The maximum number of volumes that a list ever has, including removed ones.
pub const MAX_VOLUMES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::MemVolume;

    fn export(name: &str) -> (Export, Arc<VolumeState>) {
        let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(1 << 20));
        let volume_state = VolumeState::new(volume.clone());
        (Export { name: name.into(), description: String::new(), read_only: false, volume }, volume_state)
    }

    #[test]
    fn a_handle_that_offers_some_exports_finds_no_others() {
        let exports = Exports::with_states(vec![export("a"), export("b")]);
        let some = exports.offering(|name: &str| match name {
            "a" => ExportAccess::Hidden,
            _ => ExportAccess::Offered,
        });
        assert!(some.find("a").is_none() && exports.find("a").is_some());
        assert_eq!(some.default_export().map(|(id, _)| id), Some(VolumeId(1)));
        assert_eq!(some.iter().count(), 1);
        let (later, volume_state) = export("c");
        assert!(exports.add(later, volume_state).is_some() && some.find("c").is_some());
    }

    #[test]
    fn a_refused_export_is_neither_found_nor_replaced_by_another_as_the_default() {
        let exports = Exports::with_states(vec![export("a"), export("b"), export("c")]);
        let some = exports.offering(|name: &str| match name {
            "a" => ExportAccess::Hidden,
            "b" => ExportAccess::Refused,
            _ => ExportAccess::Offered,
        });
        assert!(some.find("b").is_none() && some.default_export().is_none());
        assert_eq!(
            ["", "a", "b", "c", "d"].map(|name| some.is_refused(name)),
            [true, false, true, false, false]
        );
        assert_eq!(some.iter().map(|(id, _)| id.0).collect::<Vec<_>>(), [2]);
        assert!(!exports.is_refused("b") && exports.default_export().is_some());
    }

    #[test]
    fn ids_of_removed_volumes_are_not_reused() {
        let exports = Exports::with_states(vec![export("a"), export("b")]);
        let (again, volume_state) = export("b");
        assert_eq!(exports.add(again, volume_state), None, "the name is taken");
        let removed = exports.remove("b").unwrap();
        assert!(removed.volume == VolumeId(1) && removed.volume_state.lock().is_retired);
        assert!(exports.remove("b").is_none() && exports.get(VolumeId(1)).is_none());
        let (again, volume_state) = export("b");
        assert_eq!(exports.add(again, volume_state), Some(VolumeId(2)));
        let names: Vec<_> = exports.iter().map(|(id, export)| (id.0, export.name.clone())).collect();
        assert_eq!(names, [(0, "a".to_owned()), (2, "b".to_owned())]);
        assert!(
            exports.volume_state(VolumeId(2)).is_some_and(|volume_state| !volume_state.lock().is_retired)
        );
    }
}
