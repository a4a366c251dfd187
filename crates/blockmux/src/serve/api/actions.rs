//! Requests that change something. Each is an action with an address of its own while it goes on
//! and for some time after, and a thread of its own, as it may wait for a disk.

use crate::api::{ApiError, ErrorCode};
use crate::ctl::{ActionState, ActionStatus, Answer};
use jiff::Timestamp;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The actions that go on, and the last that ended.
#[derive(Clone, Default)]
pub(super) struct Actions(Arc<Mutex<Table>>);

#[derive(Default)]
struct Table {
    last_id: u64,
    /// Oldest first.
    all: VecDeque<ActionStatus>,
    running: usize,
}

/// An action that goes on; where it is dropped without an answer, it has failed.
pub(super) struct RunningAction {
    actions: Actions,
    id: u64,
    is_over: bool,
}

impl Actions {
    /// Begins an action.
    ///
    /// # Errors
    /// If too many go on.
    pub(super) fn begin(&self, action: String) -> Result<RunningAction, ApiError> {
        let mut table = self.lock();
        if table.running >= MOST_RUNNING {
            let text = format!("{MOST_RUNNING} actions are not over yet; try again when some are");
            return Err(ApiError::new(ErrorCode::Busy, text));
        }
        table.running += 1;
        table.last_id += 1;
        let id = table.last_id;
        if table.all.len() >= MOST_KEPT {
            let oldest = table.all.iter().position(|status| status.state != ActionState::Running);
            oldest.and_then(|oldest| table.all.remove(oldest));
        }
        let begun = format!("{:.0}", Timestamp::now());
        let state = ActionState::Running;
        table.all.push_back(ActionStatus {
            id,
            action,
            state,
            progress: None,
            begun,
            result: None,
            error: None,
        });
        Ok(RunningAction { actions: self.clone(), id, is_over: false })
    }

    /// All that are known, the oldest first.
    pub(super) fn list(&self) -> Vec<ActionStatus> {
        self.lock().all.iter().cloned().collect()
    }

    /// One of them, unless it has been forgotten.
    pub(super) fn get(&self, id: u64) -> Option<ActionStatus> {
        self.lock().all.iter().find(|status| status.id == id).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunningAction {
    /// Its number.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Says how far it is.
    pub(super) fn say(&self, progress: String) {
        self.update(|status| status.progress = Some(progress));
    }

    /// Ends it.
    pub(super) fn end(mut self, answer: &Answer) {
        self.is_over = true;
        self.update(|status| match answer {
            Answer::Failed(error) => {
                (status.state, status.error) = (ActionState::Failed, Some(error.clone()));
            }
            done => (status.state, status.result) = (ActionState::Done, Some(done.json())),
        });
    }

    fn update(&self, update: impl FnOnce(&mut ActionStatus)) {
        let mut table = self.actions.lock();
        if let Some(status) = table.all.iter_mut().find(|status| status.id == self.id) {
            update(status);
        }
    }
}

impl Drop for RunningAction {
    fn drop(&mut self) {
        if !self.is_over {
            self.update(|status| {
                let error = ApiError::failed("it ended without an answer; the daemon's log says why");
                (status.state, status.error) = (ActionState::Failed, Some(error));
            });
        }
        self.actions.lock().running -= 1;
    }
}

/// Below the number of threads, so that requests which only look are answered meanwhile.
const MOST_RUNNING: usize = 32;
/// Actions that are kept, those that go on among them.
const MOST_KEPT: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_actions_are_kept_and_those_that_go_on() {
        let actions = Actions::default();
        let first = actions.begin("first".to_owned()).unwrap();
        first.say("waiting".to_owned());
        for number in 0..MOST_KEPT {
            actions.begin(number.to_string()).unwrap().end(&Answer::Attached { number: 7 });
        }
        let all = actions.list();
        assert_eq!((all.len(), all[0].id, all[1].action.as_str()), (MOST_KEPT, first.id(), "1"));
        assert_eq!((all[0].state, all[0].progress.as_deref()), (ActionState::Running, Some("waiting")));
        assert_eq!(all[1].result, Some(serde_json::json!({ "number": 7 })));
        assert_eq!(actions.get(2), None, "forgotten");
        let id = first.id();
        drop(first);
        assert_eq!(actions.get(id).unwrap().state, ActionState::Failed);
    }

    #[test]
    fn only_so_many_go_on_at_a_time() {
        let actions = Actions::default();
        let mut all: Vec<_> = (0..MOST_RUNNING).map(|_| actions.begin(String::new()).unwrap()).collect();
        assert_eq!(actions.begin(String::new()).err().unwrap().code, ErrorCode::Busy);
        all.pop().unwrap().end(&Answer::Done);
        actions.begin(String::new()).unwrap().end(&Answer::Done);
    }
}
