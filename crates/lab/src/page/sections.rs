//! Which charts the page has, made from a comparison's rows.

use super::chart::{Bar, BarGroup, Bars, Line, Lines, Point};
use super::svg;
use crate::figure::{self, Figure, Labels};
use crate::result::{Comparison, Kind, Row};
use crate::suite::{PublishedFigure, Study, Unit};
use crate::table;

/// Charts under one heading.
pub(super) struct Section {
    /// Anchor and key of the heading; unique on the page.
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) note: String,
    /// (class, what that colour means), where the charts do not say so themselves.
    pub(super) legend: &'static [(&'static str, &'static str)],
    /// Measured by us, or taken from elsewhere.
    pub(super) published: bool,
    pub(super) blocks: Vec<Block>,
}

/// Charts that belong together within a section; an empty title takes no room.
pub(super) struct Block {
    pub(super) title: String,
    pub(super) cards: Vec<Card>,
}

/// One chart.
pub(super) struct Card {
    pub(super) title: String,
    pub(super) unit: String,
    pub(super) svg: String,
}

type Group<'a> = Vec<&'a Row>;

/// The sections about what was measured; those without a chart are left out.
pub(super) fn measured(comparison: &Comparison, labels: &Labels) -> Vec<Section> {
    let groups = comparison.groups();
    let sections = [
        iops(labels, &groups),
        throughput(labels, &groups),
        latency(labels, &groups),
        share(comparison, labels, &groups),
        cpu_per_gbit(labels, &groups),
        cpu_per_io(labels, &groups),
    ];
    sections.into_iter().map(without_empty).filter(|section| !section.blocks.is_empty()).collect()
}

/// The section about a study: what it says, and its figures beside ours.
pub(super) fn published(comparison: &Comparison, labels: &Labels, study: &Study) -> Section {
    let mut cards: Vec<(&PublishedFigure, Vec<&PublishedFigure>)> = Vec::new();
    for figure in &study.figures {
        match cards.iter_mut().find(|(first, _)| first.unit == figure.unit && first.is_about(&figure.job)) {
            Some((_, same)) => same.push(figure),
            None => cards.push((figure, vec![figure])),
        }
    }
    let cards = cards.iter().map(|(_, same)| published_card(comparison, labels, same)).collect();
    let note = if study.figures.is_empty() {
        "The study gives no numbers to put beside ours."
    } else {
        "Outlined bars are other people's figures, taken on other machines, networks and disks. They are here to \
         compare shapes (which protocol leads, and by how much), not absolute numbers."
    };
    without_empty(Section {
        id: "published",
        title: "Published beside measured",
        note: note.into(),
        legend: &[],
        published: true,
        blocks: vec![Block { title: String::new(), cards }],
    })
}

fn iops(labels: &Labels, groups: &[Group]) -> Section {
    let cards = |group: &&Group| bar_card(labels, group, Figure::Iops, "IOPS", figure::count);
    Section {
        id: "iops",
        title: "I/O per second",
        note: "Median of all runs; dots are the runs themselves, and the line through them is their spread. Longer is \
               better. Each chart has its own axis; what dwarfs the rest is drawn broken."
            .into(),
        legend: &[],
        published: false,
        blocks: by_block_size(groups, cards),
    }
}

fn throughput(labels: &Labels, groups: &[Group]) -> Section {
    let cards = across_block_sizes(groups).into_iter().map(|groups| Card {
        title: figure::pattern(groups[0][0].job.rw).into(),
        unit: "MB/s".into(),
        svg: bars(labels, &groups, Figure::MbPerSecond, figure::measure, "MB/s").draw(),
    });
    Section {
        id: "throughput",
        title: "Throughput by block size",
        note: "Payload in decimal megabytes per second, at the greatest depth measured for each block size. Longer is \
               better. What dwarfs the rest is drawn broken."
            .into(),
        legend: &[],
        published: false,
        blocks: vec![Block { title: String::new(), cards: cards.collect() }],
    }
}

fn latency(labels: &Labels, groups: &[Group]) -> Section {
    let mut cards = Vec::new();
    for family in
        families(groups, |a, b| (a.rw, a.bs, figure::modifiers(a)) == (b.rw, b.bs, figure::modifiers(b)))
    {
        let mut depths: Vec<u32> = family.iter().map(|group| group[0].job.iodepth).collect();
        // A report from elsewhere may say 0, which a logarithmic axis has no place for.
        depths.retain(|&depth| depth > 0);
        depths.sort_unstable();
        depths.dedup();
        let job = &family[0][0].job;
        let panel = |heading: &str, figure| (heading.to_owned(), latency_lines(labels, &family, figure));
        let title = format!(
            "{} {}{}",
            figure::bytes(u64::from(job.bs)),
            figure::pattern(job.rw),
            figure::modifiers(job)
        );
        let panels = vec![panel("mean", Figure::Mean), panel("p99", Figure::P99)];
        let svg = Lines { title: format!("Latency against depth, {title}"), depths, panels }.draw();
        cards.push(Card { title, unit: "µs".into(), svg });
    }
    Section {
        id: "latency",
        title: "Latency against depth",
        note: "From submit to completion, in microseconds, both axes logarithmic. Lower is better. The local volume \
               is left out, and of a mixed job the slower direction is shown."
            .into(),
        legend: &[],
        published: false,
        blocks: vec![Block { title: String::new(), cards }],
    }
}

fn latency_lines(labels: &Labels, family: &[&Group], figure: Figure) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    let mut groups: Vec<&&Group> = family.iter().collect();
    groups.sort_by_key(|group| group[0].job.iodepth);
    let only_local = family.iter().all(|group| group.iter().all(|row| row.kind == Kind::Local));
    // A local volume is so much faster that the axis would have no room left to tell the protocols apart.
    let shown = |row: &&&Row| row.job.iodepth > 0 && (only_local || row.kind != Kind::Local);
    for row in groups.into_iter().flat_map(|group| group.iter().filter(shown)) {
        let Some(spread) = row.figure(figure) else { continue };
        let point = Point { depth: row.job.iodepth, median: spread.median, min: spread.min, max: spread.max };
        let label = labels.label(row);
        match lines.iter_mut().find(|line| line.label == label) {
            Some(line) => line.points.push(point),
            None => lines.push(Line { label, class: class(row), points: vec![point] }),
        }
    }
    lines
}

fn share(comparison: &Comparison, labels: &Labels, groups: &[Group]) -> Section {
    let group = |group: &Group| {
        let bars = group.iter().filter_map(|row| {
            let share = comparison.share_of_ceiling(row)?;
            let ceiling = comparison.ceiling_of(row)?.median(Figure::Iops)?;
            let runs = row.runs.iter().map(|run| run.iops() / ceiling).collect();
            Some(Bar { label: labels.label(row), parts: vec![(share, class(row))], runs, may_break: false })
        });
        BarGroup { heading: figure::title_within_size(&group[0].job), bars: bars.collect() }
    };
    let cards = families(groups, |a, b| a.bs == b.bs).into_iter().map(|family| {
        let title = figure::bytes(u64::from(family[0][0].job.bs));
        let groups = family.into_iter().map(group).filter(|group| !group.bars.is_empty()).collect();
        let title_text = format!("Share of the ceiling, {title}");
        let svg = Bars {
            title: title_text,
            groups,
            shown: figure::percent,
            axis: svg::tick_percent,
            reference: Some(1.0),
        }
        .draw();
        Card { title, unit: "% of the ceiling's IOPS".into(), svg }
    });
    Section {
        id: "ceiling",
        title: "Share of the ceiling",
        note: format!(
            "The ceiling is a bare request and response program on the same sockets, with the same message sizes, \
             depth and connections. “never” is held against the one that sleeps, “always” against the one that \
             spins, “adaptive” against the faster of the two. The line is 100%.{}",
            if comparison.has_noisy_ceiling() { table::NOISY_CEILING } else { "" }
        ),
        legend: &[],
        published: false,
        blocks: vec![Block { title: String::new(), cards: cards.collect() }],
    }
}

fn cpu_per_gbit(labels: &Labels, groups: &[Group]) -> Section {
    let cards = across_block_sizes(groups).into_iter().map(|groups| Card {
        title: figure::pattern(groups[0][0].job.rw).into(),
        unit: "% of a core per Gbit/s".into(),
        svg: bars(labels, &groups, Figure::CpuPerGbit, figure::measure, "Per cent of a core per Gbit/s")
            .draw(),
    });
    Section {
        id: "cpu-per-gbit",
        title: "Processor time for each Gbit/s",
        note: "Per cent of one core, target and initiator together, for each Gbit/s of payload, at the greatest depth \
               measured for each block size. Shorter is better."
            .into(),
        legend: &[],
        published: false,
        blocks: vec![Block { title: String::new(), cards: cards.collect() }],
    }
}

fn cpu_per_io(labels: &Labels, groups: &[Group]) -> Section {
    let card = |group: &&Group| {
        let bars = group.iter().filter_map(|row| {
            let side = |figure, class: &str| row.median(figure).map(|us| (us, class.to_owned()));
            let sides = [side(Figure::TargetCpu, "target"), side(Figure::InitiatorCpu, "initiator")];
            let parts: Vec<_> = sides.into_iter().flatten().collect();
            let both =
                |run| Some(Figure::TargetCpu.of(row.kind, run)? + Figure::InitiatorCpu.of(row.kind, run)?);
            let runs = row.runs.iter().filter_map(both).collect();
            (!parts.is_empty()).then(|| Bar { label: labels.label(row), parts, runs, may_break: false })
        });
        let title = figure::title_within_size(&group[0].job);
        let groups = vec![BarGroup { heading: String::new(), bars: bars.collect() }];
        let name = format!("Processor microseconds for each I/O, {}", figure::title(&group[0].job));
        let svg =
            Bars { title: name, groups, shown: figure::measure, axis: svg::tick, reference: None }.draw();
        Card { title, unit: "µs".into(), svg }
    };
    Section {
        id: "cpu-per-io",
        title: "Processor time for each I/O",
        note: "Microseconds of processor time, user and system together; the kernel's part is among all figures. Shorter \
               is better.".into(),
        legend: &[("target", "target"), ("initiator", "initiator")],
        published: false,
        blocks: by_block_size(groups, card),
    }
}

fn published_card(comparison: &Comparison, labels: &Labels, figures: &[&PublishedFigure]) -> Card {
    let first = figures[0];
    let shown = if first.unit == Unit::Iops { figure::count } else { figure::measure };
    let (own, per_unit) = first.unit.measured_as();
    let is_shown = |row: &&Row| matches!(row.kind, Kind::Protocol | Kind::Local) && first.is_about(&row.job);
    let rows: Group = comparison.rows.iter().filter(is_shown).collect();
    let mut measured = bar_group(labels, &rows, own, "Measured here".into());
    for bar in &mut measured.bars {
        bar.parts.iter_mut().for_each(|(length, _)| *length *= per_unit);
        bar.runs.iter_mut().for_each(|run| *run *= per_unit);
    }
    let mut groups = Vec::from_iter((!measured.bars.is_empty()).then_some(measured));
    for of_one in figures.chunk_by(|a, b| a.protocol == b.protocol) {
        let bars = of_one.iter().map(|figure| Bar {
            label: if figure.approximate { format!("about, {}", figure.label) } else { figure.label.clone() },
            parts: vec![(figure.value, format!("outlined {}", protocol_class(&figure.protocol)))],
            runs: Vec::new(),
            may_break: false,
        });
        let heading = format!("Published: {}", of_one[0].protocol);
        groups.push(BarGroup { heading, bars: bars.collect() });
    }
    let title = figure::title(&first.job);
    let name = format!("{title}, published figures beside measured ones");
    let svg = Bars { title: name, groups, shown, axis: svg::tick, reference: None }.draw();
    Card { title, unit: first.unit.to_string(), svg }
}

fn bar_card(labels: &Labels, group: &Group, figure: Figure, unit: &str, shown: fn(f64) -> String) -> Card {
    let title = figure::title_within_size(&group[0].job);
    let groups = vec![bar_group(labels, group, figure, String::new())];
    let name = format!("{unit}, {}", figure::title(&group[0].job));
    Card {
        title,
        unit: unit.into(),
        svg: Bars { title: name, groups, shown, axis: svg::tick, reference: None }.draw(),
    }
}

/// A chart with a heading for each block size.
fn bars(labels: &Labels, groups: &[&Group], figure: Figure, shown: fn(f64) -> String, name: &str) -> Bars {
    let heading = |group: &Group| {
        let job = &group[0].job;
        format!("{}, depth {}{}", figure::bytes(u64::from(job.bs)), job.iodepth, figure::modifiers(job))
    };
    let title = format!("{name}, {}", figure::pattern(groups[0][0].job.rw));
    let groups = groups.iter().map(|group| bar_group(labels, group, figure, heading(group)));
    Bars {
        title,
        groups: groups.filter(|group| !group.bars.is_empty()).collect(),
        shown,
        axis: svg::tick,
        reference: None,
    }
}

fn bar_group(labels: &Labels, rows: &[&Row], figure: Figure, heading: String) -> BarGroup {
    let bar = |row: &&Row| {
        Some(Bar {
            label: labels.label(row),
            parts: vec![(row.median(figure)?, class(row))],
            runs: row.runs.iter().filter_map(|run| figure.of(row.kind, run)).collect(),
            may_break: row.kind == Kind::Local,
        })
    };
    BarGroup { heading, bars: rows.iter().filter_map(bar).collect() }
}

fn by_block_size(groups: &[Group], card: impl Fn(&&Group) -> Card) -> Vec<Block> {
    let families = families(groups, |a, b| a.bs == b.bs).into_iter();
    let block = |family: Vec<&Group>| Block {
        title: figure::bytes(u64::from(family[0][0].job.bs)),
        cards: family.iter().map(&card).collect(),
    };
    families.map(block).collect()
}

/// For each pattern, at each block size the job with the most I/O in flight.
fn across_block_sizes<'a, 'r>(groups: &'a [Group<'r>]) -> Vec<Vec<&'a Group<'r>>> {
    let deepest = |family: Vec<&'a Group<'r>>| {
        let in_flight = |group: &Group| u64::from(group[0].job.iodepth) * u64::from(group[0].job.numjobs);
        let mut best: Vec<&'a Group<'r>> = Vec::new();
        for group in family {
            match best.iter_mut().find(|other| other[0].job.bs == group[0].job.bs) {
                Some(other) if in_flight(other) < in_flight(group) => *other = group,
                Some(_) => {}
                None => best.push(group),
            }
        }
        best.sort_by_key(|group| group[0].job.bs);
        best
    };
    families(groups, |a, b| a.rw == b.rw).into_iter().map(deepest).collect()
}

/// Groups whose jobs are alike in some way, families in the order in which they first appear.
fn families<'a, 'r>(
    groups: &'a [Group<'r>],
    alike: impl Fn(&crate::job::Job, &crate::job::Job) -> bool,
) -> Vec<Vec<&'a Group<'r>>> {
    let mut families: Vec<Vec<&Group>> = Vec::new();
    for group in groups {
        match families.iter_mut().find(|family| alike(&family[0][0].job, &group[0].job)) {
            Some(family) => family.push(group),
            None => families.push(vec![group]),
        }
    }
    families
}

fn without_empty(mut section: Section) -> Section {
    for block in &mut section.blocks {
        block.cards.retain(|card| !card.svg.is_empty());
    }
    section.blocks.retain(|block| !block.cards.is_empty());
    section
}

/// The classes of a row: its colour, and its polling policy, which is told by shade and dash.
fn class(row: &Row) -> String {
    let colour = match row.kind {
        Kind::Local => "local",
        Kind::CeilingSleeping => "sleeping",
        Kind::CeilingSpinning => "spinning",
        Kind::Protocol => protocol_class(&row.protocol),
    };
    match row.poll.as_str() {
        "always" => format!("{colour} poll-always"),
        "never" => format!("{colour} poll-never"),
        _ => colour.to_owned(),
    }
}

/// A protocol keeps its colour in every report, over whatever sockets. A merged report has the file's name behind the
/// protocol's.
fn protocol_class(protocol: &str) -> &'static str {
    match protocol.split([' ', '+']).next().unwrap_or_default() {
        "nbd" => "nbd",
        "iscsi" => "iscsi",
        "nvme-tcp" => "nvme-tcp",
        "iser" => "iser",
        "srp" => "srp",
        "nvme-rdma" => "nvme-rdma",
        "aoe" => "aoe",
        "" | "local" => "local",
        _ => "other",
    }
}
