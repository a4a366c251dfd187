//! Requests that take longer than a second: the daemon answers with the URL of an action, which is
//! polled until it ends.

use super::{Answer, Request, routes};
use crate::api::ApiError;
use crate::api::client::{Call, CallError, Client};
use crate::failure::Failure;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::thread;
use std::time::Duration;
use tracing::info;
use utoipa::ToSchema;

/// A request that changes something: running, or recently finished.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ActionStatus {
    pub(crate) id: u64,
    /// The command and its object.
    #[schema(example = "remove data")]
    pub(crate) action: String,
    pub(crate) state: ActionState,
    /// Progress, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) progress: Option<String>,
    /// Start time in UTC, as RFC 3339.
    pub(crate) begun: String,
    /// Result of a successful action: the body of the response without `Prefer: respond-async`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub(crate) result: Option<Value>,
    /// Error of a failed action.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<ApiError>,
}

/// State of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ActionState {
    Running,
    Done,
    Failed,
}

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
