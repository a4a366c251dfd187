//! Serving in turns: several processes export a volume, and the one that owns it is *active* and
//! serves its I/O. The others are *standby*: sessions log in and find the volume, and what needs
//! its data or its reservations is refused, so that initiators use another path (decision 122).
//!
//! ```text
//!   standby ── Promotion: drained, owned, reservations loaded ──▶ active
//!   active ── StepDown: transitioning, drained, stored ──▶ standby
//!   active ── lose ──▶ standby
//! ```
//! What leaves the active state fences the sessions that have begun, for good: a client may have
//! given one up without this process knowing, and what it has sent may still arrive when the volume
//! was active elsewhere and is here again. Those that begin afterwards are served once the volume
//! is active. A step down that is given up fences nobody: all I/O was served here.

use super::change::{NotChanged, ProposalOutcome, ProposedChange, ReservationChange};
use super::epoch::Epoch;
use super::ownership::{Ownership, ServingState};
use super::transition::{Stage, Transition};
use super::{
    Change, Notices, ReservationImageError, Settling, StateGeneration, StoredState, VolumeState, from_image,
};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// A volume that is to become active.
pub struct Promotion {
    volume_state: Arc<VolumeState>,
    fenced_at: u64,
    settling: Settling,
    ends_sessions: bool,
    transition: Transition,
}

/// A volume that is to become standby. Dropping it makes the volume active again.
pub struct StepDown {
    volume_state: Arc<VolumeState>,
    fenced_at: u64,
    settling: Settling,
    stored: Option<ReservationChange>,
    is_finished: bool,
    transition: Transition,
}

/// A volume that does not step down; it can be lost.
#[must_use]
pub struct StaysActive<'a>(&'a VolumeState);

impl Drop for StaysActive<'_> {
    fn drop(&mut self) {
        let mut table = self.0.lock();
        table.stays_active = table.stays_active.saturating_sub(1);
    }
}

/// A user of a volume without sessions that could end, as AoE's stations are: while there is one,
/// the volume does not step down. Nor does it become active if it fences this one, because it would
/// serve the others and this one never.
pub(crate) struct SessionlessUser {
    volume_state: Arc<VolumeState>,
    epoch: Epoch,
}

impl SessionlessUser {
    /// A user that has begun in `epoch`.
    pub(crate) fn new(volume_state: &Arc<VolumeState>, epoch: Epoch) -> SessionlessUser {
        volume_state.lock().sessionless_users.push(epoch);
        SessionlessUser { volume_state: volume_state.clone(), epoch }
    }
}

impl Drop for SessionlessUser {
    fn drop(&mut self) {
        let users = &mut self.volume_state.lock().sessionless_users;
        if let Some(own) = users.iter().position(|epoch| *epoch == self.epoch) {
            users.swap_remove(own);
        }
    }
}

/// When the storage was asked who owns a volume.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ServingMark {
    changes: u64,
    transitions: u64,
}

/// Why a change of the serving state does not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransitionRefused {
    /// The volume has the state already.
    #[error("it is so already")]
    Already,
    /// Another change is under way.
    #[error("it is becoming active or standby at present")]
    Busy,
    /// The storage does what only the owner may ask for.
    #[error("a resize or a change of its snapshots is under way")]
    InUse,
    /// The process that serves the volume next would not know of it.
    #[error("a SANITIZE operation is in progress or has failed")]
    Sanitizing,
    /// What clients without sessions have sent before could not be told from what they send later.
    #[error(
        "AoE exports it, which has no sessions that could end: leave AoE out of its protocols and targets"
    )]
    NoSessions,
}

/// Why a volume has not become active.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotPromoted {
    /// The ownership was lost meanwhile.
    #[error("another process has taken the volume meanwhile")]
    Lost,
    /// I/O that was admitted before is in flight.
    #[error("earlier I/O is still in flight")]
    InFlight,
    /// The stored reservations cannot be loaded.
    #[error("the stored state {0}")]
    Image(ReservationImageError),
}

impl VolumeState {
    /// The right to serve the volume; `None` if this process has it for as long as it runs.
    #[must_use]
    pub fn ownership(&self) -> Option<&Arc<dyn Ownership>> {
        self.ownership.as_ref()
    }

    /// Whether this process serves the volume's I/O now.
    #[must_use]
    pub fn serving(&self) -> ServingState {
        ServingState::of_number(self.serving.load(Ordering::Acquire))
    }

    /// Number of changes of [`VolumeState::serving`].
    #[must_use]
    pub fn serving_changes(&self) -> u64 {
        self.serving_changes.load(Ordering::Acquire)
    }

    /// Begins to make a standby volume active.
    ///
    /// # Errors
    /// If it is not standby, or becomes active already.
    pub fn promote(self: &Arc<VolumeState>) -> Result<Promotion, TransitionRefused> {
        let mut table = self.lock();
        match table.serving {
            ServingState::Active => return Err(TransitionRefused::Already),
            ServingState::Standby if table.transition.is_some() => return Err(TransitionRefused::Busy),
            ServingState::Standby if table.sessionless_users.iter().any(|epoch| self.fences(*epoch)) => {
                return Err(TransitionRefused::NoSessions);
            }
            ServingState::Standby => {}
            ServingState::Transitioning => return Err(TransitionRefused::Busy),
        }
        let transition = Transition::begin(self, &mut table, Stage::Promoting);
        let (fenced_at, ends_sessions) = (table.fenced_at, table.has_ended_sessions);
        drop(table);
        let (volume_state, settling) = (self.clone(), self.settling());
        Ok(Promotion { volume_state, fenced_at, settling, ends_sessions, transition })
    }

    /// Begins to make an active volume standby: refuses further I/O, and notifies initiators.
    ///
    /// # Errors
    /// If it is not active, may become active just now, or is being sanitized.
    pub fn step_down(self: &Arc<VolumeState>) -> Result<StepDown, TransitionRefused> {
        let mut table = self.lock();
        match table.serving {
            ServingState::Active if table.is_closed => return Err(TransitionRefused::Sanitizing),
            ServingState::Active if table.stays_active > 0 => return Err(TransitionRefused::InUse),
            ServingState::Active if !table.sessionless_users.is_empty() => {
                return Err(TransitionRefused::NoSessions);
            }
            ServingState::Active if table.transition.is_none() => {}
            ServingState::Standby if table.transition.is_none() => return Err(TransitionRefused::Already),
            _ => return Err(TransitionRefused::Busy),
        }
        let transition = Transition::begin(self, &mut table, Stage::SteppingDown);
        let fenced_at = self.in_flight.pause_epoch();
        self.set_serving(&mut table, ServingState::Transitioning, fenced_at);
        drop(table);
        let volume_state = self.clone();
        let (settling, stored, is_finished) = (self.settling(), None, false);
        Ok(StepDown { volume_state, fenced_at, settling, stored, is_finished, transition })
    }

    /// Another process has taken the volume: it becomes standby at once. The sessions that have
    /// begun are fenced for good, because their clients may have given up what they have sent, and
    /// have sent it again to the other process. Returns whether that is a change. It does not
    /// block.
    pub fn lose(&self) -> bool {
        self.lose_locked(&mut self.lock())
    }

    /// The process gives up the client of the storage by which it owns the volume, or acquires it:
    /// does what [`VolumeState::lose`] does, and no promotion that is under way succeeds any
    /// longer. Another one may begin at once. Returns whether the volume was not standby. It does
    /// not block.
    pub fn abandon(&self) -> bool {
        let mut table = self.lock();
        let is_change = self.lose_locked(&mut table);
        table.transition = None;
        is_change
    }

    /// Does what [`VolumeState::lose`] does, unless the serving state has changed since, or a
    /// change of it has begun: what was asked then is out of date.
    fn lose_unless_changed(&self, asked_at: ServingMark) -> bool {
        let mut table = self.lock();
        self.mark_of(&table) == asked_at && self.lose_locked(&mut table)
    }

    fn serving_mark(&self) -> ServingMark {
        self.mark_of(&self.lock())
    }

    fn mark_of(&self, table: &super::Table) -> ServingMark {
        ServingMark { changes: self.serving_changes(), transitions: table.transitions }
    }

    /// Keeps an active volume from stepping down until the result is dropped, for a change of which
    /// the storage must not hear from a process that does not own the volume. `None` if the volume
    /// is not active.
    #[must_use]
    pub fn stay_active(&self) -> Option<StaysActive<'_>> {
        let mut table = self.lock();
        (table.serving == ServingState::Active).then(|| {
            table.stays_active = table.stays_active.saturating_add(1);
            StaysActive(self)
        })
    }

    /// Whether a change of the serving state is under way, or a call of the storage has not
    /// returned that one has made.
    #[must_use]
    pub fn is_in_transition(&self) -> bool {
        self.lock().transition.is_some()
    }

    /// Asks the storage whether this process still owns an active volume, because nobody notices
    /// that without I/O, or because I/O was refused. If it does not, the volume is lost. Returns
    /// whether it does; `lost` is called if that is what loses it. May block for ever, and does not
    /// keep the volume meanwhile: a process that takes over waits until it is closed.
    ///
    /// # Errors
    /// If the storage does not answer.
    pub fn check_ownership(volume_state: &Weak<VolumeState>, lost: impl FnOnce()) -> Result<bool, String> {
        let question = |own: Arc<VolumeState>| Some((own.serving_mark(), own.ownership.as_ref()?.question()));
        let Some((asked_at, question)) = volume_state.upgrade().and_then(question) else { return Ok(true) };
        let is_held = question()?;
        // What was asked before another change is out of date.
        if !is_held && volume_state.upgrade().is_some_and(|own| own.lose_unless_changed(asked_at)) {
            lost();
        }
        Ok(is_held)
    }

    /// For the process that takes over from this one: the generations of the stored state of which
    /// it finds one if no other process has owned the volume since. None if this process does not
    /// serve the volume.
    #[must_use]
    pub fn served_generations(&self) -> Vec<StateGeneration> {
        let table = self.lock();
        if table.serving != ServingState::Active || table.transition.is_some() {
            return Vec::new();
        }
        let proposed = table.proposed.as_ref().map(ProposedChange::generation);
        [Some(table.stored), proposed].into_iter().flatten().collect()
    }

    /// Fences the sessions and disks that another process has handed over, for good: another one
    /// may have served the volume meanwhile. Called before a standby volume has users.
    pub fn fence_handed_over(&self) {
        let mut table = self.lock();
        table.fenced_at = self.in_flight.fence_until_epoch(Epoch::next());
        table.has_ended_sessions = true;
    }

    fn lose_locked(&self, table: &mut super::Table) -> bool {
        let stage = table.transition.as_ref().map(|transition| transition.stage);
        if !matches!(stage, Some(Stage::Promoting | Stage::Acquired)) {
            // What is left of it concerns a client that is shut out, and may take for ever.
            table.transition = None;
        }
        if table.serving == ServingState::Standby {
            if stage == Some(Stage::Acquired) {
                // The promotion has lost it before it has ended.
                table.fenced_at = self.in_flight.fence_until_epoch(Epoch::next());
                table.has_ended_sessions = true;
            }
            return false;
        }
        // Whether it was stored is unknown, and the other process decides from now on.
        if let Some(proposed) = table.proposed.take() {
            proposed.end(ProposalOutcome::NotStored);
        }
        // Who begins a session in the next epoch sees that the volume is not served.
        self.serving.store(ServingState::Standby as u8, Ordering::SeqCst);
        let fenced_at = self.in_flight.fence_until_epoch(Epoch::next());
        table.has_ended_sessions = true;
        // A SANITIZE ends with its epoch; the other process knows nothing of it.
        table.is_closed = false;
        self.set_serving(table, ServingState::Standby, fenced_at);
        true
    }

    /// Makes the volume standby before it has users.
    pub(super) fn begin_standby(&self) {
        let mut table = self.lock();
        let fenced_at = self.in_flight.pause_epoch();
        self.set_serving(&mut table, ServingState::Standby, fenced_at);
    }

    fn set_serving(&self, table: &mut super::Table, now: ServingState, fenced_at: u64) {
        (table.serving, table.fenced_at) = (now, fenced_at);
        // An SPC-2 reservation is lost with the process that has it.
        table.reserved_by = table.reserved_by.filter(|_| now != ServingState::Standby);
        // What is throttled is denied at once, so that initiators use another path.
        self.limiter.suspend(now != ServingState::Active);
        self.serving.store(now as u8, Ordering::Release);
        self.serving_changes.fetch_add(1, Ordering::AcqRel);
        self.notify(table, &Change::Serving(now));
    }
}

impl Promotion {
    /// Whether all I/O that was admitted or throttled before is complete, or nobody waits for it,
    /// because the volume was given up meanwhile; call it until it returns true.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.settling.is_over() || !self.transition.is_current()
    }

    /// Whether sessions that have begun before the volume was last active stay fenced.
    #[must_use]
    pub fn ends_sessions(&self) -> bool {
        self.ends_sessions
    }

    /// Keeps other changes from beginning while a call of the storage has it.
    #[must_use]
    pub fn transition(&self) -> &Transition {
        &self.transition
    }

    /// [`Ownership::acquire`] has succeeded: from now on [`VolumeState::lose`] ends the promotion.
    /// Whether the volume is still owned is asked for afterwards.
    pub fn note_acquired(&self) {
        self.transition.enter(&mut self.volume_state.lock(), Stage::Acquired);
    }

    /// Makes the volume active, with what [`Ownership::acquire`] has returned: the initiators of
    /// registrations that are gone are notified, and then all of the new state.
    ///
    /// # Errors
    /// If the volume stays standby.
    pub fn finish(self, stored: &StoredState) -> Result<(), NotPromoted> {
        let volume_state = &self.volume_state;
        let now = from_image(&stored.image).map_err(NotPromoted::Image)?;
        let mut table = volume_state.lock();
        let is_own = self.transition.is_current_in(&table) && table.fenced_at == self.fenced_at;
        if table.serving != ServingState::Standby || !is_own {
            return Err(NotPromoted::Lost);
        }
        volume_state.replace(&mut table, now, stored.generation);
        if !volume_state.in_flight.begin_epoch(self.fenced_at, Epoch::next) {
            return Err(NotPromoted::InFlight);
        }
        table.has_ended_sessions = false;
        volume_state.set_serving(&mut table, ServingState::Active, self.fenced_at);
        drop(table);
        Ok(())
    }
}

impl Drop for Promotion {
    fn drop(&mut self) {
        self.transition.enter(&mut self.volume_state.lock(), Stage::GivenUp);
    }
}

impl StepDown {
    /// Whether all I/O that was admitted or throttled before is complete, or nobody waits for it,
    /// because the volume was given up meanwhile; call it until it returns true.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.settling.is_over() || !self.transition.is_current()
    }

    /// Stores all reservations, also those that would not survive a restart, for the process that
    /// serves the volume next; call it until it returns true.
    ///
    /// # Errors
    /// If they cannot be stored, or the volume was lost meanwhile: it may be active again.
    pub fn store(&mut self) -> Result<bool, NotStored> {
        let (volume_state, transition) = (&self.volume_state, &self.transition);
        let is_stored = |table: &super::Table| {
            let own = &table.reservations;
            table.proposed.is_none() && (own.persists || own.registrations.is_empty())
        };
        if self.stored.is_none() && volume_state.with_table(is_stored) {
            return Ok(true);
        }
        let change = self.stored.get_or_insert_with(|| ReservationChange::last(volume_state, transition));
        let made = change.poll(|_, reservations| {
            reservations.persists |= !reservations.registrations.is_empty();
            Ok::<_, NotStored>(Notices::new())
        });
        made.map_err(|_: NotChanged<NotStored>| NotStored)
    }

    /// Makes the volume standby, and notifies initiators. Returns what keeps other changes from
    /// beginning until the ownership is given up; `None` if the volume was lost before.
    #[must_use]
    pub fn finish(mut self) -> Option<Transition> {
        self.is_finished = true;
        let volume_state = &self.volume_state;
        let mut table = volume_state.lock();
        let is_own = self.is_under_way(&table);
        if is_own {
            volume_state.in_flight.end_paused_epoch(self.fenced_at, Epoch::next());
            table.has_ended_sessions = true;
            volume_state.set_serving(&mut table, ServingState::Standby, self.fenced_at);
            self.transition.enter(&mut table, Stage::Releasing);
        }
        drop(table);
        is_own.then(|| self.transition.clone())
    }

    /// Whether the volume was not lost since; it may step down again meanwhile.
    fn is_under_way(&self, table: &super::Table) -> bool {
        table.serving == ServingState::Transitioning && table.fenced_at == self.fenced_at
    }
}

impl Drop for StepDown {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        let volume_state = &self.volume_state;
        let mut table = volume_state.lock();
        if self.is_under_way(&table) {
            volume_state.in_flight.continue_epoch(self.fenced_at);
            volume_state.set_serving(&mut table, ServingState::Active, self.fenced_at);
        }
    }
}

/// Reservations cannot be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reservations cannot be stored")]
pub struct NotStored;

/// A volume that its tests own as a process does, with a store that commits at once.
#[cfg(test)]
pub(crate) mod testing {
    use super::super::{
        Commit, NotAcquired, OwnershipQuestion, SharedState, StateGeneration, VolumeIdentity,
    };
    use super::*;
    use crate::names::volume_uuid::VolumeUuid;
    use blockmux_volume::MemVolume;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    /// What two processes share: the stored state, and whether it can be stored.
    #[derive(Clone, Default)]
    pub(crate) struct Cluster(Arc<ClusterState>);

    #[derive(Default)]
    struct ClusterState {
        stored: Mutex<StoredState>,
        fails: AtomicBool,
        /// Proposals have no outcome.
        hangs: AtomicBool,
        /// Another process has the volume.
        is_taken: AtomicBool,
        /// How often the storage was to be asked again who has it.
        rechecks: AtomicU64,
        /// Is called when the storage is asked who has it.
        asked: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    }

    impl Cluster {
        /// The state of the volume in a process, standby at first.
        pub(crate) fn process(&self) -> Arc<VolumeState> {
            let identity = VolumeIdentity {
                uuid: VolumeUuid::of_texts(&["image"]),
                unit: Default::default(),
                target_name: "disk".to_owned(),
                disk_number: None,
                claim: Box::new(()),
            };
            let volume = Arc::new(MemVolume::new(1 << 20));
            let (ownership, store) = (Arc::new(self.clone()), Arc::new(self.clone()));
            VolumeState::owned(volume, identity, ownership, store, None).unwrap()
        }

        pub(crate) fn stored(&self) -> StoredState {
            self.0.stored.lock().unwrap().clone()
        }

        pub(crate) fn fail(&self, fails: bool) {
            self.0.fails.store(fails, Ordering::Relaxed);
        }

        pub(crate) fn hang(&self, hangs: bool) {
            self.0.hangs.store(hangs, Ordering::Relaxed);
        }

        pub(crate) fn take(&self) {
            self.0.is_taken.store(true, Ordering::Relaxed);
        }

        pub(crate) fn rechecks(&self) -> u64 {
            self.0.rechecks.load(Ordering::Relaxed)
        }

        pub(crate) fn when_asked(&self, call: impl FnOnce() + Send + 'static) {
            *self.0.asked.lock().unwrap() = Some(Box::new(call));
        }

        /// Makes a process active.
        pub(crate) fn promote(&self, process: &Arc<VolumeState>) {
            let promotion = process.promote().unwrap();
            assert!(promotion.is_drained());
            promotion.finish(&self.stored()).unwrap();
        }
    }

    impl Ownership for Cluster {
        fn acquire(&self, _take: bool, _transition: &Transition) -> Result<StoredState, NotAcquired> {
            Ok(self.stored())
        }

        fn question(&self) -> OwnershipQuestion {
            let cluster = self.clone();
            Box::new(move || {
                cluster.0.asked.lock().unwrap().take().into_iter().for_each(|call| call());
                Ok(!cluster.0.is_taken.load(Ordering::Relaxed))
            })
        }

        fn recheck(&self) {
            self.0.rechecks.fetch_add(1, Ordering::Relaxed);
        }

        fn release(&self, _transition: &Transition) -> Result<(), String> {
            Ok(())
        }
    }

    impl SharedState for Cluster {
        fn propose(&self, expected: StateGeneration, image: &[u8]) -> StateGeneration {
            let mut stored = self.0.stored.lock().unwrap();
            assert_eq!(stored.generation, expected, "one process stores at a time");
            if self.0.fails.load(Ordering::Relaxed) || self.0.hangs.load(Ordering::Relaxed) {
                return StateGeneration(u64::MAX);
            }
            let generation = StateGeneration(expected.0.saturating_add(1));
            *stored = StoredState { generation, image: image.to_vec() };
            generation
        }

        fn outcome(&self, proposal: StateGeneration) -> Option<Commit> {
            if proposal == StateGeneration(u64::MAX) {
                return (!self.0.hangs.load(Ordering::Relaxed)).then_some(Commit::Failed);
            }
            Some(Commit::Committed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::Cluster;
    use super::*;
    use crate::volume_state::{
        Admission, Holder, IoGuard, NotAdmitted, Register, Registrant, RequiredAccess, Reservations,
    };
    use blockmux_volume::{IoError, Op};
    use blockmux_wire::scsi::reservation::ScsiReservationType;

    fn host(id: u8) -> Registrant {
        Registrant::of_nvme_host("nqn.2026-11.t:h", [id; 16])
    }

    fn user(volume_state: &Arc<VolumeState>, id: u8) -> Admission {
        Admission::new(volume_state, Some(host(id)), Epoch::current())
    }

    fn write(user: &Admission) -> Result<Option<IoGuard>, IoError> {
        let admitted = user.admit(Op::Write { fua: false }, (0, 512), RequiredAccess::Writing, None);
        admitted.map_err(|error| match error {
            NotAdmitted::Denied(error) => error,
            other => panic!("{other:?}"),
        })
    }

    fn is_fenced(user: &Admission) -> bool {
        matches!(write(user), Err(IoError::Fenced))
    }

    /// Host 1 registers and reserves the volume.
    fn reserve(volume_state: &Arc<VolumeState>, persists: bool) -> Result<bool, NotChanged<()>> {
        let mut change = ReservationChange::new(volume_state, Epoch::current(), false);
        let made = |all: &mut Reservations| {
            let (who, kind) = (host(1), ScsiReservationType::WRITE_EXCLUSIVE);
            let registrants = std::slice::from_ref(&who);
            all.register(&who, &Register { key: None, new_key: 7, registrants, persists }).unwrap();
            all.reserve(&who, 7, kind).unwrap();
        };
        change.poll(|_, all| {
            made(all);
            Ok(Notices::new())
        })
    }

    /// Makes a process standby.
    fn retire(process: &Arc<VolumeState>) {
        let mut leaving = process.step_down().unwrap();
        assert!(leaving.is_drained() && leaving.store() == Ok(true) && leaving.finish().is_some());
    }

    #[test]
    fn sessions_find_the_reservations_of_the_process_that_served_meanwhile() {
        let cluster = Cluster::default();
        let (first, second) = (cluster.process(), cluster.process());
        let [one, two] = [1, 2].map(|id| user(&first, id));
        assert!(first.serving() == ServingState::Standby && is_fenced(&one));
        assert_eq!(reserve(&first, true), Err(NotChanged::Standby));
        cluster.promote(&first);
        assert!(first.promote().is_err() && write(&one).is_ok() && write(&two).is_ok());
        // Registrations without APTPL are moved, too.
        assert_eq!(reserve(&first, false), Ok(true));
        assert!(cluster.stored().image.is_empty());
        let there = [1, 2].map(|id| user(&second, id));
        retire(&first);
        assert!(is_fenced(&one) && is_fenced(&two));
        assert_eq!(first.step_down().err(), Some(TransitionRefused::Already));
        cluster.promote(&second);
        assert!(write(&there[0]).is_ok());
        assert_eq!((write(&there[1]).err(), cluster.rechecks()), (Some(IoError::Reserved), 1));
        let mut clear = ReservationChange::new(&second, Epoch::current(), false);
        assert_eq!(clear.poll(|_, all| all.clear(&host(1), 7)), Ok(true));
        let early = Epoch::current();
        let again = [1, 2].map(|id| user(&first, id));
        assert!(!first.fences(early) && first.fences(Epoch(0)));
        retire(&second);
        cluster.promote(&first);
        assert!(write(&again[0]).is_ok() && write(&again[1]).is_ok());
        assert!(is_fenced(&one) && is_fenced(&two), "what they have sent may be out of date");
    }

    #[test]
    fn a_session_of_an_ended_epoch_changes_nothing() {
        let cluster = Cluster::default();
        let process = cluster.process();
        let holder = Holder { nexus: 1, unit: 0 };
        cluster.promote(&process);
        let old = Epoch::current();
        retire(&process);
        cluster.promote(&process);
        let before = cluster.stored();
        let mut late = ReservationChange::new(&process, old, false);
        let made = late.poll(|_, _| -> Result<Notices, ()> { panic!("it is not evaluated") });
        assert_eq!(made, Err(NotChanged::Fenced));
        assert!(process.reserve(holder, old).is_err() && process.close(old).is_err());
        assert_eq!(cluster.stored(), before);
        assert!(process.step_down().is_ok(), "no SANITIZE is in progress");
        assert_eq!(process.reserve(holder, Epoch::current()).ok(), Some(Some(true)));
    }

    #[test]
    fn an_owner_that_is_shut_out_acknowledges_no_change() {
        let cluster = Cluster::default();
        let process = cluster.process();
        cluster.promote(&process);
        cluster.fail(true);
        assert_eq!(reserve(&process, false), Err(NotChanged::NotStored));
        assert_eq!(process.reservation().registrants, 0);
    }

    #[test]
    fn a_volume_steps_down_once_its_io_is_complete_or_continues() {
        let cluster = Cluster::default();
        let process = cluster.process();
        cluster.promote(&process);
        let session = user(&process, 1);
        let io = write(&session).unwrap();
        let leaving = process.step_down().unwrap();
        assert_eq!(process.serving(), ServingState::Transitioning);
        assert!(is_fenced(&session) && !leaving.is_drained());
        assert_eq!(process.promote().err(), Some(TransitionRefused::Busy));
        drop(leaving);
        assert_eq!(process.serving(), ServingState::Active);
        assert!(write(&session).is_ok(), "nothing has changed");
        assert_eq!(process.close(Epoch::current()).ok(), Some(true));
        assert_eq!(process.step_down().err(), Some(TransitionRefused::Sanitizing));
        process.open();
        let leaving = process.step_down().unwrap();
        assert_eq!(process.close(Epoch::current()).ok(), None, "no SANITIZE begins meanwhile");
        drop(io);
        assert!(leaving.is_drained() && leaving.finish().is_some());
        assert_eq!(process.serving(), ServingState::Standby);
    }

    #[test]
    fn what_cannot_be_stored_keeps_the_volume_active() {
        let cluster = Cluster::default();
        let process = cluster.process();
        cluster.promote(&process);
        assert_eq!(reserve(&process, false), Ok(true));
        cluster.fail(true);
        let mut leaving = process.step_down().unwrap();
        assert_eq!(leaving.store(), Err(NotStored));
        drop(leaving);
        assert!(write(&user(&process, 1)).is_ok());
    }

    #[test]
    fn a_lost_volume_fences_the_sessions_that_have_begun_for_good() {
        let cluster = Cluster::default();
        let process = cluster.process();
        cluster.promote(&process);
        let before = user(&process, 1);
        let io = write(&before).unwrap();
        // A change that is being stored is not made by the outcome of a later one.
        cluster.hang(true);
        assert_eq!(reserve(&process, true), Ok(false));
        assert!(process.lose() && !process.lose());
        cluster.hang(false);
        assert_eq!(process.serving(), ServingState::Standby);
        let after = user(&process, 2);
        assert!(is_fenced(&before) && is_fenced(&after));
        let promotion = process.promote().unwrap();
        assert!(promotion.ends_sessions() && !promotion.is_drained());
        drop(io);
        assert!(promotion.is_drained());
        promotion.finish(&cluster.stored()).unwrap();
        assert!(is_fenced(&before) && write(&after).is_ok());
        assert_eq!(process.reservation().registrants, 0);
        retire(&process);
        assert!(process.promote().unwrap().ends_sessions());
        assert!(!cluster.process().promote().unwrap().ends_sessions(), "it was never active");
    }

    #[test]
    fn the_end_of_a_step_down_before_a_loss_changes_nothing_of_a_later_one() {
        let cluster = Cluster::default();
        let process = cluster.process();
        let begin = || {
            cluster.promote(&process);
            process.step_down().unwrap()
        };
        let first = begin();
        assert!(process.lose());
        let second = begin();
        assert!(process.lose());
        let third = begin();
        assert!(first.finish().is_none() && process.serving() == ServingState::Transitioning);
        drop(second);
        assert_eq!(process.serving(), ServingState::Transitioning);
        assert!(third.finish().is_some() && process.serving() == ServingState::Standby);
    }

    #[test]
    fn no_change_begins_before_the_storage_has_answered_what_the_last_one_has_asked() {
        let cluster = Cluster::default();
        let process = cluster.process();
        let promotion = process.promote().unwrap();
        let acquiring = promotion.transition().clone();
        drop(promotion);
        assert_eq!(process.promote().err(), Some(TransitionRefused::Busy));
        drop(acquiring);
        cluster.promote(&process);
        let releasing = process.step_down().unwrap().finish().unwrap();
        assert_eq!(process.promote().err(), Some(TransitionRefused::Busy));
        let late = releasing.clone();
        drop(releasing);
        assert_eq!(process.promote().err(), Some(TransitionRefused::Busy));
        // The answer to a client that is shut out means nothing, and may never come.
        assert!(!process.lose());
        let promotion = process.promote().unwrap();
        drop(late);
        assert_eq!(process.promote().err(), Some(TransitionRefused::Busy), "the later one is under way");
        drop(promotion);
        cluster.promote(&process);
    }

    #[test]
    fn a_standby_volume_is_not_resized() {
        let cluster = Cluster::default();
        let process = cluster.process();
        let resize = || process.resize(blockmux_volume::Resize::grow(1 << 21)).map(drop);
        assert!(matches!(resize(), Err(blockmux_volume::ResizeError::NotServed)));
        cluster.promote(&process);
        assert!(!matches!(resize(), Err(blockmux_volume::ResizeError::NotServed)));
    }

    #[test]
    fn an_abandoned_promotion_does_not_succeed_and_hinders_no_other() {
        let cluster = Cluster::default();
        let process = cluster.process();
        for is_acquired in [false, true] {
            let late = process.promote().unwrap();
            assert!(late.is_drained() && late.transition().is_current());
            if is_acquired {
                late.note_acquired();
            }
            assert!(!process.abandon() && !late.transition().is_current());
            cluster.promote(&process);
            let session = user(&process, 1);
            assert_eq!(late.finish(&cluster.stored()), Err(NotPromoted::Lost));
            assert!(write(&session).is_ok(), "the other one has succeeded");
            assert!(process.abandon() && is_fenced(&session));
        }
        let late = process.promote().unwrap();
        process.abandon();
        assert_eq!(late.finish(&cluster.stored()), Err(NotPromoted::Lost));
        assert_eq!(process.serving(), ServingState::Standby);
    }

    #[test]
    fn nobody_waits_for_the_io_of_a_volume_that_was_given_up() {
        let cluster = Cluster::default();
        let process = cluster.process();
        cluster.promote(&process);
        let session = user(&process, 1);
        let _io = write(&session).unwrap();
        let leaving = process.step_down().unwrap();
        assert!(!leaving.is_drained());
        process.abandon();
        assert!(leaving.is_drained() && leaving.finish().is_none());
        let promotion = process.promote().unwrap();
        assert!(!promotion.is_drained());
        process.abandon();
        assert!(promotion.is_drained());
        assert_eq!(promotion.finish(&cluster.stored()), Err(NotPromoted::Lost));
    }

    #[test]
    fn a_late_step_down_stores_nothing_in_a_later_turn() {
        let cluster = Cluster::default();
        let process = cluster.process();
        cluster.promote(&process);
        let mut late = process.step_down().unwrap();
        process.abandon();
        cluster.promote(&process);
        // Without APTPL.
        assert_eq!(reserve(&process, false), Ok(true));
        let stored = cluster.stored();
        assert_eq!(late.store(), Err(NotStored));
        assert_eq!(cluster.stored(), stored);
        assert!(late.finish().is_none() && process.serving() == ServingState::Active);
    }

    #[test]
    fn a_promotion_does_not_end_with_a_volume_that_is_lost_again() {
        let cluster = Cluster::default();
        let process = cluster.process();
        let promotion = process.promote().unwrap();
        assert!(!process.lose(), "the client before was shut out");
        promotion.note_acquired();
        assert!(!process.lose());
        assert_eq!(promotion.finish(&cluster.stored()), Err(NotPromoted::Lost));
        assert_eq!(process.serving(), ServingState::Standby);
        let promotion = process.promote().unwrap();
        promotion.note_acquired();
        promotion.finish(&cluster.stored()).unwrap();
        let asked = process.serving_mark();
        retire(&process);
        let asked_standby = process.serving_mark();
        let promotion = process.promote().unwrap();
        promotion.note_acquired();
        for asked in [asked, asked_standby] {
            assert!(!process.lose_unless_changed(asked), "the answer is out of date");
        }
        assert_eq!(promotion.finish(&cluster.stored()), Ok(()));
        assert!(write(&user(&process, 1)).is_ok());
        assert!(process.lose_unless_changed(process.serving_mark()));
    }

    #[test]
    fn a_volume_that_is_lost_during_a_transition_is_standby() {
        let cluster = Cluster::default();
        let process = cluster.process();
        cluster.promote(&process);
        let session = user(&process, 1);
        let leaving = process.step_down().unwrap();
        assert!(process.lose() && leaving.finish().is_none());
        assert!(is_fenced(&session) && process.serving() == ServingState::Standby);
        cluster.promote(&process);
        let leaving = process.step_down().unwrap();
        assert!(process.lose());
        drop(leaving);
        assert_eq!(process.serving(), ServingState::Standby);
        let first = process.promote().unwrap();
        assert_eq!(process.promote().err(), Some(TransitionRefused::Busy));
        assert_eq!(process.step_down().err(), Some(TransitionRefused::Busy));
        drop(first);
        let damaged = StoredState { image: vec![1], ..StoredState::default() };
        let promotion = process.promote().unwrap();
        assert!(matches!(promotion.finish(&damaged), Err(NotPromoted::Image(_))));
    }

    #[test]
    fn a_volume_is_lost_if_the_storage_says_so_and_once() {
        let cluster = Cluster::default();
        let process = cluster.process();
        cluster.promote(&process);
        let weak = Arc::downgrade(&process);
        assert_eq!(VolumeState::check_ownership(&weak, || panic!("it is owned")), Ok(true));
        cluster.take();
        let mut lost = 0;
        for _ in 0..2 {
            assert_eq!(VolumeState::check_ownership(&weak, || lost += 1), Ok(false));
        }
        assert_eq!((lost, process.serving()), (1, ServingState::Standby));
    }

    #[test]
    fn a_volume_can_be_closed_while_the_storage_does_not_say_who_owns_it() {
        let cluster = Cluster::default();
        let process = cluster.process();
        cluster.promote(&process);
        cluster.take();
        let weak = Arc::downgrade(&process);
        let closed = weak.clone();
        cluster.when_asked(move || {
            drop(process);
            assert_eq!(closed.strong_count(), 0);
        });
        assert_eq!(VolumeState::check_ownership(&weak, || panic!("it is closed")), Ok(false));
    }

    #[test]
    fn a_volume_that_clients_without_sessions_use_is_not_moved() {
        let cluster = Cluster::default();
        let process = cluster.process();
        let early = SessionlessUser::new(&process, Epoch::current());
        cluster.promote(&process);
        assert_eq!(process.step_down().err(), Some(TransitionRefused::NoSessions));
        assert!(process.lose());
        let later = SessionlessUser::new(&process, Epoch::current());
        assert_eq!(process.promote().err(), Some(TransitionRefused::NoSessions));
        drop(early);
        cluster.promote(&process);
        drop(later);
        retire(&process);
    }

    #[test]
    fn the_process_that_takes_over_knows_what_is_stored_only_of_a_volume_that_is_served() {
        let cluster = Cluster::default();
        let process = cluster.process();
        assert_eq!(process.served_generations(), []);
        cluster.promote(&process);
        assert_eq!(process.served_generations(), [StateGeneration(0)]);
        assert_eq!(reserve(&process, true), Ok(true));
        assert_eq!(process.served_generations(), [cluster.stored().generation]);
        let leaving = process.step_down().unwrap();
        assert_eq!(process.served_generations(), []);
        drop(leaving);
        // It may be stored, or not.
        cluster.hang(true);
        let mut change = ReservationChange::new(&process, Epoch::current(), false);
        assert_eq!(change.poll(|_, all| all.clear(&host(1), 7)), Ok(false));
        assert_eq!(process.served_generations(), [cluster.stored().generation, StateGeneration(u64::MAX)]);
        // What it has not served is fenced there.
        let next = cluster.process();
        next.fence_handed_over();
        let disk = user(&next, 1);
        let promotion = next.promote().unwrap();
        assert!(promotion.ends_sessions() && next.fences(Epoch::HANDED_OVER));
        drop(promotion);
        assert!(is_fenced(&disk));
    }

    #[test]
    fn what_only_the_owner_may_do_ends_before_the_volume_steps_down() {
        let cluster = Cluster::default();
        let process = cluster.process();
        assert!(process.stay_active().is_none());
        cluster.promote(&process);
        let (first, second) = (process.stay_active(), process.stay_active());
        drop(first);
        assert_eq!(process.step_down().err(), Some(TransitionRefused::InUse));
        drop(second);
        let leaving = process.step_down().unwrap();
        assert!(process.stay_active().is_none() && process.is_in_transition());
        drop(leaving);
        assert!(process.stay_active().is_some() && !process.is_in_transition());
    }

    #[test]
    fn limits_hold_nothing_back_that_is_denied() {
        let cluster = Cluster::default();
        let process = cluster.process();
        let limiter = process.limiter();
        assert!(limiter.is_suspended());
        cluster.promote(&process);
        assert!(!limiter.is_suspended());
        let leaving = process.step_down().unwrap();
        assert!(limiter.is_suspended());
        drop(leaving);
        assert!(!limiter.is_suspended());
        process.lose();
        assert!(limiter.is_suspended());
    }
}
