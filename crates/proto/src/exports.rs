//! What a target offers: named volumes.

use crate::served::Served;
use blockmux_volume::Volume;
use std::sync::Arc;

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
#[derive(Clone)]
pub struct Exports(Arc<[(Export, Arc<Served>)]>);

impl Exports {
    /// A list in the order given; the first is the default where a protocol has one.
    #[must_use]
    pub fn new(exports: Vec<Export>) -> Exports {
        let served = exports.into_iter().map(|export| {
            let served = Served::new(export.volume.clone());
            (export, served)
        });
        Exports(served.collect())
    }

    /// The same where somebody has made of the volumes what is served of them.
    #[must_use]
    pub fn of_served(exports: Vec<(Export, Arc<Served>)>) -> Exports {
        Exports(exports.into())
    }

    /// The volume of the export with that id, as every protocol serves it.
    #[must_use]
    pub fn served(&self, id: VolumeId) -> Option<&Arc<Served>> {
        self.0.get(id.0 as usize).map(|(_, served)| served)
    }

    /// The export of that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<(VolumeId, &Export)> {
        self.iter().find(|(_, export)| export.name == name)
    }

    /// The export with that id.
    #[must_use]
    pub fn get(&self, id: VolumeId) -> Option<&Export> {
        self.0.get(id.0 as usize).map(|(export, _)| export)
    }

    /// All exports in order.
    pub fn iter(&self) -> impl Iterator<Item = (VolumeId, &Export)> {
        (0..).map(VolumeId).zip(self.0.iter().map(|(export, _)| export))
    }

    /// The first export.
    #[must_use]
    pub fn default_export(&self) -> Option<(VolumeId, &Export)> {
        self.iter().next()
    }
}
