//! What initiators set on disks, in a file for each: `e7.3.aoe`.

use crate::failure::Failure;
use blockmux_engine::state::StateFile;
use blockmux_proto::aoe::AoeAddress;
use blockmux_proto::aoe::unit::DiskSettings;
use blockmux_proto::volume_state::ReservationStore;
use std::path::Path;
use std::sync::Arc;

/// What is kept of a disk, and what keeps it; nothing without a directory.
pub(super) fn open(
    directory: Option<&Path>,
    disk: AoeAddress,
) -> Result<(DiskSettings, Option<Arc<dyn ReservationStore>>), Failure> {
    let Some(directory) = directory else { return Ok((DiskSettings::default(), None)) };
    let wrong = |what: String| Failure::request(format!("what is kept of {disk}: {what}"));
    let name = disk.to_string();
    let opened = StateFile::open_named(directory, &name, "aoe", &name);
    let (file, image) = opened.map_err(|error| wrong(error.to_string()))?;
    let kept = match image.as_slice() {
        [] => DiskSettings::default(),
        image => DiskSettings::from_image(image)
            .map_err(|error| wrong(format!("{} is {error}; remove it", file.path().display())))?,
    };
    Ok((kept, Some(file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_found_again_by_one_program_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let disk = AoeAddress { shelf: 7, slot: 3 };
        let opened = || open(Some(directory.path()), disk);
        let (kept, store) = opened().unwrap();
        assert_eq!(kept, DiskSettings::default());
        let (kept, store) = (DiskSettings { config: b"host:a".to_vec(), ..kept }, store.unwrap());
        let ticket = store.save(&kept.to_image());
        let saved = std::iter::repeat_with(|| store.is_saved(ticket)).flatten().next();
        assert_eq!(saved, Some(true));
        let error = opened().err().unwrap().to_string();
        assert!(error.contains("what is kept of e7.3: ") && error.contains("another blockmux"), "{error}");
        drop(store);
        assert_eq!(opened().unwrap().0, kept);
        std::fs::write(directory.path().join("e7.3.aoe"), "nonsense").unwrap();
        let error = opened().err().unwrap().to_string();
        assert!(error.contains("e7.3.aoe: is not what was kept"), "{error}");
    }
}
