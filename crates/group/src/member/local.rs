//! The volumes of this process: what it has activated, and what follows from the table.
//!
//! The table says what should be, this what is. Each looks at the other: [`LocalVolumes::steps`]
//! brings the process closer to the table, and [`LocalVolumes::report`] the table to the process.

use super::Action;
use crate::table::{Epoch, Incarnation, Place, Table};
use std::collections::BTreeMap;
use std::time::Duration;

/// The volumes that are not idle, by name.
#[derive(Default)]
pub(super) struct LocalVolumes(BTreeMap<String, LocalState>);

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
    /// It could not be activated, or is active no longer. It may be tried again at a time.
    Failed(Duration),
}

impl LocalVolumes {
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// What was asked for in an epoch has ended. Late ends of earlier epochs mean nothing.
    pub(super) fn on_end(&mut self, volume: &str, epoch: Epoch, end: LocalEnd) {
        let Some(state) = self.0.get_mut(volume) else { return };
        *state = match (*state, end) {
            (LocalState::Activating(of), LocalEnd::Activated) if of == epoch => LocalState::Active(epoch),
            (LocalState::Activating(of), LocalEnd::Failed(retry_at)) if of == epoch => {
                LocalState::Failed { retry_at, lost: None }
            }
            (LocalState::Active(of), LocalEnd::Failed(retry_at)) if of == epoch => {
                LocalState::Failed { retry_at, lost: Some(epoch) }
            }
            (LocalState::Deactivating(of), LocalEnd::Deactivated | LocalEnd::Failed(_)) if of == epoch => {
                self.0.remove(volume);
                return;
            }
            (state, _) => state,
        };
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
        self.0.retain(|volume, state| {
            let LocalState::Failed { retry_at, lost } = *state else { return true };
            let is_same = lost.is_some() && table.volume(volume).map(|record| record.epoch) == lost;
            is_same || now < retry_at
        });
        for record in table.volumes() {
            let starts = record.place == Place::Starting(own) && may_start;
            if starts && !self.0.contains_key(&record.name) {
                self.0.insert(record.name.clone(), LocalState::Activating(record.epoch));
                steps.push(Action::Activate { volume: record.name.clone(), epoch: record.epoch });
            }
        }
        for (volume, state) in &mut self.0 {
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

    /// Tells the table what this process has activated, released or lost.
    pub(super) fn report(&self, known: &Table, own: Incarnation, next: &mut Table) {
        for record in known.volumes().iter().filter(|record| record.place.owner() == Some(own)) {
            let state = self.0.get(&record.name).copied();
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
