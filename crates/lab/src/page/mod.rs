//! The page: a comparison as one self-contained HTML file that needs no network, script or font of
//! its own.
//!
//! `sections` chooses the charts, `chart` draws them, `summary` makes the sentences, and the style
//! sheet defines the appearance. Foreign text is escaped by the template, and inside charts by
//! `svg`.

mod chart;
mod curves;
mod families;
mod ratio;
mod relative;
mod sections;
mod summary;
mod svg;

use crate::change::FIGURES;
use crate::figure::{self, Figure, Labels};
use crate::grid::{self, Grid};
use crate::result::{CaseChange, Changes, Comparison, FigureChange, Row, Run};
use crate::suite::Study;
use crate::table;
use crate::when;
use askama::Template;
use blockmux_volume::text::is_unprintable;
use sections::{Absolute, Section};
use summary::{Findings, Tile};

/// The page of a comparison, with a study's figures next to the measured ones.
///
/// # Errors
/// Only if formatting a value fails, which none of our values does.
pub fn render(comparison: &Comparison, study: Option<&Study>) -> Result<String, askama::Error> {
    let labels = Labels::of(comparison);
    let groups = comparison.groups();
    let Findings { tiles, doubts } = summary::findings(comparison, &labels);
    let page = Page {
        comparison,
        date: when::spoken(&comparison.started),
        machine: figure::machine(&comparison.machine),
        tiles,
        doubts,
        row_errors: row_errors(comparison, &labels),
        published: study.map(|study| Published::of(comparison, &labels, study)),
        sections: sections::measured(comparison, &labels),
        changes: comparison.changes.iter().flat_map(Changes::by_job).map(ChangeTable::of).collect(),
        grids: study.map_or_else(Vec::new, |study| grid::grids(comparison, study)),
        skipped: comparison.skipped_by_reason(),
        tables: groups.iter().map(|group| PageTable::of(comparison, &labels, group)).collect(),
    };
    let is_allowed = |c| c == '\n' || !is_unprintable(c);
    let html = page.render()?;
    // Foreign text must not hide or reorder what stands beside it; ours has no such character.
    Ok(html.chars().map(|c| if is_allowed(c) { c } else { '\u{fffd}' }).collect())
}

#[derive(Template)]
#[template(path = "page.html")]
struct Page<'a> {
    comparison: &'a Comparison,
    date: String,
    machine: String,
    tiles: Vec<Tile>,
    /// Reasons why no winner is named, for some jobs or for all.
    doubts: Vec<String>,
    row_errors: Vec<String>,
    published: Option<Published<'a>>,
    sections: Vec<Section>,
    /// The changes between two reports, for each job.
    changes: Vec<ChangeTable>,
    /// The study's tables with our figures.
    grids: Vec<Grid>,
    /// (reason, jobs).
    skipped: Vec<(&'a str, Vec<&'a str>)>,
    tables: Vec<PageTable>,
}

/// A study and its charts.
struct Published<'a> {
    study: &'a Study,
    section: Section,
    absolute: Vec<Absolute>,
}

impl Published<'_> {
    fn of<'a>(comparison: &Comparison, labels: &Labels, study: &'a Study) -> Published<'a> {
        let (section, absolute) = sections::published(comparison, labels, study);
        Published { study, section, absolute }
    }
}

impl Page<'_> {
    /// Number of errors before the findings; the others are folded away.
    const FIRST_ERRORS: usize = 6;
}

/// The changes of one job between two reports.
struct ChangeTable {
    job: String,
    rows: Vec<Vec<String>>,
}

impl ChangeTable {
    /// The columns after the configuration.
    const HEAD: [&str; 6] = ["IOPS before", "IOPS after", "IOPS", "p50", "p99", "% CPU per Gbit/s"];

    fn of(cases: &[CaseChange]) -> ChangeTable {
        let row = |case: &CaseChange| {
            let iops = case.of(Figure::Iops);
            let count = |of: fn(&FigureChange) -> f64| or_dash(iops.map(|iops| figure::count(of(iops))));
            let mut cells =
                vec![case.configuration.clone(), count(|iops| iops.before), count(|iops| iops.after)];
            cells.extend(FIGURES.map(|(_, figure)| or_dash(case.of(figure).map(FigureChange::text))));
            cells
        };
        ChangeTable { job: cases[0].job.clone(), rows: cases.iter().map(row).collect() }
    }
}

/// All figures of one job: medians in one table, every run in another.
struct PageTable {
    title: String,
    head: Vec<String>,
    rows: Vec<PageLine>,
    run_head: Vec<String>,
    runs: Vec<PageLine>,
}

/// One line of a table.
struct PageLine {
    /// The protocol's colour.
    class: String,
    /// The configuration first; in the table of single runs, then the run's number.
    cells: Vec<String>,
}

impl PageTable {
    fn of(comparison: &Comparison, labels: &Labels, group: &[&Row]) -> PageTable {
        let percentiles = percentiles(group);
        let mut head: Vec<String> =
            ["Configuration", "Runs", "IOPS", "IOPS range", "MB/s", "mean"].map(Into::into).into();
        head.extend(percentiles.iter().map(|at| format!("p{}", f64::from(*at) / 100.0)));
        head.extend(
            [
                "max",
                "CPU target",
                "of which kernel",
                "CPU initiator",
                "of which kernel",
                "% CPU per Gbit/s",
                "CPU machine",
                "Share of ceiling",
                "Target",
            ]
            .map(Into::into),
        );
        let row = |row: &&Row| {
            let cell = |figure: Figure| or_dash(row.median(figure).map(figure::measure));
            let range = row.figure(Figure::Iops).filter(|_| row.runs.len() > 1);
            let range =
                range.map(|range| format!("{} to {}", figure::count(range.min), figure::count(range.max)));
            let iops = row.median(Figure::Iops).map(figure::count);
            let mut cells = vec![labels.label(row), row.runs.len().to_string()];
            cells.extend([or_dash(iops), or_dash(range), cell(Figure::MbPerSecond), cell(Figure::Mean)]);
            cells.extend(percentiles.iter().map(|&at| cell(Figure::Percentile(at))));
            cells.push(cell(Figure::Max));
            cells.extend([Figure::TargetCpu, Figure::TargetSystem].map(cell));
            cells.extend([Figure::InitiatorCpu, Figure::InitiatorSystem, Figure::CpuPerGbit].map(cell));
            cells.push(cell(Figure::MachineCpu));
            cells.push(or_dash(comparison.share_of_ceiling(row).map(figure::percent)));
            cells.push(row.target.clone());
            PageLine { class: line_class(row), cells }
        };
        let mut run_head: Vec<String> = ["Configuration", "Run"].map(Into::into).into();
        run_head.extend(RUN_FIGURES.map(|(name, _)| name.into()));
        run_head.push("errors".into());
        let runs = group.iter().flat_map(|row| {
            row.runs.iter().enumerate().map(|(index, run)| run_cells(labels.label(row), row, index, run))
        });
        PageTable {
            title: figure::title(&group[0].job),
            head,
            rows: group.iter().map(row).collect(),
            run_head,
            runs: runs.collect(),
        }
    }
}

fn run_cells(label: String, row: &Row, index: usize, run: &Run) -> PageLine {
    let mut cells = vec![label, (index + 1).to_string()];
    cells.extend(RUN_FIGURES.map(|(_, figure)| or_dash(figure.of(row.kind, run).map(figure::measure))));
    cells.push((run.errors + run.verify_errors).to_string());
    PageLine { class: line_class(row), cells }
}

/// The class of a table line; a ceiling has a paler shade of its protocol's colour.
fn line_class(row: &Row) -> String {
    let pale = if row.kind.is_ceiling() { " pale" } else { "" };
    format!("{}{pale}", ratio::class(row))
}

/// All percentiles that a run has, in hundredths of a per cent, ascending.
fn percentiles(group: &[&Row]) -> Vec<u16> {
    let directions = group.iter().flat_map(|row| &row.runs).flat_map(Run::active);
    let all = directions.flat_map(|direction| &direction.latency.percentiles);
    let mut all: Vec<u16> = all.map(|&(at, _)| (at * 100.0).round() as u16).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn row_errors(comparison: &Comparison, labels: &Labels) -> Vec<String> {
    let of = |row: &Row| {
        let name = format!("{}, {}", labels.label(row), figure::title(&row.job));
        table::row_errors(row).into_iter().map(move |error| format!("{name}: {error}")).collect::<Vec<_>>()
    };
    comparison.rows.iter().flat_map(of).collect()
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "–".into())
}

const RUN_FIGURES: [(&str, Figure); 11] = [
    ("IOPS", Figure::Iops),
    ("MB/s", Figure::MbPerSecond),
    ("mean", Figure::Mean),
    ("p50", Figure::P50),
    ("p99", Figure::P99),
    ("p99.9", Figure::P999),
    ("max", Figure::Max),
    ("CPU target", Figure::TargetCpu),
    ("CPU initiator", Figure::InitiatorCpu),
    ("% CPU per Gbit/s", Figure::CpuPerGbit),
    ("CPU machine", Figure::MachineCpu),
];

#[cfg(test)]
mod tests {
    /// The relative luminance of "#rrggbb", as WCAG 2 has it.
    fn luminance(colour: &str) -> f64 {
        let channel = |at: usize| {
            let value = f64::from(u8::from_str_radix(&colour[at..at + 2], 16).unwrap()) / 255.0;
            if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
    }

    fn contrast(a: &str, b: &str) -> f64 {
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    #[test]
    fn text_and_charts_have_contrast_in_light_and_in_dark() {
        let style = include_str!("style.css");
        let schemes: Vec<&str> = style.split("--paper:").collect();
        // Light, dark, and print, which is light.
        assert_eq!(schemes.len(), 4);
        for scheme in &schemes[1..] {
            let colour = |name: &str| {
                let value =
                    scheme.split(&format!("--{name}: ")).nth(1).unwrap_or_else(|| panic!("no {name}"));
                let value = value.split(';').next().unwrap().to_owned();
                // #fff is short for #ffffff.
                let long = |c: char| if value.len() == 4 && c != '#' { vec![c, c] } else { vec![c] };
                value.chars().flat_map(long).collect::<String>()
            };
            let backgrounds = ["card", "published-fill"].map(colour);
            for background in &backgrounds {
                for text in ["ink", "soft"] {
                    assert!(contrast(&colour(text), background) >= 4.5, "{text} on {background}");
                }
                let protocols = ["nbd", "iscsi", "nvme-tcp", "iser", "srp", "nvme-rdma", "aoe", "other"];
                for bar in protocols {
                    assert!(contrast(&colour(bar), background) >= 3.0, "{bar} on {background}");
                }
            }
        }
    }
}
