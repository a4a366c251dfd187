//! Commands of the control API that make a volume active or standby, which several daemons export
//! in turns. They run without the right to change the daemon, because the storage may not answer,
//! and change no config: a restart begins as the volume's spec says.

use super::blocking_work::{Awaited, BlockingWork};
use super::config_audit::{self, Caller};
use super::disks::Disks;
use super::reload::{DRAIN_TIMEOUT, FENCED, wait};
use crate::api::{ApiError, ErrorCode};
use blockmux_engine::serve::sessions::{Draining, Sessions};
use blockmux_engine::volume::turns::{self, DRAIN_LIMIT, DRAINING, TurnChange, TurnError};
use blockmux_proto::volume_state::{ServingState, VolumeState};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tracing::info;

/// A volume that becomes active or standby, and who uses it.
pub(super) struct OwnedVolume {
    pub(super) name: String,
    pub(super) state: Arc<VolumeState>,
    /// Refuses if the volume has a disk on this machine; see [`check_no_disk`].
    pub(super) check_disks: Box<dyn Fn() -> Result<(), ApiError> + Send>,
    /// Wakes all cores.
    pub(super) wake: Box<dyn Fn() + Send>,
    pub(super) sessions: Sessions,
    /// The targets that its sessions name now.
    pub(super) targets: Box<dyn Fn() -> BTreeSet<String> + Send>,
}

impl OwnedVolume {
    /// Makes the volume active; with `take`, the daemon that serves it now is shut out first.
    /// Returns the answer and the effects.
    pub(super) fn activate(
        self,
        take: bool,
        blocking: &BlockingWork,
        caller: &Caller,
    ) -> Result<(String, Vec<String>), ApiError> {
        self.run("active", blocking, caller, move |own, awaited| own.become_active(take, awaited))
    }

    /// Makes the volume standby, so that another daemon can serve it. Returns the answer and the
    /// effects.
    pub(super) fn deactivate(
        self,
        blocking: &BlockingWork,
        caller: &Caller,
    ) -> Result<(String, Vec<String>), ApiError> {
        self.run("standby", blocking, caller, OwnedVolume::become_standby)
    }

    /// Changes the volume, also if the caller gives up meanwhile. Returns the answer, and the
    /// effects in the words of a plan.
    fn run(
        self,
        wanted: &'static str,
        blocking: &BlockingWork,
        caller: &Caller,
        work: impl FnOnce(&OwnedVolume, &Awaited) -> Result<TurnChange, ApiError> + Send + 'static,
    ) -> Result<(String, Vec<String>), ApiError> {
        let name = self.name.clone();
        let (caller, effect) = (caller.clone(), format!("~ volume {name}: {wanted}"));
        let late_effect = [effect.clone()];
        let late = move |done: Result<TurnChange, ApiError>| {
            let done = done.as_ref().map(|_| &late_effect[..]);
            config_audit::log(&caller, "a change of the serving state, given up before", done);
        };
        let work = move |awaited: &Awaited| work(&self, awaited);
        if blocking.within(LIMIT).run_change(&name, work, late)?? == TurnChange::Nothing {
            return Ok((format!("{name} is {wanted} already"), Vec::new()));
        }
        info!("`{name}` is {wanted}");
        Ok((format!("{name} is {wanted}"), vec![effect]))
    }

    fn become_active(&self, take: bool, awaited: &Awaited) -> Result<TurnChange, ApiError> {
        let begin = |ends_sessions: bool| -> Result<(), ApiError> {
            // Nothing can end their sessions but to detach them.
            if ends_sessions {
                (self.check_disks)()?;
            }
            awaited.begin()?;
            self.end_fenced();
            Ok(())
        };
        let done = turns::activate(&self.state, take, &self.wake, begin);
        let done = done.map_err(|error| self.refusal(error))?;
        // A connection may have begun before and have logged in since, or an earlier command was
        // given up.
        self.end_fenced();
        Ok(done)
    }

    fn become_standby(&self, awaited: &Awaited) -> Result<TurnChange, ApiError> {
        let begin = || -> Result<(), ApiError> {
            if self.state.serving() == ServingState::Active {
                (self.check_disks)()?;
            }
            Ok(awaited.begin()?)
        };
        let paused = || {
            (self.wake)();
            // One may have been attached since.
            (self.check_disks)()
        };
        let done = turns::deactivate(&self.state, begin, paused);
        let done = done.map_err(|error| self.refusal(error))?;
        if done == TurnChange::Done {
            // They may connect again at once: those that do are served with the next activation,
            // which ends the others.
            drop(self.drain_fenced());
        }
        Ok(done)
    }

    /// Asks the sessions to end that the volume fences for good, and closes what is left of them.
    pub(super) fn end_fenced(&self) {
        end_all(self.drain_fenced(), &self.wake);
    }

    /// Does what [`OwnedVolume::end_fenced`] does, and does not keep the volume meanwhile.
    pub(super) fn let_go(self) {
        let draining = self.drain_fenced();
        let OwnedVolume { wake, state, .. } = self;
        drop(state);
        end_all(draining, &wake);
    }

    /// Asks the sessions to end that the volume fences for good.
    pub(super) fn drain_fenced(&self) -> Draining {
        let draining = self.sessions.drain_fenced(FENCED, &self.state, &(self.targets)());
        (self.wake)();
        draining
    }

    fn refusal(&self, error: TurnError<ApiError>) -> ApiError {
        let name = &self.name;
        match error {
            TurnError::GivenUp(error) => error,
            TurnError::NotInTurns => {
                let text = format!(
                    "{name}: no other daemon can serve it in turns; only images of Ceph with exclusive=standby, on \
                     or take can be made active and standby"
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
            TurnError::Failed { step, error, may_own } => {
                let is_unknown = may_own && self.state.serving() != ServingState::Active;
                let advice = if is_unknown { MAY_OWN } else { "" };
                ApiError::failed(format!("{name}: {step}: {error}{advice}"))
            }
        }
    }
}

fn end_all(draining: Draining, wake: &impl Fn()) {
    wait(DRAIN_TIMEOUT, || draining.left().is_empty());
    draining.close();
    wake();
}

/// Refuses to change a volume that has a disk on this machine: that is a client without another
/// path, and its queues belong to the epoch in which they were made.
pub(super) fn check_no_disk(name: &str, disks: &Disks) -> Result<(), ApiError> {
    // It may be attached just now.
    let Err(busy) = disks.check_free(name) else { return Ok(()) };
    let Ok(path) = disks.device_of(name) else { return Err(busy) };
    let text = format!(
        "{name}: its disk {} on this machine has no other path, so its I/O would fail; detach it first ('blockmux \
         ctl detach-disk {name}')",
        path.display()
    );
    Err(ApiError::new(ErrorCode::Conflict, text))
}

/// The cluster may still say that this daemon owns the image, which does not serve it.
const MAY_OWN: &str = "; the cluster has not confirmed the release: until it has, another daemon gets the image only \
                       with 'ctl activate --take'";
/// Time for which a command is waited for. One that takes longer goes on, and what it has done is
/// logged.
const LIMIT: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turns_storage::TestStorage;
    use blockmux_proto::driver::audit_event::Login;
    use blockmux_proto::volume_state::Epoch;
    use blockmux_volume::MemVolume;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// The volume `disk` without sessions and disks.
    fn owned(state: &Arc<VolumeState>) -> OwnedVolume {
        OwnedVolume {
            name: "disk".to_owned(),
            state: state.clone(),
            check_disks: Box::new(|| Ok(())),
            wake: Box::new(|| ()),
            sessions: Sessions::default(),
            targets: Box::new(BTreeSet::new),
        }
    }

    fn go(state: &Arc<VolumeState>, take: bool) -> Result<TurnChange, String> {
        owned(state).become_active(take, &Awaited::default()).map_err(|error| error.to_string())
    }

    fn leave(state: &Arc<VolumeState>) -> Result<TurnChange, String> {
        owned(state).become_standby(&Awaited::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_volume_becomes_active_and_standby_and_a_repeated_command_does_nothing() {
        let (storage, state) = TestStorage::standby();
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
        let (storage, state) = TestStorage::standby();
        storage.fail(&["acquire"]);
        assert_eq!(go(&state, false).unwrap_err(), "disk: acquiring the image: acquire fails");
        assert_eq!(state.serving(), ServingState::Standby);
        storage.fail(&[]);
        storage.store(&[1]);
        let said = go(&state, false).unwrap_err();
        assert!(said.starts_with("disk: loading the reservations: the stored state is damaged"), "{said}");
        assert!(!storage.is_owned() && state.serving() == ServingState::Standby);
        storage.store(&[]);
        assert_eq!(go(&state, false), Ok(TurnChange::Done));
        storage.fail(&["release"]);
        let said = leave(&state).unwrap_err();
        assert!(said.starts_with("disk: releasing the image: release fails"), "{said}");
        assert!(said.contains("the cluster has not confirmed the release"), "{said}");
        assert_eq!(state.serving(), ServingState::Standby);
        storage.fail(&[]);
        assert_eq!(go(&state, false), Ok(TurnChange::EndsSessions));
        storage.fail(&["is_held"]);
        assert_eq!(go(&state, false).unwrap_err(), "disk: asking who owns the image: is_held fails");
        assert_eq!(state.serving(), ServingState::Active);
    }

    #[test]
    fn a_volume_that_was_taken_unnoticed_is_activated_again_without_its_sessions() {
        let (storage, state) = TestStorage::standby();
        assert_eq!(go(&state, false), Ok(TurnChange::Done));
        storage.take();
        assert_eq!(go(&state, false), Ok(TurnChange::EndsSessions));
        assert_eq!(storage.calls(), ["acquire", "is_held", "is_held", "acquire", "is_held"]);
    }

    #[test]
    fn disks_of_this_machine_are_refused_where_they_would_fail_and_only_there() {
        let (storage, state) = TestStorage::standby();
        let refuse = || Err(ApiError::failed("its disk has no other path"));
        let attached = OwnedVolume { check_disks: Box::new(refuse), ..owned(&state) };
        let go_attached = || attached.become_active(false, &Awaited::default());
        let leave_attached = || attached.become_standby(&Awaited::default());
        assert_eq!(leave_attached().unwrap(), TurnChange::Nothing);
        assert_eq!(go_attached().unwrap(), TurnChange::Done, "they continue with the sessions");
        assert_eq!(go_attached().unwrap(), TurnChange::Nothing);
        assert!(leave_attached().is_err() && state.serving() == ServingState::Active);
        storage.take();
        assert!(go_attached().is_err() && state.serving() == ServingState::Standby);
        assert!(!storage.is_owned());
        assert_eq!(go(&state, false), Ok(TurnChange::EndsSessions));
    }

    #[test]
    fn a_disk_that_is_attached_while_the_volume_steps_down_keeps_it_active() {
        let (storage, state) = TestStorage::standby();
        assert_eq!(go(&state, false), Ok(TurnChange::Done));
        let own = state.clone();
        let check = move || match own.serving() {
            ServingState::Active => Ok(()),
            _ => Err(ApiError::failed("a disk is there by now")),
        };
        let attached = OwnedVolume { check_disks: Box::new(check), ..owned(&state) };
        assert!(attached.become_standby(&Awaited::default()).is_err());
        assert!(state.serving() == ServingState::Active && storage.is_owned());
    }

    #[test]
    fn fenced_sessions_end_before_the_storage_is_asked_and_with_a_repeated_command() {
        let (storage, state) = TestStorage::standby();
        assert_eq!(go(&state, false), Ok(TurnChange::Done));
        let sessions = Sessions::default();
        let login = || Login {
            protocol: "iscsi",
            initiator: String::new(),
            target: "disk".to_owned(),
            is_authenticated: false,
        };
        let session = Arc::new(Mutex::new(Some(sessions.begin(login(), "peer", Epoch::current()))));
        let is_asked = Arc::new(AtomicBool::new(false));
        // A session that ends when its core runs after it was asked to.
        let (ending, asking, called) = (session.clone(), is_asked.clone(), storage.clone());
        let end = move || {
            if asking.load(Ordering::Relaxed) && ending.lock().unwrap().take().is_some() {
                called.note("a session ends");
            }
        };
        let asked = is_asked.clone();
        let targets = move || {
            asked.store(true, Ordering::Relaxed);
            BTreeSet::from(["disk".to_owned()])
        };
        let used = OwnedVolume {
            wake: Box::new(end),
            sessions: sessions.clone(),
            targets: Box::new(targets),
            ..owned(&state)
        };
        let before = Epoch::current();
        assert!(state.lose());
        storage.calls();
        assert_eq!(used.become_active(false, &Awaited::default()).unwrap(), TurnChange::EndsSessions);
        assert_eq!(storage.calls(), ["a session ends", "acquire", "is_held"]);
        // One that an earlier command has left.
        *session.lock().unwrap() = Some(sessions.begin(login(), "peer", before));
        assert_eq!(used.become_active(false, &Awaited::default()).unwrap(), TurnChange::Nothing);
        assert_eq!(storage.calls(), ["is_held", "a session ends"]);
    }

    #[test]
    fn a_command_that_is_given_up_says_whether_the_volume_was_taken_meanwhile() {
        let (_storage, state) = TestStorage::standby();
        assert_eq!(go(&state, false), Ok(TurnChange::Done));
        let said = owned(&state).refusal(TurnError::InFlight { now: ServingState::Standby }).to_string();
        assert_eq!(
            said,
            "disk: draining I/O: I/O from before has not ended after 30 s; the volume is standby"
        );
    }

    #[test]
    fn one_command_at_a_time_changes_a_volume_and_others_change_nothing() {
        let (_storage, state) = TestStorage::standby();
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
