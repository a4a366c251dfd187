//! Where reservations are kept that outlive a restart, and for which volume.

use crate::failure::Failure;
use blockmux_engine::state::StateFile;
use blockmux_proto::volume_state::{VolumeIdentity, VolumeState};
use blockmux_volume::Volume;
use rustix::process::geteuid;
use std::env;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tracing::{info, warn};

/// Where the state of programs is, by the XDG Base Directory Specification; `None` for a user
/// without a home. A user who runs with the home of another, as by `sudo -u` or `setpriv`, has a
/// private directory in its place.
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
    let private = Path::new(PRIVATE).join(format!("blockmux-{}", user.as_raw()));
    warn!(
        "{} is not the home of this user: reservations are kept in {}; choose another place with --state",
        home.display(),
        private.display()
    );
    Some(private)
}

fn home_directory() -> Option<PathBuf> {
    // The specification has relative paths ignored.
    let directory = |variable| env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let state =
        directory("XDG_STATE_HOME").or_else(|| directory("HOME").map(|home| home.join(".local/state")));
    state.map(|state| state.join("blockmux"))
}

/// A volume as it is served, with the reservations that were kept of the data with its UUID. One
/// whose reservations cannot be read is not served: whoever was kept out would get in. Of data that
/// go with the process none are kept.
pub(super) fn served(
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
    let (file, image) = opened.map_err(|error| wrong(error.to_string()))?;
    if !image.is_empty() {
        info!("`{name}`: reservations from {}", file.path().display());
    }
    let path = file.path().display().to_string();
    VolumeState::identified(volume, identity, Some((file, &image))).map_err(|error| {
        wrong(format!("{path} {error}; move it away to serve the volume without reservations"))
    })
}

/// Everybody may make directories there, and they outlive a restart.
const PRIVATE: &str = "/var/tmp";
