//! The comparison on a terminal of 80 columns: a block for each client and cell, a line for each
//! server.

use super::comparison::Comparison;
use super::figures::Row;
use super::goals::{Goal, measured, summary};
use std::fmt::Write as _;

/// The tables, the goals, and the skipped programs.
pub(crate) fn render(comparison: &Comparison) -> String {
    let mut out = format!("{}\n{}\n", comparison.machine, comparison.how_measured().replace(". ", ".\n"));
    for client in &comparison.clients {
        for &cell in &comparison.cells {
            let rows = comparison.rows.of(client.name, cell);
            if !rows.is_empty() {
                let _ = writeln!(out, "\n{}, client {}", cell.title(), client.name);
                let _ = writeln!(out, "{HEADING}");
                rows.iter().for_each(|row| out += &line(comparison, row));
            }
        }
    }
    out += LEGEND;
    goals(comparison, &mut out);
    if !comparison.skipped.is_empty() {
        out += "\nNot measured\n";
        comparison.skipped.iter().for_each(|skipped| {
            let _ = writeln!(out, "  {skipped}");
        });
    }
    out
}

fn line(comparison: &Comparison, row: &Row) -> String {
    let spread = row.iops();
    let iops = spread.map_or(0.0, |spread| spread.median);
    let percent = spread.filter(|_| row.samples.len() > 1).map(|spread| spread.half_range_percent());
    let text = |value: Option<f64>, decimals: usize| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.decimals$}"))
    };
    // Three significant digits are enough.
    let us = |value: Option<f64>| {
        let decimals = value.map_or(0, |value| if value < 10.0 { 2 } else { usize::from(value < 100.0) });
        text(value, decimals)
    };
    format!(
        "{:<19}{:>9}{:>5}{:>7}{:>8}{:>8}{:>7}{:>7}{:>6}\n",
        row.server,
        text(Some(iops), 0),
        text(percent, 0),
        text(Some(iops * f64::from(row.cell.bs) / 1e6), 0),
        us(row.median(|sample| sample.mean_us)),
        us(row.median(|sample| sample.p99_us)),
        us(row.median(|sample| sample.server_us)),
        text(comparison.of_best_peer(row), 2),
        text(comparison.of_ceiling(row), 2),
    )
}

fn goals(comparison: &Comparison, out: &mut String) {
    *out += "\nGoals   ratio  wanted\n";
    for goal in measured(&comparison.goals) {
        let Goal { what, .. } = goal;
        let _ = writeln!(out, "{:<7}{:>6}  {}  {what}", goal.status(), goal.ratio_text(), goal.goal_text());
    }
    let _ = writeln!(out, "{}", summary(&comparison.goals));
}

const HEADING: &str = "                        IOPS   ±%   MB/s mean us  p99 us srv us x peer  ceil";

const LEGEND: &str = "
±%: half the range of the runs. srv us: CPU time of the server for each I/O.
x peer: multiple of the best peer's IOPS. ceil: share of the IOPS of bare
sockets with the same message sizes and polling (adaptive: of the faster ones).
";

#[cfg(test)]
mod tests {
    use super::super::client::SLEEPING;
    use super::super::comparison::tests::comparison;
    use super::*;

    #[test]
    fn the_table_fits_eighty_columns_and_names_everything() {
        let text = render(&comparison());
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        let words = [
            "Medians of 2 alternating runs of 3 s.\nSomewhere.\nOther programs used 2% of a CPU",
            "4 KiB random write, depth 128 x 4, client blockmux",
            "ceiling, sleeping",
            "1 reached, 1 missed, 1 not measured",
            "server nbd-server: not installed",
        ];
        assert!(words.iter().all(|words| text.contains(words)), "{text}");
    }

    #[test]
    fn a_line_has_medians_and_ratios() {
        let text = render(&comparison());
        let cells = |start: &str| -> Vec<String> {
            let line = text.lines().find(|line| line.starts_with(start)).unwrap();
            line[19..].split_whitespace().map(str::to_owned).collect()
        };
        let same = ["123", "45679", "12.3"];
        assert_eq!(cells("blockmux "), [&["900000", "1", "3686"][..], &same, &["3.00", "0.75"]].concat());
        assert_eq!(
            cells("blockmux-never"),
            [&["600000", "1", "2458"][..], &same, &["2.00", "0.75"]].concat()
        );
        assert_eq!(cells(SLEEPING), [&["800000", "1", "3277"][..], &same, &["-", "-"]].concat());
    }
}
