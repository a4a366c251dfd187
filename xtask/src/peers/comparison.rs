//! The result of a comparison, for table and report.

use super::figures::{Row, Rows};
use super::goals::Goal;
use super::matrix::Cell;
use std::time::Duration;

/// The rows measured.
pub(crate) struct Comparison {
    pub(crate) protocol: &'static str,
    pub(crate) cells: Vec<Cell>,
    pub(crate) clients: Vec<MeasuredProgram>,
    pub(crate) servers: Vec<MeasuredProgram>,
    pub(crate) rows: Rows,
    pub(crate) goals: Vec<Goal>,
    /// Programs and cells that were not measured, with the reasons.
    pub(crate) skipped: Vec<String>,
    pub(crate) machine: String,
    /// How programs were placed, as a sentence.
    pub(crate) placement: String,
    /// Number of runs requested.
    pub(crate) runs: u32,
    /// Whether all of them were completed.
    pub(crate) is_whole: bool,
    pub(crate) runtime: Duration,
}

/// A program of the comparison.
pub(crate) struct MeasuredProgram {
    pub(crate) name: &'static str,
    /// The first line of its `--version`.
    pub(crate) version: String,
    /// A server's command line; empty for a client.
    pub(crate) command: String,
    /// The ceilings of a server's rows; empty for a client, or if another protocol is served.
    pub(crate) ceilings: &'static [&'static str],
    pub(crate) is_peer: bool,
}

impl Comparison {
    /// Number and duration of runs, and the CPUs.
    pub(crate) fn how_measured(&self) -> String {
        let seconds = self.runtime.as_secs_f64();
        let runs = if self.runs == 1 { "One run" } else { "Medians of" };
        let count = if self.runs == 1 { String::new() } else { format!(" {} alternating runs", self.runs) };
        let others = self.rows.others().map(|others| {
            let (median, most) = (others.median * 100.0, others.max * 100.0);
            format!(" Other programs used {median:.0}% of a CPU, in the worst run {most:.0}%.")
        });
        let early = if self.is_whole { "" } else { "Interrupted: some cells have fewer runs. " };
        format!("{early}{runs}{count} of {seconds} s. {}{}", self.placement, others.unwrap_or_default())
    }

    /// Median IOPS of a row as a multiple of the best peer's.
    pub(crate) fn of_best_peer(&self, row: &Row) -> Option<f64> {
        let peers: Vec<&str> =
            self.servers.iter().filter(|server| server.is_peer).map(|server| server.name).collect();
        let is_server = self.servers.iter().any(|server| server.name == row.server);
        let best = self.rows.best(row.client, &peers, row.cell).filter(|_| is_server)?;
        Some(row.iops()?.median / best)
    }

    /// Median IOPS of a row as a share of the ceiling with the same polling policy, or of the
    /// faster ceiling if the row's policy is adaptive.
    pub(crate) fn of_ceiling(&self, row: &Row) -> Option<f64> {
        let ceilings = self.servers.iter().find(|server| server.name == row.server)?.ceilings;
        Some(row.iops()?.median / self.rows.best(row.client, ceilings, row.cell)?)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::client::{SLEEPING, SPINNING};
    use super::super::figures::Sample;
    use super::super::goals::Bound;
    use super::super::matrix::Rw;
    use super::*;

    /// One cell, four servers and both ceilings, two runs each.
    pub(crate) fn comparison() -> Comparison {
        let cell = Cell::new(Rw::RandWrite, 4096, 128, 4);
        let mut rows = Rows::default();
        let mut servers = Vec::new();
        let either: &[&str] = &[SPINNING, SLEEPING];
        for (name, iops, ceilings, is_peer) in [
            ("blockmux", 900.0, either, false),
            ("blockmux-never", 600.0, &[SLEEPING], false),
            ("nbdkit", 300.0, either, true),
            ("qemu-storage-daemon", 200.0, either, true),
            (SPINNING, 1200.0, &[], false),
            (SLEEPING, 800.0, &[], false),
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
                servers.push(MeasuredProgram { name, version, command, ceilings, is_peer });
            }
        }
        let goal = |ours| Goal::ratio("a goal".into(), Bound::AtLeast(4.0), ours, Some(1.0));
        Comparison {
            protocol: "nbd",
            cells: vec![cell],
            clients: vec![MeasuredProgram {
                name: "blockmux",
                version: "blockmux 0.1.0".into(),
                command: String::new(),
                ceilings: &[],
                is_peer: false,
            }],
            servers,
            rows,
            goals: vec![goal(Some(4.5)), goal(Some(3.0)), goal(None)],
            skipped: vec!["server nbd-server: not installed".into()],
            machine: "a machine".into(),
            placement: "Somewhere.".into(),
            runs: 2,
            is_whole: true,
            runtime: Duration::from_secs(3),
        }
    }
}
