//! The comparison as Markdown and as JSON.

use super::comparison::{Comparison, MeasuredProgram};
use super::figures::{Row, Spread};
use super::goals::{measured, summary};
use super::matrix::Cell;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Markdown: for each client a table for each figure, a line for each cell, a column for each
/// server.
pub(crate) fn markdown(comparison: &Comparison) -> String {
    let mut out = format!("{}. {}\n", comparison.machine, comparison.how_measured());
    for client in &comparison.clients {
        let mut servers: Vec<&str> = Vec::new();
        for row in comparison.rows.0.iter().filter(|row| row.client == client.name) {
            if !servers.contains(&row.server) {
                servers.push(row.server);
            }
        }
        for figure in &FIGURES {
            let cells: Vec<(Cell, Vec<String>)> = comparison
                .cells
                .iter()
                .map(|&cell| (cell, line(comparison, client, &servers, cell, figure)))
                .filter(|(_, texts)| texts.iter().any(|text| text != NOTHING))
                .collect();
            if !cells.is_empty() {
                let _ = write!(out, "\nClient {} ({}), {}:\n\n", client.name, client.version, figure.title);
                let _ = writeln!(out, "| | {} |", servers.join(" | "));
                let _ = writeln!(out, "|---|{}", "---:|".repeat(servers.len()));
                for (cell, texts) in cells {
                    let _ = writeln!(out, "| {} | {} |", cell.title(), texts.join(" | "));
                }
            }
        }
    }
    out += "\n| goal | wanted | found | |\n|---|---|---:|---|\n";
    for goal in measured(&comparison.goals) {
        let (wanted, ratio) = (goal.goal_text(), goal.ratio_text());
        let _ = writeln!(out, "| {} | {wanted} | {ratio} | {} |", goal.what, goal.status());
    }
    let _ = writeln!(out, "\n{}.", summary(&comparison.goals));
    out += "\nServers:\n\n```\n";
    for MeasuredProgram { version, command, .. } in &comparison.servers {
        let _ = writeln!(out, "{command}\n    {version}");
    }
    out += "```\n";
    if !comparison.skipped.is_empty() {
        out += "\nNot measured:\n\n";
        comparison.skipped.iter().for_each(|skipped| {
            let _ = writeln!(out, "- {skipped}");
        });
    }
    out
}

/// The comparison as JSON, with every run.
pub(crate) fn json(comparison: &Comparison) -> String {
    let program = |program: &MeasuredProgram| json!({ "name": program.name, "version": program.version, "command": program.command });
    let document = json!({
        "protocol": comparison.protocol,
        "machine": comparison.machine,
        "placement": comparison.placement,
        "runs": comparison.runs,
        "is_whole": comparison.is_whole,
        "runtime_s": comparison.runtime.as_secs_f64(),
        "servers": comparison.servers.iter().map(program).collect::<Vec<Value>>(),
        "clients": comparison.clients.iter().map(program).collect::<Vec<Value>>(),
        "rows": comparison.rows.0.iter().map(Row::json).collect::<Vec<Value>>(),
        "goals": comparison.goals.iter().map(|goal| goal.json()).collect::<Vec<Value>>(),
        "skipped": comparison.skipped,
    });
    format!("{document:#}\n")
}

struct Figure {
    title: &'static str,
    text: fn(&Row) -> Option<String>,
}

fn line(
    comparison: &Comparison,
    client: &MeasuredProgram,
    servers: &[&str],
    cell: Cell,
    figure: &Figure,
) -> Vec<String> {
    let text = |server: &&str| {
        let row = comparison.rows.get(client.name, server, cell)?;
        (figure.text)(row)
    };
    servers.iter().map(|server| text(server).unwrap_or_else(|| NOTHING.to_owned())).collect()
}

const NOTHING: &str = "-";

const FIGURES: [Figure; 3] = [
    Figure {
        title: "thousands of I/O per second, ± half the range of the runs in per cent",
        text: |row| {
            let spread: Spread = row.iops()?;
            Some(format!("{:.1} ±{:.0}", spread.median / 1e3, spread.half_range_percent()))
        },
    },
    Figure {
        title: "mean latency in microseconds",
        text: |row| row.median(|sample| sample.mean_us).map(|us| format!("{us:.1}")),
    },
    Figure {
        title: "CPU time of the server in microseconds for each I/O",
        text: |row| row.median(|sample| sample.server_us).map(|us| format!("{us:.2}")),
    },
];

#[cfg(test)]
mod tests {
    use super::super::comparison::tests::comparison;
    use super::*;

    #[test]
    fn a_document_has_a_column_for_each_server_and_a_line_for_each_cell() {
        let text = markdown(&comparison());
        let head = "| | blockmux | blockmux-never | nbdkit | qemu-storage-daemon | ceiling, spinning | ceiling, sleeping |";
        assert_eq!(text.matches(head).count(), 3, "{text}");
        assert!(text.contains("| 4 KiB random write, depth 128 x 4 | 900.0 ±1 | 600.0 ±1 |"), "{text}");
        assert!(
            text.contains("| a goal | ≥ 4.00 | 3.00 | missed |\n\n1 reached, 1 missed, 1 not measured."),
            "{text}"
        );
        assert!(text.contains("nbdkit serve\n    nbdkit 1.0\n"), "{text}");
    }

    #[test]
    fn the_json_has_every_run_and_every_goal() {
        let value: Value = serde_json::from_str(&json(&comparison())).unwrap();
        assert_eq!(value["rows"].as_array().map(Vec::len), Some(6));
        assert_eq!(value["rows"][0]["runs"][1]["iops"], 909_000.0);
        assert_eq!(value["goals"][1]["reached"], false);
        assert_eq!(value["skipped"][0], "server nbd-server: not installed");
    }
}
