//! Requests that change something, as the API tells about them.

use crate::api::ApiError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
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
