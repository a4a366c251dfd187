//! Changes that a reload has made or would make.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// The difference between the running config and another one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct PlanReport {
    /// The changes were made, not only computed.
    pub(crate) applied: bool,
    /// Changes that take effect now.
    pub(crate) changes: Vec<PlannedChange>,
    /// Changes that take effect at the next start.
    pub(crate) next_start: Vec<PlannedChange>,
    /// Failures of steps that could not be undone, and paths that do not answer.
    pub(crate) warnings: Vec<String>,
}

/// One change, and the sessions that it affects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct PlannedChange {
    /// The change, for people.
    pub(crate) change: String,
    /// Keys and names from the top of the config, as `["volume", "root", "spec"]`.
    pub(crate) path: Vec<String>,
    /// The value before; absent if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Value>)]
    pub(crate) before: Option<Value>,
    /// The value from now on; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Value>)]
    pub(crate) after: Option<Value>,
    /// The sessions that it affects, for people.
    pub(crate) affected: Vec<String>,
}

impl PlannedChange {
    /// A change without values, which affects no session.
    pub(crate) fn new(path: &[&str], change: String) -> PlannedChange {
        let path = path.iter().map(|key| (*key).to_owned()).collect();
        PlannedChange { change, path, before: None, after: None, affected: Vec::new() }
    }
}

impl PlanReport {
    /// A line for each change.
    pub(crate) fn lines(&self) -> Vec<String> {
        let now = self.changes.iter().map(|change| change.change.clone());
        let later = self.next_start.iter().map(|later| format!("at the next start: {}", later.change));
        now.chain(later).collect()
    }

    /// Whether there are no changes.
    pub(crate) fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.next_start.is_empty()
    }
}
