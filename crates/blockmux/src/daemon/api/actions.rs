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
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time;

/// The running actions and the most recent finished ones.
#[derive(Clone)]
pub(super) struct Actions(Arc<SharedActions>);

struct SharedActions {
    table: Mutex<ActionTable>,
    /// A permit for each action that may run.
    running: Arc<Semaphore>,
    /// A permit for each request that may wait for others to end.
    waiting: Semaphore,
}

impl Default for Actions {
    fn default() -> Actions {
        let (running, waiting) = (Arc::new(Semaphore::new(MAX_RUNNING)), Semaphore::new(MAX_WAITING));
        Actions(Arc::new(SharedActions { table: Mutex::default(), running, waiting }))
    }
}

#[derive(Default)]
struct ActionTable {
    last_id: u64,
    /// Oldest first.
    all: VecDeque<ActionStatus>,
    /// The latest results that are too long to be stored, by the number of the action, so that the
    /// client that waits for one gets it.
    long_results: VecDeque<(u64, Value)>,
}

/// A running action. If it is dropped without [`RunningAction::end`], the action has failed.
pub(super) struct RunningAction {
    actions: Actions,
    /// The number of the action.
    pub(super) id: u64,
    is_over: bool,
    _permit: OwnedSemaphorePermit,
}

impl Actions {
    /// Begins an action. If [`MAX_RUNNING`] actions are running, it waits for one to end, in turn
    /// with others.
    ///
    /// # Errors
    /// If none ends within [`WAIT_LIMIT`], or [`MAX_WAITING`] requests wait already.
    pub(super) async fn begin(&self, action: String) -> Result<RunningAction, ApiError> {
        let busy = || {
            let text = format!("{MAX_RUNNING} actions are already running; try again later");
            ApiError::new(ErrorCode::Busy, text)
        };
        let running = || self.0.running.clone();
        let permit = match running().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                let _waiting = self.0.waiting.try_acquire().map_err(|_| busy())?;
                let permit = time::timeout(WAIT_LIMIT, running().acquire_owned()).await;
                permit.ok().and_then(Result::ok).ok_or_else(busy)?
            }
        };
        Ok(self.add(action, permit))
    }

    /// Adds a running action to the table.
    fn add(&self, action: String, permit: OwnedSemaphorePermit) -> RunningAction {
        let mut table = self.lock();
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
        RunningAction { actions: self.clone(), id, is_over: false, _permit: permit }
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
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunningAction {
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
/// Maximum number of requests that wait for an action to end.
const MAX_WAITING: usize = 128;
/// Time for which a request waits for an action to end.
const WAIT_LIMIT: Duration = Duration::from_secs(30);
/// Maximum number of known actions, including running ones.
const MAX_KNOWN: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::bodies::Attached;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};
    use tokio::runtime::Builder;

    /// Begins an action that need not wait.
    fn begin(actions: &Actions, action: String) -> RunningAction {
        match pin!(actions.begin(action)).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(running)) => running,
            _ => panic!("too many actions are running"),
        }
    }

    #[test]
    fn running_and_recent_actions_are_kept() {
        let actions = Actions::default();
        let first = begin(&actions, "first".to_owned());
        first.set_progress("waiting".to_owned());
        for number in 0..MAX_KNOWN {
            begin(&actions, number.to_string()).end(&Answer::Attached(Attached { number: 7 }));
        }
        let all = actions.list();
        assert_eq!((all.len(), all[0].id, all[1].action.as_str()), (MAX_KNOWN, first.id, "1"));
        assert_eq!((all[0].state, all[0].progress.as_deref()), (ActionState::Running, Some("waiting")));
        assert_eq!(all[1].result, Some(serde_json::json!({ "number": 7 })));
        assert_eq!(actions.get(2), None, "discarded");
        let id = first.id;
        drop(first);
        assert_eq!(actions.get(id).unwrap().state, ActionState::Failed);
    }

    #[test]
    fn an_action_waits_for_another_one_to_end_and_the_number_of_those_that_wait_is_limited() {
        let (actions, mut context) = (Actions::default(), Context::from_waker(Waker::noop()));
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        let _entered = runtime.enter();
        let mut all: Vec<_> = (0..MAX_RUNNING).map(|_| begin(&actions, String::new())).collect();
        let mut waiting: Vec<_> =
            (0..MAX_WAITING).map(|nth| Box::pin(actions.begin(nth.to_string()))).collect();
        for one in &mut waiting {
            assert!(one.as_mut().poll(&mut context).is_pending());
        }
        let refused = pin!(actions.begin(String::new())).poll(&mut context);
        assert!(matches!(refused, Poll::Ready(Err(ApiError { code: ErrorCode::Busy, .. }))));
        all.pop().unwrap().end(&Answer::Done);
        let polled: Vec<_> = waiting.iter_mut().map(|one| one.as_mut().poll(&mut context)).collect();
        let [first, others @ ..] = &polled[..] else { panic!("none waits") };
        assert!(first.is_ready() && others.iter().all(Poll::is_pending), "the one that came first");
        assert_eq!(actions.list().last().unwrap().action, "0");
    }

    #[test]
    fn a_long_result_is_whole_for_the_client_that_waits_for_it() {
        let actions = Actions::default();
        let long = |nth: usize| Answer::Message(format!("{nth}{}", "x".repeat(1 << 20)));
        let ids: Vec<u64> = (0..=MAX_LONG_RESULTS)
            .map(|nth| {
                let running = begin(&actions, String::new());
                let id = running.id;
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
            let running = begin(&actions, long.clone());
            running.set_progress(long.clone());
            running.end(&answer);
        }
        for status in actions.list() {
            let kept = serde_json::to_string(&status).unwrap();
            assert!(kept.len() < 4096, "{} bytes", kept.len());
            assert!(status.action.starts_with("\u{e9}\u{e9}") && status.action.ends_with("..."));
        }
        begin(&actions, "short".to_owned()).end(&Answer::Attached(Attached { number: 7 }));
        assert_eq!(actions.list()[3].result, Some(json!({ "number": 7 })));
    }
}
