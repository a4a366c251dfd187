//! The volumes that a group of gateways hands out, as the running config has them.

use super::{Plan, Reloader, RunningConfig, VolumeUsers};
use crate::daemon::group::image_of_group;
use crate::daemon::serving_commands::{OwnedVolume, check_no_disk};
use blockmux_proto::volume_state::{Promotion, TransitionRefused, VolumeState};
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

impl Reloader {
    /// Keeps the volumes of the group that a plan closes standby until the result is dropped.
    ///
    /// # Errors
    /// If one is not standby; the message says what to do. Closing it would not store its
    /// reservations as a step down does, and the next gateway would let in whom they shut out.
    pub(super) fn keep_standby(&self, config: &RunningConfig, plan: &Plan) -> Result<Vec<Promotion>, String> {
        let closes = plan.steps.iter().filter(|(_, step)| step.closes()).map(|(name, _)| name);
        let is_of_group = |name: &&String| {
            config.running.volume(name).is_some_and(|own| image_of_group(&own.entry.spec).is_some())
        };
        let found = closes.filter(is_of_group).filter_map(|name| Some((name, self.state_of(name)?)));
        found.map(|(name, state)| keep_standby(name, &state)).collect()
    }
}

/// No other change begins while this one is under way, which does not end.
fn keep_standby(name: &str, state: &Arc<VolumeState>) -> Result<Promotion, String> {
    state.promote().map_err(|refused| match refused {
        TransitionRefused::Already => format!(
            "volume `{name}`: this gateway serves it for its group; move it to another gateway first ('blockmux ctl \
             cluster move {name} MEMBER'), or remove it from the group ('blockmux ctl cluster remove {name}')"
        ),
        refused => format!("volume `{name}`: {refused}; try again when that is done"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::names::volume_uuid::VolumeUuid;
    use blockmux_proto::volume_state::{
        Commit, NotAcquired, Ownership, ServingState, SharedState, StateGeneration, StoredState, Transition,
        VolumeIdentity,
    };
    use blockmux_volume::MemVolume;

    /// A storage that nobody else uses.
    struct Storage;

    impl Ownership for Storage {
        fn acquire(&self, _take: bool, _transition: &Transition) -> Result<StoredState, NotAcquired> {
            Ok(StoredState::default())
        }

        fn is_held(&self) -> Result<bool, String> {
            Ok(true)
        }

        fn release(&self, _transition: &Transition) -> Result<(), String> {
            Ok(())
        }
    }

    impl SharedState for Storage {
        fn propose(&self, expected: StateGeneration, _image: &[u8]) -> StateGeneration {
            expected
        }

        fn outcome(&self, _proposal: StateGeneration) -> Option<Commit> {
            Some(Commit::Committed)
        }
    }

    #[test]
    fn a_volume_that_a_reload_closes_is_standby_and_stays_so() {
        let identity = VolumeIdentity {
            uuid: VolumeUuid::of_texts(&["image"]),
            unit: Default::default(),
            target_name: "disk".to_owned(),
            disk_number: None,
            claim: Box::new(()),
        };
        let (volume, storage) = (Arc::new(MemVolume::new(1 << 20)), Arc::new(Storage));
        let state = VolumeState::owned(volume, identity, storage.clone(), storage, None).unwrap();
        let kept = keep_standby("disk", &state).unwrap();
        assert_eq!(state.promote().err(), Some(TransitionRefused::Busy));
        let said = keep_standby("disk", &state).err().unwrap();
        assert!(said.contains("it is becoming active or standby at present; try again"), "{said}");
        drop(kept);
        state.promote().unwrap().finish(&StoredState::default()).unwrap();
        let said = keep_standby("disk", &state).err().unwrap();
        assert!(said.contains("'blockmux ctl cluster move disk MEMBER'"), "{said}");
        assert_eq!(state.serving(), ServingState::Active);
    }
}
