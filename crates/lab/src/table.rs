//! The terminal table: one block for each job, one line for each configuration.
//!
//! Every number is the median over the runs. If the terminal is too narrow, the least useful
//! columns are omitted, see `Column::keep`.

use crate::change::FIGURES;
use crate::figure::{self, Figure, Labels, shortened};
use crate::grid::{self, Grid};
use crate::result::{Changes, Comparison, FigureChange, Row};
use crate::suite::{PublishedFigure, Study};
use blockmux_volume::text::replaced;
use std::fmt::Write as _;

/// Maximum number of characters in a line; 80 suffice for short configuration names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Width(pub usize);

/// Whether to use terminal escape sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    /// Plain text, for anything that is not a terminal.
    Off,
    /// ANSI escape sequences.
    Ansi,
}

/// Formats a comparison, with a study's figures next to the measured ones. Control characters in
/// text from outside are removed.
#[must_use]
pub fn render(comparison: &Comparison, study: Option<&Study>, width: Width, colour: Colour) -> String {
    let labels = Labels::of(comparison);
    let longest = comparison.rows.iter().map(|row| labels.label(row).chars().count()).max().unwrap_or(0);
    let label_width = longest.clamp(MIN_LABEL, MAX_LABEL);
    let columns = fitting(width.0, label_width, comparison.has_devices());
    let grids = study.map_or_else(Vec::new, |study| grid::grids(comparison, study));
    let table = TextTable { comparison, study, grids, labels, label_width, columns, width: width.0, colour };
    let mut out = String::new();
    table.head(&mut out);
    for group in comparison.groups() {
        // Of another program there are only rates, which the study's tables have.
        match group[0].job.program.is_some() && !table.grids.is_empty() {
            true => table.errors(&mut out, &group),
            false => table.group(&mut out, &group),
        }
    }
    table.grids.iter().for_each(|grid| table.grid(&mut out, grid));
    comparison.changes.iter().for_each(|changes| table.changes(&mut out, changes));
    table.not_run(&mut out);
    table.legend(&mut out);
    out
}

struct TextTable<'a> {
    comparison: &'a Comparison,
    study: Option<&'a Study>,
    grids: Vec<Grid>,
    labels: Labels,
    label_width: usize,
    columns: Vec<&'static Column>,
    width: usize,
    colour: Colour,
}

/// One column of numbers.
struct Column {
    /// Heading shared by neighbouring columns, printed once above them.
    over: &'static str,
    name: &'static str,
    /// In characters, including the space before it.
    width: usize,
    /// Columns are omitted in ascending order until the table fits; the largest value is never
    /// omitted.
    keep: u8,
    cell: Cell,
}

enum Cell {
    Count(Figure),
    Measure(Figure),
    HalfRange(Figure),
    Share,
}

impl TextTable<'_> {
    fn head(&self, out: &mut String) {
        let machine = &self.comparison.machine;
        let line = plain(&figure::machine(machine));
        self.paragraph(out, &line);
        let suite = self.comparison.suite.as_ref().map(|suite| format!(", suite {}", plain(suite)));
        let line = format!(
            "{}  {}{}",
            plain(&self.comparison.started),
            plain(&self.comparison.command),
            suite.unwrap_or_default()
        );
        self.paragraph(out, &line);
        for condition in &self.comparison.conditions {
            self.paragraph(out, &plain(condition));
        }
        if let Some(caution) = self.comparison.caution() {
            self.paragraph(out, &caution);
        }
    }

    fn group(&self, out: &mut String, group: &[&Row]) {
        let _ = writeln!(out, "\n{}", self.styled(BOLD, &figure::title(&group[0].job)));
        let _ = writeln!(out, "{}", self.styled(DIM, &self.heading_over()));
        let _ = writeln!(out, "{}", self.styled(DIM, &self.heading()));
        for row in group {
            let line = self.line(row);
            let style = if row.kind.is_ceiling() { DIM } else { "" };
            let _ = writeln!(out, "{}", self.styled(style, &line));
            self.errors(out, std::slice::from_ref(row));
        }
        // If the study's own tables follow, they contain its figures.
        let study = self.study.filter(|_| self.grids.is_empty());
        let figures = study.iter().flat_map(|study| &study.figures);
        let figures: Vec<_> = figures.filter(|figure| figure.is_about(&group[0].job)).collect();
        for cell in figures.chunk_by(|a, b| a.name() == b.name()) {
            let _ = writeln!(out, "{}", self.styled(DIM, &self.published(cell)));
        }
    }

    fn errors(&self, out: &mut String, rows: &[&Row]) {
        for error in rows.iter().flat_map(|row| row_errors(row)) {
            let _ = writeln!(out, "{}", self.styled(RED, &format!("    ! {error}")));
        }
    }

    /// One of the study's tables, with our figures next to the study's.
    fn grid(&self, out: &mut String, grid: &Grid) {
        let title = format!("{}, MB/s: measured here, then as published", plain(&grid.title));
        let _ = writeln!(out, "\n{}", self.styled(BOLD, &title));
        // The first word of "12 disks" and "PS3, 4 disks" suffices, and 1500 needs no "MTU".
        let short = |name: &String| {
            let end = name.find([' ', ',']).unwrap_or(name.len());
            plain(&name[..end])
        };
        let columns = grid.columns.len().max(1);
        let cell_width = if columns > 2 { GRID_CELL } else { GRID_WIDE };
        let cells = |cells: Vec<String>| {
            let cell = |(at, cell): (usize, String)| {
                let width = if at.is_multiple_of(columns) { GRID_FIRST } else { cell_width };
                format!("{cell:>width$}")
            };
            cells.into_iter().enumerate().map(cell).collect::<String>()
        };
        let over = grid.jobs.iter().map(|job| {
            let width = GRID_FIRST + cell_width * (columns - 1) - 1;
            format!(" {:─^width$}", format!(" {} ", plain(job)))
        });
        let head = grid.jobs.iter().flat_map(|_| grid.columns.iter().map(short)).collect();
        for line in [over.collect(), cells(head)] {
            let _ = writeln!(out, "{}", self.styled(DIM, format!("{:GRID_NAME$}{line}", "").trim_end()));
        }
        for (name, line) in &grid.lines {
            let name = plain(&name.replace("MTU ", ""));
            let line = format!("{name:GRID_NAME$}{}", cells(line.clone()));
            let _ = writeln!(out, "{}", line.trim_end());
        }
    }

    /// The changes between two reports.
    fn changes(&self, out: &mut String, changes: &Changes) {
        let [before, after] =
            [&changes.before, &changes.after].map(|name| shortened(&plain(name), MAX_LABEL));
        let title = format!("Change from {before} to {after}");
        let _ = writeln!(out, "\n{}", self.styled(BOLD, &title));
        let room = self.label_width;
        for cases in changes.by_job() {
            let _ = writeln!(out, "{}", plain(&cases[0].job));
            let names: String = FIGURES.iter().map(|(name, _)| format!("{name:>CHANGE$}")).collect();
            let head = format!("{:room$}{:>CHANGED$}{:>CHANGED$}{names}", "", "before", "after");
            let _ = writeln!(out, "{}", self.styled(DIM, &head));
            for case in cases {
                let label = shortened(&plain(&case.configuration), room);
                let count = |of: fn(&FigureChange) -> f64| {
                    case.of(Figure::Iops).map_or_else(|| "-".to_owned(), |change| figure::count(of(change)))
                };
                let (before, after) = (count(|change| change.before), count(|change| change.after));
                let _ = write!(out, "{label:room$}{before:>CHANGED$}{after:>CHANGED$}");
                for (_, figure) in FIGURES {
                    let text = case.of(figure).map_or_else(|| "-".to_owned(), FigureChange::text);
                    let _ = write!(out, "{text:>CHANGE$}");
                }
                out.push('\n');
            }
        }
        self.paragraph(out, CHANGES_LEGEND);
    }

    /// A study's figures in the corresponding columns, then their labels.
    fn published(&self, figures: &[&PublishedFigure]) -> String {
        let mut line = format!("{PUBLISHED:<0$}", self.label_width);
        let value = |own: Figure, shown: fn(f64) -> String| {
            figures.iter().find_map(|figure| {
                let (same, per_unit) = figure.unit.measured_as();
                let about = if figure.approximate { "~" } else { "" };
                (same == own).then(|| format!("{about}{}", shown(figure.value / per_unit)))
            })
        };
        let shown = |cell: &Cell| match *cell {
            Cell::Count(own) => value(own, figure::count),
            Cell::Measure(own) => value(own, figure::measure),
            Cell::HalfRange(_) | Cell::Share => None,
        };
        let last = self.columns.iter().rposition(|column| PUBLISHED_COLUMNS.contains(&column.name));
        for column in self.columns.iter().take(last.map_or(0, |last| last + 1)) {
            let _ = write!(line, "{:>1$}", shown(&column.cell).unwrap_or_default(), column.width);
        }
        let room = self.width.saturating_sub(line.chars().count() + 2);
        let name = figures.first().map(|figure| figure.name()).unwrap_or_default();
        let _ = write!(line, "  {}", shortened(&plain(&name), room));
        line
    }

    /// Shared headings, centred above their columns.
    fn heading_over(&self) -> String {
        let mut line = " ".repeat(self.label_width);
        for columns in self.columns.chunk_by(|a, b| a.over == b.over) {
            let width: usize = columns.iter().map(|column| column.width).sum();
            let over = columns[0].over;
            if over.is_empty() {
                line.push_str(&" ".repeat(width));
            } else {
                let _ = write!(line, " {over:─^rest$}", over = format!(" {over} "), rest = width - 1);
            }
        }
        line.trim_end().to_owned()
    }

    fn heading(&self) -> String {
        let mut line = " ".repeat(self.label_width);
        for column in &self.columns {
            let _ = write!(line, "{:>1$}", column.name, column.width);
        }
        line
    }

    fn line(&self, row: &Row) -> String {
        let label = shortened(&plain(&self.labels.label(row)), self.label_width);
        let mut line = format!("{label:<0$}", self.label_width);
        let mut end = self.label_width;
        for column in &self.columns {
            let text = column.cell.text(self.comparison, row).unwrap_or_else(|| "-".into());
            end += column.width;
            // A number too long for its column uses room of the next one, but never touches its
            // neighbour.
            let room = end.saturating_sub(line.chars().count() + 1);
            let _ = write!(line, " {text:>room$}");
        }
        line
    }

    fn not_run(&self, out: &mut String) {
        if self.comparison.skipped.is_empty() {
            return;
        }
        let _ = writeln!(out, "\n{}", self.styled(BOLD, "Not run"));
        for (reason, rows) in self.comparison.skipped_by_reason() {
            if let [row] = rows.as_slice() {
                self.paragraph(out, &plain(&format!("{reason}: {row}")));
                continue;
            }
            // Names contain commas.
            self.paragraph(out, &plain(&format!("{reason}:")));
            for row in rows {
                let _ = writeln!(out, "{}", self.styled(DIM, &plain(&format!("  {row}"))));
            }
        }
    }

    fn legend(&self, out: &mut String) {
        out.push('\n');
        let noisy = if self.comparison.has_noisy_ceiling() { NOISY_CEILING } else { "" };
        self.paragraph(out, &self.how_measured());
        if !self.has_only_grids() {
            let is_shown = |name: &str| self.columns.iter().any(|column| column.name == name);
            let sentences = LEGEND.into_iter().filter(|(column, _)| is_shown(column));
            let sentences: Vec<_> = sentences.map(|(_, sentence)| sentence).collect();
            self.paragraph(out, &format!("{}{noisy}", sentences.join(" ")));
        }
        if let Some(study) = self.study.filter(|study| !study.figures.is_empty()) {
            self.paragraph(out, &plain(&format!("{PUBLISHED}: {}, measured elsewhere.", study.source)));
        }
    }

    /// Whether the study's tables are all that is shown.
    fn has_only_grids(&self) -> bool {
        !self.grids.is_empty() && self.comparison.rows.iter().all(|row| row.job.program.is_some())
    }

    fn how_measured(&self) -> String {
        let measured = || self.comparison.rows.iter().filter(|row| !row.runs.is_empty());
        let range = |of: fn(&Row) -> u64| Some((measured().map(of).min()?, measured().map(of).max()?));
        let runs = match range(|row| row.runs.len() as u64) {
            None => return "Nothing was measured.".into(),
            Some((1, 1)) => "Single runs, without a spread,".to_owned(),
            Some((least, most)) if least == most => format!("Medians of {most} runs"),
            Some((least, most)) => format!("Medians of {least} to {most} runs"),
        };
        let time = match range(|row| row.job.runtime_ms) {
            Some((least, most)) if least != most => {
                format!("{} to {}", figure::seconds(least), figure::seconds(most))
            }
            // Another program decides for how long it runs.
            Some((0, _)) | None => return format!("{}.", runs.trim_end_matches(',')),
            Some((least, _)) => figure::seconds(least),
        };
        format!("{runs} of {time}.")
    }

    /// Wraps text at spaces.
    fn paragraph(&self, out: &mut String, text: &str) {
        let mut line = String::new();
        for word in text.split(' ') {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > self.width {
                let _ = writeln!(out, "{}", self.styled(DIM, &line));
                line.clear();
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        let _ = writeln!(out, "{}", self.styled(DIM, &line));
    }

    fn styled(&self, style: &str, text: &str) -> String {
        match self.colour {
            Colour::Ansi if !style.is_empty() => format!("{style}{text}{RESET}"),
            _ => text.to_owned(),
        }
    }
}

impl Cell {
    fn text(&self, comparison: &Comparison, row: &Row) -> Option<String> {
        match *self {
            Cell::Count(figure) => row.median(figure).map(figure::count),
            Cell::Measure(figure) => row.median(figure).map(figure::measure),
            // One run has no spread, which differs from a spread of 0.
            Cell::HalfRange(_) if row.runs.len() < 2 => None,
            Cell::HalfRange(figure) => {
                row.figure(figure).map(|spread| format!("{:.0}", spread.half_range_percent()))
            }
            Cell::Share => comparison.share_of_ceiling(row).map(figure::percent),
        }
    }
}

/// Errors of a row's runs, in words.
pub(crate) fn row_errors(row: &Row) -> Vec<String> {
    let sum = |of: fn(&crate::result::Run) -> u64| row.runs.iter().map(of).sum::<u64>();
    let (errors, verify_errors) = (sum(|run| run.errors), sum(|run| run.verify_errors));
    let mut row_errors = Vec::new();
    if errors > 0 {
        row_errors.push(format!("{errors} I/O failed"));
    }
    if verify_errors > 0 {
        row_errors.push(format!("{verify_errors} blocks had other content than was written"));
    }
    let idle = row.runs.iter().filter(|run| run.is_idle()).count();
    if idle > 0 {
        row_errors.push(format!("no I/O completed in {idle} of {} runs", row.runs.len()));
    }
    row_errors
}

fn fitting(width: usize, label_width: usize, has_devices: bool) -> Vec<&'static Column> {
    let is_shown = |column: &&Column| has_devices || column.name != MACHINE;
    let mut columns: Vec<&Column> = COLUMNS.iter().filter(is_shown).collect();
    let total = |columns: &[&Column]| label_width + columns.iter().map(|column| column.width).sum::<usize>();
    while total(&columns) > width {
        let least = columns.iter().map(|column| column.keep).min().unwrap_or(u8::MAX);
        if least == u8::MAX {
            break;
        }
        columns.retain(|column| column.keep != least);
    }
    columns
}

fn plain(text: &str) -> String {
    replaced(text, '\u{fffd}')
}

const COLUMNS: &[Column] = &[
    Column { over: "", name: "IOPS", width: 6, keep: u8::MAX, cell: Cell::Count(Figure::Iops) },
    Column { over: "", name: "±%", width: 4, keep: 7, cell: Cell::HalfRange(Figure::Iops) },
    Column { over: "", name: "MB/s", width: 6, keep: 6, cell: Cell::Measure(Figure::MbPerSecond) },
    Column { over: "latency, us", name: "mean", width: 6, keep: 9, cell: Cell::Measure(Figure::Mean) },
    Column { over: "latency, us", name: "p50", width: 6, keep: 3, cell: Cell::Measure(Figure::P50) },
    Column { over: "latency, us", name: "p99", width: 6, keep: 8, cell: Cell::Measure(Figure::P99) },
    Column { over: "latency, us", name: "p99.9", width: 6, keep: 1, cell: Cell::Measure(Figure::P999) },
    Column { over: "latency, us", name: "max", width: 6, keep: 2, cell: Cell::Measure(Figure::Max) },
    Column { over: "CPU us/IO", name: "tgt", width: 5, keep: 5, cell: Cell::Measure(Figure::TargetCpu) },
    Column { over: "CPU us/IO", name: "ini", width: 5, keep: 5, cell: Cell::Measure(Figure::InitiatorCpu) },
    Column {
        over: "CPU us/IO",
        name: MACHINE,
        width: 5,
        keep: u8::MAX,
        cell: Cell::Measure(Figure::MachineCpu),
    },
    Column { over: "", name: CPU_PER_GBIT, width: 5, keep: 4, cell: Cell::Measure(Figure::CpuPerGbit) },
    Column { over: "", name: "ceil", width: 5, keep: u8::MAX, cell: Cell::Share },
];

/// Sentences of the legend, each with a column that has to be shown for it.
const LEGEND: [(&str, &str); 6] = [
    ("±%", "±%: half the range of the runs."),
    ("mean", "Latency: submit to completion."),
    ("tgt", "tgt, ini: CPU time of target and initiator."),
    (CPU_PER_GBIT, "%/Gb: per cent of a core, both sides, for each Gbit/s of payload."),
    ("ceil", CEILING_LEGEND),
    (MACHINE, MACHINE_LEGEND),
];
const CEILING_LEGEND: &str = "ceil: share of the IOPS of bare sockets with the same message sizes and the same polling \
(never: the one that sleeps, always: the one that spins, adaptive: the faster of the two).";
const MACHINE_LEGEND: &str = "all: CPU time of this whole machine for each I/O, of the kernel and of all programs: \
the only one that is known of a disk.";
const CHANGES_LEGEND: &str = "IOPS of both, then the changes; of p50, p99 and the CPU time for each Gbit/s (%/Gb), less is \
better. In brackets: the runs of both reports overlap, or one has a single run, so that the change may be chance.";
/// Width of a count, and of a change.
const CHANGED: usize = 7;
const CHANGE: usize = 9;
/// The column of the machine's CPU time.
const MACHINE: &str = "all";
/// The column of the CPU time for each Gbit/s.
const CPU_PER_GBIT: &str = "%/Gb";
/// Printed if a share exceeds 100%.
pub(crate) const NOISY_CEILING: &str = " A share well over 100% is noise: other programs used the machine. Repeat with \
more or longer runs on an otherwise idle machine.";
/// Name of the line with a study's figures.
const PUBLISHED: &str = "published";
/// Columns that studies have figures for.
const PUBLISHED_COLUMNS: [&str; 3] = ["IOPS", "MB/s", "mean"];
/// Room for "10 Gbit/s, 4132".
const GRID_NAME: usize = 16;
const GRID_FIRST: usize = 6;
const GRID_CELL: usize = 5;
/// Minimum width for the word "there".
const GRID_WIDE: usize = 7;
/// Room for "ceiling sleeps".
const MIN_LABEL: usize = 14;
const MAX_LABEL: usize = 28;
const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
const RED: &str = "\x1b[31m";
const RESET: &str = "\x1b[0m";
