//! The volumes that a group of gateways hands out, as the running config has them.

use super::{Reloader, VolumeUsers};
use crate::daemon::group::image_of_group;
use crate::daemon::serving_commands::{OwnedVolume, check_no_disk};
use blockmux_proto::volume_state::VolumeState;
use std::sync::Arc;

/// The names of these volumes, each with its image.
pub(in crate::daemon) fn group_volumes(reloader: &Reloader) -> Vec<(String, String)> {
    let config = reloader.config.get();
    let volumes = config.running.volumes().iter();
    volumes.filter_map(|own| Some((own.name.clone(), image_of_group(&own.entry.spec)?))).collect()
}

/// The image of a volume, if a group hands it out.
pub(in crate::daemon) fn image_of_volume(reloader: &Reloader, name: &str) -> Option<String> {
    image_of_group(&reloader.config.get().running.volume(name)?.entry.spec)
}

/// A volume that becomes active or standby, and who uses it.
pub(in crate::daemon) fn owned_volume(
    reloader: &Arc<Reloader>,
    name: &str,
    state: Arc<VolumeState>,
) -> OwnedVolume {
    let sessions = reloader.connection_limits.limit.sessions().clone();
    let (disks, cores) = (reloader.disks.clone(), reloader.cores.clone());
    let (named, own_name) = (name.to_owned(), name.to_owned());
    // It does not keep what the daemon serves.
    let reloader = Arc::downgrade(reloader);
    let named_now = move |reloader: Arc<Reloader>| VolumeUsers::new(&reloader).named_by_sessions(&named);
    OwnedVolume {
        state,
        check_disks: Box::new(move || check_no_disk(&own_name, &disks)),
        wake: Box::new(move || cores.wake_all()),
        sessions,
        targets: Box::new(move || reloader.upgrade().map(&named_now).unwrap_or_default()),
        name: name.to_owned(),
    }
}
