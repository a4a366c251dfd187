//! The findings: a few sentences computed from the numbers.

use super::ratio::protocol_class;
use crate::figure::{self, Figure, Labels};
use crate::job::{Job, Rw};
use crate::result::{Comparison, NOISY_SHARE, Row};

/// The winners, and the reasons if no winner is named.
pub(super) struct Findings {
    pub(super) tiles: Vec<Tile>,
    /// Reasons why no winner is named, for some jobs or for all.
    pub(super) doubts: Vec<String>,
}

/// One finding: a large figure, its configuration, and its job.
pub(super) struct Tile {
    pub(super) about: &'static str,
    /// The winner's protocol, as a colour.
    pub(super) class: &'static str,
    pub(super) value: String,
    pub(super) unit: &'static str,
    pub(super) who: String,
    pub(super) sentence: String,
}

/// The findings of a comparison. Protocols and disks are ranked, not the local volume and the
/// ceilings.
/// A winner is named only if there are enough runs and they agree.
pub(super) fn findings(comparison: &Comparison, labels: &Labels) -> Findings {
    let groups = comparison.groups();
    let with_protocols = groups.iter().filter(|group| group.iter().any(|row| row.kind.is_candidate()));
    let groups: Vec<&Vec<&Row>> = with_protocols.collect();
    let smallest = groups.iter().map(|group| group[0].job.bs).min().unwrap_or(0);
    let small = |group: &&&Vec<&Row>| group[0].job.bs == smallest && group[0].job.is_small();
    // At equal depth reads come before writes, because most readers look for them first.
    let reads = |job: &Job| matches!(job.rw, Rw::RandRead);
    // Depth 32 is the depth of the published studies; without it, the greatest depth.
    let busy = groups.iter().filter(small).max_by_key(|group| {
        let job = &group[0].job;
        (job.iodepth == 32, reads(job), job.numjobs == 1, job.iodepth)
    });
    let quiet = groups.iter().filter(|group| group[0].job.bs == smallest).min_by_key(|group| {
        let job = &group[0].job;
        (job.iodepth * job.numjobs, !reads(job))
    });
    let candidates = [
        busy.and_then(|group| rate(comparison, labels, group)),
        quiet.and_then(|group| latency(labels, group)),
        throughput(comparison, labels, &groups),
        busy.and_then(|group| cpu(comparison, labels, group)),
    ];
    let mut findings = Findings { tiles: Vec::new(), doubts: Vec::new() };
    for candidate in candidates.into_iter().flatten() {
        match candidate {
            Ok(tile) => findings.tiles.push(tile),
            Err(doubt) if findings.doubts.contains(&doubt) => {}
            Err(doubt) => findings.doubts.push(doubt),
        }
    }
    findings
}

/// A tile, or the reason why no winner is named.
type Candidate = Result<Tile, String>;

fn rate(comparison: &Comparison, labels: &Labels, group: &[&Row]) -> Option<Candidate> {
    let best = BestResult::of(labels, group, Figure::Iops, true)?;
    if let Some(doubt) = best.doubt {
        return Some(Err(doubt));
    }
    let share = share(comparison, best.row);
    Some(Ok(Tile {
        about: "Small I/O",
        class: protocol_class(&best.row.protocol),
        value: figure::count(best.value),
        unit: "IOPS",
        sentence: format!("{}{share}.{}", figure::title(&best.row.job), best.ties),
        who: best.who,
    }))
}

/// The share of the ceiling as the end of a sentence; empty if it is meaningless.
fn share(comparison: &Comparison, row: &Row) -> String {
    let share = comparison.share_of_ceiling(row).filter(|&share| share <= NOISY_SHARE);
    share.map_or_else(String::new, |share| format!(", {} of its ceiling", figure::percent(share)))
}

fn latency(labels: &Labels, group: &[&Row]) -> Option<Candidate> {
    let best = BestResult::of(labels, group, Figure::Mean, false)?;
    if let Some(doubt) = best.doubt {
        return Some(Err(doubt));
    }
    let p99 = best.row.median(Figure::P99).map(|p99| format!(", p99 {} µs", figure::measure(p99)));
    Some(Ok(Tile {
        about: "Latency",
        class: protocol_class(&best.row.protocol),
        value: figure::measure(best.value),
        unit: "µs mean",
        sentence: format!("{}{}.{}", figure::title(&best.row.job), p99.unwrap_or_default(), best.ties),
        who: best.who,
    }))
}

/// Only of large blocks: the throughput of small blocks is the I/O per second in another unit.
fn throughput(comparison: &Comparison, labels: &Labels, groups: &[&Vec<&Row>]) -> Option<Candidate> {
    let large = groups.iter().filter(|group| !group[0].job.is_small());
    let all = large.filter_map(|group| BestResult::of(labels, group, Figure::MbPerSecond, true));
    let best = all.max_by(|a, b| a.value.total_cmp(&b.value))?;
    if let Some(doubt) = best.doubt {
        return Some(Err(doubt));
    }
    let share = share(comparison, best.row);
    Some(Ok(Tile {
        about: "Throughput",
        class: protocol_class(&best.row.protocol),
        value: figure::measure(best.value),
        unit: "MB/s",
        sentence: format!(
            "{}, {:.1} Gbit/s of payload{share}.{}",
            figure::title(&best.row.job),
            best.value * 0.008,
            best.ties
        ),
        who: best.who,
    }))
}

fn cpu(comparison: &Comparison, labels: &Labels, group: &[&Row]) -> Option<Candidate> {
    let figure = if comparison.has_devices() { Figure::MachinePerGbit } else { Figure::CpuPerGbit };
    let best = BestResult::of(labels, group, figure, false)?;
    if let Some(doubt) = best.doubt {
        return Some(Err(doubt));
    }
    let side = |figure| best.row.median(figure).map_or("–".to_owned(), figure::measure);
    let parts = match figure {
        Figure::MachinePerGbit => format!("{} µs of the whole machine per I/O", side(Figure::MachineCpu)),
        _ => format!(
            "{} µs in the target and {} µs in the initiator per I/O",
            side(Figure::TargetCpu),
            side(Figure::InitiatorCpu)
        ),
    };
    Some(Ok(Tile {
        about: "CPU cost",
        class: protocol_class(&best.row.protocol),
        value: figure::measure(best.value),
        unit: "% of a core per Gbit/s",
        sentence: format!("{}: {parts}.{}", figure::title(&best.row.job), best.ties),
        who: best.who,
    }))
}

struct BestResult<'a> {
    row: &'a Row,
    value: f64,
    who: String,
    /// A sentence that names configurations whose runs overlap with those of the best one; may be
    /// empty.
    ties: String,
    /// The reason why it is not called the winner.
    doubt: Option<String>,
}

impl<'a> BestResult<'a> {
    fn of(labels: &Labels, group: &[&'a Row], figure: Figure, most: bool) -> Option<BestResult<'a>> {
        let rows = || group.iter().filter(|row| row.kind.is_candidate());
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
            names => format!(" Runs overlap with {}.", names.join(", ")),
        };
        let doubt = doubt(labels, group, figure);
        Some(BestResult { row, value: own.median, who: labels.label(row), ties, doubt })
    }
}

/// The reason why no winner is named for this job: too few runs, or runs that differ too much.
/// Every protocol counts, because one with differing runs could have won, too.
fn doubt(labels: &Labels, group: &[&Row], figure: Figure) -> Option<String> {
    let rows = || group.iter().filter(|row| row.kind.is_candidate());
    let job = figure::title(&group[0].job);
    let runs = rows().map(|row| row.runs.len()).min().unwrap_or(0);
    if runs < MIN_RUNS {
        return Some(format!("There are fewer than {MIN_RUNS} runs of each configuration."));
    }
    let spread = |row: &Row| {
        let spread = row.figure(figure).filter(|spread| spread.median > 0.0)?;
        Some((spread.max - spread.min) / spread.median)
    };
    let spreads = rows().filter_map(|row| Some((labels.label(row), spread(row)?)));
    let (who, most) = spreads.max_by(|a, b| a.1.total_cmp(&b.1))?;
    (most >= MAX_SPREAD).then(|| {
        let (figure, most) = (name(figure), figure::percent(most));
        format!("{job}, {figure}: the runs of {who} differ by {most}.")
    })
}

/// A ranked figure in words.
fn name(figure: Figure) -> &'static str {
    match figure {
        Figure::Mean => "latency",
        Figure::MbPerSecond => "throughput",
        Figure::CpuPerGbit | Figure::MachinePerGbit => "CPU time",
        _ => "IOPS",
    }
}

/// Fewer runs name no winner.
const MIN_RUNS: usize = 3;
/// Runs that differ by more than this share of their median name no winner.
const MAX_SPREAD: f64 = 0.15;
