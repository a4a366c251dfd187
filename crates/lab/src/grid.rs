//! A study's tables of network links with our measurements in them.
//!
//! ```text
//!                     read            write           rewrite
//!                here 4 12 disks  here 4 12 disks ...
//!   1 Gbit/s, MTU 1500
//! ```
//! A study's figure is found by its label, which names the volume and then the link: "4 disks, 1
//! Gbit/s, MTU 1500". Rows measured here have the link after their protocol: "aoe, 1 Gbit/s, MTU
//! 1500"; the kernel's initiator is named after the protocol: "aoe (kernel), ...". If several
//! stripes were served, theirs stands before the link, and each has a table: "aoe, 4-way stripe, 1
//! Gbit/s, MTU 1500".

use crate::figure::{self, Figure};
use crate::link::{KERNEL, row_name};
use crate::result::{Comparison, ConfigurationKind, Row};
use crate::suite::{PublishedFigure, Study, Unit};

/// One of a study's tables: links as lines and jobs as columns, each with our figures next to the
/// study's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    /// The protocol.
    pub title: String,
    /// Jobs, by name.
    pub jobs: Vec<String>,
    /// Under each job: "here", then the study's volumes.
    pub columns: Vec<String>,
    /// Each line's name and its cells: every column of every job.
    pub lines: Vec<(String, Vec<String>)>,
}

/// The study's tables; empty if nothing was measured over links.
#[must_use]
pub fn grids(comparison: &Comparison, study: &Study) -> Vec<Grid> {
    let mut titles: Vec<(&str, Option<&str>)> = Vec::new();
    for row in comparison.rows.iter().filter(|row| place(row).is_some()) {
        push_new(&mut titles, (row.protocol.as_str(), stripe(row)));
    }
    titles.sort_by_key(|(protocol, _)| protocol.is_empty());
    titles.into_iter().map(|(protocol, stripe)| grid(comparison, study, protocol, stripe)).collect()
}

/// The link that a row was measured over; the stripe of a local row.
pub(crate) fn place(row: &Row) -> Option<&str> {
    let place = behind_protocol(row)?;
    let place = stripe(row).map_or(place, |stripe| place[stripe.len()..].trim_start_matches(", "));
    (place.contains("MTU ") || place.ends_with(STRIPE)).then_some(place)
}

/// The stripe that a row was measured on, if a link follows it.
pub(crate) fn stripe(row: &Row) -> Option<&str> {
    let (stripe, _) = behind_protocol(row)?.split_once(", ")?;
    stripe.ends_with(STRIPE).then_some(stripe)
}

/// Whether a volume of the study, such as "4 disks", stands for the stripe of a row measured here.
pub(crate) fn stands_for(volume: &str, stripe: &str) -> bool {
    // "PS3, 4 disks" is one volume.
    let disks = volume.rsplit(", ").next().unwrap_or_default();
    members(disks).is_some() && members(disks) == members(stripe)
}

fn behind_protocol(row: &Row) -> Option<&str> {
    let protocol = if row.kind == ConfigurationKind::Local { "local" } else { row.protocol.as_str() };
    row.configuration.strip_prefix(protocol)?.strip_prefix(", ")
}

fn grid(comparison: &Comparison, study: &Study, protocol: &str, on: Option<&str>) -> Grid {
    let is_local = protocol.is_empty();
    let is_of_grid =
        |row: &&Row| row.protocol == protocol && place(row).is_some() && (is_local || stripe(row) == on);
    let rows = || comparison.rows.iter().filter(is_of_grid);
    let name = if is_local { "local" } else { protocol };
    // The study's figures stand beside those of both initiators.
    let published_as = name.strip_suffix(KERNEL).unwrap_or(name).trim_end();
    let is_of_volume =
        |figure: &PublishedFigure| on.is_none_or(|on| stands_for(split(&figure.label, is_local).0, on));
    let figures: Vec<&PublishedFigure> = study
        .figures
        .iter()
        .filter(|figure| figure.protocol == published_as && figure.unit == UNIT && is_of_volume(figure))
        .collect();
    let (mut jobs, mut places, mut volumes) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows() {
        push_new(&mut jobs, row.job.name.clone());
        push_new(&mut places, place(row).unwrap_or_default().to_owned());
    }
    // A job may lack figures in the first lines.
    jobs.sort_by_key(|job| study.figures.iter().position(|figure| figure.job.name == *job));
    for figure in &figures {
        let volume = split(&figure.label, is_local).0;
        if places.iter().any(|place| is_of(figure, volume, place, is_local)) {
            push_new(&mut volumes, volume.to_owned());
        }
    }
    let cells = |place_name: &str, job: &String| {
        let own = rows().find(|row| row.job.name == *job && place(row) == Some(place_name));
        let own = own.and_then(|row| row.median(Figure::MbPerSecond)).map(figure::measure);
        let of_job = |figure: &&&PublishedFigure| figure.job.name == *job;
        let there = volumes.iter().map(|volume| {
            let is_it = |figure: &&&PublishedFigure| is_of(figure, volume, place_name, is_local);
            let found = figures.iter().filter(of_job).find(is_it);
            found.map(|figure| figure::measure(figure.value))
        });
        // A test without a rate of ours is among those that were not run, with the reason.
        let own = own.unwrap_or_else(|| NOTHING.to_owned());
        std::iter::once(own).chain(there.map(Option::unwrap_or_default)).collect::<Vec<String>>()
    };
    let lines = places.iter().map(|place| {
        let line = jobs.iter().flat_map(|job| cells(place, job)).collect();
        (place.clone(), line)
    });
    Grid {
        title: on.map_or_else(|| name.to_owned(), |on| row_name(name, on)),
        lines: lines.collect(),
        columns: std::iter::once(HERE.to_owned()).chain(volumes.iter().cloned()).collect(),
        jobs,
    }
}

fn push_new<T: PartialEq>(list: &mut Vec<T>, item: T) {
    if !list.contains(&item) {
        list.push(item);
    }
}

/// The volume and the link in a published figure's label; a local figure's label is its volume.
fn split(label: &str, is_local: bool) -> (&str, &str) {
    if is_local {
        return ("there", label);
    }
    // "PS3, 4 disks" is one volume.
    let at = label.find(" Gbit/s").and_then(|at| label[..at].rfind(", "));
    at.map_or((label, ""), |at| (&label[..at], &label[at + 2..]))
}

/// Whether a figure belongs to this volume, and to the link or stripe of this line.
fn is_of(figure: &PublishedFigure, volume: &str, place: &str, is_local: bool) -> bool {
    let (of, over) = split(&figure.label, is_local);
    let is_there =
        if is_local { members(over).is_some() && members(over) == members(place) } else { over == place };
    of == volume && is_there
}

/// The number at the start of "4 disks" and "4-way stripe".
fn members(text: &str) -> Option<u32> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).map(|end| &text[..end])?;
    digits.parse().ok()
}

const STRIPE: &str = "-way stripe";
const UNIT: Unit = Unit::MbPerSecond;
const HERE: &str = "here";
/// In place of a rate of ours.
const NOTHING: &str = "-";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::{Direction, Run};
    use crate::suite::Suite;

    fn row(configuration: &str, protocol: &str, job: &str, mb_s: u64) -> Row {
        let suite = Suite::by_name("aatrokoski-2007").unwrap();
        let job = suite.rows(1000, 0).into_iter().find(|row| row.job.name == job).unwrap().job;
        let read = Direction { ios: mb_s, bytes: mb_s * 1_000_000, ..Direction::default() };
        Row {
            configuration: configuration.to_owned(),
            kind: if protocol.is_empty() { ConfigurationKind::Local } else { ConfigurationKind::Protocol },
            protocol: protocol.to_owned(),
            target: "mem:1g".to_owned(),
            poll: String::new(),
            job,
            report: 0,
            runs: vec![Run { runtime_ns: 1_000_000_000, read, ..Run::default() }],
        }
    }

    #[test]
    fn published_figures_are_next_to_measured_ones() {
        let rows = vec![
            row("local, 4-way stripe", "", "read", 5000),
            row("local, 12-way stripe", "", "read", 6000),
            row("aoe, 1 Gbit/s, MTU 1500", "aoe", "read", 110),
            row("aoe, 1 Gbit/s, MTU 1500", "aoe", "write", 111),
            row("aoe, no limit, MTU 1500", "aoe", "read", 700),
            row("nbd, 10 Gbit/s, MTU 4608", "nbd", "read", 900),
            row("iscsi", "iscsi", "read", 900),
        ];
        let study = Suite::by_name("aatrokoski-2007").unwrap().to_study();
        let grids = grids(&Comparison::of_rows(rows), &study);
        let titles: Vec<&str> = grids.iter().map(|grid| grid.title.as_str()).collect();
        assert_eq!(titles, ["aoe", "nbd", "local"]);
        let aoe = &grids[0];
        assert_eq!(aoe.jobs, ["read", "write"]);
        assert_eq!(aoe.columns, ["here", "4 disks", "12 disks", "PS3, 4 disks"]);
        assert_eq!(aoe.lines[0].0, "1 Gbit/s, MTU 1500");
        assert_eq!(aoe.lines[0].1, ["110", "47.0", "47.0", "38.0", "111", "23.0", "22.0", "23.0"]);
        assert_eq!(aoe.lines[1].1, ["700", "", "", "", "-", "", "", ""]);
        assert_eq!(grids[1].lines, [("10 Gbit/s, MTU 4608".to_owned(), vec!["900".into(), "113".into()])]);
        assert_eq!(grids[2].lines[1], ("12-way stripe".to_owned(), vec!["6000".into(), "577".into()]));
    }

    #[test]
    fn a_link_without_any_rate_has_its_line() {
        let mut slow = row("aoe, 1 Gbit/s, MTU 1500", "aoe", "read", 110);
        slow.runs.clear();
        let study = Suite::by_name("aatrokoski-2007").unwrap().to_study();
        let grids = grids(&Comparison::of_rows(vec![slow]), &study);
        let cells = ["-", "47.0", "47.0", "38.0"].map(str::to_owned).to_vec();
        assert_eq!(grids[0].lines, [("1 Gbit/s, MTU 1500".to_owned(), cells)]);
    }

    #[test]
    fn each_stripe_that_is_served_has_its_own_table() {
        let rows = vec![
            row("local, 4-way stripe", "", "read", 5000),
            row("local, 12-way stripe", "", "read", 6000),
            row("aoe, 4-way stripe, 1 Gbit/s, MTU 4132", "aoe", "read", 110),
            row("aoe, 12-way stripe, 1 Gbit/s, MTU 4132", "aoe", "read", 111),
            row("nbd, 12-way stripe, 1 Gbit/s, MTU 1500", "nbd", "read", 112),
            row("nbd, 4-way stripe, 1 Gbit/s, MTU 1500", "nbd", "rewrite", 114),
            row("nbd, 4-way stripe, 1 Gbit/s, MTU 9000", "nbd", "read", 115),
            row("aoe (kernel), 12-way stripe, 1 Gbit/s, MTU 4132", "aoe (kernel)", "read", 113),
        ];
        let study = Suite::by_name("aatrokoski-2007").unwrap().to_study();
        let grids = grids(&Comparison::of_rows(rows), &study);
        let titles: Vec<&str> = grids.iter().map(|grid| grid.title.as_str()).collect();
        let own = ["aoe, 4-way stripe", "aoe, 12-way stripe", "nbd, 12-way stripe", "nbd, 4-way stripe"];
        let others = ["aoe (kernel), 12-way stripe", "local"];
        assert_eq!((&titles[..4], &titles[4..]), (&own[..], &others[..]));
        assert_eq!(grids[3].jobs, ["read", "rewrite"], "in the order of the study");
        assert_eq!(grids[0].columns, ["here", "4 disks"], "the PlayStation had no such link");
        let line = |nth: usize| (grids[nth].lines[0].0.as_str(), grids[nth].lines[0].1.join(" "));
        assert_eq!(line(0), ("1 Gbit/s, MTU 4132", "110 106".to_owned()));
        assert_eq!(line(1), ("1 Gbit/s, MTU 4132", "111 72.0".to_owned()));
        assert_eq!(line(2), ("1 Gbit/s, MTU 1500", "112".to_owned()), "the study has no such figure");
        assert_eq!(line(4), ("1 Gbit/s, MTU 4132", "113 72.0".to_owned()));
        assert_eq!(grids[5].lines.len(), 2);
    }
}
