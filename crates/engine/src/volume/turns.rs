//! Makes a volume active or standby that several processes serve in turns (decision 122).
//!
//! The calls are for a thread that may wait: I/O in flight may take [`DRAIN_LIMIT`], and each call
//! of the storage a minute and a half.

use blockmux_proto::volume_state::{
    MAX_TRANSITION, NotAcquired, Ownership, Promotion, ServingState, StepDown, Transition, TransitionRefused,
    VolumeState,
};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// What a call has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnChange {
    /// Nothing: the volume is in the state already.
    Nothing,
    /// The volume is in the state now.
    Done,
    /// The volume is active, and fences the sessions that began before it was active last.
    EndsSessions,
}

/// Why a volume has not become active or standby.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TurnError<E> {
    /// This process has the volume for as long as it runs.
    #[error("no other process can serve the volume in turns")]
    NotInTurns,
    /// Another change is under way, or the volume must not move now.
    #[error("{0}")]
    Refused(TransitionRefused),
    /// The caller has given it up.
    #[error("given up: {0}")]
    GivenUp(E),
    /// I/O has not ended within [`DRAIN_LIMIT`].
    #[error("I/O has not ended; the volume is {}", now.name())]
    InFlight {
        /// How the volume is.
        now: ServingState,
    },
    /// A step has failed.
    #[error("{step}: {error}")]
    Failed {
        /// What was being done.
        step: &'static str,
        /// Why it has failed, and how the volume is.
        error: String,
        /// The storage has not confirmed that this process does not own the volume. Nothing is
        /// served, but no other process can own it unless it shuts this one out.
        may_own: bool,
    },
}

impl<E> TurnError<E> {
    /// Whether the storage has not confirmed that this process does not own the volume, which
    /// serves nothing unless it is still active.
    #[must_use]
    pub fn may_own(&self) -> bool {
        matches!(self, TurnError::Failed { may_own: true, .. })
    }
}

/// Makes the volume active: when this returns, the process owns it and serves I/O. After an error
/// it serves none, and does not own it unless the error says so. If a call of the storage has no
/// answer in time, what it acquires later is released again, and until then no other change begins.
///
/// With `take`, the process that owns it is shut out. `wake` wakes the cores, so that what is
/// throttled is denied at once. `begin` is called when I/O is drained and before the storage is
/// asked, with whether sessions end: it closes them, so that their clients connect again and
/// nothing of theirs arrives in the new turn; see
/// [`Sessions::drain_fenced`](crate::serve::sessions::Sessions::drain_fenced).
///
/// # Errors
/// If the volume does not become active.
pub fn activate<E>(
    volume_state: &Arc<VolumeState>,
    take: bool,
    wake: impl FnOnce(),
    begin: impl FnOnce(bool) -> Result<(), E>,
) -> Result<TurnChange, TurnError<E>> {
    let ownership = volume_state.ownership().ok_or(TurnError::NotInTurns)?;
    if volume_state.serving() == ServingState::Active {
        let lost = || tracing::warn!("another client has taken the volume, which nobody has noticed");
        let failed = |error| TurnError::Failed { step: ASKING, error, may_own: true };
        if VolumeState::check_ownership(&Arc::downgrade(volume_state), lost).map_err(failed)? {
            return Ok(TurnChange::Nothing);
        }
    }
    let promotion = match volume_state.promote() {
        Ok(promotion) => promotion,
        Err(TransitionRefused::Already) => return Ok(TurnChange::Nothing),
        Err(refused) => return Err(TurnError::Refused(refused)),
    };
    wake();
    if !wait_until(|| promotion.is_drained()) {
        return Err(TurnError::InFlight { now: ServingState::Standby });
    }
    let ends_sessions = promotion.ends_sessions();
    begin(ends_sessions).map_err(TurnError::GivenUp)?;
    acquire(volume_state, &**ownership, take, promotion)?;
    Ok(if ends_sessions { TurnChange::EndsSessions } else { TurnChange::Done })
}

fn acquire<E>(
    volume_state: &VolumeState,
    ownership: &dyn Ownership,
    take: bool,
    promotion: Promotion,
) -> Result<(), TurnError<E>> {
    let transition = promotion.transition().clone();
    let failed = |NotAcquired { error, may_own }| TurnError::Failed { step: ACQUIRING, error, may_own };
    let stored = ownership.acquire(take, &transition).map_err(failed)?;
    promotion.note_acquired();
    match ownership.is_held() {
        Ok(true) => {}
        Ok(false) => {
            let error = "another client has taken it meanwhile".to_owned();
            return Err(failed(NotAcquired { error, may_own: false }));
        }
        Err(error) => return Err(give_back(ownership, &transition, ASKING, &error)),
    }
    volume_state.check_size();
    promotion.finish(&stored).map_err(|error| give_back(ownership, &transition, LOADING, &error.to_string()))
}

/// Releases what was acquired; returns the error of the step that has failed.
fn give_back<E>(
    ownership: &dyn Ownership,
    transition: &Transition,
    step: &'static str,
    error: &str,
) -> TurnError<E> {
    match ownership.release(transition) {
        Ok(()) => TurnError::Failed { step, error: error.to_owned(), may_own: false },
        Err(why) => {
            let error = format!("{error}; and the image is not released: {why}");
            TurnError::Failed { step, error, may_own: true }
        }
    }
}

/// Makes the volume standby: when this returns, all I/O that was admitted is complete, and the
/// process does not own the volume. Sessions that have begun before are fenced for good. An error
/// says how the volume is. `begin` is called before the volume refuses I/O, and `paused`
/// afterwards: it wakes the cores, so that what is throttled is denied at once. If it fails, the
/// volume is active again.
///
/// # Errors
/// If the volume does not become standby, or is not released.
pub fn deactivate<E>(
    volume_state: &Arc<VolumeState>,
    begin: impl FnOnce() -> Result<(), E>,
    paused: impl FnOnce() -> Result<(), E>,
) -> Result<TurnChange, TurnError<E>> {
    let ownership = volume_state.ownership().ok_or(TurnError::NotInTurns)?;
    begin().map_err(TurnError::GivenUp)?;
    let mut leaving = match volume_state.step_down() {
        Ok(leaving) => leaving,
        Err(TransitionRefused::Already) => return Ok(TurnChange::Nothing),
        Err(refused) => return Err(TurnError::Refused(refused)),
    };
    paused().map_err(TurnError::GivenUp)?;
    if !wait_until(|| leaving.is_drained()) {
        return Err(TurnError::InFlight { now: give_up(leaving, volume_state) });
    }
    let mut stored = Ok(false);
    let is_known = wait_until(|| {
        stored = leaving.store();
        stored != Ok(false)
    });
    if !is_known || stored.is_err() {
        let now = give_up(leaving, volume_state);
        let error = format!("the cluster does not store them; the volume is {}", now.name());
        return Err(TurnError::Failed { step: STORING, error, may_own: true });
    }
    let Some(transition) = leaving.finish() else {
        let error = "another client has taken the image meanwhile; the volume is standby".to_owned();
        return Err(TurnError::Failed { step: DRAINING, error, may_own: false });
    };
    ownership.release(&transition).map_err(|error| {
        let error = format!("{error}; the volume is standby");
        TurnError::Failed { step: RELEASING, error, may_own: true }
    })?;
    Ok(TurnChange::Done)
}

/// Leaves a volume as it is; returns how that is, because another client may have taken the image
/// meanwhile.
fn give_up(leaving: StepDown, volume_state: &VolumeState) -> ServingState {
    drop(leaving);
    volume_state.serving()
}

/// Waits until it is so, for [`DRAIN_LIMIT`] at most; returns whether it is.
fn wait_until(mut is_so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + DRAIN_LIMIT;
    while !is_so() {
        if Instant::now() >= end {
            return false;
        }
        thread::park_timeout(Duration::from_millis(1));
    }
    true
}

/// The step that waits for I/O.
pub const DRAINING: &str = "draining I/O";
const ASKING: &str = "asking who owns the image";
const ACQUIRING: &str = "acquiring the image";
const LOADING: &str = "loading the reservations";
const STORING: &str = "storing the reservations";
const RELEASING: &str = "releasing the image";

/// Time for I/O in flight to end, and then for reservations to be stored.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(MAX_TRANSITION.as_secs() / 2);

#[cfg(test)]
#[path = "../../tests/turns_storage/mod.rs"]
mod turns_storage;

#[cfg(test)]
mod tests {
    use super::turns_storage::TestStorage;
    use super::*;
    use std::convert::Infallible;

    fn go(state: &Arc<VolumeState>) -> Result<TurnChange, TurnError<Infallible>> {
        activate(state, false, || (), |_| Ok(()))
    }

    #[test]
    fn a_failed_activation_owns_nothing_or_says_so() {
        for failing in [&["acquire"][..], &["answer"], &["is_held"], &[], &["is_held", "release"]] {
            let (storage, state) = TestStorage::standby();
            storage.fail(failing);
            // Damaged reservations fail the last step.
            storage.store(&[1]);
            let Err(TurnError::Failed { may_own, .. }) = go(&state) else { panic!("{failing:?}") };
            assert_eq!((may_own, state.serving()), (storage.is_owned(), ServingState::Standby));
            let is_left = failing.contains(&"release") || failing.contains(&"answer");
            assert_eq!(may_own, is_left, "{failing:?}");
            storage.fail(&[]);
            storage.store(&[]);
            assert_eq!(go(&state), Ok(TurnChange::Done), "{failing:?}");
        }
    }

    #[test]
    fn a_deactivation_that_does_not_release_the_volume_says_so() {
        let (storage, state) = TestStorage::standby();
        go(&state).unwrap();
        storage.fail(&["release"]);
        let left = deactivate(&state, || Ok::<_, Infallible>(()), || Ok(()));
        assert!(matches!(left, Err(TurnError::Failed { may_own: true, .. })), "{left:?}");
        assert_eq!(state.serving(), ServingState::Standby);
        storage.fail(&[]);
        assert_eq!(go(&state), Ok(TurnChange::EndsSessions));
        assert_eq!(deactivate(&state, || Ok::<_, Infallible>(()), || Ok(())), Ok(TurnChange::Done));
        assert!(!storage.is_owned());
    }

    #[test]
    fn the_caller_may_give_up_before_anything_has_changed() {
        let (storage, state) = TestStorage::standby();
        let given_up = activate(&state, false, || (), Err);
        assert_eq!(given_up, Err(TurnError::GivenUp(false)));
        assert!(storage.calls().is_empty());
        go(&state).unwrap();
        assert_eq!(deactivate(&state, || Err(7), || Ok(())), Err(TurnError::GivenUp(7)));
        assert_eq!(deactivate(&state, || Ok(()), || Err(8)), Err(TurnError::GivenUp(8)));
        assert_eq!(state.serving(), ServingState::Active);
    }

    #[test]
    fn a_volume_that_was_taken_unnoticed_is_acquired_again() {
        let (storage, state) = TestStorage::standby();
        assert_eq!([go(&state), go(&state)], [Ok(TurnChange::Done), Ok(TurnChange::Nothing)]);
        storage.take();
        assert_eq!(go(&state), Ok(TurnChange::EndsSessions));
        assert!(storage.is_owned());
    }
}
