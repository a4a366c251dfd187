//! Changes of the serving state: one at a time, also while the storage has not answered.

use super::{Table, VolumeState};
use std::sync::{Arc, Weak};

/// A change of the serving state that is under way: another one begins when all clones are dropped.
/// A call of the storage has one until it has returned, which may be after its caller has given it
/// up.
#[derive(Clone)]
pub struct Transition(Arc<TransitionEnd>);

struct TransitionEnd {
    /// A call that does not return does not keep the volume.
    volume_state: Weak<VolumeState>,
    number: u64,
}

/// The change of the serving state that is under way.
pub(super) struct CurrentTransition {
    number: u64,
    pub(super) stage: Stage,
}

/// How far a change is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// A promotion until the volume is owned: that it was lost before says nothing new.
    Promoting,
    /// A promotion of a volume that is owned.
    Acquired,
    SteppingDown,
    /// The ownership is given up.
    Releasing,
    /// Nobody waits for what the storage has been asked.
    GivenUp,
}

impl Transition {
    pub(super) fn begin(volume_state: &Arc<VolumeState>, table: &mut Table, stage: Stage) -> Transition {
        table.transitions = table.transitions.wrapping_add(1);
        let number = table.transitions;
        table.transition = Some(CurrentTransition { number, stage });
        Transition(Arc::new(TransitionEnd { volume_state: Arc::downgrade(volume_state), number }))
    }

    /// Its place among the changes of the volume: a later one has a higher number.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// Whether it is still under way: not once the volume was lost, or the process has given up the
    /// client of the storage that it belongs to. What it does then concerns nobody any longer.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let Some(volume_state) = self.0.volume_state.upgrade() else { return false };
        self.is_current_in(&volume_state.lock())
    }

    pub(super) fn is_current_in(&self, table: &Table) -> bool {
        table.transition.as_ref().is_some_and(|current| current.number == self.0.number)
    }

    /// Notes how far it is, unless another one is under way.
    pub(super) fn enter(&self, table: &mut Table, stage: Stage) {
        if let Some(current) = table.transition.as_mut().filter(|current| current.number == self.0.number) {
            current.stage = stage;
        }
    }
}

impl Drop for TransitionEnd {
    fn drop(&mut self) {
        let Some(volume_state) = self.volume_state.upgrade() else { return };
        let mut table = volume_state.lock();
        if table.transition.as_ref().is_some_and(|current| current.number == self.number) {
            table.transition = None;
        }
    }
}
