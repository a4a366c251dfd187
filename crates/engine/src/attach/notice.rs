//! A notification of something that happens once, which is also given to those who ask afterwards.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Something that happens once, as that a disk is removed, and what is to be done then.
#[derive(Default)]
pub(super) struct Notice(Mutex<NoticeState>);

#[derive(Default)]
struct NoticeState {
    is_given: bool,
    act: Option<Box<dyn FnOnce() + Send>>,
}

impl Notice {
    /// It has happened.
    pub(super) fn give(&self) {
        let mut state = self.lock();
        state.is_given = true;
        let act = state.act.take();
        // It may take long, so the lock is not held.
        drop(state);
        if let Some(act) = act {
            act();
        }
    }

    /// Whether it has happened.
    pub(super) fn is_given(&self) -> bool {
        self.lock().is_given
    }

    /// Calls `act` once it has happened, instead of what was to be called before.
    pub(super) fn on_given(&self, act: Box<dyn FnOnce() + Send>) {
        let mut state = self.lock();
        if state.is_given {
            drop(state);
            act();
        } else {
            state.act = Some(act);
        }
    }

    fn lock(&self) -> MutexGuard<'_, NoticeState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn the_last_that_asked_is_told_once_and_one_that_asks_afterwards_at_once() {
        let told = Arc::new([const { AtomicU32::new(0) }; 3]);
        let tell = |nth: usize| {
            let told = told.clone();
            Box::new(move || told[nth].store(told[nth].load(Ordering::Relaxed) + 1, Ordering::Relaxed))
        };
        let notice = Notice::default();
        notice.on_given(tell(0));
        notice.on_given(tell(1));
        assert!(!notice.is_given());
        notice.give();
        notice.give();
        assert!(notice.is_given());
        notice.on_given(tell(2));
        assert_eq!(told.each_ref().map(|times| times.load(Ordering::Relaxed)), [0, 1, 1]);
    }
}
