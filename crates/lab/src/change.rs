//! How the figures of the cases that two reports have in common changed from one to the other.

use crate::figure::{self, Figure, Labels};
use crate::result::{CaseChange, Changes, Comparison, FigureChange, Row, Significance, Spread};

/// The figures that are compared, with their headings: IOPS first.
pub const FIGURES: [(&str, Figure); 4] =
    [("IOPS", Figure::Iops), ("p50", Figure::P50), ("p99", Figure::P99), ("%/Gb", Figure::CpuPerGbit)];

impl Changes {
    /// The changes from one report to another; `None` if they have no case in common.
    #[must_use]
    pub fn between(before: (&str, &Comparison), after: (&str, &Comparison)) -> Option<Changes> {
        let labels = Labels::of(before.1);
        let case = |row: &Row| {
            // Ceilings have one name for all protocols.
            let is_its = |other: &&Row| is_same_case(row, other) && row.protocol == other.protocol;
            let other = after.1.rows.iter().find(is_its)?;
            Some(CaseChange {
                job: figure::title(&row.job),
                configuration: labels.label(row),
                figures: FIGURES.iter().filter_map(|(_, figure)| change(*figure, row, other)).collect(),
            })
        };
        let cases: Vec<_> = before.1.rows.iter().filter_map(case).collect();
        let (before, after) = (before.0.to_owned(), after.0.to_owned());
        (!cases.is_empty()).then_some(Changes { before, after, cases })
    }

    /// The cases of each job.
    pub fn by_job(&self) -> impl Iterator<Item = &[CaseChange]> {
        self.cases.chunk_by(|a, b| a.job == b.job)
    }
}

impl CaseChange {
    /// The change of a figure; `None` if a report lacks it.
    #[must_use]
    pub fn of(&self, figure: Figure) -> Option<&FigureChange> {
        let key = figure.key();
        self.figures.iter().find(|change| change.figure == key)
    }
}

impl FigureChange {
    /// The change in per cent, in brackets if it may be chance.
    #[must_use]
    pub fn text(&self) -> String {
        let decimals = if self.percent.abs() < 99.95 { 1 } else { 0 };
        let percent = format!("{:+.decimals$}%", self.percent);
        match self.significance {
            Significance::RunsDiffer => percent,
            Significance::RunsOverlap | Significance::SingleRun => format!("({percent})"),
        }
    }
}

/// Whether two rows are the same configuration under the same job.
pub(crate) fn is_same_case(a: &Row, b: &Row) -> bool {
    (&a.configuration, a.kind, &a.poll) == (&b.configuration, b.kind, &b.poll)
        && a.job.does_the_same_as(&b.job)
}

fn change(figure: Figure, before: &Row, after: &Row) -> Option<FigureChange> {
    let (old, new) = (before.figure(figure)?, after.figure(figure)?);
    let has_spread = before.runs.len() > 1 && after.runs.len() > 1;
    (old.median > 0.0).then(|| FigureChange {
        figure: figure.key(),
        before: old.median,
        after: new.median,
        percent: (new.median / old.median - 1.0) * 100.0,
        significance: match has_spread {
            false => Significance::SingleRun,
            true if overlap(&old, &new) => Significance::RunsOverlap,
            true => Significance::RunsDiffer,
        },
    })
}

fn overlap(a: &Spread, b: &Spread) -> bool {
    a.min <= b.max && b.min <= a.max
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;
    use crate::result::{ConfigurationKind, Direction, Run};

    fn comparison(rows: &[(&str, &[u64])]) -> Comparison {
        let run = |&ios: &u64| Run {
            runtime_ns: 1_000_000_000,
            read: Direction { ios, bytes: ios * 4096, ..Direction::default() },
            ..Run::default()
        };
        let row = |(configuration, iops): &(&str, &[u64])| Row {
            configuration: (*configuration).to_owned(),
            kind: ConfigurationKind::Protocol,
            protocol: (*configuration).to_owned(),
            target: "mem:1g".to_owned(),
            poll: String::new(),
            job: Job::default(),
            report: 0,
            runs: iops.iter().map(run).collect(),
        };
        Comparison::of_rows(rows.iter().map(row).collect())
    }

    fn changes(before: &[(&str, &[u64])], after: &[(&str, &[u64])]) -> Vec<String> {
        let changes =
            Changes::between(("before", &comparison(before)), ("after", &comparison(after))).unwrap();
        let text = |case: &CaseChange| format!("{} {}", case.configuration, case.figures[0].text());
        changes.cases.iter().map(text).collect()
    }

    #[test]
    fn a_change_is_in_brackets_if_runs_overlap_or_are_single() {
        let before: [(&str, &[u64]); 4] =
            [("nbd", &[100, 110, 120]), ("iscsi", &[100, 110, 120]), ("srp", &[100]), ("aoe", &[7, 8])];
        let after: [(&str, &[u64]); 4] = [
            ("iscsi", &[120, 130, 140]),
            ("nbd", &[121, 132, 140]),
            ("srp", &[250, 250]),
            ("other", &[1, 2]),
        ];
        assert_eq!(changes(&before, &after), ["nbd +20.0%", "iscsi (+18.2%)", "srp (+150%)"]);
        assert_eq!(changes(&[("nbd", &[100, 101])], &[("nbd", &[50, 51])]), ["nbd -49.8%"]);
        let ceilings = |protocols: [&str; 2]| {
            let mut ceilings = comparison(&[("ceiling", &[100, 101]), ("ceiling", &[200, 202])]);
            ceilings
                .rows
                .iter_mut()
                .zip(protocols)
                .for_each(|(row, name)| name.clone_into(&mut row.protocol));
            ceilings
        };
        let (one, other) = (ceilings(["nbd", "iscsi"]), ceilings(["iscsi", "nbd"]));
        let changes = Changes::between(("a", &one), ("b", &other)).unwrap();
        let iops = |case: &CaseChange| case.figures[0].text();
        assert_eq!(changes.cases.iter().map(iops).collect::<Vec<_>>(), ["+100%", "-50.0%"]);
    }

    #[test]
    fn reports_without_a_common_case_have_no_changes() {
        let (one, other) = (comparison(&[("nbd", &[1])]), comparison(&[("aoe", &[1])]));
        assert_eq!(Changes::between(("a", &one), ("b", &other)), None);
    }
}
