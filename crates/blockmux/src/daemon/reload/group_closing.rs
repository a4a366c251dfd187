//! Closing volumes that a group of gateways hands out: none that this gateway serves.

use super::{Plan, Reloader, RunningConfig};
use crate::daemon::group::image_of_group;
use blockmux_proto::volume_state::{Promotion, TransitionRefused, VolumeState};
use std::sync::Arc;

/// Keeps the volumes of the group that a plan closes standby until the result is dropped.
///
/// # Errors
/// If one is not standby; the message says what to do. Closing it would not store its reservations
/// as a step down does, and the next gateway would let in whom they shut out.
pub(super) fn keep_closed_standby(
    reloader: &Reloader,
    config: &RunningConfig,
    plan: &Plan,
) -> Result<Vec<Promotion>, String> {
    let closes = plan.steps.iter().filter(|(_, step)| step.closes()).map(|(name, _)| name);
    let is_of_group = |name: &&String| {
        config.running.volume(name).is_some_and(|own| image_of_group(&own.entry.spec).is_some())
    };
    let found = closes.filter(is_of_group).filter_map(|name| Some((name, reloader.state_of(name)?)));
    found.map(|(name, state)| keep_standby(name, &state)).collect()
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
    use crate::turns_storage::TestStorage;
    use blockmux_proto::volume_state::{ServingState, StoredState};

    #[test]
    fn a_volume_that_a_reload_closes_is_standby_and_stays_so() {
        let (_storage, state) = TestStorage::standby();
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
