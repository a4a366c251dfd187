//! What initiators set on disks, in a file for each: `e7.3.aoe`.

use crate::failure::Failure;
use blockmux_proto::aoe::Address;
use blockmux_proto::aoe::unit::{Kept, UnitStore};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use tracing::warn;

/// What is kept of a disk, and what keeps it; nothing without a directory.
pub(super) fn open(
    directory: Option<&Path>,
    disk: Address,
) -> Result<(Kept, Option<Box<dyn UnitStore>>), Failure> {
    let Some(directory) = directory else { return Ok((Kept::default(), None)) };
    let path = directory.join(format!("{disk}.aoe"));
    let cannot = |what: String| Failure::request(format!("cannot read {}: {what}", path.display()));
    fs::create_dir_all(directory)
        .map_err(|error| cannot(format!("{error}; name a directory that you may write")))?;
    let kept = match fs::read(&path) {
        Ok(image) => Kept::from_image(&image).map_err(|error| cannot(format!("{error}; remove it")))?,
        Err(error) if error.kind() == ErrorKind::NotFound => Kept::default(),
        Err(error) => return Err(cannot(format!("{error}; check its permissions"))),
    };
    Ok((kept, Some(Box::new(FileStore { path }))))
}

struct FileStore {
    path: PathBuf,
}

impl UnitStore for FileStore {
    fn save(&self, image: &[u8]) -> bool {
        match self.replace(image) {
            Ok(()) => true,
            Err(error) => {
                warn!("cannot keep {}: {error}", self.path.display());
                false
            }
        }
    }
}

impl FileStore {
    /// The old image or the new one is there whatever happens.
    fn replace(&self, image: &[u8]) -> io::Result<()> {
        let fresh = self.path.with_extension("new");
        let mut file = File::create(&fresh)?;
        file.write_all(image)?;
        file.sync_all()?;
        fs::rename(&fresh, &self.path)?;
        match self.path.parent() {
            Some(directory) => File::open(directory)?.sync_all(),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_found_again() {
        let directory = tempfile::tempdir().unwrap();
        let disk = Address { shelf: 7, slot: 3 };
        let (kept, store) = open(Some(directory.path()), disk).unwrap();
        assert_eq!(kept, Kept::default());
        let kept = Kept { config: b"host:a".to_vec(), ..kept };
        assert!(store.unwrap().save(&kept.to_image()));
        assert_eq!(open(Some(directory.path()), disk).unwrap().0, kept);
        fs::write(directory.path().join("e7.3.aoe"), "nonsense").unwrap();
        let error = open(Some(directory.path()), disk).err().unwrap().to_string();
        assert!(error.contains("e7.3.aoe") && error.ends_with("remove it"), "{error}");
    }
}
