//! What the numbers say, in a few sentences computed from them.

use crate::figure::{self, Figure, Labels};
use crate::job::{Job, Rw};
use crate::result::{Comparison, Kind, Row};

/// One finding: a large figure, whose it is, and where it holds.
pub(super) struct Tile {
    pub(super) about: &'static str,
    pub(super) value: String,
    pub(super) unit: &'static str,
    pub(super) who: String,
    pub(super) sentence: String,
}

/// The findings that the comparison has the rows for. Only protocols are ranked: the local volume and the ceilings
/// are what they are held against.
pub(super) fn tiles(comparison: &Comparison, labels: &Labels) -> Vec<Tile> {
    let groups = comparison.groups();
    let with_protocols = groups.iter().filter(|group| group.iter().any(|row| row.kind == Kind::Protocol));
    let groups: Vec<&Vec<&Row>> = with_protocols.collect();
    let smallest = groups.iter().map(|group| group[0].job.bs).min().unwrap_or(0);
    let small = |group: &&&Vec<&Row>| group[0].job.bs == smallest;
    // At equal depth reads come before writes: they are what most people look for first.
    let reads = |job: &Job| matches!(job.rw, Rw::RandRead);
    // Depth 32 is the depth of the published studies; else whatever is deepest.
    let busy = groups.iter().filter(small).max_by_key(|group| {
        let job = &group[0].job;
        (job.iodepth == 32, reads(job), job.numjobs == 1, job.iodepth)
    });
    let quiet = groups.iter().filter(small).min_by_key(|group| {
        let job = &group[0].job;
        (job.iodepth * job.numjobs, !reads(job))
    });
    let mut tiles = Vec::new();
    if let Some(group) = busy {
        tiles.extend(rate(comparison, labels, group));
    }
    if let Some(group) = quiet {
        tiles.extend(latency(labels, group));
    }
    tiles.extend(throughput(labels, &groups));
    if let Some(group) = busy {
        tiles.extend(processor(labels, group));
    }
    tiles
}

fn rate(comparison: &Comparison, labels: &Labels, group: &[&Row]) -> Option<Tile> {
    let best = Best::of(labels, group, Figure::Iops, true)?;
    let share = comparison.share_of_ceiling(best.row).map(|share| match share {
        share if share >= 1.0 => ", no less than bare sockets with the same messages".to_owned(),
        share => format!(", {} of what bare sockets reach with the same messages", figure::percent(share)),
    });
    Some(Tile {
        about: if best.row.job.bs <= SMALL { "Small I/O" } else { "I/O per second" },
        value: figure::count(best.value),
        unit: "IOPS",
        sentence: format!("{}{}.{}", figure::title(&best.row.job), share.unwrap_or_default(), best.ties),
        who: best.who,
    })
}

fn latency(labels: &Labels, group: &[&Row]) -> Option<Tile> {
    let best = Best::of(labels, group, Figure::Mean, false)?;
    let p99 = best.row.median(Figure::P99).map(|p99| format!(", p99 {} µs", figure::measure(p99)));
    Some(Tile {
        about: "Latency",
        value: figure::measure(best.value),
        unit: "µs mean",
        sentence: format!("{}{}.{}", figure::title(&best.row.job), p99.unwrap_or_default(), best.ties),
        who: best.who,
    })
}

fn throughput(labels: &Labels, groups: &[&Vec<&Row>]) -> Option<Tile> {
    let all = groups.iter().filter_map(|group| Best::of(labels, group, Figure::MbPerSecond, true));
    let best = all.max_by(|a, b| a.value.total_cmp(&b.value))?;
    Some(Tile {
        about: "Throughput",
        value: figure::measure(best.value),
        unit: "MB/s",
        sentence: format!(
            "{}, {:.1} Gbit/s of payload.{}",
            figure::title(&best.row.job),
            best.value * 0.008,
            best.ties
        ),
        who: best.who,
    })
}

fn processor(labels: &Labels, group: &[&Row]) -> Option<Tile> {
    let best = Best::of(labels, group, Figure::CpuPerGbit, false)?;
    let side = |figure| best.row.median(figure).map_or("–".to_owned(), figure::measure);
    let (target, initiator) = (side(Figure::TargetCpu), side(Figure::InitiatorCpu));
    Some(Tile {
        about: "Processor",
        value: figure::measure(best.value),
        unit: "% per Gbit/s",
        sentence: format!(
            "{}: {target} µs of the target and {initiator} µs of the initiator for each I/O.{}",
            figure::title(&best.row.job),
            best.ties
        ),
        who: best.who,
    })
}

struct Best<'a> {
    row: &'a Row,
    value: f64,
    who: String,
    /// A sentence that names those whose runs overlap with the best one's; empty if there are none.
    ties: String,
}

impl<'a> Best<'a> {
    fn of(labels: &Labels, group: &[&'a Row], figure: Figure, most: bool) -> Option<Best<'a>> {
        let rows = || group.iter().filter(|row| row.kind == Kind::Protocol);
        let ranked = rows()
            .filter_map(|row| Some((*row, row.figure(figure)?)))
            .filter(|(_, spread)| spread.median > 0.0);
        let order = |a: f64, b: f64| if most { a.total_cmp(&b) } else { b.total_cmp(&a) };
        let (row, own) = ranked.clone().max_by(|a, b| order(a.1.median, b.1.median))?;
        let near = ranked.filter(|(other, spread)| {
            let overlaps = if most { spread.max >= own.min } else { spread.min <= own.max };
            !std::ptr::eq(*other, row) && overlaps
        });
        let near: Vec<String> = near.map(|(other, _)| labels.label(other)).collect();
        let ties = match near.as_slice() {
            [] => String::new(),
            names => format!(" Their runs overlap: {}.", names.join(", ")),
        };
        Some(Best { row, value: own.median, who: labels.label(row), ties })
    }
}

/// What may be called so, in bytes.
const SMALL: u32 = 16 << 10;
