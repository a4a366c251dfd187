//! Persistent reservations across restarts (APTPL): the directory of the state files, and loading
//! the state of a volume.

use crate::failure::Failure;
use blockmux_engine::volume::state::StateFile;
use blockmux_proto::volume_state::{VolumeIdentity, VolumeState};
use blockmux_volume::Volume;
use rustix::process::geteuid;
use std::env;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tracing::{info, warn};

/// The default state directory by the XDG Base Directory Specification; `None` without a home
/// directory. If the home directory belongs to another user, as under `sudo -u` or `setpriv`, it is
/// a directory of this user below [`SHARED_PARENT`].
pub(super) fn default_directory() -> Option<PathBuf> {
    let directory = home_directory()?;
    let user = geteuid();
    if user.is_root() || env::var_os("XDG_STATE_HOME").is_some_and(|path| Path::new(&path).is_absolute()) {
        return Some(directory);
    }
    let home = PathBuf::from(env::var_os("HOME")?);
    let is_own = home.metadata().is_ok_and(|found| found.uid() == user.as_raw());
    if is_own {
        return Some(directory);
    }
    let private = Path::new(SHARED_PARENT).join(format!("blockmux-{}", user.as_raw()));
    warn!(
        "{} is not the home of this user: reservations are kept in {}; choose another directory with --state",
        home.display(),
        private.display()
    );
    Some(private)
}

fn home_directory() -> Option<PathBuf> {
    // The specification says to ignore relative paths.
    let directory = |variable| env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let state =
        directory("XDG_STATE_HOME").or_else(|| directory("HOME").map(|home| home.join(".local/state")));
    state.map(|state| state.join("blockmux"))
}

/// Creates the shared state of a volume and loads its reservations from the state file of its UUID.
/// A volume whose data does not outlive the process (`is_lasting` is false) has no state file.
///
/// # Errors
/// If the reservations cannot be read. The volume is not exported then: it would be open to
/// initiators that a reservation excludes.
pub(super) fn load(
    directory: Option<&Path>,
    name: &str,
    volume: Arc<dyn Volume>,
    identity: VolumeIdentity,
    is_lasting: bool,
) -> Result<Arc<VolumeState>, Failure> {
    let wrong = |what: String| Failure::request(format!("reservations of `{name}`: {what}"));
    let Some(directory) = directory.filter(|_| is_lasting) else {
        return VolumeState::identified(volume, identity, None).map_err(|error| wrong(error.to_string()));
    };
    let opened = StateFile::open(directory, &identity.uuid.to_string());
    let (file, stored) = opened.map_err(|error| wrong(error.to_string()))?;
    if !stored.image.is_empty() {
        info!("`{name}`: reservations from {}", file.path().display());
    }
    let path = file.path().display().to_string();
    VolumeState::identified(volume, identity, Some((file, &stored))).map_err(|error| {
        wrong(format!("{path} {error}; move it away to serve the volume without reservations"))
    })
}

/// A directory in which every user may create directories, and whose content survives a reboot.
const SHARED_PARENT: &str = "/var/tmp";
