//! Lines through the figures of jobs that differ only in depth or only in block size.

use super::chart::{ChartLine, LineAxis, Lines, Panel, Point};
use super::families::Group;
use super::ratio::class;
use crate::figure::{self, Figure, Labels};
use crate::job::Job;
use crate::result::{ConfigurationKind, Row};
use crate::units::short;

/// What the jobs of a chart differ in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Along {
    Depth,
    BlockSize,
}

impl Along {
    /// Whether two jobs differ at most in this.
    pub(super) fn joins(self, a: &Job, b: &Job) -> bool {
        let other = |job: &Job| match self {
            Along::Depth => job.bs,
            Along::BlockSize => job.iodepth,
        };
        let rest = |job: &Job| (job.rw, job.program.clone(), figure::modifiers(job));
        other(a) == other(b) && rest(a) == rest(b)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Along::Depth => "depth",
            Along::BlockSize => "block size",
        }
    }

    /// The job in words without this.
    pub(super) fn title(self, job: &Job) -> String {
        match self {
            Along::Depth => {
                let (size, pattern) = (figure::bytes(job.bs.into()), figure::pattern(job.rw));
                format!("{size} {pattern}{}", figure::modifiers(job))
            }
            Along::BlockSize => figure::title_within_size(job),
        }
    }

    fn place(self, job: &Job) -> u32 {
        match self {
            Along::Depth => job.iodepth,
            Along::BlockSize => job.bs,
        }
    }

    fn shown(self) -> fn(u32) -> String {
        match self {
            Along::Depth => |depth| depth.to_string(),
            Along::BlockSize => |bytes| short(bytes.into()),
        }
    }
}

/// The depths or block sizes of jobs, ascending. A report by another program may have depth 0,
/// which does not exist on a logarithmic axis.
pub(super) fn places(family: &[&Group], along: Along) -> Vec<u32> {
    let places = family.iter().map(|group| along.place(&group[0].job));
    let mut places: Vec<u32> = places.filter(|&place| place > 0).collect();
    places.sort_unstable();
    places.dedup();
    places
}

/// A line for each configuration. A local volume is so much faster that the axis could not
/// distinguish the protocols, so it is shown only if there is nothing else.
pub(super) fn lines(labels: &Labels, family: &[&Group], figure: Figure, along: Along) -> Vec<ChartLine> {
    let mut groups: Vec<&&Group> = family.iter().collect();
    groups.sort_by_key(|group| along.place(&group[0].job));
    let is_local = |row: &&Row| row.kind == ConfigurationKind::Local;
    let only_local = family.iter().all(|group| group.iter().all(is_local));
    let shown =
        |row: &&&Row| along.place(&row.job) > 0 && !row.kind.is_ceiling() && (only_local || !is_local(row));
    let mut lines: Vec<ChartLine> = Vec::new();
    for row in groups.into_iter().flat_map(|group| group.iter().filter(shown)) {
        let Some(spread) = row.figure(figure) else { continue };
        let at = along.place(&row.job);
        let point = Point { at, median: spread.median, min: spread.min, max: spread.max };
        let label = labels.label(row);
        match lines.iter_mut().find(|line| line.label == label) {
            Some(line) => line.points.push(point),
            None => lines.push(ChartLine { label, class: class(row), points: vec![point] }),
        }
    }
    lines
}

/// The chart with these panels; empty if there is nothing to draw.
pub(super) fn draw(title: String, family: &[&Group], along: Along, panels: Vec<Panel>) -> String {
    let axis = LineAxis { name: along.name(), places: places(family, along), shown: along.shown() };
    Lines { title, axis, panels }.draw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_of_a_chart_differ_only_along_its_axis() {
        let job = Job { bs: 4096, iodepth: 8, ..Job::default() };
        let deeper = Job { iodepth: 16, ..job.clone() };
        let larger = Job { bs: 8192, ..job.clone() };
        let wider = Job { numjobs: 2, ..job.clone() };
        for (along, other) in [(Along::Depth, &deeper), (Along::BlockSize, &larger)] {
            let alike = [&deeper, &larger, &wider].map(|job_b| along.joins(&job, job_b));
            assert_eq!(alike.iter().filter(|alike| **alike).count(), 1);
            assert!(along.joins(&job, other));
        }
        assert_eq!(Along::Depth.title(&wider), "4 KiB sequential read, 2 connections");
        assert_eq!(Along::BlockSize.title(&wider), "sequential read, depth 8, 2 connections");
    }
}
