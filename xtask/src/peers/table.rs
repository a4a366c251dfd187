//! The comparison on a terminal of 80 columns: a block for each client and cell, a line for each server.

use super::client::{SLEEPING, SPINNING};
use super::comparison::Comparison;
use super::figures::Row;
use super::goals::Goal;
use std::fmt::Write as _;

/// The tables, the goals, and what was left out.
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

impl Comparison {
    /// How often and how long, and on which processors.
    pub(crate) fn how_measured(&self) -> String {
        let seconds = self.runtime.as_secs_f64();
        let runs = if self.runs == 1 { "One run" } else { "Medians of" };
        let count = if self.runs == 1 { String::new() } else { format!(" {} alternating runs", self.runs) };
        let others = self.rows.others().map(|others| {
            let (median, most) = (others.median * 100.0, others.max * 100.0);
            format!(" Other programs took {median:.0}% of a processor, in the worst run {most:.0}%.")
        });
        format!("{runs}{count} of {seconds} s. {}{}", self.placement, others.unwrap_or_default())
    }

    /// Median IOPS of a row as a multiple of the best peer's.
    pub(crate) fn of_best_peer(&self, row: &Row) -> Option<f64> {
        let peers: Vec<&str> =
            self.servers.iter().filter(|server| server.is_peer).map(|server| server.name).collect();
        let is_server = self.servers.iter().any(|server| server.name == row.server);
        let best = self.rows.best(row.client, &peers, row.cell).filter(|_| is_server)?;
        Some(row.iops()?.median / best)
    }

    /// Median IOPS of a row as a share of the ceiling that polls as it does; of the faster one where it may do either.
    pub(crate) fn of_ceiling(&self, row: &Row) -> Option<f64> {
        let poll = self.servers.iter().find(|server| server.name == row.server)?.poll;
        let ceilings: &[&str] = match poll {
            "always" => &[SPINNING],
            "never" => &[SLEEPING],
            _ => &[SPINNING, SLEEPING],
        };
        Some(row.iops()?.median / self.rows.best(row.client, ceilings, row.cell)?)
    }
}

fn line(comparison: &Comparison, row: &Row) -> String {
    let spread = row.iops();
    let iops = spread.map_or(0.0, |spread| spread.median);
    let percent = spread.filter(|_| row.samples.len() > 1).map(|spread| spread.half_range_percent());
    let text = |value: Option<f64>, decimals: usize| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.decimals$}"))
    };
    // Three digits say enough.
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
    for goal in comparison.goals.iter().filter(|goal| goal.is_reached().is_some()) {
        let Goal { what, .. } = goal;
        let _ = writeln!(out, "{:<7}{:>6}  {}  {what}", goal.verdict(), goal.ratio_text(), goal.wanted());
    }
    let count = |verdict| comparison.goals.iter().filter(|goal| goal.is_reached() == verdict).count();
    let (reached, missed, unknown) = (count(Some(true)), count(Some(false)), count(None));
    let _ = writeln!(out, "{reached} reached, {missed} missed, {unknown} not measured");
}

const HEADING: &str = "                        IOPS   ±%   MB/s mean us  p99 us srv us x peer  ceil";

const LEGEND: &str = "
±%: half the range of the runs. srv us: processor time of the server for each
I/O. x peer: multiple of the best peer's IOPS. ceil: share of the IOPS of bare
sockets with the same message sizes and polling (the faster where adaptive).
";

#[cfg(test)]
pub(crate) mod tests {
    use super::super::comparison::Taken;
    use super::super::figures::{Rows, Sample};
    use super::super::goals::Bound;
    use super::super::matrix::{Cell, Rw};
    use super::*;
    use std::time::Duration;

    /// One cell, four servers and both ceilings, two runs each.
    pub(crate) fn comparison() -> Comparison {
        let cell = Cell::new(Rw::RandWrite, 4096, 128, 4);
        let mut rows = Rows::default();
        let mut servers = Vec::new();
        for (name, iops, poll, is_peer) in [
            ("blockmux", 900.0, "adaptive", false),
            ("blockmux-never", 600.0, "never", false),
            ("nbdkit", 300.0, "adaptive", true),
            ("qemu-storage-daemon", 200.0, "adaptive", true),
            (SPINNING, 1200.0, "", false),
            (SLEEPING, 800.0, "", false),
        ] {
            for iops in [iops * 990.0, iops * 1010.0] {
                let sample = Sample {
                    iops,
                    mean_us: Some(123.4),
                    p99_us: Some(45678.9),
                    server_us: Some(12.34),
                    others: 0.02,
                };
                rows.add("blockmux", name, cell, sample);
            }
            if !name.starts_with("ceiling") {
                let (version, command) = (format!("{name} 1.0"), format!("{name} serve"));
                servers.push(Taken { name, version, command, poll, is_peer });
            }
        }
        let goal = |ours| Goal::ratio("a goal".into(), Bound::AtLeast(4.0), ours, Some(1.0));
        Comparison {
            protocol: "nbd",
            cells: vec![cell],
            clients: vec![Taken {
                name: "blockmux",
                version: "blockmux 0.1.0".into(),
                command: String::new(),
                poll: "",
                is_peer: false,
            }],
            servers,
            rows,
            goals: vec![goal(Some(4.5)), goal(Some(3.0)), goal(None)],
            skipped: vec!["server nbd-server: not installed".into()],
            machine: "a machine".into(),
            placement: "Somewhere.".into(),
            runs: 2,
            runtime: Duration::from_secs(3),
        }
    }

    #[test]
    fn the_table_fits_eighty_columns_and_names_everything() {
        let text = render(&comparison());
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        let words = [
            "Medians of 2 alternating runs of 3 s.\nSomewhere.\nOther programs took 2% of a processor",
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
