//! Requests that take longer than a second: the daemon answers with the URL of an action, which is
//! polled until it ends.

use super::routes;
use crate::api::action::{ActionState, ActionStatus};
use crate::api::client::{Call, CallError, Client};
use crate::api::request::{Answer, Request};
use crate::failure::Failure;
use std::thread;
use std::time::Duration;
use tracing::info;

/// Sends a request to the daemon and waits for its answer; logs progress meanwhile.
///
/// # Errors
/// If there is no answer, or it cannot be parsed.
pub(super) fn ask(client: &Client, request: &Request) -> Result<Answer, Failure> {
    let unreadable = |error: serde_json::Error| {
        Failure::run(format!("unexpected answer from the daemon ({error}); it may have another version"))
    };
    let reply = match client.call(&routes::call(request)) {
        Ok(reply) => reply,
        Err(CallError::Refused(error)) => return Ok(Answer::Failed(error)),
        Err(CallError::NoAnswer(failure)) => return Err(failure),
    };
    let Some(action) = reply.location.filter(|_| reply.status == ACCEPTED) else {
        return routes::answer(request, reply.body).map_err(unreadable);
    };
    let mut shown = None;
    loop {
        let status = match client.call(&Call::new("GET", &*action)) {
            Ok(reply) => serde_json::from_value::<ActionStatus>(reply.body).map_err(unreadable)?,
            Err(CallError::Refused(error)) => return Ok(Answer::Failed(error)),
            Err(CallError::NoAnswer(failure)) => return Err(failure),
        };
        match (status.state, status.error) {
            (ActionState::Failed, Some(error)) => return Ok(Answer::Failed(error)),
            (ActionState::Running, _) => {}
            _ => return routes::answer(request, status.result.unwrap_or_default()).map_err(unreadable),
        }
        if status.progress.is_some() && status.progress != shown {
            info!("{}: {}", status.action, status.progress.as_deref().unwrap_or_default());
            shown = status.progress;
        }
        thread::park_timeout(POLL_INTERVAL);
    }
}

/// HTTP status of a response with the URL of an action.
const ACCEPTED: u16 = 202;
/// Interval of polling an action.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
