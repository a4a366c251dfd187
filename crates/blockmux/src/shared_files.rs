//! Files and devices that are opened once for all slices of them, since the lock of one writer
//! keeps out every other one.

use crate::failure::Failure;
use blockmux_engine::file::FileVolume;
use blockmux_volume::Spec;
use blockmux_volume::spec::{BlockSpec, FileSpec};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// One open file, and what it was opened with.
struct OpenFile {
    spec: Spec,
    read_only: bool,
    volume: Weak<FileVolume>,
}

/// At most one for each volume.
static OPEN: Mutex<Vec<OpenFile>> = Mutex::new(Vec::new());

/// The file or device of a `file:` or `block:` spec: the one that is open for other slices, or else
/// a new one by `open`.
///
/// # Errors
/// Those of `open`.
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
                "{spec}: another slice has it open as {}; write it alike in both",
                own.spec
            )),
            None => failure,
        }
    })?;
    let volume = Arc::new(volume);
    // A file that was just created has a path to resolve only now.
    all.push(OpenFile { spec: resolved(spec), read_only, volume: Arc::downgrade(&volume) });
    Ok(volume)
}

/// The spec with the file's own path, however links lead to it.
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
