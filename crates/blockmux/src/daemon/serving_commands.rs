//! Commands of the control API that make a volume active or standby, which several daemons export
//! in turns. They run without the right to change the daemon, because the storage may not answer,
//! and change no config: a restart begins as the volume's spec says.

use super::blocking_work::{Awaited, BlockingWork};
use super::config_audit::{self, Caller};
use super::disks::Disks;
use super::reload::{DRAIN_TIMEOUT, wait};
use crate::api::{ApiError, ErrorCode};
use blockmux_engine::core::cores::Cores;
use blockmux_engine::serve::sessions::{Draining, Sessions};
use blockmux_proto::volume_state::{Ownership, ServingState, StepDown, TransitionRefused, VolumeState};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// A volume that becomes active or standby.
pub(super) struct OwnedVolume<'a> {
    pub(super) name: &'a str,
    pub(super) state: Arc<VolumeState>,
    pub(super) blocking: &'a BlockingWork,
    pub(super) disks: &'a Arc<Disks>,
    pub(super) cores: &'a Cores,
    pub(super) sessions: &'a Sessions,
    /// The targets that its sessions name now.
    pub(super) targets: Box<dyn Fn() -> BTreeSet<String> + 'a>,
}

/// What a command has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transition {
    /// The volume was in the state already.
    Nothing,
    Done,
    /// It is active, and sessions that have begun before it was active last must connect again.
    EndsSessions,
}

impl OwnedVolume<'_> {
    /// Makes the volume active; with `take`, the daemon that serves it now is shut out first.
    /// Returns the answer and the effects.
    pub(super) fn activate(&self, take: bool, caller: &Caller) -> Result<(String, Vec<String>), ApiError> {
        let (name, state, disks) = (self.name.to_owned(), self.state.clone(), self.disks.clone());
        let work =
            move |awaited: &Awaited| activate(&name, &state, take, &|| check_no_disk(&name, &disks), awaited);
        let done = self.run("active", caller, work)?;
        if done == Transition::EndsSessions {
            let draining = self.drain_fenced();
            wait(DRAIN_TIMEOUT, || draining.left().is_empty());
            draining.close();
            self.cores.wake_all();
        }
        Ok(self.changed(done, "active"))
    }

    /// Makes the volume standby, so that another daemon can serve it. Returns the answer and the
    /// effects.
    pub(super) fn deactivate(&self, caller: &Caller) -> Result<(String, Vec<String>), ApiError> {
        let (name, state, disks) = (self.name.to_owned(), self.state.clone(), self.disks.clone());
        let work =
            move |awaited: &Awaited| deactivate(&name, &state, &|| check_no_disk(&name, &disks), awaited);
        let done = self.run("standby", caller, work)?;
        if done == Transition::Done {
            // They may connect again at once: those that do are served with the next activation,
            // which ends the others.
            drop(self.drain_fenced());
        }
        Ok(self.changed(done, "standby"))
    }

    /// Asks the sessions to end that have begun before the volume was last active.
    fn drain_fenced(&self) -> Draining {
        let draining = self.sessions.drain_fenced(FENCED, &self.state, &(self.targets)());
        self.cores.wake_all();
        draining
    }

    fn run(
        &self,
        wanted: &'static str,
        caller: &Caller,
        work: impl FnOnce(&Awaited) -> Result<Transition, ApiError> + Send + 'static,
    ) -> Result<Transition, ApiError> {
        let (caller, effects) = (caller.clone(), [effect(self.name, wanted)]);
        let late = move |done: Result<Transition, ApiError>| {
            let done = done.as_ref().map(|_| &effects[..]);
            config_audit::log(&caller, "a change of the serving state, given up before", done);
        };
        self.blocking.within(LIMIT).run_change(self.name, work, late)?
    }

    /// The answer, and the effects in the words of a plan.
    fn changed(&self, done: Transition, now: &str) -> (String, Vec<String>) {
        let name = self.name;
        if done == Transition::Nothing {
            return (format!("{name} is {now} already"), Vec::new());
        }
        info!("`{name}` is {now}");
        (format!("{name} is {now}"), vec![effect(name, now)])
    }
}

fn effect(name: &str, now: &str) -> String {
    format!("~ volume {name}: {now}")
}

/// Refuses to change a volume that has a disk on this machine: that is a client without another
/// path, and its queues belong to the epoch in which they were made.
fn check_no_disk(name: &str, disks: &Disks) -> Result<(), ApiError> {
    let Ok(path) = disks.device_of(name) else { return Ok(()) };
    let text = format!(
        "{name}: its disk {} on this machine has no other path, so its I/O would fail; detach it first ('blockmux \
         ctl detach-disk {name}')",
        path.display()
    );
    Err(ApiError::new(ErrorCode::Conflict, text))
}

/// The right to serve the volume, if there is one.
fn ownership_of<'a>(name: &str, state: &'a VolumeState) -> Result<&'a Arc<dyn Ownership>, ApiError> {
    let refusal = || {
        let text = format!(
            "{name}: no other daemon can serve it in turns; only images of Ceph with exclusive=standby, on or take can \
             be made active and standby"
        );
        ApiError::new(ErrorCode::Conflict, text)
    };
    state.ownership().ok_or_else(refusal)
}

/// `check_disks` refuses if the volume has disks on this machine.
fn activate(
    name: &str,
    state: &Arc<VolumeState>,
    take: bool,
    check_disks: &dyn Fn() -> Result<(), ApiError>,
    awaited: &Awaited,
) -> Result<Transition, ApiError> {
    let ownership = ownership_of(name, state)?;
    let asked_at = state.serving_changes();
    if state.serving() == ServingState::Active {
        let failed = |error| failure(name, "asking who owns the image", error);
        if ownership.is_held().map_err(failed)? {
            return Ok(Transition::Nothing);
        }
        // Without I/O nobody has noticed it.
        if state.lose_unless_changed(asked_at) {
            warn!("`{name}`: another client has taken the image");
        }
    }
    let promotion = match state.promote() {
        Ok(promotion) => promotion,
        Err(TransitionRefused::Already) => return Ok(Transition::Nothing),
        Err(refused) => return Err(busy(name, refused)),
    };
    if promotion.ends_sessions() {
        // Nothing can end theirs but to detach them.
        check_disks()?;
    }
    if !wait_until(|| promotion.is_drained()) {
        return Err(in_flight(name, ServingState::Standby));
    }
    awaited.begin()?;
    let failed = |error| failure(name, "acquiring the image", error);
    let transition = promotion.transition().clone();
    let stored = ownership.acquire(take, &transition).map_err(failed)?;
    promotion.note_acquired();
    let give_back = |step: &str, error: String| {
        let released = ownership.release(&transition);
        let kept = released.err().map(|error| format!("; and the image is not released: {error}"));
        failure(name, step, format!("{error}{}", kept.unwrap_or_default()))
    };
    match ownership.is_held() {
        Ok(true) => {}
        Ok(false) => return Err(failed("another client has taken it meanwhile".to_owned())),
        Err(error) => return Err(give_back("asking who owns the image", error)),
    }
    state.check_size();
    let done = if promotion.ends_sessions() { Transition::EndsSessions } else { Transition::Done };
    if let Err(error) = promotion.finish(&stored) {
        return Err(give_back("loading the reservations", error.to_string()));
    }
    Ok(done)
}

/// `check_disks` refuses if the volume has disks on this machine.
fn deactivate(
    name: &str,
    state: &Arc<VolumeState>,
    check_disks: &dyn Fn() -> Result<(), ApiError>,
    awaited: &Awaited,
) -> Result<Transition, ApiError> {
    let ownership = ownership_of(name, state)?;
    if state.serving() == ServingState::Active {
        check_disks()?;
    }
    awaited.begin()?;
    let mut leaving = match state.step_down() {
        Ok(leaving) => leaving,
        Err(TransitionRefused::Already) => return Ok(Transition::Nothing),
        Err(refused) => return Err(busy(name, refused)),
    };
    if !wait_until(|| leaving.is_drained()) {
        return Err(in_flight(name, give_up(leaving, state)));
    }
    let mut stored = Ok(false);
    let is_known = wait_until(|| {
        stored = leaving.store();
        stored != Ok(false)
    });
    if !is_known || stored.is_err() {
        let now = give_up(leaving, state).name();
        let text = format!("the cluster does not store them; the volume is {now}");
        return Err(failure(name, "storing the reservations", text));
    }
    let Some(transition) = leaving.finish() else {
        let text = "another client has taken the image meanwhile; the volume is standby";
        return Err(failure(name, "draining I/O", text));
    };
    ownership.release(&transition).map_err(|error| {
        let text = format!("{error}; the volume is standby, and another daemon must take the image");
        failure(name, "releasing the image", text)
    })?;
    Ok(Transition::Done)
}

/// Leaves a volume as it is; returns how that is, because another client may have taken the image
/// meanwhile.
fn give_up(leaving: StepDown, state: &VolumeState) -> ServingState {
    drop(leaving);
    state.serving()
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

fn in_flight(name: &str, now: ServingState) -> ApiError {
    let (limit, now) = (DRAIN_LIMIT.as_secs(), now.name());
    let text = format!("I/O from before has not ended after {limit} s; the volume is {now}");
    failure(name, "draining I/O", text)
}

fn failure(name: &str, step: &str, error: impl std::fmt::Display) -> ApiError {
    ApiError::failed(format!("{name}: {step}: {error}"))
}

fn busy(name: &str, refused: TransitionRefused) -> ApiError {
    let text = format!("{name}: {refused}; try again when that is done");
    ApiError::new(ErrorCode::Busy, text)
}

/// Why a session ended whose volume is served by another daemon, or was meanwhile, for the log.
const FENCED: &str = "the volume was fenced";
/// Time for I/O in flight to end, and for reservations to be stored.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);
/// Time for a command: the limits of its calls together.
const LIMIT: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::names::volume_uuid::VolumeUuid;
    use blockmux_proto::volume_state::{
        self, Commit, SharedState, StateGeneration, StoredState, VolumeIdentity,
    };
    use blockmux_volume::MemVolume;
    use std::sync::Mutex;

    /// A storage that answers as a test says, and records what it is asked.
    #[derive(Default)]
    struct Storage {
        calls: Mutex<Vec<String>>,
        /// Calls that fail.
        failing: Mutex<Vec<&'static str>>,
        is_owner: Mutex<bool>,
        stored: Mutex<StoredState>,
    }

    impl Storage {
        fn call(&self, call: &str) -> Result<(), String> {
            self.calls.lock().unwrap().push(call.to_owned());
            let is_failing = self.failing.lock().unwrap().iter().any(|failing| call.starts_with(failing));
            if is_failing { Err(format!("{call} fails")) } else { Ok(()) }
        }

        fn calls(&self) -> Vec<String> {
            std::mem::take(&mut *self.calls.lock().unwrap())
        }

        fn fail(&self, call: Option<&'static str>) {
            *self.failing.lock().unwrap() = call.into_iter().collect();
        }
    }

    impl Ownership for Storage {
        fn acquire(&self, take: bool, _transition: &volume_state::Transition) -> Result<StoredState, String> {
            self.call(if take { "acquire, take" } else { "acquire" })?;
            *self.is_owner.lock().unwrap() = true;
            Ok(self.stored.lock().unwrap().clone())
        }

        fn is_held(&self) -> Result<bool, String> {
            self.call("is_held")?;
            Ok(*self.is_owner.lock().unwrap())
        }

        fn release(&self, _transition: &volume_state::Transition) -> Result<(), String> {
            self.call("release")?;
            *self.is_owner.lock().unwrap() = false;
            Ok(())
        }
    }

    impl SharedState for Storage {
        fn propose(&self, _expected: StateGeneration, _image: &[u8]) -> StateGeneration {
            StateGeneration(1)
        }

        fn outcome(&self, _proposal: StateGeneration) -> Option<Commit> {
            Some(Commit::Committed)
        }
    }

    fn standby() -> (Arc<Storage>, Arc<VolumeState>) {
        let storage = Arc::new(Storage::default());
        let identity = VolumeIdentity {
            uuid: VolumeUuid::of_texts(&["image"]),
            unit: Default::default(),
            target_name: "disk".to_owned(),
            disk_number: None,
            claim: Box::new(()),
        };
        let volume = Arc::new(MemVolume::new(1 << 20));
        let state = VolumeState::owned(volume, identity, storage.clone(), storage.clone(), None).unwrap();
        (storage, state)
    }

    fn go(state: &Arc<VolumeState>, take: bool) -> Result<Transition, String> {
        activate("disk", state, take, &|| Ok(()), &Awaited::default()).map_err(|error| error.to_string())
    }

    fn leave(state: &Arc<VolumeState>) -> Result<Transition, String> {
        deactivate("disk", state, &|| Ok(()), &Awaited::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_volume_becomes_active_and_standby_and_a_repeated_command_does_nothing() {
        let (storage, state) = standby();
        assert_eq!(leave(&state), Ok(Transition::Nothing));
        assert_eq!(go(&state, true), Ok(Transition::Done));
        assert_eq!(go(&state, true), Ok(Transition::Nothing), "it takes nothing from itself");
        assert_eq!(storage.calls(), ["acquire, take", "is_held", "is_held"]);
        assert_eq!(leave(&state), Ok(Transition::Done));
        assert_eq!(leave(&state), Ok(Transition::Nothing));
        assert_eq!((storage.calls(), state.serving()), (vec!["release".to_owned()], ServingState::Standby));
    }

    #[test]
    fn a_failure_names_its_step_and_leaves_a_state_in_which_the_command_can_be_repeated() {
        let (storage, state) = standby();
        storage.fail(Some("acquire"));
        assert_eq!(go(&state, false).unwrap_err(), "disk: acquiring the image: acquire fails");
        assert_eq!(state.serving(), ServingState::Standby);
        storage.fail(None);
        *storage.stored.lock().unwrap() = StoredState { image: vec![1], ..StoredState::default() };
        let said = go(&state, false).unwrap_err();
        assert!(said.starts_with("disk: loading the reservations: the stored state is damaged"), "{said}");
        assert!(!*storage.is_owner.lock().unwrap() && state.serving() == ServingState::Standby);
        *storage.stored.lock().unwrap() = StoredState::default();
        assert_eq!(go(&state, false), Ok(Transition::Done));
        storage.fail(Some("release"));
        let said = leave(&state).unwrap_err();
        assert!(said.starts_with("disk: releasing the image: release fails"), "{said}");
        assert_eq!(state.serving(), ServingState::Standby);
        storage.fail(None);
        assert_eq!(go(&state, false), Ok(Transition::EndsSessions));
        storage.fail(Some("is_held"));
        assert_eq!(go(&state, false).unwrap_err(), "disk: asking who owns the image: is_held fails");
        assert_eq!(state.serving(), ServingState::Active);
    }

    #[test]
    fn a_volume_that_was_taken_unnoticed_is_activated_again_without_its_sessions() {
        let (storage, state) = standby();
        assert_eq!(go(&state, false), Ok(Transition::Done));
        *storage.is_owner.lock().unwrap() = false;
        assert_eq!(go(&state, false), Ok(Transition::EndsSessions));
        assert_eq!(storage.calls(), ["acquire", "is_held", "is_held", "acquire", "is_held"]);
    }

    #[test]
    fn disks_of_this_machine_are_refused_where_they_would_fail_and_only_there() {
        let (storage, state) = standby();
        let refuse = || Err(ApiError::failed("its disk has no other path"));
        let go_attached = || activate("disk", &state, false, &refuse, &Awaited::default());
        let leave_attached = || deactivate("disk", &state, &refuse, &Awaited::default());
        assert_eq!(leave_attached().unwrap(), Transition::Nothing);
        assert_eq!(go_attached().unwrap(), Transition::Done, "they continue with the sessions");
        assert_eq!(go_attached().unwrap(), Transition::Nothing);
        assert!(leave_attached().is_err() && state.serving() == ServingState::Active);
        *storage.is_owner.lock().unwrap() = false;
        assert!(go_attached().is_err() && state.serving() == ServingState::Standby);
        assert!(!*storage.is_owner.lock().unwrap());
        assert_eq!(go(&state, false), Ok(Transition::EndsSessions));
    }

    #[test]
    fn a_command_that_is_given_up_says_whether_the_volume_was_taken_meanwhile() {
        let (_storage, state) = standby();
        assert_eq!(go(&state, false), Ok(Transition::Done));
        assert_eq!(give_up(state.step_down().unwrap(), &state), ServingState::Active);
        let leaving = state.step_down().unwrap();
        assert!(state.lose());
        let said = in_flight("disk", give_up(leaving, &state)).to_string();
        assert!(said.ends_with("the volume is standby"), "{said}");
    }

    #[test]
    fn one_command_at_a_time_changes_a_volume_and_others_change_nothing() {
        let (_storage, state) = standby();
        let promotion = state.promote().unwrap();
        for said in [go(&state, false), leave(&state)] {
            assert!(said.unwrap_err().contains("try again when that is done"));
        }
        drop(promotion);
        let plain = VolumeState::new(Arc::new(MemVolume::new(1 << 20)));
        for said in [go(&plain, false), leave(&plain)] {
            assert!(said.unwrap_err().contains("no other daemon can serve it in turns"));
        }
    }
}
