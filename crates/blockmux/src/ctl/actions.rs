//! Requests that take longer than a second: the daemon answers with an action, which is looked at
//! until it ends.

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

/// A request that changes something, while the daemon works on it and for some time after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ActionStatus {
    pub(crate) id: u64,
    /// What is done, and to what.
    #[schema(example = "remove data")]
    pub(crate) action: String,
    pub(crate) state: ActionState,
    /// How far it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) progress: Option<String>,
    /// When it began, as RFC 3339 has it, in UTC.
    pub(crate) begun: String,
    /// Of one that is done: the body of the response without `Prefer: respond-async`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub(crate) result: Option<Value>,
    /// Of one that failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<ApiError>,
}

/// Whether an action goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ActionState {
    Running,
    Done,
    Failed,
}

/// Asks the daemon, and waits for the answer; logs progress meanwhile.
///
/// # Errors
/// If there is no answer, or it is none that can be read.
pub(super) fn ask(client: &Client, request: &Request) -> Result<Answer, Failure> {
    let unreadable = |error: serde_json::Error| {
        Failure::run(format!(
            "the daemon has answered something else ({error}); it may be of another version"
        ))
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
        thread::park_timeout(BETWEEN_LOOKS);
    }
}

const ACCEPTED: u16 = 202;
const BETWEEN_LOOKS: Duration = Duration::from_millis(200);
