//! What a reload has done, or would do.

use crate::output::printable;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The difference between what runs and a config.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct PlanReport {
    /// It was applied, and not only asked for.
    pub(crate) applied: bool,
    /// Changes of what is served.
    pub(crate) changes: Vec<PlannedChange>,
    /// Changes that take effect at the next start.
    pub(crate) next_start: Vec<String>,
    /// What went wrong after nothing could be taken back any more.
    pub(crate) warnings: Vec<String>,
}

/// One change, and the sessions that lose something by it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct PlannedChange {
    pub(crate) change: String,
    pub(crate) affected: Vec<String>,
}

impl PlanReport {
    /// Whether nothing is different.
    pub(crate) fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.next_start.is_empty()
    }
}

/// For people: a line for each change, and one for each session that it affects.
pub(super) fn in_words(report: &PlanReport) -> String {
    if report.is_empty() {
        return "no changes".to_owned();
    }
    let mut lines = Vec::new();
    for PlannedChange { change, affected } in &report.changes {
        lines.push(printable(change).to_string());
        let verb = if report.applied { "affected" } else { "affects" };
        lines.extend(affected.iter().map(|who| format!("    {verb} {}", printable(who))));
    }
    if !report.next_start.is_empty() {
        lines.push("takes effect at the next start:".to_owned());
        lines.extend(report.next_start.iter().map(|line| format!("  {}", printable(line))));
    }
    lines.extend(report.warnings.iter().map(|line| format!("warning: {}", printable(line))));
    lines.join("\n")
}
