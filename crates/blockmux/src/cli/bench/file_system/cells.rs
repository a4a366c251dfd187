//! The cells of a study on a file system.

use super::kernel::KernelInitiator;
use crate::cli::bench::plan::BenchVolume;
use crate::protocol::{self, Protocol};
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_lab::job::Job;
use blockmux_lab::link::{self, Link, Links};
use blockmux_lab::result::{ConfigurationKind, Row};
use blockmux_lab::suite::Suite;

/// A stripe, and what is before it.
pub(super) struct StudyCell {
    /// Index of the stripe.
    pub(super) stripe: usize,
    /// Number of its members.
    members: u32,
    /// How it is reached; `None` for the stripe itself.
    pub(super) over: Option<StudyPath>,
}

/// How a stripe is reached.
#[derive(Clone, Copy)]
pub(super) struct StudyPath {
    pub(super) protocol: &'static Protocol,
    pub(super) link: Link,
    /// The kernel's initiator, if it is not ours.
    pub(super) kernel: Option<KernelInitiator>,
}

impl StudyPath {
    /// The protocol in rows.
    fn name(&self) -> String {
        match self.kernel {
            Some(_) => link::by_kernel(self.protocol.name),
            None => self.protocol.name.to_owned(),
        }
    }
}

impl StudyCell {
    /// Its name in tables: "aoe, 4-way stripe, 1 Gbit/s, MTU 4132".
    pub(super) fn name(&self) -> String {
        let stripe = link::stripe(self.members);
        match self.over {
            Some(path) => link::row_name(&link::row_name(&path.name(), &stripe), &path.link.to_string()),
            None => link::row_name(LOCAL, &stripe),
        }
    }

    /// The row of a job, without runs.
    pub(super) fn row(&self, job: &Job, stripes: &[BenchVolume], policy: PollPolicy) -> Row {
        let (kind, protocol, poll) = match self.over {
            Some(path) => (ConfigurationKind::Protocol, path.name(), policy.name()),
            None => (ConfigurationKind::Local, String::new(), ""),
        };
        Row {
            configuration: self.name(),
            kind,
            protocol,
            target: stripes.get(self.stripe).map(|stripe| stripe.shown.clone()).unwrap_or_default(),
            poll: poll.to_owned(),
            job: job.clone(),
            report: 0,
            runs: Vec::new(),
        }
    }
}

/// Cells, and those that cannot be measured with the reason.
pub(super) type CellsAndSkipped = (Vec<StudyCell>, Vec<(String, String)>);

/// The cells of a suite: local ones, then those of our initiators, then those of the kernel's
/// `initiators`. `refused` has the speeds that this system cannot limit links to.
pub(super) fn cells(
    suite: &Suite,
    links: &Links,
    refused: &[(Option<u32>, String)],
    initiators: &[KernelInitiator],
) -> CellsAndSkipped {
    let stripes = || links.stripes.iter().enumerate();
    let local = stripes().map(|(stripe, &members)| StudyCell { stripe, members, over: None });
    let protocols: Vec<_> = suite.protocols().filter_map(protocol::by_name).collect();
    let own = protocols.iter().map(|&protocol| (protocol, None));
    let kernel = initiators.iter().flat_map(|&kernel| {
        let of_it =
            protocols.iter().filter(move |protocol| KernelInitiator::of(protocol.name) == Some(kernel));
        of_it.map(move |&protocol| (protocol, Some(kernel)))
    });
    let remote = own.chain(kernel).flat_map(|(protocol, kernel)| {
        stripes().flat_map(move |(stripe, &members)| {
            let paths = links.of(protocol.name).into_iter();
            let paths = paths.map(move |link| Some(StudyPath { protocol, link, kernel }));
            paths.map(move |over| StudyCell { stripe, members, over })
        })
    });
    let (mut all, mut skipped) = (Vec::new(), Vec::new());
    for cell in local.chain(remote) {
        let speed = cell.over.map(|path| path.link.gbit_per_s);
        match refused.iter().find(|(refused, _)| Some(*refused) == speed) {
            Some((_, why)) => skipped.push((cell.name(), why.clone())),
            None => all.push(cell),
        }
    }
    (all, skipped)
}

/// The kernel's initiators of the suite's protocols that this machine has, and those that it lacks
/// with the reason.
pub(super) fn kernel_initiators(suite: &Suite) -> (Vec<KernelInitiator>, Vec<(String, String)>) {
    let (mut all, mut skipped) = (Vec::new(), Vec::new());
    for protocol in suite.protocols() {
        let Some(initiator) = KernelInitiator::of(protocol) else { continue };
        match initiator.probe() {
            Ok(()) => all.push(initiator),
            Err(why) => skipped.push((link::by_kernel(protocol), why)),
        }
    }
    (all, skipped)
}

const LOCAL: &str = "local";

#[cfg(test)]
mod tests {
    use super::*;

    fn names(
        refused: &[(Option<u32>, String)],
        initiators: &[KernelInitiator],
    ) -> (Vec<String>, Vec<(String, String)>) {
        let suite = Suite::by_name("aatrokoski-2007").unwrap().on_file_system().unwrap();
        let (cells, skipped) = cells(&suite, suite.links().unwrap(), refused, initiators);
        (cells.iter().map(StudyCell::name).collect(), skipped)
    }

    #[test]
    fn each_stripe_is_measured_itself_and_with_each_protocol_over_each_link() {
        let (names, skipped) = names(&[], &[]);
        assert_eq!(names.len(), 2 + 2 * 2 * 9);
        assert_eq!(names[..2], ["local, 4-way stripe", "local, 12-way stripe"]);
        assert_eq!(names[2], "aoe, 4-way stripe, 1 Gbit/s, MTU 1500");
        assert_eq!(names[37], "nbd, 12-way stripe, no limit, MTU 9000");
        assert_eq!(skipped, []);
    }

    #[test]
    fn a_speed_that_cannot_be_set_is_named_with_the_reason() {
        let (names, skipped) = names(&[(Some(10), "no tbf".to_owned())], &[]);
        assert_eq!((names.len(), skipped.len()), (2 + 2 * 2 * 6, 12));
        assert!(!names.iter().any(|name| name.contains("10 Gbit/s")));
        assert_eq!(skipped[0], ("aoe, 4-way stripe, 10 Gbit/s, MTU 1500".to_owned(), "no tbf".to_owned()));
    }
    #[test]
    fn the_kernels_initiators_are_measured_over_the_same_links() {
        let (names, _) = names(&[], &[KernelInitiator::Nbd]);
        assert_eq!(names.len(), 38 + 18);
        assert_eq!(names[38], "nbd (kernel), 4-way stripe, 1 Gbit/s, MTU 1500");
    }
}
