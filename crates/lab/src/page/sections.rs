//! Chooses the charts of the page from a comparison's rows.

use super::chart::{Bar, BarGroup, Bars, Panel};
use super::curves::{self, Along};
use super::families::{Group, families};
use super::ratio::{Ratio, Ratios, Value, class};
use super::relative;
use crate::figure::{self, Figure, Labels};
use crate::result::{Comparison, ConfigurationKind, Row, Run};
use crate::suite::{Reference, Study, StudyChart};

/// Charts under one heading.
pub(super) struct Section {
    /// Anchor and key of the heading; unique on the page.
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) note: String,
    /// Why some bars are hatched; empty if none is.
    pub(super) reason: &'static str,
    /// (class, meaning of its colour), if the charts do not show it themselves.
    pub(super) legend: &'static [(&'static str, &'static str)],
    pub(super) blocks: Vec<Block>,
}

/// Charts that belong together within a section; an empty title takes no space.
pub(super) struct Block {
    pub(super) title: String,
    pub(super) cards: Vec<Card>,
}

/// One chart.
pub(super) struct Card {
    pub(super) title: String,
    pub(super) unit: String,
    pub(super) svg: String,
    /// Some of its bars are hatched.
    pub(super) is_hatched: bool,
}

/// The sections about measured results; sections without a chart are omitted.
pub(super) fn measured(comparison: &Comparison, labels: &Labels) -> Vec<Section> {
    let groups = comparison.groups();
    let sections = [
        scaling(comparison, labels, &groups),
        rates(comparison, labels, &groups),
        latency(labels, &groups),
        cpu(comparison, labels, &groups),
    ];
    sections.into_iter().map(without_empty).filter(|section| !section.blocks.is_empty()).collect()
}

/// A study's figures and the measured ones, relative to their references, and the figures
/// themselves.
pub(super) fn published(comparison: &Comparison, labels: &Labels, study: &Study) -> (Section, Vec<Absolute>) {
    let mut absolute = Vec::new();
    let mut card = |chart: &StudyChart| {
        let groups = relative::groups(comparison, labels, study, chart);
        for (protocol, row) in groups.iter().flat_map(|(name, rows)| rows.iter().map(move |row| (name, row)))
        {
            absolute.push(Absolute::of(&chart.title, protocol, row));
        }
        let better = if chart.unit.more_is_better() { "" } else { ", lower is better" };
        let title = format!("{}, relative to {}", chart.title, chart.reference.protocol);
        Card {
            title: chart.title.clone(),
            unit: format!("{}{better}", chart.unit),
            svg: Ratios { title, groups }.draw(),
            is_hatched: false,
        }
    };
    let cards = study.charts.iter().map(&mut card).collect();
    let note = study.charts.first().map_or_else(
        || "The study gives no numbers to compare with.".to_owned(),
        |first| {
            let Reference { protocol, label } = &first.reference;
            let figures = "the figures themselves come from different machines, networks and disks. The axis is logarithmic.";
            if study.charts.iter().any(|chart| chart.reference.protocol != *protocol) {
                return format!(
                    "Each side is relative to its own reference, the row at 1.00: published figures to one of the study, \
                     measured ones to the same one here. Compare which protocol leads and by how much: {figures}"
                );
            }
            // If the charts have different references, each chart shows its own at 1.00.
            let is_only = study.charts.iter().all(|chart| chart.reference.label == *label);
            let label = if is_only { format!(" ({label})") } else { String::new() };
            format!(
                "Each side is relative to its own reference, {protocol} = 1.00: published figures to the study's \
                 {protocol}{label}, measured ones to {protocol} here. Compare which protocol leads and by how much: \
                 {figures}"
            )
        },
    );
    let section = without_empty(Section {
        id: "published",
        title: "Published and measured",
        note,
        reason: "",
        legend: &[],
        blocks: vec![Block { title: String::new(), cards }],
    });
    (section, absolute)
}

/// The figures behind one row of a study's charts.
pub(super) struct Absolute {
    pub(super) class: &'static str,
    pub(super) protocol: String,
    /// The chart, the row's label, the measured value, the published value.
    pub(super) cells: [String; 4],
}

impl Absolute {
    fn of(chart: &str, protocol: &str, row: &Ratio) -> Absolute {
        let shown =
            |value: &Option<Value>| value.as_ref().map_or("–".to_owned(), |value| value.shown.clone());
        let cells = [chart.to_owned(), row.label.clone(), shown(&row.measured), shown(&row.published)];
        Absolute { class: row.class, protocol: protocol.to_owned(), cells }
    }
}

/// Rate and CPU cost by block size and by depth, where enough of them were measured for a line.
fn scaling(comparison: &Comparison, labels: &Labels, groups: &[Group]) -> Section {
    let cost = if comparison.has_devices() { Figure::MachinePerGbit } else { Figure::CpuPerGbit };
    let cards = |along: Along| {
        let families = families(groups, |a, b| along.joins(a, b)).into_iter();
        let families = families.filter(|family| curves::places(family, along).len() >= MIN_PLACES);
        let card = |family: Vec<&Group>| {
            let job = &family[0][0].job;
            let panel = |heading: &str, unit, figure| Panel {
                heading: heading.to_owned(),
                unit,
                lines: curves::lines(labels, &family, figure, along),
            };
            let mut panels = vec![panel("MB/s", "MB/s", Figure::MbPerSecond)];
            // Block sizes have different figures; at one block size, either tells all.
            match (along, job.is_small()) {
                (Along::BlockSize, _) => panels.insert(0, panel("IOPS", "IOPS", Figure::Iops)),
                (Along::Depth, true) => panels = vec![panel("IOPS", "IOPS", Figure::Iops)],
                (Along::Depth, false) => {}
            }
            panels.push(panel("% of a core per Gbit/s", "% of a core per Gbit/s", cost));
            panels.retain(|panel| !panel.lines.is_empty());
            let (title, unit) = (along.title(job), format!("by {}", along.name()));
            let svg = curves::draw(format!("{title}, {unit}"), &family, along, panels);
            Card { title, unit, svg, is_hatched: false }
        };
        families.map(card).collect()
    };
    let block = |along: Along| Block { title: String::new(), cards: cards(along) };
    Section {
        id: "scaling",
        title: "By block size and depth",
        note: "Medians of all runs with their ranges, on logarithmic axes. The CPU time is that of both sides, or of the \
               whole machine if disks were measured, for each Gbit/s of payload. The local volume is omitted."
            .to_owned(),
        reason: "",
        legend: &[],
        blocks: vec![block(Along::BlockSize), block(Along::Depth)],
    }
}

fn rates(comparison: &Comparison, labels: &Labels, groups: &[Group]) -> Section {
    let card = |group: &&Group| {
        let (figure, unit, shown): (_, _, fn(f64) -> String) = if group[0].job.is_small() {
            (Figure::Iops, "IOPS", figure::count)
        } else {
            (Figure::MbPerSecond, "MB/s", figure::measure)
        };
        let bars: Vec<Bar> = without_ceilings(group)
            .filter_map(|row| {
                let ceiling = comparison.ceiling_of(row).and_then(|ceiling| ceiling.median(figure));
                Some(Bar {
                    label: labels.label(row),
                    parts: vec![(row.median(figure)?, class(row))],
                    runs: row.runs.iter().filter_map(|run| figure.of(row.kind, run)).collect(),
                    may_break: row.kind == ConfigurationKind::Local,
                    share: ceiling.and_then(|_| comparison.share_of_ceiling(row)),
                    ceiling,
                    text: None,
                })
            })
            .collect();
        let is_hatched = bars.iter().any(Bar::is_hatched);
        let title = format!("{unit}, {}", figure::title(&group[0].job));
        Card {
            title: figure::title_within_size(&group[0].job),
            unit: unit.into(),
            svg: Bars { title, groups: vec![BarGroup { heading: String::new(), bars }], shown }.draw(),
            is_hatched,
        }
    };
    let blocks = by_block_size(groups, card);
    let has_hatched = blocks.iter().flat_map(|block| &block.cards).any(|card| card.is_hatched);
    let has_ceiling = comparison.rows.iter().any(|row| comparison.ceiling_of(row).is_some());
    let ceiling = if has_ceiling { CEILING } else { "" };
    Section {
        id: "rate",
        title: "IOPS and throughput",
        note: format!(
            "Blocks of up to 16 KiB in I/O per second, larger ones in MB/s. Longer is better. A bar is the median of all \
             runs; dots are the runs, and the line through them is their spread. Each chart has its own axis; bars of \
             the local volume that exceed it are truncated.{ceiling}"
        ),
        reason: if has_hatched { HATCHED } else { "" },
        legend: &[],
        blocks,
    }
}

fn latency(labels: &Labels, groups: &[Group]) -> Section {
    let mut cards = Vec::new();
    let (mut has_bars, mut has_lines) = (false, false);
    for family in families(groups, |a, b| Along::Depth.joins(a, b)) {
        if curves::places(&family, Along::Depth).len() < 2 {
            has_bars = true;
            cards.extend(family.iter().map(|group| latency_bars(labels, group)));
            continue;
        }
        has_lines = true;
        let panel = |heading: &str, figure| Panel {
            heading: heading.to_owned(),
            unit: "µs",
            lines: curves::lines(labels, &family, figure, Along::Depth),
        };
        let panels = vec![panel("mean", Figure::Mean), panel("p99", Figure::P99)];
        let title = Along::Depth.title(&family[0][0].job);
        let svg = curves::draw(format!("Latency by queue depth, {title}"), &family, Along::Depth, panels);
        cards.push(Card { title, unit: "µs".into(), svg, is_hatched: false });
    }
    let bars = "A bar is solid up to p50 and pale up to p99. ";
    let lines = "Where several depths were measured, lines show the mean and p99 by queue depth on logarithmic axes. ";
    Section {
        id: "latency",
        title: "Latency",
        note: format!(
            "From submission to completion, in microseconds. Lower is better. {}{}The local volume is omitted. A \
             mixed job shows its slower direction.",
            if has_bars { bars } else { "" },
            if has_lines { lines } else { "" }
        ),
        reason: "",
        legend: &[],
        blocks: vec![Block { title: String::new(), cards }],
    }
}

/// p50 and p99 of one job; the mean for a report without percentiles.
fn latency_bars(labels: &Labels, group: &Group) -> Card {
    let only_local = group.iter().all(|row| row.kind == ConfigurationKind::Local);
    let shown = |row: &&Row| only_local || row.kind != ConfigurationKind::Local;
    let bars = without_ceilings(group).filter(shown).filter_map(|row| latency_bar(labels, row));
    let title = figure::title(&group[0].job);
    let groups = vec![BarGroup { heading: String::new(), bars: bars.collect() }];
    let name = format!("Latency p50 / p99 in microseconds, {title}");
    let svg = Bars { title: name, groups, shown: figure::measure }.draw();
    Card { title, unit: "µs, p50 / p99".into(), svg, is_hatched: false }
}

fn latency_bar(labels: &Labels, row: &Row) -> Option<Bar> {
    let (parts, text) = match (row.median(Figure::P50), row.median(Figure::P99)) {
        (Some(p50), Some(p99)) => {
            let pale = format!("{} pale", class(row));
            let text = format!("{} / {}", figure::measure(p50), figure::measure(p99));
            (vec![(p50, class(row)), ((p99 - p50).max(0.0), pale)], Some(text))
        }
        _ => (vec![(row.median(Figure::Mean)?, class(row))], None),
    };
    Some(Bar { label: labels.label(row), parts, text, ..Bar::default() })
}

/// CPU time per I/O for small blocks, and per Gbit/s for large ones. The target's part is first.
fn cpu(comparison: &Comparison, labels: &Labels, groups: &[Group]) -> Section {
    // Of a disk only the machine's CPU time is known, which is then shown of all.
    let whole_machine = comparison.has_devices();
    let card = |group: &&Group| {
        let (figure, unit) = match (group[0].job.is_small(), whole_machine) {
            (true, false) => (CpuCost::PerIo, "µs per I/O"),
            (false, false) => (CpuCost::Of(Figure::CpuPerGbit), "% of a core per Gbit/s"),
            (true, true) => (CpuCost::Of(Figure::MachineCpu), "µs per I/O"),
            (false, true) => (CpuCost::Of(Figure::MachinePerGbit), "% of a core per Gbit/s"),
        };
        let bars = without_ceilings(group).filter_map(|row| {
            let runs: Vec<f64> = row.runs.iter().filter_map(|run| figure.both(row.kind, run)).collect();
            let both = row.spread(|run| figure.both(row.kind, run))?.median;
            let side = |figure| row.median(figure).unwrap_or(0.0);
            let initiator = side(Figure::InitiatorCpu);
            let target = match whole_machine {
                true => (side(Figure::MachineCpu) - initiator).max(0.0),
                false => side(Figure::TargetCpu),
            };
            let part = |us: f64| both * us / (target + initiator).max(f64::MIN_POSITIVE);
            let pale = format!("{} pale", class(row));
            let ceiling = comparison.ceiling_of(row);
            Some(Bar {
                label: labels.label(row),
                parts: vec![(part(target), class(row)), (part(initiator), pale)],
                runs,
                ceiling: ceiling.and_then(|row| Some(row.spread(|run| figure.both(row.kind, run))?.median)),
                ..Bar::default()
            })
        });
        let title = format!("CPU time, {unit}, {}", figure::title(&group[0].job));
        let groups = vec![BarGroup { heading: String::new(), bars: bars.collect() }];
        Card {
            title: figure::title_within_size(&group[0].job),
            unit: unit.into(),
            svg: Bars { title, groups, shown: figure::measure }.draw(),
            is_hatched: false,
        }
    };
    Section {
        id: "cpu",
        title: "CPU time",
        note: if whole_machine { MACHINE_CPU } else { BOTH_SIDES_CPU }.into(),
        reason: "",
        legend: match whole_machine {
            true => &[("other", "the rest of the machine"), ("other pale", "load generator and initiator")],
            false => &[("other", "target"), ("other pale", "initiator")],
        },
        blocks: by_block_size(groups, card),
    }
}

/// CPU time of both sides together.
#[derive(Clone, Copy)]
enum CpuCost {
    /// Microseconds of target and initiator.
    PerIo,
    /// A figure that includes both.
    Of(Figure),
}

impl CpuCost {
    /// The CPU time of one run; `None` if a side was not measured. A local volume has no target.
    fn both(self, kind: ConfigurationKind, run: &Run) -> Option<f64> {
        match self {
            CpuCost::Of(figure) => figure.of(kind, run),
            CpuCost::PerIo => {
                let target = Figure::TargetCpu.of(kind, run);
                let target = if kind == ConfigurationKind::Local { target.or(Some(0.0)) } else { target };
                Some(target? + Figure::InitiatorCpu.of(kind, run)?)
            }
        }
    }
}

/// Ceilings have no bars of their own: they are ticks on other bars.
fn without_ceilings<'a>(group: &Group<'a>) -> impl Iterator<Item = &'a Row> {
    group.iter().copied().filter(|row| !row.kind.is_ceiling())
}

/// A block for each block size; a few charts are in one block, with the block size in their titles.
fn by_block_size(groups: &[Group], card: impl Fn(&&Group) -> Card) -> Vec<Block> {
    if groups.len() <= ONE_BLOCK {
        let whole = |group: &Group| Card { title: figure::title(&group[0].job), ..card(&group) };
        return vec![Block { title: String::new(), cards: groups.iter().map(whole).collect() }];
    }
    let families = families(groups, |a, b| a.bs == b.bs).into_iter();
    let block = |family: Vec<&Group>| Block {
        title: figure::bytes(u64::from(family[0][0].job.bs)),
        cards: family.iter().map(&card).collect(),
    };
    families.map(block).collect()
}

fn without_empty(mut section: Section) -> Section {
    for block in &mut section.blocks {
        block.cards.retain(|card| !card.svg.is_empty());
    }
    section.blocks.retain(|block| !block.cards.is_empty());
    section
}

const BOTH_SIDES_CPU: &str = "User and system time of both sides. Shorter is better. The tick is the CPU time of the \
ceiling. The table of all figures shows how much of the time was spent in the kernel.";
const MACHINE_CPU: &str = "Busy time of all CPUs of this machine, of the kernel and of all programs, because drivers and \
programs behind a disk cannot be told apart. Shorter is better. It includes a server on this machine, and excludes one \
elsewhere.";
/// From this many block sizes or depths on, a line says more than bars.
const MIN_PLACES: usize = 3;
/// Up to this many charts need no heading for each block size.
const ONE_BLOCK: usize = 4;
const CEILING: &str = " The tick on a bar is its ceiling, the raw-socket baseline: a request and response program without a \
protocol on the same sockets, with the same message sizes, depth and connections. The percentage is the bar's share of \
it. The baseline waits as the protocol does: with the polling policy “never” it sleeps, with “always” it spins, and with \
“adaptive” the faster of the two counts.";
const HATCHED: &str = "Hatched bars are above 110% of their ceiling, so the percentage is not a real share. Either other \
programs slowed the machine down while the ceiling was measured, or the ceiling's simple loop is not the best one for the \
block size.";
