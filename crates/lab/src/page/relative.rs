//! The rows of a study's chart: published figures relative to the study's reference, and measured
//! ones relative to the reference's protocol here.

use super::ratio::{Ratio, Value, protocol_class};
use crate::figure::{self, Labels};
use crate::grid;
use crate::link::KERNEL;
use crate::result::{Comparison, ConfigurationKind, Row};
use crate::suite::{PublishedFigure, Study, StudyChart};

/// The rows of `chart` under a heading for each protocol, the reference's protocol first.
pub(super) fn groups(
    comparison: &Comparison,
    labels: &Labels,
    study: &Study,
    chart: &StudyChart,
) -> Vec<(String, Vec<Ratio>)> {
    let mut rows = measured(comparison, labels, chart);
    for (protocol, label, value) in published(study, chart) {
        // Measured here over the same link: both values are in one row.
        match rows.iter_mut().find(|(known, row)| *known == protocol && row.label == label) {
            Some((_, row)) => row.published = Some(value),
            None => {
                let class = protocol_class(&protocol);
                rows.push((protocol, Ratio { label, class, measured: None, published: Some(value) }));
            }
        }
    }
    let mut groups: Vec<(String, Vec<Ratio>)> = Vec::new();
    for (protocol, row) in rows {
        match groups.iter_mut().find(|(known, _)| *known == protocol) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((protocol, vec![row])),
        }
    }
    groups.sort_by_key(|(protocol, _)| *protocol != chart.reference.protocol);
    groups
}

/// (protocol, label, value) of every figure of the chart.
fn published(study: &Study, chart: &StudyChart) -> Vec<(String, String, Value)> {
    let of_chart = |figure: &&PublishedFigure| {
        let of_volume = chart.volume.as_ref().is_none_or(|volume| figure.label.starts_with(volume.as_str()));
        figure.unit == chart.unit
            && chart.jobs.contains(&figure.job.name)
            && of_volume
            && figure.protocol != "local"
    };
    let figures = || study.figures.iter().filter(of_chart);
    let is_reference = |figure: &&PublishedFigure| {
        (&figure.protocol, &figure.label) == (&chart.reference.protocol, &chart.reference.label)
    };
    let Some(reference) = figures().find(is_reference) else { return Vec::new() };
    let value = |figure: &PublishedFigure| {
        let about = if figure.approximate { "about " } else { "" };
        Value {
            ratio: figure.value / reference.value,
            shown: format!("{about}{} {}", figure::measure(figure.value), figure.unit),
        }
    };
    let label = |figure: &PublishedFigure| {
        let place = chart.volume.as_ref().and_then(|volume| figure.label.strip_prefix(volume.as_str()));
        place.map_or(figure.label.as_str(), |place| place.trim_start_matches(", ")).to_owned()
    };
    figures().map(|figure| (figure.protocol.clone(), label(figure), value(figure))).collect()
}

/// A configuration measured here, with its best result among the chart's jobs.
struct BestDepth<'a> {
    row: &'a Row,
    value: f64,
    protocol: &'a str,
    /// The part of its name that distinguishes it from the protocol's other configurations.
    label: String,
}

fn measured(comparison: &Comparison, labels: &Labels, chart: &StudyChart) -> Vec<(String, Ratio)> {
    let (figure, per_unit) = chart.unit.measured_as();
    let mut all: Vec<BestDepth> = Vec::new();
    let of_volume = |row: &&Row| match (&chart.volume, grid::stripe(row)) {
        (Some(volume), Some(stripe)) => grid::stands_for(volume, stripe),
        _ => true,
    };
    let of_chart = |row: &&Row| row.kind == ConfigurationKind::Protocol && chart.jobs.contains(&row.job.name);
    for row in comparison.rows.iter().filter(of_chart).filter(of_volume) {
        let Some(value) = row.median(figure).filter(|value| *value > 0.0) else { continue };
        let protocol = row.protocol.split(' ').next().unwrap_or_default();
        let best = BestDepth { row, value: value * per_unit, protocol, label: label(row, protocol, labels) };
        match all.iter_mut().find(|known| (known.protocol, &known.label) == (protocol, &best.label)) {
            Some(known) if (best.value > known.value) == chart.unit.more_is_better() => *known = best,
            Some(_) => {}
            None => all.push(best),
        }
    }
    let ratio = |best: &BestDepth| {
        let reference = all.iter().find(|other| is_reference(other, best, chart))?;
        // The job with the best result.
        let job = &best.row.job;
        let label = match chart.jobs.len() {
            1 => best.label.clone(),
            _ => format!("{}, {} × depth {}", best.label, job.numjobs, job.iodepth),
        };
        let shown = format!("{} {}", figure::measure(best.value), chart.unit);
        let measured = Some(Value { ratio: best.value / reference.value, shown });
        let class = protocol_class(best.protocol);
        Some((best.protocol.to_owned(), Ratio { label, class, measured, published: None }))
    };
    all.iter().filter_map(ratio).collect()
}

/// Whether `best` is divided by `other`: the reference's protocol, over its link if the study has
/// links, with the polling policy and from the report of `best`.
fn is_reference(other: &BestDepth, best: &BestDepth, chart: &StudyChart) -> bool {
    // Rows of the kernel's initiator are relative to those of ours.
    let file = |best: &BestDepth| {
        let (_, file) = best.row.protocol.split_once(' ')?;
        (file != KERNEL).then(|| file.to_owned())
    };
    let over_its_link = grid::place(other.row).is_none_or(|place| chart.reference.label.ends_with(place));
    other.protocol == chart.reference.protocol
        && over_its_link
        && other.row.poll == best.row.poll
        && file(other) == file(best)
}

/// The link, or "here" and the part of the row's name after its protocol.
fn label(row: &Row, protocol: &str, labels: &Labels) -> String {
    let label = labels.label(row);
    let rest = label.strip_prefix(protocol).unwrap_or(&label).trim();
    let (rest, by) = rest.strip_prefix(KERNEL).map_or((rest, ""), |rest| (rest, ", kernel"));
    let rest = rest.trim_start_matches(", ");
    let rest = grid::stripe(row).and_then(|stripe| rest.strip_prefix(stripe)).unwrap_or(rest);
    let rest = rest.trim_start_matches(", ");
    match grid::place(row) {
        Some(_) => format!("{rest}{by}"),
        None if rest.is_empty() => "here".to_owned(),
        None => format!("here, {rest}"),
    }
}
