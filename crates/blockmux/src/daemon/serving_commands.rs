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
use blockmux_engine::volume::turns::{self, DRAIN_LIMIT, DRAINING, TurnChange, TurnError};
use blockmux_proto::volume_state::{ServingState, VolumeState};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tracing::info;

/// A volume that becomes active or standby.
pub(super) struct OwnedVolume<'a> {
    pub(super) name: &'a str,
    pub(super) state: Arc<VolumeState>,
    pub(super) blocking: &'a BlockingWork,
    pub(super) disks: &'a Arc<Disks>,
    pub(super) cores: &'a Arc<Cores>,
    pub(super) sessions: &'a Sessions,
    /// The targets that its sessions name now.
    pub(super) targets: Box<dyn Fn() -> BTreeSet<String> + 'a>,
}

impl OwnedVolume<'_> {
    /// Makes the volume active; with `take`, the daemon that serves it now is shut out first.
    /// Returns the answer and the effects.
    pub(super) fn activate(&self, take: bool, caller: &Caller) -> Result<(String, Vec<String>), ApiError> {
        let (name, state, disks) = (self.name.to_owned(), self.state.clone(), self.disks.clone());
        let work =
            move |awaited: &Awaited| activate(&name, &state, take, &|| check_no_disk(&name, &disks), awaited);
        let done = self.run("active", caller, work)?;
        if done == TurnChange::EndsSessions {
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
        let cores = self.cores.clone();
        let work = move |awaited: &Awaited| {
            let check = || check_no_disk(&name, &disks);
            deactivate(&name, &state, &check, awaited, &|| cores.wake_all())
        };
        let done = self.run("standby", caller, work)?;
        if done == TurnChange::Done {
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
        work: impl FnOnce(&Awaited) -> Result<TurnChange, ApiError> + Send + 'static,
    ) -> Result<TurnChange, ApiError> {
        let (caller, effects) = (caller.clone(), [effect(self.name, wanted)]);
        let late = move |done: Result<TurnChange, ApiError>| {
            let done = done.as_ref().map(|_| &effects[..]);
            config_audit::log(&caller, "a change of the serving state, given up before", done);
        };
        self.blocking.within(LIMIT).run_change(self.name, work, late)?
    }

    /// The answer, and the effects in the words of a plan.
    fn changed(&self, done: TurnChange, now: &str) -> (String, Vec<String>) {
        let name = self.name;
        if done == TurnChange::Nothing {
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

/// `check_disks` refuses if the volume has disks on this machine.
fn activate(
    name: &str,
    state: &Arc<VolumeState>,
    take: bool,
    check_disks: &dyn Fn() -> Result<(), ApiError>,
    awaited: &Awaited,
) -> Result<TurnChange, ApiError> {
    let begin = |ends_sessions: bool| -> Result<(), ApiError> {
        // Nothing can end their sessions but to detach them.
        if ends_sessions {
            check_disks()?;
        }
        Ok(awaited.begin()?)
    };
    turns::activate(state, take, begin).map_err(|error| refusal(name, error))
}

/// `check_disks` refuses if the volume has disks on this machine; `wake` wakes all cores.
fn deactivate(
    name: &str,
    state: &Arc<VolumeState>,
    check_disks: &dyn Fn() -> Result<(), ApiError>,
    awaited: &Awaited,
    wake: &dyn Fn(),
) -> Result<TurnChange, ApiError> {
    let begin = || -> Result<(), ApiError> {
        if state.serving() == ServingState::Active {
            check_disks()?;
        }
        Ok(awaited.begin()?)
    };
    turns::deactivate(state, begin, wake).map_err(|error| refusal(name, error))
}

fn refusal(name: &str, error: TurnError<ApiError>) -> ApiError {
    match error {
        TurnError::GivenUp(error) => error,
        TurnError::NotInTurns => {
            let text = format!(
                "{name}: no other daemon can serve it in turns; only images of Ceph with exclusive=standby, on or \
                 take can be made active and standby"
            );
            ApiError::new(ErrorCode::Conflict, text)
        }
        TurnError::Refused(refused) => {
            let text = format!("{name}: {refused}; try again when that is done");
            ApiError::new(ErrorCode::Busy, text)
        }
        TurnError::InFlight { now } => {
            let (limit, now) = (DRAIN_LIMIT.as_secs(), now.name());
            let text = format!("I/O from before has not ended after {limit} s; the volume is {now}");
            ApiError::failed(format!("{name}: {DRAINING}: {text}"))
        }
        TurnError::Failed { step, error, .. } => ApiError::failed(format!("{name}: {step}: {error}")),
    }
}

/// Why a session ended whose volume is served by another daemon, or was meanwhile, for the log.
const FENCED: &str = "the volume was fenced";
/// Time for a command: the limits of its calls together.
const LIMIT: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::names::volume_uuid::VolumeUuid;
    use blockmux_proto::volume_state::{
        self, Commit, Epoch, NotAcquired, Ownership, SharedState, StateGeneration, StoredState,
        VolumeIdentity,
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
        fn acquire(
            &self,
            take: bool,
            _transition: &volume_state::Transition,
        ) -> Result<StoredState, NotAcquired> {
            let called = self.call(if take { "acquire, take" } else { "acquire" });
            called.map_err(|error| NotAcquired { error, may_own: false })?;
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

    fn go(state: &Arc<VolumeState>, take: bool) -> Result<TurnChange, String> {
        activate("disk", state, take, &|| Ok(()), &Awaited::default()).map_err(|error| error.to_string())
    }

    fn leave(state: &Arc<VolumeState>) -> Result<TurnChange, String> {
        deactivate("disk", state, &|| Ok(()), &Awaited::default(), &|| ()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_volume_becomes_active_and_standby_and_a_repeated_command_does_nothing() {
        let (storage, state) = standby();
        assert_eq!(leave(&state), Ok(TurnChange::Nothing));
        assert_eq!(go(&state, true), Ok(TurnChange::Done));
        assert_eq!(go(&state, true), Ok(TurnChange::Nothing), "it takes nothing from itself");
        assert_eq!(storage.calls(), ["acquire, take", "is_held", "is_held"]);
        assert_eq!(leave(&state), Ok(TurnChange::Done));
        assert_eq!(leave(&state), Ok(TurnChange::Nothing));
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
        assert_eq!(go(&state, false), Ok(TurnChange::Done));
        storage.fail(Some("release"));
        let said = leave(&state).unwrap_err();
        assert!(said.starts_with("disk: releasing the image: release fails"), "{said}");
        assert_eq!(state.serving(), ServingState::Standby);
        storage.fail(None);
        assert_eq!(go(&state, false), Ok(TurnChange::EndsSessions));
        storage.fail(Some("is_held"));
        assert_eq!(go(&state, false).unwrap_err(), "disk: asking who owns the image: is_held fails");
        assert_eq!(state.serving(), ServingState::Active);
    }

    #[test]
    fn a_volume_that_was_taken_unnoticed_is_activated_again_without_its_sessions() {
        let (storage, state) = standby();
        assert_eq!(go(&state, false), Ok(TurnChange::Done));
        *storage.is_owner.lock().unwrap() = false;
        assert_eq!(go(&state, false), Ok(TurnChange::EndsSessions));
        assert_eq!(storage.calls(), ["acquire", "is_held", "is_held", "acquire", "is_held"]);
    }

    #[test]
    fn disks_of_this_machine_are_refused_where_they_would_fail_and_only_there() {
        let (storage, state) = standby();
        let refuse = || Err(ApiError::failed("its disk has no other path"));
        let go_attached = || activate("disk", &state, false, &refuse, &Awaited::default());
        let leave_attached = || deactivate("disk", &state, &refuse, &Awaited::default(), &|| ());
        assert_eq!(leave_attached().unwrap(), TurnChange::Nothing);
        assert_eq!(go_attached().unwrap(), TurnChange::Done, "they continue with the sessions");
        assert_eq!(go_attached().unwrap(), TurnChange::Nothing);
        assert!(leave_attached().is_err() && state.serving() == ServingState::Active);
        *storage.is_owner.lock().unwrap() = false;
        assert!(go_attached().is_err() && state.serving() == ServingState::Standby);
        assert!(!*storage.is_owner.lock().unwrap());
        assert_eq!(go(&state, false), Ok(TurnChange::EndsSessions));
    }

    #[test]
    fn a_command_that_is_given_up_says_whether_the_volume_was_taken_meanwhile() {
        let (_storage, state) = standby();
        assert_eq!(go(&state, false), Ok(TurnChange::Done));
        let said = refusal("disk", TurnError::InFlight { now: ServingState::Standby }).to_string();
        assert_eq!(
            said,
            "disk: draining I/O: I/O from before has not ended after 30 s; the volume is standby"
        );
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
