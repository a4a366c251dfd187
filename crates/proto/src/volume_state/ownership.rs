//! The right to serve a volume, which processes have in turns.

use super::shared_state::StoredState;
use super::transition::Transition;
use std::time::Duration;

/// Whether this process serves the I/O of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum ServingState {
    /// It does.
    #[default]
    Active,
    /// It does not any longer, but I/O may be in flight.
    Transitioning,
    /// Another process may.
    Standby,
}

impl ServingState {
    /// The state's name in SCSI's words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ServingState::Active => "active",
            ServingState::Transitioning => "transitioning",
            ServingState::Standby => "standby",
        }
    }

    pub(super) fn of_number(number: u8) -> ServingState {
        match number {
            0 => ServingState::Active,
            1 => ServingState::Transitioning,
            _ => ServingState::Standby,
        }
    }
}

/// Why the right to serve a volume was not acquired.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct NotAcquired {
    /// The reason, and what to do.
    pub error: String,
    /// The storage has not confirmed that this process does not have the right: no other one can
    /// acquire it unless it takes it.
    pub may_own: bool,
}

/// Whether this process has the right to serve a volume, or why the storage does not say it. The
/// call may block for ever.
pub type OwnershipQuestion = Box<dyn FnOnce() -> Result<bool, String> + Send>;

/// The right to serve a volume, which one process has at a time. The calls may block for ever. One
/// that changes the right has a clone of the transition until the storage has answered, and undoes
/// what succeeds after it was given up.
pub trait Ownership: Send + Sync {
    /// Acquires it; with `take`, from the process that has it, whose later I/O fails. Then the
    /// volume and its [`SharedState`](super::SharedState) can be used. Returns what was stored when
    /// no other process could store any longer.
    ///
    /// # Errors
    /// If another process has it, or the storage refuses it.
    fn acquire(&self, take: bool, transition: &Transition) -> Result<StoredState, NotAcquired>;

    /// Asks the storage whether this process has it. The question keeps nothing of the volume but
    /// what it asks with: if there is no answer, the volume can be closed nevertheless.
    fn question(&self) -> OwnershipQuestion;

    /// Whether this process has it, as the storage says now.
    ///
    /// # Errors
    /// If the storage does not say it.
    fn is_held(&self) -> Result<bool, String> {
        self.question()()
    }

    /// A client was refused because of the reservations, which are out of date if another process
    /// has the right by now: has the storage asked in the background, unless it was a moment ago.
    /// It does not block.
    fn recheck(&self);

    /// Gives it up. All completed writes are stable then.
    ///
    /// # Errors
    /// If the storage refuses that. Whether this process still has it is unknown then.
    fn release(&self, transition: &Transition) -> Result<(), String>;
}

/// Time for which a volume is [`ServingState::Transitioning`] at most, in whole seconds below 256:
/// I/O in flight ends, and reservations are stored.
pub const MAX_TRANSITION: Duration = Duration::from_secs(60);
