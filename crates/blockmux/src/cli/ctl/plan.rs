//! Text about the changes that a new config has made or would make.

use crate::api::plan::{PlanReport, PlannedChange};
use crate::output::printable;

/// Text for people: a line for each change and for each session that it affects.
pub(super) fn text(report: &PlanReport) -> String {
    let mut lines = Vec::new();
    if report.is_empty() {
        let read = if report.applied { "; secrets and certificates were read again" } else { "" };
        lines.push(format!("no changes{read}"));
    }
    for PlannedChange { change, affected, .. } in &report.changes {
        lines.push(printable(change).to_string());
        let verb = if report.applied { "affected" } else { "affects" };
        lines.extend(affected.iter().map(|who| format!("    {verb} {}", printable(who))));
    }
    if !report.next_start.is_empty() {
        lines.push("takes effect at the next start:".to_owned());
        lines.extend(report.next_start.iter().map(|later| format!("  {}", printable(&later.change))));
    }
    lines.extend(report.warnings.iter().map(|line| format!("warning: {}", printable(line))));
    lines.join("\n")
}
