//! What a change of the config has done in paths that may hang, and undoes unless it takes effect.

use crate::daemon::disks::NewDisk;
use crate::daemon::named_lock::NamedGuard;
use crate::daemon::opening::NamedVolume;
use crate::data::part::DataPart;
use blockmux_proto::exports::{Export, VolumeId};
use blockmux_proto::volume_state::{Resized, VolumeState};
use blockmux_volume::{Beyond, Resize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tracing::warn;

/// What may hang and is not done again if another change has come in between. Dropping it undoes
/// it.
#[derive(Default)]
pub(super) struct KeptWork {
    /// The turn of a short command that was overtaken; it ends before the volumes are closed.
    pub(super) turn: Option<NamedGuard>,
    /// New disks of volumes that were open before.
    pub(super) attached: Vec<NewDisk>,
    pub(super) resized: ResizedVolumes,
    /// New and replaced volumes, by name.
    pub(super) opened: BTreeMap<String, OpenedVolume>,
    /// Volumes that would be closed, and whose files are not deleted.
    pub(super) looked_at: BTreeSet<VolumeId>,
}

impl KeptWork {
    /// Lets the next command have its turn, because what follows may hang.
    pub(super) fn release_turn(&mut self) {
        self.turn = None;
    }
}

/// A volume that was opened for a new config.
pub(super) struct OpenedVolume {
    pub(super) named: NamedVolume,
    pub(super) export: Export,
    pub(super) volume_state: Arc<VolumeState>,
    /// The parts of files and devices that it consists of.
    pub(super) parts: Vec<DataPart>,
}

/// Volumes that were resized. Dropping them gives each its previous size back, unless its size has
/// changed since.
#[derive(Default)]
pub(super) struct ResizedVolumes(pub(super) Vec<ResizedVolume>);

/// A volume that was resized.
pub(super) struct ResizedVolume {
    pub(super) name: String,
    pub(super) volume_state: Arc<VolumeState>,
    /// Its size before, in bytes.
    pub(super) before: u64,
    pub(super) after: Resized,
    /// The storage had this size already: there is nothing to undo.
    pub(super) is_own: bool,
}

impl ResizedVolumes {
    /// Lets the sizes stay.
    pub(super) fn keep(mut self) {
        self.0.clear();
    }

    /// Describes them in the words of a plan.
    pub(super) fn lines(&self) -> Vec<String> {
        let line = |own: &ResizedVolume| {
            let ResizedVolume { name, before, after, .. } = own;
            format!("~ volume {name}: size: {before} -> {}", after.size)
        };
        self.0.iter().map(line).collect()
    }

    /// Moves a volume from here, if it is one of these and has had this size since.
    pub(super) fn take(&mut self, volume_state: &Arc<VolumeState>) -> Option<ResizedVolume> {
        let is_it = |own: &ResizedVolume| {
            Arc::ptr_eq(&own.volume_state, volume_state) && volume_state.is_last_resize(own.after)
        };
        Some(self.0.swap_remove(self.0.iter().position(is_it)?))
    }
}

impl Drop for ResizedVolumes {
    fn drop(&mut self) {
        for own in self.0.drain(..).filter(|own| !own.is_own) {
            let ResizedVolume { name, volume_state, before, after, .. } = own;
            let to = Resize::Bytes { size: before, beyond: Beyond::Keep };
            match volume_state.resize_again(after, to) {
                Ok(true) if after.size < before => warn!(
                    "{name}: has {before} bytes again, because the resize to {} was given up; what was behind them may \
                     be lost",
                    after.size
                ),
                Ok(_) => {}
                Err(error) => warn!("{name}: keeps its size of {} bytes: {error}", after.size),
            }
        }
    }
}
