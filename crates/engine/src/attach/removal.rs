//! The notification that a disk was removed, by anybody.

use std::sync::{Mutex, PoisonError};

/// Whether a disk is removed, and who is to be told.
#[derive(Default)]
pub(super) struct RemovalNotice(Mutex<NoticeState>);

#[derive(Default)]
struct NoticeState {
    is_removed: bool,
    tell: Option<Box<dyn FnOnce() + Send>>,
}

impl RemovalNotice {
    /// The disk is removed.
    pub(super) fn note(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_removed = true;
        if let Some(tell) = state.tell.take() {
            tell();
        }
    }

    /// Calls `tell` once the disk is removed.
    pub(super) fn tell(&self, tell: Box<dyn FnOnce() + Send>) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match state.is_removed {
            true => tell(),
            false => state.tell = Some(tell),
        }
    }
}
