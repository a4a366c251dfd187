//! Persistent settings that initiators make on AoE disks, in one file per disk: `e7.3.aoe`.

use crate::failure::Failure;
use blockmux_engine::volume::state::StateFile;
use blockmux_proto::aoe::AoeAddress;
use blockmux_proto::aoe::unit::DiskSettings;
use blockmux_proto::volume_state::{SharedState, StateGeneration};
use std::path::Path;
use std::sync::Arc;

/// Where the settings of a disk are stored, and the generation of those that are.
pub(super) type DiskStore = (Arc<dyn SharedState>, StateGeneration);

/// Loads the settings of a disk and opens their store. Without a directory, the settings are the
/// defaults and there is no store.
///
/// # Errors
/// If the file cannot be read or is invalid.
pub(super) fn open(
    directory: Option<&Path>,
    disk: AoeAddress,
) -> Result<(DiskSettings, Option<DiskStore>), Failure> {
    let Some(directory) = directory else { return Ok((DiskSettings::default(), None)) };
    let wrong = |what: String| Failure::request(format!("settings of {disk}: {what}"));
    let name = disk.to_string();
    let opened = StateFile::open_named(directory, &name, "aoe", &name);
    let (file, stored) = opened.map_err(|error| wrong(error.to_string()))?;
    let settings = DiskSettings::of_stored(&stored.image)
        .map_err(|error| wrong(format!("{} is {error}; remove it", file.name())))?;
    Ok((settings, Some((file, stored.generation))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::volume_state::Commit;

    #[test]
    fn settings_are_loaded_again_and_by_one_program_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let disk = AoeAddress { shelf: 7, slot: 3 };
        let opened = || open(Some(directory.path()), disk);
        let (settings, store) = opened().unwrap();
        assert_eq!(settings, DiskSettings::default());
        let (settings, store) = (DiskSettings { config: b"host:a".to_vec(), ..settings }, store.unwrap());
        let (store, generation) = store;
        let change = store.propose(generation, &settings.to_image());
        let outcome = std::iter::repeat_with(|| store.outcome(change)).flatten().next();
        assert_eq!(outcome, Some(Commit::Committed));
        let error = opened().err().unwrap().to_string();
        assert!(error.contains("settings of e7.3: ") && error.contains("another blockmux"), "{error}");
        drop(store);
        assert_eq!(opened().unwrap().0, settings);
        std::fs::write(directory.path().join("e7.3.aoe"), "nonsense").unwrap();
        let error = opened().err().unwrap().to_string();
        assert!(error.contains("e7.3.aoe: is not the saved state"), "{error}");
    }
}
