//! Changes of the reservations by commands.
//!
//! ```text
//!   evaluate ──▶ propose ──▶ commit ──▶ in effect ──▶ users notified ──▶ command answered
//!      ▲                       │
//!      └──── reload ◀── stale ─┘
//! ```
//! A change that must survive a restart is stored first and takes effect afterwards (decision 92).
//! So is every change of a volume that processes serve in turns, also if what is stored does not
//! change by it: only the storage knows whether another process has the volume (decision 122).
//! What tells an initiator the reservations is confirmed by such a change of nothing, because it
//! may decide by them who is shut out. One is stored at a time, and others wait, so no answer, not
//! even a refusal, depends on a change that a crash may undo. The next user of the table puts a
//! committed change into effect, because the command that has made it may have ended.

use super::epoch::Epoch;
use super::image::{from_image, to_image};
use super::ownership::ServingState;
use super::reservations::{Notice, Notices, Registrant, Reservations};
use super::shared_state::{Commit, SharedState, StateGeneration, StoredState};
use super::transition::Transition;
use super::{Change, Table, VolumeState};
use std::sync::{Arc, OnceLock};

/// A change of a volume's reservations by one command.
pub(crate) struct ReservationChange {
    volume_state: Arc<VolumeState>,
    aborts: bool,
    maker: ChangeMaker,
    /// The outcome of the command's proposal, once it is known.
    proposal: Option<Arc<OnceLock<ProposalOutcome>>>,
}

/// On whose behalf a change is made.
enum ChangeMaker {
    /// A session that began in this epoch.
    Session(Epoch),
    /// The volume becomes standby. Once that was given up, the volume may be active again, and the
    /// change is not one of that turn.
    StepDown(Transition),
}

/// Why a change was not made; it has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotChanged<E> {
    /// The reservations do not permit it.
    Refused(E),
    /// It cannot be stored.
    NotStored,
    /// Another process serves the volume.
    Standby,
    /// The session is fenced: what it has sent may be out of date.
    Fenced,
}

/// A change that is being stored.
pub(super) struct ProposedChange {
    generation: StateGeneration,
    reservations: Reservations,
    notices: Notices,
    aborts: bool,
    outcome: Arc<OnceLock<ProposalOutcome>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProposalOutcome {
    InEffect,
    Stale,
    NotStored,
}

impl ReservationChange {
    /// A change that is not made yet, of a session that began in `epoch`. With `aborts`, the tasks
    /// of preempted registrants are aborted.
    pub(crate) fn new(volume_state: &Arc<VolumeState>, epoch: Epoch, aborts: bool) -> ReservationChange {
        let volume_state = volume_state.clone();
        ReservationChange { volume_state, aborts, maker: ChangeMaker::Session(epoch), proposal: None }
    }

    /// A change of nothing, by which the storage says whether another process has the volume; see
    /// [`ReservationChange::confirm`]. `None` if no other one can have it.
    pub(crate) fn confirmation(volume_state: &Arc<VolumeState>, epoch: Epoch) -> Option<ReservationChange> {
        volume_state.ownership.as_ref().map(|_| ReservationChange::new(volume_state, epoch, false))
    }

    /// Changes nothing: call it until it returns true. Then the storage has said since the first
    /// call that this process has the volume, so what it knows of the reservations is not out of
    /// date. It is not asked if `check` fails.
    ///
    /// # Errors
    /// If `check` fails, or another process has the volume, or that is not known.
    pub(crate) fn confirm<E>(
        &mut self,
        check: impl FnOnce(&Table) -> Result<(), E>,
    ) -> Result<bool, NotChanged<E>> {
        self.poll(|table, _| check(table).map(|()| Notices::new()))
    }

    /// A change that is made while the volume becomes standby, when no others are.
    pub(super) fn last(volume_state: &Arc<VolumeState>, step_down: &Transition) -> ReservationChange {
        let (volume_state, maker) = (volume_state.clone(), ChangeMaker::StepDown(step_down.clone()));
        ReservationChange { volume_state, aborts: false, maker, proposal: None }
    }

    /// Makes the change: call it, always with the same `change`, until it returns true. Then the
    /// change is in effect, the users are notified, and it is stored if it must survive a restart.
    ///
    /// # Errors
    /// If `change` fails, or the change cannot be stored.
    pub(crate) fn poll<E>(
        &mut self,
        change: impl FnOnce(&Table, &mut Reservations) -> Result<Notices, E>,
    ) -> Result<bool, NotChanged<E>> {
        let (volume_state, aborts) = (&self.volume_state, self.aborts);
        let mut table = volume_state.lock();
        if self.proposal.is_none() {
            match (table.serving, &self.maker) {
                (ServingState::Active, ChangeMaker::Session(epoch)) if volume_state.fences(*epoch) => {
                    return Err(NotChanged::Fenced);
                }
                (ServingState::Active, ChangeMaker::Session(_)) => {}
                (_, ChangeMaker::StepDown(step_down)) if step_down.is_current_in(&table) => {}
                _ => return Err(NotChanged::Standby),
            }
            if table.proposed.is_some() {
                return Ok(false);
            }
            let mut reservations = table.reservations.clone();
            let notices = match change(&table, &mut reservations) {
                Ok(notices) => notices,
                Err(refused) => {
                    // It may start a thread.
                    drop(table);
                    volume_state.note_conflict();
                    return Err(NotChanged::Refused(refused));
                }
            };
            // An owner that is shut out may not know it: the storage refuses what it stores.
            let must_store =
                volume_state.ownership.is_some() || table.reservations.persists || reservations.persists;
            let Some(shared) = volume_state.shared_state.as_ref().filter(|_| must_store) else {
                volume_state.put_into_effect(&mut table, reservations, &notices, aborts);
                return Ok(true);
            };
            self.proposal = Some(table.propose(&**shared, reservations, notices, aborts));
            volume_state.settle(&mut table);
        }
        match self.proposal.as_ref().and_then(|proposal| proposal.get()) {
            None => Ok(false),
            Some(ProposalOutcome::InEffect) => Ok(true),
            // It was lost meanwhile, perhaps to the process that has come before.
            Some(ProposalOutcome::NotStored) if table.serving == ServingState::Standby => {
                Err(NotChanged::Standby)
            }
            Some(ProposalOutcome::NotStored) => Err(NotChanged::NotStored),
            Some(ProposalOutcome::Stale) => {
                self.proposal = None;
                Ok(false)
            }
        }
    }
}

impl ProposedChange {
    /// Identifies what is being stored.
    pub(super) fn generation(&self) -> StateGeneration {
        self.generation
    }

    /// Tells the command what has become of its change.
    pub(super) fn end(self, outcome: ProposalOutcome) {
        // Nothing else sets it.
        let _ = self.outcome.set(outcome);
    }
}

impl Table {
    /// Starts to store `reservations`.
    fn propose(
        &mut self,
        shared: &dyn SharedState,
        reservations: Reservations,
        notices: Notices,
        aborts: bool,
    ) -> Arc<OnceLock<ProposalOutcome>> {
        let generation = shared.propose(self.stored, &to_image(&reservations));
        let outcome: Arc<OnceLock<ProposalOutcome>> = Arc::default();
        let proposed = ProposedChange { generation, reservations, notices, aborts, outcome };
        self.proposed.insert(proposed).outcome.clone()
    }

    /// The reservations with the change that is being stored.
    pub(super) fn newest(&self) -> &Reservations {
        self.proposed.as_ref().map_or(&self.reservations, |proposed| &proposed.reservations)
    }
}

impl VolumeState {
    /// Puts the proposed change into effect if it is committed, and drops it if it is not.
    pub(super) fn settle(&self, table: &mut Table) {
        let (Some(shared), Some(proposed)) = (&self.shared_state, &table.proposed) else { return };
        let Some(commit) = shared.outcome(proposed.generation) else { return };
        let Some(proposed) = table.proposed.take() else { return };
        let outcome = match commit {
            Commit::Committed => {
                table.stored = proposed.generation;
                let now = proposed.reservations.clone();
                self.put_into_effect(table, now, &proposed.notices, proposed.aborts);
                ProposalOutcome::InEffect
            }
            Commit::Stale(stored) => self.reload(table, &stored),
            Commit::Failed => ProposalOutcome::NotStored,
        };
        proposed.end(outcome);
    }

    /// Continues with what another process has stored, and notifies those whose registrations it
    /// has removed.
    #[cold]
    fn reload(&self, table: &mut Table, stored: &StoredState) -> ProposalOutcome {
        let Ok(now) = from_image(&stored.image) else { return ProposalOutcome::NotStored };
        self.replace(table, now, stored.generation);
        ProposalOutcome::Stale
    }

    /// Replaces the reservations by those of another process, of this generation.
    pub(super) fn replace(&self, table: &mut Table, now: Reservations, stored: StateGeneration) {
        let before = &table.reservations;
        let gone = before.registrations.iter().filter(|registration| now.key_of(&registration.who).is_none());
        let notices: Notices =
            gone.map(|registration| (registration.who.clone(), Notice::RegistrationsPreempted)).collect();
        let generation = before.generation.wrapping_add(1);
        table.stored = stored;
        self.put_into_effect(table, Reservations { generation, ..now }, &notices, false);
    }

    fn put_into_effect(&self, table: &mut Table, now: Reservations, notices: &Notices, aborts: bool) {
        table.reservations = now;
        self.notify(table, &Change::Reservations { notices, aborts });
    }

    /// Gives a host that may use the volume the record that an earlier version wrote for it. Nobody
    /// waits for the storage: without it, the next start adopts the record again.
    pub(crate) fn adopt_record(&self, who: &Registrant) {
        let table = &mut *self.lock();
        if table.serving != ServingState::Active || !table.reservations.adopt_record_without_nqn(who) {
            return;
        }
        if let Some(proposed) = &mut table.proposed {
            proposed.reservations.adopt_record_without_nqn(who);
        } else if let Some(shared) = self.shared_state.as_ref().filter(|_| table.reservations.persists) {
            table.propose(&**shared, table.reservations.clone(), Notices::new(), false);
        }
        self.notify(table, &Change::Reservations { notices: &Notices::new(), aborts: false });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume_state::{Holder, Preempt, Register, ReservationRefused, Watcher};
    use blockmux_volume::MemVolume;
    use blockmux_wire::scsi::reservation::ScsiReservationType;
    use std::sync::{Mutex, Weak};

    /// A store that decides the oldest proposal when the test says so.
    #[derive(Default)]
    struct Disk(Mutex<DiskState>);

    #[derive(Default)]
    struct DiskState {
        stored: StoredState,
        last: u64,
        /// Each with the expected generation.
        undecided: Vec<(StateGeneration, StoredState)>,
        decided: Vec<(StateGeneration, Commit)>,
    }

    impl SharedState for Disk {
        fn propose(&self, expected: StateGeneration, image: &[u8]) -> StateGeneration {
            let mut disk = self.0.lock().unwrap();
            disk.last = disk.last.saturating_add(1);
            let generation = StateGeneration(disk.last);
            disk.undecided.push((expected, StoredState { generation, image: image.to_vec() }));
            generation
        }

        fn outcome(&self, proposal: StateGeneration) -> Option<Commit> {
            let disk = self.0.lock().unwrap();
            let found = disk.decided.iter().find(|(generation, _)| *generation == proposal);
            found.map(|(_, commit)| commit.clone())
        }
    }

    impl Disk {
        fn decide(&self, works: bool) {
            let mut disk = self.0.lock().unwrap();
            if disk.undecided.is_empty() {
                return;
            }
            let (expected, proposed) = disk.undecided.remove(0);
            let generation = proposed.generation;
            let commit = match disk.stored.generation {
                current if current != expected => Commit::Stale(disk.stored.clone()),
                _ if works => Commit::Committed,
                _ => Commit::Failed,
            };
            if commit == Commit::Committed {
                disk.stored = proposed;
            }
            disk.decided.push((generation, commit));
        }

        fn stored(&self) -> StoredState {
            self.0.lock().unwrap().stored.clone()
        }
    }

    fn process(disk: &Arc<Disk>) -> Arc<VolumeState> {
        VolumeState::with_shared_state(Arc::new(MemVolume::new(1 << 20)), disk.clone(), &disk.stored())
            .unwrap()
    }

    fn host(id: u8) -> Registrant {
        Registrant::of_nvme_host("nqn.2026-11.t:h", [id; 16])
    }

    type Outcome = Result<Notices, ReservationRefused>;

    fn register(all: &mut Reservations, id: u8, new_key: u64, persists: bool) -> Outcome {
        let who = host(id);
        let registrants = std::slice::from_ref(&who);
        all.register(&who, &Register { key: None, new_key, registrants, persists })
    }

    fn reserve(all: &mut Reservations, id: u8, key: u64) -> Outcome {
        all.reserve(&host(id), key, ScsiReservationType::WRITE_EXCLUSIVE).map(|()| Notices::new())
    }

    fn poll(
        change: &mut ReservationChange,
        how: impl FnOnce(&mut Reservations) -> Outcome,
    ) -> Result<bool, NotChanged<ReservationRefused>> {
        change.poll(|_, reservations| how(reservations))
    }

    fn change_of(volume_state: &Arc<VolumeState>) -> ReservationChange {
        ReservationChange::new(volume_state, Epoch::current(), false)
    }

    /// Changes of two hosts, all of which succeed in this order.
    const SCRIPT: [fn(&mut Reservations) -> Outcome; 8] = [
        |all| register(all, 1, 1, true),
        |all| register(all, 2, 2, true),
        |all| reserve(all, 1, 1),
        |all| {
            let what = Preempt { key: 2, victim_key: 1, kind: ScsiReservationType::EXCLUSIVE_ACCESS };
            all.preempt(&host(2), &what)
        },
        |all| register(all, 1, 3, true),
        |all| register(all, 2, 0, true),
        |all| register(all, 1, 4, false),
        |all| register(all, 2, 5, true),
    ];

    #[test]
    fn a_crash_at_any_step_of_any_change_loses_no_acknowledged_one() {
        for crash_at in 0.. {
            let disk = Arc::new(Disk::default());
            let volume_state = process(&disk);
            let (mut acknowledged, mut in_flight) = (Reservations::default(), None);
            let mut steps = 0;
            'script: for how in SCRIPT {
                let mut change = change_of(&volume_state);
                loop {
                    if steps >= crash_at {
                        let mut with_it = acknowledged.clone();
                        how(&mut with_it).unwrap();
                        in_flight = Some(to_image(&with_it));
                        break 'script;
                    }
                    steps += 1;
                    // The last step of a change is its acknowledgement.
                    if steps % 2 == 0 {
                        disk.decide(true);
                    } else if poll(&mut change, how) == Ok(true) {
                        how(&mut acknowledged).unwrap();
                        break;
                    }
                    let in_effect = volume_state.with_table(|table| to_image(&table.reservations));
                    assert_eq!(in_effect, disk.stored().image, "what is in effect is stored");
                }
                steps += steps % 2;
            }
            drop(volume_state);
            let restored = process(&disk).with_table(|table| to_image(&table.reservations));
            let is_known = restored == to_image(&acknowledged);
            assert!(is_known || Some(restored) == in_flight, "step {crash_at}");
            if in_flight.is_none() {
                assert!(is_known && crash_at > 2 * SCRIPT.len());
                break;
            }
        }
    }

    #[derive(Default)]
    struct NoticeLog(Mutex<Notices>);

    impl Watcher for NoticeLog {
        fn on_change(&self, change: &Change<'_>) {
            if let Change::Reservations { notices, .. } = change {
                self.0.lock().unwrap().extend(notices.iter().cloned());
            }
        }
    }

    #[test]
    fn a_change_from_a_stale_state_is_made_again_from_the_stored_one() {
        let disk = Arc::new(Disk::default());
        let (one, other) = (process(&disk), process(&disk));
        let commit = |volume_state, how: fn(&mut Reservations) -> Outcome| {
            let mut change = change_of(volume_state);
            for _ in 0..4 {
                match poll(&mut change, how) {
                    Ok(false) => disk.decide(true),
                    outcome => return outcome,
                }
            }
            panic!("it goes on")
        };
        assert_eq!(commit(&one, |all| register(all, 1, 1, true)), Ok(true));
        assert_eq!(commit(&other, |all| register(all, 2, 2, true)), Ok(true));
        let keys = |volume_state: &VolumeState| {
            let keys = |all: &Reservations| all.registrations.iter().map(|one| one.key).collect::<Vec<_>>();
            volume_state.with_table(|table| keys(&table.reservations))
        };
        assert_eq!((keys(&one), keys(&other)), (vec![1], vec![1, 2]));
        assert_eq!(commit(&other, |all| reserve(all, 2, 2)), Ok(true));
        // The other reservation is found only now.
        let refused = Err(NotChanged::Refused(ReservationRefused::Conflict));
        assert_eq!((commit(&one, |all| reserve(all, 1, 1)), keys(&one)), (refused, vec![1, 2]));
        let seen = Arc::new(NoticeLog::default());
        let watcher: Weak<NoticeLog> = Arc::downgrade(&seen);
        one.watch(watcher);
        assert_eq!(commit(&other, |all| register(all, 1, 0, true)), Ok(true));
        assert_eq!(commit(&one, |all| register(all, 3, 3, true)), Ok(true));
        assert_eq!(*seen.0.lock().unwrap(), [(host(1), Notice::RegistrationsPreempted)]);
        assert_eq!(keys(&one), [2, 3]);
    }

    #[test]
    fn one_change_is_stored_at_a_time_and_takes_effect_without_its_command() {
        let disk = Arc::new(Disk::default());
        let volume_state = process(&disk);
        let (mut first, mut second) = (change_of(&volume_state), change_of(&volume_state));
        let mut poll_first = || poll(&mut first, |all| register(all, 1, 1, true));
        let mut poll_second = || poll(&mut second, |all| reserve(all, 1, 1));
        let holder = Holder { nexus: 1, unit: 0 };
        let reserve_unit = || volume_state.reserve(holder, Epoch::current()).unwrap();
        assert_eq!((poll_first(), poll_second(), reserve_unit()), (Ok(false), Ok(false), None));
        drop(first);
        disk.decide(true);
        let summary = volume_state.reservation();
        assert_eq!((summary.registrants, reserve_unit()), (1, Some(false)));
        assert_eq!(poll_second(), Ok(false));
        disk.decide(false);
        assert_eq!(poll_second(), Err(NotChanged::NotStored));
        assert_eq!(volume_state.reservation(), summary, "nothing was changed");
    }

    #[test]
    fn a_process_that_takes_over_continues_with_a_change_that_is_being_stored() {
        let disk = Arc::new(Disk::default());
        let volume_state = process(&disk);
        let mut change = change_of(&volume_state);
        assert_eq!(poll(&mut change, |all| register(all, 1, 1, true)), Ok(false));
        let snapshot = volume_state.reservations_snapshot();
        disk.decide(true);
        let next = process(&disk);
        next.restore_reservations(&snapshot).unwrap();
        assert_eq!(next.reservation().registrants, 1);
    }
}
