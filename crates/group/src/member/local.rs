//! The volumes of this process: what it has activated, and what follows from the table.
//!
//! The table says what should be, this what is. Each looks at the other: [`LocalVolumes::steps`]
//! brings the process closer to the table, and [`LocalVolumes::report`] the table to the process.

use super::{Action, after, doubled};
use crate::table::{Decision, Epoch, Incarnation, Place, Table};
use std::collections::BTreeMap;
use std::time::Duration;

/// The volumes that are not idle, and those that did not start, by name.
#[derive(Default)]
pub(super) struct LocalVolumes {
    states: BTreeMap<String, LocalState>,
    failures: BTreeMap<String, Failures>,
}

/// How often a volume did not start in an epoch.
struct Failures {
    epoch: Epoch,
    count: u32,
    /// What an operator had decided then.
    decision: Option<Decision>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LocalState {
    Activating(Epoch),
    Active(Epoch),
    Deactivating(Epoch),
    /// It is idle, and is not activated before this time, nor again in the epoch in which it was
    /// active.
    Failed {
        retry_at: Duration,
        lost: Option<Epoch>,
    },
}

/// How something that was asked for a volume has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LocalEnd {
    Activated,
    Deactivated,
    /// It could not be activated, or is active no longer.
    Failed {
        now: Duration,
        /// Time until it is tried again. It doubles with each activation that fails in an epoch.
        retry: Duration,
    },
    /// Its activation could not begin. It may be tried again at a time.
    NotBegun(Duration),
}

impl LocalVolumes {
    pub(super) fn clear(&mut self) {
        self.states.clear();
        self.failures.clear();
    }

    /// An operator waits for the volume: it is tried again now.
    pub(super) fn retry(&mut self, volume: &str) {
        self.failures.remove(volume);
        if matches!(self.states.get(volume), Some(LocalState::Failed { lost: None, .. })) {
            self.states.remove(volume);
        }
    }

    /// What was asked for in an epoch has ended. Late ends of earlier epochs mean nothing.
    pub(super) fn on_end(&mut self, volume: &str, epoch: Epoch, end: LocalEnd) {
        let Some(state) = self.states.get_mut(volume) else { return };
        match (*state, end) {
            (LocalState::Activating(of), LocalEnd::Activated) if of == epoch => {
                *state = LocalState::Active(epoch);
                self.failures.remove(volume);
            }
            (LocalState::Activating(of), LocalEnd::NotBegun(retry_at)) if of == epoch => {
                *state = LocalState::Failed { retry_at, lost: None };
            }
            (LocalState::Activating(of), LocalEnd::Failed { now, retry }) if of == epoch => {
                let none = Failures { epoch, count: 0, decision: None };
                let failures = self.failures.entry(volume.to_owned()).or_insert(none);
                let retry_at = after(now, doubled(retry, failures.count, RETRY_LIMIT));
                failures.count = failures.count.saturating_add(1);
                *state = LocalState::Failed { retry_at, lost: None };
            }
            (LocalState::Active(of), LocalEnd::Failed { now, retry }) if of == epoch => {
                *state = LocalState::Failed { retry_at: after(now, retry), lost: Some(epoch) };
            }
            (LocalState::Deactivating(of), LocalEnd::Deactivated | LocalEnd::Failed { .. })
                if of == epoch =>
            {
                self.states.remove(volume);
            }
            _ => {}
        }
    }

    /// What to do now, as this table says. `may_start`: whether all clients that have to be fenced
    /// are.
    pub(super) fn steps(
        &mut self,
        table: &Table,
        own: Incarnation,
        may_start: bool,
        now: Duration,
    ) -> Vec<Action> {
        let mut steps = Vec::new();
        self.forget_failures(table);
        self.states.retain(|volume, state| {
            let LocalState::Failed { retry_at, lost } = *state else { return true };
            let is_same = lost.is_some() && table.volume(volume).map(|record| record.epoch) == lost;
            is_same || now < retry_at
        });
        for record in table.volumes() {
            let starts = record.place == Place::Starting(own) && may_start;
            if starts && !self.states.contains_key(&record.name) {
                self.states.insert(record.name.clone(), LocalState::Activating(record.epoch));
                steps.push(Action::Activate { volume: record.name.clone(), epoch: record.epoch });
            }
        }
        for (volume, state) in &mut self.states {
            let LocalState::Active(epoch) = *state else { continue };
            let record = table.volume(volume).filter(|record| record.epoch == epoch);
            let stays = record.is_some_and(|record| match record.place {
                Place::Starting(owner) | Place::Active(owner) => owner == own,
                Place::Free | Place::Leaving { .. } => false,
            });
            if !stays {
                *state = LocalState::Deactivating(epoch);
                steps.push(Action::Deactivate { volume: volume.clone(), epoch });
            }
        }
        steps
    }

    /// Forgets failures of earlier epochs, and those from before an operator has decided anew.
    fn forget_failures(&mut self, table: &Table) {
        let mut forgotten = Vec::new();
        for (volume, failures) in &mut self.failures {
            let record = table.volume(volume).filter(|record| record.epoch == failures.epoch);
            let is_same = record.is_some_and(|record| {
                *failures.decision.get_or_insert_with(|| record.decision.clone()) == record.decision
            });
            if !is_same {
                forgotten.push(volume.clone());
            }
        }
        forgotten.iter().for_each(|volume| self.retry(volume));
    }

    /// Tells the table what this process has activated, released or lost.
    pub(super) fn report(&self, known: &Table, own: Incarnation, next: &mut Table) {
        for record in known.volumes().iter().filter(|record| record.place.owner() == Some(own)) {
            let state = self.states.get(&record.name).copied();
            let is_idle = matches!(state, None | Some(LocalState::Failed { .. }));
            let is_lost =
                matches!(state, Some(LocalState::Failed { lost, .. }) if lost == Some(record.epoch));
            match record.place {
                Place::Starting(_) if is_lost => next.restart(&record.name),
                Place::Starting(_) if state == Some(LocalState::Active(record.epoch)) => {
                    next.activated(&record.name, record.epoch);
                }
                Place::Active(_) if is_idle => next.restart(&record.name),
                Place::Leaving { .. } if is_idle => next.released(&record.name),
                _ => {}
            }
        }
    }
}

/// Maximum time after which a volume that did not start is tried again.
const RETRY_LIMIT: Duration = Duration::from_secs(30);
