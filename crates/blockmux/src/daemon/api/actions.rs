//! Actions: API requests that change something. Each runs on its own thread, because it may wait
//! for a disk, and has a URL while it runs and for some time after.

use crate::api::action::{ActionState, ActionStatus};
use crate::api::request::Answer;
use crate::api::{ApiError, ErrorCode};
use blockmux_volume::spec::with_hidden_secrets;
use jiff::Timestamp;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The running actions and the most recent finished ones.
#[derive(Clone, Default)]
pub(super) struct Actions(Arc<Mutex<ActionTable>>);

#[derive(Default)]
struct ActionTable {
    last_id: u64,
    /// Oldest first.
    all: VecDeque<ActionStatus>,
    /// The latest results that are too long to be stored, by the number of the action, so that the
    /// client that waits for one gets it.
    long_results: VecDeque<(u64, Value)>,
    running: usize,
}

/// A running action. If it is dropped without [`RunningAction::end`], the action has failed.
pub(super) struct RunningAction {
    actions: Actions,
    id: u64,
    is_over: bool,
}

impl Actions {
    /// Begins an action.
    ///
    /// # Errors
    /// If [`MAX_RUNNING`] actions are running.
    pub(super) fn begin(&self, action: String) -> Result<RunningAction, ApiError> {
        let mut table = self.lock();
        if table.running >= MAX_RUNNING {
            let text = format!("{MAX_RUNNING} actions are already running; try again later");
            return Err(ApiError::new(ErrorCode::Busy, text));
        }
        table.running += 1;
        table.last_id += 1;
        let id = table.last_id;
        if table.all.len() >= MAX_KNOWN {
            let oldest = table.all.iter().position(|status| status.state != ActionState::Running);
            oldest.and_then(|oldest| table.all.remove(oldest));
        }
        // A name may be a URL by mistake.
        let action = bounded(with_hidden_secrets(&action));
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

    /// All known actions, oldest first.
    pub(super) fn list(&self) -> Vec<ActionStatus> {
        self.lock().all.iter().cloned().collect()
    }

    /// The action with this number; `None` if there is none, or it has been discarded. A long
    /// result is whole unless others have followed it.
    pub(super) fn get(&self, id: u64) -> Option<ActionStatus> {
        let table = self.lock();
        let mut status = table.all.iter().find(|status| status.id == id).cloned()?;
        if let Some((_, result)) = table.long_results.iter().find(|(of, _)| *of == id) {
            status.result = Some(result.clone());
        }
        Some(status)
    }

    fn lock(&self) -> MutexGuard<'_, ActionTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunningAction {
    /// The number of the action.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Sets the progress text.
    pub(super) fn set_progress(&self, progress: String) {
        let progress = bounded(progress);
        self.update(|status| status.progress = Some(progress));
    }

    /// Ends the action with its result.
    pub(super) fn end(mut self, answer: &Answer) {
        self.is_over = true;
        if let Answer::Failed(ApiError { code, message, hint }) = answer {
            let (message, hint) = (bounded(message.clone()), hint.clone().map(bounded));
            let error = ApiError { code: *code, message, hint };
            return self.update(|status| (status.state, status.error) = (ActionState::Failed, Some(error)));
        }
        let result = answer.json();
        let stored = match note_for_long(&result) {
            None => result,
            Some(note) => {
                let results = &mut self.actions.lock().long_results;
                if results.len() >= MAX_LONG_RESULTS {
                    results.pop_front();
                }
                results.push_back((self.id, result));
                note
            }
        };
        self.update(|status| (status.state, status.result) = (ActionState::Done, Some(stored)));
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
                let error =
                    ApiError::failed("the action ended without a result; the daemon's log has the reason");
                (status.state, status.error) = (ActionState::Failed, Some(error));
            });
        }
        self.actions.lock().running -= 1;
    }
}

/// The beginning of a text, of which an action keeps at most [`MAX_TEXT`] bytes.
fn bounded(mut text: String) -> String {
    if text.len() > MAX_TEXT {
        let cut = (0..=MAX_TEXT).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        text.truncate(cut);
        text.push_str("...");
        text.shrink_to_fit();
    }
    text
}

/// The note in the place of a result of more than [`MAX_RESULT`] bytes.
fn note_for_long(result: &Value) -> Option<Value> {
    let len = result.to_string().len();
    let note = || {
        format!(
            "the result of {len} bytes is too long to be kept; a request without `respond-async` returns it"
        )
    };
    (len > MAX_RESULT).then(|| json!({ "note": note() }))
}

/// Maximum length of each of the texts of an action, in bytes: what it does, its progress, the
/// error and its hint. Together they have less than 4 KiB.
const MAX_TEXT: usize = 900;
/// Maximum length of a result as JSON, in bytes. An action that has a result has no error.
const MAX_RESULT: usize = 2 * MAX_TEXT;
/// Maximum number of long results.
const MAX_LONG_RESULTS: usize = 8;
/// Maximum number of running actions. It is below the number of threads, so that requests which
/// only read are still served.
const MAX_RUNNING: usize = 32;
/// Maximum number of known actions, including running ones.
const MAX_KNOWN: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_and_recent_actions_are_kept() {
        let actions = Actions::default();
        let first = actions.begin("first".to_owned()).unwrap();
        first.set_progress("waiting".to_owned());
        for number in 0..MAX_KNOWN {
            actions.begin(number.to_string()).unwrap().end(&Answer::Attached { number: 7 });
        }
        let all = actions.list();
        assert_eq!((all.len(), all[0].id, all[1].action.as_str()), (MAX_KNOWN, first.id(), "1"));
        assert_eq!((all[0].state, all[0].progress.as_deref()), (ActionState::Running, Some("waiting")));
        assert_eq!(all[1].result, Some(serde_json::json!({ "number": 7 })));
        assert_eq!(actions.get(2), None, "discarded");
        let id = first.id();
        drop(first);
        assert_eq!(actions.get(id).unwrap().state, ActionState::Failed);
    }

    #[test]
    fn the_number_of_running_actions_is_limited() {
        let actions = Actions::default();
        let mut all: Vec<_> = (0..MAX_RUNNING).map(|_| actions.begin(String::new()).unwrap()).collect();
        assert_eq!(actions.begin(String::new()).err().unwrap().code, ErrorCode::Busy);
        all.pop().unwrap().end(&Answer::Done);
        actions.begin(String::new()).unwrap().end(&Answer::Done);
    }

    #[test]
    fn a_long_result_is_whole_for_the_client_that_waits_for_it() {
        let actions = Actions::default();
        let long = |nth: usize| Answer::Message(format!("{nth}{}", "x".repeat(1 << 20)));
        let ids: Vec<u64> = (0..=MAX_LONG_RESULTS)
            .map(|nth| {
                let running = actions.begin(String::new()).unwrap();
                let id = running.id();
                running.end(&long(nth));
                id
            })
            .collect();
        let result = |nth: usize| actions.get(ids[nth]).unwrap().result.unwrap();
        assert!((1..=MAX_LONG_RESULTS).all(|nth| result(nth) == long(nth).json()));
        assert!(result(0)["note"].is_string());
    }

    #[test]
    fn an_action_keeps_at_most_4_kib_of_text() {
        let actions = Actions::default();
        let long = "\u{e9}".repeat(1 << 20);
        for answer in [
            Answer::Message(long.clone()),
            Answer::Failed(ApiError::failed(format!("{long}; {long}"))),
            Answer::Levels([(long.clone(), long.clone())].into()),
        ] {
            let running = actions.begin(long.clone()).unwrap();
            running.set_progress(long.clone());
            running.end(&answer);
        }
        for status in actions.list() {
            let kept = serde_json::to_string(&status).unwrap();
            assert!(kept.len() < 4096, "{} bytes", kept.len());
            assert!(status.action.starts_with("\u{e9}\u{e9}") && status.action.ends_with("..."));
        }
        actions.begin("short".to_owned()).unwrap().end(&Answer::Attached { number: 7 });
        assert_eq!(actions.list()[3].result, Some(json!({ "number": 7 })));
    }
}
