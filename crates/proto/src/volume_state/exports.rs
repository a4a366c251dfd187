//! What a target offers: named volumes.

use super::VolumeState;
use blockmux_volume::Volume;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Which volume of a target an I/O is for: its place in [`Exports`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeId(pub u32);

/// One volume under a name; each protocol makes its own kind of name from it.
#[derive(Clone)]
pub struct Export {
    /// Unique among the exports; not empty, without NUL.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
    /// Refuse writes whatever the volume says.
    pub read_only: bool,
    /// What is exported.
    pub volume: Arc<dyn Volume>,
}

/// All volumes of a target; a clone is another handle to the same list.
///
/// Volumes come and go while they are served, but an id names one volume for ever: that of a volume
/// that is gone is never given to another.
#[derive(Clone)]
pub struct Exports {
    shared: Arc<SharedExports>,
    /// Which of them are found by name or in order; `None`: all.
    offered: Option<Offered>,
}

/// Whether an export of that name is offered.
type Offered = Arc<dyn Fn(&str) -> bool + Send + Sync>;

struct SharedExports {
    list: RwLock<Vec<Option<ExportEntry>>>,
    /// How many volumes have gone.
    changes: AtomicU64,
}

#[derive(Clone)]
struct ExportEntry {
    export: Arc<Export>,
    served: Arc<VolumeState>,
}

/// A volume that was served, and how.
pub struct Removed {
    /// Its id, which nobody gets any more.
    pub volume: VolumeId,
    /// What was exported.
    pub export: Arc<Export>,
    /// What all protocols share of it.
    pub served: Arc<VolumeState>,
}

impl Exports {
    /// A list in the order given; the first is the default where a protocol has one.
    #[must_use]
    pub fn new(exports: Vec<Export>) -> Exports {
        let served = exports.into_iter().map(|export| {
            let served = VolumeState::new(export.volume.clone());
            (export, served)
        });
        Exports::of_served(served.collect())
    }

    /// Exports of volumes whose shared state was made before.
    #[must_use]
    pub fn of_served(exports: Vec<(Export, Arc<VolumeState>)>) -> Exports {
        let entry = |(export, served)| Some(ExportEntry { export: Arc::new(export), served });
        let list = RwLock::new(exports.into_iter().map(entry).collect());
        Exports { shared: Arc::new(SharedExports { list, changes: AtomicU64::new(0) }), offered: None }
    }

    /// Another handle to this list that finds only exports for which `is_offered` is true at that
    /// moment. What was found keeps its id, and the id leads to the volume by every handle.
    #[must_use]
    pub fn offering(&self, is_offered: impl Fn(&str) -> bool + Send + Sync + 'static) -> Exports {
        Exports { shared: self.shared.clone(), offered: Some(Arc::new(is_offered)) }
    }

    /// One more volume; `None` if its name is taken, or there were [`MAX_VOLUMES`] already.
    #[must_use]
    pub fn add(&self, export: Export, served: Arc<VolumeState>) -> Option<VolumeId> {
        let mut list = self.shared.list.write().unwrap_or_else(PoisonError::into_inner);
        let is_taken = list.iter().flatten().any(|entry| entry.export.name == export.name);
        if is_taken || list.len() >= MAX_VOLUMES {
            return None;
        }
        list.push(Some(ExportEntry { export: Arc::new(export), served }));
        // Less than MAX_VOLUMES.
        Some(VolumeId(list.len().saturating_sub(1) as u32))
    }

    /// Serves the volume of that name no more: nobody finds it here, and nobody's I/O on it is let
    /// in.
    #[must_use]
    pub fn remove(&self, name: &str) -> Option<Removed> {
        let (volume, _) = self.find(name)?;
        let mut list = self.shared.list.write().unwrap_or_else(PoisonError::into_inner);
        let ExportEntry { export, served } = list.get_mut(volume.0 as usize)?.take()?;
        drop(list);
        served.retire();
        self.shared.changes.fetch_add(1, Ordering::Release);
        Some(Removed { volume, export, served })
    }

    /// Changes the description of an export; answers whether there is one.
    pub fn describe(&self, id: VolumeId, description: &str) -> bool {
        let mut list = self.shared.list.write().unwrap_or_else(PoisonError::into_inner);
        let Some(Some(entry)) = list.get_mut(id.0 as usize) else { return false };
        let export = Export { description: description.to_owned(), ..Export::clone(&entry.export) };
        entry.export = Arc::new(export);
        true
    }

    /// The volume of the export with that id, as every protocol serves it.
    #[must_use]
    pub fn served(&self, id: VolumeId) -> Option<Arc<VolumeState>> {
        self.entry(id).map(|entry| entry.served)
    }

    /// The export of that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<(VolumeId, Arc<Export>)> {
        if self.offered.as_ref().is_some_and(|is_offered| !is_offered(name)) {
            return None;
        }
        let list = self.shared.list.read().unwrap_or_else(PoisonError::into_inner);
        let entries = (0..).map(VolumeId).zip(list.iter());
        let mut there = entries.filter_map(|(id, entry)| Some((id, &entry.as_ref()?.export)));
        there.find(|(_, export)| export.name == name).map(|(id, export)| (id, export.clone()))
    }

    /// The export with that id.
    #[must_use]
    pub fn get(&self, id: VolumeId) -> Option<Arc<Export>> {
        self.entry(id).map(|entry| entry.export)
    }

    /// All exports that are offered now, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (VolumeId, Arc<Export>)> + use<> {
        let list = self.shared.list.read().unwrap_or_else(PoisonError::into_inner);
        let entries = (0..).map(VolumeId).zip(list.iter());
        let there: Vec<_> =
            entries.filter_map(|(id, entry)| Some((id, entry.as_ref()?.export.clone()))).collect();
        drop(list);
        let offered = self.offered.clone();
        there.into_iter().filter(move |(_, export)| offered.as_ref().is_none_or(|of| of(&export.name)))
    }

    /// The first export.
    #[must_use]
    pub fn default_export(&self) -> Option<(VolumeId, Arc<Export>)> {
        self.iter().next()
    }

    /// Another number whenever a volume has gone: what was opened for it can be closed.
    #[inline]
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.shared.changes.load(Ordering::Acquire)
    }

    fn entry(&self, id: VolumeId) -> Option<ExportEntry> {
        let list = self.shared.list.read().unwrap_or_else(PoisonError::into_inner);
        list.get(id.0 as usize)?.clone()
    }
}

/// The most volumes that a list ever has, those that are gone included.
pub const MAX_VOLUMES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::MemVolume;

    fn export(name: &str) -> (Export, Arc<VolumeState>) {
        let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(1 << 20));
        let served = VolumeState::new(volume.clone());
        (Export { name: name.into(), description: String::new(), read_only: false, volume }, served)
    }

    #[test]
    fn a_handle_that_offers_some_exports_finds_no_others() {
        let exports = Exports::of_served(vec![export("a"), export("b")]);
        let some = exports.offering(|name| name != "a");
        assert!(some.find("a").is_none() && exports.find("a").is_some());
        assert_eq!(some.default_export().map(|(id, _)| id), Some(VolumeId(1)));
        assert_eq!(some.iter().count(), 1);
        let (later, served) = export("c");
        assert!(exports.add(later, served).is_some() && some.find("c").is_some());
    }

    #[test]
    fn volumes_come_and_go_and_no_id_names_two() {
        let exports = Exports::of_served(vec![export("a"), export("b")]);
        let (again, served) = export("b");
        assert_eq!(exports.add(again, served), None, "the name is taken");
        let removed = exports.remove("b").unwrap();
        assert!(removed.volume == VolumeId(1) && removed.served.is_retired());
        assert!(exports.remove("b").is_none() && exports.get(VolumeId(1)).is_none());
        let (again, served) = export("b");
        assert_eq!(exports.add(again, served), Some(VolumeId(2)));
        let names: Vec<_> = exports.iter().map(|(id, export)| (id.0, export.name.clone())).collect();
        assert_eq!(names, [(0, "a".to_owned()), (2, "b".to_owned())]);
        assert!(exports.served(VolumeId(2)).is_some_and(|served| !served.is_retired()));
    }
}
