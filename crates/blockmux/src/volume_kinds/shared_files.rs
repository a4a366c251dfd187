//! Opens a file or device once for all of its slices, because the lock of one writer excludes every
//! other writer.

use crate::failure::Failure;
use blockmux_engine::volume::file::FileVolume;
use blockmux_volume::Spec;
use blockmux_volume::spec::{BlockSpec, FileSpec};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

/// A file or device that is open or being opened, with the spec that opens it.
struct SharedFile {
    spec: Spec,
    read_only: bool,
    /// `None` while it is being opened, which may hang.
    volume: Option<Weak<FileVolume>>,
}

/// The shared files and devices; at most one entry for each that is open, or being opened.
static SHARED: Mutex<Vec<SharedFile>> = Mutex::new(Vec::new());
/// Signals that a file is no longer being opened.
static OPENED: Condvar = Condvar::new();

/// The file or device of a `file:` or `block:` spec. If no other slice has opened it, `open` opens
/// it. Only slices of the same path wait for that.
///
/// # Errors
/// The errors of `open`.
pub(crate) fn open(
    spec: &Spec,
    read_only: bool,
    open: impl FnOnce() -> Result<FileVolume, Failure>,
) -> Result<Arc<FileVolume>, Failure> {
    let wanted = resolved(spec);
    let is_wanted = |own: &SharedFile| own.spec == wanted && own.read_only == read_only;
    let is_same_path = |own: &SharedFile| path_of(&own.spec) == path_of(&wanted);
    let is_opening =
        |all: &mut Vec<SharedFile>| all.iter().any(|own| own.volume.is_none() && is_same_path(own));
    let mut all = OPENED.wait_while(lock(), is_opening).unwrap_or_else(PoisonError::into_inner);
    all.retain(SharedFile::is_there);
    let same = all.iter().find(|own| is_wanted(own));
    if let Some(volume) = same.and_then(|own| own.volume.as_ref()?.upgrade()) {
        return Ok(volume);
    }
    all.push(SharedFile { spec: wanted.clone(), read_only, volume: None });
    drop(all);
    let mut opening = OpeningFile { wanted: &wanted, opened: None };
    let opened = open().map(Arc::new);
    opening.opened = opened.as_ref().ok().map(|volume| {
        let volume = Some(Arc::downgrade(volume));
        SharedFile { spec: wanted.clone(), read_only, volume }
    });
    drop(opening);
    opened.map_err(|failure| {
        let all = lock();
        let other = all.iter().find(|own| own.is_there() && !own.read_only && is_same_path(own));
        match other.filter(|_| !read_only) {
            Some(own) => Failure::request(format!(
                "{spec}: another slice has it open as {}; use the same options in both",
                own.spec
            )),
            None => failure,
        }
    })
}

/// Checks that slices of one file, which share it while it is open, have it with the same options.
/// `volumes` have their names and specs.
///
/// # Errors
/// If two do not; a start would refuse the second.
pub(crate) fn check_options<'a>(volumes: impl Iterator<Item = (&'a str, &'a Spec)>) -> Result<(), String> {
    let mut known: HashMap<&Path, (&str, &Spec)> = HashMap::new();
    for (name, spec) in volumes {
        for leaf in sliced_leaves(spec, false) {
            let Some(path) = path_of(leaf) else { continue };
            let (other, its_leaf) = *known.entry(path).or_insert((name, leaf));
            if its_leaf != leaf {
                return Err(format!(
                    "volumes `{other}` and `{name}` are slices of {} with different options ({its_leaf} and {leaf}); use \
                     the same options in both",
                    path.display()
                ));
            }
        }
    }
    Ok(())
}

/// The files and devices of a spec that it uses in slices.
fn sliced_leaves(spec: &Spec, is_sliced: bool) -> Vec<&Spec> {
    match spec {
        Spec::Slice(_, inner) => sliced_leaves(inner, true),
        Spec::Decorated(_, inner) => sliced_leaves(inner, is_sliced),
        Spec::Stripe { members, .. } => {
            members.iter().flat_map(|member| sliced_leaves(member, is_sliced)).collect()
        }
        Spec::File(_) | Spec::Block(_) if is_sliced => vec![spec],
        _ => Vec::new(),
    }
}

impl SharedFile {
    /// Whether it is open or being opened.
    fn is_there(&self) -> bool {
        self.volume.as_ref().is_none_or(|volume| volume.strong_count() > 0)
    }
}

/// Marks a path as being opened until it is dropped, also by a panic.
struct OpeningFile<'a> {
    wanted: &'a Spec,
    opened: Option<SharedFile>,
}

impl Drop for OpeningFile<'_> {
    fn drop(&mut self) {
        let mut all = lock();
        all.retain(|own| own.volume.is_some() || own.spec != *self.wanted);
        all.extend(self.opened.take());
        OPENED.notify_all();
    }
}

fn lock() -> MutexGuard<'static, Vec<SharedFile>> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The spec with the canonical path of the file, without symbolic links. The file may have to be
/// created.
pub(crate) fn resolved(spec: &Spec) -> Spec {
    let own = |path: &Path| {
        let in_directory = || {
            let directory = path.parent().filter(|parent| *parent != Path::new(""));
            Some(directory.unwrap_or(Path::new(".")).canonicalize().ok()?.join(path.file_name()?))
        };
        path.canonicalize().ok().or_else(in_directory).unwrap_or_else(|| path.to_owned())
    };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_one_file_have_the_same_options() {
        let check = |specs: &[&str]| {
            let specs: Vec<Spec> = specs.iter().map(|spec| spec.parse().unwrap()).collect();
            check_options(["a", "b"].into_iter().zip(&specs))
        };
        let [short, long] = ["slice:0,4m:file:/x?size=16m", "slice:8m:file:/x?size=24m"];
        let said = check(&[short, long]).unwrap_err();
        assert!(said.starts_with("volumes `a` and `b` are slices of /x with different options"), "{said}");
        assert!(check(&[&format!("stripe:64k:[{short}],mem:4m"), &format!("delay:1ms:{long}")]).is_err());
        assert_eq!(check(&[short, "slice:8m:file:/x?size=16m"]), Ok(()));
        assert_eq!(check(&[short, "slice:8m:file:/y?size=24m"]), Ok(()));
        assert_eq!(check(&["file:/x?size=16m", long]), Ok(()), "a whole file is locked when it is opened");
    }
}
