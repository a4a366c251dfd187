//! Opens a file or device once for all of its slices, because the lock of one writer excludes every
//! other writer.

use crate::failure::Failure;
use blockmux_engine::volume::file::FileVolume;
use blockmux_volume::Spec;
use blockmux_volume::spec::{BlockSpec, FileSpec};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// An open file or device, with the spec that opened it.
struct OpenFile {
    spec: Spec,
    read_only: bool,
    volume: Weak<FileVolume>,
}

/// The open files and devices; at most one for each volume.
static OPEN: Mutex<Vec<OpenFile>> = Mutex::new(Vec::new());

/// The file or device of a `file:` or `block:` spec. If no other slice has opened it, `open` opens
/// it.
///
/// # Errors
/// The errors of `open`.
pub(crate) fn open(
    spec: &Spec,
    read_only: bool,
    open: impl FnOnce() -> Result<FileVolume, Failure>,
) -> Result<Arc<FileVolume>, Failure> {
    let mut all = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|own| own.volume.strong_count() > 0);
    let wanted = resolved(spec);
    let same = all.iter().find(|own| own.spec == wanted && own.read_only == read_only);
    if let Some(volume) = same.and_then(|own| own.volume.upgrade()) {
        return Ok(volume);
    }
    let volume = open().map_err(|failure| {
        let other = all.iter().find(|own| !own.read_only && path_of(&own.spec) == path_of(&wanted));
        match other.filter(|_| !read_only) {
            Some(own) => Failure::request(format!(
                "{spec}: another slice has it open as {}; use the same options in both",
                own.spec
            )),
            None => failure,
        }
    })?;
    let volume = Arc::new(volume);
    // The path of a file that was just created can be resolved only now.
    all.push(OpenFile { spec: resolved(spec), read_only, volume: Arc::downgrade(&volume) });
    Ok(volume)
}

/// The spec with the canonical path of the file, without symbolic links.
fn resolved(spec: &Spec) -> Spec {
    let own = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    match spec {
        Spec::File(file) => Spec::File(FileSpec { path: own(&file.path), ..file.clone() }),
        Spec::Block(block) => Spec::Block(BlockSpec { path: own(&block.path), ..block.clone() }),
        other => other.clone(),
    }
}

fn path_of(spec: &Spec) -> Option<&Path> {
    match spec {
        Spec::File(file) => Some(&file.path),
        Spec::Block(block) => Some(&block.path),
        _ => None,
    }
}
